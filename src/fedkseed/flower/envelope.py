"""Envelopes of messages: a task to a client and its reply, in Flower's records and on a worker's socket alike.

    task     "FKSt", version, 0, client u32, seconds f32, digest of the recipe (16 bytes), length of the recipe u32,
             the recipe (TOML, or nothing if the client has it), the message
    reply    "FKSt", version, status, the message, or a text if the status is not DONE

The layout of a reply never changes, so that parties of different versions can read each other's refusals.
"""

import hashlib
import math
import struct
from dataclasses import dataclass
from enum import IntEnum

from ..errors import FedKSeedError

MAGIC, VERSION = b"FKSt", 1
HEAD = struct.Struct("<4sBB")
TASK = struct.Struct("<If16sI")  # client, seconds, digest, bytes of the recipe
MAX_RECIPE = 1 << 16  # bytes
MAX_TEXT = 1000  # characters of another party's text that are shown


class Status(IntEnum):
    """The outcome of a task."""

    DONE = 0
    UNPREPARED = 1  # the client does not have the recipe (any more): send the task with the recipe
    REFUSED = 2  # asking again gives the same answer
    FAILED = 3  # asking again may help


@dataclass(frozen=True, slots=True)
class Task:
    """A server's request to a client to answer a message."""

    client: int  # the server's number of the client
    seconds: float  # after which the answer is of no use
    digest: bytes  # of the recipe
    recipe: bytes  # TOML; empty: that of the task before
    message: bytes

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise FedKSeedError(f"a task leaves a client some seconds, got {self.seconds}")
        if len(self.recipe) > MAX_RECIPE:
            raise FedKSeedError(f"a task's recipe has at most {MAX_RECIPE} bytes, got {len(self.recipe)}")
        if self.recipe and self.digest != digest_of(self.recipe):
            raise FedKSeedError("a task's recipe does not have the digest that it names")

    def encode(self) -> bytes:
        head = HEAD.pack(MAGIC, VERSION, 0)
        return head + TASK.pack(self.client, self.seconds, self.digest, len(self.recipe)) + self.recipe + self.message

    @classmethod
    def decode(cls, data: bytes) -> "Task":
        """The task encoded in `data`.

        Raises:
            FedKSeedError: the task is of another version, cut short, or has values that are not allowed.
        """
        _, rest = _open(data)
        if len(rest) < TASK.size:
            raise FedKSeedError(f"a task has at least {HEAD.size + TASK.size} bytes, got {len(data)}")
        client, seconds, digest, size = TASK.unpack_from(rest)
        if size > len(rest) - TASK.size:
            raise FedKSeedError(f"a task announces a recipe of {size} bytes, {len(rest) - TASK.size} are there")
        recipe, message = rest[TASK.size : TASK.size + size], rest[TASK.size + size :]
        return cls(client, seconds, digest, bytes(recipe), bytes(message))


@dataclass(frozen=True, slots=True)
class Reply:
    """A client's reply to a task: the answer, or the reason why there is none."""

    status: Status
    message: bytes = b""  # if DONE
    text: str = ""  # else

    def encode(self) -> bytes:
        body = self.message if self.status is Status.DONE else self.text.encode()
        return HEAD.pack(MAGIC, VERSION, self.status) + body

    @classmethod
    def decode(cls, data: bytes) -> "Reply":
        """The reply encoded in `data`; its text is cut to `MAX_TEXT` printable characters.

        Raises:
            FedKSeedError: the reply is of another version, cut short, or of an unknown status.
        """
        number, rest = _open(data)
        if number not in set(Status):
            raise FedKSeedError(f"a reply has status 0 to {max(Status)}, got {number}")
        status = Status(number)
        if status is Status.DONE:
            return cls(status, bytes(rest))
        return cls(status, text=shown(bytes(rest[: 4 * MAX_TEXT]).decode(errors="replace")))


def _open(data: bytes) -> tuple[int, memoryview]:
    if len(data) < HEAD.size:
        raise FedKSeedError(f"a task or a reply has at least {HEAD.size} bytes, got {len(data)}")
    magic, version, number = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise FedKSeedError(f"no task or reply of fedkseed: it starts with {magic!r} instead of {MAGIC!r}")
    if version != VERSION and not (number in set(Status) and number):  # a refusal of any version can be read
        raise FedKSeedError(
            f"the other party speaks version {version} of tasks, this one {VERSION}; install one release of fedkseed"
        )
    return number, memoryview(data)[HEAD.size :]


def digest_of(recipe: bytes) -> bytes:
    """The digest that identifies a recipe, 16 bytes."""
    return hashlib.sha256(recipe).digest()[:16]


def shown(text: str) -> str:
    """A text of another party, on one line and without control characters."""
    return "".join(c if c.isprintable() else " " for c in text)[:MAX_TEXT].strip()
