"""Threads for the kernels: PyTorch's own OpenMP team, where it is available.

A second set of threads beside PyTorch's would compete with it: after each operation PyTorch's threads
spin for some milliseconds on the cores that ours need, which makes a sync between two forward passes
take twice as long. GNU OpenMP lets anyone run a C function on its team.
"""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from numba import cfunc, types
from numpy.typing import NDArray

from .kept_kernels import HERE, kept, one_at_a_time, sources


@cache
def forget_stale_kernels() -> None:
    """Delete kernels beside the sources that were compiled from other versions of these."""
    stamp = HERE / "__pycache__" / "kernels.sha256"
    with suppress(OSError):  # a folder that can't be written to: kernels are kept elsewhere
        if not stamp.exists() or stamp.read_text() != sources():
            for path in stamp.parent.glob("*.nb?"):
                path.unlink(missing_ok=True)
            stamp.parent.mkdir(exist_ok=True)
            stamp.write_text(sources())


@cache
def compiled(function: Callable[[int], None]) -> Any:
    """The C function of a kernel that takes a job's address; compiled when first used, then kept on disk."""
    with one_at_a_time():
        forget_stale_kernels()
        return kept(cfunc, types.void(types.int64))(function)


def run(function: Any, job: NDArray, threads: int) -> None:
    """Call the C function `function(address of job)` on every thread of a team, and wait for all."""
    address = job.ctypes.data
    if threads == 1:
        function.ctypes(address)
    elif (library := openmp()) is not None:
        library.GOMP_parallel(ctypes.c_void_p(function.address), ctypes.c_void_p(address), threads, 0)
    else:
        list(_threads(threads).map(function.ctypes, [address] * threads))


@cache
def openmp() -> ctypes.CDLL | None:
    """The OpenMP library that PyTorch has loaded, if that library accepts C functions."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.so*"))
    for name in [*map(str, bundled), "libgomp.so.1"]:
        try:  # only what is loaded already: another copy of the library would be another team
            library = ctypes.CDLL(name, mode=getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW)
        except OSError:
            continue
        if hasattr(library, "GOMP_parallel"):
            return library
    return None


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="fedkseed")
