"""Places that a command of a federation names: addresses, the files of a client's identity, the disk of a run."""

import ipaddress
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import FedKSeedError

SPACE = 1 << 20  # bytes; with less free space the disk counts as full: SQLite and all logs need some


def is_loopback(host: str) -> bool:
    """True if an address is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_files(ca: Path, key: Path) -> None:
    """Refuse files of a client's identity that are not there, or that others can read.

    Raises:
        FedKSeedError: one is.
    """
    for path in (ca, key):
        if not path.is_file():
            raise FedKSeedError(
                f"there is no file {path}; `fedkseed certs request` makes a key, and whoever runs the server has ca.pem"
            )
    if stat.S_IMODE(key.stat().st_mode) & 0o077:
        raise FedKSeedError(f"others can read the key {key}; keep it to yourself: chmod 600 {key}")


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
