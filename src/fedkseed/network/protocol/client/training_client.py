"""A client that follows a server's recipe with rows of its own: what it loads, how it answers, what it gains.

Where a server gets a code, the client's owner gets the reason in full: see `refusing`.
"""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from ....data.batches import Encoded
from ....data.federated import own_share
from ....data.held_out import HeldOut
from ....data.layouts import row_digest
from ....errors import FedKSeedError
from ....evaluation.metrics import metrics_of
from ....evaluation.statistics import Evaluation, gain
from ....local.kept_steps import KeptSteps
from ....recipe.basis_digest import with_basis
from ....recipe.schema import Recipe
from ....round import answer
from ....run import digest_chain as chain
from ....run.cohort import cohort
from ....run.privacy_plan import noise_of_a_round, with_noise
from ....run.progress import Silent
from ....run.setup import Setup, build, tokenizer_of
from ....run.workers import computing_with
from ....weights.base import Pooled
from ....wire.codec import decode, kind_of
from ....wire.delta import lack, restore
from ....wire.records import Broadcast, Change, Run, Secured, Survivors
from ..client_gain import LEAST_ROWS, THIS_CLIENT, GainFile, GainSum, gain_in_words
from ..envelope import Code, RefusedError, Task, refusing
from .policy import Policy
from .privacy_spent import PrivacyLedger
from .recipe_consent import Owner, accepted_recipe
from .task_handler import Bound, OnStep, log

if TYPE_CHECKING:
    from ....secure.member import MaskingClient

# Makes a client's side of masked uploads from its number and the nonce of the run.
MakeMasking: TypeAlias = Callable[[int, bytes], "MaskingClient"]


