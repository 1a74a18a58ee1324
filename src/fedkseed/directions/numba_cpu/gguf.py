"""Conversion of quantised weights of GGUF files to floating point; the 32 weights of a block share a scale.

Results equal those of the `gguf` package bit for bit: float32, with one rounding to the type of the result.

    Q8_0   scale d (float16), 32 signed bytes q:                      d q
    Q4_0   scale d, 16 bytes with weight i low and i + 16 high:       d (q - 8)
    Q4_1   scale d, least value m (float16), 16 bytes likewise:       d q + m
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .simd import (
    claim,
    from_half,
    item_size,
    kernel,
    load_bytes,
    number_at,
    put_rounded,
    short_at,
    signed_floats,
    words,
)
from .threads import compiled, run

BLOCK = 32  # weights
BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}  # of a block
Q8_0, Q4_0, Q4_1 = range(3)  # the kinds of BYTES
CHUNK = 1 << 9  # blocks that a thread takes at a time


@kernel
def widen_block(kind, at, out, marker):
    half = BLOCK // 2 * item_size(marker)
    d = from_half(words(short_at(at)))
    if kind == Q8_0:
        low, high = load_bytes(at + 2), load_bytes(at + 18)
        low, high = (low ^ words(0x80)) - words(0x80), (high ^ words(0x80)) - words(0x80)
        a, b = signed_floats(low) * d, signed_floats(high) * d
    elif kind == Q4_0:
        nibbles = load_bytes(at + 2)
        a = signed_floats((nibbles & words(15)) - words(8)) * d
        b = signed_floats((nibbles >> words(4)) - words(8)) * d
    else:
        nibbles, m = load_bytes(at + 4), from_half(words(short_at(at + 2)))
        a = signed_floats(nibbles & words(15)) * d + m
        b = signed_floats(nibbles >> words(4)) * d + m
    put_rounded(out, a, marker, False)
    put_rounded(out + half, b, marker, False)


@kernel
def widen(job, marker):
    """Dequantise all blocks of a job's pieces; any number of threads share the work."""
    kind, bytes_, pieces, rows = number_at(job + 8), number_at(job + 16), number_at(job + 24), number_at(job + 32)
    mine, before = claim(job), 0  # chunks are numbered through all pieces
    for row in range(pieces, pieces + 24 * rows, 24):
        source, out, count = number_at(row), number_at(row + 8), number_at(row + 16)
        chunks = (count + CHUNK - 1) // CHUNK
        while mine < before + chunks:
            first = (mine - before) * CHUNK
            for block in range(first, min(first + CHUNK, count)):
                widen_block(kind, source + bytes_ * block, out + BLOCK * item_size(marker) * block, marker)
            mine = claim(job)
        before += chunks


WORKERS = {
    torch.float32: lambda job: widen(job, np.float32(0)),
    torch.bfloat16: lambda job: widen(job, np.uint16(0)),
    torch.float16: lambda job: widen(job, np.int16(0)),
}


def dequantise(parts: Sequence[tuple[int, int, int]], kind: str, dtype: torch.dtype) -> None:
    """Dequantise parts (address of blocks, address of weights, number of blocks)."""
    rows = np.array(parts, np.int64).reshape(-1, 3)
    job: NDArray[np.int64] = np.array([0, list(BYTES).index(kind), BYTES[kind], rows.ctypes.data, len(rows)], np.int64)
    alone = 4 * CHUNK  # blocks that one thread makes before a second has begun
    run(compiled(WORKERS[dtype]), job, min(torch.get_num_threads(), 1 + int(rows[:, 2].sum()) // alone))
