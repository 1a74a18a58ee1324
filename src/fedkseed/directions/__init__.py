"""Directions z_0 … z_{K-1} that everyone generates from one key. docs/directions.md is the specification.

families.py: which kinds there are. pool.py: what a pool is. reference.py: the definition in NumPy. operations.py: what
is done with directions, on PyTorch tensors. backends.py: who does it, by device and family: numba_cpu/, triton_gpu.py,
torch_any.py, numpy_any.py. A server needs neither PyTorch nor Numba.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import reference
from .families import FAMILIES, Family, add_family
from .pool import BLOCK, Pool

if TYPE_CHECKING:
    from .operations import accumulate_, materialize, project

__all__ = [
    "BLOCK",
    "FAMILIES",
    "Family",
    "Pool",
    "accumulate_",
    "add_family",
    "materialize",
    "project",
    "reference",
]


def __getattr__(name: str) -> Any:
    """Import the operations, and PyTorch with them, when first used."""
    if name not in ("accumulate_", "materialize", "project"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".operations", __name__), name)
