"""Attacks on a server by whoever reaches its port, and the memory that they cost it."""

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

MEMORY = 64 << 20  # bytes by which a server may grow
PIECE = 1 << 16


@dataclass
class Target:
    """A server's process and address, and what an attacker needs to speak to it."""

    pid: int
    port: int
    tls: ssl.SSLContext | None = None
    path: str = "/"  # to which bodies are sent
    headers: str = ""  # that a request needs, as a token
    opened: ExitStack = field(default_factory=ExitStack)

    def connect(self) -> socket.socket:
        line = socket.create_connection(("127.0.0.1", self.port), 20)
        if self.tls is not None:
            line = self.tls.wrap_socket(line, server_hostname="localhost")
        self.opened.callback(line.close)
        return line

    @property
    def post(self) -> bytes:
        return f"POST {self.path} HTTP/1.1\r\nhost: localhost:{self.port}\r\n{self.headers}".encode()

    def memory(self) -> int:
        """Bytes that the process holds."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * 4096

    @contextmanager
    def bounded(self, serves: Callable[[], object]) -> Iterator[None]:
        """Check, at the end, that memory has grown by no more than `MEMORY` and that honest clients are served."""
        serves()
        before = self.memory()
        with self.opened:
            yield
            serves()
            assert self.memory() - before < MEMORY, f"{(self.memory() - before) / 1e6:.0f} MB more"
        serves()


def sent(line: socket.socket, piece: bytes, most: int) -> int:
    """Bytes of one piece again and again that a server has taken before it ended the connection."""
    count = 0
    with suppress(OSError):
        while count < most:
            line.sendall(piece)
            count += len(piece)
    return count


def endless_header(target: Target, most: int) -> int:
    line = target.connect()
    line.sendall(b"GET / HTTP/1.1\r\nx: ")
    return sent(line, b"a" * PIECE, most)


def headers_of_five_bytes(target: Target, most: int) -> int:
    line = target.connect()
    line.sendall(b"GET / HTTP/1.1\r\n")
    return sent(line, b"a:b\r\n" * (PIECE // 5), most)


def endless_body(target: Target, most: int) -> int:
    line = target.connect()
    line.sendall(target.post + b"transfer-encoding: chunked\r\n\r\n")
    return sent(line, f"{PIECE:x}\r\n".encode() + bytes(PIECE) + b"\r\n", most)


def bodies(target: Target, count: int, size: int) -> None:
    """Bodies that are sent but for their last byte, each on a connection of its own."""
    for _ in range(count):
        with suppress(OSError):
            line = target.connect()
            line.sendall(target.post + f"content-length: {size}\r\n\r\n".encode())
            sent(line, bytes(min(PIECE, size - 1)), size - 1)


def half_open(target: Target, count: int) -> list[socket.socket]:
    """Connections whose first header is not whole."""
    lines = []
    for _ in range(count):
        with suppress(OSError):
            line = target.connect()
            line.sendall(b"GET / HTTP/1.1\r\nhost: loc")
            lines.append(line)
    return lines


def alive(lines: list[socket.socket]) -> int:
    """The connections that the server has not ended."""
    count = 0
    for line in lines:
        line.settimeout(0.001)
        try:
            while line.recv(1 << 12):
                pass
        except TimeoutError:
            count += 1
        except (OSError, ssl.SSLError) as error:
            count += isinstance(error, ssl.SSLWantReadError)
    return count


def dripped(lines: list[socket.socket], piece: bytes, seconds: float, pause: float = 0.2) -> int:
    """Connections that the server keeps while one byte after the other comes on each for some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for line in lines:
            with suppress(OSError):
                line.sendall(piece)
        time.sleep(pause)
    return alive(lines)
