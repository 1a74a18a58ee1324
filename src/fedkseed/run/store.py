"""The directory of a run: its recipe, every round's state, its metrics, its adapter.

    recipe.toml           the resolved recipe
    run.sqlite            every round's state, report and evaluation; a round counts once it is committed here
    metrics.jsonl         the reports, one a line: a copy for people and plots, made from run.sqlite
    adapter.safetensors   the tuned model, as coefficients
    model/                the tuned model, where it is no function of coefficients: adapters or all weights
    state-N.safetensors   the state after N rounds, where it is large: the last two, and those that clients of an
                          asynchronous round still train with
    lock                  held by the process that works on the run

The process may be killed at any moment: committed rounds are complete, and the run continues from the last of them. All
files are for their owner alone.
"""

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ..errors import FedKSeedError
from ..files import border, exclusive, private, sweep, write_atomically
from ..round import Report

State = TypeVar("State")
LARGE = 1 << 20  # bytes of a state that gets a file of its own
SCHEMA = """
CREATE TABLE IF NOT EXISTS rounds (done INTEGER PRIMARY KEY, state BLOB NOT NULL, report TEXT);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS evaluations (done INTEGER PRIMARY KEY, value TEXT NOT NULL);
"""


class Store:
    """The directory of one run: made by `create`, opened again by `Store(directory)`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
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
            yield cls(directory)

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

    def require_same(self, identity: dict[str, str]) -> None:
        """Refuse to continue a run with another base model, pool or data than it began with.

        Raises:
            FedKSeedError: one of them differs; the message has both values.
        """
        known = self.recall("identity")
        if known is None:
            self.remember("identity", identity)
            return
        for name, value in identity.items():
            if known.get(name) != value:
                raise FedKSeedError(
                    f"{self.directory} began with {name} {known.get(name)}, now it is {value}; "
                    "bring back what has changed, or start a new run"
                )

    def commit(self, state: Any, report: Report | None, keep: int = 2) -> None:
        """Write a round to disk for good, then copy its report to metrics.jsonl.

        Args:
            keep: number of latest rounds whose states are kept where states are large.

        Raises:
            FedKSeedError: the round can't be written; all earlier rounds are still there.
        """
        text = None if report is None else json.dumps(_plain(asdict(report)))
        packed = _pack(state)
        if len(packed) > LARGE:  # before the commit: a committed round must have its state
            write_atomically(self._large(state.round), packed)
            packed = b""
        with self._connect() as database:
            database.execute("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?)", (state.round, packed, text))
        if not packed:
            for old in self.directory.glob(self._large("*").name):
                if old not in {self._large(state.round - back) for back in range(keep)}:
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
        round_, packed = row
        if packed:
            return _unpack(packed, kind, self._database)
        path = self._large(round_)
        with border(f"can't read {path}, the state after {round_} rounds (large ones are not kept for long)"):
            return _unpack(path.read_bytes(), kind, path)

    def _row(self, done: int | None) -> tuple[int, bytes] | None:
        with self._connect() as database:
            last = database.execute("SELECT max(done) FROM rounds").fetchone()[0] if done is None else done
            row = database.execute("SELECT done, state FROM rounds WHERE done = ?", (last,)).fetchone()
        if row is None and done is not None:
            raise FedKSeedError(
                f"{self.directory} has no state after {done} rounds; list them with: fedkseed rounds {self.directory}"
            )
        return row

    def _large(self, round_: int | str) -> Path:
        return self.directory / f"state-{round_}.safetensors"

    def reports(self) -> list[dict[str, Any]]:
        """The reports of all finished rounds, in order."""
        with self._connect() as database:
            rows = database.execute("SELECT report FROM rounds WHERE report IS NOT NULL ORDER BY done").fetchall()
        return [json.loads(row[0]) for row in rows]

    def rollback(self, done: int) -> None:
        """Delete everything after `done` rounds, in one transaction."""
        row, needed = self._row(done), range(max(0, done - (self.recall("reach") or 0)), done + 1)
        if row is not None and not row[1] and not all(self._large(n).exists() for n in needed):
            raise FedKSeedError(
                f"{self.directory} has no state after {done} rounds any more, or none that it needs to go on: "
                "large ones are not kept for long"
            )
        with border(f"can't remove {self.adapter}"):  # first: no adapter of deleted rounds must stay
            self.adapter.unlink(missing_ok=True)
            shutil.rmtree(self.model, ignore_errors=True)
        with self._connect() as database:
            database.execute("DELETE FROM rounds WHERE done > ?", (done,))
            database.execute("DELETE FROM evaluations WHERE done > ?", (done,))
        self.copy_metrics()

    def evaluated(self, done: int, scores: dict[str, Any]) -> None:
        """Write the scores of the model after `done` rounds."""
        with self._connect() as database:
            database.execute("INSERT OR REPLACE INTO evaluations VALUES (?, ?)", (done, json.dumps(scores)))

    def evaluations(self) -> dict[int, dict[str, Any]]:
        """The evaluations in order: number of rounds -> fields of `Evaluation`; 0 is the base model."""
        with self._connect() as database:
            rows = database.execute("SELECT done, value FROM evaluations ORDER BY done").fetchall()
        return {done: json.loads(value) for done, value in rows}

    def copy_metrics(self) -> None:
        """Rewrite metrics.jsonl from the reports: a killed process may have left out its last line, or cut it."""
        text = "".join(json.dumps(report) + "\n" for report in self.reports())
        write_atomically(self.metrics, text.encode())

    def remember(self, name: str, value: Any) -> None:
        """Write a JSON value under a name."""
        with self._connect() as database:
            database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def recall(self, name: str) -> Any:
        """The value written under a name, or None."""
        with self._connect() as database:
            row = database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """One transaction, which is on disk when it ends: synchronous=FULL syncs the journal and the file."""
        if not self._database.exists():  # SQLite would make it for all to read; its journals get the same permissions
            with border(f"can't make {self._database}"), open(self._database, "ab", opener=private):
                pass
        with border(f"can't use {self._database}"), closing(sqlite3.connect(self._database, timeout=10)) as database:
            database.execute("PRAGMA synchronous = FULL")
            database.executescript(SCHEMA)
            with database:
                yield database


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    taken = f"another process is working on {directory}; wait for it, or stop it and use `fedkseed resume`"
    with exclusive(directory / "lock", taken):
        sweep(directory, "state-*.safetensors", "adapter.safetensors", "model")
        yield


def _pack(state: Any) -> bytes:
    return save({field.name: np.atleast_1d(getattr(state, field.name)) for field in fields(state)})


def _unpack(data: bytes, kind: type[State], where: Path) -> State:
    try:
        tensors = load(data)
        return kind(**{"round": int(tensors.pop("round")[0])}, **tensors)
    except (SafetensorError, KeyError, TypeError) as error:
        raise FedKSeedError(f"{where} is damaged ({error}); roll back to an earlier round or start again") from error


def _plain(report: dict[str, Any]) -> dict[str, Any]:
    """The report with numbers that are not finite as None, since JSON has no NaN: a loss, where none was finite."""
    return {
        name: None if isinstance(value, float) and not np.isfinite(value) else value for name, value in report.items()
    }
