"""A peer: it serves its copy of the set, gossips, trains when a round opens, and keeps the model in the end.

The main thread trains; requests are answered on a second one, and a third one gossips. All that must not be lost is in
the copy, in one SQLite file: an own upload is committed there before any other peer sees it.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from ...errors import FedKSeedError
from ...files import border, exclusive
from ...recipe.rules import Where, require_legal
from ...recipe.schema import Recipe
from ...weights.adapter import NAME as TUNED
from ...weights.adapter import Adapter
from ..https.endpoints import serving
from ..protocol.client.recipe_consent import Owner, RecipeJournal
from ..protocol.client.worker import TrainingClient, batch_secret, follow_recipe
from ..protocol.envelope import Task, recipe_digest
from ..protocol.networked_recipe import largest_request, recipe_for_clients, with_network_defaults
from ..protocol.signatures import fingerprint, private_key, sign
from . import tls
from .app import application, knowing
from .gossip import ComparisonPace, Gossip
from .merge_rule import Rule
from .roster import PeerAddresses, Roster, load_roster
from .signed_upload import SignedUpload
from .store import FILE, UploadStore
from .verify import describe

ANY = "each peer's own"  # in the place of the model's name, which is another on each machine; its digest counts
LOOK = 0.5  # seconds between two looks at the clock

Say = Callable[[str], object]


class LateError(Exception):
    """The end of a training whose upload would not count any more."""


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a peer's identity, and those that all peers have.

    Args:
        peers: see roster.py.
        cert: certificate for the key, of the authority `ca`.
    """

    peers: Path
    key: Path
    cert: Path
    ca: Path


@dataclass(frozen=True, slots=True)
class PeerOutcome:
    """The result of a run, as one peer has it."""

    digest: str  # of the tuned model
    set: str  # digest of the set
    rounds: int
    uploads: int  # that count
    from_here: int  # of them, trained from the very models that this set gives
    contradictions: int  # (peer, round) with two different uploads
    adapter: str


