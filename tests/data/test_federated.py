import json
import math
import re
import shutil
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedkseed import FedKSeedError, start
from fedkseed.data.federated import own_share, share_out
from fedkseed.models.load import load_tokenizer
from fedkseed.recipe.reading import load_recipe
from fedkseed.recipe.schema import Recipe
from fedkseed.report.page import holdings
from fedkseed.run.progress import Silent
from fedkseed.run.store import Store

from ..conftest import recipe_text, rows


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return load_tokenizer(str(model_folder))


def recipe(tmp_path: Path, model_folder: Path, source: Path, **changes: str) -> Recipe:
    changes = {"max_new_tokens": "max_new_tokens = 16"} | changes
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


def test_runs_of_several_seeds_can_share_their_held_out_rows(tmp_path, model_folder, data_file, tokenizer):
    changes = {"held_out": "held_out = 0.5\nseed = 7", "examples": "examples = 16\nvalidation = 6"}
    first, second = (
        share_out(recipe(tmp_path, model_folder, data_file, **changes).model_copy(update={"seed": seed}), tokenizer)
        for seed in (1, 2)
    )
    assert first.held_out == second.held_out
    assert first.sets == second.sets
    assert first.clients != second.clients
    alone = share_out(recipe(tmp_path, model_folder, data_file, held_out="held_out = 0.5"), tokenizer)
    assert {e.example for e in alone.held_out} - {e.example for e in first.held_out}


def test_longer_examples_are_left_out_and_counted(tmp_path, model_folder, data_file, tokenizer):
    short = share_out(recipe(tmp_path, model_folder, data_file), tokenizer)
    lengths = sorted(len(e.tokens) for part in short.clients for e in part)
    limit = lengths[len(lengths) // 2]
    changes = {"max_tokens": f"max_tokens = {limit}", "examples": "examples = 8\nmax_tokens = 500"}
    shares = share_out(recipe(tmp_path, model_folder, data_file, **changes), tokenizer)
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
    files = {"alpha": 'split = "files"', "count": ""}
    shares = share_out(recipe(tmp_path, model_folder, folder, cohort="active = 0.7", **files), tokenizer)
    assert len(shares.clients) == 3
    held_out_only = [json.dumps(row) + "\n" for row in rows() if row["category"] == "capital"]
    (folder / "3.jsonl").write_text("".join(held_out_only))
    with pytest.raises(FedKSeedError, match="client 3 has 0 examples"):
        share_out(recipe(tmp_path, model_folder, folder, **files), tokenizer)


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


FEW = "8 held-out rows can't say if the model becomes better: hold out 10 or more of them"
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}assistant: "
ALONE = {
    "alpha": 'split = "files"', "count": "", "held_out": "held_out = 0.2", "cohort": "cohort = 1",
    "max_tokens": "max_tokens = 400", "examples": "examples = 3", "min_examples": "min_examples = 1",
}  # fmt: skip


def turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def departments(path: Path) -> Path:
    """Three departments' files, in three formats and layouts, as other programs write them."""
    path.mkdir()
    asked = [(row["instruction"], row["response"]) for row in rows()]
    pd.DataFrame(asked[:10], columns=["prompt", "completion"]).to_csv(path / "hr.csv", index=False)
    chats = [{"messages": turns(*asked[k]) + turns(*asked[k + 1])} for k in range(10, 20)]
    (path / "it.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    pq.write_table(pa.Table.from_pylist([{"text": answer} for _, answer in asked[20:32]]), path / "legal.parquet")
    return path


def test_three_departments_files_are_three_clients_with_names(tmp_path, model_folder, tokenizer):
    said = list[str]()
    source = departments(tmp_path / "departments")
    shares = share_out(recipe(tmp_path, model_folder, source, **ALONE), tokenizer, said.append)
    assert shares.names == ["hr", "it", "legal"]
    assert said[:2] == ["hr.csv: 10 rows as prompt and completion", "it.jsonl: 10 rows as conversations"]
    assert said[2].startswith("legal.parquet: 12 rows as plain text")
    hr, it, legal = shares.clients
    assert all(len(e.counted) == 1 and e.prompt > 1 for e in hr)
    assert all(len(e.counted) == 2 for e in it)
    assert 4 <= len(hr) <= 10
    assert [e.prompt for e in legal] == [1], "its texts are packed into one block of less than 400 tokens"


def test_conversations_get_the_chat_template_if_the_recipe_names_none(tmp_path, model_folder, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    source = departments(tmp_path / "departments")
    shares = share_out(recipe(tmp_path, model_folder, source, **ALONE), tokenizer)
    assert shares.settled == {"template": "chat"}
    assert all(tokenizer.decode(e.tokens).startswith("user: ") for e in shares.clients[1])
    changes = ALONE | {"max_tokens": 'max_tokens = 400\ntemplate = "paper"'}
    named = share_out(recipe(tmp_path, model_folder, source, **changes), tokenizer)
    assert named.settled == {}
    assert all(tokenizer.decode(e.tokens).startswith("Below is") for e in named.clients[1])


@pytest.mark.parametrize(
    ("template", "named", "settled"),
    [
        (CHAT, "", {"template": "chat"}),
        (None, "", {"template": "plain", "separator": ""}),
        (None, 'separator = " "', {"template": "plain"}),
        ("{{ raise_exception('no') }}", "", {"template": "plain", "separator": ""}),
        (CHAT, 'template = "alpaca"', {}),
    ],
)  # fmt: skip
def test_a_model_of_plain_texts_is_asked_in_its_own_words(
    tmp_path, model_folder, data_file, tokenizer, monkeypatch, template, named, settled
):
    """An export of a run on texts alone had the paper's wording, in place of the model's chat template."""
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": row["response"]}) + "\n" for row in rows()))
    changes = {
        "held_out": "held_out = 0.2",
        "alpha": 'split = "even"',
        "max_tokens": "max_tokens = 30",
        "examples": "examples = 2",
    }
    asked = recipe(tmp_path, model_folder, tmp_path / "texts.jsonl", **changes)
    before = share_out(asked.having(data={"template": "paper"}), tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", template)
    changes["max_tokens"] = f"max_tokens = 30\n{named}"
    shares = share_out(recipe(tmp_path, model_folder, tmp_path / "texts.jsonl", **changes), tokenizer)
    assert shares.settled == settled
    assert shares.digest() == before.digest(), "rows are the same tokens in any words"


def test_instructions_keep_the_paper_s_wording_beside_a_chat_template(
    tmp_path, model_folder, data_file, tokenizer, monkeypatch
):
    asked = recipe(tmp_path, model_folder, data_file)
    before = share_out(asked, tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    after = share_out(asked, tokenizer)
    assert (after.digest(), after.settled) == (before.digest(), {})


class Notes(Silent):
    """A watcher that keeps what it is given to show."""

    def __init__(self) -> None:
        self.found = list[str]()

    def note(self, text: str) -> None:
        self.found.append(text)


def test_a_run_with_conversations_and_texts_learns_from_them_and_keeps_their_template(tmp_path, model_folder):
    model = shutil.copytree(model_folder, tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT}))
    source = departments(tmp_path / "departments")
    changes = ALONE | {"generated": "generated = 3", "cohort": "cohort = 3"}
    watcher = Notes()
    result = start(recipe(tmp_path, model, source, **changes), tmp_path / "run", watcher)
    assert "hr.csv: 10 rows as prompt and completion" in watcher.found
    assert [report["clients"] for report in result.reports] == [[0, 1, 2]] * 3
    assert all(math.isfinite(loss) for loss in result.after.losses)
    kept = load_recipe(tmp_path / "run" / "recipe.toml")
    assert kept.data.template == "chat"
    assert Store(tmp_path / "run").recall("clients")["names"] == ["hr", "it", "legal"]
    assert holdings(Store(tmp_path / "run"), result.reports)["names"] == ["hr", "it", "legal"]
    again = share_out(kept, load_tokenizer(str(model)))
    assert again.digest() == share_out(recipe(tmp_path, model, source, **changes), load_tokenizer(str(model))).digest()


def test_texts_of_two_clients_are_in_no_block_together(tmp_path, model_folder, tokenizer):
    folder = tmp_path / "clients"
    folder.mkdir()
    for name in ("ant", "bee"):
        texts = [f"{name} {k}" for k in range(50)]
        pd.DataFrame({"text": texts}).to_json(folder / f"{name}.jsonl", orient="records", lines=True)
    changes = ALONE | {"max_tokens": "max_tokens = 16", "examples": "examples = 2"}
    shares = share_out(recipe(tmp_path, model_folder, folder, **changes), tokenizer)
    for name, share in zip(("ant", "bee"), shares.clients, strict=True):
        joined = "".join(tokenizer.decode(e.tokens) for e in share)
        held_out = 50 - joined.count(name)
        assert joined.count(name) > 30
        assert not {"ant", "bee"} - {name} & set(joined.split())
        assert {len(e.tokens) for e in share[:-1]} == {16}
        assert 50 - held_out - joined.count("<end>") in (0, 1), "a last block of one token is left out"


def test_a_column_names_the_client_of_each_row(tmp_path, model_folder, tokenizer):
    table = pd.DataFrame(rows()).assign(department=["it", "hr", "legal"] * 12)
    table.to_csv(tmp_path / "all.csv", index=False)
    named = {
        "alpha": 'split = "column"', "count": "", "max_tokens": "max_tokens = 200\ncolumns = {client = 'Department'}",
    }  # fmt: skip
    shares = share_out(recipe(tmp_path, model_folder, tmp_path / "all.csv", **named), tokenizer)
    assert shares.names == ["hr", "it", "legal"]
    for name, share in zip(shares.names, shares.clients, strict=True):
        own = table[(table.department == name) & (table.category != "capital")]
        assert [e.example.instruction for e in share] == own.instruction.tolist()
    table.loc[4, "department"] = None
    table.to_csv(tmp_path / "all.csv", index=False)
    with pytest.raises(FedKSeedError, match=r"all.csv, line 6: no client is named; .* the column 'Department'"):
        share_out(recipe(tmp_path, model_folder, tmp_path / "all.csv", **named), tokenizer)
    with pytest.raises(FedKSeedError, match=r"dolly-sample.*has no column 'Department'"):
        share_out(recipe(tmp_path, model_folder, Path("dolly-sample"), **named), tokenizer)


def test_a_column_that_no_file_has_is_refused_even_if_the_usual_one_is_there(tmp_path, model_folder, tokenizer):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    named = {"max_tokens": 'max_tokens = 200\ncolumns = { response = "x" }'}
    expected = r"a.jsonl has no column 'x'; found: instruction, context, response, category. Mend the name"
    with pytest.raises(FedKSeedError, match=expected):
        share_out(recipe(tmp_path, model_folder, tmp_path / "a.jsonl", **named), tokenizer)
    with pytest.raises(FedKSeedError, match=expected):
        own_share(recipe(tmp_path, model_folder, tmp_path / "a.jsonl", **named), tokenizer)
    (tmp_path / "parts").mkdir()
    for name, field in (("a", "response"), ("b", "x")):
        made = [{field if key == "response" else key: value for key, value in row.items()} for row in rows()]
        (tmp_path / "parts" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    together = {"count": 'split = "files"', "max_tokens": 'max_tokens = 200\ncolumns = { response = "X" }'}
    shares = share_out(recipe(tmp_path, model_folder, tmp_path / "parts", **together), tokenizer)
    assert shares.clients[0] == shares.clients[1]  # a file of the usual names, and one of the recipe's
    neither = {**together, "max_tokens": together["max_tokens"].replace('"X"', '"y", category = "z"')}
    shutil.copy(tmp_path / "parts" / "a.jsonl", tmp_path / "parts" / "b.jsonl")
    with pytest.raises(FedKSeedError, match=r"none of 2 files, as .*a.jsonl, has a column 'y' or 'z'"):
        share_out(recipe(tmp_path, model_folder, tmp_path / "parts", **neither), tokenizer)


def test_a_folder_without_the_split_of_files_is_refused_with_the_remedy(tmp_path, model_folder, tokenizer):
    source = departments(tmp_path / "departments")
    with pytest.raises(FedKSeedError, match=r"departments is a folder: set .clients. split = 'files'"):
        share_out(recipe(tmp_path, model_folder, source), tokenizer)


def test_rows_are_counted_in_a_line_on_their_file_and_a_strict_recipe_refuses_them(tmp_path, model_folder, tokenizer):
    many = [*rows(), {**rows()[0], "response": ""}, rows()[1], {**rows()[2], "instruction": "long " * 200}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in many))
    said = list[str]()
    asked = recipe(tmp_path, model_folder, tmp_path / "a.jsonl")
    shares = share_out(asked, tokenizer, said.append)
    assert said == [
        "a.jsonl: 38 rows as instruction and response; 1 without a response left out, 1 repeated, 1 over 200 "
        "tokens left out",
        "warning: 1 of 26 training rows (3.85 %) over 200 tokens ([data] max_tokens) left out, the longest has 969: "
        "raise max_tokens up to the model's context of 512, or shorten or split them",
        FEW,
    ]
    assert shares.too_long == 1
    strict = {"max_tokens": "max_tokens = 200\nstrict = true"}
    with pytest.raises(FedKSeedError, match=r"a.jsonl, line 37: the response is empty"):
        share_out(recipe(tmp_path, model_folder, tmp_path / "a.jsonl", **strict), tokenizer)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in many if row not in (many[36], many[1])))
    with pytest.raises(FedKSeedError, match=r"a.jsonl, line 36: more than .data. max_tokens = 200 tokens"):
        share_out(recipe(tmp_path, model_folder, tmp_path / "a.jsonl", **strict), tokenizer)


