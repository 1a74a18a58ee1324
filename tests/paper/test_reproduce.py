"""An experiment from its recipe to its table and figure: resumed, shared, and right."""

import csv
import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from fedkseed.cli import app
from fedkseed.data.federated import share_out
from fedkseed.errors import FedKSeedError
from fedkseed.evaluation.statistics import Evaluation
from fedkseed.models.load import load_tokenizer
from fedkseed.paper import reproduce as reproducing
from fedkseed.paper import run_records
from fedkseed.paper.experiments import Experiment, load, merge
from fedkseed.paper.reproduce import Reproduction, make_jobs, parts, redraw, reproduce
from fedkseed.paper.results import MEMORY, ResultTable, RunOutcome, Spread, spread
from fedkseed.paper.run_records import note_memory, read_records
from fedkseed.paper.tables import SETTINGS, Comparison, by_round, scores, speed, summary
from fedkseed.recipe import rules
from fedkseed.recipe.reading import load_recipe
from fedkseed.run.loop import work
from fedkseed.run.setup import WithModel
from fedkseed.run.simulation import Simulation
from fedkseed.run.start_and_resume import start
from fedkseed.run.store import Store
from fedkseed.weights.basis_file import load_basis

from ..commands import refused

FILES = {"table.md", "table.csv", "figure.png", "figure.svg", "about.json"}


@pytest.fixture
def experiment(model_folder, data_file) -> Experiment:
    """Figure 7 with the smallest model, two values of K, two seeds and two rounds of two steps."""
    whole = load("figure-7", "tiny")
    return varied(
        whole,
        {"method": ["fedkseed"], "directions.size": [16, 64]},
        recipe={
            **whole.recipe,
            "data": {"source": str(data_file), "max_tokens": 200, "held_out": "capital"},
            "clients": {"count": 4, "cohort": 2, "min_examples": 1, "alpha": 1.0},
            "training": {"rounds": 2, "steps": 2, "eps": 1e-3},
            "evaluation": {"examples": 4, "generated": 2, "max_new_tokens": 2, "every": [1], "rouge": "rouge"},
        },
        models={"tiny": {"model": {"name": str(model_folder), "device": "cpu"}}},
        datasets={"dolly-uneven": {}},
        seeds=2,
    )


@pytest.fixture
def counted(monkeypatch) -> list[Path]:
    """The directories of runs that were started."""
    started: list[Path] = []

    def counting(recipe, at, *rest, **options):
        started.append(at)
        return start(recipe, at, *rest, **options)

    monkeypatch.setattr(reproducing, "start", counting)
    return started


@pytest.mark.parametrize(
    ("package", "method", "extra"), [("matplotlib", "fedkseed", "plots"), ("peft", "fedit", "peft")]
)
def test_what_is_not_installed_is_said_before_the_first_run(
    experiment, counted, tmp_path, monkeypatch, package, method, extra
):
    for module in (reproducing, rules):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == package else find_spec(name))
    methods = {"fedkseed": {}, method: {"training": {"algorithm": method}}}
    wanted = varied(experiment, {"method": [*methods]}, methods=methods)
    with pytest.raises(FedKSeedError, match=rf"pip install 'fedkseed\[{extra}\]'"):
        reproduce(Reproduction(wanted, tmp_path / "new"))
    assert counted == []
    assert not (tmp_path / "new").exists(), "the tiny model is pretrained after all checks"


def test_a_path_that_is_not_given_or_not_there_is_refused_before_anything_is_made(tmp_path):
    known = ("reproduce", "table-2", "--output", tmp_path / "new")
    assert "this experiment needs a path: give --model" in refused(*known, "--scale", "stories")
    assert f"--model {tmp_path}/no: no such file or folder" in refused(*known, "--model", tmp_path / "no")
    assert "--records" in refused(*known, "--records", tmp_path / "no")
    assert not (tmp_path / "new").exists()


@pytest.fixture
def quick_memory(monkeypatch) -> None:
    """A measured memory of 5 MB, without the processes that measure one."""
    monkeypatch.setattr(run_records, "measure", lambda recipe, algorithm: SimpleNamespace(peak_memory=5_000_000))


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def untimed(path: Path) -> list[dict[str, str]]:
    """The rows of a table without the seconds of its runs, which differ from time to time."""
    return [{name: cell for name, cell in row.items() if name != "seconds"} for row in rows(path)]


def given(experiment: Experiment) -> dict[str, str]:
    return {"model": experiment.models["tiny"]["model"]["name"]}


def varied(experiment: Experiment, axes: dict[str, list], **changes) -> Experiment:
    """An experiment with other values on some axes, and other changes."""
    return replace(experiment, axes=experiment.axes | axes, **changes)


def searching(experiment: Experiment, axes: dict[str, list], **changes) -> Experiment:
    """An experiment of one K that searches the best rate on one seed."""
    choose = {"axis": "training.lr", "seeds": 1}
    return varied(experiment, {"directions.size": [16], **axes}, **{"choose": choose, **changes})


