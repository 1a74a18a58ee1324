"""The worker: a client's long-lived process, which keeps the model loaded and answers tasks.

Its transport's process hands it the bytes of a task and waits.

    python -m fedkseed.network.protocol.client.worker DIRECTORY

A lock allows one worker a directory. It does one task at a time, and ends after some idle time. It gives up a task
when the process that handed it in is gone, or when the task's time is over, because then nothing waits for the answer.

A server gets an answer or a code. What went wrong, in full, is in the worker's log, for the client's owner.
"""

import hashlib
import math
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from ....data.federated import own_share
from ....errors import FedKSeedError
from ....evaluation.metrics import metrics_of
from ....evaluation.statistics import Evaluation, gain
from ....files import exclusive, read_whole, write_atomically
from ....local.work import LocalWork
from ....recipe.basis_digest import with_basis
from ....recipe.schema import Recipe
from ....round import answer
from ....run import digest_chain as chain
from ....run.cohort import cohort
from ....run.privacy_plan import noise_of_a_round, with_noise
from ....run.progress import Silent
from ....run.setup import build, tokenizer_of
from ....run.workers import computing_with
from ....weights.adapter import NAME as TUNED
from ....weights.base import Pooled
from ....wire.codec import decode, kind_of
from ....wire.delta import lack, restore
from ....wire.records import Broadcast, Change, Run, Secured, Survivors
from ..client_gain import LEAST_ROWS, THIS_CLIENT, GainFile, GainSum, gain_in_words
from ..envelope import Code, RefusedError, Task, refusing
from ..masking_keys import MaskedRoundsFile, masking_key, require_member
from ..signatures import ClientSigning
from . import worker_socket as sockets
from .policy import Policy, RowView
from .privacy_spent import PrivacyLedger
from .recipe_consent import Owner, OwnerSettings, RecipeJournal, accepted_recipe
from .task_handler import AbandonedError, TaskHandler, log

if TYPE_CHECKING:
    from ....secure import member as secure

BATCH_SEED = "batches.secret"  # in the directory of a client
HAND_IN = 60.0  # seconds to hand in a task or to take its answer, both sides on one machine


class TaskTime:
    """The time that an owner allows for a task, from now on."""

    def __init__(self, policy: Policy) -> None:
        self.seconds, self._begin = policy.training.max_seconds, time.monotonic()

    def require_time(self) -> None:
        """Refuse to go on with a task whose time is over.

        Raises:
            RefusedError: it is.
        """
        if time.monotonic() - self._begin > self.seconds:
            raise RefusedError(Code.POLICY, f"the task took longer than the policy's max_seconds = {self.seconds:g}")


# Makes a client's side of masked uploads from its number and the nonce of the run.
MakeMasking: TypeAlias = Callable[[int, bytes], "secure.MaskingClient"]


