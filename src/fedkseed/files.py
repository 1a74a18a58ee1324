"""Writing of files that are either whole or absent, and operating-system errors reported as one clear line."""

import fcntl
import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from .errors import FedKSeedError


@contextmanager
def border(what: str) -> Iterator[None]:
    """Turn an error of the file system or of SQLite into a FedKSeedError whose text begins with `what`."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise FedKSeedError(f"{what}: {reason}; check the path, the permissions and the free space") from error


def read_whole(path: Path, most: int, what: str) -> bytes:
    """The content of a regular file; a device or a pipe, which may never end, is not read.

    Raises:
        FedKSeedError: it can't be read, is no regular file, or has more than `most` bytes; the text begins with `what`.
    """
    with border(f"can't read {what}"), os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FedKSeedError(f"can't read {what}: it is no regular file; give the path of one")
        data = file.read(most + 1)
    if len(data) > most:
        raise FedKSeedError(f"can't read {what}: it has more than {most:,} bytes; is it the right file?")
    return data


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file such that a crash leaves either the old or the new version, whole.

    Raises:
        FedKSeedError: the file can't be written (no space, no permission); the old one is still there.
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
    """Hold an exclusive lock on a file; the system releases it when the process ends, however it ends.

    Raises:
        FedKSeedError: another process holds the lock (`taken` is the error's text), or the file can't be made.
    """
    with border(f"can't lock {path}"):
        file = path.open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FedKSeedError(taken) from error
        file.truncate(0)
        file.write(str(os.getpid()))  # lets a person find the process that holds the lock
        file.flush()
        yield


def locked(path: Path) -> bool:
    """Whether a process holds the lock on a file. The check writes nothing, and several checks can run at once."""
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
    """A new folder to fill, which takes the place of the one at `path` once it is complete.

    Raises:
        FedKSeedError: the folder can't be written; no part of it is left behind, and an earlier one is still there.
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
