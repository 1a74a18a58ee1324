"""Frames on a Unix socket, between a client's short-lived processes and its worker: 4 bytes of length, then bytes."""

import socket
import struct
import time
from pathlib import Path

from ....errors import FedKSeedError
from ....files import border
from ..carrier import MAX_MESSAGE

LENGTH = struct.Struct("<I")
MAX_FRAME = MAX_MESSAGE  # bytes: a task or a reply, as Flower carries it
CHUNK = 1 << 20
LONGEST = 100  # bytes of a socket's path; Linux takes 107, macOS 103
SOCKET, LOCK, LOG = "worker.sock", "worker.lock", "worker.log"  # in the directory of a client


def socket_path(directory: Path) -> str:
    """The path of a worker's socket; one that is longer than the system takes is refused."""
    path = str(directory.resolve() / SOCKET)
    if len(path.encode()) > LONGEST:
        raise FedKSeedError(f"the path {path} is too long for a socket ({LONGEST} bytes): choose a shorter --state")
    return path


def listening(directory: Path) -> socket.socket:
    """A socket that only this user can connect to, in a directory that only this user can enter."""
    path = Path(socket_path(directory))
    with border(f"can't listen at {path}"):
        path.unlink(missing_ok=True)  # of a worker that was killed; the caller holds the lock
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen()
        except OSError:
            listener.close()
            raise
    return listener


def send(connection: socket.socket, data: bytes, seconds: float) -> None:
    """Send a frame.

    Raises:
        OSError: the other side is gone, or did not take the frame in time.
    """
    if len(data) > MAX_FRAME:
        raise FedKSeedError(f"a frame has at most {MAX_FRAME:,} bytes, got {len(data):,}")
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
    if size > MAX_FRAME:
        raise FedKSeedError(f"a frame has at most {MAX_FRAME:,} bytes, {size:,} are announced")
    return _exactly(connection, size, end)


def _exactly(connection: socket.socket, size: int, end: float) -> bytes:
    """The next `size` bytes; memory grows only as they come, so that a large announced length alone costs nothing."""
    data = bytearray()
    while len(data) < size:
        connection.settimeout(max(0.001, end - time.monotonic()))
        part = connection.recv(min(CHUNK, size - len(data)))
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
