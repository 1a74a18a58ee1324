"""Files that are whole or absent, and errors of the operating system as one clear line."""

import fcntl
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from .errors import FedKSeedError


@contextmanager
def border(what: str) -> Iterator[None]:
    """Turn an error of the file system or of SQLite into a FedKSeedError that names the thing."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise FedKSeedError(f"{what}: {reason}; check the path, the permissions and the free space") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that after a crash it is either the old or the new one, whole.

    Raises:
        FedKSeedError: it can't be written (no space, no permission); the old file is still there.
    """
    temporary = path.with_name(f".{path.name}.part")
    with border(f"can't write {path}"):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def exclusive(path: Path, taken: str) -> Iterator[None]:
    """Hold the lock that a file is; the system lets go of it when the process ends, however it ends.

    Raises:
        FedKSeedError: another process holds it (`taken` is the text), or the file can't be made.
    """
    with border(f"can't lock {path}"):
        file = path.open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FedKSeedError(taken) from error
        file.truncate(0)
        file.write(str(os.getpid()))  # for whoever wants to end it
        file.flush()
        yield


def locked(path: Path) -> bool:
    """Does a process hold the lock that a file is? Nothing is written, and two who ask are not in each other's way."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True


@contextmanager
def folder(path: Path) -> Iterator[Path]:
    """A folder to fill that appears under its name once it is whole, in place of an earlier one.

    Raises:
        FedKSeedError: it can't be written; nothing is left behind, an earlier one is still there.
    """
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with border(f"can't write {path}"):
            part.mkdir(parents=True)
            try:
                yield part
            except SafetensorError as error:
                raise FedKSeedError(f"can't write {path}: {error}; check the free space") from error
            shutil.rmtree(path, ignore_errors=True)
            part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)
