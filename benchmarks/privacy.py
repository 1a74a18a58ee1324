"""Attacks on what a round gives away: an audit of its differential privacy, and a test of membership.

    python benchmarks/privacy.py audit [--canaries 1000] [--rounds 4000] [--epsilons 1 2 4 8] [--json]
    python benchmarks/privacy.py members [--model FOLDER] [--only scalars "batch 2" "batch 8" shared dense …] [--json]

`audit` sends canaries, clients whose change is a random direction of ten times the norm to which changes are cut. Each
takes part or sends zeros by the toss of a fair coin, and whoever reads the noisy sum guesses the coins, knowing the
changes of the ten other clients. From the right guesses follows what epsilon is at least, at a confidence of 95 %.
`one round` has many orthogonal canaries at once (K = 4,096); the bound holds for any algorithm, and is far from tight.
`many rounds` have one canary (K = 64); the bound is for noise with the trade-off of a Gaussian, as ours claims to be,
and close. Sums come from `NoisedAggregator`, as it is, and with either of two faults that the audit must find.

`members` has a server with texts of which it wants to know whether they were in a client's batch. It computes what each
text would have added and compares that with what it received, by a likelihood ratio. Members were in the batch of the
step that they are compared with; outsiders belong to clients that take no part. A text's scalars are computed at the
weights that the client had before the step. From its scalars a server knows them, from a sum it does not: with a sum
its test is at best as good as here. AUC: 0.5 is a guess, 1 always right; ± is its standard error. Sums are of ten
clients (--clients), with norm the median norm of their changes, and epsilon that of one round, at delta = 1e-5.

Sources: Steinke, Nasr and Jagielski, 2023, https://arxiv.org/abs/2305.08846; Nasr et al., 2023,
https://arxiv.org/abs/2302.07956; Hanley and McNeil, 1982, https://doi.org/10.1148/radiology.143.1.7063747
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import beta, binom, norm, rankdata

from fedkseed import LocalWork, Pool, Run, decode
from fedkseed.data.batches import Encoded, collate
from fedkseed.models.loss import graph_loss, graph_losses
from fedkseed.paper.tiny_model import make
from fedkseed.recipe.reading import parse
from fedkseed.round import Round
from fedkseed.run.simulation import Simulation
from fedkseed.secure.accounting import epsilon_of, noise_for
from fedkseed.secure.member import MaskingClient
from fedkseed.strategies.kseed import KSeed, State
from fedkseed.strategies.masked import Masks, masked, simulated_key
from fedkseed.strategies.noised import noised
from fedkseed.strategies.uploads import change_of, change_of_probes, drawn_directions
from fedkseed.strategy import Masking, Noise, Settings, Strategy
from fedkseed.wire.records import Change, Secured, Upload
from table import Row, commit, machine, markdown

Floats = NDArray[np.float64]
DELTA = 1e-5
ERROR = 0.05  # one minus the confidence of a lower bound
SECRET = bytes(range(32))  # of the noise: the same run prints the same table

HONEST = 10
OVER = 10.0  # norm of a canary, over the norm to which changes are cut
GUESSES = (0.025, 0.05, 0.1, 0.2, 0.4)  # shares of the canaries guessed to be in, and out; the best counts


def audit(options: argparse.Namespace) -> Iterator[Row]:
    """The rows of the audit's table."""
    for epsilon in options.epsilons:
        for fault in ("as built", "noise halved", "no clipping"):
            one = one_round(with_fault(private(epsilon, options.size), fault), options.canaries)
            many = many_rounds(with_fault(private(epsilon, options.small), fault), options.rounds)
            row: Row = {"stated epsilon": f"{epsilon:g}", "code": fault, "at least, by one round": round(one, 2)}
            found = "yes" if max(one, many) > epsilon else "no"
            yield row | {"at least, by many rounds": round(many, 2), "found": found}


def private(epsilon: float, size: int) -> Strategy[State]:
    """FedKSeed with the noise of a unit that takes part once."""
    run = Run(Pool(0, size, "hadamard"), bytes(32))
    work = LocalWork(rounds=1, lr=1.0)
    noise = Noise(noise_for(epsilon, DELTA, 1), norm=1.0, secret=SECRET)
    return noised(KSeed.make(Settings(run, work, wire="exact")), noise)


def with_fault(strategy: Strategy[State], fault: str) -> Strategy[State]:
    """The same algorithm with a fault, or without."""
    aggregator: Any = strategy.aggregator
    noise = aggregator.noise
    if fault == "noise halved":
        noise = replace(noise, multiplier=noise.multiplier / 2)
    elif fault == "no clipping":  # noise of the same size; what is cut is beyond a canary's norm
        noise = replace(noise, norm=OVER * noise.norm, multiplier=noise.multiplier / OVER)
    return replace(strategy, aggregator=replace(aggregator, noise=noise))


