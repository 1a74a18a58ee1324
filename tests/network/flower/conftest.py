"""A federation of three clients with a file each, and the same run in one process to compare with."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tomllib import loads
from typing import Any

import pytest
from tomli_w import dumps

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from fedkseed import encode, start
from fedkseed.network.flower.client_app import client_app
from fedkseed.network.flower.server_app import serve
from fedkseed.network.protocol.certs import make
from fedkseed.network.protocol.client.policy import Policy
from fedkseed.network.protocol.client.recipe_consent import Owner
from fedkseed.network.protocol.client.task_handler import TaskHandler
from fedkseed.network.protocol.client.training_client import load_client
from fedkseed.network.protocol.envelope import Task, recipe_digest
from fedkseed.network.protocol.networked_recipe import recipe_for_clients, with_network_defaults
from fedkseed.network.protocol.server import clients as remote
from fedkseed.network.protocol.server.client_numbers import ClientNumbers
from fedkseed.network.protocol.signatures import ServerSigning
from fedkseed.recipe.algorithms import ALGORITHMS
from fedkseed.recipe.reading import parse, typed
from fedkseed.recipe.schema import TrustTable
from fedkseed.run import digest_chain as chain
from fedkseed.run.progress import Silent, Standing
from fedkseed.run.simulation import Simulation
from fedkseed.run.store import Store

from ...conftest import recipe_text, rows
from .loopback import NODES as NODES
from .loopback import Deliver, LoopbackGrid, to_apps

# Of clients with a dozen rows, which answer whatever the tests of the network ask for.
POLICY = f"""
[data]
held_out = ["capital"]
secret_batches = false
min_examples = 1
[training]
algorithms = {list(ALGORITHMS)}
min_batch_size = 2
min_steps = 1
max_steps = 1000000
max_numbers = 1000000
"""
OPEN = typed(Policy, loads(POLICY))


def recorded(task: Task) -> Task:
    """The task with a history of no rounds, to whose link its message belongs."""
    link = chain.link(task.stem, chain.digest(task.message))
    return replace(task, links=link, head=chain.head(None, link))


@dataclass
class Notes(Silent):
    """Keeps what was told, and how each client stood."""

    told: list[str] = field(default_factory=list)
    standings: dict[int, list[str]] = field(default_factory=dict)

    def clients(self, numbers: Collection[int], standing: Standing) -> None:
        for number in numbers:
            self.standings.setdefault(number, []).append(standing)

    def note(self, text: str) -> None:
        self.told.append(text)

    def has(self, text: str) -> bool:
        return any(text in line for line in self.told)


def to_workers(workers: Mapping[int, TaskHandler]) -> Deliver:
    """Delivery to the workers of nodes, looked up for each message: a test may put another in one's place."""
    return to_apps({node: client_app(lambda task, _, node=node: workers[node].reply(task).encode()) for node in NODES})


def with_keys(directory: Path, keys: Path) -> Path:
    """A run's directory, with the keys of its clients registered."""
    (directory / "flower").mkdir()
    ServerSigning.write(directory / "flower", keys, [(keys / f"client-{k}.pub").read_text().strip() for k in range(3)])
    return directory


@dataclass
class Setting:
    """What the tests of a network start from."""

    folder: Path
    model: Path
    kept: dict[int, TaskHandler] = field(default_factory=dict)  # models stay loaded from test to test, as in a worker

    @property
    def files(self) -> list[Path]:
        return sorted((self.folder / "data").iterdir())

    def text(self, network: str = "", more: str = "", **changes: str) -> str:
        lines = {"count": 'split = "files"', "cohort": "cohort = 3", "rounds": "rounds = 3"}
        lines |= {"generated": "generated = 0", **changes}
        text = recipe_text(self.model, self.folder / "data", **lines) + f"[network]\n{network}\n{more}"
        # The defaults of a server are written out, so that a run in one process has them, too.
        resolved = with_network_defaults(parse(loads(text)))
        trust = dumps({"trust": resolved.trust.model_dump(exclude_none=True)}) if resolved.trust != TrustTable() else ""
        clip = f"\nclip = {resolved.training.clip}" if resolved.training.clip else ""
        return text.replace("\neps = 1e-3", f"\neps = 1e-3{clip}") + trust

    def first(self, client: int, **changes: str) -> Task:
        """The task of a client in the first round, unsigned and without a history."""
        recipe = parse(loads(self.text(**changes)))
        strategy = Simulation(recipe).strategy
        text = recipe_for_clients(recipe, len(NODES))
        return Task(client, 600.0, recipe_digest(text), text, encode(strategy.server.broadcast(strategy.server.init())))

    def begin(self, directory: Path, network: str = "", **changes: str) -> Path:
        """A new run's directory, as a server makes it."""
        with Store.create(directory, parse(loads(self.text(network, **changes))).to_toml()):
            ClientNumbers.register(directory, range(3))
            return directory

    def owner(self, number: int, **more: Any) -> Owner:
        """The owner of a client, who answers whatever the tests ask for."""
        return Owner(str(self.files[number]), str(self.model), **{"policy": OPEN, **more})

    def workers(self, **more: Any) -> dict[int, TaskHandler]:
        return {node: TaskHandler(partial(load_client, self.owner(k, **more))) for k, node in enumerate(NODES)}

    def deliver(self) -> Deliver:
        self.kept = self.kept or self.workers()
        return to_workers(self.kept)

    def serve(
        self, directory: Path, deliver: Deliver | None = None, nodes: Callable[[], Sequence[int]] = lambda: NODES,
        notes: Notes | None = None,
    ):  # fmt: skip
        return serve(directory, LoopbackGrid(nodes, deliver or self.deliver()), notes or Notes())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loopback Grid answers when it is asked; no need to look seldom."""
    for name, seconds in (("POLL", 0.01), ("LOOK", 0.0), ("PAUSE", 0.01)):
        monkeypatch.setattr(remote, name, seconds)


@pytest.fixture(scope="session")
def setting(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Setting:
    folder = tmp_path_factory.mktemp("network")
    (folder / "data").mkdir()
    for number in range(3):
        part = [row for k, row in enumerate(rows()) if k % 3 == number]
        (folder / "data" / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return Setting(folder, model_folder)


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The keys and certificates of a server and its three clients."""
    make(folder := tmp_path_factory.mktemp("keys"), 3, ["localhost"], 365)
    return folder


@pytest.fixture(scope="session")
def undisturbed(setting: Setting, tmp_path_factory: pytest.TempPathFactory):
    """The same recipe in one process."""
    return start(parse(loads(setting.text())), tmp_path_factory.mktemp("alone") / "run")
