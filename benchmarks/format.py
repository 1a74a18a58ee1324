"""A test whether a run has learned the form of an answer or its contents.

    python benchmarks/format.py RUN [--examples 64] [--each 16] [--json]

The change of loss of each example, from the base model to the tuned model, is split by the response's tokens: the first
one, the end of text, and all between. Rows are the held-out task and the categories of the clients' own examples, most
of which were not trained on. Values are means over examples ± standard errors; the three parts add up to the whole.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from fedkseed.data.batches import Encoded, collate
from fedkseed.evaluation.statistics import estimate
from fedkseed.models.loss import token_losses
from fedkseed.randomness import Purpose, generator
from fedkseed.recipe.reading import load_recipe
from fedkseed.run.simulation import Simulation
from fedkseed.run.store import Store
from table import Row, new_parser, show


@torch.inference_mode()
def parts(simulation: Simulation, examples: Sequence[Encoded]) -> list[tuple[float, float, float]]:
    """The parts of each example's mean loss by the first token, the tokens between, and the end of text."""
    found = []
    for example in examples:
        batch = collate([example], simulation.setup.tokenizer.pad_token_id)
        losses, counted = token_losses(simulation.setup.model, batch)
        values = (losses[counted] / counted.sum()).tolist()
        found.append((values[0], sum(values[1:-1]), values[-1] if len(values) > 1 else 0.0))
    return found


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--examples", type=int, default=64, help="number of examples of the held-out task")
    parser.add_argument("--each", type=int, default=16, help="number of examples of each category of the clients")
    options = parser.parse_args()
    store = Store(options.run)
    rows: list[Row] = []
    with closing(Simulation(load_recipe(store.recipe))) as simulation:
        groups = {"held out": list(simulation.shares.held_out[: options.examples])}
        everyone = [example for share in simulation.shares.clients for example in share]
        for i in generator(simulation.recipe.seed, Purpose.EVALUATION, 1).permutation(len(everyone)):
            some = groups.setdefault(everyone[i].example.category, [])
            if len(some) < options.each:
                some.append(everyone[i])
        simulation.setup.load(simulation.strategy.server.init())
        before = {name: parts(simulation, some) for name, some in groups.items()}
        simulation.setup.load(store.state(simulation.strategy.server.state))
        for name, some in groups.items():
            pairs = zip(before[name], parts(simulation, some), strict=True)
            changes = [[b - a for a, b in zip(one, other, strict=True)] for one, other in pairs]
            columns = [[sum(change) for change in changes], *map(list, zip(*changes, strict=True))]
            names = ("change of loss", "by the first token", "by those between", "by the end of text")
            cells = {title: estimate(column).text("+") for title, column in zip(names, columns, strict=True)}
            rows.append({"examples": f"{name} ({len(some)})", **cells})
    show("what a run has learned", rows, as_json=options.json)


if __name__ == "__main__":
    main()