class TrainingClient:
    """A client that follows a server's recipe with a file of its own.

    Args:
        masks: makes its side of masked uploads; None: it has no key.
        ledger: its account of privacy; None: it answers no recipe with [privacy].
        keeps: file for the tuned model of a finished run; None: it is not written.
    """

    def __init__(
        self,
        owner: Owner,
        recipe: bytes,
        masks: MakeMasking | None = None,
        ledger: PrivacyLedger | None = None,
        keeps: Path | None = None,
    ) -> None:
        self.keeps = keeps
        self.policy, self.secret, self.masks, self.ledger = owner.policy, owner.secret, masks, ledger
        limit = TaskTime(self.policy)  # of the task that brings the recipe: its server chose what to load
        self.recipe = accepted_recipe(recipe, owner)
        with refusing(Code.MODEL):
            tokenizer = tokenizer_of(self.recipe, Silent())
            limit.require_time()
        with refusing(Code.BASIS):
            self.recipe, basis = with_basis(self.recipe)
        self.private = self.recipe.privacy is not None and self.recipe.privacy.unit == "example"
        if self.private and self.recipe.clients.count is not None:  # the server's word on the plan is not taken
            self.recipe = with_noise(self.recipe, self.recipe.clients.count)
        with refusing(Code.MODEL):
            self.setup = build(self.recipe, tokenizer, basis, serves=False)
        with refusing(Code.POLICY):  # before any row is read
            self.policy.require_weights(self.recipe, self.setup.weights.layout.size)
            limit.require_time()
        with refusing(Code.DATA):
            kept_back = self.policy.evaluation.kept_back or 0.0
            self.examples, self.unseen = own_share(self.recipe, tokenizer, log, kept_back)
            self.metrics = metrics_of(self.recipe.evaluation, self.unseen.options)
        limit.require_time()
        self._limit: TaskTime | None = limit  # None: each later task has its own
        self.threads = self.recipe.clients.threads or torch.get_num_threads()
        self._kept: bytes | None = None  # the last message, where the next may come as a difference to it
        self._later: Callable[[], object] | None = None  # what the client's owner waits for, and no server

    def answer(
        self, task: Task, on_step: Callable[[float], None], bound: Callable[[bytes], None] = lambda whole: None
    ) -> tuple[bytes, bytes]:
        """The broadcast of a task, whole where it can be restored, and the answer of client `task.client` to it.

        Args:
            bound: raises `FedKSeedError` if a broadcast's digest is not the one that the task's history names.
        """
        limit, self._limit = self._limit or TaskTime(self.policy), None
        if task.keep:
            return task.message, self._keep(task, bound)
        whole = restore(task.message, self._kept)
        if whole is None:
            return task.message, lack(task.message, task.client)
        count, strategy = self.recipe.clients.count, self.setup.strategy
        message = decode(
            whole, strategy.client.message, *((second.request,) if (second := strategy.second_leg) else ())
        )
        bound(_digest(message, whole))
        if count is None or task.client >= count:
            raise FedKSeedError(f"the recipe has {count} clients, and the task is for client {task.client}")
        with refusing(Code.MODEL):
            Run(self.setup.weights.pool, self.setup.weights.base_digest).require(message.run)
        inside = decode(message.broadcast, Broadcast) if isinstance(message, Secured) else message
        require_asked(inside, self.recipe, strategy.settings.work(False))
        if isinstance(message, Secured | Survivors):
            require_cohort(message, self.recipe, count)
        if self.private:
            require_turn(task.client, message.round, self.recipe, count)
        member = None
        if self.recipe.secure is not None:
            if self.masks is None:
                raise FedKSeedError(
                    "the recipe asks for masked uploads, and this client has no key: start it with --key"
                )
            member = replace(self.masks(task.client, task.nonce), allow=self._require_taken)
        if task.done >= 0 and message.round != task.done:
            raise FedKSeedError(
                f"the message is of round {message.round}, the history of its task has {task.done} rounds"
            )
        self._spend(task.nonce, _digest(message, whole))
        if self.setup.algorithm.pooled and self.recipe.secure is None:  # kilobytes
            self._kept = whole

        def within_limit(loss: float) -> None:
            limit.require_time()
            on_step(loss)

        # Before each token of an answer, too: an objective may write thousands of them in one step.
        ticking = self.setup.model.register_forward_pre_hook(lambda *_: within_limit(math.nan))
        with computing_with(self.threads), ticking:
            seed, noise = self._seed(task.nonce), self._noise(task.nonce)
            client = self.setup.client(task.client, count, self.examples, within_limit, seed, member, noise)

            def loss(batch: Any) -> float:  # a step of many probes must not outlast the limit either
                found = client.loss(batch)
                within_limit(math.nan)
                return found

            made = answer(strategy, whole, replace(client, loss=loss))
        if kind_of(made) is Change and self.setup.algorithm.pooled:
            self._require_taken(decode(made, Change))
        return whole, made

    def _keep(self, task: Task, bound: Callable[[bytes], None]) -> bytes:
        """Take over the tuned model of a finished run, and write it as an adapter; nothing is trained.

        The history binds the model of the last round, so that all clients get the same. That of an earlier one, which
        the server's [evaluation] best has chosen, is the server's word.

        Returns:
            What the server is sent of the client's gain: mostly nothing.
        """
        setup = self.setup
        message = decode(task.message, setup.strategy.client.message, Broadcast)
        if message.round == task.done:
            bound(_digest(message, task.message))
        with refusing(Code.MODEL):
            Run(setup.weights.pool, setup.weights.base_digest).require(message.run)
            setup.strategy.client.sync(message, setup.weights)
            if self.keeps is not None:
                setup.held(message.round).save(self.keeps)
        if self.keeps is None or not self.unseen.examples:
            return b""
        kept = GainFile(self.keeps.parent)
        if self._sends() and kept.allows(task.nonce, task.message):
            return self._measured(kept, message.round, True)
        self._later = partial(self._measured, kept, message.round, False)
        return b""

    def _sends(self) -> bool:
        """True if the server asks for the gain, and the owner and the number of rows allow it to be sent."""
        recipe, rows = self.recipe, len(self.unseen.examples)
        hidden = recipe.secure is not None or recipe.privacy is not None
        asked = recipe.evaluation.clients is not None and self.policy.evaluation.send and not hidden
        if asked and rows < LEAST_ROWS:
            log(f"the server is sent no gain of {rows} rows, {LEAST_ROWS} are needed: let kept_back be larger")
        return asked and rows >= LEAST_ROWS

    def _measured(self, kept: GainFile, rounds: int, sends: bool) -> bytes:
        """Measure the tuned model, which is loaded, and the base model, for the owner; returns what is sent."""
        weights, examples = self.setup.weights, self.unseen.examples
        if not isinstance(weights, Pooled):
            return b""
        tuned = weights.c.copy()
        with computing_with(self.threads):
            after = self._scores()
            weights.load(np.zeros_like(tuned))
            before = self._scores()
            weights.load(tuned)
        found = gain(THIS_CLIENT, before, after)
        finite = math.isfinite(found.change["loss"].mean)
        kept.write(found, rounds, sends and finite)
        log(gain_in_words(found, sends and finite))
        return GainSum(len(examples), len(examples) * found.change["loss"].mean).encode() if sends and finite else b""

    def _scores(self) -> Evaluation:
        examples = self.unseen.examples
        scores = self.setup.score(examples, "own held-out rows", False, self.metrics)
        return replace(scores, owners=[THIS_CLIENT] * len(examples))

    def afterwards(self) -> None:
        """Do what only the client's owner waits for, once the answer was sent."""
        later, self._later = self._later, None
        if later is not None:
            later()

    def _spend(self, run: bytes, asked: bytes) -> None:
        """Note what the answer to a broadcast spends, if its recipe has [privacy].

        Raises:
            RefusedError: it is more than the owner allows.
        """
        if (privacy := self.recipe.privacy) is None:
            return
        if self.ledger is None or (noise := noise_of_a_round(privacy)) is None:
            raise FedKSeedError(
                "the recipe has [privacy] without noise, or this client has no directory for an account"
            )
        work = self.policy.training
        with refusing(Code.POLICY):
            self.ledger.spend(run, asked, noise**-2, work.epsilon, work.delta)

    def _require_taken(self, upload: Any) -> None:
        """Refuse to send coefficients of fewer steps than the owner allows, masked or not."""
        if isinstance(upload, Change):
            asked = self.setup.strategy.settings.work(True).count(len(self.examples))
            with refusing(Code.POLICY):
                self.policy.require_taken(asked - upload.skipped)

    def _seed(self, nonce: bytes) -> int | None:
        """The seed of the batches of one run: in another run, or after a rollback, the same rounds have others.

        Else a server could have the same batch answered with another model, under another nonce, and subtract.
        """
        if self.secret is None:
            return None
        return int.from_bytes(hashlib.sha256(b"%d " % self.secret + nonce).digest())

    def _noise(self, nonce: bytes) -> bytes:
        """The secret of the noise of one run, which only this client can take off; empty: it has none."""
        return b"" if self.secret is None else hashlib.sha256(b"noise %d " % self.secret + nonce).digest()


