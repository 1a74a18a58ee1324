"""The model of a run without some clients, recomputed from the uploads of the others that the run has kept.

Each round is done again with the same uploads but theirs, so that weights, agreement, moments and importance are those
of a server that has refused theirs in each round. Directions are those that clients have drawn: their scalars
are slopes along these. What others have computed later began with models that had learned from the clients: this is
no exact unlearning.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..errors import FedKSeedError
from ..files import folder, require_absent
from ..round import Broadcasts, Report, run_round
from ..wire.records import Subtotal
from .digest_chain import Receipt
from .store import FORGOTTEN, NOTES, REACH, STOPPED, Store
from .verify import recomputable, recomputed, with_noise_of

# The part of a report that uploads say; the rest, as bytes and seconds, stays that of the round as it was.
OF_UPLOADS = ("round", "clients", "loss", "skipped", "scalar", "staleness")


@dataclass(frozen=True, slots=True)
class Forgetting:
    """The extent of what was recomputed."""

    rounds: int
    uploads: int  # that count
    left_out: int
    head: str  # of the new run's chain, hexadecimal


def forget(store: Store, clients: Collection[int], directory: Path) -> Forgetting:
    """Write a run's rounds without the uploads of some clients as a new run, up to the round whose model is tuned.

    The run stays as it is; the caller holds its lock. Evaluations are not computed again.

    Raises:
        FedKSeedError: the run does not keep what that needs, or does not follow from it; one of the clients has no
            upload, or a round no other; the directory exists.
    """
    require_absent(directory)
    store.require_sound()
    recipe = store.load_recipe()
    if recipe.privacy is not None and not recipe.protecting("example"):
        raise FedKSeedError(
            f"the sums of {store.directory} have noise, which is paid for by [privacy] once: a second sum of the same "
            "uploads would tell more of the others than was promised"
        )
    recipe = with_noise_of(store, recipe)
    strategy = recomputable(store, recipe)
    if Subtotal in strategy.aggregator.replies:
        raise FedKSeedError(f"the server of {store.directory} was sent sums by shards: no client's upload is kept")
    last = store.rounds if store.tuned is None else store.tuned
    _require_uploads(store, clients, last)
    reports, broadcasts, uploads, left_out = store.reports(), Broadcasts(strategy.server), 0, 0
    state: Any = strategy.server.init()
    with folder(directory) as part, Store.create(part, store.recipe.read_text()) as new:
        for name in ("identity", "clients", NOTES, REACH):
            if (fact := store.recall(name)) is not None:
                new.remember(name, fact)
        for was in recomputed(store, recipe, strategy):
            kept = {client: Receipt(was.receipts[client].upload) for client in was.receipts.keys() - {*clients}}
            report = None
            if was.round:
                began = {client: was.states[was.uploads[client].round] for client in kept}
                answers = [(client, receipt.upload) for client, receipt in kept.items()]
                state, report = run_round(strategy, state, [*kept], lambda _, replies=answers: replies, began)
                others = {each.name for each in fields(Report)}.difference(OF_UPLOADS)
                report = replace(report, **{name: reports[was.round - 1].get(name) for name in others})
            new.commit(state, report, receipts=kept, broadcast=broadcasts.of(state))
            uploads, left_out = uploads + len(kept), left_out + len(was.receipts) - len(kept)
            if was.round == last:
                break
        new.remember(FORGOTTEN, sorted({*clients, *(store.recall(FORGOTTEN) or ())}))
        new.remember(STOPPED, f"recomputed without {new.forgotten}, from a run with the head {store.head(last).hex()}")
        return Forgetting(last, uploads, left_out, new.head(last).hex())


def _require_uploads(store: Store, clients: Collection[int], last: int) -> None:
    """Refuse clients without an upload in the first rounds, or with the only one of a round."""
    took_part: set[int] = set()
    for done in range(1, last + 1):
        of_round = {*store.receipts(done)}
        took_part |= of_round
        if not of_round.difference(clients):
            raise FedKSeedError(
                f"round {done} of {store.directory} has uploads of clients {sorted(of_round)} alone: without them no "
                "model follows from it; begin a new run without them"
            )
    for client in clients:
        if client not in took_part:
            known = f"{sorted(took_part)[:10]}{' and others' * (len(took_part) > 10)}"
            raise FedKSeedError(
                f"client {client} has no upload in the {last} rounds of which the model of {store.directory} is made, "
                f"clients {known} have: it has nothing of client {client}"
            )