def reproduced(experiment: Experiment, output: Path, **options) -> Path:
    """The folder with the table of an experiment whose runs are all done."""
    folder = reproduce(Reproduction(experiment, output, given(experiment), **options))
    assert folder is not None
    return folder


def clone(folder: Path, to: Path) -> Path:
    """A folder of the same experiment with the records alone."""
    there = to / Path(*folder.parts[-2:])
    there.mkdir(parents=True)
    for name in ("runs.json", "rounds.csv"):
        shutil.copy(folder / name, there)
    return there


def test_an_experiment_writes_its_table_and_figure_and_does_nothing_twice(experiment, tmp_path, counted):
    folder = reproduced(experiment, tmp_path)
    assert {path.name for path in folder.iterdir()} >= FILES
    assert len(counted) == 4
    about = json.loads((folder / "about.json").read_text())
    assert sorted(about["runs"]) == sorted(path.name for path in counted)
    first = (folder / "table.csv").read_bytes(), (folder / "figure.svg").read_bytes()
    reproduced(experiment, tmp_path)
    assert len(counted) == 4
    assert ((folder / "table.csv").read_bytes(), (folder / "figure.svg").read_bytes()) == first

    marginal = replace(experiment, name="figure-11", output="marginal")
    reproduced(marginal, tmp_path)
    assert len(counted) == 4  # shared

    lr = {"fedkseed": 2 * experiment.lr["fedkseed"]}
    reproduced(replace(experiment, lr=lr), tmp_path, only="K 16")
    assert len(counted) == 6  # changed, so run anew beside the old ones
    assert len(set(counted)) == 6


@pytest.mark.usefixtures("quick_memory")
def test_table_and_figure_are_drawn_again_from_the_records_alone(experiment, tmp_path, counted):
    options = {"reference": {"method": "fedkseed"}, "steps": 4, "steps a round": {"default": 2}}
    recipe = merge(experiment.recipe, {"evaluation": {"metrics": ["accuracy"]}})
    axes = {"method": ["fedkseed", "fedit"], "training.lr": [1e-3, 1e-2]}
    searched = searching(experiment, axes, output="speed", options=options, recipe=recipe)
    folder = reproduced(searched, tmp_path)
    drawn = {name: (folder / name).read_bytes() for name in ("table.md", "table.csv", "by-round.md", "figure.svg")}
    records = json.loads((folder / "runs.json").read_text())
    assert len(records["runs"]) == 4
    assert len(records["searched"]) == 4
    for run in records["runs"]:
        assert run["commits"]
        assert {"directions", "a base model of digest", "data of digest"} == set(run["digests"])
        assert run["recipe"]["seed"] == run["seed"]
    by_run = {(row["run"], row["done"]): row for row in rows(folder / "rounds.csv")}
    assert len(by_run) == 4 * 3
    for run in rows(folder / "runs.csv"):
        assert float(by_run[run["run"], "2"]["loss"]) == float(run["loss after"])
    alone = clone(folder, tmp_path / "clone")
    started = len(counted)
    assert redraw(searched, tmp_path / "clone") == alone
    assert all(run["memory"] == 5_000_000 for run in records["runs"])
    assert "in a process of its own" in (folder / "table.md").read_text()
    for one in read_records(alone):
        (whole,) = tmp_path.glob(f"runs/*/{one.directory.name}")
        assert replace(one, directory=whole) == RunOutcome.read(whole, one.axes, one.seed)
    assert {name: (alone / name).read_bytes() for name in drawn} == drawn
    assert len(counted) == started
    (alone / "rounds.csv").write_text("run,done\n")
    with pytest.raises(FedKSeedError, match=r"the records in .* are damaged"):
        redraw(searched, tmp_path / "clone")
    (alone / "runs.json").unlink()
    with pytest.raises(FedKSeedError, match="has no records to draw from"):
        redraw(searched, tmp_path / "clone")


def test_runs_on_record_are_not_done_again_where_their_recipe_is_the_same(experiment, tmp_path, counted):
    searched = searching(experiment, {"training.lr": [1e-4, 2e-4]})
    whole = reproduced(searched, tmp_path / "first")
    assert len(counted) == 4  # two trials, two seeds
    clone(whole, tmp_path / "clone")
    again = reproduced(searched, tmp_path / "second", records=tmp_path / "clone")
    assert len(counted) == 4
    for name in ("table.csv", "rounds.csv", "runs.json", "figure.svg"):
        assert (again / name).read_bytes() == (whole / name).read_bytes()
    runs = [{*json.loads((folder / "about.json").read_text())["runs"]} for folder in (whole, again)]
    assert runs[0] == runs[1]

    more = varied(searched, {"directions.size": [16, 64]}, name="more")
    grown = reproduced(more, tmp_path / "third", records=tmp_path / "clone")
    assert len(counted) == 8  # those of K = 64 alone
    small, large = rows(grown / "table.csv")
    assert small["loss after, mean"] == rows(whole / "table.csv")[0]["loss after, mean"] != large["loss after, mean"]
    with pytest.raises(FedKSeedError, match="has no records of runs at the scale tiny"):
        reproduced(searched, tmp_path / "fourth", records=tmp_path / "nowhere")


