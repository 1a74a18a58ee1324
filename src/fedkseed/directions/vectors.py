"""The test vectors of the specification: checked by the tests, by `fedkseed directions`, by ports."""

import json
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import reference
from .operations import Piece, combine
from .pool import Pool

BITS = {"float32": torch.uint32, "bfloat16": torch.uint16, "float16": torch.uint16}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load() -> dict[str, Any]:
    """The vector file: Philox calls and materialised weights, as hexadecimal bits."""
    return json.loads(files("fedkseed.directions").joinpath("vectors.json").read_text())


def compute(case: dict[str, Any], backend: str) -> str:
    """The weights of one case, as hexadecimal bits, most significant digit first."""
    pool = Pool(int(case["key"], 16), case["size"], case["family"])
    directions = np.array(case["directions"], np.uint32)
    coefficients = _float32(case["coefficients"])
    start, stop, dtype = case["start"], case["stop"], case["dtype"]
    # the base weights are 2^-10 (p mod 8 − 3), exact in every type, with −0 for 0
    numerators = np.arange(start, stop) % 8 - 3
    base = np.where(numerators == 0, -0.0, numerators / 1024).astype(np.float32)
    addend = _float32(case["addend"]) if "addend" in case else None
    if backend == "numpy":
        total = reference.total(pool, directions, coefficients, case["tensor"], start, stop, addend)
        bits = reference.combine(base, total, dtype)
        bits = bits.view(np.uint32 if dtype == "float32" else np.uint16)
    else:
        w = torch.from_numpy(base).to(DTYPES[dtype])
        more = None if addend is None else torch.from_numpy(addend)
        combine([Piece(case["tensor"], w, w, start, more)], pool, directions, coefficients)
        bits = w.view(BITS[dtype]).numpy()
    digits = 8 if dtype == "float32" else 4
    return "".join(f"{int(b):0{digits}x}" for b in bits)


def _float32(bits: list[str]) -> NDArray[np.float32]:
    return np.array([int(b, 16) for b in bits], np.uint32).view(np.float32)


def check() -> Iterator[tuple[str, int, list[str]]]:
    """(backend, vectors checked, names of those that are wrong) for every backend of this machine."""
    vectors = load()
    backends: dict[str, Callable[[dict[str, Any]], str]] = {
        "numpy": lambda case: compute(case, "numpy"),
        "numba": lambda case: compute(case, "numba"),
    }
    for backend, run in backends.items():
        yield backend, len(vectors["weights"]), [c["name"] for c in vectors["weights"] if run(c) != c["bits"]]
