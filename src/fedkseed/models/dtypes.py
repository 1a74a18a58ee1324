"""The type that weights have when they are used: `auto` is decided by a measurement, once, before anything is digested.

A processor without instructions for 16-bit numbers emulates them: on an EPYC limited to AVX2 (ONEDNN_MAX_CPU_ISA), a
product in bfloat16 takes 9.2 times as long as in float32, with AVX-512 1.2 times, with its own bfloat16 0.21 times.
"""

from collections.abc import Callable
from functools import cache
from timeit import repeat

from ..recipe.schema import Recipe

TOKENS, WIDTH = 128, 1024  # of the product that is timed: 3 ms in float32 on one core
TIMES = 5  # the quickest counts
SLOW = 1.5  # times as long as in float32, from which on a run says so


@cache
def slowness(dtype: str, device: str) -> float:
    """The time of a product of matrices in a type over that in float32, on a device of this machine."""
    import torch

    place = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"

    def quickest(kind: torch.dtype) -> float:
        rows, matrix = (torch.ones(size, WIDTH, dtype=kind, device=place) for size in (TOKENS, WIDTH))
        linear = torch.nn.functional.linear
        times = repeat(lambda: float(linear(rows, matrix)[0, 0]), number=1, repeat=TIMES + 1)  # float waits for a GPU
        return min(times[1:])  # the first one compiles, or makes room

    return quickest(getattr(torch, dtype)) / quickest(torch.float32)


def with_dtype(recipe: Recipe, note: Callable[[str], object]) -> Recipe:
    """The recipe with a type of weights in place of `auto`: bfloat16 if this machine is as quick in it as in float32.

    It is part of the base model's digest, so what is written or sent has the type, and no machine measures again.
    """
    if recipe.model.dtype != "auto":
        return recipe
    ratio = slowness("bfloat16", recipe.model.device)
    dtype = "bfloat16" if ratio <= 1 else "float32"
    note(f"[model] dtype = 'auto' is {dtype} here: bfloat16 takes {ratio:.2g} times as long as float32")
    return recipe.having(model={"dtype": dtype})


def note_if_slow(dtype: str, device: str, note: Callable[[str], object]) -> None:
    """Say that this machine is slow in a type, and how slow."""
    if dtype != "float32" and (ratio := slowness(dtype, device)) >= SLOW:
        note(f"[model] dtype = {dtype!r} takes {ratio:.2g} times as long as float32 here, which needs twice the memory")
