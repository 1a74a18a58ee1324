"""Nothing that a user gave is dropped in silence: flags, keys, columns, labels, names, and files of many programs."""

import csv
import io
import json
from collections import Counter
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from datasets import ClassLabel, Dataset, Features, Value
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkseed import FedKSeedError
from fedkseed.data.federated import share_out
from fedkseed.data.layouts import AFTER, FLAGS, SKIPPED, UNREAD_COLUMNS, UNREAD_KEYS, Example, Turn, fit
from fedkseed.data.sources import DataFile, Reader
from fedkseed.models.load import load_tokenizer
from fedkseed.recipe.reading import load_recipe
from fedkseed.run.start_and_resume import resume, start
from fedkseed.run.store import Store

from ..commands import documented, fedkseed

USER, ANSWER = {"role": "user", "content": "Order?"}, {"role": "assistant", "content": "It is on its way."}
WRONG = {"role": "assistant", "content": "WRONG7"}
LETTERS = st.text("abc ä\u0308é;,|\t\"'\n", max_size=12)


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path, **settings_: Any) -> DataFile:
    return Reader(**settings_).file(str(path))


def example(row: dict[str, Any], counts: Counter[str] | None = None) -> Example:
    return fit(row, {}, None, "line 1").example(row, "line 1", counts)


FLAGGED = {
    **{
        f"{name} {no}": {"messages": [USER, WRONG | {name: no}, USER, ANSWER]}
        for name in FLAGS
        for no in (0, False, 0.0)
    },
    "two that agree": {"messages": [USER, WRONG | {"weight": 0, "train": False}, USER, ANSWER | {"weight": 1}]},
    "loss_mask": {"messages": [USER, WRONG, USER, ANSWER], "loss_mask": [0, 0, 0, 1]},
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "Order?"},
            {"from": "gpt", "value": "WRONG7", "Train": False},
            {"from": "human", "value": "Order?"},
            {"from": "gpt", "value": "It is on its way.", "train": True},
        ]
    },
}


@pytest.mark.parametrize("name", FLAGGED)
def test_an_answer_that_the_data_marks_is_not_counted(name):
    turns = Turn("user", "Order?"), Turn("assistant", "WRONG7", counted=False), Turn("user", "Order?")
    assert example(FLAGGED[name]) == Example("Order?", "It is on its way.", turns=turns)


def test_no_token_of_such_an_answer_is_in_the_loss(recipe_for):
    rows = [{"messages": [USER, WRONG | {"weight": 0}, USER, ANSWER | {"content": f"Way {k}."}]} for k in range(24)]
    recipe = load_recipe(recipe_for("chatml", rows))
    tokenizer = load_tokenizer(recipe.model.name)
    for encoded in (e for client in share_out(recipe, tokenizer).clients for e in client):
        counted = "".join(tokenizer.decode(encoded.tokens[begin:end]) for begin, end in encoded.counted)
        assert "Way" in counted
        assert "WRONG" not in counted
        assert "WRONG7" in tokenizer.decode(encoded.tokens)


