"""A Grid in one process, without a network between ServerApp and ClientApps, for tests and measurements."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from .compat import name_message, name_task

Deliver: TypeAlias = Callable[[Message], Iterable[Message]]  # a message to a node -> the replies that arrive


class LoopbackGrid(Grid):
    """A Grid that delivers messages at the moment when their replies are asked for.

    Args:
        nodes: returns the nodes that are connected now.
        deliver: delivers a message and returns the replies; see `to_apps`. Tests of faults have their own.
    """

    def __init__(self, nodes: Callable[[], Sequence[int]], deliver: Deliver) -> None:
        self._nodes, self._deliver = nodes, deliver
        self._sent: dict[str, Message] = {}
        name_task()

    def set_run(self, run: Run) -> None:
        raise NotImplementedError("there is one run")

    @property
    def run(self) -> Run:
        raise NotImplementedError("there is no run of Flower's")

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return self._nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        keys = []
        for message in messages:
            key = name_message(message)
            self._sent[key] = message
            keys.append(key)
        return keys

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for key in list(message_ids):
            if key in self._sent:
                yield from self._deliver(self._sent.pop(key))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def to_apps(apps: Mapping[int, ClientApp], configs: Mapping[int, dict[str, bool | float | int | str]]) -> Deliver:
    """A function that delivers messages to the ClientApp of their node, with the node's configuration."""

    def deliver(message: Message) -> Iterable[Message]:
        node = message.metadata.dst_node_id
        context = Context(run_id=1, node_id=node, node_config=configs.get(node, {}), state=RecordDict(), run_config={})
        yield apps[node](message, context)

    return deliver
