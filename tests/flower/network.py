"""Federations of real processes on loopback: the commands as a user starts them, each in a directory of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedkseed.flower.certs import make
from fedkseed.flower.processes import free_port
from fedkseed.store import Store

START = 240.0  # seconds until everything is up on a busy machine with two cores


class Program:
    """A command in a process group of its own, and what it prints."""

    def __init__(self, log: Path, *arguments: object) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [Path(sys.executable).parent / "fedkseed", *map(str, arguments)],
                stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300", "TERM": "dumb"},
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = START) -> None:
        wait_for(lambda: text in self.output, seconds, lambda: f"{text!r} in {self.output}")

    def wait(self, seconds: float = START) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s: {self.output}") from None

    def kill(self) -> None:
        """As the kernel does for want of memory: this process alone, and without a word."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


class Network:
    """A server and clients on this machine; tests start, kill and restart what they like."""

    def __init__(self, folder: Path, recipe: str, files: list[Path], model: Path) -> None:
        self.folder, self.files, self.model, self.port = folder, files, model, free_port()
        self.run, self.keys = folder / "run", folder / "keys"
        (folder / "recipe.toml").write_text(recipe)
        make(self.keys, len(files), ["localhost", "127.0.0.1"], 2)
        self.programs: list[Program] = []

    def server(self) -> Program:
        arguments = ("--certs", self.keys, "--output", self.run, "--port", self.port)
        return self._start("server.log", "server", self.folder / "recipe.toml", *arguments)

    def client(self, number: int, *more: object) -> Program:
        keys = ("--key", self.keys / f"client-{number}", "--ca", self.keys / "ca.pem")
        own = ("--data", self.files[number], "--model", self.model, "--state", self.state(number))
        return self._start(f"client-{number}.log", "client", "--server", f"localhost:{self.port}", *keys, *own, *more)

    def state(self, number: int) -> Path:
        """The directory of a client."""
        return self.folder / f"c{number}"

    @property
    def done(self) -> int:
        """Rounds that are finished."""
        return len(Store(self.run).reports()) if (self.run / "run.sqlite").exists() else 0

    def digest(self) -> str:
        """Of the tuned model, as the server printed it."""
        return re.findall(r"digest of the tuned model\W+([0-9a-f]{64})", self.programs[0].output)[-1]

    def everything(self) -> str:
        """All logs, for a test that failed."""
        logs = sorted(self.folder.rglob("*.log"))
        return "\n".join(f"=== {log.name} ===\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    def _start(self, log: str, *arguments: object) -> Program:
        program = Program(self.folder / log, *arguments)
        self.programs.append(program)
        return program

    def stop(self) -> None:
        for program in reversed(self.programs):
            program.stop()


@contextmanager
def network(folder: Path, recipe: str, files: list[Path], model: Path) -> Iterator[Network]:
    """A federation whose processes end with the test; its logs are shown if the test fails."""
    made = Network(folder, recipe, files, model)
    try:
        yield made
    except BaseException:
        print(made.everything())
        raise
    finally:
        made.stop()


def wait_for(condition: Callable[[], object], seconds: float, what: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what()}"
        time.sleep(0.2)


def processes(kind: str, folder: Path) -> list[int]:
    """Of this machine, those whose command holds a text, and whose command or FLWR_HOME lies in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_text().replace("\0", " ")
            home = f"FLWR_HOME={folder}" in (path / "environ").read_text(errors="replace")
        except OSError:
            continue
        if kind in command and (home or str(folder) in command) and int(path.name) != os.getpid():
            found.append(int(path.name))
    return sorted(found)
