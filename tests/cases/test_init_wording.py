"""`init` measures lengths in the words of the run, and says in the recipe which they are."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkseed import FedKSeedError
from fedkseed.data.federated import share_out
from fedkseed.models.load import load_tokenizer
from fedkseed.planning.init import draft, summary
from fedkseed.recipe.reading import load_recipe

from ..commands import documented, fedkseed, refused


def talks(count, words=1):
    """Conversations, the later ones longer."""
    said = [
        [("user", f"What is {k} plus 0?"), ("assistant", f"It is {k}." + " so" * (k * words))] for k in range(count)
    ]
    return [{"messages": [{"role": role, "content": text} for role, text in each]} for each in said]


def questions(count):
    return [{"instruction": f"What is {k} plus 0?", "response": f"It is {k}."} for k in range(count)]


@pytest.fixture
def init(tiny_model, tmp_path):
    """Writes a recipe for rows with `init`; returns its path, its text and the document."""

    def write(model, rows, *options):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        path, asked = tmp_path / "made.toml", ["--data", tmp_path / "rows.jsonl", "--model", tiny_model(model)]
        path.unlink(missing_ok=True)
        document = documented("init", path, *asked, "--no-estimate", *options)
        return path, path.read_text(), document

    return write


@pytest.mark.parametrize("model", ["longsys", "alternate", "plain", "dated"])
@pytest.mark.parametrize("words", [0, 2, 12])
def test_lengths_are_those_of_the_run(init, tiny_model, model, words):
    path, text, document = init(model, talks(40, words))
    tokenizer, recipe = load_tokenizer(str(tiny_model(model))), load_recipe(path)
    shares = share_out(recipe, tokenizer)
    kept = [len(e.tokens) for part in (*shares.clients, shares.held_out) for e in part]
    (comment,) = re.findall(r"(?m)^max_tokens = \d+ # (.*)$", text)
    too_long = document["data"]["too_long"]
    assert len(kept) == 40 - too_long
    assert recipe.data.max_tokens <= tokenizer.model_max_length
    if too_long:
        assert f"{too_long} rows ({100 * too_long / 40:.3g} %) are longer and left out" in comment
        left_out = [line for line in document["notes"] if line.startswith("warning: ") and "left out" in line]
        assert sum(int(line.split()[1]) for line in left_out) == too_long
        assert recipe.data.max_tokens == tokenizer.model_max_length
    else:
        assert comment.endswith("none is left out")
        assert document["data"]["tokens"][2] == max(kept)
    assert recipe.data.template == ("paper" if model == "plain" else "chat")
    assert (recipe.data.date is None) == (model != "dated")


def test_a_recipe_says_which_words_a_question_has(init):
    assert '\ntemplate = "chat" # the model\'s own chat template' in init("chatml", questions(40))[1]
    assert (
        '\ntemplate = "paper" # the wording of the paper, as the model has no chat' in init("plain", questions(40))[1]
    )


def test_a_template_that_can_word_no_row_is_not_taken(init, tiny_model, tmp_path):
    folder = tmp_path / "broken"
    tokenizer = load_tokenizer(str(tiny_model("alternate")))
    tokenizer.chat_template = "{{ raise_exception('not\nhere') }}"
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(tiny_model("alternate") / name)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions(40)))
    made = tmp_path / "made.toml"
    documented("init", made, "--data", tmp_path / "rows.jsonl", "--model", folder, "--no-estimate")
    assert load_recipe(made).data.template == "paper"
    assert "# the wording of the paper, as the model's chat template can't be used: TemplateError: not here" in (
        made.read_text()
    )


def test_a_conversation_that_a_run_would_refuse_is_named(init, tiny_model, tmp_path):
    rows = talks(40)
    rows[7]["messages"].insert(0, {"role": "user", "content": "Hello"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ["--data", tmp_path / "rows.jsonl", "--model", tiny_model("alternate"), "--no-estimate"]
    assert "rows.jsonl, line 8: " in refused("init", tmp_path / "r.toml", *asked)


def test_warnings_are_said(tiny_model, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks(40, 20)))
    asked = ["--data", tmp_path / "rows.jsonl", "--model", tiny_model("longsys"), "--no-estimate"]
    assert "warning: " in fedkseed("init", tmp_path / "r.toml", *asked).output


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(0, 1500), min_size=20, max_size=40))
def test_the_limit_keeps_all_rows_or_the_comment_says_how_many_are_lost(tmp_path_factory, tiny_model, lengths):
    folder, tokenizer = tmp_path_factory.mktemp("rows"), load_tokenizer(str(tiny_model("plain")))
    tokenizer.model_max_length = 1500  # as one of a model with another context
    rows = [{"instruction": f"{k}?", "response": " so" * size} for k, size in enumerate(lengths)]
    rows = [row | {"response": row["response"] or "no"} for row in rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = summary(str(folder / "rows.jsonl"), {}, tokenizer)
    (folder / "r.toml").write_text(draft(data, "m", "answers", "fedkseed-backprop", clients=2))
    try:
        shares = share_out(load_recipe(folder / "r.toml"), tokenizer)
    except FedKSeedError:
        if data.too_long < len(rows) // 10:  # or else the tenth that is held out may be of too long rows alone
            raise
        return
    kept = [len(e.tokens) for part in (*shares.clients, shares.held_out) for e in part]
    assert len(kept) == len(rows) - data.too_long
    assert max(kept) <= data.max_tokens <= 1500
    if data.tokens[2] <= 1024:
        assert data.too_long == 0
