import gzip
import json

import pytest

from fedkseed import FedKSeedError
from fedkseed.data.jsonl import read

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
    with pytest.raises(FedKSeedError, match="can't be read"):
        read(str(tmp_path / "cut.jsonl.gz"))
