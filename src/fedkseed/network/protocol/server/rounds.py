"""The parts of a run whose clients are on other machines."""

import hashlib
from collections.abc import Callable, Mapping
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
from ....round import Broadcasts, Report, Round
from ....run.cohort import EACH_ROUND, cohort, over_shards
from ....run.digest_chain import Receipt
from ....run.loop import Evaluator, Federation, WithoutModel
from ....run.progress import Progress
from ....strategy import COEFFICIENTS, Strategy
from ....wire.records import Run
from ..signatures import ServerSigning
from .clients import RemoteClients

FIRST_LEG = "masked-uploads.json"  # in a run's directory
# The value of data.federated.digest for one empty list; to call that function would be to import PyTorch.
NO_DATA = hashlib.sha256(b"[[]]").hexdigest()


def federation(recipe: Recipe, remote: RemoteClients, secret: bytes = b"", begins: bool = False) -> Federation:
    """The parts of a run with clients of a network.

    Held-out examples are the server's own, if there are any. A server without data needs no model either, if the
    recipe has the digest of the clients' base model: such a server neither loads a model nor imports PyTorch.

    Args:
        remote: its signing has the clients' keys for masked uploads.
        secret: of the noise that this server adds.
        begins: whether the run does: its recipe then states what tokenizer and base model do, if they are loaded here.
    """
    require_legal(recipe, Where.NETWORK)  # before code of the user's, which is not run over a network
    signing, progress = remote.signing, remote.progress
    if recipe.secure is not None:
        _require_keys(signing, remote.numbers.expected)
    algorithm = checked_algorithm(recipe)
    count, shards = remote.numbers.count, recipe.network.shards
    size = recipe.clients.cohort_of(count) if shards is None else count
    if not is_here(recipe.data.source):
        if recipe.evaluation.best is not None:
            raise FedKSeedError(
                f"[evaluation] best = {recipe.evaluation.best!r} chooses by held-out rows, and there is no data at "
                f"{recipe.data.source} on this machine: give the server a file of its own as [data] source, or leave "
                "best out"
            )
        progress.note(f"there is no data at {recipe.data.source} on this machine: nothing is evaluated")
    notes = list[str]()
    recipe, strategy, evaluator, held_out = _evaluated(recipe, algorithm, progress, secret, notes, begins)
    if (masking := strategy.settings.secure) is not None and signing is not None:
        masking = replace(masking, keys=signing.masks, name=signing.nonce)
        strategy = algorithm.strategy_of(replace(strategy.settings, secure=masking))
    strategy = over_shards(strategy, recipe)
    keeps = recipe.keeps_uploads and algorithm.pooled
    first_leg = remote.numbers.path.with_name(FIRST_LEG)
    rounds = NetworkRounds(recipe.seed, strategy, remote, size, keeps, first_leg, recipe.clients.draw)
    clients = count if shards is None else sum(shards)
    identity = {
        "directions": str(strategy.run.pool),
        "a base model of digest": strategy.run.base.hex(),
        "held-out data of digest": held_out,
        "a number of clients of": str(clients),
    }
    return Federation(
        recipe, strategy, identity, rounds.next, evaluator, progress, notes=notes, receipts=lambda: rounds.receipts,
        clients=clients,
    )  # fmt: skip


def _require_keys(signing: ServerSigning | None, clients: set[int]) -> None:
    if signing is None:
        raise FedKSeedError("[secure] needs the keys of clients: start the server with --certs, and clients with --key")
    if lacking := sorted(clients - {*signing.masks}):
        raise FedKSeedError(
            f"[secure] needs a key for masks of each client, and the public files of clients {lacking[:10]} have none: "
            "each makes another by `fedkseed certs public KEY`, and theirs are replaced"
        )