@pytest.mark.parametrize("flag", [0.5, 2, "yes", "0", [1], {"a": 1}, -1])
def test_a_flag_that_says_neither_yes_nor_no_is_refused(flag):
    with pytest.raises(FedKSeedError, match=r"line 1, message 2: the loss counts an answer or skips it.*got weight = "):
        example({"messages": [USER, ANSWER | {"weight": flag}]})


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"messages": [USER, ANSWER | {"weight": 0, "train": True}]}, "weight = 0, train = True say different things"),
        (
            {"messages": [USER | {"loss": True}, ANSWER]},
            "message 1: loss = True, and the loss counts answers of the ass",
        ),
        (
            {"messages": [USER, ANSWER], "loss_mask": [1, 1]},
            "message 1: loss_mask of the row = 1, and",
        ),
        ({"messages": [USER, ANSWER], "loss_mask": [1]}, "loss_mask must be a list of 2, .* got 1 entries"),
        ({"messages": [USER, ANSWER], "loss_mask": "01"}, "loss_mask must be a list of 2, .* got str"),
        ({"messages": [USER, ANSWER], "loss_mask": [0, 0.5]}, "message 2: the loss counts an answer or skips it"),
        ({"prompt": "q", "completion": "a", "loss_mask": [1]}, "a mask goes with messages"),
        ({"prompt": "q", "completion": "a", "weight": 0.5}, "column weight: a row is learned or left out"),
        ({"prompt": "q", "completion": "a", "weight": "0.5"}, "column weight: a row is learned or left out"),
        ({"prompt": "q", "completion": "a", "label": False}, "marked as not wanted"),
        *(({"messages": [USER, ANSWER], "kto_tag": no}, "marked as not wanted") for no in (False, 0, "0")),
        ({"messages": [USER, ANSWER], "functions": '{"name": "f"}'}, "definitions of tools are not read"),
        (
            {"messages": [USER, {"role": "assistant", "text": "a"}]},
            "message 2: no content and no value; keys found: role",
        ),
        ({"messages": [USER, ANSWER | {"Content": "b"}]}, "message 2: two keys differ by case"),
        ({"messages": [USER | {"content": {"type": "image_url"}}, ANSWER]}, "parts that are no text, as 'image_url'"),
        ({"messages": [USER, ANSWER], "tools": '[{"name": "f"}]'}, "definitions of tools are not read"),
        ({"instruction": "q", "output": "a", "tools": "f()"}, "definitions of tools are not read"),
        (
            {"instruction": "q", "output": "a", "history": "[['b', 'c'], and more]"},
            "column history: expected a list of pairs",
        ),
        ({"instruction": "q", "output": "a", "history": [["b"]]}, "column history: expected a list of pairs"),
        (
            {"messages": [{"role": "system", "content": "A"}, USER, ANSWER], "system": "B"},
            "column system and a message",
        ),
        ({"PROMPT": "q", "Prompt": "r", "completion": "a"}, "'PROMPT' and 'Prompt' differ by case or form alone"),
        ({"messages": [USER, ANSWER], "functions": [{"name": "f"}]}, "definitions of tools are not read"),
        ({"query": "q", "answer": "a", "tools": '[{"name": "f"}]'}, "definitions of tools are not read"),
        (
            {"messages": [USER, ANSWER], "chat_template_kwargs": {"enable_thinking": False}},
            "options of the chat",
        ),
        (
            {"messages": [USER, ANSWER, USER], "chosen": ANSWER},
            "end with a request, and the column chosen",
        ),
        ({"messages": [USER], "response": "a"}, "end with a request, and the column response"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preferences between answers are not read"),
        ({"question": {"0": "q", "1": "r"}, "answer": {"0": "a"}}, r"to_json\(orient='records'\)"),
        ({"messages": [USER | {"content": {"city": "Rome"}}, ANSWER]}, "parts that are no text, as an object of city"),
        *(({"messages": [USER, ANSWER | {key: "x"}]}, f"message 2: .*key {key}") for key in UNREAD_KEYS),
        *(({"messages": [USER, ANSWER], c: [{"name": "f"}]}, f"column {c}|list of 2") for c in UNREAD_COLUMNS),
    ],
)
def test_what_can_t_be_obeyed_and_would_change_what_is_learned_is_refused_with_its_key(row, match):
    with pytest.raises(FedKSeedError, match=match) as raised:
        example(row)
    assert str(raised.value).startswith("line 1")


def test_a_flag_of_one_message_is_obeyed_by_the_name_of_a_mask_too():
    row = {"messages": [USER, WRONG | {"loss_mask": 0}, USER, ANSWER | {"loss_mask": 1}]}
    assert [turn.counted for turn in example(row).turns] == [True, False, True]
    with pytest.raises(FedKSeedError, match="say different things"):
        example(row | {"loss_mask": [0, 1, 0, 1]})


def test_a_context_is_read_by_the_name_that_each_row_has():
    first, later = {"prompt": "q", "completion": "a"}, {"prompt": "r", "completion": "b"}
    for names in (("input", "context"), ("passage", "input")):
        layout = fit(first, {}, None, "line 1")
        assert [layout.example(later | {name: "c"}, "line 2").context for name in names] == ["c", "c"]
    counts = Counter[str]()
    assert layout.example(later | {"passage": "c", "input": "d"}, "line 2", counts).context == ""
    assert counts == {"passage": 1, "input": 1}, "either may be meant"
    layout = fit(first | {"ctx": "c"}, {"context": "ctx"}, None, "line 1")
    assert layout.example(later | {"input": "d"}, "line 2").context == ""


@pytest.mark.parametrize("system", ["Be short.", [{"text": "Be short."}], [{"type": "text", "text": "Be short."}]])
def test_a_column_of_the_system_is_read_beside_an_empty_message_of_it(system):
    row = {"messages": [{"role": "system", "content": ""}, USER, ANSWER], "system": system}
    assert example(row).turns == (Turn("system", "Be short."), Turn("user", "Order?"))