def test_a_search_compares_short_trials_on_rows_of_the_validation_part(experiment, tmp_path, counted):
    evaluation = {"examples": 16, "validation": 6, "generated": 0, "every": 9}
    recipe = merge(experiment.recipe, {"data": {"held_out": 0.5, "seed": 0}, "evaluation": evaluation})
    choose = {"axis": "training.lr", "seeds": 1, "times": {"training": {"rounds": 0.5}}}
    searched = searching(experiment, {"training.lr": [1e-4, 2e-4]}, recipe=recipe, choose=choose)
    folder = reproduced(searched, tmp_path)
    losses = [trial["loss"] for trial in json.loads((folder / "runs.json").read_text())["searched"]]
    rows_of = [{name: list[str]() for name in ("shown", "validation")} for _ in counted]
    for number, directory in enumerate(counted):
        recipe, trial = load_recipe(directory / "recipe.toml"), number < 2
        assert recipe.training.rounds == (1 if trial else 2)
        shares = share_out(recipe, load_tokenizer(recipe.model.name))
        for name, examples in (("shown", shares.held_out), ("validation", shares.sets["validation"].examples)):
            rows_of[number][name] = [e.example.instruction for e in examples]
        evaluations = Store(directory).evaluations()
        if trial:
            assert losses[number] == [Evaluation.of(evaluations[k]).sets["validation"].means["loss"] for k in (0, 1)]
    assert all(each == rows_of[0] for each in rows_of)  # of trials and runs, of every seed
    assert not {*rows_of[0]["shown"]} & {*rows_of[0]["validation"]}
    rates = [load_recipe(directory / "recipe.toml").training.lr for directory in counted]
    changes = {rate: after - before for rate, (before, after) in zip(rates[:2], losses, strict=True)}
    assert rates[2:] == [min(changes, key=changes.__getitem__)] * 2


def test_a_basis_is_made_of_public_text_once_and_named_in_the_results(experiment, data_file, tmp_path, counted):
    along = {"family": "informed", "basis": "$basis"}
    methods = {"informed": {"training": {"algorithm": "fedkseed"}, "directions": along}}
    axes, bases = {"method": ["informed"], "directions.size": [16]}, {"$basis": {"scaled": False, "examples": 4}}
    wanted = varied(experiment, axes, methods=methods, bases=bases, lr={"informed": 1e-3})
    with pytest.raises(FedKSeedError, match="give --basis, or --public, the text to make it of"):
        reproduced(wanted, tmp_path)
    missing = tmp_path / "missing.safetensors"
    with pytest.raises(FedKSeedError, match=r"missing\.safetensors"):
        reproduce(Reproduction(wanted, tmp_path, given(experiment) | {"basis": str(missing)}))
    assert not missing.exists()
    counted.clear()
    folder = reproduced(wanted, tmp_path, public=str(data_file))
    path = tmp_path / "bases" / "tiny" / "figure-7" / "basis.safetensors"
    (basis,) = json.loads((folder / "about.json").read_text())["bases"]
    made = load_basis(path)
    assert (basis["file"], basis["digest"], basis["examples"]) == (path.name, made.digest().hex(), 4)
    assert (basis["data"], basis["max_tokens"], basis["dtype"]) == (data_file.name, 200, "float32")
    runs = read_records(folder)
    sent = sum(runs[0].metrics["bytes/all clients"].values()) + 4 * path.stat().st_size  # to each client once
    assert {run.once for run in runs} == {4 * path.stat().st_size}
    assert rows(folder / "table.csv")[0]["kB of a run"] == f"{round(sent / 1000)}"
    assert all(basis["digest"] in (run.digests or {})["directions"] for run in runs)
    written = path.stat().st_mtime_ns
    reproduced(wanted, tmp_path, public=str(data_file))
    assert (path.stat().st_mtime_ns, len(counted)) == (written, 2)
    again = reproduced(wanted, tmp_path / "again", public=str(data_file), records=tmp_path)
    assert (again / "table.csv").read_bytes() == (folder / "table.csv").read_bytes()
    assert len(counted) == 2
    other = replace(wanted, bases={"$basis": {"scaled": True, "examples": 4}})
    refused = rf"record of .*{made.digest().hex()}.*has the digest .* leave out --records"
    with pytest.raises(FedKSeedError, match=refused):
        reproduced(other, tmp_path / "other", public=str(data_file), records=tmp_path)


def test_records_of_another_model_or_other_data_are_refused(experiment, tmp_path, counted):
    one = varied(experiment, {"directions.size": [16]}, seeds=1)
    whole = reproduced(one, tmp_path / "first")
    for what in ("a base model of digest", "data of digest"):
        records = tmp_path / what.split()[0]
        tree = json.loads((whole / "runs.json").read_text())
        tree["runs"][0]["digests"][what] = "0" * 64
        (clone(whole, records) / "runs.json").write_text(json.dumps(tree))
        both = varied(one, {"directions.size": [16, 64]})
        with pytest.raises(FedKSeedError, match=f"has {what} .*runs of one experiment need the same"):
            reproduced(both, tmp_path / "second", records=records)


