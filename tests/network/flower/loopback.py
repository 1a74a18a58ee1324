"""A Grid in one process, without a network between ServerApp and ClientApps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedkseed.network.flower.messages import numbered

NODES = (111, 222, 333)  # of clients 0, 1 and 2, as Flower names them
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

    def set_run(self, run: Any) -> None:
        raise NotImplementedError("there is one run")

    @property
    def run(self) -> Any:
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
            if (message := self._sent.pop(key, None)) is None:
                continue
            if message.metadata.message_type == MessageType.QUERY:
                yield Message(numbered(number_of(message.metadata.dst_node_id)), reply_to=message)
            else:
                yield from self._deliver(message)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def number_of(node: int) -> int:
    """The number that a node says it has."""
    return NODES.index(node) if node in NODES else node


def to_apps(apps: Mapping[int, ClientApp]) -> Deliver:
    """A function that delivers messages to the ClientApp of their node."""

    def deliver(message: Message) -> Iterable[Message]:
        node = message.metadata.dst_node_id
        context = Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})
        yield apps[node](message, context)

    return deliver


def name_task() -> None:
    """Set the task of this process to number 1.

    1.41: a process keeps its task in the attributes of a class; without a task, no message can be made.
    """
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


def name_message(message: Message) -> str:
    """Give a message its id, and return the id.

    1.41: only Flower's own Grids do so, past the read-only property; without an id, no reply can name the message that
    it answers.
    """
    key = message.metadata.__dict__["_message_id"] = message.object_id
    return key
