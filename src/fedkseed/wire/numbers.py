"""The precision of numbers that travel: `[training] wire`.

    wire      coefficients, probabilities    scalar gradients
    exact     float32                        float32
    compact   8 bits each (int8.py)          bfloat16
    sign      8 bits each                    one bit, its sign

Scalar gradients are rounded before a client applies them, so that both sides hold the same values: to a multiple of
`GRID`, at most `LARGEST`, and then as they travel. So the server adds up integers, and a sum has one value in any order
(strategies/sums.py). The scalar of a probe that moved nothing, because a loss was not finite, is NaN.

Source of signs: Cai et al., 2025, https://arxiv.org/abs/2501.17610 (there a vote of clients along one direction)
"""

import math

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError
from .int8 import compact

WIRES = ("exact", "compact", "sign")
# The grid of ρ, with any wire. A loss of about 8 in float32 is a multiple of 2^−21, so with an eps of 5e-4 a ρ is a
# multiple of 5e-4: the grid is finer by a factor of 30. All numbers of bfloat16 from 2^−8 on lie on it.
GRID = 2.0**-16
LARGEST = 2.0**20  # the range of ρ, also where a recipe sets no clip
MAX_SCALARS = 1 << 24  # of one upload: 64 MB
PART = 1 << 16  # scalars that are checked at once: a check makes four copies of them
NAN = 0x7FC00000  # the one NaN that travels: bits of a float32, their upper half as bfloat16


def rounded(numbers: NDArray[np.floating], wire: str) -> NDArray[np.float32]:
    """Coefficients or probabilities as they travel, shape (n,)."""
    return numbers.astype(np.float32) if wire == "exact" else compact(numbers)


def scalar(found: float, clip: float, wire: str) -> float:
    """The scalar gradient ρ that a client applies and sends, a multiple of GRID; NaN if there is none.

    It is at most `clip` in size, and at most LARGEST. With signs, ρ is ±1, or NaN instead of 0: such a probe does not
    show a direction of descent.
    """
    if not math.isfinite(found):
        return math.nan
    most = min(clip, LARGEST)
    nearest = round(min(max(found, -most), most) / GRID) * GRID
    if abs(nearest) > most:  # the clip is no multiple of GRID: takes the next smaller one
        nearest -= math.copysign(GRID, nearest)
    clipped = np.float32(nearest)
    if wire == "sign":
        return math.copysign(1.0, clipped) if clipped else math.nan
    if wire == "compact":
        clipped = bfloat16(clipped)
        if abs(clipped) > most:  # takes the next smaller number: one less in the upper 16 bits
            clipped = (clipped.view(np.uint32) - np.uint32(1 << 16)).view(np.float32)
    return float(clipped)


def scalars(found: NDArray[np.floating], wire: str = "exact") -> NDArray[np.float32]:
    """Scalar gradients as they travel without a clip, shape (n,)."""
    return np.array([scalar(rho, math.inf, wire) for rho in found.tolist()], np.float32)


def bfloat16(number: np.float32) -> np.float32:
    """A float32 rounded half to even to its upper 16 bits; a number that is too large becomes infinite."""
    bits = number.view(np.uint32)
    return (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) & np.uint32(0xFFFF0000)).view(np.float32)


def packed_scalars(count: int, wire: str, skipped: bool) -> int:
    """The bytes that `count` scalar gradients take."""
    return {"exact": 4 * count, "compact": 2 * count, "sign": -(-count // 8) * (1 + skipped)}[wire]


def pack_scalars(scalars: NDArray[np.float32], wire: str) -> bytes:
    """Pack rounded scalar gradients; with signs, a second row of bits follows if some are NaN."""
    none = np.isnan(scalars)
    if wire == "sign":
        rows = [scalars < 0, none] if none.any() else [scalars < 0]
        return b"".join(np.packbits(row, bitorder="little").tobytes() for row in rows)
    bits = np.where(none, np.uint32(NAN), scalars.view(np.uint32))
    return bits.astype("<u4").tobytes() if wire == "exact" else (bits >> np.uint32(16)).astype("<u2").tobytes()


def unpack_scalars(data: bytes | memoryview, count: int, wire: str, skipped: bool) -> NDArray[np.float32]:
    """Up to MAX_SCALARS scalar gradients in as many bytes as `packed_scalars` says, if `pack_scalars` makes them."""
    size = packed_scalars(count, wire, skipped)
    if count > MAX_SCALARS or len(data) != size:  # a bit becomes 4 bytes, and more
        raise FedKSeedError(
            f"{count:,} scalar gradients, at most {MAX_SCALARS:,}, take {size:,} bytes; got {len(data):,}"
        )
    if wire == "exact":
        scalars = np.frombuffer(data, "<u4", count).astype(np.uint32).view(np.float32)
    elif wire == "compact":
        scalars = (np.frombuffer(data, "<u2", count).astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        rows = np.unpackbits(np.frombuffer(data, np.uint8).reshape(1 + skipped, -1), axis=1, bitorder="little")
        scalars = np.where(rows[0, :count], np.float32(-1), np.float32(1))
        if skipped:
            scalars[rows[1, :count] == 1] = np.nan
    if pack_scalars(scalars, wire) != bytes(data) or (skipped and not np.isnan(scalars).any()):
        raise FedKSeedError("a message's scalar gradients have a NaN or a bit that is not allowed")
    return scalars


def require_rounded(scalars: NDArray[np.float32], wire: str) -> None:
    """Refuse scalar gradients beyond LARGEST, or not rounded for this wire."""
    if scalars.dtype != np.float32 or scalars.ndim != 1:
        raise FedKSeedError(f"scalar gradients must be a row of float32, got {scalars.dtype} of shape {scalars.shape}")
    for at in range(0, len(scalars), PART):
        found = scalars[at : at + PART]
        found = found[~np.isnan(found)]
        if beyond := int((np.abs(found) > LARGEST).sum()):
            raise FedKSeedError(f"scalar gradients must be up to {LARGEST:g} or NaN, got {beyond} beyond")
        if (found % np.float32(GRID)).any():
            raise FedKSeedError(f"scalar gradients must be rounded to multiples of {GRID:g} first")
        if wire == "compact" and (found.view(np.uint32) & np.uint32(0xFFFF)).any():
            raise FedKSeedError("scalar gradients that travel compact must be rounded to bfloat16 first")
        if wire == "sign" and (np.abs(found) != 1).any():
            raise FedKSeedError("scalar gradients that travel as signs are 1 or -1")


def pack_bits(numbers: NDArray[np.uint32], width: int) -> bytes:
    """Pack whole numbers below 2^width, lowest bit first, without gaps."""
    bits = np.unpackbits(numbers.astype("<u4").view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")[:, :width]
    return np.packbits(bits, bitorder="little").tobytes()


def unpack_bits(data: bytes | memoryview, count: int, width: int) -> NDArray[np.uint32]:
    """The `count` numbers below 2^width in ⌈count · width / 8⌉ bytes, whose last bits must be 0."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits[count * width :].any():
        raise FedKSeedError("a message has bits after the last of its numbers that are not 0")
    rows = np.zeros((count, 32), np.uint8)
    rows[:, :width] = bits[: count * width].reshape(count, width)
    return np.packbits(rows, axis=1, bitorder="little").view("<u4").ravel().astype(np.uint32)