def _digest(message: Any, whole: bytes) -> bytes:
    """SHA-256 of the round's broadcast, with which a message comes or about which it asks."""
    match message:
        case Secured():
            return chain.digest(message.broadcast)
        case Survivors():
            return message.broadcast
        case _:
            return chain.digest(whole)


def require_asked(message: Any, recipe: Recipe, local: LocalWork) -> None:
    """Refuse a message that asks for other steps than its recipe, on which the owner's policy was applied.

    Args:
        local: the steps as the recipe describes them.

    Raises:
        FedKSeedError: it does.
    """
    training = recipe.training
    if message.round >= training.rounds:
        raise FedKSeedError(f"the recipe has {training.rounds} rounds, and the message is of round {message.round + 1}")
    if isinstance(message, Broadcast):
        asked = message.steps, message.probes, message.wire, message.lr, message.eps, message.clip
        steps = training.steps, training.probes, training.wire or "compact"
        expected = *steps, local.learning_rate(message.round), local.eps, float(np.float32(local.clip))
        if asked != expected:
            raise FedKSeedError(
                f"the message asks for steps, probes, wire, lr, eps and clip {asked}, its recipe says {expected}"
            )


def require_cohort(message: Secured | Survivors, recipe: Recipe, count: int) -> None:
    """Refuse a masked round of other clients than the recipe's seed draws.

    Else a server that works with two clients, of however many, could ask any third for a round with these two.

    Raises:
        FedKSeedError: its clients are others.
    """
    members, drawn = message.members.tolist(), _drawn(message.round, recipe, count)
    if members != drawn:
        raise FedKSeedError(
            f"the server says that clients {members[:10]} are in round {message.round + 1}, and of {count} clients the "
            f"recipe's seed draws {drawn[:10]}: it may have put this client among ones that work with it"
        )