def released(strategy: Strategy[State], state: State, changes: Floats) -> tuple[State, Floats]:
    """The state after a round with these changes of c, and what it says of their sum."""
    none = np.empty(0, np.uint32)
    uploads = [
        Change(strategy.run, state.round, client, 1, 1.0, 0, values.astype(np.float32), none, "exact")
        for client, values in enumerate(changes)
    ]
    after = strategy.aggregate(state, uploads)
    return after, (after.coefficients - state.coefficients) * len(uploads)


def others(size: int, rng: np.random.Generator) -> Floats:
    """The changes of honest clients, each of half the norm."""
    found = rng.normal(size=(HONEST, size))
    return found / np.linalg.norm(found, axis=1, keepdims=True) / 2


def one_round(strategy: Strategy[State], canaries: int) -> float:
    """A lower bound on ε from one round with many canaries."""
    size, rng = strategy.run.pool.size, np.random.default_rng(1)
    along = np.linalg.qr(rng.normal(size=(size, canaries)))[0].T  # (canaries, K), orthonormal
    there, honest = rng.integers(0, 2, canaries).astype(bool), others(size, rng)
    _, total = released(strategy, strategy.server.init(), np.concatenate([OVER * there[:, None] * along, honest]))
    order = np.argsort(along @ (total - honest.sum(0)))
    counts = [round(share * canaries) for share in GUESSES]
    right = [int(there[order[-k:]].sum() + (~there[order[:k]]).sum()) for k in counts]
    error = ERROR / len(counts)  # of each, so that the best of them counts
    return max(bound(canaries, 2 * k, v, DELTA, error) for k, v in zip(counts, right, strict=True))


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """The probability of at least `right` right guesses, at most, if the algorithm is (ε, δ)-private.

    With δ = 0 right guesses are at most those of randomised response, B ~ Binomial(r, e^ε / (1 + e^ε)); δ adds
    2 δ m max_i P[v > B ≥ v − i] / i (Steinke et al., Theorem 5.2, and the code of their Appendix D).
    """
    share = 1 / (1 + math.exp(-epsilon))
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, share))  # P[v > B ≥ v − i] of i = 1 … v
    alpha = float(np.max(below / np.arange(1, right + 1), initial=0.0))
    return min(1.0, float(binom.sf(right - 1, guesses, share)) + 2 * delta * canaries * alpha)


def bound(canaries: int, guesses: int, right: int, delta: float, error: float) -> float:
    """The largest ε that this number of right guesses refutes, at this probability of an error."""
    low, high = 0.0, 1.0
    while p_value(canaries, guesses, right, high, delta) < error:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(canaries, guesses, right, middle, delta) < error else (low, middle)
    return low


def many_rounds(strategy: Strategy[State], rounds: int) -> float:
    """A lower bound on ε from many rounds with one canary, for noise with the trade-off of a Gaussian."""
    size, rng = strategy.run.pool.size, np.random.default_rng(2)
    state, scores, coins = strategy.server.init(), np.empty(rounds), rng.integers(0, 2, rounds).astype(bool)
    for done, there in enumerate(coins):
        along, honest = rng.normal(size=size), others(size, rng)
        along /= np.linalg.norm(along)
        state, total = released(strategy, state, np.concatenate([OVER * there * along[None], honest]))
        scores[done] = along @ (total - honest.sum(0))
    wrong = [at_most((scores[~coins] > 0.5).sum(), (~coins).sum()), at_most((scores[coins] <= 0.5).sum(), coins.sum())]
    mu = -float(norm.ppf(wrong).sum())  # of N(0, 1) against N(μ, 1), whose errors are Φ(−t) and Φ(t − μ)
    return epsilon_of(1 / mu, 1, DELTA) if mu > 0 else 0.0


def at_most(times: int, of: int) -> float:
    """Clopper and Pearson's upper bound on a probability, at half the error."""
    return 1.0 if times == of else float(beta.ppf(1 - ERROR / 2, times + 1, of - times))


EPSILONS = (8.0, 2.0)
DENSE = (5, 4)  # steps and batch of a client that sends K numbers
BATCHES = {f"batch {size}": size for size in (2, 4, 8)}
GROUPS = ("scalars", *BATCHES, "shared", "dense")