def test_training_rows_that_equal_held_out_rows_are_counted(tmp_path, model_folder, tokenizer):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows() * 2))
    said = list[str]()
    asked = recipe(tmp_path, model_folder, tmp_path / "a.jsonl", held_out="held_out = 0.25")
    shares = share_out(asked, tokenizer, said.append)
    training = {e.example for part in shares.clients for e in part}
    (count,) = re.findall(r"36 repeated, (\d+) for training also held out$", said[0])
    assert 0 < int(count) <= 18  # of all held-out rows, of which 8 are evaluated
    also_trained = [k for k, e in enumerate(shares.held_out) if e.example in training]
    assert shares.also_trained == {"": also_trained}
    assert said[1] == FEW
    assert said[2].startswith(f"warning: {len(also_trained)} of 8 held-out rows are the same as training rows")
    assert len(said) == 3
    (tmp_path / "clients").mkdir()
    for name in ("a", "b"):  # within a file, repeated rows are refused before
        (tmp_path / "clients" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    lines = {"held_out": "held_out = 0.25\nstrict = true", "count": 'split = "files"'}
    with pytest.raises(FedKSeedError, match=r"jsonl, line \d+: a training row is the same as a held-out row"):
        share_out(recipe(tmp_path, model_folder, tmp_path / "clients", **lines), tokenizer)


def test_own_rows_of_a_client_that_others_train_on_are_counted(tmp_path, model_folder, tokenizer):
    (tmp_path / "clients").mkdir()
    for name in ("a", "b"):
        (tmp_path / "clients" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    lines = {"count": 'split = "files"', "examples": "examples = 8\nclients = 3"}
    said = list[str]()
    shares = share_out(recipe(tmp_path, model_folder, tmp_path / "clients", **lines), tokenizer, said.append)
    own = shares.sets["own rows"]
    trained = {e.example for part in shares.clients for e in part}
    count = sum(e.example in trained for e in own.examples)
    assert count > 0
    assert sum(map(len, shares.also_trained.values())) == len(shares.also_trained["own rows"]) == count
    assert any(line.startswith(f"warning: {count} of 14 held-out rows are the same as training rows") for line in said)


def test_held_out_rows_that_differ_by_case_space_or_punctuation_are_training_rows(tmp_path, model_folder, tokenizer):
    """Each held-out row is there once more for training, as somebody else types it."""

    def typed(row: dict[str, str], k: int) -> dict[str, str]:
        question = row["instruction"]
        ways = [question.upper(), f"  {question.replace(' ', '  ')}\n", question.rstrip("?."), f"“{question}”"]
        return row | {"instruction": ways[k % 4], "response": row["response"].rstrip("."), "category": "number"}

    capitals = [row for row in rows() if row["category"] == "capital"]
    every = [*rows(), *(typed(row, k) for k, row in enumerate(capitals))]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in every))
    said = list[str]()
    long = {"max_tokens": "max_tokens = 400"}  # capitals are many tokens
    shares = share_out(recipe(tmp_path, model_folder, tmp_path / "a.jsonl", **long), tokenizer, said.append)
    assert shares.also_trained == {"": [*range(8)]}
    assert said[-1].startswith("warning: 8 of 8 held-out rows are the same as training rows, but for capitals")
    strict = recipe(tmp_path, model_folder, tmp_path / "a.jsonl", max_tokens="max_tokens = 400\nstrict = true")
    with pytest.raises(FedKSeedError, match=r"line 37: a training row is the same as a held-out row"):
        share_out(strict, tokenizer)


