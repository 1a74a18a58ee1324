"""A peer's copy of the set, in one SQLite file that a killed process leaves whole; the model that follows from it."""

import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import FedKSeedError
from ...files import border
from ...strategies.kseed import State
from .merge_rule import OrderedUpload, Rule, counted, kept
from .signed_upload import SignedUpload

FILE = "peer.sqlite"  # in a peer's directory
SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE IF NOT EXISTS entries (name BLOB PRIMARY KEY, client INTEGER, round INTEGER, step INTEGER, data BLOB);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT);
"""
NEAR, EVERY = 8, 16  # states that are held: the last eight, and each sixteenth, from which others are computed again


class UploadStore:
    """A copy of the set; its methods may be called by several threads.

    Args:
        path: of the SQLite file, which is made if it is missing.

    Raises:
        FedKSeedError: the file can't be opened, or is of another run.
    """

    def __init__(self, path: Path, rule: Rule) -> None:
        self.path, self.rule = path, rule
        self.changed = time.monotonic()  # the time of the last entry that was new
        self._lock = threading.RLock()
        self._slots: dict[tuple[int, int], list[OrderedUpload]] = {}
        self._names = set[bytes]()
        self._digests: dict[int, bytes] = {}  # of rounds, as long as they are right
        self._states: dict[int, State] = {0: rule.strategy.server.init()}
        with border(f"can't open {path}"):
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._database.executescript(SCHEMA)
            rows = self._database.execute("SELECT name, client, round, step FROM entries").fetchall()
        for row in rows:
            mark = OrderedUpload(*row)
            self._slots.setdefault((mark.client, mark.round), []).append(mark)
            self._names.add(mark.name)
        for slot in self._slots.values():
            slot.sort()
        if (known := self.recall("run")) is None:
            self.remember("run", rule.run.hex())
        elif known != rule.run.hex():
            raise FedKSeedError(
                f"{path} is of the run {known[:16]}, and this recipe, base model, these keys and times are the run "
                f"{rule.run.hex()[:16]}: undo the change, or choose another --state"
            )

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def remember(self, name: str, value: Any) -> None:
        """Keep a fact about the run, as JSON."""
        with self._lock, border(f"can't write {self.path}"):
            self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def recall(self, name: str) -> Any:
        """A fact that was kept; None: there is none."""
        with self._lock, border(f"can't read {self.path}"):
            row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def add(self, data: Iterable[bytes], now: int) -> tuple[list[OrderedUpload], list[str]]:
        """Take encoded entries, all of them in one commit.

        Args:
            now: the round that is open by this peer's clock.

        Returns:
            The entries that were new, and why others were refused.
        """
        added, refused = list[OrderedUpload](), list[str]()
        with self._lock:
            read = list[tuple[OrderedUpload, SignedUpload]]()
            for one in data:
                try:
                    entry = SignedUpload.decode(one)
                    if entry.name(self.rule.run) not in self._names:
                        read.append((self.rule.mark(entry, now), entry))
                except FedKSeedError as error:
                    refused.append(str(error))
            with self._writing():
                for mark, entry in read:
                    slot = self._slots.get((mark.client, mark.round), [])
                    after = kept([*slot, mark])
                    if mark in slot or mark not in after:
                        continue  # it came twice, or the peer has contradicted itself twice already
                    row = (mark.name, mark.client, mark.round, mark.step, entry.encoded)
                    self._database.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", row)
                    for gone in (one for one in slot if one not in after):
                        self._database.execute("DELETE FROM entries WHERE name = ?", (gone.name,))
                    self._slots[mark.client, mark.round] = after
                    self._names = (self._names - {one.name for one in slot}) | {one.name for one in after}
                    self._digests.pop(mark.round, None)
                    first = min(one.step for one in (*slot, mark))
                    self._states = {done: state for done, state in self._states.items() if done <= first}
                    added.append(mark)
            if added:
                self.changed = time.monotonic()
        return added, refused

    def digest(self) -> bytes:
        """The digest of the whole set."""
        with self._lock:
            return hashlib.sha256(b"".join(self.digests())).digest()

    def digests(self) -> list[bytes]:
        """The digest of each round's entries, up to the last round that has some."""
        with self._lock:
            last = max((round_ for _, round_ in self._slots), default=-1)
            lacking: dict[int, list[bytes]] = {k: [] for k in range(last + 1) if k not in self._digests}
            for (_, round_), slot in self._slots.items() if lacking else ():
                if round_ in lacking:
                    lacking[round_] += [mark.name for mark in slot]
            for round_, names in lacking.items():
                self._digests[round_] = hashlib.sha256(b"".join(sorted(names))).digest()
            return [self._digests[round_] for round_ in range(last + 1)]

    def names(self, round_: int) -> list[bytes]:
        """The names of a round's entries, in order."""
        with self._lock:
            return sorted(mark.name for (_, began), slot in self._slots.items() if began == round_ for mark in slot)

    def data(self, names: Sequence[bytes]) -> list[bytes]:
        """The encoded entries of these names, of those that are here."""
        with self._lock, border(f"can't read {self.path}"):
            rows = (self._database.execute("SELECT data FROM entries WHERE name = ?", (name,)) for name in names)
            return [row[0] for found in rows for row in found]

    def has(self, client: int, round_: int) -> bool:
        """True if there is an entry of a peer for a round."""
        with self._lock:
            return (client, round_) in self._slots

    def marks(self) -> list[OrderedUpload]:
        """The entries that count."""
        with self._lock:
            return counted(self._slots)

    def contradictions(self) -> list[tuple[int, int]]:
        """Each (peer, round) with two different entries of that peer, which has signed both."""
        with self._lock:
            return sorted(key for key, slot in self._slots.items() if len(slot) > 1)

    def state(self, done: int) -> State:
        """The state after a number of rounds."""
        with self._lock:
            first = max(known for known in self._states if known <= done)
            state, marks = self._states[first], self.marks()
            while state.round < done:
                names = [mark.name for mark in marks if mark.step == state.round]
                state = self.rule.after(state, map(SignedUpload.decode, self.data(names)))
                self._states[state.round] = state
            self._states = {k: s for k, s in self._states.items() if k % EVERY == 0 or k > done - NEAR}
            return state

    def from_here(self) -> int:
        """The number of entries that were trained from the very model that this copy has for their rounds."""
        marks = self.marks()
        bases = {began: self.rule.base(self.state(began)) for began in sorted({mark.round for mark in marks})}
        return sum(SignedUpload.decode(self.data([mark.name])[0]).base == bases[mark.round] for mark in marks)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A commit of all that is inside, or of nothing of it."""
        before = dict(self._slots), self._names, dict(self._digests), dict(self._states)
        try:
            with border(f"can't write {self.path}"):
                self._database.execute("BEGIN IMMEDIATE")
                try:
                    yield
                except BaseException:
                    self._database.execute("ROLLBACK")
                    raise
                self._database.execute("COMMIT")
        except BaseException:
            self._slots, self._names, self._digests, self._states = before
            raise
