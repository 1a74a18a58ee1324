"""The time that a run still needs."""

import time
from collections import deque
from statistics import fmean

ROUNDS = 20  # the last ones, whose mean is the pace: more than the rounds between two evaluations, mostly


class RoundPace:
    """The seconds from one round to the next, evaluations and waits included."""

    def __init__(self) -> None:
        self.since = time.time()  # when the last round ended
        self._took = deque[float](maxlen=ROUNDS)

    @property
    def seconds(self) -> float | None:
        """The pace; None before the first round."""
        return fmean(self._took) if self._took else None

    def round_done(self, seconds: float) -> None:
        """Count a round, which took `seconds` by itself.

        That is all that counts of the first one: before it, a base model is evaluated, or clients are waited for.
        """
        now = time.time()
        self._took.append(now - self.since if self._took else seconds)
        self.since = now

    def end(self, rounds: int) -> float | None:
        """The time at which this number of further rounds will be done; None before the first round."""
        return None if self.seconds is None else self.since + self.seconds * rounds
