"""The directory of a run: its recipe, every round's state, its metrics, its adapter.

    recipe.toml           the resolved recipe
    run.sqlite            every round's state, report and evaluation; a round counts once it is committed here
    metrics.jsonl         the reports, one a line, with means of evaluations: a copy for people and plots, made from
                          run.sqlite
    adapter.safetensors   the tuned model, as coefficients
    model/                the tuned model, where it is no function of coefficients: adapters or all weights
    state-N.safetensors   the state after N rounds, where it is large: the last two, the best so far by [evaluation]
                          best, and those that clients of an asynchronous round still train with
    lock                  held by the process that works on the run
    now.json              its present activity, for people (now.py)

The process may be killed at any moment: committed rounds are complete, and the run continues from the last of them. All
files are for their owner alone.

Everything has a digest, and those of the rounds are a chain (chain.py): a run in which one bit has changed is refused.
"""

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ..errors import FedKSeedError
from ..evaluation.statistics import Evaluation
from ..files import border, exclusive, private, read_whole, sweep, write_atomically
from ..recipe.reading import MAX_BYTES, load_recipe
from ..recipe.schema import Recipe
from ..round import Report
from . import digest_chain as chain
from .best_round import best_round
from .digest_chain import Receipt

State = TypeVar("State")
LARGE = 1 << 20  # bytes of a state that gets a file of its own
SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS rounds (done INTEGER PRIMARY KEY, state BLOB, report TEXT, parts BLOB, head BLOB);
CREATE TABLE IF NOT EXISTS uploads (done INTEGER, client INTEGER, upload BLOB, signature BLOB,
                                    PRIMARY KEY (done, client));
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT, digest BLOB);
CREATE TABLE IF NOT EXISTS evaluations (done INTEGER PRIMARY KEY, value TEXT, digest BLOB);
COMMIT;
"""
NONCES = "nonces"  # the fact with the nonces of a network's tasks, each with the number of rounds done at its beginning
REACH = "reach"  # the fact with `Federation.reach`, written after the state before the first round
STOPPED = "stopped"  # the fact with the reason for which a run has ended early
DIVERGED = "diverged"  # the fact with the round whose model is tuned, where that reason is divergence
GAINS = "gains"  # the fact with a `Gain` of each client that has sent one, over a network
RECIPE = "recipe"  # the fact with the digests that recipe.toml may have


class Store:
    """The directory of one run: made by `create`, opened again by `Store(directory)`.

    Args:
        looks: nothing is written, and reading takes no longer than it must, since a commit of the process that works
            on the run waits for it: the whole database is not checked.
    """

    def __init__(self, directory: Path, looks: bool = False) -> None:
        self.directory, self._looks = directory, looks
        self.recipe = directory / "recipe.toml"
        self.adapter = directory / "adapter.safetensors"
        self.model = directory / "model"
        self.metrics = directory / "metrics.jsonl"
        self._database = directory / "run.sqlite"
        if not self.recipe.is_file():
            raise FedKSeedError(
                f"{directory} is not a run's directory (no recipe.toml in it); start one with: fedkseed run"
            )

    @classmethod
    @contextmanager
    def create(cls, directory: Path, recipe: str) -> Iterator["Store"]:
        """Make the directory of a new run, and hold its lock.

        Raises:
            FedKSeedError: the directory holds a run, is locked by another process, or can't be written.
        """
        with border(f"can't make the run's directory {directory}"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _lock(directory):
            cls.require_new(directory)
            write_atomically(directory / "recipe.toml", recipe.encode())
            store = cls(directory)
            store.remember(RECIPE, [_digest(recipe.encode())])
            yield store

    @staticmethod
    def require_new(directory: Path) -> None:
        """Refuse a directory that holds a run."""
        if any((directory / name).exists() for name in ("recipe.toml", "run.sqlite")):
            raise FedKSeedError(
                f"{directory} holds a run already; go on with `fedkseed resume {directory}` or choose another directory"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the run, so that no other process works on it.

        Raises:
            FedKSeedError: another process works on the run.
        """
        with _lock(self.directory):
            yield

    @property
    def begun(self) -> bool:
        """Whether a state of the run was written: the one before its first round is the first."""
        return self._row(None) is not None

    @property
    def rounds(self) -> int:
        """Number of finished rounds; −1 before the first state was written."""
        row = self._row(None)
        return -1 if row is None else row.done

    def load_recipe(self) -> Recipe:
        """The run's recipe.

        Raises:
            FedKSeedError: recipe.toml is not the one with which the run began, or not valid.
        """
        found = _digest(read_whole(self.recipe, MAX_BYTES, str(self.recipe)))
        if (known := self.recall(RECIPE)) is not None and found not in known:
            raise FedKSeedError(
                f"{self.recipe} has changed since the run began; bring the old one back, or start a new run"
            )
        return load_recipe(self.recipe)

    @property
    def tuned(self) -> int | None:
        """The number of rounds after which the tuned model was; None: the last round's."""
        best = best_round(self.load_recipe().evaluation, self.evaluations())
        return self.recall(DIVERGED) if best is None else best

    def change_recipe(self, recipe: str) -> None:
        """Write another recipe; a crash leaves either of the two, and both are taken until the new one is there."""
        old, new = self.recall(RECIPE) or [], _digest(recipe.encode())
        self.remember(RECIPE, [*old, new])
        write_atomically(self.recipe, recipe.encode())
        self.remember(RECIPE, [new])

    def require_sound(self, done: int | None = None) -> None:
        """Check the database and every digest of the run, up to `done` rounds or all.

        Raises:
            FedKSeedError: something has changed since it was written, or is lacking.
        """
        with self._connect() as database:
            self._require_whole(database)
            rows = database.execute("SELECT done, state, report, parts, head FROM rounds ORDER BY done").fetchall()
            names = [name for (name,) in database.execute("SELECT name FROM facts").fetchall()]
            later = "SELECT done FROM uploads WHERE done > ?1 UNION SELECT done FROM evaluations WHERE done > ?1"
            lacking = database.execute(later, (len(rows) - 1,)).fetchone() is not None and done is None
        for name in names:
            if not isinstance(name, str):
                raise self._damaged(f"a fact has the name {name!r}")
            self.recall(name)
        self.evaluations()
        if lacking or (rows and RECIPE not in names) or (not rows and REACH in names):
            raise self._damaged("rounds or facts are lacking")
        before: bytes | None = None
        for number, (round_, state, report, parts, head) in enumerate(rows):
            if round_ != number or not isinstance(parts, bytes) or head != chain.head(before, chain.link_of(parts)):
                raise self._damaged(f"the digest of round {number} does not fit")
            if not isinstance(state, bytes) or not isinstance(report, str if number else NoneType):
                raise self._damaged(f"the state or the report of round {number} is of another type")
            large = state == b""
            if (
                chain.parts(b"" if large else state, report, self.receipts(number), parts[-chain.SIZE :])[
                    chain.SIZE * large :
                ]
                != parts[chain.SIZE * large :]
            ):
                raise self._damaged(f"the state, the report or an upload of round {number} has changed")
            before = head
            if number == done:
                return

    def receipts(self, done: int) -> dict[int, Receipt]:
        """The uploads of which the state after `done` rounds was made, by client."""
        with self._connect() as database:
            rows = database.execute(
                "SELECT client, upload, signature FROM uploads WHERE done = ? ORDER BY client", (done,)
            ).fetchall()
        for client, *data in rows:
            if not (
                isinstance(client, int) and 0 <= client < 1 << 32 and all(isinstance(part, bytes) for part in data)
            ):
                raise self._damaged(f"an upload of round {done} is of another type, or of client {client!r}")
        return {client: Receipt(upload, signature) for client, upload, signature in rows}

    def history(self, since: int, done: int) -> tuple[list[bytes], bytes, bytes]:
        """The links of the chain from the state after `since` rounds to that after `done`; the head and stem there."""
        with self._connect() as database:
            asked = "SELECT parts FROM rounds WHERE done BETWEEN ? AND ? ORDER BY done"
            rows = database.execute(asked, (since, done)).fetchall()
        if len(rows) != max(0, done + 1 - since) or not all(isinstance(parts, bytes) for (parts,) in rows):
            raise self._damaged(f"the digests of rounds {since} to {done} are lacking")
        return [chain.link_of(parts) for (parts,) in rows], self.head(done), chain.stem(self.parts(done))

    def parts(self, done: int) -> bytes:
        """The digests of the state after `done` rounds, of its report and of its receipts."""
        row = self._row(done)
        if row is None:
            raise self._damaged("there is no round")
        return row.parts

    def head(self, done: int) -> bytes:
        """The head of the chain after `done` rounds."""
        row = self._row(done)
        if row is None:
            raise self._damaged("there is no round")
        return row.head

    def _require_whole(self, database: sqlite3.Connection, table: str = "") -> None:
        """Refuse a database, or a table of it, whose pages do not fit together: rows could be lacking unnoticed."""
        if not self._looks and (found := database.execute(f"PRAGMA integrity_check{table}").fetchone()[0]) != "ok":
            raise self._damaged(str(found))

    def _damaged(self, what: str) -> FedKSeedError:
        return FedKSeedError(
            f"{self._database} is damaged: {what}; bring back a copy of {self.directory}, roll back to a round before "
            "the damage, or start again"
        )

    def require_same(self, identity: dict[str, str]) -> None:
        """Refuse to continue a run with another base model, pool or data than it began with.

        Raises:
            FedKSeedError: one of them differs; the message has both values.
        """
        known = self.recall("identity")
        if known is None and (row := self._row(None)) is not None and row.done:
            raise self._damaged("what the run began with is lacking")
        if known is None:
            self.remember("identity", identity)
            return
        for name, value in identity.items():
            if known.get(name) != value:
                raise FedKSeedError(
                    f"{self.directory} began with {name} {known.get(name)}, now it is {value}; "
                    "bring back what has changed, or start a new run"
                )

    def commit(
        self,
        state: Any,
        report: Report | None,
        keep: Collection[int] | None = None,
        receipts: Mapping[int, Receipt] | None = None,
        broadcast: bytes = b"",
    ) -> None:
        """Write a round to disk for good, then copy its report to metrics.jsonl.

        Args:
            keep: rounds whose states are kept where states are large; None: this one and the one before.
            receipts: by client: the uploads of the round, to be kept.
            broadcast: the message of the next round, which the chain binds to the state; empty where clients of a round
                get different ones.

        Raises:
            FedKSeedError: the round can't be written, or the one before is lacking; all earlier rounds are still there.
        """
        text = None if report is None else json.dumps(_plain(asdict(report)))
        packed, receipts = pack(state), receipts or {}
        before = self._row(state.round - 1) if state.round else None
        parts = chain.parts(packed, text, receipts, chain.digest(broadcast))
        head = chain.head(before.head if before else None, chain.link_of(parts))
        if len(packed) > LARGE:  # before the commit: a committed round must have its state
            write_atomically(self._large(state.round), packed)
            packed = b""
        with self._connect() as database:
            row = (state.round, packed, text, parts, head)
            database.execute("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?, ?)", row)
            database.execute("DELETE FROM uploads WHERE done = ?", (state.round,))
            database.executemany(
                "INSERT INTO uploads VALUES (?, ?, ?, ?)",
                [(state.round, client, one.upload, one.signature) for client, one in receipts.items()],
            )
        if not packed:
            kept = {self._large(done) for done in keep or (state.round, state.round - 1)}
            for old in self.directory.glob(self._large("*").name):
                if old not in kept:
                    old.unlink(missing_ok=True)
        if text is not None:
            with (
                border(f"can't write {self.metrics}"),
                open(self.metrics, "a", encoding="utf-8", opener=private) as file,
            ):
                file.write(text + "\n")

    def state(self, kind: type[State], done: int | None = None) -> State | None:
        """The state after `done` rounds, or the latest; None before the first commit.

        Args:
            kind: the class of the run's states, `Strategy.state`.

        Raises:
            FedKSeedError: the store has no such round, or its state is damaged.
        """
        row = self._row(done)
        if row is None:
            return None
        if row.state:
            return unpack(row.state, kind, row.done, self._database)
        path = self._large(row.done)
        with border(f"can't read {path}, the state after {row.done} rounds (large ones are not kept for long)"):
            packed = path.read_bytes()
        if chain.digest(packed) != row.parts[: chain.SIZE]:
            raise self._damaged(f"{path} has changed")
        return unpack(packed, kind, row.done, path)

    def _row(self, done: int | None) -> "_Round | None":
        with self._connect() as database:
            last = database.execute("SELECT max(done) FROM rounds").fetchone()[0] if done is None else done
            found = database.execute("SELECT done, state, parts, head FROM rounds WHERE done = ?", (last,)).fetchone()
        if found is None and done is not None:
            raise FedKSeedError(
                f"{self.directory} has no state after {done} rounds; list them with: fedkseed rounds {self.directory}"
            )
        if found is None:
            return None
        row = _Round(*found)
        if not all(isinstance(part, bytes) for part in found[1:]) or (
            row.state and chain.digest(row.state) != row.parts[: chain.SIZE]
        ):
            raise self._damaged(f"the state after {row.done} rounds has changed")
        return row

    def _large(self, round_: int | str) -> Path:
        return self.directory / f"state-{round_}.safetensors"

    def reports(self) -> list[dict[str, Any]]:
        """The reports of all finished rounds, in order."""
        with self._connect() as database:
            self._require_whole(database)
            rows = database.execute("SELECT done, report, parts FROM rounds ORDER BY done").fetchall()
        for number, (done, report, parts) in enumerate(rows):
            if done != number or not isinstance(report, str if number else NoneType) or not isinstance(parts, bytes):
                raise self._damaged(f"the report of round {number} is lacking")
            if chain.digest((report or "").encode()) != parts[chain.SIZE : 2 * chain.SIZE]:
                raise self._damaged(f"the report of round {number} has changed")
        return [json.loads(report) for _, report, _ in rows[1:]]

    def rollback(self, done: int) -> None:
        """Delete everything after `done` rounds, in one transaction."""
        self.require_sound(done)
        if self.load_recipe().privacy is not None:
            raise FedKSeedError(
                f"{self.directory} has [privacy], and rounds that are done again are paid for again: what its clients "
                "gave can't be taken back; begin a new run"
            )
        if nonces := self.recall(NONCES):  # clients that have seen what is deleted would take it for a forged history
            self.remember(NONCES, [entry for entry in nonces if entry[0] <= done] + [[done, None]])
        row, needed = self._row(done), {*range(max(0, done - (self.recall(REACH) or 0)), done + 1)}
        large = row is not None and not row.state
        if large:
            left = {number: found for number, found in self.evaluations().items() if number <= done}
            best = best_round(self.load_recipe().evaluation, left)
            needed |= set() if best is None else {best}
        if large and not all(self._large(n).exists() for n in needed):
            raise FedKSeedError(
                f"{self.directory} has no state after {done} rounds any more, or none that it needs to go on: "
                "large ones are not kept for long"
            )
        self.remember(STOPPED, None)
        self.remember(DIVERGED, None)
        with border(f"can't remove {self.adapter}"):  # first: no adapter of deleted rounds must stay
            self.adapter.unlink(missing_ok=True)
            shutil.rmtree(self.model, ignore_errors=True)
        with self._connect() as database:
            database.execute("DELETE FROM rounds WHERE done > ?", (done,))
            database.execute("DELETE FROM uploads WHERE done > ?", (done,))
            database.execute("DELETE FROM evaluations WHERE done > ?", (done,))
        self.copy_metrics()

    def evaluated(self, done: int, scores: dict[str, Any]) -> None:
        """Write the scores of the model after `done` rounds, and their means to metrics.jsonl."""
        value = json.dumps(scores)
        row = (done, value, _sealed(str(done), value))
        with self._connect() as database:
            database.execute("INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?)", row)
        self.copy_metrics()

    def evaluations(self) -> dict[int, dict[str, Any]]:
        """The evaluations in order: number of rounds -> fields of `Evaluation`; 0 is the base model."""
        with self._connect() as database:
            self._require_whole(database, "(evaluations)")
            rows = database.execute("SELECT done, value, digest FROM evaluations ORDER BY done").fetchall()
        return {done: self._opened(str(done), value, seal) for done, value, seal in rows}

    def copy_metrics(self) -> None:
        """Rewrite metrics.jsonl: a killed process may have left out its last line, or cut it.

        A line is a report with, where the model after its round was evaluated, the means as `evaluation`. The first
        line has those of the base model as `base`.
        """
        means = {done: _plain(Evaluation.of(found).means) for done, found in self.evaluations().items()}
        lines = [
            report
            | ({"base": means[0]} if report["round"] == 0 and 0 in means else {})
            | ({"evaluation": means[report["round"] + 1]} if report["round"] + 1 in means else {})
            for report in self.reports()
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_atomically(self.metrics, text.encode())

    def remember(self, name: str, value: Any) -> None:
        """Write a JSON value under a name."""
        text = json.dumps(value)
        with self._connect() as database:
            database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", (name, text, _sealed(name, text)))

    def recall(self, name: str) -> Any:
        """The value written under a name, or None."""
        with self._connect() as database:
            row = database.execute("SELECT value, digest FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else self._opened(name, *row)

    def _opened(self, name: str, value: Any, seal: Any) -> Any:
        """A JSON value that was written under a name, checked against its digest."""
        if not isinstance(value, str) or seal != _sealed(name, value):
            raise self._damaged(f"what is written under {name!r} has changed")
        return json.loads(value)

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """One transaction, which is on disk when it ends: synchronous=FULL syncs the journal and the file."""
        if not (self._looks or self._database.exists()):
            # SQLite would make it for all to read; its journals get the same permissions
            with border(f"can't make {self._database}"), open(self._database, "ab", opener=private):
                pass
        try:
            with (
                border(f"can't use {self._database}"),
                _looking(self._database) if self._looks else closing(_connection(self._database)) as database,
            ):
                database.execute("PRAGMA synchronous = FULL")
                columns = [name for _, name, *_ in database.execute("PRAGMA table_info(rounds)")]
                if columns and "parts" not in columns:
                    raise FedKSeedError(
                        f"{self.directory} was made by an earlier release, whose rounds have no digests: look at it "
                        "with that release, or start a new run; its adapter can still be applied and exported"
                    )
                if not (tables := _tables(database)):
                    database.executescript(SCHEMA)  # in a new file only: else a table that is lacking would seem empty
                elif tables != _own_tables():  # a view may never end, or show each reader something else
                    raise self._damaged("its tables are not those of a run")
                with database:
                    yield database
        except (UnicodeDecodeError, MemoryError) as error:  # a damaged file's names in SQLite's errors; its sizes
            raise self._damaged(str(error)) from error


def _connection(path: Path, mode: str = "rw") -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", timeout=10, uri=True)


@contextmanager
def _looking(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that writes nothing, to a database that another process may be writing or about to make."""
    with ExitStack() as stack:
        if not path.exists() or not path.stat().st_size:
            database = stack.enter_context(closing(sqlite3.connect(":memory:")))
            database.executescript(SCHEMA)
            yield database
            return
        database = stack.enter_context(closing(_connection(path, "ro")))
        try:
            _tables(database)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname != "SQLITE_READONLY_ROLLBACK":
                raise
            # A process was killed within a commit. Whoever goes on with the run undoes it; here, a copy is mended.
            folder = Path(stack.enter_context(TemporaryDirectory()))
            for part in (path, path.with_name(f"{path.name}-journal")):
                shutil.copyfile(part, folder / part.name)
            database = stack.enter_context(closing(_connection(folder / path.name)))
        yield database


def _tables(database: sqlite3.Connection) -> set[tuple[Any, ...]]:
    """The tables of a database and all else that it defines, as SQL."""
    return {*database.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchall()}


@cache
def _own_tables() -> set[tuple[Any, ...]]:
    """The tables that SCHEMA defines."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(SCHEMA)
        return _tables(database)


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    taken = f"another process is working on {directory}; wait for it, or stop it and use `fedkseed resume`"
    with exclusive(directory / "lock", taken):
        sweep(directory, "state-*.safetensors", "adapter.safetensors", "model")
        yield


@dataclass(frozen=True, slots=True)
class _Round:
    """A row of the table of rounds; the state is empty where it has a file of its own."""

    done: int
    state: bytes
    parts: bytes
    head: bytes


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sealed(name: str, value: str) -> bytes:
    """The digest of a value under a name."""
    return chain.digest(name.encode() + b"\0" + value.encode())


def pack(state: Any) -> bytes:
    """The bytes of a state in a store."""
    return save({field.name: np.atleast_1d(getattr(state, field.name)) for field in fields(state)})


def unpack(data: bytes, kind: type[State], done: int, where: Path) -> State:
    """The state after `done` rounds from its bytes, which are those of `where`."""
    try:
        tensors = load(data)
        if (of := tensors.pop("round").tolist()) != [done]:
            raise ValueError(f"the state of round {done} says that it is of {of}")
        return kind(**{"round": done}, **tensors)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise FedKSeedError(f"{where} is damaged ({error}); roll back to an earlier round or start again") from error


def _plain(report: dict[str, Any]) -> dict[str, Any]:
    """The report with numbers that are not finite as None, since JSON has no NaN: a loss, where none was finite."""
    return {
        name: None if isinstance(value, float) and not np.isfinite(value) else value for name, value in report.items()
    }
