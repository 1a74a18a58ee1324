"""The privacy that each row of a user has given away, over all clients, runs and servers, and the most that is allowed.

Every answer under [privacy] spends 1 / noise² (secure/accounting.py) of each row that it is made of: amounts add up
exactly, whatever the order and whoever asks. The ledger is a file of the user's and not of a client's --state, and it
knows rows by a digest of their text. So neither another run, another client or server, a new --state nor a row that is
added makes it forget what another row has spent.
"""

import os
import sqlite3
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from math import fsum
from pathlib import Path

from ....errors import FedKSeedError
from ....files import border, private, read_table

LEDGER = "privacy.sqlite"
EARLIER = "privacy.json"  # in the directory of a client: its account by a release that kept one for each
MOST_ANSWERS = 1 << 16  # that are remembered of one server, 40 bytes each; more of it are refused
PAGE = 512  # bytes of SQLite's smallest
PATIENCE = 60.0  # seconds for other processes of the user
SCHEMA = """
PRAGMA synchronous = FULL;
CREATE TABLE IF NOT EXISTS rows (row BLOB PRIMARY KEY, spent REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS answers (answer BLOB PRIMARY KEY, server BLOB NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS of_server ON answers (server);
"""
CHARGE = "INSERT INTO rows VALUES (?, ?) ON CONFLICT DO UPDATE SET spent = spent + excluded.spent"


def ledger_path() -> Path:
    """The place of the user's ledger, by the XDG Base Directory Specification.

    Raises:
        FedKSeedError: the user has no home.
    """
    named = os.environ.get("XDG_STATE_HOME", "")
    try:
        base = Path(named) if Path(named).is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise FedKSeedError(f"no place for an account of privacy: {error}; set XDG_STATE_HOME to a folder") from error
    return base / "fedkseed" / LEDGER


@dataclass(frozen=True, slots=True)
class PrivacyLedger:
    """The ledger, for one client's answers to one server."""

    path: Path
    server: bytes = b""  # one can't use up the answers of another
    client: Path | None = None  # its directory, where an older release has kept its account

    def spend(
        self, rows: Collection[bytes], answer: bytes, amount: float, epsilon: float | None, delta: float
    ) -> float:
        """Note an answer before it leaves this machine, and return ε of the row that has spent most.

        The second leg of a round, or a repeated task, costs nothing. What would be too much is refused, and not noted.

        Args:
            rows: digests of the rows that the answer is made of; each is charged.
            answer: digest of all on which its numbers depend.
            amount: 1 / noise² of the answer.
            epsilon: the most that the answers with one row may spend, at `delta`; None: no limit.
        """
        from ....secure.accounting import epsilon_of

        what = f"can't write the account of privacy {self.path}"
        with border(what, "without it nothing says what was spent: get it back from a copy"):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(private(self.path, os.O_RDWR | os.O_CREAT)) as file:
                if 0 < os.fstat(file.fileno()).st_size < PAGE:  # which SQLite takes for an empty one
                    raise FedKSeedError(f"{what}: it was cut short; get it back from a copy")
            with closing(sqlite3.connect(self.path, PATIENCE, isolation_level=None)) as database, database:
                database.executescript(SCHEMA)
                database.execute("BEGIN IMMEDIATE")
                for of, cost in self._earlier():
                    self._charge(database, rows, of, cost)
                new = self._charge(database, rows, answer, amount)
                spent = [database.execute("SELECT spent FROM rows WHERE row = ?", (row,)).fetchone()[0] for row in rows]
                most = max(spent)
                found = epsilon_of(1.0, most, delta)
                if new and epsilon is not None and found > epsilon * (1 + 1e-9):
                    raise FedKSeedError(
                        f"this answer would bring what {spent.count(most):,} of the client's "
                        f"{len(rows):,} rows have spent to epsilon = {found:.4g} at delta = {delta:g}, and the policy "
                        f"says epsilon = {epsilon:g}; {self.path} has what was spent, by all clients of this user"
                    )
        return found

    def _charge(self, database: sqlite3.Connection, rows: Collection[bytes], answer: bytes, amount: float) -> bool:
        """Charge rows with an answer; False if it was charged already."""
        if database.execute("SELECT 1 FROM answers WHERE answer = ?", (answer,)).fetchone():
            return False
        (count,) = database.execute("SELECT COUNT(*) FROM answers WHERE server = ?", (self.server,)).fetchone()
        if count >= MOST_ANSWERS:
            raise FedKSeedError(
                f"{self.path} has {count:,} answers to this server, no more are given: ask its owner why"
            )
        database.execute("INSERT INTO answers VALUES (?, ?)", (answer, self.server))
        database.executemany(CHARGE, [(row, amount) for row in rows])
        return True

    def _earlier(self) -> list[tuple[bytes, float]]:
        """The account of an older release in the client's directory: run -> broadcast -> 1 / noise²."""
        if self.client is None or not (path := self.client / EARLIER).exists():
            return []
        cost = fsum(one for answers in read_table(path).values() for one in answers.values())
        return [(sha256(path.read_bytes()).digest(), cost)]
