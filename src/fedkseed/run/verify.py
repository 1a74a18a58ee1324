"""Verification of a finished or running run from what it has kept: does each state follow from its uploads?

No model and no data are needed, and any machine finds the same: a round's sum is one of integers. What is checked, from
the first round on:

    the chain        every row has its digest, and every digest follows from those before it
    the states       each is what the recipe's algorithm makes of the state before and the round's uploads
    the signatures   each upload is signed by its client, for this run and for the broadcast that the state makes
    the adapter      its coefficients are those of the last state

A server that has changed an upload, left one out of the sum, or written another state is found, whatever digests it
has written down, as long as it lacks its clients' keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import FedKSeedError
from ..recipe.algorithms import chosen
from ..strategy import COEFFICIENTS, Strategy
from ..weights.adapter import Adapter
from ..wire.codec import decode, encode
from ..wire.records import Run
from . import chain
from .loop import NEWCOMER, Coefficients
from .store import Store, pack

# Whether a signature is that of a client: (rounds done before, client, broadcast, upload, signature).
Signed = Callable[[int, int, bytes, bytes, bytes], bool]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The extent of what was found right."""

    rounds: int
    uploads: int
    signed: int  # uploads whose signatures were checked
    head: str  # of the chain, hexadecimal: whoever has it can recognise the run


def verify(store: Store, signed: Signed | None = None) -> Verdict:
    """Recompute every round of a run from its kept uploads.

    Args:
        signed: checks a signature; None: the run has none, or the clients' keys are not at hand.

    Raises:
        FedKSeedError: something does not follow; the message names the first round where.
    """
    store.require_sound()
    strategy = _strategy(store)
    states: dict[int, Any] = {0: strategy.init()}
    last = store.state(strategy.state)
    if last is None:
        raise FedKSeedError(f"{store.directory} has no state yet; there is nothing to verify")
    uploads = 0
    for done in range(last.round + 1):
        if done:
            uploads += _recompute(store, strategy, states, done, signed)
        if chain.digest(pack(states[done])) != store.parts(done)[: chain.SIZE]:
            raise FedKSeedError(
                f"round {done}: the state is not what the algorithm makes of the {len(store.receipts(done))} uploads "
                "that are kept: one was changed or left out, or the state was"
            )
    _require_adapter(store, strategy, states[last.round])
    return Verdict(last.round, uploads, uploads if signed else 0, store.head(last.round).hex())


def _strategy(store: Store) -> Strategy[Any]:
    recipe, identity = store.load_recipe(), store.recall("identity") or {}
    algorithm = chosen(recipe)
    if algorithm.strategy.weights != COEFFICIENTS or not recipe.trust.receipts:
        raise FedKSeedError(
            f"the uploads of {recipe.training.algorithm} were not kept: verify takes runs of K coefficients with "
            "[trust] receipts = true"
        )
    run = Run(algorithm.pool(recipe), bytes.fromhex(identity.get("a base model of digest", "")))
    if identity.get("directions") != str(run.pool):
        raise FedKSeedError(f"the run began with {identity.get('directions')}, its recipe says {run.pool}")
    return algorithm.make(recipe, run)


def _recompute(store: Store, strategy: Strategy[Any], states: dict[int, Any], done: int, signed: Signed | None) -> int:
    """Add the state after a round to `states`; returns the number of uploads."""
    receipts, uploads = store.receipts(done), []
    for client, receipt in receipts.items():
        upload: Any = decode(receipt.upload, *strategy.replies)
        if upload.client != client or upload.round not in states:
            raise FedKSeedError(f"round {done}: the upload of client {client} is of {upload.client}, {upload.round}")
        began = states[upload.round]
        if signed is not None:
            broadcast = encode(strategy.broadcast(began, [client])[client])
            if not signed(upload.round, client, broadcast, receipt.upload, receipt.signature):
                raise FedKSeedError(
                    f"round {done}: the upload of client {client} is not signed by it for this run and its broadcast"
                )
        uploads.append(upload)
    try:
        states[done] = strategy.aggregate(states[done - 1], uploads, states)
    except FedKSeedError as error:
        raise FedKSeedError(f"round {done}: its uploads can't be added up: {error}") from error
    return len(uploads)


def _require_adapter(store: Store, strategy: Strategy[Any], state: Any) -> None:
    """Refuse an adapter of the run that holds other coefficients than its last state."""
    if not store.adapter.exists():
        return
    weights = Coefficients()
    strategy.sync(strategy.broadcast(state, [NEWCOMER])[NEWCOMER], weights)
    if not np.array_equal(Adapter.load(store.adapter).coefficients, weights.c):
        raise FedKSeedError(f"{store.adapter} does not hold the coefficients of the last state")
