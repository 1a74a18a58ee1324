"""The ClientApp for Flower, which runs in a new process for every message: it hands bytes to the worker and waits."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ...protocol.client.worker_process import ask_worker as to_worker
from ...protocol.envelope import Code, Reply, Status
from ..messages import packed, unpacked

Answer: TypeAlias = Callable[[bytes, Context], bytes]  # bytes of a task, Flower's facts of the client -> of a reply


def client_app(answer: Answer) -> ClientApp:
    """A ClientApp that answers tasks by a given function."""
    made = ClientApp()

    @made.train()
    def train(message: Message, context: Context) -> Message:
        return Message(packed(answer(unpacked(message), context)), reply_to=message)

    return made


def relay(task: bytes, context: Context) -> bytes:
    """Hand a task to the worker of this client, whose directory Flower's configuration of the node names."""
    directory = context.node_config.get("state")
    if not isinstance(directory, str):
        print("this SuperNode was started without --node-config 'state=\"DIRECTORY\"'", file=sys.stderr)
        return Reply(Status.REFUSED, text=Code.WORKER).encode()
    return to_worker(task, Path(directory))


app = client_app(relay)
