"""A kind of message of your own: a client tells how many seconds each of its steps took.

Every process that sends or reads one imports this file; `encode` and `decode` then know it. The header, the checksum
and the refusal of bytes that do not fit are those of all messages.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkseed import FedKSeedError
from fedkseed.wire import Head, Kind, Run, add_kind


@dataclass(frozen=True, slots=True)
class Timings:
    """Client to server. A record has a run and a round, and checks itself: what was decoded was checked."""

    run: Run
    round: int
    client: int
    seconds: NDArray[np.float32]  # (τ,)

    def __post_init__(self) -> None:
        if not (0 <= self.round < 1 << 32 and 0 <= self.client < 1 << 32):
            raise FedKSeedError(f"a round and a client have 32 bits, got {self.round} and {self.client}")
        if self.seconds.dtype != np.float32 or not (np.isfinite(self.seconds) & (self.seconds >= 0)).all():
            raise FedKSeedError("timings are float32 numbers of seconds, none below 0")


def write(message: Timings) -> tuple[int, Sequence[Any], Sequence[bytes]]:
    """Flags, the numbers of the layout below, and the arrays that follow them, little-endian."""
    return 0, (message.client, message.seconds.size), [message.seconds.astype("<f4").tobytes()]


def sizes(head: Head, fixed: Sequence[Any]) -> list[int]:
    """Bytes of each array."""
    _, count = fixed
    return [4 * count]


def read(head: Head, fixed: Sequence[Any], arrays: Sequence[memoryview]) -> Timings:
    """The record from the same three."""
    client, _ = fixed
    return Timings(head.run, head.round, client, np.frombuffer(arrays[0], "<f4").astype(np.float32))


TIMINGS = add_kind(Kind(128, Timings, "timing report", struct.Struct("<II"), write, sizes, read))
