"""Every recipe of the paper holds what it must, at every scale."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from fedkseed import Simulation
from fedkseed.data.encoder import Encoder
from fedkseed.data.held_out import HeldOutRows, draw_sets
from fedkseed.data.layouts import Example
from fedkseed.data.split import read_source
from fedkseed.errors import FedKSeedError
from fedkseed.paper import dry_run, experiments, tiny_model
from fedkseed.paper.byte_counts import DATAJUICER, LLAMA
from fedkseed.paper.dry_run import estimate
from fedkseed.paper.experiments import SCALES, Experiment, fingerprint, load, merge, nested, options_of
from fedkseed.paper.microbenchmarks import MEASURED
from fedkseed.paper.outputs import OUTPUTS
from fedkseed.paper.reproduce import Reproduction, make_jobs
from fedkseed.paper.tables import ComparisonOptions
from fedkseed.recipe.algorithms import ALGORITHMS
from fedkseed.recipe.rules import Where, require_legal
from fedkseed.recipe.schema import VALIDATION, Recipe

from ..conftest import CATEGORIES, rows
from ..data.test_natural_instructions import write

GIVEN = {"model": "owner/model", "dolly": "dolly.jsonl", "natural-instructions": "tasks", "basis": "basis.safetensors"}
ITEMS = {f"Table {n}" for n in (1, 2, 3)} | {f"Figure {n}" for n in (2, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14)}
EVERY = [(name, scale) for name in experiments.names() for scale in SCALES]


def test_every_item_of_the_paper_has_an_experiment():
    found = {load(name, "tiny").item.partition(" (")[0] for name in experiments.names()}
    assert found >= ITEMS | {"Figure 10", "Parity of families"}


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_every_run_of_every_experiment_has_a_valid_recipe(name, scale):
    experiment = load(name, scale)
    assert experiment.output in OUTPUTS | MEASURED
    if experiment.output in OUTPUTS:
        options_of(ComparisonOptions, experiment)  # knows them all
    plan = experiment.plan()
    assert len({repr((p.axes, p.seed)) for p in plan}) == len(plan)
    for planned in plan[:: experiment.seeds]:
        recipe = planned.recipe(GIVEN)
        require_legal(recipe, Where.ALWAYS, Where.ALGORITHM)
        rates = recipe.training.lr is not None or "derivatives" in planned.table
        assert "method" not in planned.axes or rates or "server_lr" in planned.table["training"]


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_every_experiment_has_a_dry_run_which_needs_no_weights(name, scale, monkeypatch):
    if scale != "full":
        monkeypatch.setattr(dry_run, "architecture", lambda model: LLAMA)
    experiment = load(name, scale)
    table = estimate(experiment, GIVEN, seconds=1.0)
    assert bool(table.rows) == ("method" in experiment.axes)
    assert all(note in table.markdown(name) for note in table.notes)
    if scale != "full":
        return
    assert {row["weights"] for row in table.rows} <= {1_345_423_360, 3_426_473_600}
    assert all(0.62 < row["memory (GB)"] < 1000 for row in table.rows)
    kseed = [row for row in table.rows if str(row["run"]).endswith("FedKSeed")]
    assert all(row["bytes down"] == 88 + 4 * 4096 and row["bytes up"] == 76 + 4 * 200 for row in kseed)


def test_a_dry_run_counts_the_bytes_of_a_basis_digest(monkeypatch):
    monkeypatch.setattr(dry_run, "architecture", lambda model: LLAMA)
    rows = estimate(load("informed", "small"), GIVEN, only="Backprop", seconds=1.0).rows
    assert {("informed" in str(row["run"]), row["bytes down"], row["bytes up"]) for row in rows} == {
        (False, 4312, 4312),
        (True, 4344, 4344),
    }


def test_a_dry_run_counts_the_steps_of_an_epoch_on_data_that_is_there_and_the_experiments_number_elsewhere():
    of_intents = estimate(load("intents", "full"), GIVEN, only="LLaMA-3B, FedIT", seconds=1.0).rows
    assert {row["local steps"] for row in of_intents} == {14}  # 40 % of 693 rows, by 20 clients
    of_dolly = estimate(load("table-3", "full"), GIVEN, only="FedIT", seconds=1.0).rows
    assert {row["local steps"] for row in of_dolly} == {69}


def test_a_dry_run_without_a_step_s_time_times_products(monkeypatch):
    monkeypatch.setattr(dry_run, "architecture", lambda model: DATAJUICER)
    table = estimate(load("table-3", "full"), GIVEN, only="FedKSeed-Pro")
    assert table.rows[0]["hours, all seeds"] > 0
    assert "GFLOP/s in a layer's product with 64 tokens" in table.notes[0]


@pytest.mark.slow(seconds=90, guards="an experiment of the paper's scale that does not start")
def test_every_experiment_of_the_papers_scale_starts_on_a_thin_model_of_its_layout(tmp_path):
    """One round of one step, of the first run without a basis; the model has open_llama_3b's layout."""
    folder = tmp_path / "model"
    tiny_model.tokenizer().save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=32, intermediate_size=88, num_hidden_layers=7, num_attention_heads=4,
        max_position_embeddings=2048, tie_word_embeddings=False, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    dolly = tmp_path / "dolly.jsonl"
    dolly.write_text("".join(json.dumps(row | {"category": "summarization"}) + "\n" for row in rows()[:8]))
    with dolly.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows())
    tasks = write(tmp_path / "tasks", dict.fromkeys(CATEGORIES, 100), {"test": 100})
    (tasks / "sentiment.jsonl").write_text(dolly.read_text())  # beside the tasks in the folder that a user gives
    given = {"model": str(folder), "dolly": str(dolly), "natural-instructions": str(tasks)}
    for name in experiments.names():
        plan = [p for p in load(name, "full").plan([0]) if "basis" not in p.table.get("directions", {})]
        for planned in plan[:1] if "method" in load(name, "full").axes else []:
            table = merge(planned.table, {
                "model": {"name": str(folder), "dtype": "float32", "device": "cpu"},
                "training": {"rounds": 2, "steps": 1}, "data": {"max_tokens": 512}, "evaluation": {"examples": 2},
            })  # fmt: skip
            table["training"].pop("epochs", None)
            table["evaluation"].pop("validation", None)  # more rows than these
            if table["clients"].get("split") != "tasks":
                table["clients"] |= {"count": 4, "min_examples": 1, "active": 0.5}
            recipe = replace(planned, table=table).recipe(given)
            with closing(Simulation(recipe)) as run:
                state, report = run.round(run.strategy.server.init())
                assert (state.round, bool(report.clients)) == (1, True), name


