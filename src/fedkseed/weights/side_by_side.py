"""Calls of one function that run side by side in one thread: each goes on until it asks for something."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from greenlet import getcurrent, greenlet

Value = TypeVar("Value")
State = TypeVar("State")


class SideBySide:
    """Runs several calls of a function in turns, so that work they have in common is done once.

    The greenlets of the calls are kept for the next time: to make them takes longer than a quick loss.

    Attributes:
        guard: the context of all calls; `no_grad` where a module may keep tensors that are made in them.
    """

    def __init__(self) -> None:
        self.guard: Callable[[], AbstractContextManager[None]] = torch.inference_mode
        self._calls: list[greenlet] = []
        self.caller: greenlet | None = None  # of `run`, while calls are on their way

    def run(
        self,
        function: Callable[[], Value],
        states: Sequence[State],
        before_turn: Callable[[State], None],
        answer: Callable[[Sequence[Any]], Sequence[Any]] = lambda questions: questions,
    ) -> list[Value]:
        """The values of several calls of a function, one a state.

        Args:
            before_turn: called with a call's state before the call begins or goes on.
            answer: from the questions of all calls that have not ended, one each, their answers.
        """
        caller, count = getcurrent(), len(states)
        if any(call.dead or call.parent is not caller for call in self._calls):  # after an error, or in another thread
            self._calls = []
        self._calls += [_waiting(caller) for _ in range(count - len(self._calls))]
        self.caller = caller
        resume: dict[int, Any] = dict.fromkeys(range(count), function)  # by call: what it is resumed with
        values: dict[int, Value] = {}
        with self.guard():  # around all calls, also their ends: each would leave it in the others' turns
            try:
                while resume:
                    questions: dict[int, Any] = {}
                    for number in sorted(resume):
                        before_turn(states[number])
                        ended, content = self._calls[number].switch(resume.pop(number))
                        (values if ended else questions)[number] = content
                    resume = dict(zip(questions, answer([*questions.values()]), strict=True))
            finally:
                self.caller = None
                for number, call in enumerate(self._calls[:count]):
                    if number not in values and not call.dead:
                        call.throw()  # ends it, with its `finally` blocks
        return [values[number] for number in range(count)]

    def ask(self, question: Any = None) -> Any:
        """Inside a call: let the others go on to their questions, and return the answer to this one; else None."""
        return None if self.caller is None else self.caller.switch((False, question))


def _waiting(caller: greenlet) -> greenlet:
    """A greenlet that calls each function which the caller sends it, and sends (True, value) when one has ended."""

    def serve() -> None:
        ended = None
        while True:
            function = caller.switch(ended)
            ended = True, function()
            del function  # or it would keep its batch until the next step

    call = greenlet(serve)
    call.switch()  # to where it waits: a first function, as an argument of `serve`, would be kept for good
    return call
