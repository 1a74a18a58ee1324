import gzip
import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from datasets import Dataset

from fedkseed import FedKSeedError
from fedkseed.data.file_formats import MAX_LINE
from fedkseed.data.layouts import Example, Turn
from fedkseed.data.sources import Reader, read

GOOD = '{"instruction": "a", "response": "b"}'


def test_the_sample_that_is_shipped_has_300_rows_of_each_category():
    examples = read("dolly-sample")
    categories = [e.category for e in examples]
    assert len(examples) == 2400
    assert all(categories.count(c) == 300 for c in set(categories))


def test_the_sample_of_intents_is_a_task_of_seven_classes():
    examples = read("intents")
    counts = Counter(example.response for example in examples)
    assert len(examples) == 693
    assert len(counts) == 7
    assert min(counts.values()) == 80
    assert max(counts.values()) == 122
    assert len({example.instruction for example in examples}) == len(examples)
    assert all(example.category == example.response and not example.context for example in examples)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"instruction": "a", "resp', "line 2: not valid JSON"),
        ("[1]", "line 2: expected a JSON object, got list"),
        ('{"instruction": "a", "answer": "b"}', "line 2: no column response; columns found: instruction, answer"),
        (json.dumps({"instruction": 1, "response": "b"}), "line 2: instruction must be text, got int"),
        (b"\xff\xfe", "line 2: not valid UTF-8"),
        ("9" * 5000, "line 2: not valid JSON"),
        ("[" * 100_000, "line 2: not valid JSON"),
        ('{"instruction": "a", "response": "\\ud800"}', "half a character"),
    ],
)
def test_a_broken_line_is_refused_with_its_number(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD.encode() + b"\n" + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(FedKSeedError, match=message):
        read(str(path))


def test_missing_empty_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(FedKSeedError, match="no data file at"):
        read(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(FedKSeedError, match="holds no examples"):
        read(str(tmp_path / "empty.jsonl"))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(f"{GOOD}\n".encode() * 1000)[:-20])
    flipped = bytearray(gzip.compress(f"{GOOD}\n".encode() * 1000))
    flipped[40] ^= 255
    (tmp_path / "flipped.jsonl.gz").write_bytes(bytes(flipped))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not")
    for name in ("cut.jsonl.gz", "flipped.jsonl.gz", "broken.parquet"):
        with pytest.raises(FedKSeedError, match="can't be read"):
            read(str(tmp_path / name))


def test_parquet_with_other_column_names(tmp_path):
    Dataset.from_dict({"x": ["1?", "2?"], "y": ["one", "two"], "more": ["x", "y"]}).to_parquet(tmp_path / "a.parquet")
    columns = {"instruction": "x", "response": ("answer", "y")}
    assert Reader(columns).file(str(tmp_path / "a.parquet")).lacking == ["answer"]
    columns = {"instruction": "x", "response": "y"}
    assert read(str(tmp_path / "a.parquet"), columns) == [Example("1?", "one"), Example("2?", "two")]
    with pytest.raises(FedKSeedError, match="row 1: no column response; columns found: x, y, more"):
        read(str(tmp_path / "a.parquet"), {"instruction": "x"})
    with pytest.raises(FedKSeedError, match="no field is called 'answer'"):
        read(str(tmp_path / "a.parquet"), {"answer": "a"})


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


ROW, OTHER = {"instruction": "a", "response": "b"}, {"instruction": "c", "response": "d"}


def test_rows_without_a_response_are_left_out_and_counted_and_repeated_ones_are_counted(tmp_path):
    path = tmp_path / "sales.jsonl"
    path.write_text(lines(ROW, {**ROW, "response": " "}, OTHER, {**ROW, "response": None}, ROW | {"context": None}))
    part = Reader().file(str(path))
    assert [part.place(k).removeprefix(str(path)) for k in range(3)] == [", line 1", ", line 3", ", line 5"]
    assert part.examples == [Example("a", "b"), Example("c", "d"), Example("a", "b")]
    assert part.summary("more") == (
        "sales.jsonl: 3 rows as instruction and response; 2 without a response left out, 1 repeated, more"
    )
    assert read(str(path)) == part.examples
    path.write_text(lines({**ROW, "response": ""}))
    with pytest.raises(FedKSeedError, match="holds no examples to learn from: none of its 1 rows has a response"):
        read(str(path))


def test_a_strict_reader_refuses_them_with_their_places(tmp_path):
    path, strict = tmp_path / "a.jsonl", Reader(strict=True)
    path.write_text(lines(ROW, OTHER))
    assert strict.file(str(path)).summary() == "a.jsonl: 2 rows as instruction and response"
    path.write_text(lines(ROW, OTHER, {**ROW, "response": " "}))
    with pytest.raises(
        FedKSeedError, match=r"a.jsonl, line 3: the response is empty.*remove the row, or set .data. str"
    ):
        strict.file(str(path))
    path.write_text(lines(ROW, OTHER, ROW))
    with pytest.raises(FedKSeedError, match=r"a.jsonl, line 3: the row is the same as that of line 1; remove the row"):
        strict.file(str(path))


@pytest.mark.parametrize(
    ("name", "columns", "layout", "title"),
    [
        ("a.csv", {}, None, "prompt and completion"),
        ("a.csv", {"text": "completion"}, None, "plain text"),
        ("a.csv", {"instruction": "prompt", "response": "completion"}, "alpaca", "instruction, input and output"),
    ],
)
def test_a_table_of_pandas_is_read_as_the_layout_that_fits_or_is_named(tmp_path, name, columns, layout, title):
    pd.DataFrame({"prompt": ["a", "c"], "completion": ["b", "d"]}).to_csv(tmp_path / name)
    part = Reader(columns, layout).file(str(tmp_path / name))
    more = ", prompt (2)" if "text" in columns else ""
    assert part.summary() == f"a.csv: 2 rows as {title}; not used: a column without a name (2){more}"
    assert [e.response for e in part.examples] == ["b", "d"]
    assert [e.instruction for e in part.examples] == (["", ""] if "text" in columns else ["a", "c"])


@pytest.mark.parametrize(
    ("column", "columns", "layout", "is_told"),
    [
        ("label", {}, None, True),
        ("Antwort", {}, None, True),
        ("summary", {}, None, True),
        ("url", {}, None, False),
        ("label", {}, "text", False),
        ("label", {"text": "text"}, None, False),
    ],
)  # fmt: skip
def test_texts_beside_what_looks_like_their_answers_are_read_and_the_line_says_what_would_learn_those(
    tmp_path, column, columns, layout, is_told
):
    """Files of classifiers have `text` and `label`; the label was counted as not used, among others."""
    pd.DataFrame({"text": ["a", "c"], column: ["b", "d"]}).to_csv(tmp_path / "a.csv", index=False)
    line = Reader(columns, layout).file(str(tmp_path / "a.csv")).summary()
    assert line.startswith("a.csv: 2 rows as plain text; ")
    advice = f"{column!r} is not learned, [data] columns = {{instruction = 'text', response = {column!r}}} learns it"
    assert (advice in line) is is_told
    assert f"not used: {column} (2)" in line


def test_conversations_of_a_saved_data_set_are_read(tmp_path):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    Dataset.from_dict({"messages": [turns, turns[:1]]}).save_to_disk(tmp_path / "saved")
    part = Reader().file(str(tmp_path / "saved"))
    assert part.summary() == "saved: 1 row as conversations; 1 without a response left out"
    assert part.examples == [Example("Hi", "Hello.", turns=(Turn("user", "Hi"),))]


def folder(path: Path) -> Path:
    """The files of four clients: two files, a folder with two files, and a saved data set; beside hidden files."""
    (path / "legal").mkdir(parents=True)
    (path / "it.JSONL").write_text(lines(ROW))
    pd.DataFrame([{"prompt": "q", "completion": "a"}] * 2).to_csv(path / "hr.csv.gz", index=False)
    for name in ("b.json", "a.jsonl"):
        (path / "legal" / name).write_text(lines({**ROW, "context": name}))
    Dataset.from_list([OTHER]).save_to_disk(path / "tax")
    for hidden in (path / ".DS_Store", path / "legal" / "._a.jsonl"):
        hidden.write_bytes(b"\0")
    return path


def test_a_client_is_a_file_or_a_folder_in_the_order_of_names(tmp_path):
    found = Reader().folder(str(folder(tmp_path / "all")))
    assert [*found] == ["hr", "it", "legal", "tax"]
    assert [part.summary() for parts in found.values() for part in parts] == [
        "hr.csv.gz: 2 rows as prompt and completion; 1 repeated",
        "it.JSONL: 1 row as instruction and response",
        "legal/a.jsonl: 1 row as instruction and response",
        "legal/b.json: 1 row as instruction and response",
        "tax: 1 row as instruction and response",
    ]
    assert [e.context for part in found["legal"] for e in part.examples] == ["a.jsonl", "b.json"]


def test_clients_whose_names_differ_by_their_format_alone_keep_their_whole_names(tmp_path):
    names = ["hr.json", "hr.json.json", "hr.jsonl", "it.jsonl"]
    for name in names:
        (tmp_path / name).write_text(lines(ROW))
    assert [*Reader().folder(str(tmp_path))] == names


@pytest.mark.parametrize("name", ["notes.txt", "it.docx", "legal/more.numbers", "README", "legal/deeper/a.jsonl"])
def test_a_file_that_is_not_read_is_refused_by_name_and_never_left_out(tmp_path, name):
    path = folder(tmp_path / "all") / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(lines(ROW))
    refused = path.parent if "deeper" in name else path
    with pytest.raises(FedKSeedError, match=f"{refused} is no data file .*convert it, or move it out"):
        Reader().folder(str(tmp_path / "all"))


@pytest.mark.parametrize(
    "names",
    [("train", "test"), ("train", "validation", "test"), ("my_train", "my-dev"), ("train-00000-of-00001", "Test")],
)
def test_parts_of_one_data_set_are_no_clients(tmp_path, names):
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text(GOOD)
    with pytest.raises(FedKSeedError, match="are parts of one data set by their names"):
        Reader().folder(str(tmp_path))
    (tmp_path / "of one").mkdir()
    for name in names:
        (tmp_path / f"{name}.jsonl").rename(tmp_path / "of one" / f"{name}.jsonl")
    with pytest.raises(FedKSeedError, match="are parts of one data set by their names"):
        Reader().folder(str(tmp_path))
    (tmp_path / "of one" / "trainees.jsonl").write_text(GOOD)
    assert len(Reader().folder(str(tmp_path))["of one"]) == len(names) + 1


def test_rows_of_several_splits_in_one_file_are_refused(tmp_path):
    path = tmp_path / "rows.csv"
    rows = pd.DataFrame({"prompt": ["q", "r", "s"], "completion": ["a", "b", "c"], "Split": ["train", "test", "TRAIN"]})
    rows.to_csv(path, index=False)
    with pytest.raises(FedKSeedError, match=r"the column split says train \(2\), test \(1\), and all rows"):
        read(str(path))
    assert len(read(str(path), {"category": "Split"})) == 3
    for kept in (rows[rows.Split == "test"], rows.assign(Split="half")):
        kept.to_csv(path, index=False)
        assert len(read(str(path))) == len(kept)
    for left_out in ({"completion": ["a", "", "c"]}, {"train": [1, 0, 1]}):
        rows.assign(**left_out).to_csv(path, index=False)
        assert [e.response for e in read(str(path))] == ["a", "c"]
    more = (json.dumps({"instruction": part, "response": "b", "split": part}) for part in ("train", "test"))
    (late := tmp_path / "late.jsonl").write_text("\n".join([GOOD, *more]))
    with pytest.raises(FedKSeedError, match=r"the column split says train \(1\), test \(1\)"):
        read(str(late))


def test_folders_without_files_are_refused(tmp_path):
    with pytest.raises(FedKSeedError, match="no folder with data files"):
        Reader().folder(str(tmp_path / "none"))
    (tmp_path / "all" / "hr").mkdir(parents=True)
    with pytest.raises(FedKSeedError, match=r"the folder of a client, .*/hr, holds no data files"):
        Reader().folder(str(tmp_path / "all"))


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_a_line_without_an_end_is_not_read_to_its_end(tmp_path, ending):
    path = tmp_path / f"bomb.{ending}"
    with gzip.GzipFile(path, "wb", 1) if ending.endswith("gz") else path.open("wb") as file:
        for _ in range(8):
            file.write(bytes(MAX_LINE))
    tracemalloc.start()
    try:
        with pytest.raises(FedKSeedError, match="line 1: a line has at most 16,777,216 bytes"):
            read(str(path))
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_LINE
    finally:
        tracemalloc.stop()


def test_a_device_is_no_data_file():
    with pytest.raises(FedKSeedError, match="no data file at /dev/zero"):
        read("/dev/zero")


@pytest.mark.parametrize(
    "first",
    [
        "How do I log in?,Press the button.",
        "Wie komme ich hinein,Bitte den Knopf an der Wand neben der Tür drücken und warten",
        "12,50",
        "Hours,Open from nine to five on all days",
    ],
)
@pytest.mark.parametrize("ending", ["csv", "csv.gz"])
def test_a_first_line_that_is_a_row_is_shown_and_what_to_write_is_said(tmp_path, first, ending):
    path, content = tmp_path / f"a.{ending}", (first + "\n") * 5
    path.write_bytes(gzip.compress(content.encode()) if ending.endswith("gz") else content.encode())
    with pytest.raises(FedKSeedError) as raised:
        Reader().file(str(path))
    shown = f"a.{ending}: the first line does not look like names of columns: {first[:9].partition(',')[0]}"
    for part in (shown, "write a line above it, as question,answer", "--column instruction=NAME"):
        assert part in str(raised.value)
    assert "line 2" not in str(raised.value)


def test_names_of_columns_that_are_none_of_ours_are_not_taken_for_a_row(tmp_path):
    for head in ("Subject,Body", "id,e-mail,2nd name"):
        (tmp_path / "a.csv").write_text(f"{head}\n{head}\n")
        with pytest.raises(FedKSeedError, match="no column instruction and no response"):
            Reader().file(str(tmp_path / "a.csv"))


@pytest.mark.parametrize("count", [2, 21, 22, 60])
def test_faults_of_a_kind_are_one_sentence_with_their_places(tmp_path, count):
    ragged = "".join(f"q{k},a{k}{',more' * (1 + k % 3)}\n" for k in range(count))
    (tmp_path / "a.csv").write_text("question,answer\n" + ragged)
    (tmp_path / "b.jsonl").write_text(
        "".join(f'{{"prompt": "{k}", "completion": {"[" * (k + 1)}\n' for k in range(count))
    )
    for name, words in (("a.csv", "the first line names 2 columns"), ("b.jsonl", "not valid JSON")):
        with pytest.raises(FedKSeedError) as raised:
            Reader().file(str(tmp_path / name))
        said = str(raised.value)
        assert said.count(words) == 1
        assert f"{count} faulty rows" in said
        assert ("more)" in said) == (count > 21)


def test_files_with_a_fault_of_a_kind_are_one_line(tmp_path):
    for number in range(16):
        (tmp_path / f"{number:02}.csv").write_text(f"How do I do {number}?,By doing it.\n" * 9)
    with pytest.raises(FedKSeedError) as raised:
        Reader().folder(str(tmp_path))
    assert str(raised.value).count("does not look like names") == 1
    assert "01.csv" in str(raised.value)
    assert "and 7 more)" in str(raised.value)
