"""Federations of real processes on loopback: the commands as a user starts them, each in a directory of its own."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fedkseed.network.protocol.certs import add, make, request
from fedkseed.run.store import Store

from ..flower.conftest import POLICY
from ..ports import free_port, wait_for

START = 240.0  # seconds until everything is up on a busy machine with two cores


class Program:
    """A command in a process group of its own, and what it prints.

    Args:
        within: a command that runs it, as `ip netns exec NAME`.
    """

    def __init__(self, log: Path, *arguments: object, within: Sequence[str] = ()) -> None:
        self.log, self._told = log, len(log.read_text(errors="replace")) if log.exists() else 0
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*within, Path(sys.executable).parent / "fedkseed", *map(str, arguments)],
                stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300", "TERM": "dumb"}, umask=0,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def new(self) -> str:
        """What it has printed itself, and not one before it."""
        return self.output[self._told :]

    def wait_for(self, text: str, seconds: float = START) -> None:
        wait_for(lambda: text in self.new, seconds, lambda: f"{text!r} in {self.output}")

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
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"it did not stop within 60 s: {self.output}") from None


class Network:
    """A server and clients on this machine; tests start, kill and restart what they like.

    Args:
        model: of the clients; None where an installed package carries the recipe's, and the default policy holds.
    """

    def __init__(
        self, folder: Path, recipe: str, files: list[Path], model: Path | None, hosts: Sequence[str] = ()
    ) -> None:
        self.folder, self.files, self.model, self.port = folder, files, model, free_port()
        self.run, self.keys = folder / "run", folder / "keys"
        (folder / "recipe.toml").write_text(recipe)
        (folder / "policy.toml").write_text(POLICY)
        make(self.keys, 0, ["localhost", "127.0.0.1", *hosts], 2)
        (self.keys / "ca.key").unlink()  # no command below needs it
        for number in range(len(files)):  # each client makes its own, elsewhere
            add(self.keys, request(self.key(number)))
        self.programs: list[Program] = []

    def server(self, *more: object, within: Sequence[str] = ()) -> Program:
        arguments = ("--certs", self.keys, "--output", self.run, "--port", self.port, *more)
        return self._start(within, "server.log", "serve", self.folder / "recipe.toml", *arguments)

    def everybody(self, *more: object) -> tuple[Program, list[Program]]:
        """The server and all clients, with these options of each client."""
        return self.server(), [self.client(number, *more) for number in range(len(self.files))]

    def client(
        self, number: int, *more: object, within: Sequence[str] = (), host: str = "localhost", port: int = 0
    ) -> Program:
        """A client of the server's, which reaches it by a host, and another port if that is given."""
        keys = ("--key", self.key(number), "--ca", self.keys / "ca.pem")
        own = ("--data", self.files[number], "--state", self.state(number))
        if self.model is not None:
            own += ("--model", self.model, "--policy", self.folder / "policy.toml")
        address = f"https://{host}:{port or self.port}"
        return self._start(within, f"client-{number}.log", "join", address, *keys, *own, *more)

    def doctor(self, *arguments: object) -> Program:
        return self._start((), "doctor.log", "doctor", *arguments)

    def cut_power(self, client: Program, number: int) -> None:
        """All processes of a client are no more, the worker too, and had no time for a word."""
        client.kill()
        while left := processes("", self.state(number)):
            kill(left)

    def key(self, number: int) -> Path:
        """The private key of a client."""
        return self.folder / f"client-{number}"

    def state(self, number: int) -> Path:
        """The directory of a client."""
        return self.folder / f"c{number}"

    @property
    def done(self) -> int:
        """Rounds that are finished."""
        return len(Store(self.run).reports()) if (self.run / "run.sqlite").exists() else 0

    def digest(self) -> str:
        """Of the tuned model, as the server printed it."""
        return re.findall(r"digest of the tuned model\W+([0-9a-f]{64})", (self.folder / "server.log").read_text())[-1]

    def everything(self) -> str:
        """All logs, for a test that failed."""
        logs = sorted(self.folder.rglob("*.log"))
        return "\n".join(f"=== {log.name} ===\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    def _start(self, within: Sequence[str], log: str, *arguments: object) -> Program:
        program = Program(self.folder / log, *arguments, within=within)
        self.programs.append(program)
        return program

    def stop(self) -> None:
        for program in reversed(self.programs):
            program.stop()


@contextmanager
def network(
    folder: Path, recipe: str, files: list[Path], model: Path | None, hosts: Sequence[str] = (), limit: int = 900
) -> Iterator[Network]:
    """A federation whose processes end with the test, after `limit` seconds at the latest."""
    made = Network(folder, recipe, files, model, hosts)
    try:
        with limited(folder, limit, made.everything):
            yield made
    finally:
        made.stop()


@contextmanager
def limited(folder: Path, limit: int, everything: Callable[[], str]) -> Iterator[None]:
    """Let a test take `limit` seconds at most, end the processes of its folder, and show everything if it fails."""

    def late(number: int, frame: object) -> None:
        raise AssertionError(f"the test took more than {limit} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit)
    try:
        yield
    except BaseException:
        print(everything())
        raise
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        kill(processes("", folder))


def kill(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def processes(kind: str, folder: Path) -> list[int]:
    """Processes of this machine whose command holds a text and names a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if kind in command and str(folder) in command and int(path.name) != os.getpid():
            found.append(int(path.name))
    return sorted(found)