def test_a_dry_run_reads_the_config_of_a_model_once(monkeypatch):
    read = []
    monkeypatch.setattr(dry_run, "architecture", lambda model: read.append(model) or LLAMA)
    assert len(estimate(load("figure-12", "small"), GIVEN, seconds=1.0).rows) == 4 * 6 + 5 * 3
    assert len(read) == 1


def test_axes_have_the_last_word_then_the_method_then_the_data_set():
    experiment = replace(
        load("figure-7", "tiny"),
        axes={"model": ["tiny"], "dataset": ["d"], "method": ["m"], "training.lr": [7.0]},
        recipe={"training": {"lr": 1.0, "rounds": 1, "steps": 1, "eps": 1.0}},
        datasets={"d": {"training": {"lr": 2.0, "rounds": 2, "steps": 2}}},
        methods={"m": {"title": "M", "training": {"lr": 3.0, "rounds": 3}}},
        lr={"m": 4.0},
    )
    (planned,) = experiment.plan(seeds=[5])
    assert planned.table["training"] == {"lr": 7.0, "rounds": 3, "steps": 2, "eps": 1.0}
    assert planned.table["seed"] == 5
    assert "title" not in planned.table


def test_a_variant_can_mean_another_value_for_each_method():
    rates = {"slow": {"derivatives": {"lr": 0.1}}, "fast": {"derivatives": {"lr": 0.3}}}
    experiment = replace(
        load("figure-7", "tiny"),
        axes={"method": ["m", "n"], "variant": ["slow", "fast"]},
        methods={"m": {"title": "M", "variants": rates}, "n": {}},
        variants={"slow": {"title": "a third", "training": {"steps": 3}}, "fast": {}},
    )
    found = [p.table for p in experiment.plan(seeds=[5])]
    assert [t.get("derivatives", {}).get("lr") for t in found] == [0.1, 0.3, None, None]
    assert found[0]["training"]["steps"] == 3
    assert not {"title", "variants"} & set(found[0])


