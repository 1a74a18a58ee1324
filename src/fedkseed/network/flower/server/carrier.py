"""The carriage of tasks and replies by a Grid of Flower's."""

from collections.abc import Collection, Sequence

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from ....errors import FedKSeedError
from ...protocol.carrier import MAX_MESSAGE, Arrival, Parcel
from ...protocol.envelope import printable
from ..compat import ERRORS, GONE
from ..messages import packed, unpacked


class GridCarrier:
    """The clients behind a Grid."""

    name, largest = "Flower", MAX_MESSAGE

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def nodes(self) -> list[int]:
        return list(self.grid.get_node_ids())

    def send(self, parcels: Sequence[Parcel]) -> list[str | None]:
        messages = [
            Message(packed(one.data), one.node, MessageType.TRAIN, ttl=one.seconds, group_id=str(one.round + 1))
            for one in parcels
        ]
        none: list[str | None] = [None] * len(messages)
        return list(self.grid.push_messages(messages)) or none

    def arrived(self, keys: Collection[str]) -> list[Arrival]:
        return [_arrival(message) for message in self.grid.pull_messages(list(keys))]


def _arrival(message: Message) -> Arrival:
    key, node = message.metadata.reply_to_message_id, message.metadata.src_node_id
    if message.has_error():
        code = message.error.code
        text = ERRORS.get(code, f"Flower's error {code}")
        return Arrival(key, node, trouble=f"{text} ({printable(message.error.reason or '')[:200]})", gone=code == GONE)
    try:
        return Arrival(key, node, unpacked(message))
    except FedKSeedError as error:
        return Arrival(key, node, broken=str(error))
