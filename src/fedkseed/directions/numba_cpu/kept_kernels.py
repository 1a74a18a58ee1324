"""The place of compiled kernels on disk: beside their sources, or where that can't be written in a folder of our own.

Numba reads what it keeps as pickles, which can run code. So a folder in the home or in the temporary directory is used
only if it belongs to this user and nobody else can write in it.
"""

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from numba import config as numba_config

HERE = Path(__file__).parent
config: Any = numba_config  # its attributes are made when it is loaded
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@cache
def sources() -> str:
    """The digest of the kernels' sources. Numba looks only at the file of a function, not at those it calls."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(HERE.glob("*.py")))).hexdigest()


@cache
def cache_folder() -> Path | None:
    """The folder of our own; None where Numba's environment variable names one, or that beside the sources is written.

    A folder has the digest of the sources in its name. Without any, kernels are compiled by each process.
    """
    beside = HERE / "__pycache__"
    if config.CACHE_DIR or os.access(beside if beside.exists() else HERE, os.W_OK):
        return None
    name, places = f"fedkseed-{os.geteuid()}-{sources()[:16]}", list[Path]()
    with suppress(OSError, RuntimeError):  # nobody's home, or no temporary directory
        places.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"))
    with suppress(OSError):
        places.append(Path(tempfile.gettempdir()))
    for place in places:
        with suppress(OSError):
            folder = place.absolute() / name
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            above, about = folder.parent.stat(), folder.lstat()
            is_ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & OTHERS_WRITE
            stays = above.st_uid in (0, os.geteuid()) and (
                not above.st_mode & OTHERS_WRITE or above.st_mode & stat.S_ISVTX
            )
            if is_ours and stays and os.access(folder, os.W_OK):
                return folder
    return None


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let one process of this machine compile at a time; those that wait read what it has kept."""
    with ExitStack() as stack:
        with suppress(OSError):  # a folder that can't be written to, or a file system without locks
            folder = Path(config.CACHE_DIR or cache_folder() or HERE / "__pycache__")
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / "compiling.lock").open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def kept(decorator: Callable[..., Any], *arguments: Any, **settings: Any) -> Callable[[Any], Any]:
    """A decorator of Numba's that keeps what it compiles, where there is a folder for it."""

    def decorate(function: Any) -> Any:
        named, folder = config.CACHE_DIR, cache_folder()
        try:  # it is read when a function is decorated
            config.CACHE_DIR = named if folder is None else str(folder)
            return decorator(*arguments, cache=True, **settings)(function)
        except RuntimeError:  # there is no folder
            return decorator(*arguments, **settings)(function)
        finally:
            config.CACHE_DIR = named

    return decorate
