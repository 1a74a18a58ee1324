"""What a user's ledger of privacy has, for tests."""

import sqlite3
from contextlib import closing
from pathlib import Path


def amounts(ledger: Path) -> tuple[int, float]:
    """The number of answers that were charged, and 1 / noise² of the row that has spent most."""
    with closing(sqlite3.connect(ledger)) as database:
        (answers,) = database.execute("SELECT COUNT(*) FROM answers").fetchone()
        (most,) = database.execute("SELECT MAX(spent) FROM rows").fetchone()
    return answers, most