@dataclass(frozen=True)
class Compared:
    """The texts compared with one step of one client: members first."""

    client: int
    step: int
    direction: int
    own: Floats  # ρ of each text along the direction
    tokens: Floats  # of each text's response
    members: int
    batch: int

    def evidence(self, seen: float, draws: int, noise: float) -> Floats:
        """log P(seen | text in the batch) / P(seen | not), of each text, for normal numbers.

        Args:
            seen: Σ ρ along the direction, of all steps that were along it.
            draws: number of these steps.
            noise: variance of what was added.
        """
        mean, spread = self.own.mean(), self.own.var()
        share = self.tokens / (self.tokens + (self.batch - 1) * self.tokens.mean())
        rounding = (2.0**-8 * (abs(seen) + 0.25)) ** 2 + noise  # of bfloat16, and of losses in float32
        without = draws * spread / self.batch + rounding
        rest = spread * (1 - share) ** 2 / max(1, self.batch - 1)
        within = (draws - 1) * spread / self.batch + rest + rounding
        off, off_within = seen - draws * mean, seen - draws * mean - share * (self.own - mean)
        return (off**2 / without - off_within**2 / within - np.log(within / without)) / 2


def members(options: argparse.Namespace) -> Iterator[Row]:
    """The rows of the table of membership."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(make(Path(folder) / "tiny"))
        for name in options.only:
            steps, batch, clients = options.steps, 1, options.clients
            if name in BATCHES:  # about as many members
                batch = BATCHES[name]
                steps, clients = max(1, steps * clients // (3 * batch)), 3
            if name == "dense":
                steps, batch = DENSE
            with closing(Simulation(recipe(options, model, name, steps, batch, clients))) as simulation:
                find = dense if name == "dense" else scalars
                for seen, (inside, outside) in find(simulation, name, clients).items():
                    found, error = area(inside, outside)
                    counts: Row = {"members": len(inside), "outsiders": len(outside)}
                    yield {"what the server has": seen, **counts, "AUC": f"{found:.3f}", "±": f"{error:.4f}"}


def recipe(options: argparse.Namespace, model: str, name: str, steps: int, batch: int, clients: int) -> Any:
    """The recipe of a round: half of the clients take part, the others have the outsiders."""
    lr = options.dense_lr if name == "dense" else options.lr
    algorithm = "fedkseed-backprop" if name == "dense" else "fedkseed"
    training = {"rounds": 1, "steps": steps, "batch_size": batch, "eps": 1e-3, "lr": lr}
    return parse(
        {
            "model": {"name": model, "device": "cpu", "mode": "materialized"},
            "data": {"source": options.data, "max_tokens": options.tokens, "held_out": options.held_out},
            "clients": {"count": 2 * clients, "cohort": clients, "split": "even", "min_examples": 1, "threads": 1},
            "directions": {"size": options.size, "shared": name == "shared"},
            "training": {"algorithm": algorithm, **training},
            "evaluation": {"examples": 2, "generated": 0},
        }
        | ({"derivatives": {"lr": lr, "optimizer": "sgd"}} if name == "dense" else {})
    )


Found = dict[str, tuple[Floats, Floats]]  # what the server has -> evidence about members, and about outsiders


def round_of(simulation: Simulation, clients: int) -> list[Any]:
    """The uploads of a round, by real messages."""
    strategy, cohort = simulation.strategy, range(clients)
    replies = dict(simulation.transport(Round.begin(strategy, strategy.server.init(), cohort).whole))
    return [decode(replies[client], Upload, Change) for client in cohort]


def outsiders(simulation: Simulation, clients: int) -> Iterator[Encoded]:
    """The rows of clients that take no part, again and again."""
    return cycle([row for share in simulation.shares.clients[clients:] for row in share])


def scalars(simulation: Simulation, name: str, clients: int) -> Found:
    """Evidence from scalars: those of one client, or the sum of all, with masks or noise or both."""
    strategy, uploads = simulation.strategy, round_of(simulation, clients)
    settings, work, strangers = strategy.settings, strategy.settings.local, outsiders(simulation, clients)
    compared: list[Compared] = []
    for upload in uploads:
        simulation.setup.load(strategy.server.init())
        drawn = drawn_directions(settings, 0, upload.client, work.steps, None)
        for step, batch in enumerate(islice(simulation.client(upload.client).batches(0), work.steps)):
            inside = list(batch.examples)
            rows = inside + list(islice(strangers, max(4, 2 * len(inside))))
            direction = int(drawn[step])
            own = slopes_along(simulation, direction, rows, work.eps)
            tokens = np.array([len(row.tokens) - row.prompt for row in rows], np.float64)
            compared.append(Compared(upload.client, step, direction, own, tokens, len(inside), len(inside)))
            change = -work.learning_rate(0) * float(np.nan_to_num(upload.scalars[step]))
            simulation.setup.weights.move(direction, change)
    title = f"scalars of one client, batch {compared[0].batch}" + (", shared directions" if name == "shared" else "")
    found = {title: separate(compared, lambda one: (float(uploads[one.client].scalars[one.step]), 1, 0.0))}
    if name in BATCHES:
        return found
    draws = np.bincount([one.direction for one in compared], minlength=settings.run.pool.size)
    for title, total, noise in sums(simulation, strategy, uploads):
        in_scalars = -total / work.learning_rate(0)

        def seen(one: Compared, numbers: Floats = in_scalars, noise: float = noise) -> tuple[float, int, float]:
            return numbers[one.direction], int(draws[one.direction]), noise / work.learning_rate(0) ** 2

        directions = "shared directions" if name == "shared" else "own directions"
        found[f"sum of {clients} clients' scalars, {directions}, {title}"] = separate(compared, seen)
    return found


def separate(
    compared: Sequence[Compared], seen: Callable[[Compared], tuple[float, int, float]]
) -> tuple[Floats, Floats]:
    """Evidence about the members and about the outsiders of all steps."""
    found = [(one.members, one.evidence(*seen(one))) for one in compared]
    return np.concatenate([some[:n] for n, some in found]), np.concatenate([some[n:] for n, some in found])


def slopes_along(simulation: Simulation, direction: int, rows: Sequence[Encoded], eps: float) -> Floats:
    """ρ of each row along a direction, at the weights as they are."""
    model, batch = simulation.setup.model, collate(rows, simulation.setup.tokenizer.pad_token_id)
    weights, both = simulation.setup.weights, []
    for sign in (1, -1):
        weights.shift(direction, sign * eps)
        with torch.inference_mode():
            both.append(graph_losses(model, batch).double().numpy())
    return (both[0] - both[1]) / (2 * eps)


def dense(simulation: Simulation, name: str, clients: int) -> Found:
    """Evidence from K numbers: how far they lie, of all texts' mean, in the direction of one text."""
    strategy, uploads, setup = simulation.strategy, round_of(simulation, clients), simulation.setup
    work, strangers = strategy.settings.derivatives, outsiders(simulation, clients)
    assert work is not None
    setup.load(strategy.server.init())
    weights: Any = setup.weights

    def slope(row: Encoded) -> Floats:
        batch = collate([row], setup.tokenizer.pad_token_id)
        return weights.gradient(lambda: graph_loss(setup.model, batch))[1].astype(np.float64)

    inside, outside = [], []  # of each client
    for upload in uploads:
        batches = islice(simulation.client(upload.client).batches(0), work.steps)
        rows = list(dict.fromkeys(row for batch in batches for row in batch.examples))  # some come in several steps
        inside.append(np.array([slope(row) for row in rows]))
        outside.append(np.array([slope(row) for row in islice(strangers, len(rows))]))
    mean = np.concatenate(inside + outside).mean(0)

    def evidence(change: Floats, found: Floats, rows: int, holders: int) -> Floats:
        gradient = -change / work.learning_rate(0) / work.steps / holders
        own = found - mean
        return own @ (gradient - mean) - np.square(own).sum(1) / (2 * rows * holders)

    changes = [upload.values.astype(np.float64) for upload in uploads]  # what the server has of each client
    every: list[tuple[str, list[Floats], int]] = [("K numbers of one client, 5 steps of 4", changes, 1)]
    for title, total, _ in sums(simulation, strategy, uploads):
        every.append((f"sum of {clients} clients' K numbers, {title}", [total] * clients, clients))
    found: Found = {}
    for title, seen, holders in every:
        texts = list(zip(seen, inside, outside, strict=True))
        members = [evidence(change, own, len(own), holders) for change, own, _ in texts]
        foreign = [evidence(change, own, len(mine), holders) for change, mine, own in texts]
        found[title] = np.concatenate(members), np.concatenate(foreign)
    return found


