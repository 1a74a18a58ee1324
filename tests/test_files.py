"""Files that are whole or absent, private whatever the umask, and never written through somebody else's link."""

import os
import stat
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedkseed import FedKSeedError, State, files
from fedkseed.files import exclusive, folder, part_of, private, read_table, sweep, write_atomically, write_table
from fedkseed.round import Report
from fedkseed.run.store import LARGE, Store


@contextmanager
def umask(mask: int):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_all_files_of_a_run_are_for_their_owner_alone_whatever_the_umask(tmp_path):
    big = np.zeros(LARGE // 4)
    with umask(0), Store.create(tmp_path / "run", "seed = 1\n") as store:
        store.commit(State(0, big, big, big.astype(np.int64)), None)
        store.commit(State(1, big, big, big.astype(np.int64)), Report(0, (1,), 1, 1, 2, 1.5, 0, 0.5))
        store.remember("nonce", "ab")
        write_atomically(store.adapter, b"x")
        with folder(store.model) as part:
            (part / "config.json").write_text("{}")
    assert mode(tmp_path / "run") == mode(store.model) == 0o700
    names = {path.name for path in store.directory.iterdir() if path.is_file()}
    assert {"recipe.toml", "run.sqlite", "lock", "metrics.jsonl", "state-1.safetensors"} <= names
    assert {name: mode(store.directory / name) for name in names} == dict.fromkeys(names, 0o600)


def test_the_journals_of_the_database_are_private_too(tmp_path):
    """SQLite gives them the permissions of the database; a transaction that goes on shows them."""
    with umask(0), Store.create(tmp_path / "run", "") as store, store.transaction() as database:
        database.execute("INSERT INTO facts VALUES ('a', '1', NULL)")
        journals = [path for path in store.directory.iterdir() if path.name.startswith("run.sqlite")]
        assert len(journals) == 2
        assert [mode(path) for path in journals] == [0o600, 0o600]


def test_what_is_meant_for_others_has_the_permissions_of_the_umask(tmp_path):
    with umask(0o027):
        write_atomically(tmp_path / "report.html", b"x", 0o666)
        with folder(tmp_path / "model", 0o777) as part:
            save_file({"w": np.zeros(1, np.float32)}, part / "w.safetensors")  # 0600 by itself
    assert (mode(tmp_path / "report.html"), mode(tmp_path / "model")) == (0o640, 0o750)
    assert mode(tmp_path / "model" / "w.safetensors") == 0o640


def test_a_private_folder_has_private_files(tmp_path):
    with umask(0), folder(tmp_path / "model") as part:
        (part / "more").mkdir()
        (part / "more" / "config.json").write_text("{}")
    paths = [tmp_path / "model", tmp_path / "model/more", tmp_path / "model/more/config.json"]
    assert [mode(path) for path in paths] == [0o700, 0o700, 0o600]


@pytest.fixture
def victim(tmp_path) -> Path:
    """A file of the user, to which somebody else has put links into a directory that both can write."""
    (tmp_path / "shared").mkdir()
    made = tmp_path / "victim"
    made.write_text("mine")
    return made


def test_a_link_in_the_place_of_an_unfinished_file_is_not_followed(tmp_path, victim):
    """Its name was `.NAME.part`; now it can't be foreseen, and even one that is guessed is not followed."""
    path = tmp_path / "shared" / "state"
    (tmp_path / "shared" / ".state.part").symlink_to(victim)
    write_atomically(path, b"new")
    assert (path.read_bytes(), victim.read_text()) == (b"new", "mine")
    assert part_of(path) != part_of(path)


def test_a_name_that_is_guessed_is_refused(monkeypatch, tmp_path, victim):
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "guessed")
    (tmp_path / "shared" / ".state.guessed.part").symlink_to(victim)
    with pytest.raises(FedKSeedError, match=r"can't write .*File exists"):
        write_atomically(tmp_path / "shared" / "state", b"new")
    (tmp_path / "shared" / ".model.guessed.part").symlink_to(tmp_path)
    with pytest.raises(FedKSeedError, match=r"can't write .*File exists"), folder(tmp_path / "shared" / "model"):
        pytest.fail("somebody else's folder is filled")
    assert victim.read_text() == "mine"


