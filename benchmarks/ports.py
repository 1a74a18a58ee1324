"""Ports of this machine."""

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
