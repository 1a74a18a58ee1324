"""Writing of files that are either whole or absent, and operating-system errors reported as one clear line."""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from .errors import FedKSeedError

DIGEST = "digest"  # the key of a table's digest
POINTER, LONGEST_POINTER = b"version https://git-lfs.github.com/spec/", 1024  # bytes, by Git LFS' specification
GLANCE = 0.1  # seconds; `locked` holds a lock for microseconds
OTHER_PORT = "take another port, or an address of this machine"  # advice of `border`
MAX_TABLE = 1 << 28  # bytes; the keys of a million clients have 200 MB
HERE = Path(__file__).parent


@contextmanager
def border(what: str, advice: str = "check the path, the permissions and the free space") -> Iterator[None]:
    """Turn an error of the system or of SQLite into a FedKSeedError: `what`, the reason, and what to do."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise FedKSeedError(f"{what}: {reason}; {advice}") from error


def shipped(path: str) -> Path:
    """A file or folder of the repository that users have, too: a wheel carries it in `shipped`, a checkout has it.

    Raises:
        FedKSeedError: it is not there.
    """
    for root in (HERE / "shipped", HERE.parents[1]):
        if (root / path).exists():
            return root / path
    raise FedKSeedError(f"this installation of fedkseed lacks {path}; install the package anew")


def private(path: str | Path, flags: int, mode: int = 0o600) -> int:
    """An opener for `open`: a new file is for its owner alone, and a symbolic link in the file's place is refused."""
    return os.open(path, flags | os.O_NOFOLLOW, mode)


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
    _require_content(path, data)
    return data


def require_fetched(*paths: Path) -> None:
    """Refuse a pointer of Git LFS in the place of a file: a clone that was made without that program has them."""
    for path in paths:
        with border(f"can't read {path}"):
            if path.is_file() and path.stat().st_size <= LONGEST_POINTER:
                _require_content(path, path.read_bytes())


def _require_content(path: Path, data: bytes) -> None:
    if data.startswith(POINTER):
        raise FedKSeedError(
            f"{path} is a pointer of Git LFS, and not the file: `git lfs pull` in its clone fetches it, or download it"
        )


def write_atomically(path: Path, data: bytes | Iterable[bytes], mode: int = 0o600, *, lasting: bool = True) -> None:
    """Write a file such that a crash leaves either the old or the new version, whole.

    Args:
        data: all of it, or its parts in order, of which one at a time is held.
        mode: permissions of the file, less those that the umask takes away.
        lasting: whether to wait until it is on disk. Else a process that is killed leaves one of the two, and a power
            cut may leave a part.

    Raises:
        FedKSeedError: the file can't be written (no space, no permission); the old one is still there.
    """
    temporary = part_of(path)
    with border(f"can't write {path}"):
        try:
            with open(temporary, "xb", opener=partial(private, mode=mode)) as file:
                file.writelines([data] if isinstance(data, bytes) else data)
                file.flush()
                if lasting:
                    os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        if lasting:
            _sync(path.parent)


def write_table(path: Path, table: Mapping[str, Any]) -> None:
    """Write a table as JSON, with a digest of it."""
    write_atomically(path, json.dumps({**table, DIGEST: _digest(json.loads(json.dumps(table)))}).encode())


def read_table(path: Path, *, by_hand: bool = False) -> dict[str, Any]:
    """The table that `write_table` has written.

    Args:
        by_hand: whether a person may have written it, without a digest.

    Raises:
        FedKSeedError: the file can't be read, or one bit of it has changed.
    """
    data = read_whole(path, MAX_TABLE, str(path))
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FedKSeedError(f"{path} is damaged ({error}); bring back a copy of it") from error
    whole = isinstance(table, dict)
    if whole and not (by_hand and DIGEST not in table):
        whole = table.pop(DIGEST, None) == _digest(table)
    if not whole:
        raise FedKSeedError(f"{path} is damaged: it is no table with its digest; bring back a copy of it")
    return table


def _digest(table: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def own_folder(path: Path) -> None:
    """Make a folder that only this user can enter, where there is none."""
    with border(f"can't make {path}"):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)


def part_of(path: Path) -> Path:
    """An unpredictable name for an unfinished file or folder, so that nobody can put a link there beforehand."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")


def sweep(directory: Path, *names: str) -> None:
    """Remove the unfinished versions of files and folders that killed processes have left.

    Args:
        names: patterns of the finished ones' names; no process may be writing one of them.
    """
    for name in names:
        for part in directory.glob(f".{name}.{'[0-9a-f]' * 16}.part"):
            if part.is_dir() and not part.is_symlink():
                shutil.rmtree(part, ignore_errors=True)
            else:
                part.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def exclusive(path: Path, taken: str) -> Iterator[None]:
    """Hold an exclusive lock on a file; the system releases it when the process ends, however it ends.

    Its folder is made, for this user alone, if there is none.

    Raises:
        FedKSeedError: another process holds the lock (`taken` is the error's text), or the file can't be made.
    """
    own_folder(path.parent)
    with border(f"can't lock {path}"):
        file = open(path, "a", opener=private)  # noqa: SIM115 - a context manager below, where `border` has ended
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(GLANCE)  # perhaps it is only looked at, by `locked`
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise FedKSeedError(taken) from error
        file.truncate(0)
        file.write(str(os.getpid()))  # lets a person find the process that holds the lock
        file.flush()
        yield


def stamp(path: Path) -> tuple[int, int, int]:
    """A file's time, size and inode, others after each change; zeros where there is no file."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0
    return status.st_mtime_ns, status.st_size, status.st_ino


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


def require_absent(path: Path, what: str = "folder") -> None:
    """Refuse to write over what is there.

    Raises:
        FedKSeedError: it is there.
    """
    if path.exists():
        raise FedKSeedError(f"{path} exists already; choose another {what}")


@contextmanager
def folder(path: Path, mode: int = 0o700) -> Iterator[Path]:
    """A new folder to fill, which takes the place of the one at `path` once it is complete and on disk.

    Args:
        mode: permissions of the folder and what is in it, less those that the umask takes away; files are never
            executable.

    Raises:
        FedKSeedError: the folder can't be written; no part of it is left behind, and an earlier one is still there.
    """
    part = part_of(path)
    try:
        with border(f"can't write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            part.mkdir(mode)
            try:
                yield part
            except SafetensorError as error:
                raise FedKSeedError(f"can't write {path}: {error}; check the free space") from error
            allowed = stat.S_IMODE(part.stat().st_mode)
            for written in (*part.rglob("*"), part):
                if not written.is_symlink():
                    # safetensors 0.8 writes files for their owner alone, whatever the umask
                    written.chmod(allowed if written.is_dir() else allowed & 0o666)
                    _sync(written)  # else a crash could leave the name of a folder that is empty
            shutil.rmtree(path, ignore_errors=True)
            part.rename(path)
            _sync(path.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