def test_a_link_in_the_place_of_a_lock_or_a_log_is_refused(tmp_path, victim):
    link = tmp_path / "shared" / "lock"
    link.symlink_to(victim)
    with pytest.raises(FedKSeedError, match=r"can't lock .*symbolic links"), exclusive(link, "taken"):
        pytest.fail("the lock is held")
    with pytest.raises(OSError, match="symbolic links"):
        os.close(private(link, os.O_WRONLY | os.O_CREAT))
    assert victim.read_text() == "mine"


def test_a_link_in_the_place_of_the_finished_file_is_replaced_and_not_followed(tmp_path, victim):
    path = tmp_path / "shared" / "state"
    path.symlink_to(victim)
    write_atomically(path, b"new")
    assert not path.is_symlink()
    assert victim.read_text() == "mine"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc names what is open")
def test_a_folder_is_on_disk_before_it_takes_its_name(monkeypatch, tmp_path):
    """Every file and every folder of it; the order of the system's calls is what a crash depends on."""
    calls = []
    fsync, rename = os.fsync, Path.rename

    def synced(file: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    def renamed(path: Path, target: Path) -> Path:
        calls.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    with folder(tmp_path / "model") as part:
        (part / "weights").mkdir()
        (part / "weights" / "one").write_text("1")
        (part / "config").write_text("{}")
    at = calls.index("rename")
    assert {"weights", "one", "config", part.name} == set(calls[:at])
    assert calls[at + 1 :] == [tmp_path.name]


def test_a_folder_that_could_not_be_filled_leaves_the_earlier_one_and_no_part(tmp_path):
    with folder(tmp_path / "model") as part:
        (part / "config").write_text("old")
    with pytest.raises(FedKSeedError, match=r"can't write"), folder(tmp_path / "model") as part:
        raise OSError("no space")
    assert (tmp_path / "model" / "config").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_writer_left_is_removed_by_the_next_that_holds_the_lock(tmp_path):
    with Store.create(tmp_path / "run", ""):
        pass
    script = f"""
import os, signal
from pathlib import Path
from fedkseed import files
files.os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
files.write_atomically(Path({str(tmp_path / "run" / "state-3.safetensors")!r}), b"half")
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    (tmp_path / "run" / ".mine.part").write_text("")
    left = {path.name for path in (tmp_path / "run").glob(".*")}
    assert len(left) == 2
    with Store(tmp_path / "run").locked():
        assert {path.name for path in (tmp_path / "run").glob(".*")} == {".mine.part"}


def test_a_sweep_follows_no_link(tmp_path, victim):
    part = tmp_path / "shared" / f".model.{'0' * 16}.part"
    (tmp_path / "theirs").mkdir()
    part.symlink_to(tmp_path / "theirs")
    sweep(tmp_path / "shared", "model")
    assert not part.is_symlink()
    assert (tmp_path / "theirs").is_dir()


TABLE = {"nodes": {"111": 0, "222": 1}, "fixed": True, "revoked": [], "text": "a"}


def test_one_flipped_bit_anywhere_in_a_table_is_refused(tmp_path):
    path = tmp_path / "table.json"
    write_table(path, TABLE)
    assert read_table(path) == TABLE
    whole = path.read_bytes()
    for bit in range(len(whole) * 8):
        path.write_bytes(whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :])
        with pytest.raises(FedKSeedError, match="damaged"):
            read_table(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"5", b"null", b'{"a": 1}', b"[" * 100_000])
def test_what_is_no_table_with_its_digest_is_refused(tmp_path, content):
    (tmp_path / "table.json").write_bytes(content)
    with pytest.raises(FedKSeedError, match=r"table\.json is damaged"):
        read_table(tmp_path / "table.json")


def test_a_table_is_a_regular_file(tmp_path):
    """Whoever looks at a stranger's run would wait for a pipe without end, or read a device."""
    with pytest.raises(FedKSeedError, match="can't read /dev/null: it is no regular file"):
        read_table(Path("/dev/null"))


def test_a_person_may_write_a_table_without_a_digest_but_not_with_a_wrong_one(tmp_path):
    path = tmp_path / "table.json"
    path.write_text('{"a": 1}')
    assert read_table(path, by_hand=True) == {"a": 1}
    path.write_text('{"a": 1, "digest": "00"}')
    with pytest.raises(FedKSeedError, match="damaged"):
        read_table(path, by_hand=True)


def test_a_tables_numbers_as_keys_are_texts_when_read(tmp_path):
    write_table(tmp_path / "table.json", {7: "a", 30: "b"})
    assert read_table(tmp_path / "table.json") == {"7": "a", "30": "b"}