def test_a_variant_can_multiply_a_methods_numbers_and_a_method_with_its_own_has_no_others():
    experiment = replace(
        load("figure-7", "tiny"),
        axes={"method": ["m", "n"], "variant": ["slow", "fine"]},
        recipe={"training": {"eps": 1e-3, "steps": 4}},
        methods={"m": {"title": "M"}, "n": {"variants": {"slow": {}}}},
        lr={"m": 2e-6, "n": 1e-3},
        variants={"slow": {"times": {"training": {"lr": 0.3}}}, "fine": {"times": {"training": {"eps": 0.1}}}},
    )
    found = [p.table["training"] for p in experiment.plan(seeds=[5])]
    assert [t["lr"] for t in found] == [6e-7, 2e-6, 3e-4]
    assert [t["eps"] for t in found] == [1e-3, 1e-4, 1e-3]
    assert all("times" not in p.table for p in experiment.plan(seeds=[5]))


@pytest.mark.parametrize("name", ["figure-4", "figure-6", "figure-12", "table-2"])
@pytest.mark.parametrize("scale", ["tiny", "stories", "small"])
def test_methods_that_are_compared_have_their_rates_searched_and_their_eps_where_they_perturb(name, scale):
    experiment = load(name, scale)
    assert experiment.choice is not None
    values: dict[str, set[tuple[float, float]]] = {}
    for planned in experiment.plan([0]):
        training = planned.recipe(GIVEN).training
        values.setdefault(training.algorithm, set()).add((training.lr or 0, training.eps))
    assert set(values) == set(experiment.axes["method"])
    for method, found in values.items():
        rates, scales = {lr for lr, _ in found}, {eps for _, eps in found}
        forward_only = not ALGORITHMS[method].backpropagates
        assert (len(rates), len(scales)) == ((3, 2) if forward_only else (3, 1)), method
    if experiment.output == "curves":
        assert experiment.options["reference"] == {"method": "fedmezo"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, str]:
    """GIVEN with data of as many held-out rows as the paper's, none of which are alike."""
    folder = tmp_path_factory.mktemp("sources")
    counts = {"summarization": 1100, "brainstorming": 400, "open_qa": 40}
    texts = [(f"{category} {number}", category) for category, count in counts.items() for number in range(count)]
    lines = [json.dumps({"instruction": text, "response": "yes", "category": category}) for text, category in texts]
    (folder / "dolly.jsonl").write_text("\n".join(lines))
    tasks = write(folder / "tasks", {"train": 100}, {"test": 17_000})
    return GIVEN | {"dolly": str(folder / "dolly.jsonl"), "natural-instructions": str(tasks)}


@pytest.fixture(scope="module")
def held_out_rows(sources) -> Callable[[Recipe], dict[str, set[Example]]]:
    """The rows of a recipe's held-out sets by name, of which `shown` is what a run reports; each drawn once."""
    tokenizer, found = tiny_model.tokenizer(), dict[str, dict[str, set[Example]]]()

    def rows_of(recipe: Recipe) -> dict[str, set[Example]]:
        wording = {"template": "paper", "separator": "", "max_tokens": 10_000}  # not what is drawn
        tables = {"data": recipe.data, "evaluation": recipe.evaluation}
        recipe = recipe.model_copy(update={name: t.model_copy(update=wording) for name, t in tables.items()})
        key = f"{recipe.seed} {recipe.data} {recipe.evaluation.examples} {recipe.evaluation.validation}"
        if key not in found:
            source = read_source(recipe)
            rows = HeldOutRows(source.held_out, {}, [row.example for row in (*source.held_out, *source.training)])
            shown, sets = draw_sets(rows, Encoder.of(recipe, tokenizer, source.files), lambda line: None)
            found[key] = {name: {e.example for e in s.examples} for name, s in (sets | {"shown": shown}).items()}
        return found[key]

    return rows_of


# privacy at full shows as many rows of Natural Instructions as 50,000 of a test task have
@pytest.mark.parametrize(
    ("name", "scale"), [each for each in EVERY if load(*each).choice and each != ("privacy", "full")]
)
def test_no_row_of_a_search_is_shown_by_a_run_of_any_seed(name, scale, sources, held_out_rows, tmp_path):
    require_rows_apart(load(name, scale), load(name, scale), sources, held_out_rows, tmp_path)


