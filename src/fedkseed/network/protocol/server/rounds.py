"""The parts of a run whose clients are on other machines."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ....data.sources import is_here
from ....errors import FedKSeedError
from ....files import read_table, write_table
from ....recipe.algorithms import Algorithm
from ....recipe.basis_digest import with_basis
from ....recipe.rules import Where, checked_algorithm, require_legal
from ....recipe.schema import Recipe
from ....round import Report, decoded, run_round
from ....run.cohort import EACH_ROUND, cohort, over_shards
from ....run.digest_chain import Receipt
from ....run.loop import NEWCOMER, Evaluator, Federation, WithoutModel
from ....run.progress import Progress, Silent
from ....strategies.kseed import KSeed
from ....strategies.masked import MaskedKSeed
from ....strategies.tree import Tree
from ....strategy import COEFFICIENTS, Strategy, TwoLegs
from ....wire.codec import decode, encode, kind_of
from ....wire.delta import restore
from ....wire.records import Delta, Lack, Run
from ..signatures import ServerSigning
from .clients import RemoteClients

# The value of data.federated.digest for one empty list; to call that function would be to import PyTorch.
FIRST_LEG = "masked-uploads.json"  # in a run's directory
NO_DATA = hashlib.sha256(b"[[]]").hexdigest()


def federation(
    recipe: Recipe,
    remote: RemoteClients,
    progress: Progress | None = None,
    signing: ServerSigning | None = None,
    secret: bytes = b"",
) -> Federation:
    """The parts of a run with clients of a network.

    Held-out examples are the server's own, if there are any. A server without data needs no model either, if the
    recipe has the digest of the clients' base model: such a server neither loads a model nor imports PyTorch.

    Args:
        signing: has the clients' keys for masked uploads.
        secret: of the noise that this server adds.

    Raises:
        FedKSeedError: the recipe can't be followed over a network, or its model or data can't be loaded; or uploads are
            to be masked, and clients have no keys for that.
    """
    require_legal(recipe, Where.NETWORK)  # before code of the user's, which is not run over a network
    if recipe.secure is not None:
        _require_keys(signing, remote.numbers.expected)
    algorithm, progress = checked_algorithm(recipe), progress or Silent()
    count = size = remote.numbers.count
    if recipe.network.shards is None:
        size = recipe.clients.cohort_of(count)
    else:
        count = sum(recipe.network.shards)
    if not is_here(recipe.data.source):
        if recipe.evaluation.best is not None:
            raise FedKSeedError(
                f"[evaluation] best = {recipe.evaluation.best!r} chooses by held-out rows, and there is no data at "
                f"{recipe.data.source} on this machine: give the server a file of its own as [data] source, or leave "
                "best out"
            )
        progress.note(f"there is no data at {recipe.data.source} on this machine: nothing is evaluated")
    strategy, evaluator, held_out = _evaluated(recipe, algorithm, progress, secret)
    if isinstance(strategy, MaskedKSeed) and signing is not None:
        strategy = replace(strategy, keys=signing.masks, name=signing.nonce)
    strategy = over_shards(strategy, recipe)
    keeps = recipe.keeps_uploads and algorithm.pooled
    rounds = NetworkRounds(
        recipe.seed, strategy, remote, size, keeps, remote.numbers.path.with_name(FIRST_LEG), recipe.clients.draw
    )
    return Federation(
        recipe=recipe,
        strategy=strategy,
        identity={
            "directions": str(strategy.run.pool),
            "a base model of digest": strategy.run.base.hex(),
            "held-out data of digest": held_out,
            "a number of clients of": str(count),
        },
        round=rounds.next,
        evaluator=evaluator,
        progress=progress,
        receipts=lambda: rounds.receipts,
        clients=count,
    )


def _require_keys(signing: ServerSigning | None, clients: set[int]) -> None:
    if signing is None:
        raise FedKSeedError("[secure] needs the keys of clients: start the server with --certs, and clients with --key")
    if lacking := sorted(clients - {*signing.masks}):
        raise FedKSeedError(
            f"[secure] needs a key for masks of each client, and the public files of clients {lacking[:10]} have none: "
            "each makes another by `fedkseed certs public KEY`, and theirs are replaced"
        )


def _evaluated(
    recipe: Recipe, algorithm: Algorithm, progress: Progress, secret: bytes
) -> tuple[Strategy[Any], Evaluator, str]:
    """The strategy, the evaluator of its models, and the digest of the held-out data."""
    recipe, basis = with_basis(recipe)
    if (why := why_model(recipe, algorithm)) is None:
        progress.note("no model is loaded: the recipe names its digest, and nothing is evaluated")
        run = Run(algorithm.pool(recipe), bytes.fromhex(recipe.model.digest or ""))
        strategy = algorithm.make(recipe, run, secret=secret)
        return strategy, WithoutModel(recipe, strategy, basis), NO_DATA
    from ....data.federated import digest, own_held_out
    from ....evaluation.metrics import metrics_of
    from ....run.setup import WithModel, build, tokenizer_of

    progress.note(f"the model is needed {why}")
    tokenizer = tokenizer_of(recipe, progress)
    held_out, sets = own_held_out(recipe, tokenizer, progress.note)
    metrics = metrics_of(recipe.evaluation, held_out.options)
    setup = build(recipe, tokenizer, basis, serves=True, progress=progress, secret=secret)
    evaluator = WithModel(setup, held_out.examples, metrics=metrics, sets=sets)
    return setup.strategy, evaluator, digest([held_out.examples, *(one.examples for one in sets.values())])


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
class NetworkRounds:
    """The rounds of a run over a network, made of the answers that come in time.

    Args:
        size: number of clients in a cohort.
        keeps: whether the uploads of a round are kept as receipts.
        first_leg: file that keeps a round's masked uploads from its second leg on. Clients answer one set of survivors
            a round, and so a server that was stopped between the legs must go on with these.
        draw: see `cohort`.
    """

    seed: int
    strategy: Strategy[Any]
    remote: RemoteClients
    size: int
    keeps: bool = False
    first_leg: Path | None = None
    draw: str = EACH_ROUND
    receipts: dict[int, Receipt] = field(default_factory=dict)  # the uploads of the last round, where they are kept
    gathered: bool = False
    kept: dict[int, bytes] = field(default_factory=dict)  # client that answered last round -> that round's broadcast

    def next(self, state: Any, earlier: Callable[[int], Any]) -> tuple[Any, Report]:
        """The state after a round, and its report."""
        if not self.gathered:
            self.remote.gather()
            self.gathered = True
        asked = cohort(self.seed, state.round, self.remote.numbers.count, self.size, self.draw)
        needed = min(self.remote.minimum, len(asked))
        self.remote.signatures.clear()
        self.receipts, strategy = {}, self.strategy
        alone: Strategy[Any] = strategy
        # An answer is tried without the evidence about clients: it is of all of a round, and half of the work.
        if isinstance(strategy, KSeed) and strategy.trust.agreement:
            alone = replace(strategy, trust=replace(strategy.trust, agreement=False))
        uploads: dict[int, bytes] = {}  # of the first of two legs
        asked_by = ""  # the digest of its message

        def transport(sent: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
            nonlocal needed, asked_by

            second = isinstance(strategy, TwoLegs) and all(kind_of(m) is strategy.request for m in sent.values())
            if isinstance(strategy, TwoLegs):
                needed = max(needed, strategy.needed(len(asked)))
                if second:
                    self._keep(asked_by, uploads)
                elif kept := self._left(asked_by := self._asked_by(sent)):
                    self.remote.progress.note(f"round {state.round + 1} goes on with its second leg")
                    uploads.update(kept)
                    yield from kept.items()
                    return

            def check(client: int, reply: bytes) -> None:
                """Try a round with this answer alone, so that a bad answer does not spoil the round of the others."""
                if isinstance(strategy, TwoLegs):
                    strategy.require(client, sent[client], reply, uploads)
                elif kind_of(reply) is Lack and kind_of(sent[client]) is Delta:
                    decode(reply, Lack)  # of a restarted client: another call of `transport` sends the whole broadcast
                else:
                    records = decoded({client: reply}, strategy.replies, {client: state})
                    if isinstance(alone, Tree):
                        alone.require(state, records[0])
                    else:
                        alone.aggregate(state, records)

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
                    if not second:
                        uploads[client] = reply
                yield client, reply

        after, report = run_round(self.strategy, state, asked, transport, kept=self.kept)
        if isinstance(strategy, TwoLegs):
            if self.first_leg is not None:
                self.first_leg.unlink(missing_ok=True)
        elif self.strategy.weights == COEFFICIENTS:
            message = encode(self.strategy.broadcast(state, [NEWCOMER])[NEWCOMER])
            self.kept = dict.fromkeys(self.remote.signatures, message)  # of those whose answers counted
        return after, report

    def _asked_by(self, sent: Mapping[int, bytes]) -> str:
        """The digest of a first leg's message and of the run's nonce: after a rollback the same message has others."""
        signing = self.remote.signing
        made = hashlib.sha256(signing.nonce if signing else b"")
        for message in {id(message): message for message in sent.values()}.values():
            made.update(message)
        return made.hexdigest()

    def _keep(self, asked_by: str, uploads: Mapping[int, bytes]) -> None:
        if self.first_leg is not None:
            kept = {str(client): data.hex() for client, data in uploads.items()}
            write_table(self.first_leg, {"asked by": asked_by, "uploads": kept})

    def _left(self, asked_by: str) -> dict[int, bytes]:
        """The uploads of a first leg that was finished before this process, if they answer this message."""
        if self.first_leg is None or not self.first_leg.exists():
            return {}
        try:
            table = read_table(self.first_leg)
            found = {int(client): bytes.fromhex(data) for client, data in table["uploads"].items()}
            return found if table["asked by"] == asked_by else {}
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise FedKSeedError(f"{self.first_leg} holds no masked uploads: {error}; remove it") from error