def test_a_client_that_loses_most_of_its_rows_is_named(tmp_path, model_folder, tokenizer):
    (tmp_path / "clients").mkdir()
    for name, long in (("hr", 2), ("legal", 20)):
        made = [row | {"context": "word " * (60 * (k < long))} for k, row in enumerate(rows()[:24])]
        (tmp_path / "clients" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    lines = {"count": 'split = "files"', "held_out": "held_out = 0.1", "examples": "examples = 2"}
    said = list[str]()
    shares = share_out(recipe(tmp_path, model_folder, tmp_path / "clients", **lines), tokenizer, said.append)
    (line,) = [line for line in said if "less than half" in line]
    kept = len(shares.clients[1])
    assert re.fullmatch(f"warning: clients train on less than half of their rows: legal {kept} of \\d+", line)


def test_held_out_rows_that_are_too_long_are_counted_and_a_strict_recipe_refuses_them(
    tmp_path, model_folder, tokenizer
):
    long = {**rows()[0], "instruction": "long " * 60, "category": "capital"}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows(), long]))
    asked, said = recipe(tmp_path, model_folder, tmp_path / "a.jsonl"), list[str]()
    assert len(share_out(asked, tokenizer, said.append).held_out) == 8
    assert said == ["a.jsonl: 37 rows as instruction and response", said[1], FEW]
    assert said[1].startswith("warning: 1 of 13 held-out rows (7.69 %) over 200 tokens ([data] max_tokens) left out")
    limit = {"examples": "examples = 8\nmax_tokens = 500"}
    assert share_out(recipe(tmp_path, model_folder, tmp_path / "a.jsonl", **limit), tokenizer, said.append).held_out
    assert said[3:] == ["a.jsonl: 37 rows as instruction and response", FEW]  # a limit of its own lets it in
    strict = {"max_tokens": "max_tokens = 200\nstrict = true"}
    with pytest.raises(FedKSeedError, match=r"a.jsonl, line 37: more than .data. max_tokens = 200 tokens"):
        share_out(recipe(tmp_path, model_folder, tmp_path / "a.jsonl", **strict), tokenizer)


