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
    now.json              its present activity, for people (activity.py)

The process may be killed at any moment: committed rounds are complete, and the run continues from the last of them. All
files are for their owner alone.

Everything has a digest, and those of the rounds are a chain (digest_chain.py): a run in which one bit
has changed is refused.
"""

import json
import shutil
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ..errors import FedKSeedError
from ..evaluation.statistics import Evaluation
from ..files import border, exclusive, private, read_whole, sweep, write_atomically
from ..recipe.reading import MAX_BYTES, load_recipe
from ..recipe.schema import Recipe
from ..round import Report
from ..weights.adapter import ADAPTER
from . import digest_chain as chain
from .best_round import best_round
from .digest_chain import Receipt

State = TypeVar("State")
LARGEST_INTEGER = (1 << 63) - 1  # of SQLite
LARGE = 1 << 20  # bytes of a state that gets a file of its own
NONCES = "nonces"  # the fact with the nonces of a network's tasks, each with the number of rounds done at its beginning
AUDIENCES = "audiences"  # the fact with those for whom a network's clients have signed their uploads
REACH = "reach"  # the fact with `Federation.reach`, written after the state before the first round
STOPPED = "stopped"  # the fact with the reason for which a run has ended early
DIVERGED = "diverged"  # the fact with the round whose model is tuned, where that reason is divergence
NOTES = "notes"  # the fact with the lines on the data: its files, what is left out, warnings
KEPT = "kept"  # the fact with a network's nonce, and the clients that have kept the tuned model
GAINS = "gains"  # the fact with a `Gain` of each client that has sent one, over a network
FORGOTTEN = "forgotten"  # the fact with the clients without whose uploads the run was recomputed
RECIPE = "recipe"  # the fact with the digests that recipe.toml may have
WRITE_FACT = "INSERT OR REPLACE INTO facts VALUES (?, ?, ?)"
SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS rounds (done INTEGER PRIMARY KEY, state BLOB, report TEXT, parts BLOB, head BLOB);
CREATE TABLE IF NOT EXISTS uploads (done INTEGER, client INTEGER, upload BLOB, signature BLOB,
                                    PRIMARY KEY (done, client));
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT, digest BLOB);
CREATE TABLE IF NOT EXISTS evaluations (done INTEGER PRIMARY KEY, value TEXT, digest BLOB);
COMMIT;
"""


def runs_near(path: Path) -> str:
    """The end of an error's sentence on a path where no run is: runs nearby, or how to start one."""
    folders = dict.fromkeys((path, path.parent, Path("runs")))
    near = sorted(f"{file.parent}" for folder in folders for file in folder.glob("*/run.sqlite"))
    others = f" and {len(near) - 4} more" if len(near) > 4 else ""
    return f"there are runs at {', '.join(near[:4])}{others}" if near else "start one: fedkseed run RECIPE"


