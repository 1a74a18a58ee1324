"""The database of a run, run.sqlite: each use of it is a transaction, and a file that is no run's own is refused."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import FedKSeedError
from ..files import border, private

SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS rounds (done INTEGER PRIMARY KEY, state BLOB, report TEXT, parts BLOB, head BLOB);
CREATE TABLE IF NOT EXISTS uploads (done INTEGER, client INTEGER, upload BLOB, signature BLOB,
                                    PRIMARY KEY (done, client));
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT, digest BLOB);
CREATE TABLE IF NOT EXISTS evaluations (done INTEGER PRIMARY KEY, value TEXT, digest BLOB);
COMMIT;
"""


@dataclass(frozen=True, slots=True)
class RunDatabase:
    """The database in a run's directory.

    Args:
        looks: nothing is written, and reading takes no longer than it must, since a commit of the process that works
            on the run waits for it: the whole database is not checked.
    """

    path: Path
    looks: bool = False

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

    def require_whole(self, connection: sqlite3.Connection, table: str = "") -> None:
        """Refuse a database, or a table of it, whose pages do not fit together: rows could be lacking unnoticed."""
        if self.looks:
            return
        if (verdict := connection.execute(f"PRAGMA integrity_check{table}").fetchone()[0]) != "ok":
            raise self.damaged(str(verdict))

    def damaged(self, what: str) -> FedKSeedError:
        return FedKSeedError(
            f"{self.path} is damaged: {what}; bring back a copy of {self.path.parent}, roll back to a round before "
            "the damage, or start again"
        )

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Make the tables of a new file, and refuse those of another program."""
        columns = [name for _, name, *_ in connection.execute("PRAGMA table_info(rounds)")]
        if columns and "parts" not in columns:
            raise FedKSeedError(
                f"{self.path.parent} was made by an earlier release, whose rounds have no digests: look at it "
                "with that release, or start a new run; its adapter can still be applied and exported"
            )
        if not (tables := _tables(connection)):
            connection.executescript(SCHEMA)  # in a new file only: else a table that is lacking would seem empty
        elif tables != _tables_of_a_run():  # a view may never end, or show each reader something else
            raise self.damaged("its tables are not those of a run")


def _connection(path: Path, mode: str = "rw") -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", timeout=10, uri=True)


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that writes nothing, to a database that another process may be writing or about to make."""
    with ExitStack() as stack:
        if not path.exists() or not path.stat().st_size:
            connection = stack.enter_context(closing(sqlite3.connect(":memory:")))
            connection.executescript(SCHEMA)
            yield connection
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
