"""The share of the clients' gradients that informed directions hold, at the base model and as a run goes on.

    python benchmarks/capture.py RUN [--rounds 0 10 25 50] [--basis FILE ...] [--batches 16] [--json]

RUN is a run of FedKSeed-Backprop along informed directions, of which `--rounds` names models. The share of |g|² is
Σ over tensors |Uᵀ G V|² / |G|², with the columns of U and V of length 1: of the mean gradient of all batches, and the
mean over batches of the share of each batch's own gradient. Random directions would hold K / d. Batches are of the
clients' examples, as many in each as the recipe says. `--basis` names further bases, as one that was made later.
"""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedkseed.data.batches import collate
from fedkseed.directions.factors import Basis, Matrix
from fedkseed.evaluation.statistics import estimate
from fedkseed.models.loss import graph_loss
from fedkseed.randomness import Purpose, generator
from fedkseed.recipe.reading import load_recipe
from fedkseed.run.simulation import Simulation
from fedkseed.run.store import Store
from fedkseed.weights.basis_file import load_basis
from table import Row, new_parser, show


def share(basis: Basis, gradient: Mapping[str, Tensor]) -> float:
    """The share of a gradient's square that the directions of a basis hold."""
    held = 0.0
    for name, factor in basis.factors.items():
        matrix = Matrix.of(gradient[name].shape)
        parts = (torch.from_numpy(part.astype(np.float32)) for part in (factor.left, factor.right))
        left, right = (torch.nn.functional.normalize(part, dim=0) for part in parts)
        held += float((left.T @ gradient[name].view(matrix.rows, matrix.columns) @ right).square().sum())
    return held / sum(float(g.square().sum()) for g in gradient.values())


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, nargs="+", default=[0])
    parser.add_argument("--basis", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument("--batches", type=int, default=16)
    options = parser.parse_args()
    store = Store(options.run)
    rows: list[Row] = []
    materialized = load_recipe(store.recipe, ["model.mode=materialized"])  # so that weights are parameters of the model
    with closing(Simulation(materialized)) as simulation:
        setup, recipe = simulation.setup, simulation.recipe
        if (own := setup.basis) is None:
            parser.error(f"the directions of {options.run} have no basis")
        bases = {"the run's own": own} | {file.stem: load_basis(file) for file in options.basis}
        everyone = [example for one in simulation.shares.clients for example in one]
        order = generator(recipe.seed, Purpose.EVALUATION, 1).permutation(len(everyone))
        size = recipe.training.batch_size
        if len(everyone) < options.batches * size:
            parser.error(f"{options.batches} batches of {size} take more than the clients' {len(everyone)} examples")
        batches = [[everyone[i] for i in order[k * size : (k + 1) * size]] for k in range(options.batches)]
        places = {entry.name: entry.places[0] for entry in setup.weights.layout.tuned}
        for rounds in options.rounds:
            server = simulation.strategy.server
            setup.load(store.state(server.state, rounds) if rounds else server.init())
            found = {name: module._parameters[own_name] for name, (module, own_name) in places.items()}
            tensors = {name: tensor.requires_grad_() for name, tensor in found.items() if tensor is not None}
            mean = {name: torch.zeros(t.shape) for name, t in tensors.items()}
            each = {name: list[float]() for name in bases}
            for batch in batches:
                with torch.enable_grad():
                    graph_loss(setup.model, collate(batch, setup.tokenizer.pad_token_id)).backward()
                gradient = {name: t.grad.float().cpu() for name, t in tensors.items() if t.grad is not None}
                for name, basis in bases.items():
                    each[name].append(share(basis, gradient))
                for name, g in gradient.items():
                    mean[name] += g / len(batches)
                    tensors[name].grad = None
            for name, basis in bases.items():
                row: Row = {"after rounds": rounds, "basis": name, "of the mean gradient": share(basis, mean)}
                of_a_batch = estimate(each[name]).text(digits=3)
                weights = sum(t.numel() for t in tensors.values())
                rows.append(row | {"of a batch's": of_a_batch, "K / d": basis.size / weights})
    show("share of the clients' gradients along informed directions", rows, as_json=options.json)


if __name__ == "__main__":
    main()