class Store:
    """The directory of one run: made by `create`, opened again by `Store(directory)`.

    Args:
        looks: nothing is written, and reading takes no longer than it must, since a commit of the process that works
            on the run waits for it: the whole database is not checked.
    """

    def __init__(self, directory: Path, looks: bool = False) -> None:
        self.directory, self.looks, self.path = directory, looks, directory / "run.sqlite"
        self.recipe, self.metrics = directory / "recipe.toml", directory / "metrics.jsonl"
        self.adapter, self.model = directory / ADAPTER, directory / "model"
        if not self.recipe.is_file():
            raise FedKSeedError(f"{directory} is not a run's directory (no recipe.toml in it); {runs_near(directory)}")

    @classmethod
    @contextmanager
    def create(cls, directory: Path, recipe: str) -> Iterator["Store"]:
        """Make the directory of a new run, and hold its lock; one that holds a run, or is locked, is refused."""
        with border(f"can't make the run's directory {directory}"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _lock(directory):
            cls.require_new(directory)
            write_atomically(directory / "recipe.toml", recipe.encode())
            store = cls(directory)
            store.remember(RECIPE, [chain.digest(recipe.encode()).hex()])
            yield store

    @staticmethod
    def require_new(directory: Path) -> None:
        """Refuse a directory that holds a run."""
        if any((directory / name).exists() for name in ("recipe.toml", "run.sqlite")):
            raise FedKSeedError(
                f"{directory} holds a run already; `fedkseed resume {directory}`, or name another place"
            )

    def locked(self) -> AbstractContextManager[None]:
        """Hold the lock of the run, which is refused while another process works on it."""
        return _lock(self.directory)

    @property
    def rounds(self) -> int:
        """Number of finished rounds; −1 before the first state was written, which is that before the first round."""
        ((done,),) = self.rows("SELECT max(done) FROM rounds")
        return -1 if done is None else self.row(done).done

    def load_recipe(self, model: str | None = None) -> Recipe:
        """The run's recipe; one that is not valid, or not that with which the run began, is refused.

        Args:
            model: another place of its base model; None: the recipe's.
        """
        digest = chain.digest(read_whole(self.recipe, MAX_BYTES, str(self.recipe))).hex()
        if (begun_with := self.recall(RECIPE)) is not None and digest not in begun_with:
            raise FedKSeedError(
                f"{self.recipe} has changed since the run began; bring the old one back, or start a new run"
            )
        recipe = load_recipe(self.recipe)
        return recipe if model is None else recipe.having(model={"name": model}).absolute()

    @property
    def tuned(self) -> int | None:
        """The number of rounds after which the tuned model was; None: the last round's."""
        best = best_round(self.load_recipe().evaluation, self.evaluations())
        return self.recall(DIVERGED) if best is None else best

    @property
    def forgotten(self) -> str:
        """The clients without whose uploads `fedkseed forget` has recomputed the run, in words; empty: it has not."""
        clients = self.recall(FORGOTTEN) or []
        return f"client{'s' * (len(clients) > 1)} {', '.join(map(str, clients))}" if clients else ""

    def change_recipe(self, recipe: str) -> None:
        """Write another recipe; a crash leaves either of the two, and both are taken until the new one is there."""
        old, new = self.recall(RECIPE) or [], chain.digest(recipe.encode()).hex()
        self.remember(RECIPE, [*old, new])
        write_atomically(self.recipe, recipe.encode())
        self.remember(RECIPE, [new])

    def require_sound(self, done: int | None = None) -> None:
        """Refuse a run whose database or digests have changed or are lacking, up to `done` rounds or all."""
        rows = [*self.checked_rows("SELECT done, state, report, parts, head FROM rounds ORDER BY done")]
        later = "SELECT done FROM uploads UNION SELECT done FROM evaluations"
        last = "SELECT coalesce(max(done), -1) FROM rounds"
        lacking = done is None and self.rows(f"SELECT * FROM ({later}) WHERE done > ({last})")  # noqa: S608
        names = [name for (name,) in self.rows("SELECT name FROM facts")]
        for name in names:
            if not isinstance(name, str):
                raise self.damaged(f"a fact has the name {name!r}")
            self.recall(name)
        self.evaluations()
        if lacking or (rows and RECIPE not in names) or (not rows and REACH in names):
            raise self.damaged("rounds or facts are lacking")
        before: bytes | None = None
        for number, (round_, state, report, parts, head) in enumerate(rows):
            if round_ != number or not isinstance(parts, bytes) or head != chain.head(before, chain.link_of(parts)):
                raise self.damaged(f"the digest of round {number} does not fit")
            if not isinstance(state, bytes) or not isinstance(report, str if number else NoneType):
                raise self.damaged(f"the state or the report of round {number} is of another type")
            checked = chain.SIZE if state == b"" else 0  # a state with a file of its own is checked when it is read
            if chain.parts(state, report, self.receipts(number), parts[-chain.SIZE :])[checked:] != parts[checked:]:
                raise self.damaged(f"the state, the report or an upload of round {number} has changed")
            before = head
            if number == done:
                return

    def receipts(self, done: int) -> dict[int, Receipt]:
        """The uploads of which the state after `done` rounds was made, by client."""
        rows = self.rows("SELECT client, upload, signature FROM uploads WHERE done = ? ORDER BY client", done)
        for client, *data in rows:
            of_bytes = all(isinstance(part, bytes) for part in data)
            if not (of_bytes and isinstance(client, int) and 0 <= client < 1 << 32):
                raise self.damaged(f"an upload of round {done} is of another type, or of client {client!r}")
        return {client: Receipt(upload, signature) for client, upload, signature in rows}

    def history(self, since: int, done: int) -> tuple[list[bytes], bytes, bytes]:
        """The links of the chain from the state after `since` rounds to that after `done`; the head and stem there."""
        rows = self.rows("SELECT parts FROM rounds WHERE done BETWEEN ? AND ? ORDER BY done", since, done)
        if len(rows) != max(0, done + 1 - since) or not all(isinstance(parts, bytes) for (parts,) in rows):
            raise self.damaged(f"the digests of rounds {since} to {done} are lacking")
        return [chain.link_of(parts) for (parts,) in rows], self.head(done), chain.stem(self.row(done).parts)

    def head(self, done: int) -> bytes:
        """The head of the chain after `done` rounds."""
        return self.row(done).head

    def require_same(self, identity: dict[str, str]) -> None:
        """Refuse to continue a run with another base model, pool or data than it began with."""
        begun_with = self.recall("identity")
        if begun_with is None:
            if self.rounds > 0:
                raise self.damaged("what the run began with is lacking")
            self.remember("identity", identity)
            return
        for name, fact in identity.items():
            if begun_with.get(name) != fact:
                raise FedKSeedError(
                    f"{self.directory} began with {name} {begun_with.get(name)}, now it is {fact}; "
                    "bring back what has changed, or start a new run"
                )

    def commit(
        self, state: Any, report: Report | None, keep: Collection[int] | None = None,
        receipts: Mapping[int, Receipt] | None = None, broadcast: bytes = b"",
    ) -> None:  # fmt: skip
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
        before = self.head(state.round - 1) if state.round else None
        parts = chain.parts(packed, text, receipts, chain.digest(broadcast))
        head = chain.head(before, chain.link_of(parts))
        if len(packed) > LARGE:  # before the commit: a committed round must have its state
            write_atomically(self._large(state.round), packed)
            packed = b""
        with self.transaction() as connection:
            row = (state.round, packed, text, parts, head)
            connection.execute("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?, ?)", row)
            connection.execute("DELETE FROM uploads WHERE done = ?", (state.round,))
            rows = [(state.round, client, receipt.upload, receipt.signature) for client, receipt in receipts.items()]
            connection.executemany("INSERT INTO uploads VALUES (?, ?, ?, ?)", rows)
        if not packed:
            needed = {self._large(done) for done in keep or (state.round, state.round - 1)}
            for path in {*self.directory.glob(self._large("*").name)} - needed:
                path.unlink(missing_ok=True)
        if text is not None:
            with border(f"can't write {self.metrics}"), open(self.metrics, "ab", opener=private) as file:
                file.write(f"{text}\n".encode())

    def state(self, kind: type[State], done: int | None = None) -> State | None:
        """The state after `done` rounds, or the latest; None before the first commit.

        Args:
            kind: the class of the run's states, `ServerPart.state`.

        Raises:
            FedKSeedError: the store has no such round, or its state is damaged.
        """
        if done is None and (done := self.rounds) < 0:
            return None
        row = self.row(done)
        if row.state:
            return unpack(row.state, kind, row.done, self.path)
        path = self._large(row.done)
        with border(f"can't read {path}, the state after {row.done} rounds (large ones are not kept for long)"):
            packed = path.read_bytes()
        if chain.digest(packed) != row.parts[: chain.SIZE]:
            raise self.damaged(f"{path} has changed")
        return unpack(packed, kind, row.done, path)

    def row(self, done: int) -> "RoundRow":
        """The row after `done` rounds, checked by its own digests."""
        rows = self.rows("SELECT done, state, parts, head FROM rounds WHERE done = ?", done)
        if not rows:
            where = self.directory
            raise FedKSeedError(f"{where} has no state after {done} rounds; see: fedkseed rounds {where}")
        row = RoundRow(*rows[0])
        of_bytes = all(isinstance(part, bytes) for part in (row.state, row.parts, row.head))
        if not of_bytes or (row.state and chain.digest(row.state) != row.parts[: chain.SIZE]):
            raise self.damaged(f"the state after {row.done} rounds has changed")
        return row

    def _large(self, done: int | str) -> Path:
        return self.directory / f"state-{done}.safetensors"

    def reports(self) -> list[dict[str, Any]]:
        """The reports of all finished rounds, in order."""
        return [json.loads(text) for text in self._report_texts()]

    def _report_texts(self) -> Iterator[str]:
        """The same as they were written, one at a time: 50 clients need 4 KB a round, and a server runs for months."""
        rows = self.checked_rows("SELECT done, report, parts FROM rounds ORDER BY done")
        for number, (done, report, parts) in enumerate(rows):
            if done != number or not isinstance(report, str if number else NoneType) or not isinstance(parts, bytes):
                raise self.damaged(f"the report of round {number} is lacking")
            if chain.digest((report or "").encode()) != parts[chain.SIZE : 2 * chain.SIZE]:
                raise self.damaged(f"the report of round {number} has changed")
            if report is not None:
                yield report

    def rollback(self, done: int) -> None:
        """Delete everything after `done` rounds, in one transaction; a refusal changes nothing."""
        if not self.rows("SELECT 1 FROM rounds WHERE done = ?", min(done, LARGEST_INTEGER)):  # the last may be damaged
            raise FedKSeedError(
                f"{self.directory} has no state after {done} rounds; see: fedkseed rounds {self.directory}"
            )
        self.require_sound(done)
        if self.load_recipe().privacy is not None:
            raise FedKSeedError(
                f"{self.directory} has [privacy], and rounds that are done again are paid for again: what its clients "
                "gave can't be taken back; begin a new run"
            )
        if not self.row(done).state:
            needed = {*range(max(0, done - (self.recall(REACH) or 0)), done + 1)}
            evaluations = {number: scores for number, scores in self.evaluations().items() if number <= done}
            best = best_round(self.load_recipe().evaluation, evaluations)
            needed.add(done if best is None else best)
            if not all(self._large(number).exists() for number in needed):
                raise FedKSeedError(
                    f"{self.directory} has no state after {done} rounds any more, or none that it needs to go on: "
                    "large ones are not kept for long"
                )
        facts: dict[str, Any] = dict.fromkeys((STOPPED, DIVERGED, GAINS))  # of a model that is deleted
        if nonces := self.recall(NONCES):  # clients that have seen what is deleted would take it for a forged history
            facts[NONCES] = [entry for entry in nonces if entry[0] <= done] + [[done, None]]
        with border(f"can't remove {self.adapter}"):  # first: no adapter of deleted rounds must stay
            self.adapter.unlink(missing_ok=True)
            shutil.rmtree(self.model, ignore_errors=True)
        with self.transaction() as connection:
            for table in ("rounds", "uploads", "evaluations"):
                connection.execute(f"DELETE FROM {table} WHERE done > ?", (done,))  # noqa: S608 - one of three names
            connection.executemany(WRITE_FACT, [_fact(name, value) for name, value in facts.items()])
        self.copy_metrics()

    def evaluated(self, done: int, scores: dict[str, Any]) -> None:
        """Write the scores of the model after `done` rounds, and their means to metrics.jsonl."""
        text = json.dumps(scores)
        self.rows("INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?)", done, text, _sealed(str(done), text))
        self.copy_metrics()

    def evaluations(self) -> dict[int, dict[str, Any]]:
        """The evaluations in order: number of rounds -> fields of `Evaluation`; 0 is the base model."""
        rows = self.checked_rows("SELECT done, value, digest FROM evaluations ORDER BY done", "(evaluations)")
        return {done: self._opened(str(done), value, seal) for done, value, seal in rows}

    def copy_metrics(self) -> None:
        """Rewrite metrics.jsonl: a killed process may have left out its last line, or cut it.

        A line is a report with, where the model after its round was evaluated, the means as `evaluation`. The first
        line has those of the base model as `base`.
        """
        added: dict[int, dict[str, Any]] = {}
        for done, scores in self.evaluations().items():
            means = {"evaluation" if done else "base": _plain(Evaluation.of(scores).means)}
            added[max(done, 1)] = added.get(max(done, 1), {}) | means
        lines = (
            json.dumps(json.loads(text) | added[done]) if done in added else text
            for done, text in enumerate(self._report_texts(), 1)
        )
        write_atomically(self.metrics, (f"{line}\n".encode() for line in lines))

    def remember(self, name: str, value: Any) -> None:
        """Write a JSON value under a name."""
        self.rows(WRITE_FACT, *_fact(name, value))

    def recall(self, name: str) -> Any:
        """The value written under a name, or None."""
        rows = self.rows("SELECT value, digest FROM facts WHERE name = ?", name)
        return self._opened(name, *rows[0]) if rows else None

    def _opened(self, name: str, value: Any, seal: Any) -> Any:
        """A JSON value that was written under a name, checked against its digest."""
        if not isinstance(value, str) or seal != _sealed(name, value):
            raise self.damaged(f"what is written under {name!r} has changed")
        return json.loads(value)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """One transaction, which is on disk when it ends: synchronous=FULL syncs the journal and the file."""
        if not (self.looks or self.path.exists()):
            # SQLite would make it for all to read; its journals get the same permissions
            with border(f"can't make {self.path}"), open(self.path, "ab", opener=private):
                pass
        try:
            with (
                border(f"can't use {self.path}"),
                _reading(self.path) if self.looks else closing(_connection(self.path)) as connection,
            ):
                connection.execute("PRAGMA synchronous = FULL")
                self._prepare(connection)
                with connection:
                    yield connection
        except (UnicodeDecodeError, MemoryError) as error:  # a damaged file's names in SQLite's errors; its sizes
            raise self.damaged(str(error)) from error

    def rows(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        """The rows of a query, in a transaction of its own; of a statement that writes, none."""
        with self.transaction() as connection:
            return connection.execute(query, arguments).fetchall()

    def checked_rows(self, query: str, table: str = "") -> Iterator[tuple[Any, ...]]:
        """Each of them, of a database, or a table of it, whose pages fit together: else some could be lacking."""
        with self.transaction() as connection:
            verdict = "ok" if self.looks else connection.execute(f"PRAGMA integrity_check{table}").fetchone()[0]
            if verdict != "ok":
                raise self.damaged(str(verdict))
            yield from connection.execute(query)

    def damaged(self, what: str) -> FedKSeedError:
        return FedKSeedError(
            f"{self.path} is damaged: {what}; bring back a copy of {self.directory}, roll back to a round before "
            "the damage, or start again"
        )

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Make the tables of a new file, and refuse those of another program."""
        columns = [name for _, name, *_ in connection.execute("PRAGMA table_info(rounds)")]
        if columns and "parts" not in columns:
            raise FedKSeedError(
                f"{self.directory} was made by an earlier release, whose rounds have no digests: look at it "
                "with that release, or start a new run; its adapter can still be applied and exported"
            )
        if not (tables := _tables(connection)):
            connection.executescript(SCHEMA)  # in a new file only: else a table that is lacking would seem empty
        elif tables != _tables_of_a_run():  # a view may never end, or show each reader something else
            raise self.damaged("its tables are not those of a run")


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    busy = f"another process is working on {directory}; wait for it, or stop it and use `fedkseed resume`"
    with exclusive(directory / "lock", busy):
        sweep(directory, "state-*.safetensors", ADAPTER, "model")
        yield


class RoundRow(NamedTuple):
    """A row of the table of rounds; the state is empty where it has a file of its own."""

    done: int
    state: bytes
    parts: bytes
    head: bytes


def _fact(name: str, value: Any) -> tuple[str, str, bytes]:
    """The row of a fact: a JSON value under a name."""
    text = json.dumps(value)
    return name, text, _sealed(name, text)


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
        if (says := tensors.pop("round").tolist()) != [done]:
            raise ValueError(f"the state of round {done} says that it is of {says}")
        return kind(**{"round": done}, **tensors)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise FedKSeedError(f"{where} is damaged ({error}); roll back to an earlier round or start again") from error


def _plain(report: dict[str, Any]) -> dict[str, Any]:
    """The report with numbers that are not finite as None, since JSON has no NaN: a loss, where none was finite."""
    unsaid = {name for name, value in report.items() if isinstance(value, float) and not np.isfinite(value)}
    return report | dict.fromkeys(unsaid)


def _connection(path: Path, mode: str = "rw") -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", timeout=10, uri=True)


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that writes nothing, to a database that another process may be writing or about to make."""
    with ExitStack() as stack:
        if not path.exists() or not path.stat().st_size:
            yield stack.enter_context(closing(sqlite3.connect(":memory:")))
            return
        connection = stack.enter_context(closing(_connection(path, "ro")))
        try:
            _tables(connection)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname != "SQLITE_READONLY_ROLLBACK":
                raise
            # A process was killed within a commit. Whoever goes on with the run undoes it; here, a copy is mended.
            folder = Path(stack.enter_context(TemporaryDirectory()))
            for part in (path, path.with_name(f"{path.name}-journal")):
                shutil.copyfile(part, folder / part.name)
            connection = stack.enter_context(closing(_connection(folder / path.name)))
        yield connection


def _tables(connection: sqlite3.Connection) -> set[tuple[Any, ...]]:
    """The tables of a database and all else that it defines, as SQL."""
    return {*connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchall()}


@cache
def _tables_of_a_run() -> set[tuple[Any, ...]]:
    """The tables that SCHEMA defines."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        return _tables(connection)
