"""A first recipe: it follows from the data, has comments, and runs as it is."""

import json
import re
from dataclasses import replace
from time import monotonic
from tomllib import loads

import pytest

from fedkseed import Simulation
from fedkseed.data.federated import own_held_out, share_out
from fedkseed.evaluation.statistics import Estimate
from fedkseed.models.load import load_tokenizer
from fedkseed.network.protocol.client.policy import Policy
from fedkseed.network.protocol.networked_recipe import recipe_for_clients
from fedkseed.network.protocol.server.serving import begin
from fedkseed.planning.init import (
    RATES,
    DataSummary,
    draft,
    few_held_out,
    first_recipe,
    measured,
    summary,
    with_measured,
)
from fedkseed.planning.tune import Trial, Tuning
from fedkseed.recipe.algorithms import ALGORITHMS, ONE, TWO
from fedkseed.recipe.reading import changed, own_recipe, parse, tables
from fedkseed.recipe.rules import checked_algorithm
from fedkseed.recipe.schema import NetworkTable
from fedkseed.run.eps_ladder import Rung, Scalars
from fedkseed.run.progress import Silent
from fedkseed.run.setup import Stopwatch
from fedkseed.run.store import Store

from ..commands import documented, fedkseed, refused
from ..conftest import rows


def parts_of(folder, count=3):
    """A folder with a file of labelled rows for each of some clients."""
    folder.mkdir()
    for number in range(count):
        made = [{"q": f"Is {k} odd?", "a": ["no", "yes"][k % 2]} for k in range(number, 60, count)]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return folder


NAMED = ["--column", "instruction=q", "--column", "response=a"]


def test_the_recipe_runs_as_it_is(data_file, model_folder, tmp_path):
    path = tmp_path / "mine.toml"
    result = fedkseed("init", path, "--data", data_file, "--model", model_folder)
    assert result.exit_code == 0, result.output
    for text in ("36 rows in 3 categories", "a run of fedkseed-backprop, which was not begun", f"fedkseed run {path}"):
        assert text in result.output
    recipe = own_recipe(path)
    assert (recipe.clients.split, recipe.clients.count, recipe.data.held_out) == ("dirichlet", 2, 0.1)
    assert all("#" in line for line in path.read_text().splitlines() if line.startswith(("max_tokens", "split", "lr")))
    few = ["--set", "training.rounds=2", "--set", "training.steps=1"]
    done = fedkseed("run", path, *few, "--output", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert Store(tmp_path / "run").rounds == 2
    assert "exists already; choose another file" in refused("init", path, "--data", data_file, "--model", model_folder)


def test_labels_columns_and_a_folder_are_seen(model_folder, tmp_path):
    path, parts = tmp_path / "r.toml", parts_of(tmp_path / "parts")
    document = documented("init", path, "--data", parts, "--model", model_folder, "--no-estimate", *NAMED)
    assert (document["data"]["rows"], document["data"]["labels"], document["data"]["files"]) == (60, 2, 3)
    assert document["costs"] is None
    recipe = own_recipe(path)
    assert (recipe.clients.split, recipe.clients.cohort, recipe.clients.count) == ("files", 3, None)
    assert recipe.evaluation.metrics == ["choice", "exact match"]
    assert recipe.data.columns == {"instruction": "q", "response": "a"}
    held_out = share_out(recipe, load_tokenizer(str(model_folder))).held_out
    assert (recipe.evaluation.examples, recipe.evaluation.generated) == ("all", len(held_out)), "an answer to each"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_algorithm_has_a_recipe_without_a_setting_that_it_would_ignore(tmp_path, algorithm):
    data = DataSummary("rows", {}, rows=600, categories={}, labels=2, longest_label=5, tokens=(10, 20, 30), files=3)
    (tmp_path / "r.toml").write_text(draft(data, "model", "labels", algorithm))
    recipe = own_recipe(tmp_path / "r.toml")  # refuses what would change nothing
    checked_algorithm(recipe)
    assert recipe.training.algorithm == algorithm
    row = ALGORITHMS[algorithm]
    assert recipe.training.steps == (200 if row.local in (ONE, TWO) else 4)
    if row.pooled and row.differentiates:
        assert recipe.derivatives.lr == RATES[algorithm]
    else:
        assert recipe.training.lr == row.lr


def test_the_algorithm_that_is_named_is_the_recipes(data_file, model_folder, tmp_path):
    asked = ["--data", data_file, "--model", model_folder, "--no-estimate", "--algorithm", "fedkseed-plus"]
    assert fedkseed("init", tmp_path / "r.toml", *asked).exit_code == 0
    assert own_recipe(tmp_path / "r.toml").training.algorithm == "fedkseed-plus"


def test_lengths_are_those_of_the_tokens(data_file, model_folder):
    found = summary(str(data_file), {}, load_tokenizer(str(model_folder)))
    usual, long, longest = found.tokens
    assert 0 < usual <= long <= longest
    assert found.categories == {"colour": 12, "number": 12, "capital": 12}
    assert (found.task, found.labels) == ("answers", len({row["response"] for row in rows()}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "M"], "--data is missing: a file with your rows; it is asked for on a terminal alone"),
        (["--data", "D"], "--model is missing"),
        (["--data", "D", "--model", "M", "--task", "poems"], "no task is called 'poems'; choose answers or labels"),
        (["--data", "D", "--model", "M", "--column", "q"], "takes FIELD=NAME, as instruction=question, got 'q'"),
        (["--data", "D", "--model", "M", "--algorithm", "fedkseed-pluss"], "did you mean 'fedkseed-plus'?"),
        (["--data", "QA", "--model", "M"], "do: --column instruction=Subject --column response=Body"),
        (
            ["--data", "D", "--model", "M", "--column", "response=a"],
            "no column 'a'; found: instruction, context, response",
        ),
        (["--data", "no.jsonl", "--model", "M"], "no data file at no.jsonl"),
        (["--data", "FEW", "--model", "M"], "has 3 rows; two clients need 20 at least"),
    ],
)
def test_what_is_lacking_is_said_and_nothing_is_written(tmp_path, data_file, model_folder, arguments, message):
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()[:3]))
    (tmp_path / "qa.csv").write_text("why,because\nWhy?,So.\n")
    places = {"D": data_file, "M": model_folder, "FEW": tmp_path / "few.jsonl", "QA": tmp_path / "qa.csv"}
    assert message in refused("init", tmp_path / "r.toml", *(places.get(one, one) for one in arguments))
    assert not (tmp_path / "r.toml").exists()


