"""Packing of bytes, and of a client's number, into Flower's messages."""

from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from ...errors import FedKSeedError

RECORD, BYTES, NUMBER = "fedkseed", "b", "partition-id"  # one record of one value: the fewest objects that Flower sends


def packed(data: bytes) -> RecordDict:
    return RecordDict({RECORD: ConfigRecord({BYTES: data})})


def unpacked(message: Message) -> bytes:
    """The bytes in a message that holds a record of `packed`.

    Raises:
        FedKSeedError: the message holds something else.
    """
    data = _value(message, BYTES)
    if not isinstance(data, bytes):
        raise FedKSeedError(f"expected a message with bytes under {RECORD!r}, {BYTES!r}; is it of another Flower app?")
    return data


def numbered(client: Any) -> RecordDict:
    """A record with a client's number; anything else than a number is left out."""
    return RecordDict({RECORD: ConfigRecord({NUMBER: client} if isinstance(client, int) else {})})


def client_number(message: Message) -> int:
    """The number in a message that holds a record of `numbered`.

    Raises:
        FedKSeedError: there is none.
    """
    number = _value(message, NUMBER)
    if not isinstance(number, int) or number < 0:
        raise FedKSeedError("start it with --node-config 'partition-id=K …', K = 0 for the first client")
    return number


def _value(message: Message, name: str) -> Any:
    record: Any = message.content.get(RECORD) if message.has_content() else None
    return record.get(name) if isinstance(record, ConfigRecord) else None
