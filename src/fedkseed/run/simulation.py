"""Simulations of many clients on one machine: they take turns with one model, or train side by side in processes."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..data.federated import ClientShares, share_out
from ..data.tokenizer_digest import with_tokenizer
from ..errors import FedKSeedError
from ..evaluation.metrics import metrics_of
from ..local.client import Client
from ..models.dtypes import with_dtype
from ..recipe.basis_digest import with_basis
from ..recipe.rules import Where, checked_algorithm, require_legal
from ..recipe.schema import Recipe
from ..round import Broadcasts, Decode, Report, answer, decode_once, run_round
from ..strategy import Strategy
from ..wire.codec import decode
from ..wire.delta import lack, restore
from .cohort import Step, asynchronous, durations, synchronous
from .digest_chain import Receipt
from .loop import Federation
from .needed_memory import require_room
from .privacy_plan import new_secret, with_noise
from .progress import Progress, Silent
from .setup import Stopwatch, WithModel, build, tokenizer_of
from .workers import Answer, Workers, computing_with, threads_of

if TYPE_CHECKING:
    from ..secure.member import MaskingClient
    from .ranks import Ranks
    from .ray_actors import RayActors


def _not_kept(done: int) -> Any:
    raise FedKSeedError(f"a client began with the state after {done} rounds; give round() a function that finds it")


class Simulation:
    """A federation in one process, made from a recipe.

    Args:
        serves: whether this process aggregates; a server of weights holds a copy of them.
        secret: of the noise of a run with [privacy], whoever adds it, see `kept_secret`; empty: a new one.
        tokenizer: the model's, where it is loaded already.
        engine: the processes of torchrun or Ray that train the clients; None: [clients] at_once, of this machine.
        begins: whether the recipe is to state what its base model computes, see `build`.

    Attributes:
        recipe: the recipe, with the digest of its basis and of its tokenizer, and a type of weights in place of `auto`.
        setup: the model, which all clients share, and the strategy.
        shares: the data.
        needed: the memory that the run takes, predicted; None in a worker's process, or if it can't be predicted.
    """

    def __init__(
        self, recipe: Recipe, progress: Progress | None = None, shares: ClientShares | None = None, serves: bool = True,
        secret: bytes = b"", tokenizer: Any = None, engine: "Ranks | RayActors | None" = None,
        begins: bool = False,
    ) -> None:  # fmt: skip
        self.progress, self.stopwatch = progress or Silent(), Stopwatch()
        recipe, basis = with_basis(with_dtype(recipe, self.progress.note))
        checked_algorithm(recipe, Where.SIMULATION)
        tokenizer = tokenizer_of(recipe, self.progress) if tokenizer is None else tokenizer
        self.shares = shares or share_out(recipe, tokenizer, self.progress.note)
        # A run's recipe names the wording and the tokenizer that its examples have.
        recipe = with_tokenizer(recipe.having(data=self.shares.settled), tokenizer)
        count = len(self.shares.clients)
        recipe = with_noise(recipe, count)
        self.secret = secret or new_secret(recipe)
        require_legal(recipe.having(clients={"count": count}), Where.ALWAYS)
        self.needed = require_room(recipe, self.shares, recipe.clients.cohort_of(count)) if serves else None
        self.metrics = metrics_of(recipe.evaluation, self.shares.options)
        self.members = members_of(recipe, count, self.secret)
        keys = {number: member.public for number, member in self.members.items()}
        parts = recipe, tokenizer, basis
        more: Any = {"progress": self.progress, "keys": keys, "secret": self.secret}
        self.setup = build(*parts, serves=serves, begins=begins, **more)
        self.recipe = self.setup.recipe
        self._plan, self._planned = self._make_plan(), list[Step]()
        self._kept: dict[int, bytes] = {}  # client of this round -> the last broadcast, where the client still holds it
        self.receipts: dict[int, Receipt] = {}  # the uploads of the last round, where they are kept
        self._workers: Workers | Ranks | RayActors | None = engine  # processes of its own start in the first round
        if engine is not None:
            engine.begin(self.recipe, self.secret, self.answer, self.identity)

    @property
    def strategy(self) -> Strategy[Any]:
        """The algorithm; another one in `setup` takes effect with the next round."""
        return self.setup.strategy

    @property
    def federation(self) -> Federation:
        """The parts of the run, for `work`."""
        shares = self.shares
        counts = [Counter(encoded.example.category for encoded in share) for share in shares.clients]
        categories = [dict(sorted(count.items())) for count in counts]
        holdings: dict[str, Any] = {"examples": [*map(len, shares.clients)], "categories": categories}
        holdings |= {"too_long": shares.too_long, "held_out": len(shares.held_out), "names": shares.names}
        holdings["repeated"] = shares.also_trained
        evaluator = WithModel(self.setup, shares.held_out, self.stopwatch, self.metrics, shares.sets)
        return Federation(
            self.recipe, self.strategy, self.identity, self.round, evaluator, self.progress, reach=self.reach,
            holdings=holdings, notes=shares.notes, receipts=lambda: self.receipts, clients=len(shares.clients),
        )  # fmt: skip

    @property
    def identity(self) -> dict[str, str]:
        """Facts that must stay the same when a run is continued by another process."""
        weights, data = self.setup.weights, self.shares.digest()
        base = weights.base_digest.hex()
        return {"directions": str(weights.pool), "a base model of digest": base, "data of digest": data}

    def cohort(self, round_: int) -> list[int]:
        """The clients that take part in a round."""
        return list(self.planned(round_).begun)

    def planned(self, round_: int) -> Step:
        """A round's clients, the rounds whose models they began with, and the round's end in virtual time."""
        while len(self._planned) <= round_:
            self._planned.append(next(self._plan))
        return self._planned[round_]

    def _make_plan(self) -> Iterator[Step]:
        clients, late, count = self.recipe.clients, self.recipe.asynchronous, len(self.shares.clients)
        steps = [self.steps(number) for number in range(count)]
        times = durations(self.recipe.seed, steps, clients.slow_share, clients.slow_factor)
        if late is None:
            return synchronous(self.recipe.seed, times, clients.cohort_of(count), clients.draw)
        concurrency, limit = late.concurrency or clients.cohort_of(count), late.max_staleness
        return asynchronous(self.recipe.seed, times, late.buffer, concurrency, math.inf if limit is None else limit)

    def client(self, number: int, stopwatch: Stopwatch | None = None) -> Client:
        """A client with its own examples."""

        def on_step(loss: float) -> None:
            if stopwatch is not None:
                stopwatch.tick()
            self.progress.advance(1, loss)

        clients, member = self.shares.clients, self.members.get(number)
        return self.setup.client(number, len(clients), clients[number], on_step, member=member, noise=self.secret)

    def steps(self, number: int) -> int:
        """Local steps of a client in a round."""
        clients = self.shares.clients
        differentiates = self.setup.graph_of(number, len(clients)) is not None
        return self.strategy.settings.work(differentiates).count(len(clients[number]))

    def transport(self, messages: Mapping[int, bytes]) -> Iterable[tuple[int, bytes]]:
        """Carry messages to clients on this machine: one after the other, or `at_once` at a time."""
        options = self.recipe.clients
        pairs = {number: (data, self._kept.get(number)) for number, data in messages.items()}
        distinct = {pair: restore(*pair) for pair in {*pairs.values()}}  # clients that hold the same share the result
        restored = {number: distinct[pair] for number, pair in pairs.items()}
        yield from ((number, lack(messages[number], number)) for number, data in restored.items() if data is None)
        messages = {number: data for number, data in restored.items() if data is not None}
        threads = threads_of(self.recipe)
        steps = {number: self.steps(number) for number in messages}
        self.progress.clients(messages, "waiting")
        if options.at_once > 1 and self._workers is None:
            self.progress.note(f"starting {options.at_once} processes")
            self._workers = Workers(options.at_once, threads, _prepare, self.recipe, self.shares, self.secret)
        if self._workers is not None:
            self.progress.begin(f"{len(messages)} clients, {self._workers.count} at once", sum(steps.values()))
            turns = iter(messages)  # the order in which processes take clients up
            self.progress.clients([*islice(turns, self._workers.count)], "training")
            for number, upload, seconds in self._workers.answers(messages):
                self.stopwatch.steps += seconds
                self.progress.advance(steps[number])
                self.progress.clients([number], "answered")
                self.progress.clients([*islice(turns, 1)], "training")
                yield number, upload
            return
        read = decode_once()  # of this round alone: a broadcast can be all weights
        for k, (number, data) in enumerate(messages.items()):
            self.progress.begin(f"{self.shares.name(number)} ({k + 1} of {len(messages)})", steps[number])
            self.progress.clients([number], "training")
            with computing_with(threads):
                upload, seconds = self.answer(data, number, read)
            self.stopwatch.steps += seconds
            self.progress.clients([number], "answered")
            yield number, upload
            del upload  # see `run_round`

    def answer(self, data: bytes, number: int, read: Decode = decode) -> tuple[bytes, list[float]]:
        """A client's upload, and the seconds of its local steps without the first, which includes the sync."""
        watch = Stopwatch()
        return answer(self.strategy, data, self.client(number, watch), read), watch.steps

    def close(self) -> None:
        """End the worker processes; those of an engine end with its context."""
        if isinstance(self._workers, Workers):
            self._workers.close()

    @property
    def reach(self) -> int:
        """The greatest age, in rounds, of a state that a round of the plan needs."""
        rounds = range(self.recipe.training.rounds)
        return max(done - min([*self.planned(done).begun.values(), *self._held(done).values()]) for done in rounds)

    def _held(self, round_: int) -> dict[int, int]:
        """Clients of a round that still hold an earlier broadcast -> the number of rounds before that broadcast.

        A client holds one if it took part in the round just before the one that it began with.
        """
        if not self.setup.algorithm.pooled or self.recipe.secure is not None:  # there a message names its clients
            return {}
        last = {i: self.planned(begun - 1).begun.get(i) for i, begun in self.planned(round_).begun.items() if begun}
        return {client: held for client, held in last.items() if held is not None}

    def round(
        self, state: Any, state_after: Callable[[int], Any] | None = None, broadcasts: Broadcasts[Any] | None = None
    ) -> tuple[Any, Report]:
        """The state after the next round, and the round's report.

        Args:
            state_after: a function from a number of rounds to the state after them, used for the state with which a
                client of an asynchronous round began, and for one whose broadcast a client still holds. None: no client
                holds a broadcast.
            broadcasts: those of the run, where some are encoded already.
        """
        if self.setup.algorithm.strategy.remembers:
            self.setup.load(state)  # one model stands in for clients that have seen more or less of it
        step, find = self.planned(state.round), state_after or _not_kept
        began = {client: find(begun) for client, begun in step.begun.items() if begun < state.round}
        holders = self._held(state.round) if state_after else {}
        broadcasts = broadcasts or Broadcasts(self.strategy.server, 2 + len(began) + len(holders))
        self._kept = {client: broadcasts.after(done, find) for client, done in holders.items()}
        self.receipts = {}

        def recording(messages: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
            for client, reply in self.transport(messages):
                if self.recipe.keeps_uploads and self.setup.algorithm.pooled:
                    self.receipts[client] = Receipt(reply)  # the last one is the upload
                yield client, reply
                del reply

        after, report = run_round(self.strategy, state, [*step.begun], recording, began, self._kept, broadcasts)
        spent, workers = report.cpu_seconds, self._workers
        if isinstance(workers, Workers) and spent is not None:
            spent += workers.take_cpu_seconds()
        is_engine = not isinstance(workers, Workers | None)  # of processes elsewhere, perhaps on other machines
        if is_engine or self.setup.weights.layout.entries[0].tensor.device.type != "cpu":
            spent = None
        return after, replace(report, given_up=step.given_up, clock=step.clock, cpu_seconds=spent)


def members_of(recipe: Recipe, count: int, secret: bytes = b"") -> "dict[int, MaskingClient]":
    """The simulated clients' sides of secure aggregation; none where uploads are clear.

    Args:
        secret: of the run's noise; empty: keys follow from the recipe's seed, since there is nobody to hide them from.
    """
    if recipe.secure is None:
        return {}
    from ..strategies.masked import MaskingClient, simulated_key

    seed = int.from_bytes(secret, "little") if secret else recipe.seed
    members = {number: MaskingClient(number, simulated_key(seed, number)) for number in range(count)}
    keys = {number: member.public for number, member in members.items()}
    return {number: replace(member, members=keys) for number, member in members.items()}  # as clients with --members


def answering(recipe: Recipe, secret: bytes) -> tuple[Answer, dict[str, str]]:
    """The function that answers broadcasts in an engine's process, and the digests of what it has loaded."""
    simulation = Simulation(recipe, serves=False, secret=secret)
    return simulation.answer, simulation.identity


def _prepare(recipe: Recipe, shares: ClientShares, secret: bytes) -> Answer:
    """Make the function that answers broadcasts in a worker process."""
    return Simulation(recipe, shares=shares, serves=False, secret=secret).answer