def test_the_clients_own_rows_have_their_names(tmp_path, model_folder, data_file, tokenizer):
    source = departments(tmp_path / "departments")
    (source / "legal.parquet").unlink()  # one block of text: too little
    lines = {
        "count": 'split = "files"', "examples": 'examples = "all"\nclients = 2', "max_tokens": "max_tokens = 400",
        "cohort": "cohort = 1",
    }  # fmt: skip
    asked = recipe(tmp_path, model_folder, source, held_out="held_out = 0.1", **lines)
    shares = share_out(asked, tokenizer)
    own = shares.sets["own rows"]
    assert sorted(own.owners) == ["hr", "hr", "it", "it"]
    for encoded, owner in zip(own.examples, own.owners, strict=True):
        assert encoded not in shares.clients[shares.names.index(owner)]
    assert [shares.name(k) for k in range(2)] == ["hr", "it"]
    even = {"alpha": 'split = "even"', "examples": "examples = 8\nclients = 1"}
    unnamed = share_out(recipe(tmp_path, model_folder, data_file, **even), tokenizer)
    assert sorted(unnamed.sets["own rows"].owners) == [f"client {k}" for k in range(4)]


def test_of_many_files_the_first_have_lines_and_the_others_one(tmp_path, model_folder, tokenizer):
    folder = tmp_path / "clients"
    folder.mkdir()
    said = list[str]()
    for number in range(20):
        made = [{**row, "instruction": f"{number}: {row['instruction']}"} for row in rows()]
        (folder / f"{number:02}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    share_out(recipe(tmp_path, model_folder, folder, **ALONE), tokenizer, said.append)
    names = [line.partition(":")[0] for line in said]
    assert names == [*(f"{k:02}.jsonl" for k in range(11)), "9 more files", FEW.replace("8", "3").partition(":")[0]]
    assert said[-2] == "9 more files: 324 rows"


def test_a_client_keeps_back_the_same_rows_whatever_the_recipe_and_whatever_rows_come(
    tmp_path, model_folder, tokenizer
):
    def own(many, kept_back, **changes):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in many))
        asked = recipe(tmp_path, model_folder, tmp_path / "a.jsonl", examples='examples = "all"', **changes)
        trained, unseen, _ = own_share(asked, tokenizer, kept_back=kept_back)
        return [e.example for e in trained], [e.example for e in unseen.examples]

    trained, unseen = own(rows(), 0.5)
    assert len(trained) + len(unseen) == 24
    assert 4 < len(unseen) < 20  # of 24 rows with an even chance each, but for one of a thousand
    assert not {*trained} & {*unseen}
    assert own(rows(), 0.5, seed="seed = 8") == (trained, unseen)
    assert own(rows()[::-1], 0.5) == (trained[::-1], unseen)
    again = own(rows() * 2, 0.5)
    assert {*again[0]} == {*trained}
    assert {*again[1]} == {*unseen}
    more = [{**row, "instruction": f"{row['instruction']} Now."} for row in rows()]
    assert {*unseen} < {*own([*rows(), *more], 0.5)[1]}
    assert {*own(rows(), 0.2)[1]} < {*unseen}
    assert own(rows(), 0.0)[1] == []