def require_turn(client: int, round_: int, recipe: Recipe, count: int) -> None:
    """Refuse a round for which the recipe's seed does not draw the client.

    Its noise is for the rounds of the plan: each further one would say more of its examples than was promised.

    Raises:
        FedKSeedError: it does not.
    """
    if client not in (drawn := _drawn(round_, recipe, count)):
        raise FedKSeedError(
            f"client {client} is asked in round {round_ + 1}, and of {count} clients the recipe's seed draws "
            f"{drawn[:10]}: [privacy] has no noise for rounds out of turn"
        )


def _drawn(round_: int, recipe: Recipe, count: int) -> list[int]:
    return cohort(recipe.seed, round_, count, recipe.clients.cohort_of(count), recipe.clients.draw)


def follow_recipe(
    journal: RecipeJournal,
    owner: Owner,
    recipe: bytes,
    masks: MakeMasking | None = None,
    ledger: PrivacyLedger | None = None,
    keeps: Path | None = None,
) -> TrainingClient:
    """A client that follows a recipe, which is noted before, and the decision after.

    Raises:
        RefusedError: the recipe is not followed.
    """
    with refusing(Code.WORKER):  # the disk may be full
        journal.asked(recipe)
        try:
            view = RowView.of(accepted_recipe(recipe, owner))
            journal.require_room(view, owner.policy.data.max_views)
            journal.decided(recipe, "followed", view)
            return TrainingClient(owner, recipe, masks, ledger, keeps)
        except RefusedError as error:
            journal.decided(recipe, f"{error.code}: {error}")
            raise


def batch_secret(directory: Path) -> int:
    """The secret number by which a client draws its batches, made once for its directory.

    A server that knew which rows are in which batch could solve the scalars of a round for those of each row.

    Raises:
        FedKSeedError: the file can't be read or written, or holds something else.
    """
    path = directory / BATCH_SEED
    if not path.exists():
        write_atomically(path, secrets.token_hex(16).encode())
    try:
        return int(read_whole(path, 64, str(path)), 16)
    except ValueError as error:
        raise FedKSeedError(f"{path} holds no secret: {error}; remove it, and another is made") from error


def masking_client(
    directory: Path, signing: ClientSigning, members: str | None, number: int, nonce: bytes
) -> "secure.MaskingClient":
    """A client's side of masked uploads in one run, with its memory in its directory.

    Args:
        members: file with the public lines of all clients; None: the server is believed.

    Raises:
        FedKSeedError: a package is missing.
    """
    try:
        from ....secure.member import MaskingClient as Masker
    except ModuleNotFoundError as error:
        raise FedKSeedError(f"masked uploads need the package {error.name}: pip install 'fedkseed[secure]'") from error
    require = None if members is None else partial(require_member, Path(members))
    return Masker(number, masking_key(signing.key), nonce, MaskedRoundsFile(directory, nonce), require=require)


def serve(directory: Path) -> None:
    """Answer tasks until none has come for the idle time.

    Raises:
        FedKSeedError: another worker runs in this directory, or its settings can't be read.
    """
    settings = OwnerSettings.read(directory)
    with (
        exclusive(directory / "worker.lock", f"another worker runs in {directory}"),
        sockets.listening(directory) as listener,
    ):
        owner = settings.owner
        if owner.policy.data.secret_batches:
            owner = replace(owner, secret=batch_secret(directory))
        signing = settings.signing(directory)
        masks = None if signing is None else partial(masking_client, directory, signing, owner.members)
        own = {"masks": masks, "ledger": PrivacyLedger(directory), "keeps": directory / TUNED}
        follow = partial(follow_recipe, RecipeJournal(directory), owner, **own)
        worker = TaskHandler(follow, signing)
        listener.settimeout(settings.idle)
        while True:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                (directory / sockets.SOCKET).unlink(missing_ok=True)  # still locked: a successor's is not touched
                return
            with connection, suppress(AbandonedError, OSError, FedKSeedError):  # of this task; the next may succeed
                _serve_one(worker, connection)


def _serve_one(worker: TaskHandler, connection: socket) -> None:
    task = sockets.receive(connection, HAND_IN)
    reply = worker.reply(task, lambda: sockets.gone(connection))
    sockets.send(connection, reply.encode(), HAND_IN)
    connection.close()
    worker.afterwards()


if __name__ == "__main__":
    try:
        serve(Path(sys.argv[1]))
    except FedKSeedError as refusal:
        sys.exit(f"fedkseed: {refusal}")
