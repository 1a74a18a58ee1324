"""The file now.json in a run's directory: what the process that works on it does, for `fedkseed watch`.

The file is replaced as the run goes on, so that a reader finds it whole, and removed at the end; a run that was killed
or refused leaves it behind, with the reason where there is one. Nothing is computed from it, and a full disk does not
stop the run for its sake. It has no text, no loss and no scalar, which the noise of a private run has to hide.
"""

import json
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import get_args

from ..errors import FedKSeedError
from ..files import sweep, write_atomically
from ..round import Report
from .progress import Progress, RoundPace, Standing
from .trackers import Trackers

FILE = "now.json"
SECONDS_BETWEEN_WRITES = 0.5  # of versions that differ in steps alone: a step of a small model takes a millisecond
FEW_CLIENTS = 100  # clients of whom each piece of news is written at once; ten thousand would write a gigabyte a round
NOTES_KEPT = 30  # the oldest go first


@dataclass(slots=True)
class Activity:
    """The content of the file; times are seconds since 1970."""

    activity: str = ""
    done: int = 0  # steps of it, or of the clients of a network that were asked
    total: int = 0
    since: float = 0.0  # when the present round began
    pace: float | None = None  # seconds, see `RoundPace`; None: this process has done no round
    clients: dict[Standing, list[int]] = field(default_factory=dict)  # of the present round, or of the last one
    notes: list[tuple[float, str]] = field(default_factory=list)
    error: str = ""  # with which the run was refused


class ActivityFile(Progress):
    """A watcher that writes the file, hands rounds on to `trackers`, by name, and passes calls on to another."""

    def __init__(self, inner: Progress, trackers: Collection[str] = ()) -> None:
        self.inner = inner
        self._trackers = Trackers(trackers, inner.note)  # whose errors may hold an address with a token
        self.moment = Activity(since=time.time())
        self._path: Path | None = None  # while this process holds the run's lock
        self._written = 0.0
        self._pace = RoundPace()
        self._standing: dict[int, Standing] = {}  # of the clients of the present round, or of the last one
        self._round_over = True  # and no client of the next one has been named

    @contextmanager
    def shown_in(self, directory: Path) -> Iterator[None]:
        """Write into a run's directory, whose lock the caller holds, until the end of the `with` block."""
        with self._trackers.copying(directory):  # until the file is gone: a tracker may take long to end
            sweep(directory, FILE)
            self._path, self.moment.since = directory / FILE, time.time()
            self._write()
            try:
                yield
            except BaseException as error:
                kind = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else type(error).__name__
                self.moment.error = str(error) if isinstance(error, FedKSeedError) else kind
                self._write()
                raise
            else:
                with suppress(OSError):
                    self._path.unlink(missing_ok=True)
            finally:
                self._path = None

    def note(self, text: str) -> None:
        self.moment.notes = [*self.moment.notes[1 - NOTES_KEPT :], (time.time(), text)]
        self._write()
        self.inner.note(text)

    def begin(self, what: str, total: int) -> None:
        self.moment.activity, self.moment.done, self.moment.total = what, 0, total
        self._write()
        self.inner.begin(what, total)

    def advance(self, count: int = 1, loss: float | None = None) -> None:
        self.moment.done += count
        if time.monotonic() - self._written >= SECONDS_BETWEEN_WRITES:
            self._write()
        self.inner.advance(count, loss)

    def clients(self, numbers: Collection[int], standing: Standing) -> None:
        if not numbers:
            return
        if self._round_over:
            self._standing.clear()
        if self._round_over and self._pace.seconds is None:
            self.moment.since = time.time()  # before the first round, a base model is evaluated
        self._round_over = False
        for client in numbers:
            self._standing.pop(client, None)  # so that clients stand in the order of their last news
            self._standing[client] = standing
        if len(self._standing) <= FEW_CLIENTS or time.monotonic() - self._written >= SECONDS_BETWEEN_WRITES:
            self._write()
        self.inner.clients(numbers, standing)

    def round_done(self, report: Report) -> None:
        self._pace.round_done(report.seconds)
        self.moment.since, self.moment.pace, self._round_over = self._pace.since, self._pace.seconds, True
        self._write()
        self.inner.round_done(report)
        self._trackers.hand_on()

    def _write(self) -> None:
        if self._path is None:
            return
        clients: dict[Standing, list[int]] = {standing: [] for standing in get_args(Standing)}
        for client, standing in self._standing.items():
            clients[standing].append(client)
        self.moment.clients = {standing: numbers for standing, numbers in clients.items() if numbers}
        self._written = time.monotonic()
        with suppress(FedKSeedError):
            write_atomically(self._path, json.dumps(asdict(self.moment)).encode(), lasting=False)


def moment_of(directory: Path) -> Activity | None:
    """The present activity of the process that works on a run; None if the file is not there, or not one of ours."""
    try:
        table = json.loads((directory / FILE).read_bytes())
        return Activity(**table | {"notes": [(float(at), str(text)) for at, text in table["notes"]]})
    except (OSError, ValueError, KeyError, TypeError):
        return None
