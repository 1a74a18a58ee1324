"""Stubs: tasks whose large parts, the same for all clients, are files named by their SHA-256.

    stub    key of the task (16 bytes), SHA-256 of its recipe, of its certificate and of its message (32 each; zeros: an
            empty part), then the encoded task without these three parts

A file of a digest never changes, so that any cache may keep it, and a client checks it by its name. The task that is
put together has the same bytes as over any other transport, and the server's signature is of these.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...errors import FedKSeedError
from ..protocol.envelope import HEAD, LINK, MAX_LINKS, TASK, UNSIGNED, Task

KEY, DIGEST = 16, 32  # bytes
NOTHING = bytes(DIGEST)  # in place of the digest of an empty part
PARTS = ("recipe", "certificate", "message")  # in the order of their digests
FIXED = HEAD.size + TASK.size  # bytes with which each task begins
NAMES_END = KEY + DIGEST * len(PARTS)
SMALLEST = NAMES_END + FIXED + len(UNSIGNED)  # bytes of a stub: one of a task without links
LARGEST = SMALLEST + LINK * MAX_LINKS


@dataclass(frozen=True, slots=True)
class Stub:
    """A task in parts."""

    key: bytes
    names: tuple[bytes, ...]  # digest of each of `PARTS`
    frame: bytes  # the encoded task without them

    @classmethod
    def of(cls, key: bytes, data: bytes) -> tuple["Stub", Mapping[bytes, bytes]]:
        """The stub of an encoded task, and the files that it names: digest -> bytes.

        Raises:
            FedKSeedError: the task is not whole.
        """
        task = Task.decode(data)
        parts = [getattr(task, part) for part in PARTS]
        names = tuple(hashlib.sha256(part).digest() if part else NOTHING for part in parts)
        files = {name: part for name, part in zip(names, parts, strict=True) if part}
        return cls(key, names, data[:FIXED] + task.links + task.signature), files

    def encode(self) -> bytes:
        return b"".join((self.key, *self.names, self.frame))

    @classmethod
    def decode(cls, data: bytes) -> "Stub":
        """The stub encoded in `data`.

        Raises:
            FedKSeedError: it is too short or too long.
        """
        if not SMALLEST <= len(data) <= LARGEST:
            raise FedKSeedError(f"a task without its files has {SMALLEST} to {LARGEST} bytes, got {len(data)}")
        data = bytes(data)
        names = tuple(data[at : at + DIGEST] for at in range(KEY, NAMES_END, DIGEST))
        return cls(data[:KEY], names, data[NAMES_END:])

    def task(self, file: Callable[[bytes], bytes]) -> bytes:
        """The whole task, encoded.

        Args:
            file: returns the file of a digest.

        Raises:
            FedKSeedError: a file is another than its name says.
        """
        parts = list[bytes]()
        for what, name in zip(PARTS, self.names, strict=True):
            parts.append(part := b"" if name == NOTHING else file(name))
            if name != NOTHING and hashlib.sha256(part).digest() != name:
                raise FedKSeedError(
                    f"the task's {what} is the file {name.hex()}, and {len(part)} other bytes came under that name: "
                    "a cache on the way is broken, or somebody has changed them"
                )
        links, signature = self.frame[FIXED : -len(UNSIGNED)], self.frame[-len(UNSIGNED) :]
        return b"".join((self.frame[:FIXED], *parts[:2], links, parts[2], signature))
