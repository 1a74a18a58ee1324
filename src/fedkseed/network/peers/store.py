"""The uploads that a peer has, in one SQLite file that a killed process leaves whole, and the model that follows."""

import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...errors import FedKSeedError
from ...files import border
from ...strategies.kseed import State
from .merge_rule import MergeRule, Slots, UploadHeader, counting, with_headers
from .signed_upload import SignedUpload

SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE IF NOT EXISTS entries (name BLOB PRIMARY KEY, client INTEGER, round INTEGER, step INTEGER, data BLOB);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT);
"""
NEAR, EVERY = 8, 16  # states that are held: the last eight, and each sixteenth, from which others are computed again


class UploadStore:
    """A peer's uploads, in the SQLite file `path` of this run alone; methods may be called by several threads."""

    def __init__(self, path: Path, rule: MergeRule) -> None:
        self.path, self.rule = path, rule
        self.changed = time.monotonic()  # when the last upload was added
        self._lock = threading.RLock()
        with border(f"can't open {path}"):
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._database.executescript(SCHEMA)
            rows = self._database.execute("SELECT name, client, round, step FROM entries").fetchall()
        self._slots: Slots = with_headers({}, [UploadHeader(*row) for row in rows])
        self._digests: dict[int, bytes] = {}  # by round, while they are right
        self._states: dict[int, State] = {0: rule.strategy.server.init()}
        if (run := self.recall("run")) is None:
            self.remember("run", rule.run.hex())
        elif run != rule.run.hex():
            raise FedKSeedError(
                f"{path} is of the run {run[:16]}, and this recipe, base model and tokenizer, these keys and "
                f"times are the run {rule.run.hex()[:16]}: undo the change, or choose another --state"
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

    def add(self, data: Iterable[bytes], open_round: int) -> tuple[list[UploadHeader], list[str]]:
        """Add encoded uploads, all of them in one commit.

        Args:
            open_round: by this peer's clock.

        Returns:
            Those that are new and kept, and why others were refused.
        """
        with self._lock:
            uploads, refused = self._checked(data, open_round)
            changed = with_headers(self._slots, uploads)
            before = {header for place in changed for header in self._slots.get(place, ())}
            after = {header for slot in changed.values() for header in slot}
            added = [header for header in uploads if header in after - before]
            if added:
                rows = [(h.name, h.client, h.round, h.step, uploads[h].encoded) for h in added]
                with border(f"can't write {self.path}"), self._database:  # all changes, or none of them
                    self._database.execute("BEGIN IMMEDIATE")
                    gone = [(header.name,) for header in before - after]
                    self._database.executemany("DELETE FROM entries WHERE name = ?", gone)
                    self._database.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", rows)
                self._slots |= changed
                self.changed = time.monotonic()
                for header in added:
                    self._digests.pop(header.round, None)
                first = min(header.step for header in before | {*added})
                self._states = {done: state for done, state in self._states.items() if done <= first}
        return added, refused

    def _checked(self, data: Iterable[bytes], open_round: int) -> tuple[dict[UploadHeader, SignedUpload], list[str]]:
        """The uploads that are not here yet and that the rule takes, and why it refuses others."""
        uploads, refused = dict[UploadHeader, SignedUpload](), list[str]()
        for encoded in data:
            try:
                signed = SignedUpload.decode(encoded)
                if not self.data([signed.name(self.rule.run)]):
                    uploads.setdefault(self.rule.header(signed, open_round), signed)
            except FedKSeedError as error:
                refused.append(str(error))
        return uploads, refused

    def data(self, names: Sequence[bytes]) -> list[bytes]:
        """The encoded uploads of these names, as far as they are here."""
        with self._lock, border(f"can't read {self.path}"):
            cursors = (self._database.execute("SELECT data FROM entries WHERE name = ?", (name,)) for name in names)
            return [data for rows in cursors for (data,) in rows]

    def names(self, round_: int) -> list[bytes]:
        """The names of a round's uploads, in order."""
        with self._lock:
            return sorted(header.name for (_, began), slot in self._slots.items() if began == round_ for header in slot)

    def digests(self) -> list[bytes]:
        """The digest of the names of each round's uploads, up to the last round that has some."""
        with self._lock:
            rounds = range(1 + max((began for _, began in self._slots), default=-1))
            names: dict[int, list[bytes]] = {k: [] for k in rounds if k not in self._digests}
            for (_, began), slot in self._slots.items() if names else ():
                if began in names:
                    names[began] += [header.name for header in slot]
            self._digests |= {k: hashlib.sha256(b"".join(sorted(some))).digest() for k, some in names.items()}
            return [self._digests[k] for k in rounds]

    def digest(self) -> bytes:
        """The digest of the whole set."""
        return hashlib.sha256(b"".join(self.digests())).digest()

    def has(self, client: int, round_: int) -> bool:
        """Whether there is an upload of a peer for a round."""
        with self._lock:
            return (client, round_) in self._slots

    def counting(self) -> list[UploadHeader]:
        """The headers of the uploads that count."""
        with self._lock:
            return counting(self._slots)

    def contradictions(self) -> list[tuple[int, int]]:
        """Each (peer, round) with two different uploads of that peer, which has signed both."""
        with self._lock:
            return sorted(place for place, slot in self._slots.items() if len(slot) > 1)

    def state(self, done: int) -> State:
        """The state after a number of rounds."""
        with self._lock:
            state, headers = self._states[max(held for held in self._states if held <= done)], self.counting()
            while state.round < done:
                names = [header.name for header in headers if header.step == state.round]
                state = self.rule.next_state(state, map(SignedUpload.decode, self.data(names)))
                self._states[state.round] = state
            self._states = {k: s for k, s in self._states.items() if k % EVERY == 0 or k > done - NEAR}
            return state

    def count_trained_from_here(self) -> int:
        """The number of uploads that were trained from the very model that follows from this store for their round."""
        headers = self.counting()
        bases = {began: self.rule.broadcast_digest(self.state(began)) for began in {h.round for h in headers}}
        uploads = {header: SignedUpload.decode(*self.data([header.name])) for header in headers}
        return sum(signed.base == bases[header.round] for header, signed in uploads.items())