def shared_recipe(recipe: Recipe, count: int) -> bytes:
    """A recipe as all peers have it, whatever their files are called.

    Raises:
        FedKSeedError: peers can't follow it.
    """
    require_legal(recipe, Where.NETWORK, Where.PEERS)
    if recipe.clients.count not in (None, count):
        raise FedKSeedError(f"[clients] count = {recipe.clients.count}, the peers' file has {count}: leave count out")
    own = recipe.model.model_copy(update={"name": ANY, "device": "auto"})
    return recipe_for_clients(recipe.model_copy(update={"model": own}), count)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a peer on this machine.

    Args:
        directory: for its copy of the set and its tuned model.
        host, port: where it listens.
    """

    directory: Path
    host: str
    port: int


def run(recipe: Recipe, files: Files, owner: Owner, place: Place, quiet: float, say: Say) -> PeerOutcome:
    """Take part in a run until its last round is over and no new upload has come for a while.

    Args:
        owner: this peer's own data and model; None for a model: the recipe's.
        quiet: seconds without a new upload after the last round, until it ends.

    Raises:
        FedKSeedError: a file can't be used, the key is no peer's, the port is taken, or another process uses the
            directory.
    """
    roster, recipe, directory = load_roster(files.peers), with_network_defaults(recipe), place.directory
    text, key = shared_recipe(recipe, len(roster.peers)), private_key(files.key)
    keys = [fingerprint(one) for one in roster.public_keys()]
    if (mine := fingerprint(key.public_key())) not in keys:
        raise FedKSeedError(f"the key {files.key} is none of the {len(keys)} in {files.peers}; add its public line")
    number = keys.index(mine)
    with border(f"can't make {directory}"):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with exclusive(directory / "peer.lock", f"another process uses {directory}; give this one its own --state"):
        server, client = tls.contexts(files.key, files.cert, files.ca, directory)
        secret = batch_secret(directory) if owner.policy.data.secret_batches else None
        owner = replace(owner, model=owner.model or recipe.model.name, secret=secret)
        say(f"peer {number} of {len(keys)}: loading {owner.model}")
        member = follow_recipe(RecipeJournal(directory), owner, text, keeps=directory / TUNED)
        rule = Rule.of(text, member.recipe, member.setup.strategy, roster)
        copy, largest = UploadStore(directory / FILE, rule), largest_request(recipe)
        addresses, seed = PeerAddresses(files.peers, roster, say), recipe.seed
        gossip = Gossip(
            copy, number, addresses, client, roster.now, seed, largest, ComparisonPace.of(roster.seconds), say
        )
        app, protocol = (
            application(copy, roster.now, largest, gossip.heard),
            knowing({name: k for k, name in enumerate(keys)}),
        )
        describe(copy, text, roster)
        peer = Peer(member, rule, copy, roster, number, key, text, say)
        try:
            with serving(app, place.host, place.port, server, http=protocol, log_level="critical"):
                say(f"run {rule.run.hex()[:16]}: listening on port {place.port} of {place.host}")
                others = len(addresses.now().keys() - {number})
                say(f"{gossip.meet_all()} of {others} others answer, {len(copy.marks())} uploads are here")
                gossip.start()
                peer.train_until_the_end(gossip.push)
                peer.wait_until_quiet(quiet)
            return peer.keep(directory / TUNED)
        finally:
            gossip.close()
            copy.close()


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer's own part: what it trains, and what it keeps."""

    member: TrainingClient
    rule: Rule
    copy: UploadStore
    roster: Roster
    number: int
    key: ec.EllipticCurvePrivateKey
    text: bytes  # the recipe as all peers have it
    say: Say

    def train_until_the_end(self, push: Callable[[bytes], object]) -> None:
        """Train in each round that draws this peer, as rounds open, until the last is over.

        Args:
            push: is given the name of each own upload.
        """
        rule, roster, seen, contradicting = self.rule, self.roster, -1, set[tuple[int, int]]()
        if (wait := roster.start.timestamp() - time.time()) > 0:
            self.say(f"the first round opens at {roster.start.isoformat()}, in {wait:,.0f} s")
        while (round_ := roster.now()) < rule.rounds:
            for client, began in {*self.copy.contradictions()} - contradicting:
                contradicting.add((client, began))
                self.say(f"peer {client} has signed two uploads for round {began + 1}: neither counts")
            if round_ > seen and round_ >= 0:
                seen = round_
                if self.number in rule.drawn(round_) and not self.copy.has(self.number, round_):
                    self._train(round_, push)
                continue
            time.sleep(max(0.0, min(LOOK, roster.opens(round_ + 1) - time.time())))

    def _train(self, round_: int, push: Callable[[bytes], object]) -> None:
        """Train from the model that follows from the entries here, sign and keep the upload."""
        rule, roster, which = self.rule, self.roster, f"round {round_ + 1} of {self.rule.rounds}"
        broadcast = rule.broadcast(self.copy.state(round_))
        ends = roster.opens(min(round_ + rule.strategy.settings.max_staleness + 1, rule.rounds))
        known = sum(mark.step < round_ for mark in self.copy.marks())
        self.say(f"{which}: training from the model of {known} uploads, {hashlib.sha256(broadcast).hexdigest()[:16]}")

        def on_step(loss: float) -> None:
            if time.time() >= ends:
                raise LateError

        task = Task(self.number, max(1.0, ends - time.time()), recipe_digest(self.text), b"", broadcast, rule.run[:16])
        try:
            _, upload = self.member.answer(task, on_step)
            on_step(0.0)
        except LateError:
            self.say(f"{which}: given up, it took longer than {ends - roster.opens(round_):g} s")
            return
        except FedKSeedError as error:
            self.say(f"{which}: not trained: {error}")
            return
        entry = SignedUpload(max(round_, roster.now()), hashlib.sha256(broadcast).digest(), upload)
        entry = replace(entry, signature=sign(self.key, entry.statement(rule.run)))
        added, refused = self.copy.add([entry.encoded], roster.now())
        for mark in added:
            late = f", {mark.step - mark.round} late" if mark.step > mark.round else ""
            self.say(f"{which}: done{late}, {len(entry.encoded):,} bytes")
            push(mark.name)
        for reason in refused:
            self.say(f"{which}: not added: {reason}")

    def wait_until_quiet(self, seconds: float) -> None:
        """Wait until no new upload has come for some seconds."""
        self.say(f"the last round is over; other peers are served until {seconds:g} s have passed without a new upload")
        begin = time.monotonic()
        while (left := max(begin, self.copy.changed) + seconds - time.monotonic()) > 0:
            time.sleep(min(LOOK, left))

    def keep(self, path: Path) -> PeerOutcome:
        """Write the tuned model of the entries that are here.

        Args:
            path: of the adapter.
        """
        rule, copy = self.rule, self.copy
        message = rule.broadcast(copy.state(rule.rounds))
        self.member.answer(
            Task(self.number, 1.0, recipe_digest(self.text), b"", message, rule.run[:16], keep=True), lambda loss: None
        )
        tuned = Adapter.load(path)
        self.member.afterwards()
        return PeerOutcome(
            digest=tuned.tuned or "",
            set=copy.digest().hex(),
            rounds=rule.rounds,
            uploads=len(copy.marks()),
            from_here=copy.from_here(),
            contradictions=len(copy.contradictions()),
            adapter=str(path),
        )
