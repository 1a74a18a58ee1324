"""A run's directory: whole after any crash, clear when it can't be written."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing, contextmanager

import numpy as np
import pytest

from fedkseed import FedKSeedError, State
from fedkseed.round import Report
from fedkseed.run.store import Store

IDENTITY = {"a base model of digest": "aa", "data of digest": "bb"}


def state(done: int) -> State:
    rng = np.random.default_rng(done)
    return State(done, rng.normal(size=8), rng.integers(0, 999, 8), rng.integers(0, 9, 8))


def report(number: int, loss: float = 1.5) -> Report:
    return Report(number, (1, 2), 100, 50, 300, loss, 0, 0.5)


@pytest.fixture
def store(tmp_path) -> Store:
    with Store.create(tmp_path / "run", "seed = 1\n") as made:
        made.commit(state(0), None)
        made.require_same(IDENTITY)
    for number in range(3):
        made.commit(state(number + 1), report(number))
    return made


def same(a: State | None, b: State) -> bool:
    return a is not None and a.round == b.round and all(
        np.array_equal(getattr(a, n), getattr(b, n)) for n in ("coefficients", "magnitudes", "counts")
    )  # fmt: skip


def test_what_is_committed_is_there_for_another_process(store):
    again = Store(store.directory)
    assert same(again.state(State), state(3))
    assert all(same(again.state(State, done), state(done)) for done in range(4))
    assert [r["round"] for r in again.reports()] == [0, 1, 2]


def test_metrics_are_the_reports_one_a_line(store):
    lines = [json.loads(line) for line in store.metrics.read_text().splitlines()]
    assert lines == store.reports()


def test_a_metrics_file_cut_by_a_crash_is_mended(store):
    whole = store.metrics.read_text()
    store.metrics.write_text(whole[:-20])
    store.copy_metrics()
    assert store.metrics.read_text() == whole


def test_a_round_without_a_finite_loss_is_valid_json(store):
    store.commit(state(4), report(3, float("nan")))
    assert json.loads(store.metrics.read_text().splitlines()[-1])["loss"] is None


def test_rollback_forgets_what_came_after(store):
    for done in range(4):
        store.evaluated(done, {"losses": [done]})
    store.adapter.write_bytes(b"x")
    store.rollback(1)
    assert same(store.state(State), state(1))
    assert len(store.metrics.read_text().splitlines()) == 1
    assert store.evaluations() == {0: {"losses": [0]}, 1: {"losses": [1]}}
    assert not store.adapter.exists()
    with pytest.raises(FedKSeedError, match="no state after 2 rounds"):
        store.rollback(2)


def test_a_directory_with_a_run_is_not_run_over(store):
    with pytest.raises(FedKSeedError, match="holds a run already"), Store.create(store.directory, "seed = 2\n"):
        pass
    assert store.recipe.read_text() == "seed = 1\n"
    store.recipe.unlink()  # the states alone are a run's, too
    with pytest.raises(FedKSeedError, match="holds a run already"), Store.create(store.directory, "seed = 2\n"):
        pass


def test_a_run_is_kept_from_others_from_its_first_moment(tmp_path):
    with Store.create(tmp_path / "run", "") as store:
        with pytest.raises(FedKSeedError, match="another process is working on"), store.locked():
            pass
        with pytest.raises(FedKSeedError, match="another process is working on"), Store.create(tmp_path / "run", ""):
            pass


def test_a_run_goes_on_only_with_what_it_began_with(store):
    store.require_same(IDENTITY)
    with pytest.raises(FedKSeedError, match="began with data of digest bb, now it is cc"):
        store.require_same(IDENTITY | {"data of digest": "cc"})
    with sqlite3.connect(store.directory / "run.sqlite") as database:
        database.execute("DELETE FROM facts WHERE name = 'identity'")
    with pytest.raises(FedKSeedError, match="what the run began with is lacking"):
        store.require_same(IDENTITY)


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(FedKSeedError, match="not a run's directory"):
        Store(tmp_path)


def test_a_second_process_is_kept_off(store):
    with store.locked():
        script = "import sys, pathlib, fedkseed.run.store as s\nwith s.Store(pathlib.Path(sys.argv[1])).locked(): pass"
        command = [sys.executable, "-c", script, str(store.directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "another process is working on" in done.stderr
    with store.locked():
        pass  # free again


def test_a_damaged_state_is_refused(store):
    with sqlite3.connect(store.directory / "run.sqlite") as database:
        database.execute("UPDATE rounds SET state = x'00112233' WHERE done = 3")
    with pytest.raises(FedKSeedError, match="damaged"):
        store.state(State)
    assert same(store.state(State, 2), state(2))


def test_large_states_are_files_and_the_last_two_are_kept(store):
    big = [
        State(done, np.full(1 << 18, done + 0.5), np.zeros(1, np.int64), np.zeros(1, np.int64)) for done in (4, 5, 6)
    ]
    for made in big:
        store.commit(made, report(made.round - 1))
    assert same(store.state(State), big[2])
    assert same(store.state(State, 5), big[1])
    with pytest.raises(FedKSeedError, match=r"the state after 4 rounds .large ones are not kept for long"):
        store.state(State, 4)
    with pytest.raises(FedKSeedError, match="no state after 4 rounds any more"):
        store.rollback(4)
    store.rollback(5)
    assert same(store.state(State), big[1])


def test_a_damaged_database_is_refused(store):
    (store.directory / "run.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(FedKSeedError, match="not a database"):
        store.state(State)


@contextmanager
def ordinary_user():
    """Root may write anywhere: act as nobody, as an ordinary user would."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    with ordinary_user(), pytest.raises(FedKSeedError, match="Permission denied; check the path"):
        Store.create(locked / "run", "").__enter__()
    with ordinary_user(), pytest.raises(FedKSeedError, match="Permission denied"):
        Store.create(locked, "").__enter__()
    assert not list(locked.iterdir())


def test_a_full_disk_is_one_clear_line_and_loses_nothing(store):
    """A limit on file sizes stands for the end of the disk: the operating system refuses to write on."""
    script = f"""
import resource, signal, sys
from pathlib import Path
import numpy as np
from fedkseed import FedKSeedError, State
from fedkseed.round import Report
from fedkseed.run.store import Store
store = Store(Path({str(store.directory)!r}))
size = (store.directory / "run.sqlite").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 4096, size + 4096))
large = np.zeros(50_000)
try:
    store.commit(State(4, large, large, large.astype(np.int64)), None)
except FedKSeedError as error:
    print(error)
    sys.exit(2)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "check the path, the permissions and the free space" in done.stdout
    assert same(store.state(State), state(3))
    store.commit(state(4), report(3))
    assert same(store.state(State), state(4))


def test_a_run_of_an_earlier_release_is_refused_as_such_and_left_as_it_was(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "recipe.toml").write_text("seed = 1\n")
    with closing(sqlite3.connect(directory / "run.sqlite")) as old, old:  # as the releases of protocol version 1 did
        old.execute("CREATE TABLE rounds (done INTEGER PRIMARY KEY, state BLOB NOT NULL, report TEXT)")
        old.execute("CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
        old.execute("INSERT INTO rounds VALUES (0, x'00', NULL)")
    before = (directory / "run.sqlite").read_bytes()
    for look in (Store.reports, Store.evaluations, Store.require_sound, lambda run: run.state(State)):
        with pytest.raises(FedKSeedError, match="made by an earlier release, whose rounds have no digests: look at it"):
            look(Store(directory))
    with pytest.raises(FedKSeedError, match="made by an earlier release"):
        Store(directory).load_recipe()
    assert (directory / "run.sqlite").read_bytes() == before
