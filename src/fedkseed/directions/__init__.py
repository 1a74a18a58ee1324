"""Directions z_0 … z_{K-1} that everyone generates from one key. docs/directions.md is the specification.

pool.py: what a pool is. reference.py: the definition in NumPy. operations.py: what is done with
directions, on PyTorch tensors. backends.py: who does it, by device: numba_cpu/, triton_gpu.py, torch_any.py.
A server needs neither PyTorch nor Numba.
"""

from .pool import BLOCK, FAMILIES, Pool

__all__ = ["BLOCK", "FAMILIES", "Pool"]
