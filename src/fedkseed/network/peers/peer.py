"""A peer: it serves the uploads that it has, gossips, trains when a round opens, and keeps the model in the end.

The main thread trains; requests are answered on a second one, and a third one gossips. All that must not be lost is in
the store, one SQLite file: a peer's own upload is committed there before any other peer sees it.
"""

import hashlib
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from ...data.tokenizer_digest import with_tokenizer
from ...errors import FedKSeedError
from ...files import exclusive
from ...models.load import load_tokenizer
from ...recipe.rules import Where, require_legal
from ...recipe.schema import Recipe
from ...weights.adapter import ADAPTER, Adapter
from ..https.way_out import through
from ..protocol.client.recipe_consent import Owner, RecipeJournal
from ..protocol.client.training_client import TrainingClient, load_client
from ..protocol.client.worker import batch_secret, follow_recipe
from ..protocol.envelope import Task, recipe_digest
from ..protocol.networked_recipe import largest_request, recipe_for_clients, with_network_defaults
from ..protocol.signatures import fingerprint, private_key, sign
from . import FILE, tls
from .app import application, serving_uploads
from .gossip import ComparisonPace, Gossip, PeerRequests
from .merge_rule import MergeRule
from .roster import PeerAddresses, Roster, load_roster
from .signed_upload import SignedUpload
from .store import UploadStore
from .verify import remember_run

ANY = "each peer's own"  # in the place of the model's name, which is another on each machine; its digest counts
CLOCK_EVERY = 0.5  # seconds between two looks at the clock

Say = Callable[[str], object]


class LateError(Exception):
    """The end of a training whose upload would not count any more."""


@dataclass(frozen=True, slots=True)
class PeerOutcome:
    """The result of a run, as one peer has it."""

    digest: str  # of the tuned model
    set: str  # digest of the set of uploads
    rounds: int
    uploads: int  # that count
    from_here: int  # of them, trained from the very models that follow from this set
    contradictions: int  # (peer, round) with two different uploads
    adapter: str


def _require_legal(recipe: Recipe, count: int) -> None:
    require_legal(recipe, Where.NETWORK, Where.PEERS)
    if recipe.clients.count not in (None, count):
        raise FedKSeedError(f"[clients] count = {recipe.clients.count}, the peers' file has {count}: leave count out")


def _shared(recipe: Recipe, count: int) -> bytes:
    """A recipe as all peers have it who have the same tokenizer, whatever their files are called."""
    recipe = with_tokenizer(recipe, load_tokenizer(recipe.model.name))
    return recipe_for_clients(recipe.having(model={"name": ANY, "device": "auto"}), count)


def run(
    recipe: Recipe, directory: Path, owner: Owner, listen: tuple[str, int], say: Say, quiet: float, *,
    peers: Path, key: Path, cert: Path, ca: Path,
) -> PeerOutcome:  # fmt: skip
    """Take part in a run until its last round is over and no new upload has come for a while.

    Args:
        directory: for this peer's uploads and its tuned model.
        owner: this peer's own data and model; None for a model: the recipe's.
        listen: host and port.
        quiet: seconds without a new upload after the last round, until it ends.
        peers: the file that all peers have, see roster.py.
        key, cert, ca: the private key, its certificate, and the authority that has signed that.

    Raises:
        FedKSeedError: a file can't be used, the key is no peer's, the port is taken, or another process uses the
            directory.
    """
    roster, recipe = load_roster(peers), with_network_defaults(recipe)
    recipe = recipe.having(model={"name": owner.model or recipe.model.name})
    _require_legal(recipe, len(roster.peers))
    private = private_key(key)
    names = [fingerprint(listed) for listed in roster.public_keys()]
    if fingerprint(private.public_key()) not in names:
        raise FedKSeedError(f"the key {key} is none of the {len(names)} in {peers}; add its public line")
    number = names.index(fingerprint(private.public_key()))
    with exclusive(directory / "peer.lock", f"another process uses {directory}; give this one its own --state"):
        server_tls, client_tls = tls.contexts(key, cert, ca, directory)
        say(f"peer {number} of {len(names)}: loading {recipe.model.name}")
        text = _shared(recipe, len(names))
        secret = batch_secret(directory) if owner.policy.data.secret_batches else None
        owner = replace(owner, model=recipe.model.name, secret=secret)
        client = follow_recipe(RecipeJournal(directory), owner, text, partial(load_client, keeps=directory / ADAPTER))
        rule = MergeRule.of(text, client.recipe, client.setup.strategy, roster)
        largest, addresses = largest_request(recipe), PeerAddresses(peers, roster, say)
        requests = PeerRequests(rule, addresses, client_tls, largest)
        with closing(UploadStore(directory / FILE, rule)) as store:
            remember_run(store, text, roster)
            pace = ComparisonPace.of(roster.seconds)
            gossip = Gossip(store, requests, number, roster.open_round, recipe.seed, pace, say)
            app = application(store, roster.open_round, largest, gossip.heard)
            training = PeerTraining(client, rule, store, roster, number, private, text, say)
            with closing(gossip), serving_uploads(app, store, *listen, server_tls):
                say(f"run {rule.run.hex()[:16]}: listening on port {listen[1]} of {listen[0]}")
                others = len(addresses.current().keys() - {number})
                for peer, address in sorted(addresses.current().items()):
                    if peer != number and (by := through(address)):
                        say(f"peer {peer} is reached{by}")
                say(f"{gossip.meet_all()} of {others} others answer, {len(store.counting())} uploads are here")
                gossip.start()
                training.until_the_end(gossip.push, quiet)
            return training.keep(directory / ADAPTER)


