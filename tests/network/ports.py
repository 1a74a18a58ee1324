"""Ports of this machine, waiting for what opens them, and the proxy that tests start if it is installed."""

import shutil
import socket
import time
from collections.abc import Callable


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def accepts(host: str, port: int) -> bool:
    """Whether a process listens at a port."""
    try:
        with socket.create_connection((host, port), 1.0):
            return True
    except OSError:
        return False


def wait_for(condition: Callable[[], object], seconds: float = 30.0, what: Callable[[], str] = str) -> None:
    """Wait until a condition holds; else fail with what there is instead."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what()}"
        time.sleep(0.02)


def find_nginx() -> str | None:
    """The path of nginx, which Debian installs outside the path of ordinary users; None if it is not installed."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
