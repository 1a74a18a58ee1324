"""Errors have a place: all faults of a file in one answer, and rows that its owner wants left out, counted."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkseed import FedKSeedError
from fedkseed.data.federated import own_share, share_out
from fedkseed.data.sources import FAULTS_SHOWN, Reader
from fedkseed.models.load import load_tokenizer
from fedkseed.network.protocol.client.policy import Policy, RowLimits
from fedkseed.network.protocol.networked_recipe import recipe_for_clients
from fedkseed.recipe.reading import load_recipe

from ..commands import fedkseed, refused

GOOD = {"prompt": "q", "completion": "a"}
# A line that can't be a row -> words of its reason.
FAULTY = {
    '{"prompt": "q", "compl': "not valid JSON",
    '{"prompt": "q", "completion": "a", "completion": "b"}': "the key 'completion' is there twice",
    "[1]": "expected a JSON object, got list",
    '{"prompt": "q", "answer": "a"}': "no column completion; columns found: prompt, answer",
    '{"prompt": 5, "completion": "a"}': "prompt must be text, got int",
    '{"prompt": "q", "completion": ["a"]}': "completion must be text, got list",
    '{"prompt": "q", "completion": "\\ud800"}': "half a character",
    '{"prompt": "q", "completion": "a", "images": ["a.png"]}': "pictures, sounds and films are not read",
    '{"prompt": "q", "completion": "a", "weight": 0.5}': "a row is learned or left out",
}


def written(folder: Path, lines: list[str]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(FedKSeedError) as raised:
        Reader(**options).file(str(path))
    return str(raised.value)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["good", *FAULTY]), min_size=1, max_size=30))
def test_every_faulty_row_is_named_with_its_line_or_left_out_and_counted(tmp_path_factory, kinds):
    folder = tmp_path_factory.mktemp("rows")
    path = written(folder, [json.dumps(GOOD), *(json.dumps(GOOD) if kind == "good" else kind for kind in kinds)])
    faults = [(f"line {k}: ", FAULTY[kind]) for k, kind in enumerate(kinds, 2) if kind != "good"]
    if not faults:
        assert len(Reader().file(str(path)).examples) == 1 + len(kinds)
        return
    text = refusal(path)
    assert text.startswith(str(path))
    assert "[data] leave_out_faulty = true" in text
    for place, reason in faults[:FAULTS_SHOWN]:
        assert re.search(rf"{place.replace(': ', '')}\b", text)
        assert reason in text
    assert (f"{len(faults)} faulty rows" in text) == (len(faults) > 1)
    file = Reader(leave_out_faulty=True).file(str(path))
    assert file.places == [f"line {k}" for k, kind in enumerate(["good", *kinds], 1) if kind == "good"]
    count = f"{len(faults)} faulty row{'s' * (len(faults) > 1)} left out: line "
    assert count in file.summary()


def test_messages_have_their_place_and_a_strict_reader_names_all_rows(tmp_path):
    chat = [{"role": "user", "content": "q"}, {"role": "judge", "content": "a"}]
    good = {"messages": [chat[0], {"role": "assistant", "content": "a"}]}
    path = written(tmp_path, [json.dumps(good), json.dumps({"messages": chat}), json.dumps({"messages": ["a"]})])
    assert "rows.jsonl, line 2, message 2: role is one of" in refusal(path)
    assert "; line 3, message 1: expected an object" in refusal(path)
    path = written(tmp_path, [json.dumps(row) for row in (GOOD, GOOD, {**GOOD, "completion": ""})])
    text = refusal(path, strict=True)
    assert "line 2: the row is the same as that of line 1; line 3: the response is empty" in text
    assert "set [data] strict = false" in text


@pytest.mark.parametrize("row", ["q,a,b", "q", '"q\nr"'])
def test_a_ragged_row_of_csv_is_left_out_alone(tmp_path, row):
    (tmp_path / "a.csv").write_text(f"prompt,completion\nq,a\n{row}\nr,b\n")
    assert "a.csv, line 3: " in refusal(tmp_path / "a.csv")
    file = Reader(leave_out_faulty=True).file(str(tmp_path / "a.csv"))
    assert [example.instruction for example in file.examples] == ["q", "r"]
    assert file.places[1] == f"line {4 + row.count(chr(10))}"
    assert "1 faulty row left out: line 3: " in file.summary()


DAMAGED = {
    "cut.json": b'[{"prompt": "q", "completion": "a"}, {"prompt": ',
    "mixed.jsonl": json.dumps(GOOD).encode() + '\n{"prompt": "äö", "completion": "'.encode() + b'\xe4"}\n',
    "open.csv": b'prompt,completion\nq,a\nr,"b\n',
    "header.csv": b"a question,an answer\nq,a\n",
    "names.csv": b"prompt,prompt\nq,a\n",
    "mixed.csv": "prompt,completion\nq,öü\n".encode() + b"q,\xe4\n",
    "none.jsonl": b'{"prompt": "q"\n',
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_whatever_its_owner_asks(tmp_path, name):
    (tmp_path / name).write_bytes(DAMAGED[name])
    texts = {refusal(tmp_path / name, leave_out_faulty=ask) for ask in (True, False)}
    assert all(name in text for text in texts)
    if name != "none.jsonl":
        assert len(texts) == 1
        assert "leave_out_faulty" not in texts.pop()


def test_faults_before_the_damage_are_named_with_it(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(f'{json.dumps(GOOD)}\n["ä"]\n'.encode() + b'"\xe4"\n')
    text = refusal(tmp_path / "a.jsonl")
    assert "line 2: expected a JSON object, got list; line 3: not valid UTF-8 (byte 0xE4 at 2, perhaps of Wind" in text


def test_a_first_row_of_other_columns_is_one_fault_and_a_file_of_them_says_what_is_expected(tmp_path):
    about = '{"version": 1, "about": "rows"}'
    assert "rows.jsonl, line 1: no column" in refusal(written(tmp_path, [about, json.dumps(GOOD)]))
    file = Reader(leave_out_faulty=True).file(str(written(tmp_path, [about, json.dumps(GOOD)])))
    assert (file.layout.name, file.columns, len(file.faults)) == ("prompt-completion", ["prompt", "completion"], 1)
    text = refusal(written(tmp_path, [about] * 40), leave_out_faulty=True)
    assert "line 1: no column" in text
    assert "prompt and completion (prompt-completion)" in text
    assert "line 2" not in text


def test_all_rows_without_a_client_are_named_or_left_out(recipe_for):
    rows = [GOOD | {"client": client} for client in ["it", "hr", None, "it", ""] * 4]
    changes = {"split": 'split = "column"', "count": ""}
    recipe = load_recipe(recipe_for("plain", rows, **changes))
    tokenizer = load_tokenizer(recipe.model.name)
    with pytest.raises(
        FedKSeedError, match=r"line 3: no client is named; .* .so line 5, line 8, .* line 20.; 8 faulty rows: "
    ):
        share_out(recipe, tokenizer)
    recipe = load_recipe(recipe_for("plain", rows, **changes, held_out="held_out = 0.2\nleave_out_faulty = true"))
    lines = list[str]()
    shares = share_out(recipe, tokenizer, lines.append)
    assert shares.names == ["hr", "it"]
    assert sum(map(len, [*shares.clients, shares.held_out])) == 12
    assert "8 faulty rows left out: line 3: no client is named" in lines[0]


def test_the_owner_of_a_client_asks_in_the_policy_and_a_server_can_t(recipe_for):
    path = recipe_for("plain", [GOOD] * 12 + [GOOD | {"prompt": 5}], held_out="held_out = 0.2\nleave_out_faulty = true")
    recipe = load_recipe(path)
    assert b"leave_out_faulty" not in recipe_for_clients(recipe, 2)
    tokenizer = load_tokenizer(recipe.model.name)
    with pytest.raises(FedKSeedError, match="line 13: prompt must be text, got int"):
        own_share(Policy().followed(recipe), tokenizer)
    lines = list[str]()
    followed = Policy(data=RowLimits(leave_out_faulty=True)).followed(recipe)
    assert len(own_share(followed, tokenizer, lines.append)[0]) == 12
    assert "1 faulty row left out: line 13: prompt must be text, got int" in lines[0]


def test_the_command_line_shows_all_faults_in_its_one_line(recipe_for):
    rows = [GOOD] * 20 + [GOOD | {"prompt": k} for k in range(30)]
    text = refused("preview", recipe_for("plain", rows))
    assert "line 21: prompt must be text, got int: write it as text (so line 22, line 23, " in text
    assert "line 41 and 9 more); 30 faulty rows: [data] leave_out_faulty = true leaves such rows out" in text
    output = fedkseed("preview", recipe_for("plain", rows), "--set", "data.leave_out_faulty=true").output
    assert "20 rows as prompt and completion; 19 repeated" in output
    assert "30 faulty rows left out: line 21: prompt must be text, got int" in output


SAID = [json.dumps({"instruction": f"Say {k}", "response": str(k)}) for k in range(2)]


def test_faults_in_the_files_of_several_clients_are_in_one_answer(tmp_path: Path) -> None:
    for name, lines in (("a", SAID), ("b", [*SAID, "{"]), ("c", [SAID[0], "[]", *SAID])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(FedKSeedError) as refused:
        Reader().folder(str(tmp_path))
    first, second = str(refused.value).splitlines()
    assert "b.jsonl, line 3" in first
    assert "c.jsonl, line 2" in second
