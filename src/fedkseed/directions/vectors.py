"""The test vectors of the specification, for the tests, for `fedkseed directions` and for ports."""

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import FedKSeedError, first_line
from . import backends, reference
from .factors import Basis, Factor
from .pool import Pool

BITS = {"float32": torch.uint32, "bfloat16": torch.uint16, "float16": torch.uint16}


def load() -> dict[str, Any]:
    """The vector file; all its numbers are hexadecimal bits."""
    return json.loads(files("fedkseed.directions").joinpath("vectors.json").read_text())


def weights(case: dict[str, Any], backend: str, device: str = "cpu") -> str:
    """The weights base + (addend + Σ c z) of one case in bits, 8 digits a float32 and 4 a 16-bit weight.

    backend: "numpy", the definition, or one of `backends.names`.
    """
    pool, (directions, coefficients) = _pool(case), _coefficients(case)
    start, stop, dtype = case["start"], case["stop"], case["dtype"]
    # the base weights are 2^-10 (p mod 8 − 3), exact in every type, with −0 for 0
    numerators = np.arange(start, stop) % 8 - 3
    base = np.where(numerators == 0, -0.0, numerators / 1024).astype(np.float32)
    w = torch.from_numpy(base).to(getattr(torch, dtype)).to(device)
    more = torch.from_numpy(_float32(case["addend"])).to(device) if "addend" in case else None
    kernels = backends.load(backend)
    kernels.combine([(case["tensor"], start, w, w, more)], kernels.plan(pool, directions, coefficients, w.device))
    return "".join(f"{int(b):0{2 * w.itemsize}x}" for b in w.cpu().view(BITS[dtype]).numpy())


def projection(case: dict[str, Any], backend: str, device: str = "cpu") -> str:
    """The K inner products with v_p = 2^-10 (p mod 13 − 6), 16 digits a float64."""
    pool, start = _pool(case), case["start"]
    v = ((np.arange(start, case["stop"]) % 13 - 6) / 1024).astype(np.float32)
    products = backends.load(backend).project([(case["tensor"], start, torch.from_numpy(v).to(device))], pool)
    return "".join(f"{int(b):016x}" for b in products.view(np.uint64))


def philox(case: dict[str, Any], backend: str, device: str = "cpu") -> str:
    """The four words of one counter and key; kernels show theirs through the weights they make."""
    counter, key = ([int(word, 16) for word in case[name]] for name in ("counter", "key"))
    return "".join(f"{int(word[0]):08x}" for word in reference.philox(tuple(counter), (key[0], key[1])))


SECTIONS = {"philox": philox, "weights": weights, "projections": projection}


def cases_of(backend: str) -> list[tuple[str, dict[str, Any]]]:
    """The cases (section, case) of random words, and of the families that a backend has kernels for."""
    families, vectors = backends.load(backend).KERNELS, load()
    return [(s, case) for s in SECTIONS for case in vectors[s] if case.get("family", "gaussian") in families]


def check(device: str = "cpu") -> Iterator[tuple[str, int, list[str]]]:
    """Results (backend, vectors checked, names of wrong ones) of the definition and of the backends of a device.

    Raises:
        FedKSeedError: the device can't be used on this machine.
    """
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # what PyTorch raises varies with its build
        raise FedKSeedError(f"can't use the device {device!r}: {first_line(error)}") from error
    for backend in ("numpy", *backends.names(torch.device(device))):
        cases = cases_of(backend)
        wrong = [case["name"] for section, case in cases if SECTIONS[section](case, backend, device) != case["bits"]]
        yield backend, len(cases), wrong


def _pool(case: dict[str, Any]) -> Pool:
    """The pool of a case; if it is of a factored family, with its tensor's shape, and factors in rows."""
    pool = Pool(int(case["key"], 16), case["size"], case["family"], bytes.fromhex(case.get("basis", "")))
    basis, tensor = None, case["tensor"]
    if pool.informed:
        left, right = (np.array(case[side], np.int8) for side in ("left", "right"))
        scales = (_float32(case[side]) for side in ("left scale", "right scale"))
        basis = Basis({f"{tensor:04}": Factor(len(left), len(right), 0, left, right, *scales)})
    return pool.fitted({f"{k:04}": case.get("shape", ()) if k == tensor else () for k in range(tensor + 1)}, basis)


def _coefficients(case: dict[str, Any]) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    if case["directions"] == "all":  # c_j = 2^-24 (40503 (j + 1) mod 65536 − 32768), exact in float32
        j = np.arange(case["size"], dtype=np.int64)
        return _pool(case).dense((40503 * (j + 1) % 65536 - 32768) / 2**24)
    return np.array(case["directions"], np.uint32), _float32(case["coefficients"])


def _float32(bits: list[str]) -> NDArray[np.float32]:
    return np.array([int(b, 16) for b in bits], np.uint32).view(np.float32)
