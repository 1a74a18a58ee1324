"""The part of the gain that K directions lose: as `fedkseed tune` predicts it, beside recorded runs with several K.

    python benchmarks/pool.py results/figure-7/stories --model FOLDER [--json]

A folder holds runs.json and rounds.csv, as `fedkseed reproduce` writes them, of runs that differ by K and by seed. tr H
is measured at w₀ on each seed's clients, by further seeds of batches and directions. The gain is the fall of the
held-out loss; lost is what K falls short of the largest K, as a part of that one's gain, paired by seed: mean and
standard error. Predicted is the same by `Tuning.lost`. The title has the K that `fedkseed tune` would call enough.
"""

import json
from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from fedkseed.evaluation.statistics import estimate
from fedkseed.paper.experiments import Planned
from fedkseed.paper.run_records import RUNS_FILE, read_records
from fedkseed.planning.tune import Tuning, weighted_steps
from fedkseed.run.eps_ladder import SAMPLES, measure
from fedkseed.run.simulation import Simulation
from table import Row, new_parser, show


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=16, help="of tr H for each seed, in fours")
    options = parser.parse_args()
    trees = {tree["run"]: tree["recipe"] for tree in json.loads((options.folder / RUNS_FILE).read_text())["runs"]}
    gains, tunings = defaultdict[int, dict[int, float]](dict), dict[int, list[Tuning]]()
    for outcome in read_records(options.folder):
        planned = Planned(outcome.axes, outcome.seed, trees[outcome.directory.name])
        recipe = planned.recipe({"model": str(options.model)})
        gains[recipe.directions.size][outcome.seed] = outcome.loss[0] - outcome.loss[outcome.rounds]
        if outcome.seed not in tunings:
            tunings[outcome.seed] = []
            for more in range(options.samples // SAMPLES):
                with closing(Simulation(recipe.model_copy(update={"seed": recipe.seed + 100 * more}))) as simulation:
                    found = Tuning(recipe, simulation.cohort(0), recipe.training.steps, scalars=measure(simulation))
                    tunings[outcome.seed].append(replace(found, weighted_steps=weighted_steps(simulation)))
    most, every = max(gains), [tuning for found in tunings.values() for tuning in found]
    measured = [tuning.scalars for tuning in every if tuning.scalars is not None]
    curvature = estimate([scalars.curvature.mean for scalars in measured])
    tuning = replace(every[0], scalars=replace(measured[0], curvature=curvature))
    whole = tuning.lost(most)
    if whole is None:
        parser.error(f"tr H = {curvature.text()} is within its error of 0")
    rows: list[Row] = []
    for size, by_seed in sorted(gains.items()):
        lost = estimate([1 - gain / gains[most][seed] for seed, gain in by_seed.items()])
        predicted = 1 - (1 - (tuning.lost(size) or 0.0)) / (1 - whole)
        draws = tuning.weighted_steps * len(tuning.cohort) / size
        rows.append({
            "K": size, "draws of each": draws, "gain (nats)": fmean(by_seed.values()),
            "lost": "" if size == most else lost.text(digits=2), "predicted": f"{predicted:.2f}",
        })  # fmt: skip
    bends = f"tr H = {curvature.mean:,.0f} ± {curvature.error:,.0f}"
    show(
        f"lr = {tuning.recipe_lr:g}, W = {tuning.weighted_steps:g}, {bends}; enough: {tuning.enough}",
        rows,
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
