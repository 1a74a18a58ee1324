"""Parquet files: no copy of their rows, and a cost by their size. Finding 2: 494 bytes took 4.4 GB of memory."""

import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from fedkseed import FedKSeedError
from fedkseed.data.file_formats import open_rows

ANSWER = "a private answer"
READ = "import sys; from fedkseed.data.file_formats import open_rows; print(len(list(open_rows(sys.argv[1])[1])))"


def rows_of(path) -> list:
    return [row for _, row in open_rows(str(path))[1]]


def test_reading_a_private_file_leaves_no_copy_that_anyone_could_read(tmp_path):
    path, home = tmp_path / "rows.parquet", tmp_path / "home"
    home.mkdir()
    pq.write_table(pa.table({"instruction": ["q"] * 100, "response": [f"{ANSWER} {k}" for k in range(100)]}), path)
    path.chmod(0o600)
    places = {"HOME": str(home), "HF_HOME": str(home), "TMPDIR": str(home), "XDG_CACHE_HOME": str(home)}
    told = subprocess.run(
        [sys.executable, "-c", READ, str(path)], env=os.environ | places, umask=0o022, capture_output=True, text=True,
        cwd=home, check=True,
    )  # fmt: skip
    assert told.stdout.split() == ["100"]
    assert not [file for file in home.rglob("*") if file.is_file() and ANSWER.encode() in file.read_bytes()]
    assert not [file for file in home.rglob("*") if file.suffix in (".arrow", ".parquet")]


def test_another_user_can_not_read_the_rows(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    test_reading_a_private_file_leaves_no_copy_that_anyone_could_read(tmp_path)
    searched = subprocess.run(["grep", "-rl", ANSWER, str(tmp_path)], user=65534, capture_output=True, text=True)
    assert searched.returncode != 0
    assert searched.stdout == ""


def test_rows_are_those_that_were_written_with_classes_by_their_names(tmp_path):
    turns = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}], [], None]
    features = Features(
        {
            "text": Value("large_string"),
            "label": ClassLabel(names=["x", "y"]),
            "turns": [{"role": Value("string"), "content": Value("string")}],
        }
    )
    rows = {"text": ["a", None, "ä"], "label": [1, -1, None], "turns": turns}
    Dataset.from_dict(rows, features).to_parquet(tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == [
        {"text": text, "label": label, "turns": each}
        for text, label, each in zip(rows["text"], ["y", None, None], turns, strict=True)
    ]


BOMBS = {  # 4.2 million values in a row, a text of 16 KB 4,096 times, pages of zeros, and rows without end
    "a list": (pa.table({"a": pa.array([[0] * (1 << 22)], pa.list_(pa.int8()))}), "has pages of"),
    "a text": (pa.table({"a": ["x" * (1 << 14)] * 4096}), "decodes to far more"),
    "a page": (pa.table({"a": [bytes(1 << 25)]}), "has pages of"),
    "columns": (pa.table({f"c{k}": pa.nulls(1, pa.int8()) for k in range((1 << 14) + 1)}), "16,385 columns"),
    "rows": (pa.table({"a": pa.nulls((1 << 22) + 1, pa.int8())}), "has 4,194,305 rows"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_decodes_to_far_more_than_it_has_is_refused(tmp_path, name):
    table, words = BOMBS[name]
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(FedKSeedError, match=words):
        rows_of(tmp_path / "a.parquet")


def test_two_columns_of_one_name_are_refused(tmp_path):
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["x", "x"]), tmp_path / "a.parquet")
    with pytest.raises(FedKSeedError, match=r"two columns have one name|can't be read"):
        rows_of(tmp_path / "a.parquet")


@pytest.mark.parametrize("encoding", ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"])
def test_texts_in_an_encoding_that_is_not_read_say_how_to_write_them(tmp_path, encoding):
    """Read without a dictionary, a text that is there a million times would take memory a million times."""
    table = pa.Table.from_pylist([{"question": f"Who is {k}?", "answer": "I"} for k in range(50)])
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False, column_encoding=encoding)
    with pytest.raises(FedKSeedError, match=r"has texts in an encoding that is not read.*; write it anew, as pandas"):
        rows_of(tmp_path / "a.parquet")
