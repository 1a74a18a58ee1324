"""Verification of a finished or running run from what it has kept: does each state follow from its uploads?

No model and no data are needed, and any machine finds the same: a round's sum is one of integers. What is checked, from
the first round on: the chain of digests; each state is what the recipe's algorithm makes of the state before and the
round's uploads, and the broadcast is made of it; each upload is signed by its client for this run and broadcast; the
adapter is that of the tuned state, of the run's base model and recipe. Evaluations are not computed again.

A server that has changed an upload, left one out, or written another state is found, as long as it lacks its clients'
keys. No code and no file that a recipe names is run or opened: the run may be a stranger's.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import FedKSeedError
from ..recipe.own_code import is_own
from ..recipe.rules import checked_algorithm
from ..recipe.schema import Recipe
from ..round import Broadcasts
from ..strategy import COEFFICIENTS, Strategy
from ..weights.adapter import Adapter
from ..wire.codec import decode, kind_of
from ..wire.records import Run, Subtotal
from . import digest_chain as chain
from .cohort import over_shards
from .digest_chain import Receipt
from .loop import Coefficients, provenance
from .privacy_plan import kept_secret, with_noise
from .store import Store, pack

# Whether a signature is that of a client: (rounds done before, client, broadcast, upload, signature).
Signed = Callable[[int, int, bytes, bytes, bytes], bool]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The extent of what was found right."""

    rounds: int
    uploads: int
    signed: int  # uploads whose signatures were checked
    unchecked: int  # uploads with signatures that were not
    head: str  # of the chain, hexadecimal: whoever has it can recognise the run
    digest: str | None  # of the tuned model by its adapter, hexadecimal; None: no adapter, or its server had no model


def verify(store: Store, signed: Signed | None = None) -> Verdict:
    """Recompute every round of a run from its kept uploads.

    Args:
        signed: checks a signature; None: the run has none, or the clients' keys are not at hand.

    Raises:
        FedKSeedError: something does not follow; the message names the first round where.
    """
    store.require_sound()
    recipe = with_noise_of(store, store.load_recipe())
    strategy = recomputable(store, recipe)
    uploads = unchecked = 0
    for done in recomputed(store, recipe, strategy, signed):
        uploads += len(done.receipts)
        unchecked += sum(signed is None and receipt.signature != b"" for receipt in done.receipts.values())
    rounds, tuned = store.rounds, store.tuned
    digest = _digest_of_adapter(store, recipe, strategy, store.state(strategy.server.state, tuned))
    return Verdict(rounds, uploads, uploads if signed else 0, unchecked, store.head(rounds).hex(), digest)


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A round of a run, recomputed from its uploads and found to be as it was kept."""

    round: int  # rounds done; 0: the state before the first, of no uploads
    states: Mapping[int, Any]  # by rounds done: the one after it, and those with which its clients began
    receipts: Mapping[int, Receipt]  # this and the next by client
    uploads: Mapping[int, Any]


def recomputed(
    store: Store, recipe: Recipe, strategy: Strategy[Any], signed: Signed | None = None
) -> Iterator[Recomputed]:
    """Recompute the rounds of a run from its kept uploads, in order.

    Raises:
        FedKSeedError: there is none, or a state, a broadcast or an upload is another than its digests say.
    """
    if (last := store.rounds) < 0:
        raise FedKSeedError(f"{store.directory} has no state yet; there is nothing to recompute")
    states: dict[int, Any] = {0: strategy.server.init()}
    broadcasts = Broadcasts(strategy.server, 2 if recipe.asynchronous is None else last + 1)
    for done in range(last + 1):
        receipts, uploads = store.receipts(done), dict[int, Any]()
        if done:
            uploads = _uploads(strategy, broadcasts, states, done, receipts, signed)
            try:
                states[done] = strategy.aggregate(states[done - 1], [*uploads.values()], states)
            except FedKSeedError as error:
                raise FedKSeedError(f"round {done}: its uploads can't be added up: {error}") from error
        if chain.digest(pack(states[done])) != store.row(done).parts[: chain.SIZE]:
            raise FedKSeedError(
                f"round {done}: the state is not what the algorithm makes of the {len(receipts)} uploads "
                "that are kept: one was changed or left out, or the state was"
            )
        if chain.digest(broadcasts.of(states[done])) != store.row(done).parts[-chain.SIZE :]:
            raise FedKSeedError(f"round {done}: the broadcast that the clients were sent is not made of the state")
        yield Recomputed(done, states, receipts, uploads)
        if recipe.asynchronous is None:  # else clients may have begun in any round before
            states.pop(done - 1, None)


def with_noise_of(store: Store, recipe: Recipe) -> Recipe:
    """A run's recipe with the noise that the run has computed for its clients."""
    if recipe.privacy is None:
        return recipe
    count = (store.recall("identity") or {}).get("a number of clients of") or recipe.clients.count
    try:
        count = int(count or len(store.recall("clients")["examples"]))
    except (TypeError, ValueError, KeyError) as error:
        raise FedKSeedError(f"{store.directory} does not say how many clients it has: {error!r}") from error
    return with_noise(recipe, count)


