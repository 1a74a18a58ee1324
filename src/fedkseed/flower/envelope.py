"""Envelopes of messages: a task to a client and its reply, in Flower's records and on a worker's socket alike.

    task     "FKSt", version, 0, client u32, seconds f32, digest of the recipe (16 bytes), length of the recipe u32,
             the recipe (TOML, or nothing if the client has it), the message
    reply    "FKSt", version, status, the message, or a text if the status is not DONE

The layout of a reply never changes, so that parties of different versions can read each other's refusals. The text of
a client's refusal is one word, a `Code`; its reason in full stays in the client's own log.
"""

import hashlib
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, StrEnum

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


class Code(StrEnum):
    """The reason for which a client does not answer, as far as a server gets to know it.

    A text would tell counts, column names and paths of the client's machine, and a server could ask for them by recipes
    made to be refused.
    """

    RELEASE = "release"  # the task is of another release of fedkseed
    TASK = "task"  # the task is broken, or asks for something else than its recipe
    RECIPE = "recipe"  # the recipe is broken, or can't be followed over a network
    POLICY = "policy"  # the client's owner does not allow what the recipe asks for
    DATA = "data"  # the client's file can't be used, or holds too little
    MODEL = "model"  # the client's model can't be loaded, or is another than the server's
    WORKER = "worker"  # the client's process has ended, or did not answer in time
    ERROR = "error"  # computing has failed


class RefusedError(FedKSeedError):
    """A refusal by a client: a code for the server, and a text for the client's owner."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


@contextmanager
def refusing(code: Code) -> Iterator[None]:
    """Give the errors that are raised inside a code, unless they have one."""
    try:
        yield
    except RefusedError:
        raise
    except FedKSeedError as error:
        raise RefusedError(code, str(error)) from error


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
        raise RefusedError(
            Code.RELEASE,
            f"the other party speaks version {version} of tasks, this one {VERSION}; install one release of fedkseed",
        )
    return number, memoryview(data)[HEAD.size :]


def digest_of(recipe: bytes) -> bytes:
    """The digest that identifies a recipe, 16 bytes."""
    return hashlib.sha256(recipe).digest()[:16]


def shown(text: str) -> str:
    """A text of another party, on one line and without control characters."""
    return "".join(c if c.isprintable() else " " for c in text)[:MAX_TEXT].strip()
