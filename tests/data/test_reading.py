import gzip
import json

import pytest
from datasets import Dataset

from fedkseed import FedKSeedError
from fedkseed.data.reading import Example, read, read_folder

GOOD = '{"instruction": "a", "response": "b"}'


def test_the_sample_that_is_shipped_has_300_rows_of_each_category():
    examples = read("dolly-sample")
    categories = [e.category for e in examples]
    assert len(examples) == 2400
    assert all(categories.count(c) == 300 for c in set(categories))


def test_gzipped_and_plain_files_read_alike_and_blank_lines_do_not_count(tmp_path):
    text = f"{GOOD}\n\n{GOOD}\n".encode()
    (tmp_path / "a.jsonl").write_bytes(text)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text))
    assert read(str(tmp_path / "a.jsonl")) == read(str(tmp_path / "a.jsonl.gz"))
    assert len(read(str(tmp_path / "a.jsonl"))) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"instruction": "a", "resp', "line 2: not valid JSON"),
        ("[1]", "line 2: expected a JSON object, got list"),
        ('{"instruction": "a", "answer": "b"}', "line 2: no column response; columns found: instruction, answer"),
        (json.dumps({"instruction": "a", "response": " "}), "line 2: the response is empty"),
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
    Dataset.from_dict({"q": ["1?", "2?"], "a": ["one", "two"], "more": ["x", "y"]}).to_parquet(tmp_path / "a.parquet")
    columns = {"instruction": "q", "response": "a"}
    assert read(str(tmp_path / "a.parquet"), columns) == [Example("1?", "one"), Example("2?", "two")]
    with pytest.raises(FedKSeedError, match="row 1: no column response; columns found: q, a, more"):
        read(str(tmp_path / "a.parquet"), {"instruction": "q"})
    with pytest.raises(FedKSeedError, match="no field is called 'answer'"):
        read(str(tmp_path / "a.parquet"), {"answer": "a"})


def test_a_folder_is_one_client_a_file_in_the_order_of_names(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"instruction": name, "response": "x"}))
    (tmp_path / "notes.txt").write_text("not data")
    assert [[e.instruction for e in part] for part in read_folder(str(tmp_path))] == [["a"], ["b"]]
    with pytest.raises(FedKSeedError, match="no folder with data files"):
        read_folder(str(tmp_path / "none"))
