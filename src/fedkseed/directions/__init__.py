"""Directions z_0 … z_{K-1} that every party generates from one key. docs/directions.md is the specification.

    families.py      the families of directions
    pool.py          a pool: the K directions of one key
    reference.py     the definition, in NumPy
    operations.py    operations on directions and PyTorch tensors
    backends.py      choice of the code that does them, by device and family:
                     numba_cpu/, triton_gpu.py, torch_any.py or numpy_any.py

A server needs neither PyTorch nor Numba.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import reference
from .families import FAMILIES, Family, add_family
from .pool import BLOCK, Pool

if TYPE_CHECKING:
    from .operations import accumulate_, materialize, project

__all__ = ["BLOCK", "FAMILIES", "Family", "Pool", "accumulate_", "add_family", "materialize", "project", "reference"]


VERSION = 1  # of docs/directions.md


def __getattr__(name: str) -> Any:
    """Import the operations, and PyTorch with them, when one is first used."""
    if name not in ("accumulate_", "materialize", "project"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".operations", __name__), name)
