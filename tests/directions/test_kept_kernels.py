"""The place of compiled kernels, for a user who can't write beside their sources; nobody else's code is loaded."""

import fcntl
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
from numba import config

from fedkseed.directions.numba_cpu import kept_kernels
from fedkseed.directions.numba_cpu.kept_kernels import HERE, kept, one_at_a_time

cache_folder = kept_kernels.cache_folder.__wrapped__


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """The caches of a home and a temporary directory, of a user who can't write beside the sources."""
    allowed = os.access
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    temporary.chmod(0o1777)
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setattr(
        kept_kernels.os, "access", lambda path, mode: HERE not in (path, *path.parents) and allowed(path, mode)
    )
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return home / ".cache", temporary


def test_kernels_are_kept_in_the_home_and_without_one_in_the_temporary_directory(places, monkeypatch):
    of_home, temporary = places
    folder = cache_folder()
    assert folder is not None
    assert folder.parent == of_home
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert cache_folder() == folder
    monkeypatch.setenv("HOME", "/proc")  # where not even root makes a folder
    assert cache_folder() == temporary / folder.name
    monkeypatch.setattr(tempfile, "gettempdir", no_directory)
    assert cache_folder() is None


def test_one_process_compiles_at_a_time(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "kernels"))
    for _ in range(2):
        with one_at_a_time(), (tmp_path / "kernels" / "compiling.lock").open() as another:  # noqa: SIM117
            with pytest.raises(BlockingIOError):
                fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_kernels_are_compiled_also_where_no_lock_can_be_had(monkeypatch):
    monkeypatch.setattr(config, "CACHE_DIR", "/proc/nowhere")
    with one_at_a_time():
        pass


def no_directory() -> str:
    raise FileNotFoundError("No usable temporary directory found")


def test_a_folder_that_others_can_change_is_not_used(places, monkeypatch):
    of_home, temporary = places
    folder = cache_folder()
    other = temporary / folder.name
    folder.chmod(0o770)
    assert cache_folder() == other
    folder.chmod(0o700)
    of_home.chmod(0o777)  # its owner could put another folder in this one's place
    assert cache_folder() == other
    other.rmdir()
    other.symlink_to(of_home)
    assert cache_folder() is None
    monkeypatch.setattr(kept_kernels.os, "geteuid", lambda: os.getuid() + 1)
    assert cache_folder() is None


def test_a_folder_that_the_environment_names_or_that_of_the_sources_is_numba_s_own_affair(places, monkeypatch):
    monkeypatch.setattr(config, "CACHE_DIR", "/somewhere")
    assert cache_folder() is None
    assert list(places[1].iterdir()) == []


def test_a_kernel_is_compiled_for_this_process_alone_where_no_folder_can_be_written(monkeypatch):
    monkeypatch.setattr(kept_kernels, "cache_folder", lambda: None)

    def decorator(**settings: Any) -> Any:
        def compiled(function: Any) -> Any:
            if settings.pop("cache", False):
                raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
            return function, settings

        return compiled

    assert kept(decorator, nogil=True)(len) == (len, {"nogil": True})
