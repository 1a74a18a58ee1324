"""Envelopes of messages: a task to a client and its reply, in Flower's records and on a worker's socket alike.

    task     "FKSt", version, 0 (128: keep the model, train nothing), client u32, seconds f32, digest of the recipe (16
             bytes), length of the recipe u32, length of the certificate u16, nonce of the run (16), issued u64, since
             u32, number of links u16, head of the run's history (32), stem of its last link (32), the recipe (TOML, or
             nothing if the client has it), the certificate (DER, of the server, with a recipe only), the links (32
             each), the message, the signature (64)
    reply    "FKSt", version, status; then, if the status is DONE, the client's signature (64) and the message, else a
             text

A signature of zeros stands for none; signatures.py says what is signed. The layout of a refusal never changes, so that
parties of different versions can read each other's. The text of a client's refusal is one word, a `Code`; its reason in
full stays in the client's own log.
"""

import hashlib
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from itertools import pairwise

from ...errors import FedKSeedError, without_controls

MAGIC, VERSION = b"FKSt", 3  # 3: signatures name their audience
HEAD = struct.Struct("<4sBB")
# Client, seconds, digest, bytes of recipe and certificate, nonce, issued, since, links, head, stem.
TASK = struct.Struct("<If16sIH16sQIH32s32s")
ASK, KEEP = 0, 128  # a task's number in the head, in the place of a reply's status
UNSIGNED = bytes(64)  # in place of a signature
NO_NONCE = bytes(16)
MAX_RECIPE = 1 << 16  # bytes
MAX_CERTIFICATE = (1 << 16) - 1  # bytes
LINK = 32  # bytes of a link and of a head
MAX_LINKS = (1 << 16) - 1
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
    BASIS = "basis"  # the client has no basis of directions, or another than the server's
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
    nonce: bytes = NO_NONCE  # of the run
    issued: int = 0  # nanoseconds since 1970, greater from task to task
    certificate: bytes = b""  # the server's, DER; empty: that of the task before
    since: int = 0  # number of rounds before the first link
    links: bytes = b""  # of the run's history up to the state that the message is about, see run_history.py
    head: bytes = bytes(LINK)  # of that history
    stem: bytes = bytes(LINK)  # of its last link, which is made of this and of the broadcast, see run/digest_chain.py
    signature: bytes = UNSIGNED  # the server's
    keep: bool = False  # whether the message is the tuned model of a finished run, to be kept: nothing is trained

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise FedKSeedError(f"a task leaves a client some seconds, got {self.seconds}")
        if len(self.recipe) > MAX_RECIPE:
            raise FedKSeedError(f"a task's recipe has at most {MAX_RECIPE} bytes, got {len(self.recipe)}")
        if self.recipe and self.digest != recipe_digest(self.recipe):
            raise FedKSeedError("a task's recipe does not have the digest that it names")
        if len(self.links) % LINK or len(self.links) > LINK * MAX_LINKS:
            raise FedKSeedError(f"a task has up to {MAX_LINKS} links of {LINK} bytes, got {len(self.links)} bytes")
        if len(self.certificate) > MAX_CERTIFICATE:
            raise FedKSeedError(f"a certificate has at most {MAX_CERTIFICATE} bytes, got {len(self.certificate)}")

    @property
    def done(self) -> int:
        """Rounds in the state that the message is about, by the task's history; −1 for a task without one."""
        return self.since + len(self.links) // LINK - 1

    def encode(self) -> bytes:
        return b"".join((*self._parts(), self.signature))

    def hashed(self) -> bytes:
        """SHA-256 of the encoded task without its signature."""
        made = hashlib.sha256()
        for part in self._parts():  # not joined: messages of weights have gigabytes
            made.update(part)
        return made.digest()

    def _parts(self) -> tuple[bytes, ...]:
        sizes = len(self.recipe), len(self.certificate)
        links = self.since, len(self.links) // LINK, self.head, self.stem
        fixed = TASK.pack(self.client, self.seconds, self.digest, *sizes, self.nonce, self.issued, *links)
        head = HEAD.pack(MAGIC, VERSION, KEEP if self.keep else ASK)
        return head, fixed, self.recipe, self.certificate, self.links, self.message

    @classmethod
    def decode(cls, data: bytes) -> "Task":
        """The task encoded in `data`.

        Raises:
            FedKSeedError: the task is of another version, cut short, or has values that are not allowed.
        """
        number, rest = _open(data)
        fixed = TASK.size + len(UNSIGNED)
        if number not in (ASK, KEEP) or len(rest) < fixed:
            raise FedKSeedError(
                f"a task has status {ASK} or {KEEP} and at least {HEAD.size + fixed} bytes, got status {number} and "
                f"{len(data)} bytes"
            )
        client, seconds, digest, recipe, certificate, nonce, issued, since, count, head, stem = TASK.unpack_from(rest)
        if recipe + certificate + LINK * count > len(rest) - fixed:
            raise FedKSeedError(
                f"a task announces a recipe of {recipe} bytes, a certificate of {certificate} and {count} links of "
                f"{LINK}, {len(rest) - fixed} bytes are there"
            )
        certified = recipe + certificate
        ends = (0, recipe, certified, certified + LINK * count, len(rest) - fixed, len(rest) - TASK.size)
        text, proof, links, message, signature = (bytes(rest[TASK.size + a : TASK.size + b]) for a, b in pairwise(ends))
        about = nonce, issued, proof, since, links, head, stem
        return cls(client, seconds, digest, text, message, *about, signature, number == KEEP)


@dataclass(frozen=True, slots=True)
class Reply:
    """A client's reply to a task: the answer, or the reason why there is none."""

    status: Status
    message: bytes = b""  # if DONE
    text: str = ""  # else
    signature: bytes = UNSIGNED  # the client's, if DONE

    def encode(self) -> bytes:
        body = (self.signature, self.message) if self.status is Status.DONE else (self.text.encode(),)
        return b"".join((HEAD.pack(MAGIC, VERSION, self.status), *body))

    @classmethod
    def decode(cls, data: bytes) -> "Reply":
        """The reply encoded in `data`; its text is cut to `MAX_TEXT` printable characters.

        Raises:
            FedKSeedError: the reply is of another version, cut short, or of an unknown status.
        """
        number, rest = _open(data)
        if number not in set(Status):
            raise FedKSeedError(f"a reply has status 0 to {max(Status)}, got {number}")
        if (status := Status(number)) is not Status.DONE:
            return cls(status, text=printable(bytes(rest[: 4 * MAX_TEXT]).decode(errors="replace")))
        if len(rest) < len(UNSIGNED):
            raise FedKSeedError(f"an answer begins with a signature of {len(UNSIGNED)} bytes, got {len(rest)}")
        return cls(status, bytes(rest[len(UNSIGNED) :]), signature=bytes(rest[: len(UNSIGNED)]))


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


def recipe_digest(recipe: bytes) -> bytes:
    """The digest that identifies a recipe, 16 bytes."""
    return hashlib.sha256(recipe).digest()[:16]


def printable(text: str) -> str:
    """A text of another party, on one line and without control characters."""
    return " ".join(without_controls(text[:MAX_TEXT]).split())
