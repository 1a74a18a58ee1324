"""The ClientApp for Flower: hands each task to the worker of this client, which keeps the model loaded.

Flower starts a new process for every message. That process reads the SuperNode's --node-config, starts a worker if none
runs, hands it the bytes, and waits. All checks of a task, its signature and the owner's policy among them, are the
worker's (network/protocol/client).
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ...errors import FedKSeedError
from ..protocol.certs import require_identity
from ..protocol.client.recipe_consent import SETTINGS, OwnerSettings, owner_of
from ..protocol.client.worker_process import ask_worker, stop_worker
from ..protocol.envelope import Code, Reply, Status
from .messages import numbered, packed, unpacked

# All keys of --node-config. Flower's simulation sets the first two itself.
KEYS = {
    "partition-id", "num-partitions", "data", "state", "model", "device", "policy", "basis", "members", "key", "ca",
    "idle",
}  # fmt: skip


def client_app(answer: Callable[[bytes, Context], bytes]) -> ClientApp:
    """A ClientApp that answers tasks by a function of a task's bytes and Flower's facts of the client."""
    answering = ClientApp()

    @answering.train()
    def train(message: Message, context: Context) -> Message:
        return Message(packed(answer(unpacked(message), context)), reply_to=message)

    @answering.query()
    def partition(message: Message, context: Context) -> Message:
        """Say which client this is: Flower's own id of a SuperNode is a random number."""
        return Message(numbered(context.node_config.get("partition-id")), reply_to=message)

    return answering


def answer(task: bytes, context: Context) -> bytes:
    """The reply of this client's worker to a task."""
    try:
        directory = prepare(context.node_config)
    except FedKSeedError as error:  # for the client's owner; a server gets one word
        print(f"fedkseed: {error}", file=sys.stderr, flush=True)
        return Reply(Status.REFUSED, text=Code.WORKER).encode()
    return ask_worker(task, directory)


def prepare(config: Mapping[str, Any]) -> Path:
    """Write a SuperNode's --node-config down as the settings of its worker, and return the worker's directory.

    A worker that runs with other settings is ended.

    Raises:
        FedKSeedError: a value is missing or unknown, or names a file that is not there.
    """
    if unknown := config.keys() - KEYS:
        raise FedKSeedError(f"--node-config has no {sorted(unknown)}; it knows {sorted(KEYS)}")
    if missing := [name for name in ("data", "state") if not config.get(name)]:
        raise FedKSeedError(f"--node-config lacks {missing}: data is this client's file, state a directory of its own")
    directory, key, ca = Path(str(config["state"])).expanduser().resolve(), _path(config, "key"), _path(config, "ca")
    model = str(config["model"]) if "model" in config else None
    files = (_path(config, name) for name in ("policy", "basis", "members"))
    owner = owner_of(str(config["data"]), model, str(config.get("device", "auto")), *files)
    if key is not None and ca is not None:
        require_identity(ca, key)
    settings = OwnerSettings(owner, config.get("idle", 1800), key and str(key), ca and str(ca))
    if not (directory / SETTINGS).exists() or OwnerSettings.read(directory) != settings:
        stop_worker(directory)
        settings.write(directory)
    return directory


def _path(config: Mapping[str, Any], name: str) -> Path | None:
    """The path under a name of --node-config, so that it holds in any directory; None if there is none."""
    return Path(str(config[name])).expanduser().resolve() if name in config else None


app = client_app(answer)