def test_options_of_which_none_is_set_and_tools_that_are_no_definitions_say_nothing():
    nothing = {"chat_template_kwargs": {"custom_instructions": "", "xml_tools": []}, "functions": "[]"}
    counts = Counter[str]()
    example({"messages": [USER, ANSWER], **nothing}, counts)
    assert not +counts
    example({"question": "How?", "answer": "So.", "tools": ["hammer", "saw"]}, counts)
    example({"messages": [USER, ANSWER], "functions": ["parse", "render"], "label": 0}, counts)
    assert +counts == {"tools": 1, "functions": 1, "label": 1}


def test_an_answer_beside_messages_is_no_fault_where_a_flag_leaves_the_row_out():
    counts = Counter[str]()
    example({"messages": [USER, ANSWER, USER], "output": "other", "train": False}, counts)
    assert counts[SKIPPED] == 1


@pytest.mark.parametrize("kind", [{}, {"type": None}, {"type": "text"}])
def test_a_part_of_a_message_that_has_a_text_alone_is_one(kind):
    assert example({"messages": [USER | {"content": [kind | {"text": "Hi"}]}, ANSWER]}).instruction == "Hi"


def test_a_false_flag_of_a_request_and_empty_keys_say_nothing_new():
    plain = example({"messages": [USER, ANSWER]})
    empty = dict.fromkeys([*UNREAD_KEYS, "name", *FLAGS])
    row = {"messages": [USER | empty | {"train": False}, ANSWER | empty], "tools": "[]", "images": [], "mask": "User"}
    counts = Counter[str]()
    assert example(row, counts) == plain
    assert not +counts


def test_rows_are_left_out_by_their_flag_and_counted_and_a_column_that_says_something_else_is(tmp_path):
    rows = [
        {"prompt": f"q{k}", "completion": "a", "weight": k % 2, "training": "First aid", "loss": 2.25} for k in (0, 1)
    ]
    assert read(written(tmp_path, *rows, *rows)).summary() == (
        "rows.jsonl: 2 rows as prompt and completion; 2 left out by their flag, 1 repeated, "
        "not used: training (4), loss (4)"
    )
    (tmp_path / "a.csv").write_text("prompt,completion,train\nq,a,False\nr,b,TRUE\ns,c,\n")
    assert [e.response for e in read(tmp_path / "a.csv").examples] == ["b", "c"]


def test_messages_after_the_last_counted_answer_and_unknown_keys_are_counted(tmp_path):
    row = {
        "messages": [USER | {"name": "Ann"}, ANSWER | {"id": 7}, USER, WRONG | {"weight": 0}],
        "score": 3,
        "source": "",
    }
    summary = read(written(tmp_path, row, {"messages": [USER, WRONG | {"loss": False}]})).summary()
    assert summary == (
        "rows.jsonl: 1 row as conversations; 1 without a response left out, 2 messages after the last answer left out, "
        "not used: score (1), name of messages (1), id of messages (1)"
    )


def test_a_system_column_and_earlier_exchanges_are_messages():
    system, earlier = Turn("system", "Be kind."), (Turn("user", "a"), Turn("assistant", "b"))
    row = {"instruction": "q", "input": "c", "output": "r", "system": "Be kind.", "history": [["a", "b"]]}
    assert example(row) == Example("q\n\nc", "r", turns=(system, *earlier, Turn("user", "q\n\nc")))
    assert example({"messages": [USER, ANSWER], "system": "Be kind."}).turns == (system, Turn("user", "Order?"))
    counts = Counter[str]()
    text = {"instruction": "q", "response": "r", "history": "diabetes"}  # of a patient, and no exchange
    assert example(text, counts) == Example("q", "r")
    assert counts["history"] == 1


@pytest.mark.parametrize(
    ("label", "text"),
    [(1, "1"), (1.0, "1"), ("1", "1"), (0.5, "0.5"), (True, "true"), (False, "false"), (0, "0"), (-0.0, "0"),
     (Decimal("2.50"), "2.5"), (Decimal("100"), "100"), (date(2024, 5, 1), "2024-05-01"), (1e300, "1e+300"),
     ("NA", "NA"), ("null", "null"), (None, ""), (float("nan"), ""), (Decimal("NaN"), "")],
)  # fmt: skip
def test_labels_categories_and_clients_that_are_no_text_are_text_in_one_form(label, text):
    row = {"prompt": "q", "completion": label, "category": label, "client": label}
    layout = fit(row, {}, None, "line 1")
    read_row = layout.example(row, "line 1")
    assert (read_row.response, read_row.category, layout.client(row)) == (text, text, text)
    if text:
        answer = {"role": "assistant", "content": label}
        assert example({"messages": [USER, answer]}).response == text


