"""Choice of the code that makes a tensor's directions: by device and family, and compared with the definition first.

numba: CPUs. triton: NVIDIA and AMD GPUs, where Triton is installed. torch: every other device. numpy: families that
none of a device's backends has kernels for; it is the definition, and slow.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import FedKSeedError
from . import reference
from .factors import Basis, Factor
from .families import FAMILIES
from .pool import Pool

MODULES = {"numba": "numba_cpu.backend", "triton": "triton_gpu", "torch": "torch_any", "numpy": "numpy_any"}
FlatPiece = tuple[int, int, Tensor, Tensor, Tensor | None]  # tensor number, start, base, out, addend; all flat


def names(device: torch.device) -> tuple[str, ...]:
    """The names of the backends that work on a device, the fastest first.

    Raises:
        FedKSeedError: tensors on this device hold no numbers.
    """
    if device.type == "meta":
        raise FedKSeedError("weights on meta have no numbers; load the model onto a real device first")
    if device.type == "cpu":
        return "numba", "torch"
    # cuda is PyTorch's name for AMD GPUs, too
    return ("triton", "torch") if device.type == "cuda" and find_spec("triton") else ("torch",)


def load(name: str) -> Any:
    """The backend with the given name, a module; its kernels are compiled when they are first used.

        KERNELS                                        the families that it has kernels for
        plan(pool, directions, coefficients, device)   a sum, prepared for `combine`
        combine(pieces, plan)                          out = base + (addend + Σ_k c_k z_{j_k}) for each FlatPiece
        project(pieces, pool)                          ⟨z_j, v⟩, shape (K,), summed over pieces (tensor, start, v)

    Arguments are checked before, and on one device. Values are those of `reference.py`.
    """
    return import_module(f".{MODULES[name]}", __package__)


def chosen(device: torch.device, family: str) -> str:
    """The name of the first backend of a device that has kernels for a family, or of the definition."""
    return next((name for name in names(device) if family in load(name).KERNELS), "numpy")


def trusted(device: torch.device, pool: Pool, dtype: torch.dtype | None) -> Any:
    """The backend for weights of one type on a device, or for `project` (None).

    Any device but a CPU makes a few numbers of the same kind first, once a process, which must have the bits of the
    definition: no weights are better than wrong ones.

    Raises:
        FedKSeedError: the device gives other bits.
    """
    name = chosen(device, pool.family)
    if device.type != "cpu" and name != "numpy":
        # a transform's kernel depends on the size; the others have one kernel for all sizes
        require_bits(name, device, pool.family, pool.size if pool.transformed else 16, dtype)
    return load(name)


@cache
def require_bits(name: str, device: torch.device, family: str, size: int, dtype: torch.dtype | None) -> None:
    """Compare a backend with `reference.py` across the border of two units, down to subnormal numbers."""
    pool, rng = example(family, size), np.random.default_rng(0)
    # multiples of 16, as most tensors have: Triton compiles another kernel for the rest
    start, stop, tensor = pool.unit - 1024, pool.unit + 1024, 5
    directions = np.arange(size, dtype=np.uint32)
    if dtype is None:
        v = rng.normal(size=stop - start).astype(np.float32)
        expected = reference.project(pool, v, tensor, start)
        got = load(name).project([(tensor, start, torch.from_numpy(v).to(device))], pool)
        compare(name, device, pool, expected.view(np.uint64), got.view(np.uint64))
        return
    for scale in (1, 1e-6, 1e-39):  # ordinary sums, subnormal float16, subnormal float32
        base = torch.from_numpy((scale * rng.normal(size=stop - start)).astype(np.float32)).to(dtype)
        coefficients = (scale * rng.normal(size=size)).astype(np.float32)
        total = reference.total(pool, directions, coefficients, tensor, start, stop)
        expected = reference.combine(base.float().numpy(), total, str(dtype).removeprefix("torch."))
        w, backend = base.to(device), load(name)
        backend.combine([(tensor, start, w, w, None)], backend.plan(pool, directions, coefficients, device))
        words, seen = {4: (np.uint32, torch.int32), 2: (np.uint16, torch.int16)}[w.element_size()]
        compare(name, device, pool, expected.view(words), w.cpu().view(seen).numpy().view(words))


def example(family: str, size: int) -> Pool:
    """A pool with random bits and, for a factored family, with tensor 5 as a matrix of 128 x 80."""
    key, rng = 0x9E3779B97F4A7C15, np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {str(k): (1,) for k in range(5)} | {"5": (128, 80)}
    if not FAMILIES[family].informed:
        return Pool(key, size, family).fitted(shapes)
    u, v = (rng.integers(-127, 128, side).astype(np.int8) for side in ((128, 5), (80, 3)))
    scales = ((rng.random(r) / 64 + 2**-8).astype(np.float32) for r in (5, 3))
    basis = Basis({"5": Factor(128, 80, 0, u, v, *scales)})
    return Pool(key, size, family, basis.digest()).fitted(shapes, basis)


def compare(name: str, device: torch.device, pool: Pool, expected: NDArray, got: NDArray) -> None:
    """Refuse numbers, seen as unsigned words, that differ from the definition's."""
    wrong = np.flatnonzero(expected != got)
    if wrong.size:
        digits = 2 * expected.itemsize
        raise FedKSeedError(
            f"{pool.family} directions made on {device} by {name} are not those of the definition: {wrong.size} of "
            f"{got.size} numbers differ, the first is {got[wrong[0]]:0{digits}x} instead of "
            f"{expected[wrong[0]]:0{digits}x}; use the CPU and report it with the output of `fedkseed directions`"
        )
