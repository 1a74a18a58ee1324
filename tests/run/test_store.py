"""A run's directory: whole after any crash, clear when it can't be written."""

import fcntl
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tracemalloc
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fedkseed import FedKSeedError, State, files
from fedkseed.round import Report
from fedkseed.run import digest_chain as chain
from fedkseed.run.store import GAINS, NONCES, Store, pack
from fedkseed.run.verify import verify

from . import synthetic

RECIPE = "seed = 1\n[model]\nname = 'none'\n"
IDENTITY = {"a base model of digest": "aa", "data of digest": "bb"}


def state(done: int) -> State:
    rng = np.random.default_rng(done)
    return State(done, rng.normal(size=8), rng.integers(0, 999, 8), rng.integers(0, 9, 8))


def report(number: int, loss: float = 1.5) -> Report:
    return Report(number, (1, 2), 100, 50, 300, loss, 0, 0.5)


@pytest.fixture
def store(tmp_path) -> Store:
    with Store.create(tmp_path / "run", RECIPE) as made:
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


def test_metrics_are_copied_one_report_at_a_time(store):
    with store.transaction() as connection:  # as many rounds as there are, of a cohort of a thousand
        connection.execute("DELETE FROM rounds WHERE done > 0")
        for done in range(1, 300):
            text = json.dumps({"clients": [*range(1000)], "round": done - 1})
            row = (done, text, chain.parts(b"", text, {}, b""))
            connection.execute("INSERT INTO rounds VALUES (?, x'', ?, ?, x'')", row)
    store.evaluated(0, {"losses": [2.0]})
    tracemalloc.start()
    try:
        store.evaluated(250, {"losses": [1.0]})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    lines = [json.loads(line) for line in store.metrics.read_text().splitlines()]
    added = {number: line for number, line in enumerate(lines, 1) if len(line) > 2}
    assert [line["round"] for line in lines] == [*range(299)]
    assert {number: [*line][2:] for number, line in added.items()} == {1: ["base"], 250: ["evaluation"]}
    assert peak < store.metrics.stat().st_size / 4


def test_a_round_without_a_finite_loss_is_valid_json(store):
    store.commit(state(4), report(3, float("nan")))
    assert json.loads(store.metrics.read_text().splitlines()[-1])["loss"] is None


def test_a_run_can_go_back_from_a_damaged_last_round(store):
    store.rows("UPDATE rounds SET state = x'00' WHERE done = 3")
    store.rollback(1)
    assert same(store.state(State), state(1))


def test_rollback_forgets_what_came_after(store):
    for done in range(4):
        store.evaluated(done, {"losses": [done]})
    store.adapter.write_bytes(b"x")
    store.remember(NONCES, nonces := [[0, "a"], [3, "b"]])
    store.remember(GAINS, ["of the last model"])
    for done in (4, 10**30):
        with pytest.raises(FedKSeedError, match=f"no state after {done} rounds"):
            store.rollback(done)
        assert (store.recall(NONCES), store.recall(GAINS)) == (nonces, ["of the last model"])
    store.rollback(1)
    assert (store.recall(NONCES), store.recall(GAINS)) == ([[0, "a"], [1, None]], None)
    assert same(store.state(State), state(1))
    assert len(store.metrics.read_text().splitlines()) == 1
    assert store.evaluations() == {0: {"losses": [0]}, 1: {"losses": [1]}}
    assert not store.adapter.exists()
    with pytest.raises(FedKSeedError, match="no state after 2 rounds"):
        store.rollback(2)


def test_a_directory_with_a_run_is_not_run_over(store):
    with pytest.raises(FedKSeedError, match="holds a run already"), Store.create(store.directory, "seed = 2\n"):
        pass
    assert store.recipe.read_text() == RECIPE
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
    synthetic.change(store, "DELETE FROM facts WHERE name = 'identity'")
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
    synthetic.change(store, "UPDATE rounds SET state = x'00112233' WHERE done = 3")
    with pytest.raises(FedKSeedError, match="damaged"):
        store.state(State)
    assert same(store.state(State, 2), state(2))


def test_large_states_are_files_and_the_last_two_are_kept(store):
    none = np.zeros(1, np.int64)
    big = [State(done, np.full(1 << 18, done + 0.5), none, none) for done in (4, 5, 6)]
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


def looked(store: Store) -> Store:
    return Store(store.directory, looks=True)


def contents(directory: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.iterdir()}


