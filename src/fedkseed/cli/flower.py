"""The commands of a federation over Flower: server, client."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ..errors import INTERRUPTED
from ..network.flower.compat import require_flower
from ..report.bars import Bars
from ..report.terminal import console
from .network import (
    Authority,
    BasisFile,
    Certs,
    Changes,
    Data,
    Device,
    Idle,
    Key,
    Members,
    Model,
    Output,
    PolicyFile,
    Port,
    RecipeFile,
    State,
    begun,
    owner_of,
    prepare,
)  # fmt: skip
from .options import Json, end_run


def server(
    recipe: RecipeFile,
    certs: Certs,
    output: Output = None,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; 0.0.0.0 for clients on other machines, which needs nginx installed."),
    ] = "127.0.0.1",
    port: Port = 8443,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Serve a federation: wait for clients on other machines, run the rounds with them, save the tuned model.

    The command starts Flower and ends it. It may be stopped or killed at any moment: the same command goes on from the
    last finished round. Clients reach one path of one port, over TLS, with keys that `fedkseed certs` made;
    docs/deployment.md describes the setup.
    """
    require_flower()
    from ..network.flower.server.processes import ServerProcesses
    from ..network.protocol.networked_recipe import largest_request
    from ..recipe.rules import Where
    from ..run.store import Store

    wanted, directory = begun(recipe, changes, output, Where.FLOWER_SERVER)
    try:
        with Bars(wanted.training.rounds) as bars:
            running = ServerProcesses(directory, certs, host, port, largest_request(wanted), bars)
            with running.running():  # no other server works on the run now
                Store(directory).change_recipe(wanted.to_toml())  # [network] may have changed
                bars.note(f"clients connect to port {port} of {host}")
                result = running.run()
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from the last finished round", highlight=False)
        raise typer.Exit(INTERRUPTED) from None
    end_run(result, as_json)


def client(
    server: Annotated[str, typer.Option(help="HOST:PORT of the server.")],
    data: Data,
    key: Key,
    ca: Authority,
    model: Model = None,
    basis: BasisFile = None,
    members: Members = None,
    device: Device = "auto",
    state: State = None,
    policy: PolicyFile = None,
    idle: Idle = 1800,
) -> None:
    """Join a federation as a client: train on a file of this machine for a server elsewhere, until stopped.

    The examples stay on this machine; only the result of training is sent, for FedKSeed one scalar for each direction
    of a local step. The server's recipe says how to train, within the limits of --policy. It can't name a file, a model
    or a function of this machine, and no program that the server sends is run. A recipe that asks for more is refused:
    the server gets one word, as "policy" or "data", and worker.log in the --state directory says why. asked.jsonl there
    has every recipe that was asked for. A lost connection is made again, also after this command was killed and called
    again.
    """
    require_flower()
    from ..network.flower.client.supervisor import Connection, Node

    prepare()
    owner = owner_of(data, model, device, policy, basis, members)
    connection = Connection(server, ca.resolve(), key.resolve())
    node = Node(state or Path("runs") / key.name, connection, owner, idle)
    with suppress(KeyboardInterrupt):
        node.serve(lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True))
    console.print("stopped")