@pytest.mark.parametrize("label", [float("inf"), [1], {"a": 1}, b"x"])
def test_a_label_without_a_text_is_refused(label):
    with pytest.raises(FedKSeedError, match="line 1: completion must be text, got"):
        example({"prompt": "q", "completion": label})


def test_names_of_labels_are_used_and_not_their_numbers(tmp_path):
    features = Features({"prompt": Value("string"), "completion": ClassLabel(names=["no", "yes"])})
    Dataset.from_dict({"prompt": ["a", "b"], "completion": [1, 0]}, features=features).save_to_disk(tmp_path / "saved")
    assert [e.response for e in read(tmp_path / "saved").examples] == ["yes", "no"]


def test_clients_and_categories_in_two_forms_of_unicode_are_one(recipe_for, tmp_path):
    forms = [normalize("NFC", "Zürich"), normalize("NFD", "Zürich"), " Zürich\u00a0", 7, 7.0, "7"]
    rows = [
        {"Antwört": f"a{k}", "prompt": f"q{k}", "client": form, "category": form} for k in range(6) for form in forms
    ]
    columns = f'source = {{data}}\ncolumns = {{ response = "{normalize("NFD", "ANTWÖRT")}" }}'
    held_out = f'held_out = "{normalize("NFD", "Zürich")}"'
    path = recipe_for(
        "plain", rows, source=columns, split='split = "column"', count="", min_examples="min_examples = 1"
    )
    recipe = load_recipe(path)
    shares = share_out(recipe, load_tokenizer(recipe.model.name))
    assert shares.names == ["7", normalize("NFC", "Zürich")]
    path = recipe_for("plain", rows, source=columns, held_out=held_out)
    recipe = load_recipe(path)
    assert len(share_out(recipe, load_tokenizer(recipe.model.name)).held_out) == 18


def test_clients_that_differ_by_case_alone_are_named(tmp_path):
    rows = [{"text": f"t{k}", "client": name} for k, name in enumerate(["it", "hr", "IT"])]
    assert "the clients 'IT' and 'it' differ by case alone" in read(written(tmp_path, *rows)).summary()


FIELDS = st.dictionaries(
    st.sampled_from(["score", "name", "Source", "tool_call_id", "", "é", "label", "history", "notes"]),
    st.one_of(st.none(), st.integers(), st.floats(), LETTERS, st.just("[1]"), st.lists(st.integers(), max_size=2)),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["user", "assistant", "system", "tool"]), LETTERS,
            st.sampled_from([None, True, False, 0, 1]), st.sampled_from(FLAGS), FIELDS,
        ),
        max_size=6,
    ),
    FIELDS,
)  # fmt: skip
def test_every_key_is_used_refused_or_counted_and_every_counted_answer_is_in_the_example(messages, more):
    row = more | {"messages": [m | {"role": r, "content": c, key: flag} for r, c, flag, key, m in messages]}
    counts = Counter[str]()
    try:
        found = example(row, counts)
    except FedKSeedError as error:  # for a flag of a request, or an answer that is not wanted
        unwanted = more.get("label") is False and "not wanted" in str(error)
        assert unwanted or any(flag and role != "assistant" for role, _, flag, *_ in messages)
        return
    for name, cell in more.items():
        if cell not in (None, "", []) and cell == cell:
            assert counts[name.strip() or "a column without a name"] == 1
    for name in {name for *_, keys in messages for name in keys}:
        uses = sum(
            keys.get(name) not in (None, "", []) and keys[name] == keys[name] for *_, keys in messages if name in keys
        )
        assert counts[f"{name.lower()} of messages"] == uses
    answers = [
        (c, k) for k, (r, c, flag, *_) in enumerate(messages) if r == "assistant" and c.strip() and flag in (None, 1)
    ]
    assert [t.text for t in found.turns if t.role == "assistant" and t.counted and t.text.strip()] + (
        [found.response] if answers else []
    ) == [text for text, _ in answers]
    assert counts[AFTER] == (len(messages) - 1 - answers[-1][1] if answers else 0)
    assert not counts[SKIPPED]


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(LETTERS, LETTERS.filter(str.strip), LETTERS), min_size=1, max_size=5),
    separator=st.sampled_from(",;\t|"),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]),
    note=st.sampled_from(["score (0,5)", "a;b", "a|b|c", " ", "notes"]),
    named=st.booleans(),
    trailing=st.integers(0, 2),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
