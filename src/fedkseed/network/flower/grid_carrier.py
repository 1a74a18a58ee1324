"""The carriage of tasks and replies by Flower's Grid, and the SuperNodes' numbers."""

from collections.abc import Callable, Collection, Iterable

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from ...errors import FedKSeedError
from ..protocol.carrier import MAX_MESSAGE, Arrival, Parcel
from ..protocol.envelope import printable
from .compat import ERRORS, NODE_GONE
from .messages import client_number, packed, unpacked


class GridCarrier:
    """The clients behind a Grid, under their own numbers.

    Flower's id of a SuperNode says nothing about whose rows it has, and may be another after a restart. So each id that
    is new is asked once for its number, the `partition-id` of its --node-config.
    """

    name, largest = "Flower", MAX_MESSAGE

    def __init__(self, grid: Grid, note: Callable[[str], object]) -> None:
        self.grid, self.note = grid, note  # the latter takes lines for whoever runs the server
        self._node_of: dict[int, int] = {}  # client -> SuperNode; the last that has said this number
        self._client_of: dict[int, int] = {}  # SuperNode -> client
        self._questions: dict[str, int] = {}  # id of a question -> SuperNode
        self._tasks: dict[str, tuple[int, int]] = {}  # id of a task that is not answered -> client, SuperNode
        self._reported: set[int] = set()  # SuperNodes whose questions have failed

    def nodes(self) -> list[int]:
        connected = {*self.grid.get_node_ids()}
        unknown = sorted(connected - self._client_of.keys() - {*self._questions.values()})
        about = {"ttl": 60.0, "group_id": "partition-id"}  # seconds for an answer; then it is asked again
        if unknown:
            questions = [Message(packed(b""), node, MessageType.QUERY, **about) for node in unknown]
            self._questions |= zip(self.grid.push_messages(questions), unknown, strict=True)
        for message in self.grid.pull_messages([*self._questions]) if self._questions else ():
            node = self._questions.pop(message.metadata.reply_to_message_id)
            try:
                if message.has_error():
                    raise FedKSeedError(_trouble(message))
                client = client_number(message)
            except FedKSeedError as error:
                if node not in self._reported:
                    self._reported.add(node)
                    self.note(f"SuperNode {node} does not say which client it is: {error}; it is asked again")
                continue
            if (before := self._node_of.get(client)) is not None:
                self.note(f"client {client} is SuperNode {node} now, and was {before}")
            self._node_of[client], self._client_of[node] = node, client
        return sorted(client for client, node in self._node_of.items() if node in connected)

    def dialled(self, node: int) -> str:
        return ""  # a SuperNode dials the SuperLink

    def send(self, parcels: Iterable[Parcel]) -> list[str | None]:
        parcels = [*parcels]
        nodes = [self._node_of[parcel.node] for parcel in parcels]
        messages = [
            Message(packed(parcel.data), node, MessageType.TRAIN, ttl=parcel.seconds, group_id=str(parcel.round + 1))
            for parcel, node in zip(parcels, nodes, strict=True)
        ]
        keys: list[str | None] = [*self.grid.push_messages(messages)] or [None] * len(messages)
        sent = zip(keys, parcels, nodes, strict=True)
        self._tasks |= {key: (parcel.node, node) for key, parcel, node in sent if key is not None}
        return keys

    def arrived(self, keys: Collection[str]) -> list[Arrival]:
        arrivals = [self._arrival(message) for message in self.grid.pull_messages([*keys])]
        for key in keys:
            client, node = self._tasks.get(key, (None, None))
            if client is not None and self._node_of[client] != node:  # the SuperLink would say so after a minute
                del self._tasks[key]
                arrivals.append(Arrival(key, client, trouble="its SuperNode was started again"))
        return arrivals

    def _arrival(self, message: Message) -> Arrival:
        key, node = message.metadata.reply_to_message_id, message.metadata.src_node_id
        self._tasks.pop(key, None)
        client = self._client_of.get(node, node)
        if message.has_error():
            return Arrival(key, client, trouble=_trouble(message), gone=message.error.code == NODE_GONE)
        try:
            return Arrival(key, client, unpacked(message))
        except FedKSeedError as error:
            return Arrival(key, client, broken=str(error))


def _trouble(message: Message) -> str:
    """Flower's error in place of an answer, in words."""
    text = ERRORS.get(message.error.code, f"Flower's error {message.error.code}")
    return f"{text} ({printable(message.error.reason or '')[:200]})"
