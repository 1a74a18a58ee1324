"""Worker processes that train several clients at once, each process with its own model object and threads.

The processes exchange the same messages as a network would carry, so results are those of clients that take turns,
bit for bit, if they compute with the same number of threads. The base weights share memory where files are
memory-mapped: safetensors in the model's own type, and GGUF blocks.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from threading import Lock, RLock, Thread
from typing import Any
from unittest.mock import patch  # sets an attribute, and puts it back whatever is raised

import torch
from tqdm import tqdm

from ..errors import FedKSeedError
from ..recipe.schema import Recipe

PRELOADED = ["fedkseed.run.simulation"]  # what every process of ours imports, for five seconds
Answer = Callable[[bytes, int], tuple[bytes, list[float]]]  # broadcast, client -> upload, seconds of its steps
_answer: Answer  # of this worker process, whose pool begins each with `_begin`


def processes() -> BaseContext:
    """Make the context of new processes: each is a fork of one clean process, which has imported what all need.

    That process computes nothing, so it has neither threads nor a GPU's state that a fork would break. On macOS, whose
    frameworks do not survive a fork, each process imports for itself.
    """
    if sys.platform == "darwin":
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


MAIN = Lock()  # held while the program's module is without a file


class WorkerPool(ProcessPoolExecutor):
    """An executor whose processes do not import the program that has it, as it would begin again in each of them.

    A program with `if __name__ == "__main__":` around its work would not; what the processes run is of this package.
    """

    def __init__(self, count: int, **options: Any) -> None:
        super().__init__(count, processes(), **options)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function in one of the processes, which begin here."""
        with MAIN, patch.multiple(sys.modules["__main__"], create=True, __spec__=None, __file__=None):
            return super().submit(fn, *args, **kwargs)


def threads_of(recipe: Recipe) -> int:
    """The threads of each client that trains."""
    return recipe.clients.threads or max(1, torch.get_num_threads() // recipe.clients.at_once)


def require_same(who: str, theirs: Mapping[str, str], ours: Mapping[str, str], we: str) -> None:
    """Refuse a process whose files are not this one's, by their digests."""
    for what, digest in ours.items():
        if theirs.get(what) != digest:
            raise FedKSeedError(
                f"{who} has {what} {theirs.get(what)}, {we} {digest}: all machines need the same files in the same "
                "places"
            )


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Let PyTorch and the kernels use a given number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Workers:
    """Processes that answer broadcasts in place of clients.

    Args:
        count: number of processes.
        threads: number of threads of each.
        prepare: called once in every process with `arguments`; makes the function that answers broadcasts there.
    """

    def __init__(self, count: int, threads: int, prepare: Callable[..., Answer], *arguments: Any) -> None:
        self.count = count
        self._cpu_seconds = 0.0
        self._pool = WorkerPool(count, initializer=_begin, initargs=(threads, prepare, arguments))

    def answers(self, messages: Mapping[int, bytes]) -> Iterable[tuple[int, bytes, list[float]]]:
        """The triples (client, upload, seconds of its local steps), in the order in which they come.

        A client is taken up when an upload is taken from here: as many wait as there are processes, however many
        clients there are.

        Raises:
            FedKSeedError: a process died.
        """
        asked: dict[Future[tuple[tuple[bytes, list[float]], float]], int] = {}
        clients = iter(messages.items())
        try:
            while True:
                for number, data in islice(clients, self.count - len(asked)):
                    asked[self._pool.submit(_work, data, number)] = number
                if not asked:
                    return
                future = wait_for(asked, return_when=FIRST_COMPLETED).done.pop()
                answer, cpu_seconds = future.result()
                self._cpu_seconds += cpu_seconds
                yield asked.pop(future), *answer
                del future, answer  # its upload can be all weights
        except BrokenProcessPool as error:
            raise FedKSeedError(
                "a process that trains clients ended by itself, perhaps for want of memory; `fedkseed resume` takes "
                "--at-once N, for fewer clients side by side"
            ) from error
        finally:
            for future in asked:
                future.cancel()

    def take_cpu_seconds(self) -> float:
        """The processor seconds of all answers since the last call; what processes take to begin is not counted."""
        taken, self._cpu_seconds = self._cpu_seconds, 0.0
        return taken

    def close(self) -> None:
        """End the processes at once, even in the middle of a step: only answers that were given are kept."""
        processes = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
            process.join()


def _begin(threads: int, prepare: Callable[..., Answer], arguments: tuple[Any, ...]) -> None:
    global _answer  # of the process: calls of `_work` share nothing else
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    tqdm.set_lock(RLock())  # its own is a semaphore of the system, which a process that is terminated leaves behind
    logging.getLogger("transformers").setLevel(logging.ERROR)  # the parent has shown the warnings about this model
    _answer = prepare(*arguments)


def _end_with_parent() -> None:
    """End this process when its parent ends: a killed parent can't stop its workers, each of which holds a model."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _work(data: bytes, client: int) -> tuple[tuple[bytes, list[float]], float]:
    begun = time.process_time()
    return _answer(data, client), time.process_time() - begun