def require_head(store: Store, head: str) -> int:
    """Refuse a run whose chain does not have a head that somebody has seen.

    Args:
        head: hexadecimal, as `verify` and the server print it.

    Returns:
        The number of rounds done at that head.

    Raises:
        FedKSeedError: it has not: rounds were changed, left out or computed anew since.
    """
    heads = {store.head(done).hex(): done for done in range(store.rounds + 1)}
    if (done := heads.get(head.lower())) is None:
        raise FedKSeedError(
            f"{store.directory} has no head {head} after any of its {store.rounds} rounds: it is another run, or was "
            "changed after that head was seen"
        )
    return done


def recomputable(store: Store, recipe: Recipe) -> Strategy[Any]:
    """The strategy of a run; one whose rounds can't be recomputed from what it keeps is refused."""
    if is_own(recipe.training.algorithm):
        raise FedKSeedError(
            f"the run's algorithm is {recipe.training.algorithm}: no code is run that a run's recipe names"
        )
    if recipe.secure is not None:
        raise FedKSeedError("the run's uploads were masked, and the server has their sums alone: none is kept")
    algorithm = checked_algorithm(recipe)
    if algorithm.strategy.weights != COEFFICIENTS or not recipe.trust.receipts:
        raise FedKSeedError(
            f"the uploads of {recipe.training.algorithm} were not kept: only runs of K coefficients with [trust] "
            "receipts = true can be recomputed"
        )
    if store.forgotten and not algorithm.sums:
        raise FedKSeedError(
            f"{store.directory} was recomputed without {store.forgotten}, and its directions were drawn by states of "
            "the run before: take that run, and to forget more clients, name all of them"
        )
    run, secret = begun_with(store, recipe), kept_secret(recipe, store.directory, reads=True)
    strategy = algorithm.make(recipe, run, secret=secret)
    sums = store.rounds and any(kind_of(receipt.upload) is Subtotal for receipt in store.receipts(1).values())
    return over_shards(strategy, recipe) if sums else strategy  # the same recipe in one process has no shards


def begun_with(store: Store, recipe: Recipe) -> Run:
    """The pool and the base model with which a run began; refused where they are not its recipe's."""
    pool, identity = checked_algorithm(recipe).pool(recipe), store.recall("identity")
    try:
        directions, base = identity["directions"], bytes.fromhex(identity["a base model of digest"])
    except (TypeError, KeyError, ValueError) as error:
        raise FedKSeedError(f"{store.directory} does not say with which base model it began: {error!r}") from error
    if directions != str(pool):
        raise FedKSeedError(f"the run began with {directions}, its recipe says {pool}")
    if recipe.model.digest not in (None, base.hex()):
        raise FedKSeedError(f"the run began with a base model of digest {base.hex()}, its recipe says another")
    return Run(pool, base)


def _uploads(
    strategy: Strategy[Any],
    broadcasts: Broadcasts[Any],
    states: Mapping[int, Any],
    done: int,
    receipts: Mapping[int, Receipt],
    signed: Signed | None,
) -> dict[int, Any]:
    """The uploads of a round by client, decoded and checked against the states before."""
    uploads = dict[int, Any]()
    for client, receipt in receipts.items():
        named = f"round {done}: the upload of client {client}"
        try:
            upload: Any = decode(receipt.upload, *strategy.aggregator.replies)
        except FedKSeedError as error:
            raise FedKSeedError(f"{named} can't be read: {error}") from error
        if upload.client != client or upload.round not in states:
            says = f"is of client {upload.client}, who began after {upload.round} rounds"
            raise FedKSeedError(f"{named} says that it {says}")
        broadcast = broadcasts.of(states[upload.round])
        if signed and not signed(upload.round, client, broadcast, receipt.upload, receipt.signature):
            raise FedKSeedError(f"{named} is not signed by it for this run and its broadcast")
        uploads[client] = upload
    return uploads


def _digest_of_adapter(store: Store, recipe: Recipe, strategy: Strategy[Any], state: Any) -> str | None:
    """The digest that a run's adapter names; one not of its tuned state, base model and recipe is refused."""
    if not store.adapter.exists():
        return None
    adapter, weights, run = Adapter.load(store.adapter), Coefficients(), strategy.run
    if (adapter.pool, adapter.base) != (run.pool, run.base.hex()):
        raise FedKSeedError(
            f"{store.adapter} is for {adapter.pool} and a base model of digest {adapter.base}, the run had {run.pool} "
            f"and {run.base.hex()}"
        )
    named = provenance(recipe, state.round)
    if wrong := [name for name, value in named.items() if adapter.provenance.get(name) != value]:
        says = adapter.provenance.get(wrong[0])
        raise FedKSeedError(f"{store.adapter} says {wrong[0]} = {says!r}, the run had {named[wrong[0]]!r}")
    patterns, algorithm = recipe.model.tuned or ["*"], checked_algorithm(recipe)
    stated = recipe.model.tuned or (algorithm.tuned == "all" and recipe.model.last_layers is None)
    if [*adapter.patterns] != patterns and stated:  # others are known by the model alone
        raise FedKSeedError(f"{store.adapter} tunes {[*adapter.patterns]}, the run tuned {patterns}")
    strategy.load(state, weights)
    if not np.array_equal(adapter.coefficients, weights.c):
        raise FedKSeedError(f"{store.adapter} does not hold the coefficients of the state after {state.round} rounds")
    return adapter.tuned