@pytest.mark.parametrize(
    ("more", "owners"),
    [
        (lambda k: {"department": ["hr", "it", "law"][k % 3]}, ("department", 3)),
        (lambda k: {"Hospital ID": k % 4, "site": ["a", "b"][k % 2]}, ("site", 2)),  # the fewest values
        (lambda k: {"client": ["a", "b", "c"][k % 3], "site": ["a", "b"][k % 2]}, ("client", 3)),
        (lambda k: {"userId": f"u{k % 5}"}, ("userId", 5)),
        (lambda k: {"colour": ["red", "blue"][k % 2]}, None),  # a name that says nothing of an owner
        (lambda k: {"author": f"a{k}"}, None),  # a value a row
        (lambda k: {"site": "a"}, None),  # one value
        (lambda k: {"site": ["a", "", "b"][k % 3]}, None),  # rows without one
    ],
)
def test_a_column_that_looks_like_the_owner_of_a_row_is_found(tmp_path, model_folder, more, owners):
    made = [{**row, **more(k)} for k, row in enumerate(rows())]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    assert summary(str(tmp_path / "a.jsonl"), {}, load_tokenizer(str(model_folder))).owners == owners


def test_clients_by_column_are_proposed_in_comments_and_written_if_named(tmp_path, model_folder):
    made = [{**row, "Abteilung department": f"d{k % 3}"} for k, row in enumerate(rows())]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    asked = ["--data", tmp_path / "a.jsonl", "--model", model_folder, "--no-estimate"]
    assert fedkseed("init", tmp_path / "r.toml", *asked).exit_code == 0
    text = (tmp_path / "r.toml").read_text()
    assert own_recipe(tmp_path / "r.toml").clients.split == "dirichlet"
    assert "# The column 'Abteilung department' has 3 values" in text
    followed = re.sub(r"(?m)^(split|count|alpha) .*\n", "", text)
    followed = re.sub(r'(?m)^# (split = "column")$', r"\1", followed)
    (columns,) = re.findall(r"(?m)^# and in \[data\]: (columns .*)$", followed)
    (tmp_path / "followed.toml").write_text(followed.replace("[data]\n", f"[data]\n{columns}\n", 1))
    (tmp_path / "more.toml").write_text(re.sub(r"(?m)^# (last_layers|patience|clients) ", r"\1 ", text))
    named = ["--column", "client=Abteilung department"]
    assert fedkseed("init", tmp_path / "named.toml", *asked, *named).exit_code == 0
    tokenizer = load_tokenizer(str(model_folder))
    for name in ("followed", "named"):
        recipe = own_recipe(tmp_path / f"{name}.toml")
        assert share_out(recipe, tokenizer).names == ["d0", "d1", "d2"], name
    assert own_recipe(tmp_path / "more.toml").evaluation.best == "loss"
    assert own_recipe(tmp_path / "more.toml").model.last_layers == 6
    assert len(share_out(own_recipe(tmp_path / "more.toml"), tokenizer).sets) == 2