@dataclass(frozen=True, slots=True)
class PeerTraining:
    """A peer's own part in the rounds: what it trains, and what it keeps."""

    client: TrainingClient
    rule: MergeRule
    store: UploadStore
    roster: Roster
    number: int
    key: ec.EllipticCurvePrivateKey
    text: bytes  # the recipe as all peers have it
    say: Say

    def until_the_end(self, push: Callable[[bytes], object], quiet: float) -> None:
        """Train in each round that draws this peer, as rounds open, and wait for `quiet` seconds without an upload.

        Args:
            push: is given the name of each own upload.
        """
        rule, roster, last, reported = self.rule, self.roster, -1, set[tuple[int, int]]()
        if (wait := roster.start.timestamp() - time.time()) > 0:
            self.say(f"the first round opens at {roster.start.isoformat()}, in {wait:,.0f} s")
        while (round_ := roster.open_round()) < rule.rounds:
            for client, began in {*self.store.contradictions()} - reported:
                reported.add((client, began))
                self.say(f"peer {client} has signed two uploads for round {began + 1}: neither counts")
            if round_ <= last:
                time.sleep(max(0.0, min(CLOCK_EVERY, roster.opens_at(round_ + 1) - time.time())))
                continue
            last = round_
            if self.number in rule.drawn(round_) and not self.store.has(self.number, round_):
                self._train(round_, push)
        self.say(f"the last round is over; other peers are served until {quiet:g} s have passed without a new upload")
        begin = time.monotonic()
        while (remaining := max(begin, self.store.changed) + quiet - time.monotonic()) > 0:
            time.sleep(min(CLOCK_EVERY, remaining))

    def _train(self, round_: int, push: Callable[[bytes], object]) -> None:
        """Train from the model that follows from the uploads here, sign and keep the own one."""
        rule, roster, which = self.rule, self.roster, f"round {round_ + 1} of {self.rule.rounds}"
        broadcast, late = rule.broadcast(self.store.state(round_)), rule.strategy.settings.max_staleness
        base, end = hashlib.sha256(broadcast), roster.opens_at(min(round_ + late + 1, rule.rounds))
        before = sum(header.step < round_ for header in self.store.counting())
        self.say(f"{which}: training from the model of {before} uploads, {base.hexdigest()[:16]}")

        def on_step(loss: float) -> None:
            if time.time() >= end:
                raise LateError

        try:
            _, upload = self.client.answer(self._task(broadcast, max(1.0, end - time.time())), on_step)
            on_step(0.0)
        except LateError:
            self.say(f"{which}: given up, it took longer than {end - roster.opens_at(round_):g} s")
            return
        except FedKSeedError as error:
            self.say(f"{which}: not trained: {error}")
            return
        unsigned = SignedUpload(max(round_, roster.open_round()), base.digest(), upload)
        signed = replace(unsigned, signature=sign(self.key, unsigned.statement(rule.run)))
        added, refused = self.store.add([signed.encoded], roster.open_round())
        for header in added:
            late = f", {header.step - header.round} late" if header.step > header.round else ""
            self.say(f"{which}: done{late}, {len(signed.encoded):,} bytes")
            push(header.name)
        for reason in refused:
            self.say(f"{which}: not added: {reason}")

    def keep(self, path: Path) -> PeerOutcome:
        """Write the tuned model of the uploads that are here.

        Args:
            path: of the adapter.
        """
        rule, store = self.rule, self.store
        message = rule.broadcast(store.state(rule.rounds))
        self.client.answer(self._task(message, 1.0, keep=True), lambda loss: None)
        self.client.afterwards()
        digests = Adapter.load(path).tuned or "", store.digest().hex()
        counts = len(store.counting()), store.count_trained_from_here(), len(store.contradictions())
        return PeerOutcome(*digests, rule.rounds, *counts, str(path))

    def _task(self, message: bytes, seconds: float, keep: bool = False) -> Task:
        """A task as a server would send it; whoever answers it is this peer itself."""
        return Task(self.number, seconds, recipe_digest(self.text), b"", message, self.rule.run[:16], keep=keep)