def test_a_look_finds_everything_and_writes_nothing(store):
    store.evaluated(1, {"losses": [1.0], "rouge": [], "empty": []})
    before = contents(store.directory)
    look = looked(store)
    assert look.reports() == store.reports()
    assert same(look.state(State), state(3))
    assert look.evaluations() == store.evaluations()
    assert (look.rounds, look.recall("identity"), look.recall("nothing")) == (3, IDENTITY, None)
    assert look.load_recipe() == store.load_recipe()
    with pytest.raises(FedKSeedError, match="readonly"):
        look.remember("identity", {})
    assert contents(store.directory) == before


def test_a_look_at_a_run_without_a_database_makes_none(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    look = Store(tmp_path, looks=True)
    assert (look.rounds, look.reports(), look.evaluations()) == (-1, [], {})
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]
    (tmp_path / "run.sqlite").touch()
    assert look.reports() == []
    assert (tmp_path / "run.sqlite").stat().st_size == 0


KILLED = """
import os, sqlite3, sys
database = sqlite3.connect(sys.argv[1])
database.execute("PRAGMA cache_size = 1")
database.execute("DELETE FROM rounds WHERE done > 1")
for number in range(3000):
    database.execute("INSERT INTO uploads VALUES (9, ?, ?, ?)", (number, bytes(300), b""))
print(os.path.getsize(sys.argv[1] + "-journal"), flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_look_at_a_run_that_was_killed_within_a_commit_shows_what_was_committed_before(store):
    database = store.directory / "run.sqlite"
    command = [sys.executable, "-c", KILLED, str(database)]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert int(killed.stdout) > 0
    reading = closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True))
    with reading as reader, pytest.raises(sqlite3.OperationalError):  # the journal is hot: a writer would undo it
        reader.execute("SELECT * FROM rounds")
    before = contents(store.directory)
    assert [r["round"] for r in looked(store).reports()] == [0, 1, 2]
    assert contents(store.directory) == before
    assert [r["round"] for r in store.reports()] == [0, 1, 2]
    assert not database.with_name("run.sqlite-journal").exists()


def test_a_process_that_begins_while_its_lock_is_looked_at_is_not_refused(store, monkeypatch):
    waited = []
    with (store.directory / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)

        def sleep(seconds: float) -> None:
            waited.append(seconds)
            fcntl.flock(file, fcntl.LOCK_UN)

        monkeypatch.setattr(files.time, "sleep", sleep)
        with store.locked():
            assert waited == [files.GLANCE]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    """The tuned model of the undisturbed run."""
    return synthetic.begin(tmp_path_factory.mktemp("whole") / "run").adapter.read_bytes()


@pytest.fixture(scope="module")
def half_done(tmp_path_factory) -> Path:
    """A run of 6 rounds that was stopped after 3."""
    return synthetic.begin(tmp_path_factory.mktemp("half") / "run", stop=3).directory


@pytest.fixture
def half(half_done, tmp_path) -> Store:
    return Store(Path(shutil.copytree(half_done, tmp_path / "half")))


def test_a_stopped_run_ends_like_the_undisturbed_one(half, whole):
    assert synthetic.resume(half.directory) == whole


@pytest.mark.parametrize(
    ("name", "places"), [("recipe.toml", 300), ("run.sqlite", 300), ("metrics.jsonl", 40), ("lock", 40)]
)
def test_one_flipped_bit_anywhere_in_a_runs_files_is_refused_or_makes_no_difference(
    half, whole, tmp_path, name, places
):
    """Before there were digests, 72 of 300 places led to another model, or to a traceback."""
    refusals = 0
    for where in synthetic.flips(half.directory / name, places):
        copy = Path(shutil.copytree(half.directory, tmp_path / "copy"))
        try:
            assert synthetic.resume(copy) == whole, where
        except FedKSeedError:
            refusals += 1
        shutil.rmtree(copy)
    assert bool(refusals) == (name in ("recipe.toml", "run.sqlite")), "the other two are written anew"


def test_one_flipped_bit_in_a_finished_runs_adapter_is_mended_by_resuming(whole, tmp_path):
    store = synthetic.begin(tmp_path / "run")
    for where in synthetic.flips(store.adapter, 300):
        with pytest.raises(FedKSeedError):
            verify(store)
        if where.startswith("bit 0"):
            assert synthetic.resume(store.directory) == whole, where
    assert verify(store).rounds == synthetic.ROUNDS


def test_one_flipped_bit_never_shows_a_reader_something_else(half):
    """What `fedkseed rounds`, `report` and `verify` read."""
    readers = [half.reports, half.evaluations, partial(verify, half)]
    expected, refusals = [read() for read in readers], 0
    for where in synthetic.flips(half.directory / "run.sqlite", 300):
        for read, right in zip(readers, expected, strict=True):
            if synthetic.refused(read):
                refusals += 1
            else:
                assert read() == right, where
    assert refusals


def test_a_page_of_another_table_is_not_taken_for_that_of_the_rounds(half):
    """A flipped bit in the number of a table's first page: SQLite then reads whatever is there."""
    path, expected = half.directory / "run.sqlite", half.reports()
    with closing(sqlite3.connect(path)) as database:
        (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'rounds'").fetchone()
        pages = database.execute("PRAGMA page_count").fetchone()[0]
    data = path.read_bytes()
    at = data.index(b"tablerounds") + len(b"tableroundsrounds")
    assert data[at] == root
    for page in range(pages + 2):
        path.write_bytes(data[:at] + bytes([page]) + data[at + 1 :])
        assert page == root or synthetic.refused(half.reports), f"page {page} in place of {root}"
    path.write_bytes(data)
    assert half.reports() == expected


# What whoever can write run.sqlite can do to it. SQLite keeps any type in any column.
CHANGES = [
    "UPDATE rounds SET state = (SELECT state FROM rounds WHERE done = 1) WHERE done = 3",
    "UPDATE rounds SET state = '' WHERE done = 2",
    "UPDATE rounds SET state = 'abc' WHERE done = 2",
    "UPDATE rounds SET state = NULL WHERE done = 2",
    "UPDATE rounds SET state = x'' WHERE done = 3",
    """UPDATE rounds SET report = replace(report, '"round": 1', '"round": 2') WHERE done = 2""",
    "UPDATE rounds SET report = CAST(report AS BLOB) WHERE done = 2",
    "UPDATE rounds SET report = 5 WHERE done = 2",
    "UPDATE rounds SET report = NULL WHERE done = 2",
    "UPDATE rounds SET report = '' WHERE done = 0",
    "UPDATE rounds SET parts = 7 WHERE done = 2",
    "UPDATE rounds SET parts = NULL WHERE done = 3",
    "UPDATE rounds SET head = NULL WHERE done = 2",
    "UPDATE rounds SET head = 'x' WHERE done = 3",
    "UPDATE rounds SET done = 10 - done",
    "UPDATE rounds SET done = 9 WHERE done = 2",
    "UPDATE rounds SET done = 9223372036854775807 WHERE done = 3",
    "UPDATE rounds SET done = -1 WHERE done = 0",
    "UPDATE uploads SET client = 3 - client + 100 WHERE done = 2",
    "UPDATE uploads SET client = 1099511627777 WHERE done = 2 AND client = 2",
    "UPDATE uploads SET client = -1 WHERE done = 2 AND client = 2",
    "UPDATE uploads SET client = 'a' WHERE done = 2 AND client = 2",
    "UPDATE uploads SET done = 2.5 WHERE done = 2 AND client = 2",
    "UPDATE uploads SET done = 7 WHERE done = 2 AND client = 2",
    "UPDATE uploads SET upload = CAST('a' AS TEXT) WHERE done = 2",
    "UPDATE uploads SET signature = x'00' WHERE done = 2",
    "UPDATE uploads SET upload = (SELECT upload FROM uploads WHERE done = 1 AND client = 2) WHERE done = 2",
    "UPDATE facts SET name = x'00' WHERE name = 'reach'",
    "UPDATE facts SET name = NULL WHERE name = 'reach'",
    "UPDATE facts SET value = x'00' WHERE name = 'reach'",
    "UPDATE facts SET value = '99' WHERE name = 'reach'",
    "UPDATE facts SET value = (SELECT value FROM facts WHERE name = 'recipe') WHERE name = 'identity'",
    "UPDATE facts SET digest = 'x'",
    "UPDATE evaluations SET value = replace(value, '1.0', '0.1')",
    "UPDATE evaluations SET value = 7",
    "UPDATE evaluations SET digest = NULL",
    "UPDATE evaluations SET done = 2",
    "UPDATE evaluations SET done = 1000",
    "DELETE FROM rounds",
    "DELETE FROM rounds WHERE done = 0",
    "DELETE FROM rounds WHERE done = 2",
    "DELETE FROM rounds WHERE done = 3",
    "DELETE FROM uploads",
    "DELETE FROM uploads WHERE done = 2 AND client = 1",
    "DELETE FROM facts",
    "DELETE FROM facts WHERE name = 'identity'",
    "DELETE FROM facts WHERE name = 'recipe'",
    "ALTER TABLE rounds RENAME TO others",
    "ALTER TABLE evaluations RENAME TO others",
    "ALTER TABLE uploads RENAME TO others",
    "ALTER TABLE facts RENAME TO others",
]


@pytest.mark.parametrize("statement", CHANGES)
def test_a_change_of_any_kind_in_the_database_is_refused(half, statement):
    synthetic.change(half, statement)
    with pytest.raises(FedKSeedError):
        synthetic.resume(half.directory)
    with pytest.raises(FedKSeedError):
        verify(half)
    for read in (half.reports, half.evaluations):
        synthetic.refused(read)  # or it reads what was not changed; a traceback would pass on


@pytest.mark.parametrize(
    "statements",
    [
        ["ALTER TABLE rounds RENAME TO others", "CREATE VIEW rounds AS SELECT * FROM others"],
        ["CREATE TRIGGER more AFTER INSERT ON rounds BEGIN DELETE FROM uploads; END"],
        ["CREATE TABLE more (a INTEGER)"],
    ],
    ids=["a view", "a trigger", "a table"],
)
def test_a_database_that_defines_anything_else_is_refused(half, statements):
    """The attack: a run for `fedkseed verify`, whose view of its rounds never ends, or is another the next day."""
    before = half.reports()
    with closing(sqlite3.connect(half.directory / "run.sqlite")) as database, database:
        for statement in statements:
            database.execute(statement)
        assert len(database.execute("SELECT * FROM rounds").fetchall()) == len(before) + 1, "the rows are the same"
    for read in (half.reports, half.evaluations, partial(verify, half), half.load_recipe):
        with pytest.raises(FedKSeedError, match="its tables are not those of a run"):
            read()


def test_a_strangers_recipe_that_never_ends_is_not_read_to_its_end(half):
    with half.recipe.open("ab") as file:
        file.truncate(1 << 40)  # a sparse one: it takes no space
    with pytest.raises(FedKSeedError, match=r"recipe\.toml: it has more than 65,536 bytes"):
        verify(half)


def test_two_rounds_that_change_places_are_refused(half):
    for statement in (
        "UPDATE rounds SET done = 99 WHERE done = 1",
        "UPDATE rounds SET done = 1 WHERE done = 2",
        "UPDATE rounds SET done = 2 WHERE done = 99",
    ):
        synthetic.change(half, statement)
    with pytest.raises(FedKSeedError, match="the digest of round 1 does not fit"):
        synthetic.resume(half.directory)


def test_a_run_that_has_lost_all_its_rounds_does_not_begin_again_in_silence(half):
    """A new first round would be the run's second one, of which its clients have signed another."""
    for statement in ("DELETE FROM rounds", "DELETE FROM uploads", "DELETE FROM evaluations"):
        synthetic.change(half, statement)
    with pytest.raises(FedKSeedError, match="rounds or facts are lacking"):
        synthetic.resume(half.directory)


@pytest.mark.parametrize("statement", ["DELETE FROM evaluations", "DELETE FROM facts WHERE name = 'reach'"])
def test_what_follows_from_the_rest_is_found_again(half, whole, statement):
    synthetic.change(half, statement)
    assert synthetic.resume(half.directory) == whole


def test_a_learning_rate_a_thousand_times_as_large_is_refused(half):
    text = half.recipe.read_text()
    half.recipe.write_text(text.replace("lr = 0.01", "lr = 10.0"))
    assert half.recipe.read_text() != text
    with pytest.raises(FedKSeedError, match=r"recipe\.toml has changed since the run began"):
        synthetic.resume(half.directory)


def test_a_run_can_go_back_to_before_the_damage(half, whole):
    synthetic.change(half, "DELETE FROM rounds WHERE done = 2")
    with pytest.raises(FedKSeedError, match="roll back to a round before the damage"):
        synthetic.resume(half.directory)
    half.rollback(1)
    assert synthetic.resume(half.directory) == whole


def test_a_state_that_says_it_is_of_another_round_is_refused(store):
    """With digests that fit, as a server could write it: `verify` would look at no round, or at 10^9."""
    for number in (-1, 2, 1 << 60):
        packed = pack(replace(state(3), round=number))
        synthetic.change(store, "UPDATE rounds SET state = ? WHERE done = 3", packed)
        synthetic.mend(store)
        with pytest.raises(FedKSeedError, match=r"the state of round 3 says that it is of"):
            store.state(State)


def test_no_digest_of_a_history_is_left_out_in_silence(half):
    links, head, stem = half.history(0, 3)
    assert (len(links), head, stem) == (4, half.head(3), chain.stem(half.row(3).parts))
    assert half.history(4, 3) == ([], head, stem), "a client that has seen all is sent none"
    synthetic.change(half, "DELETE FROM rounds WHERE done = 1")
    with pytest.raises(FedKSeedError, match="the digests of rounds 0 to 3 are lacking"):
        half.history(0, 3)
