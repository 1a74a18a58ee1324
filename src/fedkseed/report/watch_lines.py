"""A run in lines, as for a log: one a round, one an evaluation, one a change of its state."""

import time
from collections.abc import Callable
from pathlib import Path

from ..evaluation.statistics import title_of
from ..run.round_metrics import line
from .watch_state import SECONDS_BETWEEN_LOOKS, RunView, Watched, duration


def follow(directory: Path, say: Callable[[str], None]) -> None:
    """Say all that a run has done and does, until it has ended; one that has stopped may go on."""
    watched, teller = Watched(directory), Teller(say)
    while teller.tell(watched.look()) != "ended":
        time.sleep(SECONDS_BETWEEN_LOOKS)


class Teller:
    """The lines of one view after the other, each line once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.done = say, 0
        self._scored = set[int]()  # evaluations that were said, by the rounds before them
        self._noted = 0.0  # time of the last note that was said
        self._text = ""

    def tell(self, view: RunView) -> str:
        """Say what is new in a view; returns the run's state."""
        if view.state != "ended":  # whose line is the last
            self._tell_state(view)
        for at, text in view.moment.notes if view.moment else ():
            if at > self._noted:
                self._noted = at
                self.say(text)
        if view.done < self.done:
            self.say(f"back at {view.done} finished rounds")
            self.done, self._scored = view.done, {done for done in self._scored if done <= view.done}
        for done in range(self.done, view.done + 1):
            if done > self.done:
                ends = f"   about {duration(view.left)} left" if done == view.done and view.left else ""
                self.say(f"round {done:3} of {view.planned}   {line(view.reports[done - 1])}{ends}")
            if done in view.means and done not in self._scored:
                self._scored.add(done)
                scores = "   ".join(f"{title_of(name)} {mean:.4f}" for name, mean in view.means[done].items())
                self.say(f"{f'after {done} rounds' if done else 'base model'}   {scores}")
        self.done = view.done
        self._tell_state(view)
        return view.state

    def _tell_state(self, view: RunView) -> None:
        if view.text != self._text:
            self._text = view.text
            self.say(f"{view.name}: {view.text}")