@dataclass(slots=True)
class TrainingClient:
    """A client, and what `load_client` has loaded for its recipe."""

    owner: Owner
    recipe: Recipe  # the server's, as the owner follows it
    setup: Setup
    examples: Sequence[Encoded]  # those that it trains on
    unseen: HeldOut  # those that it never trains on
    threads: int
    rows: frozenset[bytes] = frozenset()  # digests of those that its noise protects
    masks: MakeMasking | None = None  # None: it has no key
    ledger: PrivacyLedger | None = None  # None: it answers no recipe with noise of its own
    keeps: Path | None = None  # file for the tuned model of a finished run; None: it is not written
    steps: KeptSteps | None = None  # of its rows; None: after a stop it begins a round's steps anew
    begun: float | None = None  # when the task began that has brought the recipe; None: that task is over
    _broadcast: bytes | None = None  # the last one, where the next may come as a difference to it
    _later: Callable[[], object] = lambda: None  # what the client's owner waits for, and no server

    def answer(self, task: Task, on_step: OnStep, bound: Bound = lambda digest: None) -> tuple[bytes, bytes]:
        """The broadcast of a task, whole where it can be restored, and the answer of client `task.client` to it.

        Args:
            bound: raises `FedKSeedError` if a broadcast's digest is not the one that the task's history names.
        """
        begun, self.begun = self.begun or time.monotonic(), None
        if task.keep:
            return task.message, self._keep_tuned_model(task, bound)
        whole = restore(task.message, self._broadcast)
        if whole is None:
            return task.message, lack(task.message, task.client)
        strategy, pooled = self.setup.strategy, self.setup.algorithm.pooled
        kinds = (strategy.second_leg.request,) if strategy.second_leg else ()
        message = decode(whole, strategy.client.message, *kinds)
        digest = broadcast_digest(message, whole)
        bound(digest)
        self._require_allowed(task, message)
        masking = None
        if self.recipe.secure is not None:
            if self.masks is None:
                raise FedKSeedError("the recipe has masked uploads, and this client has no key: start it with --key")
            masking = replace(self.masks(task.client, task.nonce), allow=self._require_steps)
        self._spend(task, digest)
        if pooled and self.recipe.secure is None:  # kilobytes
            self._broadcast = whole

        def tick(loss: float) -> None:
            _require_time(begun, self.owner.policy)
            on_step(loss)

        upload = self._train(task, whole, digest, masking, tick)
        if kind_of(upload) is Change and pooled:
            self._require_steps(decode(upload, Change))
        return whole, upload

    def afterwards(self) -> None:
        """Do what only the client's owner waits for, once the answer was sent."""
        later, self._later = self._later, lambda: None
        later()

    def _require_allowed(self, task: Task, message: Any) -> None:
        """Refuse a message for another client, model, round or cohort than the recipe's, or for other steps.

        The owner's policy was applied on the recipe.
        """
        count, weights, training = self.recipe.clients.count, self.setup.weights, self.recipe.training
        if count is None or task.client >= count:
            raise FedKSeedError(f"the recipe has {count} clients, and the task is for client {task.client}")
        with refusing(Code.MODEL):
            Run(weights.pool, weights.base_digest).require(message.run)
        inside = decode(message.broadcast, Broadcast) if isinstance(message, Secured) else message
        if inside.round >= (rounds := training.rounds):
            raise FedKSeedError(f"the recipe has {rounds} rounds, and the message is of round {inside.round + 1}")
        if isinstance(inside, Broadcast):
            local = self.setup.strategy.settings.work(False)
            asked = inside.steps, inside.probes, inside.wire, inside.lr, inside.eps, inside.clip
            steps = training.steps, training.probes, training.wire or "compact"
            expected = *steps, local.learning_rate(inside.round), local.eps, float(np.float32(local.clip))
            if asked != expected:
                raise FedKSeedError(f"steps, probes, wire, lr, eps and clip are {asked}, its recipe says {expected}")
        _require_drawn(task.client, message, self.recipe, count)
        if task.done >= 0 and message.round != task.done:
            raise FedKSeedError(f"the message is of round {message.round}, its task's history has {task.done} rounds")

    def _spend(self, task: Task, asked: bytes) -> None:
        """Note what the answer to a broadcast spends by this client's noise, and refuse more than is allowed.

        Noise that a server says to add is in no account.
        """
        if not self.rows or (privacy := self.recipe.privacy) is None:
            return
        if self.ledger is None or (noise := noise_of_a_round(privacy)) is None:
            raise FedKSeedError("the recipe has [privacy] without noise, or this client has no account of it")
        limits, secret = self.owner.policy.training, self.owner.secret
        # All on which an answer depends: with another secret, as that of a new --state, it is another one.
        of_run = b"" if secret is None else _secret_of_run(secret, task.nonce, b"account ")
        parts = task.nonce, asked, of_run, b"%d %r" % (task.client, noise), *sorted(self.rows)
        answer = hashlib.sha256(b"".join(parts)).digest()
        with refusing(Code.POLICY):
            self.ledger.spend(self.rows, answer, noise**-2, limits.epsilon, limits.delta)

    def _train(
        self, task: Task, whole: bytes, broadcast: bytes, masking: "MaskingClient | None", tick: OnStep
    ) -> bytes:
        """The answer to a message about a broadcast of a digest; `tick` is called between two passes of the model."""
        setup, count, secret = self.setup, self.recipe.clients.count or 0, self.owner.secret
        # In another run, or after a rollback, the same rounds have other batches: else a server could have the same
        # batch answered with another model, under another nonce, and subtract.
        seed = None if secret is None else int.from_bytes(_secret_of_run(secret, task.nonce))
        noise = b"" if secret is None else _secret_of_run(secret, task.nonce, b"noise ")
        # Before each token of an answer, too: an objective may write thousands of them in one step.
        ticking = setup.model.register_forward_pre_hook(lambda *_: tick(math.nan))
        with computing_with(self.threads), ticking:
            client = setup.client(task.client, count, self.examples, tick, seed, masking, noise)

            def loss(batch: Any) -> float:  # a step of many probes must not outlast the limit either
                loss_of_batch = client.loss(batch)
                tick(math.nan)
                return loss_of_batch

            about = task.nonce, broadcast, task.digest, b"%d %r" % (task.client, seed)
            kept = self.steps and self.steps.within(about)
            return answer(setup.strategy, whole, replace(client, loss=loss, kept=kept))

    def _require_steps(self, upload: Any) -> None:
        """Refuse to send coefficients of fewer steps than the owner allows, masked or not.

        A server can choose a rate with which every loss after the first step is infinite.
        """
        if isinstance(upload, Change):
            least = self.owner.policy.training.min_steps
            steps = self.setup.strategy.settings.work(True).count(len(self.examples)) - upload.skipped
            if steps < least:
                raise RefusedError(
                    Code.POLICY,
                    f"{steps} steps had finite derivatives, the policy says min_steps = {least}: the server's rate is "
                    "too high for this model, or its rows are broken",
                )

    def _keep_tuned_model(self, task: Task, bound: Bound) -> bytes:
        """Take over the tuned model of a finished run, and write it as an adapter; nothing is trained.

        The history binds the model of the last round, so that all clients get the same. That of an earlier one, which
        the server's [evaluation] best has chosen, is the server's word. Returns what is sent of the gain: mostly
        nothing.
        """
        setup = self.setup
        message = decode(task.message, setup.strategy.client.message, Broadcast)
        if message.round == task.done:
            bound(broadcast_digest(message, task.message))
        with refusing(Code.MODEL):
            Run(setup.weights.pool, setup.weights.base_digest).require(message.run)
            setup.strategy.client.sync(message, setup.weights)
            if self.keeps is not None:
                setup.held(message.round).save(self.keeps)
        if self.keeps is None or not self.unseen.examples:
            return b""
        file = GainFile(self.keeps.parent)
        if self.may_send_gain() and file.allows(task.nonce, task.message):
            return self._measure_gain(file, message.round, True)
        self._later = partial(self._measure_gain, file, message.round, False)
        return b""

    def may_send_gain(self) -> bool:
        """True if the server asks for the gain, and the owner and the number of rows allow it to be sent."""
        recipe, rows = self.recipe, len(self.unseen.examples)
        hidden = recipe.secure is not None or recipe.privacy is not None
        asked = recipe.evaluation.clients is not None and self.owner.policy.evaluation.send and not hidden
        if asked and rows < LEAST_ROWS:
            log(f"the server is sent no gain of {rows} rows, {LEAST_ROWS} are needed: let kept_back be larger")
        return asked and rows >= LEAST_ROWS

    def _measure_gain(self, file: GainFile, rounds: int, sends: bool) -> bytes:
        """Measure the tuned model, which is loaded, and the base model, for the owner; returns what is sent."""
        weights, rows = self.setup.weights, len(self.unseen.examples)
        if not isinstance(weights, Pooled):
            return b""
        tuned = weights.c.copy()
        with computing_with(self.threads):
            after = self._evaluate()
            weights.load(np.zeros_like(tuned))
            before = self._evaluate()
            weights.load(tuned)
        measured = gain(THIS_CLIENT, before, after)
        change = measured.change["loss"].mean
        sends = sends and math.isfinite(change)
        file.write(measured, rounds, sends)
        log(gain_in_words(measured, sends))
        return GainSum(rows, rows * change).encode() if sends else b""

    def _evaluate(self) -> Evaluation:
        unseen, metrics = self.unseen, metrics_of(self.recipe.evaluation, self.unseen.options)
        scores = self.setup.score(unseen.examples, "own held-out rows", False, metrics)
        return replace(scores, owners=[THIS_CLIENT] * len(unseen.examples))