def sums(
    simulation: Simulation, strategy: Strategy[State], uploads: Sequence[Any]
) -> Iterator[tuple[str, Floats, float]]:
    """The sum of the changes of c as a server learns it: with masks, noise or both; and the variance of its error."""
    before, count = strategy.server.init(), len(uploads)
    settings = strategy.settings
    apart = settings.shared and isinstance(uploads[0], Upload)
    changes = [(change_of_probes if apart else change_of)(settings, upload) for upload in uploads]
    limit = float(np.median([np.linalg.norm(change) for change in changes]))
    keys = {client: MaskingClient(client, simulated_key(0, client)).public for client in range(count)}
    masking = Masking(limit, keys=keys)
    for epsilon in (None, *EPSILONS):
        noise = None if epsilon is None else Noise(noise_for(epsilon, DELTA, 1), limit, secret=SECRET)
        secure = masked(KSeed.make(replace(settings, secure=masking, noise=noise)))
        total = unmasked(secure, changes)
        masks: Masks = cast("Any", secure.aggregator).masks
        variance = count * masks.grid.step**2 * (masks.variance(count, listed=True) + 1 / 6)  # of noise, and rounding
        yield "masked" + ("" if epsilon is None else f", epsilon {epsilon:g}"), total, variance
        if noise is not None:
            noisy = noised(strategy, noise)
            aggregator: Any = noisy.aggregator
            grid = aggregator.grid(strategy.run.pool.size)
            after = noisy.aggregate(before, uploads)
            variance = (aggregator.variance(grid) + count / 6) * grid.step**2
            total = (after.coefficients - before.coefficients) * count
            yield f"noise by the server, epsilon {epsilon:g}", total, variance


