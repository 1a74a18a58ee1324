"""Whether |ρ| ranks directions as the true slope does, on which FedKSeed-Pro's probabilities rest.

    python benchmarks/slopes.py RECIPE [--batches 64] [--directions 64] [--draws 1 4 16] [--figure FILE.svg] [--json]

RECIPE has the model, the data, the directions and ε. The true slope along each of the K directions is the derivative of
the mean loss of half of the batches, by FedKSeed-Backprop's pass back at w₀. Rows are rank correlations (Spearman's)
over directions: of a batch's ρ of two points with that batch's own derivatives, of the first `--directions`; and of the
mean |derivative| over some batches of the other half, as the server has after as many draws of each, with the
|true slope|: mean and standard error over disjoint groups of batches. The last row has the true slopes of both halves.
The figure has the correlations by the draws, with twice their errors, and that of the halves as a line.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from math import isfinite
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedkseed.data.batches import collate
from fedkseed.evaluation.statistics import Estimate
from fedkseed.models.loss import batch_loss, graph_loss
from fedkseed.randomness import Purpose, generator
from fedkseed.recipe.reading import load_recipe
from fedkseed.run.simulation import Simulation
from fedkseed.weights.base import Pooled
from table import Row, new_parser, show


def spearman(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """The correlation of ranks of numbers of which no two are equal."""
    return float(np.corrcoef(one.argsort().argsort(), other.argsort().argsort())[0, 1])


def estimate(found: Sequence[float]) -> Estimate:
    error = float(np.std(found, ddof=1)) / len(found) ** 0.5 if len(found) > 1 else float("inf")
    return Estimate(float(np.mean(found)), error)


def row_of(what: str, found: Estimate) -> Row:
    return {"ranked by": what, "rank correlation": found.text(digits=3)}


def draw(file: Path, by_draws: Mapping[int, Estimate], halves: float) -> None:
    """Draw the correlations with the true slopes, by the draws of each direction, and that of the two halves."""
    from matplotlib import pyplot, ticker  # an extra, needed here alone

    with pyplot.rc_context({"svg.hashsalt": "fedkseed", "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
        bars = [2 * found.error if isfinite(found.error) else 0 for found in by_draws.values()]
        means = [found.mean for found in by_draws.values()]
        axes.errorbar([*by_draws], means, bars, marker="o", capsize=3, label="mean |slope| of as many batches")
        axes.axhline(halves, color="#777777", linestyle="--", label="true slopes of the other half")
        axes.set(xscale="log", xlabel="draws of each direction", ylabel="rank correlation", ylim=(0, 1))
        axes.set_xticks([*by_draws])
        axes.xaxis.set_major_formatter(ticker.ScalarFormatter())
        axes.minorticks_off()
        axes.legend(frameon=False, loc="upper left")
        figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--batches", type=int, default=64)
    parser.add_argument("--directions", type=int, default=64)
    parser.add_argument("--draws", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    recipe = load_recipe(options.recipe)
    with closing(Simulation(recipe)) as simulation:
        setup, size = simulation.setup, recipe.training.batch_size
        everyone = [example for share in simulation.shares.clients for example in share]
        if len(everyone) < options.batches * size:
            parser.error(f"{options.batches} batches of {size} take more than the clients' {len(everyone)} examples")
        order = generator(recipe.seed, Purpose.TUNE, 3).permutation(len(everyone))
        setup.load(simulation.strategy.server.init())
        weights = setup.weights
        if not isinstance(weights, Pooled):
            parser.error(f"{recipe.training.algorithm} has no directions")
        slopes, points = [], []
        for number in range(options.batches):
            chosen = [everyone[i] for i in order[number * size : (number + 1) * size]]
            batch = collate(chosen, setup.tokenizer.pad_token_id)
            slopes.append(weights.gradient(partial(graph_loss, setup.model, batch))[1])
            if number < 4:
                loss, eps = partial(batch_loss, setup.model, batch), recipe.training.eps
                pairs = [weights.both(k, eps, loss) for k in range(min(options.directions, slopes[0].size))]
                points.append(np.array([(above - below) / (2 * eps) for above, below in pairs]))
    half = options.batches // 2
    every = np.array(slopes)
    halves = every[:half].mean(0), every[half:].mean(0)
    own = [spearman(abs(p), abs(slope[: p.size])) for p, slope in zip(points, every, strict=False)]
    by_draws = dict[int, Estimate]()
    for draws in options.draws:
        groups = [abs(every[at : at + draws]).mean(0) for at in range(half, options.batches - draws + 1, draws)]
        by_draws[draws] = estimate([spearman(group, abs(halves[0])) for group in groups])
    other = estimate([spearman(abs(halves[1]), abs(halves[0]))])
    rows = [row_of("|ρ|, of the same batch's slopes", estimate(own))]
    rows += [row_of(f"mean |slope| of {n} batches, of the true slopes", found) for n, found in by_draws.items()]
    rows.append(row_of("true slopes of the other half", other))
    if options.figure is not None:
        draw(options.figure, by_draws, other.mean)
    title = f"{every.shape[1]:,} directions, {options.batches} batches of {size}"
    show(title, rows, as_json=options.json)


if __name__ == "__main__":
    main()