def _evaluated(
    recipe: Recipe, algorithm: Algorithm, progress: Progress, secret: bytes, notes: list[str], begins: bool
) -> tuple[Recipe, Strategy[Any], Evaluator, str]:
    """The recipe, the strategy, the evaluator of its models, and the digest of the held-out data with `notes` on it."""
    recipe, basis = with_basis(recipe)
    if (why := why_model(recipe, algorithm)) is None:
        progress.note("no model is loaded: the recipe names its digest, and nothing is evaluated")
        run = Run(algorithm.pool(recipe), bytes.fromhex(recipe.model.digest or ""))
        strategy = algorithm.make(recipe, run, secret=secret)
        return recipe, strategy, WithoutModel(recipe, strategy, basis), NO_DATA
    from ....data.federated import digest, own_held_out
    from ....data.tokenizer_digest import with_tokenizer
    from ....evaluation.metrics import metrics_of
    from ....run.setup import WithModel, build, tokenizer_of

    progress.note(f"the model is needed {why}")
    tokenizer = tokenizer_of(recipe, progress)
    recipe = with_tokenizer(recipe, tokenizer) if begins else recipe
    held_out, sets = own_held_out(recipe, tokenizer, notes.append)
    for line in notes:
        progress.note(line)
    metrics = metrics_of(recipe.evaluation, held_out.options)
    setup = build(recipe, tokenizer, basis, serves=True, begins=begins, progress=progress, secret=secret)
    evaluator = WithModel(setup, held_out.examples, metrics=metrics, sets=sets)
    of_rows = digest([held_out.examples, *(further.examples for further in sets.values())])
    return setup.recipe, setup.strategy, evaluator, of_rows


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
    """The rounds of a run over a network, made of the answers that come in time."""

    seed: int
    strategy: Strategy[Any]
    remote: RemoteClients
    size: int  # of a cohort
    keeps: bool  # whether the uploads of a round are kept as receipts
    first_leg: Path  # file of a round's masked uploads from its second leg on
    draw: str = EACH_ROUND  # see `cohort`
    receipts: dict[int, Receipt] = field(default_factory=dict)  # of the last round, where they are kept
    held: dict[int, bytes] = field(default_factory=dict)  # client that answered in the last round -> its broadcast
    gathered: bool = False

    def next(self, state: Any, state_after: Callable[[int], Any], broadcasts: Broadcasts[Any]) -> tuple[Any, Report]:
        if not self.gathered:
            self.remote.gather()
            self.gathered = True
        asked = cohort(self.seed, state.round, self.remote.numbers.count, self.size, self.draw)
        least = min(self.remote.minimum, len(asked))
        self.remote.signatures.clear()
        self.receipts = {}
        round_ = Round.begin(self.strategy, state, asked, kept=self.held, broadcasts=broadcasts)
        if (second := self.strategy.second_leg) is not None:
            self._two_legs(round_, least, second.needed(len(asked)))
        else:
            for messages in round_.exchanges():
                self._exchange(round_, messages, least)
        after, report = round_.finish()
        named, came = self.remote.named, round_.measured  # of a tree's root shards, whose clients the report counts
        missing = sorted({*asked}.difference(came))
        uploads = f"the uploads of {named(*sorted(came))}" + f", none of {named(*missing)}" * bool(missing)
        self.remote.progress.note(f"round {state.round + 1} counts {uploads}")
        if second is not None:
            self.first_leg.unlink(missing_ok=True)
        elif self.strategy.server.weights == COEFFICIENTS:
            self.held = dict.fromkeys(round_.answered, broadcasts.of(state))
        return after, report

    def _exchange(self, round_: Round[Any], messages: Mapping[int, bytes], least: int) -> dict[int, bytes]:
        """Carry messages of a leg to clients; returns the answers that the second leg needs, and that the round has."""
        needed, uploads = max(0, least - len(round_.answered)), dict[int, bytes]()
        for client, reply in self.remote.transport(round_.state.round, messages, needed, round_.add_, round_.whole):
            if client in round_.answered:  # else it lacks the earlier broadcast, and is sent the whole one next
                if self.strategy.second_leg is not None:
                    uploads[client] = reply
                if self.keeps:
                    self.receipts[client] = Receipt(reply, self.remote.signatures[client])
            del reply  # it can be all weights
        return uploads

    def _two_legs(self, round_: Round[Any], least: int, needed: int) -> None:
        """A round of masked uploads; one that was stopped in its second leg goes on with that.

        It counts with `least` uploads; without `needed` answers in each leg the masks stay on.
        """
        exchanges, signing = round_.exchanges(), self.remote.signing
        messages = next(exchanges)
        digest = hashlib.sha256(signing.nonce if signing else b"")  # after a rollback the same message has others
        for message in {id(message): message for message in messages.values()}.values():
            digest.update(message)
        asked_by = digest.hexdigest()
        if uploads := kept_uploads(self.first_leg, asked_by):
            self.remote.progress.note(f"round {round_.state.round + 1} goes on with its second leg")
            for client, upload in uploads.items():
                round_.add_(client, upload)
        else:
            uploads = self._exchange(round_, messages, max(least, needed))
        for requests in exchanges:
            texts = {str(client): upload.hex() for client, upload in uploads.items()}
            write_table(self.first_leg, {"asked by": asked_by, "uploads": texts})
            self._exchange(round_, requests, needed)


def kept_uploads(path: Path, asked_by: str) -> dict[int, bytes]:
    """The masked uploads of a round whose second leg has begun, if they answer the message with this digest.

    Clients answer one set of survivors a round, and so a server that was stopped between the legs must go on with the
    same uploads.
    """
    if not path.exists():
        return {}
    try:
        table = read_table(path)
        uploads = {int(client): bytes.fromhex(data) for client, data in table["uploads"].items()}
        return uploads if table["asked by"] == asked_by else {}
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise FedKSeedError(f"{path} holds no masked uploads: {error}; remove it") from error
