"""A real run in a process of its own, which can be halted at any point and looked at."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedkseed.run.activity import Activity, moment_of
from fedkseed.run.start_and_resume import start
from fedkseed.run.store import Store
from fedkseed.run.workers import processes

from ..conftest import recipe_text
from .browser import CHROMIUM, browser

SECONDS = 120  # for anything to happen on a busy machine; far more than it needs
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}
HIDDEN = ("COLUMNS", "LINES", "NO_COLOR")  # by which the environment of a test would decide how wide a screen is


def environment() -> dict[str, str]:
    return {name: value for name, value in ENV.items() if name not in HIDDEN}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "fedkseed", *map(str, arguments)]


def wait_until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, f"not in {SECONDS} s: {what}"
        time.sleep(0.05)


class Run:
    """A run that is going on in another process."""

    def __init__(self, process: Any, directory: Path) -> None:
        self.process, self.directory = process, directory

    @property
    def moment(self) -> Activity | None:
        return moment_of(self.directory)

    @property
    def rounds(self) -> int:
        made = (self.directory / "recipe.toml").exists()
        return len(Store(self.directory, looks=True).reports()) if made else 0

    def halt(self, when: Callable[["Run"], object], what: str) -> None:
        """Halt the process when something is so, and still is once it is halted."""

        def halted() -> bool:
            if not when(self):
                assert self.process.is_alive(), f"the run ended before {what}"
                return False
            os.kill(self.process.pid, signal.SIGSTOP)
            if when(self):
                return True
            os.kill(self.process.pid, signal.SIGCONT)
            return False

        wait_until(halted, what)

    def end(self) -> None:
        """Let it go on to its end."""
        os.kill(self.process.pid, signal.SIGCONT)
        self.process.join(SECONDS)
        assert self.process.exitcode == 0


def trains(run: Run, rounds: int) -> bool:
    """Whether a run has done a number of rounds, and a client trains for the next one."""
    return run.moment is not None and bool(run.moment.clients.get("training")) and run.rounds == rounds


@pytest.fixture(scope="session")
def watched_recipe(tmp_path_factory, model_folder, data_file) -> Path:
    changes = {"rounds": "rounds = 4", "steps": "steps = 20", "examples": "every = 2\nexamples = 8", "lr": "lr = 1e-5"}
    path = tmp_path_factory.mktemp("watch") / "recipe.toml"
    path.write_text(recipe_text(model_folder, data_file, **changes))
    return path


@pytest.fixture
def begin(watched_recipe, tmp_path) -> Iterator[Callable[[], Run]]:
    """A function that starts the run, into the directory `run` of the test."""
    begun: list[Run] = []

    def started() -> Run:
        directory = tmp_path / "run"
        process: Any = processes()
        begun.append(Run(process.Process(target=start, args=(str(watched_recipe), str(directory))), directory))
        begun[-1].process.start()
        return begun[-1]

    yield started
    for run in begun:
        run.process.kill()
        run.process.join()


@pytest.fixture(scope="session")
def finished(watched_recipe, tmp_path_factory) -> Path:
    """The directory of a run that has ended."""
    directory = tmp_path_factory.mktemp("watch") / "finished"
    start(str(watched_recipe), str(directory))
    return directory


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on PATH to open the page with")
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@contextmanager
def contents_kept(directory: Path) -> Iterator[None]:
    """Nothing in a directory is made, written or removed meanwhile."""

    def found() -> dict[str, tuple[int, int]]:
        return {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in directory.iterdir()}

    before = found()
    yield
    assert found() == before