def load_client(
    owner: Owner,
    recipe: bytes,
    masks: MakeMasking | None = None,
    ledger: PrivacyLedger | None = None,
    keeps: Path | None = None,
    steps: Path | None = None,
) -> TrainingClient:
    """Load what a client needs to follow a server's recipe: its arguments are those of `TrainingClient`.

    Raises:
        RefusedError: the owner does not allow the recipe, or the model, the basis or the rows can't be used.
    """
    begun, policy = time.monotonic(), owner.policy  # the server chooses what to load
    followed = accepted_recipe(recipe, owner)
    with refusing(Code.MODEL):
        tokenizer = tokenizer_of(followed, Silent())
        _require_time(begun, policy)
    with refusing(Code.BASIS):
        followed, basis = with_basis(followed)
    # A server's word on the plan is not taken.
    if followed.protecting("example") and followed.clients.count is not None:
        followed = with_noise(followed, followed.clients.count)
    with refusing(Code.MODEL):
        setup = build(followed, tokenizer, basis, serves=False)
    with refusing(Code.POLICY):  # before any row is read
        policy.require_weights(followed, setup.weights.layout.size)
        _require_time(begun, policy)
    with refusing(Code.DATA):
        examples, unseen, trained = own_share(followed, tokenizer, log, policy.evaluation.kept_back or 0.0)
    _require_time(begun, policy)
    if setup.strategy.settings.noise is not None and owner.members is None:
        log("without --members this client's own noise is as large as epsilon needs: no other client's is counted")
    threads = followed.clients.threads or torch.get_num_threads()
    protected = followed.protecting("example") or (followed.privacy and followed.secure)
    rows = frozenset(map(row_digest, trained)) if protected else frozenset[bytes]()
    kept = steps and KeptSteps(steps, b"").within(repr(example).encode() for example in examples)
    return TrainingClient(owner, followed, setup, examples, unseen, threads, rows, masks, ledger, keeps, kept, begun)


def _require_time(begun: float, policy: Policy) -> None:
    """Refuse to go on with a task for longer than its owner allows."""
    if time.monotonic() - begun > (most := policy.training.max_seconds):
        raise RefusedError(Code.POLICY, f"the task took longer than the policy's max_seconds = {most:g}")


def broadcast_digest(message: Any, encoded: bytes) -> bytes:
    """SHA-256 of the round's broadcast, with which a message comes or about which it asks."""
    if isinstance(message, Survivors):
        return message.broadcast
    return chain.digest(message.broadcast if isinstance(message, Secured) else encoded)


def _require_drawn(client: int, message: Any, recipe: Recipe, count: int) -> None:
    """Refuse a masked round of other clients than the recipe's seed draws, and a private one out of turn.

    Else a server that works with two clients, of however many, could ask any third for a round with these two. And
    noise is for the rounds of the plan: each further one would say more of the examples than was promised.
    """
    masked, private = isinstance(message, Secured | Survivors), recipe.protecting("example")
    if not masked and not private:
        return
    drawn = cohort(recipe.seed, message.round, count, recipe.clients.cohort_of(count), recipe.clients.draw)
    if masked and (members := message.members.tolist()) != drawn:
        raise FedKSeedError(
            f"the server says that clients {members[:10]} are in round {message.round + 1}, and of {count} clients the "
            f"recipe's seed draws {drawn[:10]}: it may have put this client among ones that work with it"
        )
    if private and client not in drawn:
        raise FedKSeedError(
            f"client {client} is asked in round {message.round + 1}, and of {count} clients the recipe's seed draws "
            f"{drawn[:10]}: [privacy] has no noise for rounds out of turn"
        )


def _secret_of_run(secret: int, nonce: bytes, purpose: bytes = b"") -> bytes:
    return hashlib.sha256(purpose + b"%d " % secret + nonce).digest()