class Counting(Silent):
    """A watcher that holds what is done against what was announced."""

    what, total, done = "", 0, 0

    def begin(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0

    def advance(self, count: int = 1, loss: float | None = None) -> None:
        self.done += count
        assert self.done <= self.total, self.what


@pytest.mark.parametrize("algorithm", ["fedkseed-backprop", "fedkseed-plus"])
def test_the_rate_that_is_measured_lowers_the_loss_of_the_whole_run(algorithm, data_file, model_folder):
    asked = {"task": None, "algorithm": algorithm, "clients": None}
    first = first_recipe(str(data_file), {}, str(model_folder), **asked)
    costs, tuning = measured(first, first.recipe, monotonic(), Counting())
    assert (costs is not None and costs.step_seconds > 0, len(tuning.trials) > 2, tuning.spent) == (True, True, False)
    found, warning = with_measured(first.text, tuning)
    assert warning == ""
    (line,) = re.findall(r"(?m)^lr = .*$", found)
    assert re.search(r" # measured: loss \d\S+ -> \d\S+ in \d+ steps of 2 clients; \d+ rates tried$", line)
    simulation = Simulation(parse(changed(loads(found), ["training.rounds=3"])))
    setup, state = simulation.setup, simulation.strategy.server.init()
    before = setup.score(simulation.shares.held_out, "", False, simulation.metrics).means["loss"]
    for _ in range(3):
        state, _ = simulation.round(state)
    setup.load(state)
    assert setup.score(simulation.shares.held_out, "", False, simulation.metrics).means["loss"] < before


def tuning_of(*trials: Trial, spent: bool = False) -> Tuning:
    return Tuning(parse({"model": {"name": "m"}}), [0, 1], 4, before=[3.0, 2.0], trials=[*trials], spent=spent)


@pytest.mark.parametrize(
    ("tuning", "line", "warned"),
    [
        (tuning_of(Trial(1e-5, [2.0, 1.01])), "lr = 1e-5 # measured: loss 2.5 -> 1.505 in 8 steps of 2 clients", False),
        (tuning_of(spent=True), "lr = 3e-7 # not measured: 8 steps of 2 clients would have passed the minute", True),
        (
            tuning_of(Trial(4e-5, [4.0, 3.0]), Trial(1e-5, [], "the loss is not finite"), spent=True),
            "lr = 2.5e-6 # a guess: of 2 rates tried, then the minute was over (4e-05, 1e-05) none lowered",
            True,
        ),
        (tuning_of(Trial(4e-5, [2.0, 2.5])), "lr = 4e-5 # a guess: of 1 rate tried (4e-05) none lowered", True),
    ],
)
def test_the_line_of_the_rate_says_how_it_was_found(tuning, line, warned):
    text, warning = with_measured("steps = 4\nlr = 7.0 # old\nrounds = 1\n", tuning)
    assert text.splitlines()[1].startswith(line)
    assert (text.splitlines()[0], text.splitlines()[2:]) == ("steps = 4", ["rounds = 1"])
    assert ("--minutes 20" in warning) == warned


@pytest.mark.parametrize("algorithm", ["fedkseed-backprop", "fedkseed-plus"])
@pytest.mark.parametrize("late", ["loading", "the first step", "nothing"])
def test_where_the_minute_is_over_no_more_is_measured(algorithm, late, data_file, model_folder, monkeypatch):
    first = first_recipe(str(data_file), {}, str(model_folder), task=None, algorithm=algorithm, clients=4)
    now, steps, tick = [100.0 * (late == "loading")], list[Stopwatch](), Stopwatch.tick

    def timed(watch: Stopwatch) -> None:
        tick(watch)
        steps.append(watch)
        now[0] += 100.0 * (late == "the first step")

    monkeypatch.setattr(Stopwatch, "tick", timed)
    costs, tuning = measured(first, first.recipe, 0.0, Silent(), lambda: now[0])
    assert (costs is None) == (late == "loading")
    assert (len(steps) > 1) == (late == "nothing")
    assert len(steps) > 0 or late == "loading"
    assert (tuning.spent, tuning.before, tuning.trials) == (True, [], []) or late == "nothing"
    text, warning = with_measured(first.text, tuning)
    assert (parse(loads(text)) == parse(loads(first.text))) or late == "nothing"
    if late != "nothing":
        assert "would have passed the minute: give `fedkseed tune RECIPE --minutes 20 --output NEW`" in warning


def test_init_that_is_late_writes_a_recipe_and_names_the_commands_that_measure(tmp_path, model_folder, monkeypatch):
    monkeypatch.setattr("fedkseed.planning.init.SECONDS", 0.0)
    path, parts = tmp_path / "r.toml", parts_of(tmp_path / "parts")
    done = fedkseed("init", path, "--data", parts, "--model", model_folder, *NAMED)
    assert done.exit_code == 0, done.output
    assert "warning: lr = 6e-5 is not measured: " in done.output
    assert f"`fedkseed run {path} --dry-run`" in done.output
    assert parse(loads(path.read_text())).derivatives.lr == RATES["fedkseed-backprop"]


@pytest.mark.parametrize("count", [20, 40, 99, 100, 200])
def test_few_held_out_rows_are_a_warning_with_what_to_do(tmp_path, model_folder, count):
    path = tmp_path / "a.csv"
    path.write_text("question,answer\n" + "".join(f"q {k},a {k}\n" for k in range(count)))
    first = first_recipe(str(path), {}, str(model_folder), task=None, algorithm="fedkseed-backprop", clients=2)
    said = few_held_out(first, network=False)
    assert bool(said) == (count < 95)
    for line in said:
        assert f"warning: {round(0.1 * count)} held-out rows show little" in line
        share = re.findall(r"held_out = (\S+),", line)[0]
        enough = first.text.replace("held_out = 0.1", f"held_out = {share}")
        assert len(share_out(parse(loads(enough)), first.tokenizer).held_out) >= 10


def test_the_eps_that_is_measured_stands_before_the_rate():
    rung = Rung(1e-3, 8.0, 0.1, 0.1, 0.01, 0.0)
    tuning = replace(tuning_of(Trial(1e-5, [2.0, 1.0])), scalars=Scalars([rung], 0.0, 4, 100.0, Estimate(1, 0)))
    text, _ = with_measured("[training]\nlr = 7.0 # old\n", tuning)
    assert re.fullmatch(r"\[training\]\neps = 0.001 # measured: .*\nlr = 1e-5 # measured: .*\n", text)


@pytest.mark.parametrize("one_file", [False, True])
def test_a_recipe_for_a_network_is_served_as_it_is(one_file, tmp_path, model_folder):
    parts, path = parts_of(tmp_path / "parts"), tmp_path / "r.toml"
    asked = ["--model", model_folder, "--network", *NAMED]
    data = [parts / "0.jsonl", "--clients", 3] if one_file else [parts]
    done = fedkseed("init", path, "--data", *data, *asked)
    assert done.exit_code == 0, done.output
    assert f"serve it with: fedkseed serve {path} --certs KEYS" in done.output
    assert done.output.count("warning") == 1
    assert f"warning: {2 if one_file else 6} held-out rows show little of what a run gains: give 10 or " in done.output
    assert re.search(r"(?m)^lr = .* # measured: ", path.read_text())
    recipe = begin(path, (), tmp_path / "run", note=print)
    Policy().require(parse(tables(recipe_for_clients(recipe, 3))))
    held_out, _ = own_held_out(recipe, load_tokenizer(str(model_folder)))
    assert recipe.clients.cohort == 3
    assert recipe.network == NetworkTable(minimum=2), "the defaults, where they can be seen"
    assert "kept_back = 0.1 and send = true" in path.read_text()
    assert len(held_out.examples) == recipe.evaluation.generated == (2 if one_file else 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["0.jsonl", "--network"], "is one file, and says no number of clients; add it, as --clients 3"),
        (["0.jsonl", "--network", "--clients", 3, "--algorithm", "evofed"], "clients of evofed have to remember"),
        ([".", "--clients", 5], "has 3 files, one a client; leave --clients out"),
    ],
)
def test_what_a_network_or_a_folder_contradicts_is_refused(arguments, message, tmp_path, model_folder):
    parts = parts_of(tmp_path / "parts")
    source, *more = arguments
    asked = ["--data", parts / source, "--model", model_folder, "--no-estimate", *NAMED]
    assert message in refused("init", tmp_path / "r.toml", *asked, *more)


def test_clients_whose_policy_has_to_be_widened_are_a_warning(tmp_path, model_folder):
    asked = ["--model", model_folder, "--no-estimate", "--network", "--algorithm", "fedavg", *NAMED]
    done = fedkseed("init", tmp_path / "r.toml", "--data", parts_of(tmp_path / "parts"), *asked)
    assert done.exit_code == 0, done.output
    assert "default refuse this recipe: the server's recipe asks for [training] algorithm = 'fedavg'" in done.output