def test_a_client_with_its_own_file_has_its_conversations_and_packed_texts(tmp_path, model_folder, tokenizer):
    source, limit = departments(tmp_path / "departments"), {"max_tokens": "max_tokens = 400"}
    said = list[str]()
    talks, *_ = own_share(recipe(tmp_path, model_folder, source / "it.jsonl", **limit), tokenizer, said.append)
    assert said == ["it.jsonl: 10 rows as conversations"]
    assert [len(e.counted) for e in talks] == [2] * 10
    texts, *_ = own_share(recipe(tmp_path, model_folder, source / "legal.parquet", **limit), tokenizer)
    expected = "".join(f"{row['response']}<end>" for row in rows()[20:32])
    assert "".join(tokenizer.decode(e.tokens) for e in texts) == expected


def test_files_that_share_rows_are_named_with_their_number_before_a_run(tmp_path, model_folder, tokenizer):
    folder, said = tmp_path / "clients", list[str]()
    folder.mkdir()
    for name, own in (("hr", rows()), ("hr (Copy)", rows()), ("it", [{**row, "context": "it"} for row in rows()])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    share_out(recipe(tmp_path, model_folder, folder, **ALONE), tokenizer, said.append)
    (shared,) = [line for line in said if "share rows" in line]
    assert f"warning: files share rows: hr (Copy).jsonl and hr.jsonl ({len(rows())}); is one a copy?" in shared
    (leak,) = [line for line in said if "held-out rows are the same" in line]
    assert "training rows of hr (Copy).jsonl, hr.jsonl, but" in leak


def test_of_many_pairs_of_files_that_share_rows_the_first_are_named(tmp_path, model_folder, tokenizer):
    folder, said = tmp_path / "clients", list[str]()
    folder.mkdir()
    for number in range(9):
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    share_out(recipe(tmp_path, model_folder, folder, **ALONE), tokenizer, said.append)
    (shared,) = [line for line in said if "share rows" in line]
    assert "0.jsonl and 1.jsonl (36), 0.jsonl and 2.jsonl (36), 0.jsonl and 3.jsonl (36) and 5 more; is" in shared
