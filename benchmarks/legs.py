"""Informed directions first, others later: the second half of a run along hadamard directions, or along a new basis.

    python benchmarks/legs.py RUN [RUN ...] --rounds 25 --data PUBLIC --lr 1e-5 --output FOLDER [--part 1/2]

Each RUN is a finished run of FedKSeed-Backprop along informed directions, as `fedkseed reproduce long` leaves it in
results/runs. Its model after ROUNDS rounds becomes the base model of two more runs, of as many rounds as were left: one
along hadamard directions at the learning rate `--lr`, one along informed directions of a basis that is made of PUBLIC
at that model, scaled if the run's is, at the run's own rate. A second half counts its rounds from 0, and so has the
cohorts and batches of the first half again, where the whole run goes on to others. The losses of all three after each
evaluation go to FOLDER/legs.csv (legs-I.csv with `--part I/N`), and a table of the changes from the first base model is
printed: mean and standard error over runs, and the differences paired.

Finished runs in FOLDER are not repeated; `--part` as of `fedkseed reproduce`.
"""

import argparse
import csv
import shutil
import tomllib
from pathlib import Path

from fedkseed.evaluation.statistics import Evaluation, estimate, paired_change
from fedkseed.paper.reproduce import parts
from fedkseed.planning.make_basis import basis_of
from fedkseed.recipe.reading import changed as with_changes
from fedkseed.recipe.reading import parse
from fedkseed.recipe.schema import Recipe
from fedkseed.run.progress import Silent
from fedkseed.run.start_and_resume import resume, start
from fedkseed.run.store import Store
from fedkseed.tuned.export import export
from fedkseed.tuned.load import open_tuned
from fedkseed.weights.basis_file import load_basis, save_basis
from table import Row, show

WHOLE, HADAMARD, RENEWED = "informed", "informed, then hadamard", "informed, then informed of a new basis"
EXAMPLES = 64


def losses(run: Path) -> dict[int, float]:
    """The mean held-out loss after each number of rounds at which the run was evaluated."""
    return {done: float(Evaluation.of(found).means["loss"]) for done, found in Store(run).evaluations().items()}


def middle(run: Path, rounds: int, folder: Path) -> Path:
    """The model after some rounds of a run, as a folder of whole weights."""
    copy, model = folder / "first", folder / "middle"
    if not model.exists():
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run, copy)
        store = Store(copy)
        store.rollback(rounds)
        store.change_recipe(changed(store.load_recipe(), f"training.rounds={rounds}").to_toml())
        resume(copy)  # no round is left to it: it writes the adapter
        export(open_tuned(copy), model, "hf")
    return model


def changed(recipe: Recipe, *changes: str) -> Recipe:
    """A recipe with other values, as of `fedkseed run --set`."""
    return parse(with_changes(tomllib.loads(recipe.to_toml()), changes))


def legs(run: Path, rounds: int, data: str, lr: float, folder: Path) -> dict[str, dict[int, float]]:
    """The losses of a run and of its two other second halves: name -> number of rounds -> loss."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe, model, basis = Store(run).load_recipe(), middle(run, rounds, folder), folder / "middle.safetensors"
    left = f"training.rounds={recipe.training.rounds - rounds}"
    half = [f"model.name={model}", left, "directions.basis_digest="]  # the same clients and steps, from another model
    hadamard = ["directions.family=hadamard", "directions.basis=", f"derivatives.lr={lr}"]
    wanted = {HADAMARD: changed(recipe, *half, *hadamard)}
    if not basis.exists():
        scaled = bool(load_basis(Path(str(recipe.directions.basis))).about.get("scaled"))
        save_basis(basis_of(wanted[HADAMARD], data, EXAMPLES, None, Silent(), scaled), basis)
    wanted[RENEWED] = changed(recipe, *half, f"directions.basis={basis}")
    found = {WHOLE: losses(run)}
    first = {done: loss for done, loss in found[WHOLE].items() if done <= rounds}
    for name, other in wanted.items():
        place = folder / name.replace(", ", "-").replace(" ", "-")
        if not (place / "recipe.toml").exists():
            start(other, place)
        elif len(Store(place).reports()) < other.training.rounds:
            resume(place)
        found[name] = first | {rounds + done: loss for done, loss in losses(place).items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--data", required=True, metavar="PUBLIC")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--part", type=parts, default=(1, 1), metavar="I/N")
    options = parser.parse_args()
    number, count = options.part
    mine = options.runs[number - 1 :: count]
    found = [legs(run, options.rounds, options.data, options.lr, options.output / run.name) for run in mine]
    with (options.output / f"legs{'' if count == 1 else f'-{number}'}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "method", "rounds", "loss"])
        for run, one in zip(mine, found, strict=True):
            for name, along in one.items():
                writer.writerows((run.name, name, done, loss) for done, loss in along.items())
    show("a second half along other directions", [row(name, found) for name in (WHOLE, HADAMARD, RENEWED)])


def row(name: str, found: list[dict[str, dict[int, float]]]) -> Row:
    """The changes of the held-out loss from the base model, at the end and beside the whole informed runs."""
    ends, whole = ([[*one[n].values()][-1] - one[n][0] for one in found] for n in (name, WHOLE))
    beside = "–" if name == WHOLE else paired_change(whole, ends).text("+", 3)
    change = estimate(ends).text("+", 3)
    return {"directions": name, "runs": len(found), "change of the loss": change, "minus informed": beside}


if __name__ == "__main__":
    main()
