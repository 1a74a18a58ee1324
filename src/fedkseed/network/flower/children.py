"""Flower's programs, started as child processes that end with their parent."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import FedKSeedError
from ...files import border, private
from .compat import QUIET

GRACE = 10.0  # seconds for a process to end by itself before it is killed
SECRET = 48  # bytes; base 64 makes 64 characters of them
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def environment(home: Path, first: Sequence[Path] = ()) -> dict[str, str]:
    """Environment variables of Flower's processes: connections to the server alone, all of Flower's files in `home`.

    Args:
        first: directories in which programs are looked for first.
    """
    paths = [*map(str, first), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    return {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": os.pathsep.join(paths)}


def program(name: str) -> str:
    """The path of one of Flower's programs, as installed for this Python.

    Raises:
        FedKSeedError: the program is not installed.
    """
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise FedKSeedError(f"there is no {path}; install it with: pip install 'fedkseed[flower]'")
    return str(path)


def superexec() -> list[str]:
    """The command of Flower's executor."""
    return [sys.executable, "-m", "fedkseed.network.flower.superexec"]


class Child:
    """A program with a log file, in a process group of its own, that ends when this process ends for any reason."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.name, self.command, self.log, self.env = name, list(command), log, dict(env)
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        with border(f"can't start {self.name}"), open(self.log, "ab", opener=private) as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {self.name}\n".encode())
            log.flush()
            self.process = subprocess.Popen(  # noqa: S603 - a program of Flower's or nginx, and paths
                [sys.executable, "-m", "fedkseed.network.flower.die_with_parent", str(os.getpid()), *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def code(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def stop(self, grace: float = GRACE) -> None:
        """End the program and all processes of its group."""
        if self.process is None:
            return
        if self.running:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
        with suppress(ProcessLookupError, PermissionError):  # macOS: raised for a group of ended processes only
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ended(self) -> str:
        """The way in which the process ended, in words."""
        if self.code is not None and self.code < 0:
            return f"{self.name} was killed (signal {-self.code})"
        return f"{self.name} ended with code {self.code}: {self.last()}"

    def last(self, lines: int = 3) -> str:
        """The last lines of the program's log."""
        text = COLOURS.sub("", self.log.read_text(errors="replace")) if self.log.exists() else ""
        return " | ".join(line.strip() for line in text.splitlines()[-lines:] if line.strip())


def flwr(arguments: Sequence[str], env: Mapping[str, str], seconds: float = 180.0) -> dict[str, Any]:
    """The JSON output of a command of `flwr`.

    Raises:
        FedKSeedError: the command failed, or took too long.
    """
    command = [program("flwr"), *arguments, "--format", "json"]
    name = f"flwr {' '.join(arguments[:2])}"
    try:
        done = subprocess.run(  # noqa: S603 - Flower's own command
            command,
            env=dict(env),
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FedKSeedError(f"{name} did not end within {seconds:g} s") from error
    try:
        table = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    except ValueError:
        table = {}
    if done.returncode or not table.get("success"):
        said = table.get("error-message") or COLOURS.sub("", done.stderr or done.stdout).strip()
        raise FedKSeedError(f"{name} failed: {' '.join(said.split())[-500:]}")
    return table


def write_program(folder: Path, name: str, module: str) -> None:
    """Write a script under the name of one of Flower's programs that runs a module of ours.

    Executors start programs by their names: this folder has to come first on their path.
    """
    with border(f"can't make {folder}"):
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / name
        path.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m {module} \"$@\"\n")
        path.chmod(0o700)


def secret(path: Path) -> Path:
    """The file of the secret by which Flower's executor gets work; made if it is missing or empty."""
    if not path.exists() or path.stat().st_size < SECRET:  # cut short by a crash; no program that uses it runs now
        part = path.with_name(f".{path.name}.part")
        with border(f"can't write {path}"):
            part.unlink(missing_ok=True)
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(SECRET))
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
    return path


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def wait_until(ready: Callable[[], bool], seconds: float, child: Child) -> None:
    """Wait until a condition that a child has to bring about holds.

    Raises:
        FedKSeedError: the child ended, or the time is over; the message has the end of the child's log.
    """
    end = time.monotonic() + seconds
    while not ready():
        if not child.running:
            raise FedKSeedError(child.ended())
        if time.monotonic() > end:
            raise FedKSeedError(f"{child.name} was not ready after {seconds:g} s, see {child.log}: {child.last()}")
        time.sleep(0.1)


def accepts(host: str, port: int) -> bool:
    """Whether a process listens at a port."""
    try:
        with socket.create_connection((host, port), 1.0):
            return True
    except OSError:
        return False
