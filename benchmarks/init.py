"""Whole runs with the rate that `fedkseed init` measures, beside runs with other rates.

    python benchmarks/init.py MODEL DATA... [--column instruction=question ...] [--set model.last_layers=6 ...]
        [--rates 6e-5 ...] [--search [--seconds 400]] [--json]

For each file or folder of DATA a recipe is made as `fedkseed init` makes it, but for --set; its rate is measured, and
all of its rounds are done with that rate and with each of --rates. `search` are the seconds from the beginning to the
rate, the processor's of them in the next column. The loss is that of the held-out rows, before and after the run; of
labels the choice accuracy stands behind it. "worst" is the highest loss after any round.
"""

import time

from fedkseed import Simulation
from fedkseed.planning.init import SECONDS, first_recipe, measured, with_measured
from fedkseed.recipe.reading import changed, parse, tables
from fedkseed.run.progress import Silent
from table import Row, commit, new_parser, show


def scores(simulation: Simulation, state: object) -> tuple[float, float | None]:
    """The held-out loss, and the choice accuracy where there are labels."""
    simulation.setup.load(state)
    means = simulation.setup.score(simulation.shares.held_out, "", False, simulation.metrics).means
    return means["loss"], means.get("choice")


def run(simulation: Simulation) -> tuple[str, str, float]:
    """Do all rounds; the scores before and after, and the highest loss after a round."""
    state, each = simulation.strategy.server.init(), []
    for _ in range(simulation.recipe.training.rounds):
        each.append(scores(simulation, state))
        state, _ = simulation.round(state)
    each.append(scores(simulation, state))
    texts = [f"{loss:.3f}" + (f", {choice:.2f}" if choice is not None else "") for loss, choice in (each[0], each[-1])]
    return texts[0], texts[1], max(loss for loss, _ in each[1:])


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("data", nargs="+")
    parser.add_argument("--column", action="append", default=[], metavar="FIELD=NAME")
    parser.add_argument("--algorithm", default="fedkseed-backprop")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    parser.add_argument("--rates", nargs="*", type=float, default=[6e-5])
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    given = parser.parse_args()
    columns = dict(text.split("=", 1) for text in given.column)
    rows: list[Row] = []
    for source in given.data:
        begin, cpu = time.monotonic(), time.process_time()
        asked = {"task": None, "algorithm": given.algorithm, "clients": None}
        first = first_recipe(source, columns, given.model, **asked)
        recipe = parse(changed(tables(first.text.encode()), given.changes))
        costs, tuning = measured(first, recipe, begin + given.seconds - SECONDS, Silent())
        text, _ = with_measured(first.text, tuning)
        seconds, used = time.monotonic() - begin, time.process_time() - cpu
        measured_row: Row = {"search": seconds, "its CPU": used, "tried": len(tuning.trials)}
        others: Row = dict.fromkeys(measured_row, "")
        if given.search:
            gain, step = tuning.best.change(tuning.before).text("+", 2), costs.step_seconds if costs else ""
            rows.append({"data": source, "lr": f"{tuning.best.lr:g}", **measured_row, "gain": gain, "step": step})
            continue
        for rate in (None, *given.rates):
            table = "derivatives" if "[derivatives]" in text else "training"
            changes = [*given.changes, *([] if rate is None else [f"{table}.lr={rate}"])]
            simulation = Simulation(parse(changed(tables(text.encode()), changes)))
            of_data: Row = {"data": source, "lr": f"{getattr(simulation.recipe, table).lr:g}"}
            of_data |= measured_row if rate is None else others
            before, after, worst = run(simulation)
            rows.append(of_data | {"before": before, "after": after, "worst": worst})
    show(f"{given.algorithm}, {given.model}", rows, as_json=given.json, notes={"commit": commit()})


if __name__ == "__main__":
    main()
