"""The parts of a run whose clients are on other machines."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...data.reading import is_here
from ...errors import FedKSeedError
from ...recipe.algorithms import Algorithm, chosen
from ...recipe.basis import with_basis
from ...recipe.schema import Recipe
from ...round import Report, run_round
from ...run.chain import Receipt
from ...run.cohort import cohort
from ...run.loop import NEWCOMER, Evaluator, Federation, WithoutModel
from ...run.watchers import Progress, Silent
from ...strategy import COEFFICIENTS, Strategy
from ...wire.codec import decode, encode, kind_of
from ...wire.delta import restore
from ...wire.records import Delta, Lack, Run
from ..recipes import require_networked
from .clients import Remote

# The value of data.federated.digest for one empty list; to call that function would be to import PyTorch.
NO_DATA = hashlib.sha256(b"[[]]").hexdigest()


def federation(recipe: Recipe, remote: Remote, progress: Progress | None = None) -> Federation:
    """The parts of a run with clients of a network.

    Held-out examples are the server's own, if there are any. A server without data needs no model either, if the
    recipe has the digest of the clients' base model: such a server neither loads a model nor imports PyTorch.

    Raises:
        FedKSeedError: the recipe can't be followed over a network, or its model or data can't be loaded.
    """
    require_networked(recipe)
    algorithm, progress = chosen(recipe), progress or Silent()
    if algorithm.remembers:
        raise FedKSeedError(
            f"clients of {recipe.training.algorithm} have to remember every round, and over a network one that is "
            "restarted forgets: choose another [training] algorithm"
        )
    size = recipe.clients.cohort_of(remote.numbers.count)
    if not is_here(recipe.data.source):
        progress.note(f"there is no data at {recipe.data.source} on this machine: nothing is evaluated")
    strategy, evaluator, held_out = _evaluated(recipe, algorithm, progress)
    keeps = recipe.keeps_uploads and algorithm.pooled
    rounds = Rounds(recipe.seed, strategy, remote, size, keeps)
    return Federation(
        recipe=recipe,
        strategy=strategy,
        identity={
            "directions": str(strategy.run.pool),
            "a base model of digest": strategy.run.base.hex(),
            "held-out data of digest": held_out,
            "a number of clients of": str(remote.numbers.count),
        },
        round=rounds.next,
        evaluator=evaluator,
        progress=progress,
        receipts=lambda: rounds.receipts,
    )


def _evaluated(recipe: Recipe, algorithm: Algorithm, progress: Progress) -> tuple[Strategy[Any], Evaluator, str]:
    """The strategy, the evaluator of its models, and the digest of the held-out data."""
    recipe, basis = with_basis(recipe)
    if (why := why_model(recipe, algorithm)) is None:
        progress.note("no model is loaded: the recipe names its digest, and nothing is evaluated")
        run = Run(algorithm.pool(recipe), bytes.fromhex(recipe.model.digest or ""))
        strategy = algorithm.make(recipe, run)
        return strategy, WithoutModel(recipe, strategy, basis), NO_DATA
    from ...data.federated import digest, own_held_out
    from ...evaluation.metrics import metrics_of
    from ...run.setup import WithModel, build, tokenizer_of

    progress.note(f"the model is needed {why}")
    tokenizer = tokenizer_of(recipe, progress)
    held_out, options = own_held_out(recipe, tokenizer)
    metrics = metrics_of(recipe.evaluation, options)
    setup = build(recipe, tokenizer, basis, serves=True, progress=progress)
    return setup.strategy, WithModel(setup, held_out, metrics=metrics), digest([held_out])


def why_model(recipe: Recipe, algorithm: Algorithm) -> str | None:
    """The reason why a server needs the model; None if the server can do without."""
    if is_here(recipe.data.source):
        return "to evaluate on the data of this machine"
    if algorithm.strategy.weights != COEFFICIENTS:
        return f"because {recipe.training.algorithm} aggregates weights"
    if recipe.model.digest is None:
        return "for its digest: `fedkseed pin RECIPE` writes it into the recipe, then a server can do without"
    if algorithm.tuned == "output" and recipe.model.tuned is None:
        return "for the names of its output layer: `fedkseed pin RECIPE` writes them into the recipe"
    return None


@dataclass(slots=True)
class Rounds:
    """The rounds of a run over a network, made of the answers that come in time.

    Args:
        size: number of clients in a cohort.
        keeps: whether the uploads of a round are kept as receipts.
    """

    seed: int
    strategy: Strategy[Any]
    remote: Remote
    size: int
    keeps: bool = False
    receipts: dict[int, Receipt] = field(default_factory=dict)  # the uploads of the last round, where they are kept
    gathered: bool = False
    kept: dict[int, bytes] = field(default_factory=dict)  # client that answered last round -> that round's broadcast

    def next(self, state: Any, earlier: Callable[[int], Any]) -> tuple[Any, Report]:
        """The state after a round, and its report."""
        if not self.gathered:
            self.remote.gather()
            self.gathered = True
        asked = cohort(self.seed, state.round, self.remote.numbers.count, self.size)
        needed = min(self.remote.minimum, len(asked))
        self.remote.signatures.clear()
        self.receipts = {}

        def transport(sent: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
            nonlocal needed

            def check(client: int, reply: bytes) -> None:
                """Try a round with this answer alone, so that a bad answer does not spoil the round of the others."""
                if kind_of(reply) is Lack and kind_of(sent[client]) is Delta:
                    decode(reply, Lack)  # of a restarted client: another call of `transport` sends the whole broadcast
                else:
                    run_round(self.strategy, state, [client], lambda _: [(client, reply)])

            # A client signs what it has restored; most are sent the same difference, which is restored once.
            differences = {client: data for client, data in sent.items() if kind_of(data) is Delta}
            distinct = {data: client for client, data in differences.items()}
            restored = {data: restore(data, self.kept[client]) or data for data, client in distinct.items()}
            whole = {**sent, **{client: restored[data] for client, data in differences.items()}}
            for client, reply in self.remote.transport(state.round, sent, max(0, needed), check, whole):
                if kind_of(reply) is Lack:
                    del self.remote.signatures[client]  # no upload, but a wish for the whole broadcast
                else:
                    needed -= 1
                    if self.keeps:
                        self.receipts[client] = Receipt(reply, self.remote.signatures[client])
                yield client, reply

        after, report = run_round(self.strategy, state, asked, transport, kept=self.kept)
        if self.strategy.weights == COEFFICIENTS:
            message = encode(self.strategy.broadcast(state, [NEWCOMER])[NEWCOMER])
            self.kept = dict.fromkeys(report.clients, message)
        return after, report
