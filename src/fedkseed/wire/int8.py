"""Numbers in 8 bits each, with one scale a block.

A block of up to 128 numbers travels as a scale s (float32) and signed codes q (int8): the numbers are q s. The
largest of a block has the code 127, so a number is off by at most 1/254 of it.
"""

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError

BLOCK = 128  # numbers that share a scale: 1 byte and 1/32 a number
LARGEST = 127
LOW_BITS = np.uint32(0xFF)  # of a scale, which are 0
CAP = np.float32(np.finfo(np.float32).max / LARGEST).view(np.uint32) & ~LOW_BITS  # bits of the largest scale
SMALLEST = np.float32(1e-30)  # a block whose largest is below becomes 0: its scale would be subnormal


def compact(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """The nearest numbers that `pack` can carry, shape (n,); compacting them again changes nothing.

    Raises:
        FedKSeedError: one is NaN or infinite.
    """
    if not np.isfinite(values).all():
        raise FedKSeedError("only finite numbers can travel as 8 bits each")
    scales, codes = _codes(np.asarray(values, np.float32).reshape(-1))
    return _numbers(scales, codes)[: np.size(values)]


def pack(values: NDArray[np.float32]) -> bytes:
    """Pack numbers that were compacted: the scales, then the codes; `packed_size(n)` bytes."""
    scales, codes = _codes(values)
    return scales.astype("<f4").tobytes() + codes.reshape(-1)[: values.size].tobytes()


def packed_size(count: int) -> int:
    """The bytes that `count` packed numbers take."""
    return 4 * -(-count // BLOCK) + count


def unpack(data: bytes | memoryview, count: int) -> NDArray[np.float32]:
    """The numbers in `packed_size(count)` bytes; those that `pack` never makes are refused."""
    blocks = -(-count // BLOCK)
    scales = np.frombuffer(data, "<f4", blocks).astype(np.float32)
    codes = np.pad(np.frombuffer(data, np.int8, count, 4 * blocks), (0, -count % BLOCK)).reshape(-1, BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):
        values = _numbers(scales, codes)[:count]
        right = bool(np.isfinite(values).all()) and pack(values) == bytes(data)
    if not right:
        raise FedKSeedError("a message's compact numbers have a scale or a code that is not allowed")
    return values


def _codes(values: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """The scales, shape (blocks,), and the codes, shape (blocks, BLOCK)."""
    padded = np.pad(values, (0, -values.size % BLOCK)).reshape(-1, BLOCK)
    largest = np.abs(padded).max(1, initial=0)
    # The lowest 8 bits of a scale are 0, rounded up: then every q s is exact in float32, and 127 s, too,
    # so that codes and scales found from the numbers are those they were made of.
    bits = (largest / np.float32(LARGEST)).view(np.uint32)
    scales = np.minimum((bits + LOW_BITS) & ~LOW_BITS, CAP).view(np.float32)
    scales[largest < SMALLEST] = 0
    safe = np.where(scales > 0, scales, np.float32(1))[:, None]
    codes = np.where(scales[:, None] > 0, np.rint(padded / safe).clip(-LARGEST, LARGEST), 0)
    return scales, codes.astype(np.int8)


def _numbers(scales: NDArray[np.float32], codes: NDArray[np.int8]) -> NDArray[np.float32]:
    return (scales[:, None] * codes).astype(np.float32).reshape(-1)
