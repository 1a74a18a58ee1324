"""A meter of the memory that a part of a program needs, above what its process held before."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import psutil
import torch

from ..local.client import return_freed
from ..run.loop import peak_memory


class Meter:
    """A meter of memory in use: resident memory of this process, or that of PyTorch's tensors on a GPU."""

    def __init__(self, device: str = "cpu") -> None:
        self.on_gpu, self.peak = device != "cpu", 0  # the second: bytes, the most inside the last `watch`

    def now(self) -> int:
        """Bytes in use, once Python's garbage and the free parts of the C library are given back to the system."""
        gc.collect()
        return_freed()
        return self._in_use()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Set `peak` to the most memory in use inside the block."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            yield
            self.peak = torch.cuda.max_memory_allocated()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            with self._sampled():
                yield
        else:
            yield
            self.peak = peak_memory()

    def _in_use(self) -> int:
        return torch.cuda.memory_allocated() if self.on_gpu else psutil.Process().memory_info().rss

    @contextmanager
    def _sampled(self) -> Iterator[None]:
        """Set `peak` by a look every millisecond, for systems whose kernel can't reset its high-water mark."""
        done = Event()
        self.peak = self._in_use()

        def look() -> None:
            while not done.wait(1e-3):
                self.peak = max(self.peak, self._in_use())

        thread = Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
