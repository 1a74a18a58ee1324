"""The answering of tasks by whoever follows a recipe: a client with a model, or a shard with clients of its own.

What is the same for both: a task is verified before anything of it is used, the follower of its recipe is made once, an
answer is signed and kept until another task, and a server gets an answer or a code.
"""

import hashlib
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeAlias

from ....errors import FedKSeedError
from ..carrier import RoundStoppedError
from ..envelope import UNSIGNED, Code, RefusedError, Reply, Status, Task
from ..signatures import ClientSigning

REMEMBERED = 1 << 20  # bytes of the largest answer that is kept; answers of weights are not
OnStep: TypeAlias = Callable[[float], None]  # gets the loss of each local step
Bound: TypeAlias = Callable[[bytes], None]  # refuses a broadcast's digest that the task's history does not name


class AbandonedError(RoundStoppedError):
    """The error of a task for whose answer no process waits any more; a shard's round with its clients ends with it."""


class LaterError(FedKSeedError):
    """The error of a task that may be answered when it comes again."""


class RecipeFollower(Protocol):
    """One client or several, with a recipe and a model."""

    def answer(self, task: Task, on_step: OnStep, bound: Bound) -> tuple[bytes, bytes]: ...

    def afterwards(self) -> None: ...


def log(text: str) -> None:
    """Write a line into the log of this process, for the client's owner."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=sys.stderr)


def code_alone(code: Code, text: str, note: Callable[[str], object] = log) -> str:
    """The code of a refusal, and nothing else of it; the text is for the owner of this process."""
    note(f"no answer ({code}): {text}")
    return str(code)


class TaskHandler:
    """The answering of tasks, with the recipe and model of the last task that brought a recipe.

    Args:
        follow: makes a client that follows a given recipe.
        signing: verifies tasks and signs answers; None: tasks are taken from whoever hands them in.
        disclose: a code and its reason in full -> what a server gets to know of it.
        remembers: whether the answer to a task is kept for the same task, should it come again.
    """

    def __init__(
        self, follow: Callable[[bytes], RecipeFollower], signing: ClientSigning | None = None,
        disclose: Callable[[Code, str], str] = code_alone, remembers: Callable[[Task], bool] = lambda task: True,
    ) -> None:  # fmt: skip
        self.follow, self.signing, self.disclose, self.remembers = follow, signing, disclose, remembers
        self._digest = b""
        self._follower: RecipeFollower | None = None
        self._last: tuple[tuple[int, bytes, bool, bytes], Reply] | None = None  # key of the last task, the reply to it

    def reply(self, data: bytes, gone: Callable[[], bool] = lambda: False) -> Reply:
        """The reply to a task; a refusal is a reply, too.

        Args:
            gone: whether the process that waits for the reply is gone; called after every local step.

        Raises:
            AbandonedError: that process is gone, or the task's time is over.
        """
        begin = time.monotonic()
        try:
            task = Task.decode(data)
            # Before anything of the task is used: it may come from another member, in the server's name.
            if self.signing is not None and (refusal := self.signing.refusal(task)) is not None:
                return replace(refusal, text=refusal.text and self.disclose(Code.TASK, refusal.text))

            def on_step(loss: float) -> None:
                if gone() or time.monotonic() - begin > task.seconds:
                    raise AbandonedError

            if task.recipe and task.digest != self._digest:
                self._follower, self._digest, self._last = None, b"", None  # first: two models may not fit
                self._follower, self._digest = self.follow(task.recipe), task.digest
            if self._follower is None or task.digest != self._digest:
                return Reply(Status.UNPREPARED)
            key = task.client, task.nonce, task.keep, hashlib.sha256(task.message).digest()
            if self._last is not None and self._last[0] == key:  # a server asks again where a reply may be lost
                return self._last[1]
            self._last = None

            def bound(broadcast: bytes) -> None:
                if self.signing is not None and self.signing.history is not None:
                    self.signing.history.require_bound(task, broadcast)

            broadcast, made = self._follower.answer(task, on_step, bound)
            signature = UNSIGNED if self.signing is None else self.signing.signature(task, broadcast, made)
            reply = Reply(Status.DONE, made, signature=signature)
            if len(reply.message) <= REMEMBERED and self.remembers(task):
                self._last = key, reply
            return reply
        except LaterError as error:
            return Reply(Status.FAILED, text=self.disclose(Code.WORKER, str(error)))
        except FedKSeedError as error:
            code = error.code if isinstance(error, RefusedError) else Code.TASK
            return Reply(Status.REFUSED, text=self.disclose(code, str(error)))
        except AbandonedError:
            raise
        except Exception:  # by PyTorch, as for a full GPU, or caused by the recipe's numbers
            return Reply(Status.FAILED, text=self.disclose(Code.ERROR, traceback.format_exc()))

    def afterwards(self) -> None:
        """Do what nobody but the client's owner waits for, after the reply was sent."""
        try:
            if self._follower is not None:
                self._follower.afterwards()
        except Exception:  # as for a full disk: the next task is answered all the same
            log(f"the client's own evaluation has failed: {traceback.format_exc()}")