def unmasked(secure: Strategy[State], changes: Sequence[Floats]) -> Floats:
    """The sum of a round with masks, by both of its legs."""
    members = [MaskingClient(client, simulated_key(0, client)) for client in range(len(changes))]
    before, count, aggregator = secure.server.init(), len(changes), cast("Any", secure.aggregator)
    message = decode(Round.begin(secure, before, range(count)).whole[0], Secured)
    masks: Masks = aggregator.masks
    roster, accumulator = masks.roster(message, b""), aggregator.start(before, dict.fromkeys(range(count), message))
    for client, change in enumerate(changes):
        codes = masks.grid.coded(change, 0, client)
        if variance := masks.variance(count, listed=True):
            codes = codes + members[client].noise(roster, variance, codes)
        upload = members[client].masked(secure.run, roster, codes, masks.width(count))
        aggregator.add_(accumulator, upload)
    for client, request in aggregator.requests(accumulator).items():
        aggregator.add_shares_(accumulator, members[client].shares(request, roster))
    after = aggregator.finish(accumulator)
    return (after.coefficients - before.coefficients) * count


def area(inside: Floats, outside: Floats) -> tuple[float, float]:
    """The area under the curve, ties counted half, and its standard error (Hanley and McNeil, 1982)."""
    n, m = len(inside), len(outside)
    ranks = rankdata(np.concatenate([inside, outside]))
    found = float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))
    one, two = found / (2 - found), 2 * found**2 / (1 + found)
    variance = found * (1 - found) + (n - 1) * (one - found**2) + (m - 1) * (two - found**2)
    return found, math.sqrt(max(variance, 0.0) / (n * m))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, rows in (("audit", audit), ("members", members)):
        command = commands.add_parser(name)
        command.set_defaults(rows=rows)
        command.add_argument("--json", action="store_true")
        if name == "audit":
            command.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 2.0, 4.0, 8.0])
            command.add_argument("--canaries", type=int, default=1000)
            command.add_argument("--rounds", type=int, default=4000)
            command.add_argument("--size", type=int, default=4096, help="K, in the one round with many canaries")
            command.add_argument("--small", type=int, default=64, help="K, in the many rounds with one")
        else:
            command.add_argument("--model", help="a model's folder; default: one of 0.14 million weights, made here")
            command.add_argument("--data", default="dolly-sample")
            command.add_argument("--held-out", default="brainstorming", help="a category that is left out")
            command.add_argument("--only", nargs="+", default=GROUPS, choices=GROUPS)
            command.add_argument("--clients", type=int, default=10, help="of a round")
            command.add_argument("--steps", type=int, default=200, help="of each client, with batches of one")
            command.add_argument("--tokens", type=int, default=160, help="most of a text; longer ones are left out")
            command.add_argument("--size", type=int, default=4096, help="K")
            command.add_argument("--lr", type=float, default=1e-5, help="of clients that send scalars")
            command.add_argument("--dense-lr", type=float, default=1e-7, help="of clients that send K numbers")
    options = parser.parse_args()
    found, about = list(options.rows(options)), {**machine(), "commit": commit()}
    if options.json:
        print(json.dumps({"machine": about, "rows": found}, indent=2))
    else:
        print(markdown(found) + "\n" + ", ".join(f"{name} {value}" for name, value in about.items()))


if __name__ == "__main__":
    main()