def test_the_memory_of_a_method_does_not_depend_on_a_heavy_one_before_it(experiment, tmp_path):
    sizes = {"vocab_size": 400, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    heavy = tmp_path / "heavy"
    shutil.copytree(given(experiment)["model"], heavy)  # for the tokenizer
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(heavy)
    weights = 4 * sum(p.numel() for p in LlamaForCausalLM.from_pretrained(heavy).parameters())
    methods = {
        "heavy": {"model": {"name": str(heavy)}, "training": {"algorithm": "fedavg", "lr": 1e-3}},
        "light": {"training": {"algorithm": "fedmezo", "lr": 1e-3}},
    }

    def measured(folder: Path, *names: str) -> list[float]:
        wanted = varied(experiment, {"method": list(names), "directions.size": [16]}, methods=methods, seeds=1)
        jobs = make_jobs(Reproduction(wanted, folder))
        with ExitStack() as open_stores:
            stores = [open_stores.enter_context(Store.create(job.directory, job.recipe.to_toml())) for job in jobs]
            note_memory((store, job.planned.axes, job.recipe) for store, job in zip(stores, jobs, strict=True))
            return [store.recall(MEMORY) for store in stores]

    kept_weights = np.ones(50_000_000)  # 400 MB in this process, which the measured clients have none of
    of_heavy, beside = measured(tmp_path / "both", "heavy", "light")
    del kept_weights
    (alone,) = measured(tmp_path / "alone", "light")
    assert of_heavy > 3 * weights  # weights, gradients and those of the last sync
    assert abs(beside - alone) < 16e6  # two measurements of one client differed by up to 6 MB
    assert 0 < alone < weights


def test_the_table_holds_means_and_standard_deviations_over_seeds(experiment, tmp_path):
    evaluation = experiment.recipe["evaluation"] | {"metrics": ["rouge", "accuracy"]}
    experiment = replace(experiment, recipe=experiment.recipe | {"evaluation": evaluation})
    folder = reproduced(experiment, tmp_path)
    runs = rows(folder / "runs.csv")
    assert len(rows(folder / "table.csv")) == 2
    assert "choice" not in (folder / "table.csv").read_text()  # not measured
    for row in rows(folder / "table.csv"):
        after = [float(run["loss after"]) for run in runs if run["K"] == row["K"]]
        assert len(after) == 2
        assert float(row["loss after, mean"]) == pytest.approx(fmean(after))
        assert float(row["loss after, std"]) == pytest.approx(stdev(after))
        of = [Store(job) for job in tmp_path.rglob("*") if (job / "run.sqlite").exists()]
        of = [store for store in of if store.load_recipe().directions.size == int(row["K"])]
        shares = [100 * fmean(store.evaluations()[2]["scores"]["accuracy"]) for store in of]
        assert len(shares) == 2
        assert float(row["token accuracy (%) after, mean"]) == pytest.approx(fmean(shares))


def test_a_run_that_was_stopped_goes_on_and_ends_the_same(experiment, tmp_path):
    few = varied(experiment, {"directions.size": [16]}, seeds=1)
    (job,) = make_jobs(Reproduction(few, tmp_path / "stopped", given(few)))

    class StopError(Exception):
        pass

    class Stopping(Simulation):
        def round(self, state, *rest):
            if state.round == 1:
                raise StopError
            return super().round(state, *rest)

    with Store.create(job.directory, job.recipe.to_toml()) as store, pytest.raises(StopError):
        work(store, Stopping(job.recipe).federation)
    assert job.outcome() is None
    stopped, whole = (reproduced(few, tmp_path / name) for name in ("stopped", "whole"))
    assert untimed(stopped / "table.csv") == untimed(whole / "table.csv")


def test_the_base_model_is_scored_once_a_seed(experiment, tmp_path, monkeypatch):
    scored, whole = list[str](), WithModel.evaluate

    def evaluate(self, state, what, write):
        scored.append(what)
        return whole(self, state, what, write)

    monkeypatch.setattr(WithModel, "evaluate", evaluate)
    folder = reproduced(experiment, tmp_path)
    runs = rows(folder / "runs.csv")
    assert len(runs) == 4
    assert sum(what.endswith("round 0") for what in scored) == 2
    first = {(run["seed"], run["loss before"]) for run in runs}
    assert len(first) == len({loss for _, loss in first}) == 2


def test_parts_share_the_runs_and_a_last_call_collects_them(experiment, tmp_path, counted):
    assert reproduce(Reproduction(experiment, tmp_path, given(experiment), part=(1, 2))) is None
    assert len(counted) == 2
    reproduced(experiment, tmp_path, part=(2, 2))  # nothing is left
    assert len(counted) == 4


def test_the_best_value_is_chosen_on_seeds_of_its_own(experiment, tmp_path, counted):
    options = {"line": "directions.size", "measure": "change", "reference": {"directions.size": 16}}
    choose = {"axis": "training.lr", "seeds": 1, "recipe": {"evaluation": {"generated": 0}}}
    chosen = varied(experiment, {"training.lr": [1e-3, 1.0]}, output="curves", options=options, choose=choose)
    folder = reproduced(chosen, tmp_path)
    written = [load_recipe(at / "recipe.toml").evaluation.generated for at in counted]
    assert written == [0] * 4 + [2] * 4  # trials leave out what the choice needs not
    trials = [RunOutcome.read(at, {}, 2) for at in counted if load_recipe(at / "recipe.toml").seed == 2]
    assert len(trials) == 4
    for row, (low, high) in zip(rows(folder / "table.csv"), (trials[:2], trials[2:]), strict=True):
        assert row["η"] == ("0.001" if low.searched_loss[1] < high.searched_loss[1] else "1")
        assert (row["minus 16"] != "") == (row["K"] == "64")
    assert {load_recipe(at / "recipe.toml").seed for at in counted[4:]} == {0, 1}
    assert len(counted) == 4 + 4


def test_each_method_is_searched_and_its_difference_to_fedmezo_is_paired_by_seed(experiment, tmp_path):
    whole = load("figure-12", "tiny")
    searched = varied(
        whole,
        {"method": ["fedavg", "fedmezo", "fedkseed"], "variant": ["mid", "high", "mid-fine"]},
        recipe=experiment.recipe | {"trust": {"guard": 0.05}},  # refuses what a thousand times FedAvg's rate does
        models=experiment.models,
        datasets=experiment.datasets,
        lr={"fedavg": 3e-2, "fedmezo": 1e-3, "fedkseed": 1e-3},
        variants=whole.variants | {"high": {"times": {"training": {"lr": 1e3}}}},
        choose={"axis": "variant", "seeds": 1},
        seeds=2,
    )
    folder = reproduced(searched, tmp_path)
    records = json.loads((folder / "runs.json").read_text())
    tried = {(trial["axes"]["method"], trial["axes"]["variant"]) for trial in records["searched"]}
    assert ("fedavg", "mid") in tried
    assert not tried & {("fedavg", "mid-fine"), ("fedavg", "high")}  # it reads no eps; the trial failed
    assert {("fedmezo", "mid-fine"), ("fedkseed", "mid-fine")} < tried
    table, runs = rows(folder / "table.csv"), rows(folder / "runs.csv")
    assert [row["method"] for row in table] == ["FedAvg", "FedMeZO", "FedKSeed"]
    assert [row["minus FedMeZO"] == "" for row in table] == [False, True, False]
    assert [row["ε"] == "" for row in table] == [True, False, False]
    assert table[0]["η"] == "0.03"
    changes = {(run["method"], run["seed"]): float(run["loss after"]) - float(run["loss before"]) for run in runs}
    differences = [changes["FedKSeed", seed] - changes["FedMeZO", seed] for seed in "01"]
    mean, error = fmean(differences), stdev(differences) / 2**0.5
    assert table[2]["minus FedMeZO"] == f"{mean:+.4f} ± {error:.4f}"


def test_a_table_along_rates_does_without_those_whose_runs_end_with_an_error(experiment, tmp_path):
    options = {"x": "training.lr", "measures": ["loss"], "log": True}
    recipe = experiment.recipe | {"trust": {"guard": 0.05}}
    axes = {"method": ["fedavg"], "directions.size": [16], "training.lr": [1e-3, 30.0]}
    rates = varied(experiment, axes, output="against", options=options, recipe=recipe, seeds=1)
    folder = reproduced(rates, tmp_path)
    assert [row["η"] for row in rows(folder / "table.csv")] == ["0.001"]
    written = (folder / "table.md").read_bytes()
    assert "No result: η 30, seed 0." in written.decode()
    assert redraw(rates, tmp_path) == folder
    assert (folder / "table.md").read_bytes() == written
    hopeless = varied(rates, {"training.lr": [30.0, 60.0]})
    with pytest.raises(FedKSeedError, match="all runs of figure-7 ended with an error"):
        reproduced(hopeless, tmp_path)


def test_a_trial_that_another_process_works_on_is_not_taken_for_one_that_failed(experiment, tmp_path, counted):
    searched = searching(experiment, {"training.lr": [1e-3, 1e-4]}, output="curves")
    busy = make_jobs(Reproduction(searched, tmp_path, given(searched)), seeds=[2], trial_of=searched.choice)[1]
    with (
        Store.create(busy.directory, busy.recipe.to_toml()),
        pytest.raises(FedKSeedError, match="another process is working on"),
    ):
        reproduced(searched, tmp_path)
    assert len(counted) == 1  # the trial before it


def test_a_search_of_which_no_value_ends_is_refused(experiment, tmp_path):
    recipe = experiment.recipe | {"trust": {"guard": 0.05}}
    hopeless = searching(
        experiment, {"method": ["fedavg"], "training.lr": [30.0, 60.0]}, output="curves", recipe=recipe
    )
    with pytest.raises(FedKSeedError, match=r"no value of training.lr ended with a loss; give it smaller ones"):
        reproduced(hopeless, tmp_path)


@pytest.fixture(scope="module")
def runs_of_pro(tmp_path_factory) -> Path:
    """The output of experiments that have the same runs, which the first of them does."""
    return tmp_path_factory.mktemp("runs-of-pro")


@pytest.mark.parametrize(
    ("output", "options"),
    [
        ("grid", {"x": "directions.size", "y": "training.eps"}),
        ("scores", {}),
        ("probabilities", {}),
        ("curves", {}),
        ("speed", {"reference": {"method": "fedkseed-pro"}, "steps": 4, "steps a round": {"default": 4}}),
    ],
)
@pytest.mark.usefixtures("quick_memory")
def test_every_output_can_be_made(experiment, runs_of_pro, tmp_path, output, options):
    wanted = varied(experiment, {"method": ["fedkseed-pro"], "training.eps": [1e-3]}, output=output, options=options)
    (runs_of_pro / "figure-7" / "tiny" / "figure.png").unlink(missing_ok=True)
    folder = reproduced(wanted, runs_of_pro)
    assert (folder / "figure.png").is_file() == (output != "scores")
    drawn = {path.name: path.read_bytes() for path in folder.glob("table.*")}
    assert len(drawn) == 2
    alone = clone(folder, tmp_path)
    redraw(wanted, tmp_path)
    assert {name: (alone / name).read_bytes() for name in drawn} == drawn


def test_the_command_lists_and_makes_measured_experiments(tmp_path):
    result = CliRunner().invoke(app, ["reproduce", "--list"])
    assert result.exit_code == 0
    assert "figure-10-active" in result.stdout
    (tmp_path / "models" / "tiny").mkdir(parents=True)  # not needed by this one
    result = CliRunner().invoke(app, ["reproduce", "figure-5", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "figure-5" / "tiny").iterdir()} >= FILES


def outcome(seed: int, *losses: float) -> RunOutcome:
    rounds = range(len(losses))
    clock, virtual = ({done: seconds * done for done in rounds} for seconds in (10.0, 3.0))
    return RunOutcome({}, seed, dict(enumerate(losses)), {}, 1, 1, clock, virtual, 0, Path())


def test_spread_is_over_seeds_and_absent_where_a_run_lacks_the_measure():
    runs = [outcome(0, 3.0, 1.0), outcome(1, 5.0, 2.0)]
    assert spread(runs, "loss") == Spread(1.5, stdev([1, 2]), 2)
    assert spread(runs, "change") == Spread(-2.5, stdev([-2, -3]), 2)
    assert spread(runs, "rouge") is None
    assert str(Spread(22.334, 1.716, 4)) == "22.33 ± 1.72"
    assert str(Spread.of([1.0, float("nan")])) == "nan ± nan"  # a run that diverged


def test_a_loss_is_reached_between_two_evaluations_and_seen_after_one():
    run = outcome(0, 5.0, 4.0, 4.5, 3.0)
    assert run.reached(-1.0) == 10.0
    assert run.reached(-0.5) == 5.0
    assert run.reached(-1.25) == pytest.approx(20 + 10 * 0.75 / 1.5)
    assert run.reached(-2.1) is None
    assert [run.within(seconds) for seconds in (0, 9.9, 10, 25, 1e9)] == [0, 0, 1, 2, 3]
    assert run.change(2) == -0.5
    assert run.seconds == 30.0


def test_methods_are_compared_by_the_reference_clock_and_steps(tmp_path):
    options = {"reference": {"method": "fedkseed"}, "steps": 20, "steps a round": {"fedkseed-plus": 10, "default": 20}}
    experiment = replace(load("goals", "tiny"), axes={"method": ["fedkseed", "fedkseed-plus"]}, options=options)

    def run(method: str, seed: int, pace: float, *losses: float) -> RunOutcome:
        one = outcome(seed, *losses)
        return replace(one, axes={"method": method}, clock={done: at * pace for done, at in one.clock.items()})

    slow = [run("fedkseed", seed, 10.0, 5.0, 4.8, 4.0 + seed / 2) for seed in (0, 1)]  # 200 s to −1.0 and to −0.5
    fast = [run("fedkseed-plus", seed, 1.0, 5.0, 4.0, 3.0, 2.0) for seed in (0, 1)]
    shown = Comparison.of(experiment, [*slow, *fast])
    table = speed(shown)
    one, other = table.rows
    assert one["in the same time"] == "-0.750 ± 0.250"
    assert other["in the same time"] == other["in 1/5 of the time"] == "-3.000 ± 0.000"
    assert other["in 1/100 of the time"] == "+0.000 ± 0.000"
    assert other["after 20 steps"] == "-2.000 ± 0.000"
    assert one["after 20 steps"] == "-0.200 ± 0.000"
    assert other["minus the reference"] == "-2.250 ± 0.250"
    assert one["minus the reference"] is None
    sent = [replace(each, metrics={"bytes/all clients": {1: 1500, 2: 500}}, once=1000) for each in slow]
    assert [row["kB of a run"] for row in speed(Comparison.of(experiment, [*sent, *fast])).rows] == [3, None]
    ended, longer = summary(shown).rows  # at the end of each, of two rounds and of three
    assert (ended.get("minus FedKSeed"), longer["minus FedKSeed"]) == (None, "-2.2500 ± 0.2500")
    assert other["times as fast"] == "20 to 40"
    rival = replace(experiment, options=experiment.options | {"rival": "fedkseed-plus"})
    slower = speed(Comparison.of(rival, [*slow, *fast])).rows[0]
    assert slower["in the time of FedKSeed-Plus"] == "+0.000 ± 0.000"
    assert slower["minus FedKSeed-Plus then"] == "+3.000 ± 0.000"
    # the third round is not one of both
    first, second, half, alike = by_round(Comparison.of(rival, [*slow, *fast])).rows
    assert (alike["rounds"], alike["FedKSeed-Plus"]) == ("in the time of FedKSeed-Plus", "-3.000 ± 0.000")
    assert (first["rounds"], second["rounds"], half["rounds"]) == (1, 2, "1 to 2")
    assert half["FedKSeed"] == "-0.550 ± 0.250"
    assert half["FedKSeed minus FedKSeed-Plus"] == "+0.450 ± 0.250"
    assert second["FedKSeed"] == "-0.750 ± 0.250"
    assert second["FedKSeed minus FedKSeed-Plus"] == "+1.250 ± 0.250"
    assert first["FedKSeed minus FedKSeed-Plus"] == "+0.800 ± 0.000"
    assert by_round(shown).rows[1]["FedKSeed-Plus minus FedKSeed"] == "-1.250 ± 0.250"
    assert by_round(shown).rows[3]["FedKSeed-Plus minus FedKSeed"] == "-2.250 ± 0.250"  # all of its rounds
    late = replace(rival, options={"reference": {"method": "fedkseed-plus"}})  # FedKSeed has no look within 30 s
    assert not {"FedKSeed", "FedKSeed minus FedKSeed-Plus"} & {*by_round(Comparison.of(late, [*slow, *fast])).rows[3]}
    assert by_round(Comparison.of(replace(experiment, options={}), slow)) is None
    shares = {True: {1: 0.2, 2: 0.5, 3: 0.75}, False: {1: 0.25, 2: 0.25}}  # of the plus, and of the other
    scored = [
        replace(run, scores={"choice": {0: 0.1, **shares[run in fast]}, "exact match": {0: 0.5, 1: 0.6, 2: 0.6}})
        for run in [*slow, *fast]
    ]
    *_, first, second, half, alike = by_round(Comparison.of(rival, scored)).rows
    assert {row["measure"] for row in (first, second, half, alike)} == {"choice accuracy (%)"}  # the last of SHARES
    assert (first["FedKSeed"], second["FedKSeed-Plus"]) == ("25.0 ± 0.0", "50.0 ± 0.0")
    assert (half["FedKSeed"], half["FedKSeed-Plus"]) == ("+0.0 ± 0.0", "+30.0 ± 0.0")
    assert second["FedKSeed minus FedKSeed-Plus"] == "-25.0 ± 0.0"
    assert (alike["FedKSeed-Plus"], alike.get("FedKSeed")) == ("75.0 ± 0.0", None)
    in_time = by_round(Comparison.of(experiment, scored)).rows[-1]
    assert (in_time["FedKSeed-Plus"], in_time["FedKSeed"]) == ("75.0 ± 0.0", "25.0 ± 0.0")
    assert in_time["FedKSeed-Plus minus FedKSeed"] == "+50.0 ± 0.0"
    stepped = [replace(run, steps={done: (7 if run.axes["method"] == "fedkseed" else 5) * done for done in run.loss})
               for run in scored]  # fmt: skip
    (alike,) = (row for row in by_round(Comparison.of(rival, stepped)).rows[:5] if "client steps" in str(row["rounds"]))
    assert alike["rounds"] == "in the client steps of FedKSeed-Plus"
    assert (alike["FedKSeed-Plus"], alike["FedKSeed"]) == ("-3.000 ± 0.000", "-0.750 ± 0.250")  # 14 of 15 steps
    assert alike["FedKSeed minus FedKSeed-Plus"] == "+2.250 ± 0.250"
    virtual = replace(experiment, options=experiment.options | {"clock": "virtual"})
    assert speed(Comparison.of(virtual, [*slow, *fast])).rows[1]["units of time"] == 9.0


def test_a_table_says_directions_type_and_steps_in_columns_where_rows_differ_and_once_where_not():
    experiment = replace(load("goals", "tiny"), axes={"method": ["fedkseed", "fedkseed-plus", "fedit"]}, options={})
    longer = {"fedkseed-plus": merge(experiment.methods["fedkseed-plus"], {"training": {"steps": 7}})}
    experiment = replace(experiment, methods=experiment.methods | longer)
    one = replace(outcome(0, 5.0, 4.0, 3.0), metrics={"clients": {1: 2, 2: 4}})
    runs = [replace(one, axes={"method": method}) for method in experiment.axes["method"]]
    steps = experiment.table(runs[0].axes)["training"]["steps"], 7, experiment.table(runs[2].axes)["training"]["steps"]
    table = summary(Comparison.of(experiment, runs))
    assert [row["directions"] for row in table.rows] == ["hadamard", "hadamard", "none"]
    assert "Of all rows: type float32." in table.notes
    assert [row["client steps"] for row in table.rows] == [f"{6 * count:,}" for count in steps]
    alone = summary(Comparison.of(experiment, runs[:1]))
    assert f"Of all rows: directions hadamard; type float32; client steps {6 * steps[0]:,}." in alone.notes
    assert not alone.rows[0].keys() & {*SETTINGS}
    tree = experiment.methods | {"fedit": merge(experiment.methods["fedit"], {"training": {"epochs": 2}})}
    epochs = replace(experiment, methods=tree)
    counted = replace(runs[2], steps={0: 0, 1: 30, 2: 1234})  # in an older record they are not
    rows = summary(Comparison.of(epochs, [counted, runs[0]])).rows
    assert [row["client steps"] for row in rows] == ["1,234", f"{6 * steps[0]:,}"]
    rows = summary(Comparison.of(epochs, [runs[2], runs[0]])).rows
    assert [row["client steps"] for row in rows] == [None, f"{6 * steps[0]:,}"]


def test_table_2_has_differences_to_the_rival_for_each_data_set_paired_by_seed():
    experiment = load("table-2", "stories")
    experiment = varied(experiment, {"method": ["fedmezo", "fedit", "fedkseed"]})
    even, uneven = "dolly-even", "dolly-uneven"
    rouge = {  # of seeds 0 and 1
        (uneven, "fedmezo"): (1, 2), (uneven, "fedit"): (5, 8), (uneven, "fedkseed"): (3, 4),
        (even, "fedmezo"): (1, 1), (even, "fedit"): (2, 2), (even, "fedkseed"): (3, 4),
    }  # fmt: skip
    outcomes = [
        replace(outcome(seed, 5.0, 4.0), axes={"dataset": dataset, "method": method}, rouge={0: 9.0, 1: score})
        for (dataset, method), both in rouge.items()
        for seed, score in enumerate(both)
    ]
    outcomes = [replace(run, axes=run.axes | {"model": "stories15M", "variant": "mid"}) for run in outcomes]
    base, mezo, it, kseed = scores(Comparison.of(experiment, outcomes)).rows
    assert kseed.pop("seconds") == 10
    untuned = Spread(9.0, 0.0, 2)
    assert base == {"approach": "no tuning", "Dolly, α = 0.5": untuned, "Dolly, α = 5.0": untuned}
    assert kseed["Dolly, α = 0.5 minus FedIT"] == "-3.0 ± 1.0"
    assert kseed["Dolly, α = 5.0 minus FedIT"] == "+1.5 ± 0.5"
    assert kseed["Dolly, α = 5.0 minus FedMeZO"] == "+2.5 ± 0.5"
    assert (it["Dolly, α = 0.5 minus FedIT"], mezo["Dolly, α = 0.5 minus FedMeZO"]) == (None, None)


def test_tables_hold_numbers_for_programs_and_text_for_people():
    table = ResultTable([{"a": Spread(1.0, 0.5, 2), "b": None}, {"c": "x|y"}])
    assert table.csv().splitlines() == ['"a, mean","a, std","a, n",b,c', "1.0,0.5,2,,", ",,,,x|y"]
    assert "| 1.0000 ± 0.5000 | – | – |" in table.markdown("T")
    assert "x\\|y" in table.markdown("T")


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b"])
def test_a_part_that_is_none_is_refused(text):
    with pytest.raises(FedKSeedError, match="a part is written"):
        parts(text)


def test_a_run_is_shared_by_experiments_that_call_it_differently(tmp_path):
    one, other = load("figure-4", "tiny"), load("figure-6", "tiny")
    given = {"model": "owner/model"}
    fixed = [{"method": "fedzo", "variant": "mid"}]
    (job,) = make_jobs(Reproduction(one, tmp_path, given), seeds=[0], fixed=fixed)
    end = job.directory.name[job.directory.name.index("-seed-") :]
    named_otherwise = job.directory.with_name(f"something-else{end}")
    named_otherwise.mkdir(parents=True)
    (again,) = make_jobs(Reproduction(other, tmp_path, given), seeds=[0], fixed=fixed)
    assert again.directory == named_otherwise
