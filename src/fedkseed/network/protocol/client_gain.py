"""The gain of a client over a network: what the tuned model changed on rows of its own that it never trains on.

The client measures it when it gets the tuned model, and keeps it in its directory for its owner. What it sends, if its
owner allows that and the server asks, is an answer of 18 bytes, and nothing of single rows:

    gain     "FKSg", version 1, 0, rows u32, f64: the sum over these rows of the change of the loss

The sixth byte is 0, by which no message of a round can be mistaken for it, nor it for one.
"""

import hashlib
import math
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import FedKSeedError
from ...evaluation.statistics import Estimate, Gain, title_of
from ...files import read_table, stamp, write_table

GAIN_FILE = "gain.json"  # in the directory of a client
LEAST_ROWS = 10  # rows: a sum over fewer says too much of each
BEGIN = b"FKSg\1\0"  # with the version
LAYOUT = struct.Struct("<6sId")
THIS_CLIENT = "this client"


@dataclass(frozen=True, slots=True)
class GainSum:
    """The answer of a client: its number of rows, and the sum of their changes of the loss."""

    rows: int
    change: float  # nats

    def __post_init__(self) -> None:
        if not (LEAST_ROWS <= self.rows < 1 << 32 and math.isfinite(self.change)):
            raise FedKSeedError(f"a gain is finite and of {LEAST_ROWS} rows or more, got {self.change} of {self.rows}")

    def encode(self) -> bytes:
        return LAYOUT.pack(BEGIN, self.rows, self.change)

    @classmethod
    def decode(cls, data: bytes) -> "GainSum":
        """The sum encoded in `data`.

        Raises:
            FedKSeedError: the bytes are of something else.
        """
        if len(data) != LAYOUT.size:
            raise FedKSeedError(f"a gain has {LAYOUT.size} bytes, got {len(data)}")
        begin, rows, change = LAYOUT.unpack(data)
        if begin != BEGIN:
            raise FedKSeedError(f"no gain of version 1: it begins with {begin!r}, not {BEGIN!r}; use one release")
        return cls(rows, change)

    def gain(self, client: int) -> Gain:
        """The same as a client's gain, whose error only the client knows."""
        return Gain(f"client {client}", self.rows, {}, {}, {"loss": Estimate(self.change / self.rows, math.inf)})


class GainFile:
    """The gains of a client in its directory: the latest for its owner, and of each run what its server was sent."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / GAIN_FILE
        self._seen = stamp(self.path)

    def write(self, gain: Gain, rounds: int, sent: bool) -> None:
        """Replace the latest gain.

        Args:
            rounds: of the tuned model.
            sent: whether the server is sent its sum.
        """
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_table(self.path, self._table() | {"time": now, "rounds": rounds, "gain": asdict(gain), "sent": sent})

    def allows(self, run: bytes, message: bytes) -> bool:
        """Note that a run's tuned model is answered; a second model of the same run is not.

        Else a server could have the loss of any number of models on these rows.
        """
        table, asked = self._table(), hashlib.sha256(message).hexdigest()
        runs = table.get("runs", {})
        if runs.setdefault(run.hex(), asked) != asked:
            return False
        write_table(self.path, table | {"runs": runs})
        return True

    def news(self) -> str | None:
        """The latest gain in words, if it was written since this was last asked."""
        seen, self._seen = self._seen, stamp(self.path)
        table = self._table() if self._seen != seen else {}
        return gain_in_words(Gain.of(table["gain"]), table["sent"]) if "gain" in table else None

    def _table(self) -> dict[str, Any]:
        return read_table(self.path) if self.path.exists() else {}


def gain_in_words(gain: Gain, sent: bool) -> str:
    """A client's gain in words, for its owner."""
    changes = [
        f"{title_of(name)} {gain.before[name]:.4f} before, {gain.after[name]:.4f} after ({change.text('+')})"
        for name, change in gain.change.items()
    ]
    learned = "the server was sent their number and the sum of the changes" if sent else "the server was sent nothing"
    return f"on {gain.rows:,} rows that this client did not train on: {', '.join(changes)}: {gain.verdict}; {learned}"
