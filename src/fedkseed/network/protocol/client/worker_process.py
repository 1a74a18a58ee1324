"""The way of a task to a client's worker, which is started if there is none, and of the reply back."""

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from socket import AF_UNIX, SHUT_RDWR, socket
from typing import TypeAlias

from ....errors import FedKSeedError
from ....files import locked, private
from ..envelope import Code, RefusedError, Reply, Status, Task, refusing
from . import worker_socket as sockets

START = 120.0  # seconds until a worker listens: importing PyTorch from a cold disk
HAND_IN = 60.0  # seconds to hand in a task, both sides on one machine
MARGIN = 30.0  # seconds beyond the task's own, for a worker to notice that it is late

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
        sockets.socket_path(directory)
        with refusing(Code.TASK):
            seconds = Task.decode(task).seconds + MARGIN
        status = Status.FAILED
        return _relay(task, directory, seconds, begun)
    except RefusedError as error:
        code, text = error.code, str(error)
    except Exception as error:
        text = str(error) if isinstance(error, FedKSeedError) else traceback.format_exc()
    with suppress(OSError), (directory / sockets.LOG).open("a") as log:
        log.write(f"no answer ({code}): {text}\n")
    return Reply(status, text=code).encode()


def _relay(task: bytes, directory: Path, seconds: float, begun: Callable[[GiveUp], object]) -> bytes:
    end = time.monotonic() + START
    process: subprocess.Popen | None = None
    while True:
        try:
            with socket(AF_UNIX) as connection:
                connection.settimeout(HAND_IN)
                connection.connect(sockets.socket_path(directory))
                begun(partial(_shut, connection))
                sockets.send(connection, task, HAND_IN)
                return sockets.receive(connection, seconds)
        except TimeoutError as error:
            raise FedKSeedError(f"the worker did not answer within {seconds:.0f} s") from error
        except (ConnectionRefusedError, FileNotFoundError) as error:  # no worker listens (yet)
            log = directory / sockets.LOG
            ended = process is not None and process.poll()
            if ended and not locked(directory / sockets.LOCK):  # else another worker was faster
                said = log.read_text(errors="replace").strip() or "it said nothing"
                raise FedKSeedError(f"the worker ended with code {ended}: {said.splitlines()[-1]}") from error
            if time.monotonic() > end:
                raise FedKSeedError(f"no worker listens after {START:.0f} s; see {log}") from error
            process = process or start_worker(directory)
            time.sleep(0.1)
        except (FedKSeedError, OSError) as error:
            raise FedKSeedError(f"the worker ended in the middle of a task, for want of memory? {error}") from error


def _shut(connection: socket) -> None:
    """End a connection; the worker gives its task up then."""
    with suppress(OSError):
        connection.shutdown(SHUT_RDWR)


_started: list[subprocess.Popen] = []  # kept: Python warns of a Popen that is collected while its process lives


def start_worker(directory: Path) -> subprocess.Popen:
    """Start a worker that outlives this process."""
    with open(directory / sockets.LOG, "ab", opener=private) as log:
        process = subprocess.Popen(  # noqa: S603 - this program itself
            [sys.executable, "-m", "fedkseed.network.protocol.client.worker", str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    _started.append(process)
    return process


def stop_worker(directory: Path) -> None:
    """End the worker of a directory; its unfinished task is lost, which the server notices."""
    path = directory / sockets.LOCK
    with suppress(OSError, ValueError):  # it has ended just now
        if path.exists() and locked(path):
            os.kill(int(path.read_text()), signal.SIGTERM)
