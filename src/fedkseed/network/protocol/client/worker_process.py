"""A client's worker as other processes reach it: a task and its reply, in frames on a Unix socket; its start and end.

A frame is 4 bytes of length, then as many bytes.
"""

import os
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

from ....errors import FedKSeedError
from ....files import border, locked, private
from ..carrier import MAX_MESSAGE
from ..envelope import Code, RefusedError, Reply, Status, Task, refusing

START = 120.0  # seconds until a worker listens: importing PyTorch from a cold disk
HAND_IN = 60.0  # seconds to hand in a task or to take its answer, both sides on one machine
MARGIN = 30.0  # seconds beyond the task's own, for a worker to notice that it is late
LENGTH = struct.Struct("<I")
LONGEST = 100  # bytes of a socket's path; Linux takes 107, macOS 103
MOST_OF_LOG = 1 << 16  # bytes that are looked through
SOCKET, LOCK, LOG = "worker.sock", "worker.lock", "worker.log"  # in the directory of a client

GiveUp: TypeAlias = Callable[[], object]  # nobody waits for the answer to a task any more


def ask_worker(task: bytes, directory: Path, begun: Callable[[GiveUp], object] = lambda give_up: None) -> bytes:
    """Hand a task to the worker of a client's directory, and return the reply.

    Where there is no answer, the server gets a code, and the reason goes to the worker's log: also of an error that
    nobody foresaw, whose text the server would get.

    Args:
        begun: gets what gives the task up, once the worker has it.
    """
    status, code = Status.REFUSED, Code.WORKER
    try:
        socket_path(directory)
        with refusing(Code.TASK):
            seconds = Task.decode(task).seconds + MARGIN
        status = Status.FAILED
        return _relay(task, directory, seconds, begun)
    except RefusedError as error:
        code, text = error.code, str(error)
    except Exception as error:
        text = str(error) if isinstance(error, FedKSeedError) else traceback.format_exc()
    with suppress(OSError), (directory / LOG).open("a") as log:
        log.write(f"no answer ({code}): {text}\n")
    return Reply(status, text=code).encode()


def _relay(task: bytes, directory: Path, seconds: float, begun: Callable[[GiveUp], object]) -> bytes:
    end = time.monotonic() + START
    process: subprocess.Popen | None = None
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(HAND_IN)
                connection.connect(socket_path(directory))
                begun(partial(_shut, connection))
                send(connection, task, HAND_IN)
                return receive(connection, seconds)
        except TimeoutError as error:
            raise FedKSeedError(f"the worker did not answer within {seconds:.0f} s") from error
        except (ConnectionRefusedError, FileNotFoundError) as error:  # no worker listens (yet)
            log = directory / LOG
            ended = process is not None and process.poll()
            if ended and not locked(directory / LOCK):  # else another worker was faster
                said = log.read_text(errors="replace").strip() or "it said nothing"
                raise FedKSeedError(f"the worker ended with code {ended}: {said.splitlines()[-1]}") from error
            if time.monotonic() > end:
                raise FedKSeedError(f"no worker listens after {START:.0f} s; see {log}") from error
            last = _started.get(directory)
            if last is None or last.poll() is not None:  # else it imports PyTorch, for a task given up since
                process = process or start_worker(directory)
            time.sleep(0.1)
        except (FedKSeedError, OSError) as error:
            raise FedKSeedError(f"the worker ended in the middle of a task, for want of memory? {error}") from error


def _shut(connection: socket.socket) -> None:
    """End a connection; the worker gives its task up then."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def last_reason(directory: Path) -> str:
    """The reason for which the worker of a directory has not answered its last task, from its log."""
    log, said = directory / LOG, ""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - MOST_OF_LOG))
        _, _, reason = file.read().decode(errors="replace").rpartition("no answer (")[2].partition("): ")
        said = reason.strip()
    if said.startswith("Traceback"):  # of an error that nobody foresaw: what it says is its last line
        said = said.splitlines()[-1]
    return f"{said} (in {log})" if said else f"{log} says why"


def finish_work(directory: Path) -> None:
    """Wait until the worker of a directory has done what follows its last reply."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(socket_path(directory))
        connection.shutdown(socket.SHUT_WR)  # no task is handed in
        connection.recv(1)  # until it closes the connection: it does one thing after the other


_started: dict[Path, subprocess.Popen] = {}  # the last of a directory; Python warns of one lost while its process lives


def start_worker(directory: Path) -> subprocess.Popen:
    """Start a worker that outlives this process."""
    command = [sys.executable, "-m", "fedkseed.network.protocol.client.worker", str(directory)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with open(directory / LOG, "ab", opener=private) as log:
        process = subprocess.Popen(  # noqa: S603 - this program itself
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
        )
    _started[directory] = process
    return process


def stop_worker(directory: Path) -> None:
    """End the worker of a directory; its unfinished task is lost, which the server notices."""
    path = directory / LOCK
    with suppress(OSError, ValueError):  # it has ended just now
        if path.exists() and locked(path):
            os.kill(int(path.read_text()), signal.SIGTERM)


def socket_path(directory: Path) -> str:
    """The path of a worker's socket.

    Raises:
        FedKSeedError: the path is longer than the system takes.
    """
    path = str(directory.resolve() / SOCKET)
    if len(path.encode()) > LONGEST:
        raise FedKSeedError(f"the path {path} is too long for a socket ({LONGEST} bytes): choose a shorter --state")
    return path


def listening(directory: Path) -> socket.socket:
    """A socket that only this user can connect to, in a directory that only this user can enter.

    Raises:
        FedKSeedError: the socket can't be made.
    """
    path = Path(socket_path(directory))
    with border(f"can't listen at {path}"), ExitStack() as failed:
        path.unlink(missing_ok=True)  # of a worker that was killed; the caller holds the lock
        listener = failed.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen()
        failed.pop_all()
    return listener


def send(connection: socket.socket, data: bytes, seconds: float) -> None:
    """Send a frame.

    Raises:
        OSError: the other side is gone, or did not take the frame in time.
    """
    if len(data) > MAX_MESSAGE:
        raise FedKSeedError(f"a frame has at most {MAX_MESSAGE:,} bytes, got {len(data):,}")
    connection.settimeout(seconds)
    connection.sendall(LENGTH.pack(len(data)))
    connection.sendall(data)


def receive(connection: socket.socket, seconds: float) -> bytes:
    """The next frame, whole.

    Raises:
        FedKSeedError: the frame is too large, or the other side is gone before its end.
        TimeoutError: the frame did not come in time.
    """
    end = time.monotonic() + seconds
    (size,) = LENGTH.unpack(_exactly(connection, LENGTH.size, end))
    if size > MAX_MESSAGE:
        raise FedKSeedError(f"a frame has at most {MAX_MESSAGE:,} bytes, {size:,} are announced")
    return _exactly(connection, size, end)


def _exactly(connection: socket.socket, size: int, end: float) -> bytes:
    """The next `size` bytes; memory grows only as they come, so that a large announced length alone costs nothing."""
    data = bytearray()
    while len(data) < size:
        connection.settimeout(max(0.001, end - time.monotonic()))
        part = connection.recv(min(1 << 20, size - len(data)))
        if not part:
            raise FedKSeedError(f"the other side closed the connection after {len(data)} of {size} bytes")
        data += part
    return bytes(data)


def gone(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection; returns at once."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