TAKERS = {  # at `stories`
    "figure-7": "figure-6", "figure-11": "figure-6", "figure-10-active": "figure-12", "figure-10-clients": "figure-12",
}  # fmt: skip


@pytest.mark.parametrize("name", TAKERS)
def test_nor_by_a_run_whose_rates_are_of_another_experiments_search(name, sources, held_out_rows, tmp_path):
    require_rows_apart(load(TAKERS[name], "stories"), load(name, "stories"), sources, held_out_rows, tmp_path)


def require_rows_apart(searching: Experiment, shown: Experiment, sources, held_out_rows, folder) -> None:
    choice, wanted = searching.choice, Reproduction(searching, folder, sources)
    trials = make_jobs(wanted, seeds=range(searching.seeds, searching.seeds + choice.seeds), trial_of=choice)
    searched = set.union(*(held_out_rows(job.recipe)[VALIDATION] for job in trials))
    assert len(searched) >= 16
    for job in make_jobs(Reproduction(shown, folder, sources), seeds=sorted({0, shown.seeds - 1})):
        assert not searched & held_out_rows(job.recipe)["shown"]


def test_a_new_key_of_the_config_does_not_change_a_fingerprint_and_another_value_does():
    recipe = Recipe.model_validate({"model": {"name": "a/b"}})
    spelled_out = Recipe.model_validate({"model": {"name": "a/b", "dtype": "float32"}})
    other = Recipe.model_validate({"model": {"name": "a/b"}, "training": {"lr": 1e-3}})
    assert fingerprint(recipe) == fingerprint(spelled_out) != fingerprint(other)


def test_tables_are_laid_over_tables():
    assert merge({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 3}, "d": [2]}) == {"a": {"b": 3, "c": 2}, "d": [2]}
    assert nested("a.b", 1) == {"a": {"b": 1}}


def test_an_experiment_like_another_has_its_recipe_and_rates_at_every_scale_and_its_own_seeds_and_methods():
    for scale in SCALES:
        first, further = load("intents", scale), load("intents-seeds", scale)
        for name in ("fedkseed-backprop", "fedit"):
            (one,) = first.plan([5], {"method": name} | {a: v[0] for a, v in first.axes.items() if a != "method"})
            assert [p.table for p in further.plan() if p.axes == one.axes and p.seed == 5] == [one.table]
    small = load("intents-seeds", "small")
    for name, like in {"backprop-turns": "fedkseed-backprop", "fedit-turns": "fedit"}.items():
        ((one,), (other,)) = (small.plan([5], {"method": method}) for method in (name, like))
        assert one.table == merge(other.table, {"clients": {"draw": "in turns"}})
    assert {p.seed for p in further.plan()} == {4, 5, 6, 7, 8, 9}


def test_an_experiment_like_one_that_is_not_there_is_refused(monkeypatch):
    read = experiments._read
    monkeypatch.setattr(experiments, "_read", lambda name: read(name) | ({"like": "intent"} if name == "goals" else {}))
    with pytest.raises(FedKSeedError, match="the experiment goals is like 'intent', which is none; there are"):
        load("goals", "small")


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [("figure-99", "tiny", "no experiment is called 'figure-99'"), ("figure-7", "huge", "no scale is called 'huge'")],
)
def test_unknown_names_are_refused(name, scale, message):
    with pytest.raises(FedKSeedError, match=message):
        load(name, scale)


def test_a_method_with_two_rates_is_refused(monkeypatch):
    read = experiments._read
    more = {"methods": {"fedit": {"training": {"lr": 0.5}}}}
    monkeypatch.setattr(experiments, "_read", lambda name: merge(read(name), more if name == "goals" else {}))
    with pytest.raises(FedKSeedError, match=r"goals gives the method fedit two rates.*\[scales.small.lr\]"):
        load("goals", "small")


def test_a_path_that_is_not_given_is_asked_for():
    with pytest.raises(FedKSeedError, match="give --model"):
        load("figure-7", "stories").plan()[0].recipe({})


def test_a_path_is_asked_for_only_by_runs_that_are_done():
    experiment = load("tail-unseen", "small")
    dolly = experiment.recipes({}, only="DOLLY")
    assert {recipe.data.source for recipe in dolly} == {"dolly-sample"}
    assert len(dolly) < len(experiment.recipes(GIVEN))
    with pytest.raises(FedKSeedError, match="give --natural-instructions"):
        experiment.recipes({})
