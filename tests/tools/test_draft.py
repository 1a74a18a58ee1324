"""A first recipe: it follows from the data, has comments, and runs as it is."""

import json

import pytest

from fedkseed.models.load import load_tokenizer
from fedkseed.recipe.reading import own_recipe
from fedkseed.run.store import Store
from fedkseed.tools.draft import look

from ..conftest import rows
from ..test_cli import fedkseed, refused


def test_the_recipe_runs_as_it_is(data_file, model_folder, tmp_path):
    path = tmp_path / "mine.toml"
    result = fedkseed("init", path, "--data", data_file, "--model", model_folder)
    assert result.exit_code == 0, result.output
    for text in ("36 rows in 3 categories", "a run of fedkseed-plus, which was not begun", f"fedkseed run {path}"):
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
    (tmp_path / "parts").mkdir()
    for number in range(3):
        made = [{"q": f"Is {k} odd?", "a": ["no", "yes"][k % 2]} for k in range(number, 60, 3)]
        (tmp_path / "parts" / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    named = ["--column", "instruction=q", "--column", "response=a"]
    path = tmp_path / "r.toml"
    result = fedkseed(
        "init", path, "--data", tmp_path / "parts", "--model", model_folder, *named, "--no-estimate", "--json"
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["data"]["rows"], document["data"]["labels"], document["data"]["files"]) == (60, 2, 3)
    assert document["costs"] is None
    recipe = own_recipe(path)
    assert (recipe.clients.split, recipe.clients.cohort, recipe.clients.count) == ("files", 3, None)
    assert recipe.evaluation.metrics == ["choice", "exact match"]
    assert recipe.data.columns == {"instruction": "q", "response": "a"}


def test_lengths_are_those_of_the_tokens(data_file, model_folder):
    found = look(str(data_file), {}, load_tokenizer(str(model_folder)))
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
        (
            ["--data", "D", "--model", "M", "--column", "q"],
            "--column takes FIELD=NAME, as instruction=question, got 'q'",
        ),
        (["--data", "no.jsonl", "--model", "M"], "no data file at no.jsonl"),
        (["--data", "FEW", "--model", "M"], "has 3 rows; a federation of two clients needs 20 at least"),
    ],
)
def test_what_is_lacking_is_said_and_nothing_is_written(tmp_path, data_file, model_folder, arguments, message):
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()[:3]))
    places = {"D": data_file, "M": model_folder, "FEW": tmp_path / "few.jsonl"}
    assert message in refused("init", tmp_path / "r.toml", *(places.get(one, one) for one in arguments))
    assert not (tmp_path / "r.toml").exists()