def test_csv_of_any_separator_line_end_and_marked_encoding_is_read(
    tmp_path_factory, rows, separator, end, encoding, note, named, trailing, quoting
):
    if quoting == csv.QUOTE_MINIMAL:  # the writer does not quote line ends of other systems
        rows = [tuple(cell.replace("\n", "ä") for cell in row) for row in rows]
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=separator, lineterminator=end, quoting=quoting)
    writer.writerows([["Prompt", "completion", note], *([*row, *[""] * trailing] for row in rows)])
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    path.write_bytes(((f"sep={separator}{end}" if named else "") + text.getvalue()).encode(encoding))
    found = read(path)
    assert [(e.instruction, e.response) for e in found.examples] == [row[:2] for row in rows]
    assert sum(found.unused.values()) == sum(bool(row[2]) for row in rows)


def test_a_field_of_separators_and_a_line_end_is_read_where_all_fields_are_in_quotes(tmp_path):
    """Found by the test above: each of its lines has as many separators as the first, as texts with quotes have."""
    (tmp_path / "a.tsv").write_text('"prompt"\t"completion"\t"note"\n"\t\t\n"\t";"\t""\n')
    assert [(e.instruction, e.response) for e in read(tmp_path / "a.tsv").examples] == [("\t\t\n", ";")]
    (tmp_path / "a.tsv").write_text('prompt\tcompletion\n"Yes"\t"No\nWell\tfine"\n')
    with pytest.raises(FedKSeedError, match="a quote joins 2 lines of 2 fields each"):
        read(tmp_path / "a.tsv")


def test_columns_without_a_name_keep_their_values_and_trailing_separators_are_none(tmp_path):
    (tmp_path / "a.csv").write_text("prompt;completion;;\nq;a;;\nr;b;x;y\n")
    assert (
        read(tmp_path / "a.csv").summary()
        == "a.csv: 2 rows as prompt and completion; not used: column 3 (1), column 4 (1)"
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '{"data": [{"prompt": "q", "completion": "a"}]}'),
        ("a.json", '{"version": "0.1", "train": [{"prompt": "q", "completion": "a"}]}'),
        ("a.json", '{\n  "data": [\n    {"prompt": "q", "completion": "a"}\n  ]\n}'),
        ("a.json", '{\n  "prompt": "q",\n  "completion": "a"\n}\n'),
        ("a.json", '{"prompt": "q", "completion": "a"}\n'),
        ("a.jsonl", '[{"prompt": "q", "completion": "a"}]'),
        ("a.jsonl", '[\n{"prompt": "q",\n"completion": "a"}\n]\n'),
        ("a.jsonl", '{"prompt": "q", "completion": "a", "score": NaN}\r\n\r\n'),
        ("a.jsonl", '{"prompt": "q", "completion": "a", "completion": "a"}\r'),
    ],
)
def test_json_in_the_forms_that_users_have_is_read(tmp_path, name, content):
    for encoding in ("utf-8", "utf-16"):
        (tmp_path / name).write_bytes(content.encode(encoding))
        found = read(tmp_path / name)
        assert (found.examples, found.unused) == ([Example("q", "a")], {})


def test_the_line_of_a_file_is_in_preview_run_report_and_their_json(recipe_for, tmp_path):
    rows = [{"prompt": f"q{k}", "completion": f"a{k}", "score": k} for k in range(24)]
    recipe = recipe_for("plain", rows, rounds="rounds = 1", steps="steps = 1")
    line = "rows.jsonl: 24 rows as prompt and completion; not used: score (24)"
    assert line in fedkseed("preview", recipe).output
    assert documented("preview", recipe)["notes"][0] == line
    directory = tmp_path / "run"
    assert documented("run", recipe, "--output", directory)["notes"][0] == line
    assert fedkseed("report", directory, "--output", tmp_path / "report.html").exit_code == 0
    assert line in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_row_appended_before_a_run_goes_on_is_refused_and_without_it_the_run_goes_on(recipe_for, tmp_path):
    rows = [{"instruction": f"Say {k}", "response": f"It is {k}."} for k in range(24)]
    whole = start(load_recipe(recipe_for("plain", rows)), tmp_path / "run")
    Store(tmp_path / "run").rollback(1)
    before = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(before + json.dumps(rows[0]) + "\n")
    with pytest.raises(FedKSeedError, match="data of digest"):
        resume(tmp_path / "run")
    (tmp_path / "rows.jsonl").write_text(before)
    assert resume(tmp_path / "run").digest == whole.digest
