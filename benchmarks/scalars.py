"""The error of a scalar at a perturbation scale ε: its distance from the slope of the loss, in float64.

    python benchmarks/scalars.py RECIPE [--pairs 16] [--eps 1e-4 5e-4 1e-3 1e-2] [--reference 1e-5] [--json]

RECIPE has the model, the data and the directions; a pair is a batch of clients' examples and a direction. Against
ρ = [L(w + ε z) − L(w − ε z)] / 2ε at the reference, all in float64, stand the scalars of two points and of one, [L(w +
ε z) − L(w)] / ε, at each ε: the root mean square of the distance over that of the reference, which is the error by
curvature alone, the correlation, and the number of wrong signs. `float32` is the error of a client's own scalars of
two points, whose losses are rounded. (Some layers, as the norms of Llama, work in float32 always.)
"""

import copy
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedkseed.data.batches import IGNORED, Batch, collate
from fedkseed.directions.operations import materialize
from fedkseed.directions.pool import Pool
from fedkseed.models.loss import batch_loss, response_logits
from fedkseed.randomness import Purpose, generator
from fedkseed.recipe.reading import load_recipe
from fedkseed.run.simulation import Simulation
from fedkseed.weights.layout import Layout
from table import Row, new_parser, show


class Line:
    """A model in float64 that goes along a direction and back."""

    def __init__(self, model: torch.nn.Module, tuned: Sequence[str]) -> None:
        self.model = copy.deepcopy(model).double()
        self.tensors = {entry.number: entry.tensor for entry in Layout(self.model, tuned).tuned}
        self.base = {number: tensor.detach().clone() for number, tensor in self.tensors.items()}
        self.z: dict[int, Tensor] = {}

    @torch.no_grad()
    def turn(self, pool: Pool, direction: int) -> None:
        """Choose the direction z."""
        c = np.zeros(pool.size, np.float32)
        c[direction] = 1
        for number, base in self.base.items():
            z = torch.zeros(base.shape)
            materialize(z, pool, c, z, tensor=number)
            self.z[number] = z.double()

    @torch.no_grad()
    def loss(self, batch: Batch, step: float) -> float:
        """The loss at w₀ + step · z: `models.loss.graph_loss` without its rounding to float32."""
        for number, tensor in self.tensors.items():
            tensor.copy_(self.base[number] + step * self.z[number])
        predictions, labels = response_logits(self.model, batch)
        return float(cross_entropy(predictions.flatten(0, 1), labels.flatten(), ignore_index=IGNORED))


def compared(found: NDArray[np.float64], reference: NDArray[np.float64]) -> tuple[float, float, int]:
    """Relative error, correlation and number of wrong signs."""
    error = np.sqrt(np.mean((found - reference) ** 2) / np.mean(reference**2))
    return float(error), float(np.corrcoef(found, reference)[0, 1]), int(np.sum(found * reference < 0))


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--eps", type=float, nargs="+", default=[1e-4, 5e-4, 1e-3, 1e-2])
    parser.add_argument("--reference", type=float, default=1e-5)
    options = parser.parse_args()
    recipe = load_recipe(options.recipe, ["model.mode=materialized"])  # weights are parameters of the model then
    with closing(Simulation(recipe)) as simulation:
        setup, size, pool = simulation.setup, recipe.training.batch_size, simulation.strategy.run.pool
        everyone = [example for share in simulation.shares.clients for example in share]
        rng = generator(recipe.seed, Purpose.TUNE, 2)
        if len(everyone) < options.pairs * size:
            parser.error(f"{options.pairs} batches of {size} take more than the clients' {len(everyone)} examples")
        order, directions = rng.permutation(len(everyone)), rng.integers(pool.size, size=options.pairs).tolist()
        setup.load(simulation.strategy.server.init())
        line = Line(setup.model, [entry.name for entry in setup.weights.layout.tuned])
        exact, own = [], []
        for pair, direction in enumerate(directions):
            chosen = [everyone[i] for i in order[pair * size : (pair + 1) * size]]
            batch = collate(chosen, setup.tokenizer.pad_token_id)
            line.turn(pool, direction)
            scales = [options.reference, *options.eps]
            here = line.loss(batch, 0)
            exact.append([(line.loss(batch, eps), line.loss(batch, -eps), here) for eps in scales])
            loss = partial(batch_loss, setup.model, batch)
            own.append([setup.weights.both(direction, eps, loss) for eps in options.eps])
    (above, below, middle), scales = np.moveaxis(np.array(exact), 2, 0), np.array([options.reference, *options.eps])
    two, one = (above - below) / (2 * scales), (above - middle) / scales
    client = (np.array(own)[:, :, 0] - np.array(own)[:, :, 1]) / (2 * scales[1:])
    rows: list[Row] = []
    for column, eps in enumerate(options.eps, 1):
        row: Row = {"ε": f"{eps:g}"}
        for points, found in (("two points", two), ("one point", one)):
            error, alike, wrong = compared(found[:, column], two[:, 0])
            row |= {f"{points}: error": error, f"{points}: correlation": alike, f"{points}: wrong signs": wrong}
        rows.append(row | {"two points, float32: error": compared(client[:, column - 1], two[:, 0])[0]})
    show(f"scalars of {options.pairs} pairs beside those at ε = {options.reference:g}", rows, as_json=options.json)


if __name__ == "__main__":
    main()
