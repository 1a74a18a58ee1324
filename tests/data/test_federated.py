import json
from pathlib import Path

import pytest

from fedkseed import FedKSeedError
from fedkseed.data.federated import share_out
from fedkseed.models.load import load_tokenizer
from fedkseed.recipe.reading import load_recipe
from fedkseed.recipe.schema import Recipe

from ..conftest import recipe_text, rows


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return load_tokenizer(str(model_folder))


def recipe(tmp_path: Path, model_folder: Path, source: Path, **changes: str) -> Recipe:
    (tmp_path / "recipe.toml").write_text(recipe_text(model_folder, source, **changes))
    return load_recipe(tmp_path / "recipe.toml")


def test_a_held_out_category_is_with_no_client(tmp_path, model_folder, data_file, tokenizer):
    shares = share_out(recipe(tmp_path, model_folder, data_file), tokenizer)
    assert {e.example.category for e in shares.held_out} == {"capital"}
    assert {e.example.category for part in shares.clients for e in part} == {"colour", "number"}
    assert sum(map(len, shares.clients)) == 24


def test_a_share_held_out_is_random_and_disjoint(tmp_path, model_folder, data_file, tokenizer):
    shares = share_out(recipe(tmp_path, model_folder, data_file, held_out="held_out = 0.25"), tokenizer)
    training = [e.example for part in shares.clients for e in part]
    assert len(training) == 27
    assert not {e.example for e in shares.held_out} & set(training)


def test_longer_examples_are_left_out_and_counted(tmp_path, model_folder, data_file, tokenizer):
    short = share_out(recipe(tmp_path, model_folder, data_file), tokenizer)
    lengths = sorted(len(e.tokens) for part in short.clients for e in part)
    limit = lengths[len(lengths) // 2]
    text = recipe_text(model_folder, data_file, max_tokens=f"max_tokens = {limit}").replace(
        "[evaluation]", "[evaluation]\nmax_tokens = 500"
    )
    (tmp_path / "r.toml").write_text(text)
    shares = share_out(load_recipe(tmp_path / "r.toml"), tokenizer)
    kept = [len(e.tokens) for part in shares.clients for e in part]
    assert max(kept) <= limit
    assert len(kept) + shares.too_long == 24
    assert shares.too_long > 0


def test_one_file_a_client(tmp_path, model_folder, tokenizer):
    folder = tmp_path / "clients"
    folder.mkdir()
    for number in range(4):
        part = rows()[number::4]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    files = {"alpha": 'split = "files"'}
    shares = share_out(recipe(tmp_path, model_folder, folder, **files), tokenizer)
    for number, part in enumerate(shares.clients):
        expected = [row["instruction"] for row in rows()[number::4] if row["category"] != "capital"]
        assert [e.example.instruction for e in part] == expected
    with pytest.raises(FedKSeedError, match=r"holds the data of 4 clients, .clients. count says 5"):
        share_out(recipe(tmp_path, model_folder, folder, count="count = 5", **files), tokenizer)
    with pytest.raises(FedKSeedError, match=r"client 0 has 6 examples .* min_examples says 7"):
        share_out(recipe(tmp_path, model_folder, folder, min_examples="min_examples = 7", **files), tokenizer)


def test_with_files_the_number_of_clients_need_not_be_known(tmp_path, model_folder, tokenizer):
    folder = tmp_path / "clients"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    shares = share_out(
        recipe(tmp_path, model_folder, folder, alpha='split = "files"', count="", cohort="active = 0.7"), tokenizer
    )
    assert len(shares.clients) == 3
    held_out_only = [json.dumps(row) + "\n" for row in rows() if row["category"] == "capital"]
    (folder / "3.jsonl").write_text("".join(held_out_only))
    with pytest.raises(FedKSeedError, match="client 3 has 0 examples"):
        share_out(recipe(tmp_path, model_folder, folder, alpha='split = "files"', count=""), tokenizer)


def test_the_official_code_cuts_long_rows(tmp_path, model_folder, data_file, tokenizer):
    """A limit between the lengths: the paper leaves out the longer ones, the code keeps their first tokens."""
    whole = share_out(recipe(tmp_path, model_folder, data_file), tokenizer)
    prompts = sorted(e.prompt for part in whole.clients for e in part)
    limit = prompts[-1] + 2
    changes = {"max_tokens": f"max_tokens = {limit}", "alpha": 'split = "even"', "examples": "examples = 2"}
    paper = share_out(recipe(tmp_path, model_folder, data_file, **changes), tokenizer)
    changes["max_tokens"] += '\nprotocol = "official-code"\ntemplate = "paper"\nseparator = "\\n"'
    code = share_out(recipe(tmp_path, model_folder, data_file, **changes), tokenizer)
    assert paper.too_long > 0 == code.too_long
    assert max(len(e.tokens) for part in code.clients for e in part) == limit
    assert sum(map(len, code.clients)) == sum(map(len, whole.clients)) == 24
    changes["max_tokens"] = changes["max_tokens"].replace(str(limit), str(prompts[-1]))
    code = share_out(recipe(tmp_path, model_folder, data_file, **changes), tokenizer)
    assert code.too_long == prompts.count(prompts[-1])  # a prompt that fills the limit leaves no response


def test_an_even_split(tmp_path, model_folder, data_file, tokenizer):
    shares = share_out(recipe(tmp_path, model_folder, data_file, alpha='split = "even"'), tokenizer)
    assert [len(part) for part in shares.clients] == [6, 6, 6, 6]


def test_the_digest_tells_other_data(tmp_path, model_folder, data_file, tokenizer):
    one, two = (share_out(recipe(tmp_path, model_folder, data_file), tokenizer).digest() for _ in range(2))
    other = share_out(recipe(tmp_path, model_folder, data_file, seed="seed = 4"), tokenizer).digest()
    assert one == two != other


def test_all_held_out_examples_can_be_asked_for(recipe_file):
    recipe = load_recipe(recipe_file)
    every = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"examples": "all"})})
    assert len(share_out(every, load_tokenizer(recipe.model.name)).held_out) == 12  # the category has 12
