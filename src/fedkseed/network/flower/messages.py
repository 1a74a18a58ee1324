"""Packing of bytes into Flower's messages."""

from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from ...errors import FedKSeedError

RECORD, KEY = "fedkseed", "b"  # one record of one value: the fewest objects that Flower sends


def packed(data: bytes) -> RecordDict:
    """A record with bytes, as the content of one of Flower's messages."""
    return RecordDict({RECORD: ConfigRecord({KEY: data})})


def unpacked(message: Message) -> bytes:
    """The bytes in a message that holds a record of `packed`.

    Raises:
        FedKSeedError: the message holds something else.
    """
    record: Any = message.content.get(RECORD) if message.has_content() else None
    data = record.get(KEY) if isinstance(record, ConfigRecord) else None
    if not isinstance(data, bytes):
        raise FedKSeedError(f"expected a message with bytes under {RECORD!r}, {KEY!r}; is it of another Flower app?")
    return data
