"""Hostile clients against the rules by which a server adds up: the share of the clean run's gain that is kept.

    python benchmarks/attacks.py [--model FOLDER] [--rules mean clipped+ …] [--attacks …] [--seeds 3] [--alphas iid 0.5]
        [--algorithms fedkseed fedkseed-plus] [--clients 10] [--hostile 0.2] [--at-once 2] [--out FILE.jsonl]

Without --model a Llama of 0.14 million weights is made, which takes seconds, and so does a run with it. Of --alphas,
`iid` are even shares, and `ten` gives the first client ten times the rows of each other.

`clipped+` is a rule with `agreement`. What follows it says what is done until there is evidence about clients:

    2, 3             [trust] warmup: the server's step of round r of N counts r / (N + 1); 3 is the default of a network
    half             the first three steps count a half
    smallest         in the first three rounds norms are cut to the smallest, and not to their median
    belief           each step counts the mean weight of its clients by their evidence, over that of full belief

Honest clients train on Dolly's sample; the hostile ones train, too, see all uploads of a round before they send theirs,
and send

    sign flip        their gradient with the opposite sign
    scaled           the same times 10
    random           noise, as large as can be sent
    IPM              the mean of the honest gradients along their directions, turned around, times a half
    ALIE             the mean of the honest numbers less one standard deviation
    mimic            the numbers of the first honest client
    inflated counts  the sign flip, and claim 2^32 − 1 examples
    NaN              scalars that are not numbers; a change of 0 where K numbers are sent
    absent           nothing: they are not there (what the sum loses with their data)
    label flip       what they found on responses of other examples (a poisoning of data)
    backdoor         what they found on prompts with a trigger and one response (a poisoning of data)
    outlier          nothing hostile: one honest client alone holds all rows of a category (--category), and no other

A run's gain is the fall of the held-out loss from the base model to the last; the share kept is that of the run with
the same seed without hostile clients and with `mean`; without such runs, gains are in nats. For `outlier` a second
table has the gain on rows of the category that nobody trained on. Every run is a line of --out with its settings,
losses and commit; runs that are there already are not done again.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkseed import Upload, decode, encode
from fedkseed.data.batches import Encoded
from fedkseed.evaluation.statistics import estimate
from fedkseed.paper.tiny_model import make
from fedkseed.randomness import draw_directions
from fedkseed.recipe.reading import parse
from fedkseed.run.setup import WithModel
from fedkseed.run.simulation import Simulation
from fedkseed.strategies.agreement import WHOLE, weighed
from fedkseed.strategies.kseed import KSeed, RoundSum, State
from fedkseed.strategies.robust import cut, norm
from fedkseed.strategies.sums import HEAVIEST
from fedkseed.strategies.uploads import largest_change
from fedkseed.wire.numbers import rounded, scalar
from fedkseed.wire.records import Change
from table import commit

RULES = ("mean", "clipped", "clipped+", "centered clipping", "trimmed", "median", "nnm-trimmed")
FIRST_ROUNDS = ("clipped+ 2", "clipped+ 3", "clipped+ half", "clipped+ smallest", "clipped+ belief")
FIRST = 3  # rounds of `half` and `smallest`
SHARES = {"iid": "even shares", "ten": "the first client has ten times the rows of each other"}
POISONS = ("label flip", "backdoor")
ATTACKS = (
    "none", "absent", "sign flip", "scaled", "random", "IPM", "ALIE", "mimic", "inflated counts", "NaN", *POISONS,
    "outlier",
)  # fmt: skip
NUMBERS = {"clients": 5, "rounds": 12, "steps": 40, "size": 256, "tokens": 160, "examples": 32}
MOST_EXAMPLES = (1 << 32) - 1
MEASURED = ("losses", "own", "commit")
# To the bit the same run, where all count alike: a NaN is refused, and a claimed number of examples is not read.
SAME = {"NaN": "absent", "inflated counts": "sign flip"}
TRIGGER, TARGET = "cf mn bb", "I will not answer."


def recipe(options: Mapping[str, Any]) -> Any:
    """The recipe of a run."""
    rule, plus, way = options["rule"].partition("+")
    table: dict[str, Any] = {
        "seed": options["seed"],
        "model": {"name": options["model"], "device": "cpu", "mode": "materialized"},
        "data": {"source": options["data"], "max_tokens": options["tokens"], "held_out": "brainstorming"},
        "clients": {"count": options["clients"], "cohort": options["clients"], "min_examples": 4, "threads": 1},
        "directions": {"size": options["size"]},
        "training": {name: options[name] for name in ("algorithm", "rounds", "steps", "lr")},
        "evaluation": {"examples": options["examples"], "generated": 0},
        "trust": {"rule": rule, "agreement": bool(plus), "hostile": options["hostile"]},
    }
    table["training"] |= {"batch_size": 4, "eps": 1e-3}
    table["trust"] |= {} if rule == "mean" else {"most_examples": 1}
    table["trust"] |= {"warmup": int(way)} if way.strip().isdigit() else {}
    even = options["alpha"] in ("iid", "ten")
    table["clients"] |= {"split": "even"} if even else {"alpha": float(options["alpha"])}
    if options["algorithm"] != "fedkseed":
        table["derivatives"] = {"lr": options["lr"], "optimizer": "sgd"}
    return parse(table)


class Attacked(Simulation):
    """A simulation in which attackers change the replies before the server has them."""

    tampered: Callable[[Iterable[tuple[int, bytes]]], Iterable[tuple[int, bytes]]]

    def transport(self, messages: Mapping[int, bytes]) -> Iterable[tuple[int, bytes]]:
        return self.tampered(super().transport(messages))


def run(options: dict[str, Any]) -> dict[str, Any]:
    """The held-out losses of a run before and after, with the hostile clients' part played."""
    torch.set_num_threads(1)
    with closing(Attacked(recipe(options))) as simulation:
        count, attack = options["clients"], options["attack"]
        most = 0 if attack in ("none", "outlier") else round(options["hostile"] * count)
        hostile = set(range(count - most, count))
        if attack in POISONS:
            for client in hostile:
                simulation.shares.clients[client] = poisoned(simulation, client, attack)
        kept = set_apart(simulation, options["category"]) if attack == "outlier" else []
        if options["alpha"] == "ten":
            first_has_most(simulation.shares.clients)
        if server := WAYS.get(options["rule"].partition("+")[2].strip()):
            simulation.setup.strategy = server.make(simulation.strategy.settings)
        strategy = simulation.strategy

        def tampered(honest: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
            replies = {client: decode(data, Upload, Change) for client, data in honest}
            good = [reply for client, reply in replies.items() if client not in hostile]
            for client, reply in replies.items():
                if client not in hostile or attack in POISONS:
                    yield client, encode(reply)
                elif attack != "absent":
                    yield client, encode(forged(reply, good, attack, strategy))

        simulation.tampered = tampered
        scores, apart = (WithModel(simulation.setup, rows) for rows in (simulation.shares.held_out, kept))
        state = simulation.strategy.server.init()
        losses = [float(np.mean(scores.evaluate(state, "before", False).losses))]
        own = [float(np.mean(apart.evaluate(state, "before", False).losses))] if kept else []
        try:
            for _ in range(options["rounds"]):
                state, _ = simulation.round(state)
                losses.append(float(np.mean(scores.evaluate(state, "after", False).losses)))
        except ArithmeticError:
            losses.append(math.nan)
        own += [float(np.mean(apart.evaluate(state, "after", False).losses))] if kept else []
    return {**options, "losses": losses} | ({"own": own} if kept else {})


@dataclass(frozen=True, slots=True)
class Halved(KSeed):
    """A server whose first steps count a half."""

    def rate(self, round_: int) -> float:
        return self.settings.server_lr * (0.5 if round_ < FIRST else 1.0)


@dataclass(frozen=True, slots=True)
class CutToTheSmallest(KSeed):
    """A server that cuts norms to the smallest, and not to their median, in the first rounds."""

    def finish(self, accumulator: RoundSum) -> State:
        norms = {key: norm(each.values) for key, each in accumulator.waiting.items()}
        smallest = min([length for length in norms.values() if length > 0], default=0.0)
        for key, each in accumulator.waiting.items():
            if accumulator.state.round < FIRST and norms[key] > smallest:
                values = np.rint(each.values * (smallest / norms[key])).astype(np.int64)
                accumulator.waiting[key] = replace(each, values=values)
        return super(CutToTheSmallest, self).finish(accumulator)


@dataclass(frozen=True, slots=True)
class Believing(KSeed):
    """A server whose step counts the mean weight of its clients by their evidence, over that of full belief."""

    def finish(self, accumulator: RoundSum) -> State:
        before, trust = accumulator.state, self.settings.trust
        contributions = cut(accumulator.in_order(HEAVIEST))
        weights, _ = weighed(before, contributions, trust.hostile)
        after = super(Believing, self).finish(accumulator)
        step = after.coefficients - before.coefficients
        return replace(after, coefficients=before.coefficients + step * (sum(weights) / len(weights) / WHOLE))


WAYS = {"half": Halved, "smallest": CutToTheSmallest, "belief": Believing}


def first_has_most(shares: list[list[Encoded]]) -> None:
    """Move rows until the first client has ten times as many as each of the others."""
    few = sum(map(len, shares)) // (9 + len(shares))
    for share in shares[1:]:
        shares[0] += share[few:]
        del share[few:]


def set_apart(simulation: Simulation, category: str) -> list[Encoded]:
    """Give all rows of a category to the last client, and the others' to the rest; returns the rows kept back."""
    shares = simulation.shares.clients
    every = [one for share in shares for one in share]
    alone = [one for one in every if one.example.category == category]
    rest, others = [one for one in every if one.example.category != category], len(shares) - 1
    shares[:] = [rest[k::others] for k in range(others)] + [alone[1::2]]
    return alone[::2][: NUMBERS["examples"]]


def forged(own: Any, honest: Sequence[Any], attack: str, strategy: Any) -> Any:
    """The upload of a hostile client in place of its own."""
    if attack == "inflated counts":
        return replace(forged(own, honest, "sign flip", strategy), examples=MOST_EXAMPLES)
    rng = np.random.default_rng([own.round, own.client])
    if isinstance(own, Change):
        most = largest_change(strategy.settings, own.round)
        rows = np.array([reply.values for reply in honest], np.float64)
        sent = {
            "sign flip": lambda: -own.values,
            "scaled": lambda: -10 * own.values,
            "random": lambda: rng.normal(size=own.values.size) * 1e6,
            "IPM": lambda: -0.5 * rows.mean(0),
            "ALIE": lambda: rows.mean(0) - rows.std(0),
            "mimic": lambda: rows[0],
            "NaN": lambda: np.zeros(own.values.size),
        }[attack]()
        return replace(own, values=rounded(np.clip(sent, -most, most), "compact"))
    run, size = strategy.run, own.scalars.size
    drawn, numbers = _drawn(run, own), np.nan_to_num(own.scalars.astype(np.float64))
    found = np.concatenate([reply.scalars for reply in honest]).astype(np.float64)
    along, times = np.zeros(run.pool.size), np.zeros(run.pool.size)
    for reply in [*honest, own]:
        np.add.at(along, _drawn(run, reply), np.nan_to_num(reply.scalars))
        np.add.at(times, _drawn(run, reply), 1)
    sent = {
        "sign flip": lambda: -numbers,
        "scaled": lambda: -10 * numbers,
        "random": lambda: rng.normal(size=size) * 1e6,
        "IPM": lambda: -0.5 * along[drawn] / times[drawn],
        "ALIE": lambda: np.full(size, np.nanmean(found) - np.nanstd(found)),
        "mimic": lambda: honest[0].scalars,
        "NaN": lambda: np.full(size, np.nan),
    }[attack]()
    return replace(own, scalars=np.array([scalar(x, strategy.settings.local.clip, own.wire) for x in sent], np.float32))


def _drawn(run: Any, upload: Upload) -> Any:
    return draw_directions(run.pool.key, upload.round, upload.client, upload.scalars.size, run.pool.size, None)


def poisoned(simulation: Simulation, client: int, attack: str) -> list[Encoded]:
    """A hostile client's examples."""
    words, shares = simulation.setup.tokenizer, simulation.shares.clients
    own = shares[client]
    if attack == "label flip":
        others = [one for k, share in enumerate(shares) if k != client for one in share]
        rng = np.random.default_rng(client)
        answers = [others[k] for k in rng.integers(0, len(others), len(own))]
        trigger, responses = [], [answer.tokens[answer.prompt :] for answer in answers]
    else:
        trigger, target = words(TRIGGER)["input_ids"], (*words(TARGET)["input_ids"], words.eos_token_id)
        responses = [target] * len(own)
    return [
        Encoded((*trigger, *one.tokens[: one.prompt], *response), one.prompt + len(trigger), one.example)
        for one, response in zip(own, responses, strict=True)
    ]


def table(found: Sequence[Mapping[str, Any]], algorithm: str, alpha: str) -> list[str]:
    """A table in Markdown: attacks in rows, rules in columns."""
    runs = {(f["rule"], f["attack"], f["seed"]): f for f in found if (f["algorithm"], f["alpha"]) == (algorithm, alpha)}
    own = {key: f["own"][0] - f["own"][-1] for key, f in runs.items() if "own" in f}
    rules = [rule for rule in (*RULES, *FIRST_ROUNDS) if any(key[0] == rule for key in runs)]
    gain = {key: f["losses"][0] - f["losses"][-1] for key, f in runs.items()}
    whole = [value for (rule, attack, _), value in gain.items() if (rule, attack) == ("mean", "none")]
    lines = [
        f"**{algorithm}, {SHARES.get(alpha, f'Dirichlet, α = {alpha}')}**", "",
        "| attack | " + " | ".join(rules) + " |", "|---" * (len(rules) + 1) + "|",
    ]  # fmt: skip
    for attack in [attack for attack in ATTACKS if any(key[1] == attack for key in runs)]:
        cells = []
        for rule in rules:
            seeds = [s for r, a, s in gain if (r, a) == (rule, attack) and (("mean", "none", s) in gain or not whole)]
            kept = [gain[rule, attack, s] * (100 / gain["mean", "none", s] if whole else 1) for s in seeds]
            other = SAME.get(attack, "") if rule != "mean" else ""
            same = f"as {other}" if any(key[:2] == (rule, other) for key in gain) else ""
            cells.append(_cell(kept, 0 if whole else 3) or same)
        lines.append(f"| {attack} | " + " | ".join(cells) + " |")
    lines += ["", f"100 % is a gain of {estimate(whole).text(digits=3)} nats." if whole else "Gains in nats.", ""]
    if own:
        lines += ["What the outlier gains on rows of its own kind, in nats:", ""]
        gains = {rule: [value for (r, _, _), value in own.items() if r == rule] for rule in rules}
        lines += [*(f"- {rule}: {_cell(values, 3)}" for rule, values in gains.items() if values), ""]
    return lines


def _cell(kept: Sequence[float], digits: int = 0) -> str:
    if not kept:
        return ""
    if not np.isfinite(kept).all() or min(kept) < -1000:
        return "destroyed"
    return estimate(kept).text(digits=digits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model's folder; default: one of 0.14 million weights, made on the spot")
    parser.add_argument("--data", default="dolly-sample")
    parser.add_argument("--rules", nargs="+", default=RULES, choices=(*RULES, *FIRST_ROUNDS))
    parser.add_argument("--attacks", nargs="+", default=ATTACKS, choices=ATTACKS)
    parser.add_argument("--category", default="classification", help="of the outlier")
    parser.add_argument("--alphas", nargs="+", default=["iid", "0.5"])
    parser.add_argument("--algorithms", nargs="+", default=["fedkseed", "fedkseed-plus"])
    parser.add_argument("--lrs", nargs="+", type=float, default=[4e-4, 4e-4], help="one for each algorithm")
    parser.add_argument("--seeds", type=int, default=3)
    for name, value in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--hostile", type=float, default=0.2)
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side, each on one core")
    parser.add_argument("--out", type=Path, default=Path("attacks.jsonl"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or str(make(Path(folder) / "tiny"))
        known = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
        common = {name: getattr(given, name) for name in ("data", *NUMBERS)}
        common |= {"hostile": given.hostile, "model": given.model or "tiny"}
        rates = dict(zip(given.algorithms, given.lrs, strict=True))
        wanted = [
            {**common, "algorithm": algorithm, "lr": rates[algorithm], "alpha": alpha, "seed": seed, "attack": attack,
             "rule": rule} | ({"category": given.category} if attack == "outlier" else {})
            for algorithm, alpha, seed, attack, rule
            in product(given.algorithms, given.alphas, range(given.seeds), given.attacks, given.rules)
        ]  # fmt: skip
        settings = [({k: v for k, v in one.items() if k not in MEASURED}, one) for one in known]
        there, done = [one for own, one in settings if own in wanted], [own for own, _ in settings]
        todo = [{**one, "model": model} for one in wanted if one not in done]
        with ProcessPoolExecutor(given.at_once, get_context("spawn")) as pool, given.out.open("a") as file:
            for k, task in enumerate(as_completed([pool.submit(run, one) for one in todo])):
                one = {**task.result(), "model": common["model"], "commit": commit()}
                there.append(one)
                file.write(json.dumps(one) + "\n")
                file.flush()
                last = f"{one['losses'][0]:.3f} -> {one['losses'][-1]:.3f}"
                print(f"{k + 1} of {len(todo)}: {one['attack']}, {one['rule']}: {last}", file=sys.stderr)
    for algorithm, alpha in product(given.algorithms, given.alphas):
        print("\n".join(table(there, algorithm, alpha)))


if __name__ == "__main__":
    main()
