"""Places that a command of a federation names: addresses, the disk of a run."""

import ipaddress
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...errors import FedKSeedError

SPACE = 1 << 20  # bytes; with less free space the disk counts as full: SQLite and all logs need some


def is_loopback(host: str) -> bool:
    """True if an address is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_of(url: str) -> str:
    """The name or address of a server that is dialled, as browsers write it: in lower case, IPv6 without brackets."""
    import httpx

    with suppress(httpx.InvalidURL):
        host = httpx.URL(url).raw_host.decode().lower()
        with suppress(ValueError):
            return str(ipaddress.ip_address(host))
        return host
    return ""


@contextmanager
def disk_of(directory: Path) -> Iterator[None]:
    """Give errors of a full disk, which each process and library reports in its own words, the same text."""
    try:
        yield
    except FedKSeedError as error:
        if shutil.disk_usage(directory).free >= SPACE:
            raise
        raise FedKSeedError(
            f"the disk of {directory} is full: make space and start the server again; it goes on from the last "
            f"finished round ({error})"
        ) from error
