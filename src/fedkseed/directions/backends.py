"""Choice of the code that makes a tensor's directions: by device and family, and compared with the definition first.

numba: CPUs. triton: NVIDIA and AMD GPUs, where Triton is installed. torch: every other device. numpy: families that
none of a device's backends has kernels for; it is the definition, and slow.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import FedKSeedError
from . import reference
from .factors import Basis, Factor
from .families import FAMILIES
from .pool import Pool

WIDENED = 4  # segments of 16-bit numbers that `Numba.project` holds in float32 at a time, at least: 16 MiB
FlatPiece = tuple[int, int, Tensor, Tensor, Tensor | None]  # tensor number, start, base, out, addend; all flat


class Backend(Protocol):
    """Operations on tensors of one device, whose arguments are already checked; values are those of `reference.py`."""

    @property
    def KERNELS(self) -> Mapping[str, Any]:  # noqa: N802 - a module's constant
        """The families that the backend has kernels for, by name."""
        ...

    def plan(
        self, pool: Pool, directions: NDArray[np.uint32], coefficients: NDArray[np.float32], device: torch.device
    ) -> Any:
        """Prepare a sum for `combine`; one plan can be added to any number of tensors."""
        ...

    def combine(self, pieces: Sequence[FlatPiece], plan: Any) -> None: ...

    def project(self, pieces: Sequence[tuple[int, int, Tensor]], pool: Pool) -> NDArray[np.float64]: ...


class Numba:
    """The backend `numba_cpu`, whose functions take addresses instead of tensors."""

    @property
    def KERNELS(self) -> Mapping[str, Any]:  # noqa: N802 - a module's constant
        from . import numba_cpu

        return numba_cpu.KERNELS

    def plan(
        self, pool: Pool, directions: NDArray[np.uint32], coefficients: NDArray[np.float32], device: torch.device
    ) -> Any:
        from . import numba_cpu

        return numba_cpu.plan(pool, directions, coefficients)

    def combine(self, pieces: Sequence[FlatPiece], plan: Any) -> None:
        from . import numba_cpu

        by_type: dict[torch.dtype, list[tuple[int, int, int, int, int, int]]] = {}
        for tensor, start, base, out, addend in pieces:
            addresses = base.data_ptr(), out.data_ptr(), 0 if addend is None else addend.data_ptr()
            by_type.setdefault(base.dtype, []).append((tensor, start, base.numel(), *addresses))
        for dtype, rows in by_type.items():
            numba_cpu.combine(rows, str(dtype).removeprefix("torch."), plan, torch.get_num_threads())

    def project(self, pieces: Sequence[tuple[int, int, Tensor]], pool: Pool) -> NDArray[np.float64]:
        from . import numba_cpu

        threads = torch.get_num_threads()
        each = max(WIDENED, threads) * numba_cpu.segment_size(pool)
        rows = [(tensor, _widened(v, start, each)) for tensor, start, v in pieces]
        return numba_cpu.project(rows, pool, threads)


def _widened(v: Tensor, start: int, each: int) -> Iterator[tuple[int, int, int]]:
    """The parts (start, count, address) of a vector in float32, cut at multiples of `each`; one lives at a time.

    A copy of a whole output matrix would be twice as large as the matrix, in memory that the system has to clear first.
    """
    first, end = start, start + v.numel()
    while first < end:
        last = end if v.dtype == torch.float32 else min(end, (first // each + 1) * each)
        part = v[first - start : last - start].float()
        yield first, last - first, part.data_ptr()
        first = last


def names(device: torch.device) -> tuple[str, ...]:
    """The names of the backends that work on a device, the fastest first.

    Raises:
        FedKSeedError: tensors on this device hold no numbers.
    """
    match device.type:
        case "cpu":
            return "numba", "torch"
        case "cuda":  # PyTorch's name for AMD GPUs, too
            return ("triton", "torch") if find_spec("triton") else ("torch",)
        case "meta":
            raise FedKSeedError("weights on meta have no numbers; load the model onto a real device first")
        case _:
            return ("torch",)


def load(name: str) -> Backend:
    """The backend with the given name; its kernels are compiled when they are first used."""
    match name:
        case "triton":
            from . import triton_gpu

            return triton_gpu
        case "torch":
            from . import torch_any

            return torch_any
        case "numpy":
            from . import numpy_any

            return numpy_any
        case _:
            return Numba()


def chosen(device: torch.device, family: str) -> str:
    """The name of the first backend of a device that has kernels for a family, or of the definition."""
    return next((name for name in names(device) if family in load(name).KERNELS), "numpy")


def trusted(device: torch.device, pool: Pool, dtype: torch.dtype | None) -> Backend:
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
        w = base.to(device)
        backend = load(name)
        backend.combine([(tensor, start, w, w, None)], backend.plan(pool, directions, coefficients, device))
        words, seen = {4: (np.uint32, torch.int32), 2: (np.uint16, torch.int16)}[w.element_size()]
        compare(name, device, pool, expected.view(words), w.cpu().view(seen).numpy().view(words))


def example(family: str, size: int) -> Pool:
    """A pool with random bits and, for a factored family, with tensor 5 as a matrix of 128 x 80."""
    key, record, rows, columns = 0x9E3779B97F4A7C15, FAMILIES[family], 128, 80
    if record.factored is None:
        return Pool(key, size, family)
    shapes: dict[str, tuple[int, ...]] = {str(k): (1,) for k in range(5)} | {"5": (rows, columns)}
    if not record.factored.informed:
        return Pool(key, size, family).fitted(shapes)
    rng = np.random.default_rng(1)
    u, v = (rng.integers(-127, 128, (n, r)).astype(np.int8) for n, r in ((rows, 5), (columns, 3)))
    left_scale, right_scale = ((rng.random(r) / 64 + 2**-8).astype(np.float32) for r in (5, 3))
    basis = Basis({"5": Factor(rows, columns, 0, u, v, left_scale, right_scale)})
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
