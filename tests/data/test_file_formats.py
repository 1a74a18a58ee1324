"""Files written by other programs, whole and broken, read as rows."""

import csv
import gzip
import json
import os
import subprocess
import sys
import tracemalloc
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from datasets import Dataset, DatasetDict

from fedkseed import FedKSeedError
from fedkseed.data import file_formats as formats
from fedkseed.data.file_formats import (
    MAX_LINE,
    MAX_RATIO,
    MAX_SMALL,
    PACKINGS,
    format_of,
    is_saved,
    open_rows,
)
from fedkseed.data.first_bytes import TEXT

ROWS = [
    {"prompt": "Wie heißt das?", "completion": 'So, "genau" so; und so\tweiter'},
    {"prompt": "Two\nlines", "completion": "Zwei\nZeilen"},
    {"prompt": " spaces ", "completion": "日本語 🙂"},
]


def packed(content: bytes, packing: str) -> bytes:
    return {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[packing](content)


def csv_module(path: Path, rows: list[dict[str, str]], delimiter: str = ",") -> bytes:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path.read_bytes()


def content_of(kind: str, path: Path) -> bytes:
    if kind in (".csv", ".tsv"):
        return csv_module(path, ROWS, "\t" if kind == ".tsv" else ",")
    if kind == ".jsonl":
        return "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    return json.dumps(ROWS, indent=2, ensure_ascii=False).encode()


def found(path: Path | str) -> list[dict[str, str]]:
    rows = [row for _, row in open_rows(str(path))[1]]
    for row in rows:
        if isinstance(row, FedKSeedError):
            raise row
    return rows


def places(path: Path | str) -> list[str]:
    return [place for place, _ in open_rows(str(path))[1]]


@pytest.mark.parametrize("packing", ["", *PACKINGS])
@pytest.mark.parametrize("kind", TEXT)
def test_files_of_python_s_own_modules_are_read_in_any_packing(tmp_path, kind, packing):
    content = content_of(kind, tmp_path / "plain")
    path = tmp_path / f"It{kind.upper()}{packing}"
    path.write_bytes(packed(content, packing))
    assert found(path) == ROWS
    marked = tmp_path / f"marked{kind}{packing}"
    marked.write_bytes(packed(b"\xef\xbb\xbf" + content, packing))
    assert found(marked) == ROWS


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_files_of_pandas_are_read(tmp_path, packing):
    table = pd.DataFrame(ROWS)
    table.to_csv(tmp_path / f"a.csv{packing}", index=False)
    table.to_csv(tmp_path / f"a.tsv{packing}", index=False, sep="\t")
    table.to_json(tmp_path / f"a.json{packing}", orient="records")
    table.to_json(tmp_path / f"a.jsonl{packing}", orient="records", lines=True)
    for kind in TEXT:
        assert found(tmp_path / f"a{kind}{packing}") == ROWS


def test_a_table_with_pandas_index_and_with_missing_values_is_read(tmp_path):
    table = pd.DataFrame({"prompt": ["a", "b"], "completion": ["x", None]})
    table.to_csv(tmp_path / "a.csv")
    table.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    assert found(tmp_path / "a.csv")[1] == {"": "1", "prompt": "b", "completion": ""}
    assert found(tmp_path / "a.jsonl")[1] == {"prompt": "b", "completion": None}


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_parquet_of_pyarrow_is_read(tmp_path, compression):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "A.Parquet", compression=compression)
    assert found(tmp_path / "A.Parquet") == ROWS
    assert places(tmp_path / "A.Parquet") == ["row 1", "row 2", "row 3"]


def test_folders_of_save_to_disk_are_read_whatever_format_their_rows_had(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    Dataset.from_list(ROWS).with_format("numpy").save_to_disk(tmp_path / "numbers")
    DatasetDict(train=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "single")
    DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "both")
    for name in ("one", "numbers", "single", "both/test"):
        assert found(tmp_path / name) == ROWS
        assert type(found(tmp_path / name)[0]["prompt"]) is str
    assert is_saved(tmp_path / "one")
    assert not is_saved(tmp_path)
    with pytest.raises(FedKSeedError, match=r"holds the data sets train, test; name one, as .*both/train"):
        found(tmp_path / "both")
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"broken")
    with pytest.raises(FedKSeedError, match="can't be read"):
        found(tmp_path / "one")


def test_semicolons_and_tabs_separate_where_the_first_line_has_no_comma(tmp_path):
    for delimiter in ";\t":
        csv_module(tmp_path / "a.csv", ROWS, delimiter)
        assert found(tmp_path / "a.csv") == ROWS
    (tmp_path / "a.csv").write_text('"a, or b; c";d\n1,5;2\n')
    assert found(tmp_path / "a.csv") == [{"a, or b; c": "1,5", "d": "2"}]


def test_line_ends_of_windows_do_not_get_into_values_and_blank_lines_do_not_count(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'prompt,completion\r\n\r\na,x\r\n   \r\nb,"y\r\nz"\r\n\r\n')
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    assert found(tmp_path / "a.csv") == [
        {"prompt": "a", "completion": "x"},
        {"prompt": "b", "completion": "y\r\nz"},  # inside quotes it is part of the text
    ]
    assert places(tmp_path / "a.csv") == ["line 3", "line 5"]
    assert found(tmp_path / "a.jsonl") == [{"prompt": "a"}, {"prompt": "b"}]
    assert places(tmp_path / "a.jsonl") == ["line 1", "line 3"]


def test_json_lines_under_the_ending_of_json_are_read(tmp_path):
    (tmp_path / "a.json").write_bytes(content_of(".jsonl", tmp_path / "x"))
    assert found(tmp_path / "a.json") == ROWS
    assert places(tmp_path / "a.json") == ["line 1", "line 2", "line 3"]


def test_the_rows_of_an_array_are_numbered_and_an_empty_one_has_none(tmp_path):
    (tmp_path / "a.json").write_bytes(content_of(".json", tmp_path / "x"))
    assert places(tmp_path / "a.json") == ["row 1", "row 2", "row 3"]
    (tmp_path / "a.json").write_text(" [ ] ")
    assert found(tmp_path / "a.json") == []


def test_names_are_matched_without_regard_to_case():
    assert format_of("it.JSONL") == (".jsonl", "")
    assert format_of("HR.2024.CSV.GZ") == (".csv", ".gz")
    assert format_of("a.parquet") == (".parquet", "")
    for name in ("notes.txt", "it.docx", "a.parquet.gz", "csv", "a.gz", ".DS_Store", "a.tar.gz"):
        assert format_of(name) is None


BROKEN = {  # name -> content, and words of the refusal
    "half.csv": (b"a,b\n1", "line 2: 1 fields, and the first line names 2 columns \\(a, b\\)"),
    "more.csv": (b"a,b\n1,2\n3,4,5\n", "line 3: 3 fields"),
    "open.csv": (b'a,b\n1,"2\n3,4\n', "line 2: not valid CSV"),
    "quotes.csv": (b'a,b\n1,"2" 3\n', "line 2: not valid CSV"),
    "twice.csv": (b"a,a\n1,2\n", "two columns have the name 'a'"),
    "russian.csv": ("a,b\n1,Ответ на вопрос\n".encode("cp1251"), "line 2: not valid UTF-8, and no likely words as"),
    "mixed.csv": ("a,b\n1,äöü\n".encode() + b"2,\xe4\n", "line 3: not valid UTF-8 .byte 0xE4 at 3"),
    "zero.csv": (b"a,b\n1,\0\n", "line 2: a NUL byte, as damaged files have"),
    "half.tsv": ("a\tb\n1\t2\n".encode("utf-16")[:-1], "line 2: not valid utf-16"),
    "cut.json": (b'[{"a": "1"}, {"a": 2,', "row 2: not valid JSON .* at character 9"),
    "comma.json": (b'[{"a": "1"} {"a": "2"}]', "row 1: not valid JSON .a comma or the array's end is expected"),
    "ends.json": (b'[{"a": "1"}', "row 1: not valid JSON .the file ends"),
    "trailing.json": (b'[{"a": "1"},]', "row 2: not valid JSON"),
    "after.json": (b'[{"a": "1"}] {', "the array is followed by '{'"),
    "deep.json": (b"[" * 200_000, "row 1: not valid JSON"),
    "mixed.json": ('[{"a": "äö"}, "'.encode() + b'\xe4"]', "not valid UTF-8 .byte 0xE4 at 18, perhaps of Windows-1252"),
    "object.json": (b'{\n"a": "1",\n}', "object.json: not valid JSON"),
    "lists.json": (b'{"train": [{"a": 1}], "test": [{"a": 2}]}', "has train and test; a file has one list of rows"),
    "key.jsonl": (b'{"a": 1, "b": 2, "a": 3}', "line 1: not valid JSON .the key 'a' is there twice"),
    "cut.csv.zst": (packed(b"a,b\n" + b"1,2\n" * 9999, ".zst")[:-5], "can't be read: Truncated"),
    "no.csv.zst": (b"a,b\n1,2\n", "can't be read"),
    "no.csv.gz": (b"a,b\n1,2\n", "can't be read"),
    "no.json.zst": (b"[]", "can't be read"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_its_place(tmp_path, name):
    content, match = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FedKSeedError, match=match) as raised:
        found(tmp_path / name)
    assert name in str(raised.value)


@pytest.mark.parametrize("name", ["notes.txt", "it.docx", "a.tar.gz", "noending"])
def test_a_file_of_another_kind_is_refused_by_name(tmp_path, name):
    (tmp_path / name).write_text("a,b\n1,2\n")
    with pytest.raises(FedKSeedError, match=rf"{name} is of a kind that is not read; give a file of \*.csv"):
        found(tmp_path / name)


def bomb(path: Path, line: bytes) -> None:
    """A small file that unpacks to one line again and again, a few lines more than goes."""
    path.write_bytes(packed(line * (MAX_SMALL // len(line) + 2), path.suffix))
    assert path.stat().st_size * MAX_RATIO < MAX_SMALL


@pytest.mark.parametrize("packing", PACKINGS)
def test_what_unpacks_to_a_thousand_times_its_bytes_is_refused(tmp_path, packing):
    bomb(tmp_path / f"a.csv{packing}", b"a," + b"b" * 10_000 + b"\n")
    with pytest.raises(FedKSeedError, match=r"line 16\d\d: a file has at most 4,194,304 lines"):
        found(tmp_path / f"a.csv{packing}")
    row = b'{"a": "' + b"b" * 10_000 + b'"},'
    (tmp_path / f"a.json{packing}").write_bytes(packed(b"[" + row * (MAX_SMALL // len(row) + 200), packing))
    with pytest.raises(FedKSeedError, match=rf"a.json{packing}: a file has at most 4,194,304 rows"):
        found(tmp_path / f"a.json{packing}")


def test_zstandard_s_largest_bomb_takes_little_memory(tmp_path):
    """16 GiB of zeros in less than a megabyte: 4 bytes of a block make 128 KiB."""
    zeros = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    (tmp_path / "a.jsonl.zst").write_bytes(zeros * 256)
    assert len(zeros) * 256 < 1 << 20
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    try:
        with pytest.raises(FedKSeedError, match="line 1: a line has at most 16,777,216 bytes"):
            found(tmp_path / "a.jsonl.zst")
        assert tracemalloc.get_traced_memory()[1] < 6 * MAX_LINE
        assert pa.total_allocated_bytes() - before < MAX_LINE
    finally:
        tracemalloc.stop()


def test_a_field_or_a_row_without_an_end_is_not_read_to_its_end(tmp_path):
    (tmp_path / "line.csv").write_bytes(b"a,b\n1," + b"x" * (MAX_LINE + 9))
    with pytest.raises(FedKSeedError, match="line 2: a line has at most 16,777,216 bytes"):
        found(tmp_path / "line.csv")
    (tmp_path / "quote.csv").write_bytes(b'a,b\n1,"' + (b"x" * 999 + b"\n") * (MAX_LINE // 1000 + 99))
    with pytest.raises(FedKSeedError, match="a row has at most 16,777,216 bytes; is a closing quote missing"):
        found(tmp_path / "quote.csv")
    column = b'"' + (b"x" * 999 + b"\n") * (MAX_LINE // 2000) + b'"'  # each field is within the limit, the row is not
    (tmp_path / "fields.csv").write_bytes(b"a,b,c\n1,2,3\n" + b",".join([column] * 3) + b"\n")
    with pytest.raises(FedKSeedError, match="a row has at most 16,777,216 bytes"):
        found(tmp_path / "fields.csv")
    (tmp_path / "row.json").write_bytes(b'[{"a": "' + b"x" * (MAX_LINE + 9) + b'"}]')
    with pytest.raises(FedKSeedError, match=r"row 1: not valid JSON .*16,777,216"):
        found(tmp_path / "row.json")


def test_a_small_array_takes_little_memory(tmp_path):
    """Not as much as the largest one may take."""
    (tmp_path / "a.json").write_text('[{"a": "b"}]')
    tracemalloc.start()
    try:
        assert found(tmp_path / "a.json") == [{"a": "b"}]
        assert tracemalloc.get_traced_memory()[1] < MAX_LINE
    finally:
        tracemalloc.stop()


def test_a_field_longer_than_the_csv_module_s_own_limit_is_read_and_the_limit_is_as_before(tmp_path):
    before, long = csv.field_size_limit(), "word " * 100_000
    csv_module(tmp_path / "a.csv", [{"text": long}])
    assert found(tmp_path / "a.csv") == [{"text": long}]
    assert csv.field_size_limit() == before < len(long)


def test_more_rows_than_fit_are_refused_in_every_format(tmp_path, monkeypatch):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for kind in TEXT:
        (tmp_path / f"a{kind}").write_bytes(content_of(kind, tmp_path / "x"))
    monkeypatch.setattr(formats, "MAX_ROWS", 2)
    for name in ("saved", "a.parquet", *(f"a{kind}" for kind in TEXT)):
        with pytest.raises(FedKSeedError, match=r"at most 2 (rows|lines)"):
            found(tmp_path / name)


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_files_with_a_flipped_byte_are_read_or_refused(tmp_path, name):
    rng, path = np.random.default_rng(5), tmp_path / name
    if name == "a.parquet":
        Dataset.from_list(ROWS).to_parquet(path)
    else:
        kind, packing = format_of(name) or ("", "")
        path.write_bytes(packed(content_of(kind, tmp_path / "x"), packing))
    whole = path.read_bytes()
    for _ in range(200 if name != "a.parquet" else 50):  # parquet's library takes longer
        flipped = bytearray(whole)
        flipped[rng.integers(len(whole))] ^= int(rng.integers(1, 256))
        path.write_bytes(flipped)
        with suppress(FedKSeedError):
            found(path)


def test_several_zstandard_frames_are_one_file(tmp_path):
    lines = content_of(".jsonl", tmp_path / "x").splitlines(keepends=True)
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(packed(line, ".zst") for line in lines))
    assert found(tmp_path / "a.jsonl.zst") == ROWS
    latin = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xe9.jsonl.zst"))  # no Unicode
    latin.write_bytes((tmp_path / "a.jsonl.zst").read_bytes())
    assert found(latin) == ROWS


@pytest.mark.parametrize(("name", "package"), [("a.csv.zst", "pyarrow"), ("a.parquet", "datasets")])
def test_without_the_extra_a_file_that_needs_it_is_refused_with_its_name(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    (tmp_path / name).write_bytes(b"PAR1\x15" if name.endswith("parquet") else b"\x28\xb5\x2f\xfd")
    with pytest.raises(FedKSeedError, match=r"needs the extra `data`: pip install 'fedkseed\[data\]'"):
        found(tmp_path / name)


def test_a_name_of_the_hub_is_tried_and_offline_says_so(tmp_path, monkeypatch):
    """In a process of its own, which is kept from the network by the hub's own setting."""
    code = (
        "from fedkseed.data.file_formats import open_rows\nfrom fedkseed import FedKSeedError\n"
        "try:\n    next(open_rows('nobody/nothing')[1])\nexcept FedKSeedError as error:\n    print(error)\n"
    )
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=offline, check=True)
    assert done.stdout.startswith("there is no data file at nobody/nothing, and the rows 'train' of a data set of this")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for name in ("here/rows", "data/rows.jsonl", "/no/where", "one", "a/b/c"):
        with pytest.raises(FedKSeedError, match=f"no data file at {name}; give a file"):
            open_rows(name)


def test_the_columns_of_a_table_are_bounded_and_faulty_rows_name_a_few_of_them(tmp_path):
    """Finding 15: each short row was refused with all names, 40,000 rows of 40,000 names."""
    path = tmp_path / "a.csv"
    path.write_text(",".join(f"c{k}" for k in range(formats.MAX_COLUMNS)) + "\n" + "x\n" * 100)
    faults = [row for _, row in open_rows(str(path))[1]]
    assert len(faults) == 100
    assert all(len(str(fault)) < len(str(path)) + 300 for fault in faults)
    assert "(c0, c1, c2, c3, c4, c5, c6, c7, and 16,376 more)" in str(faults[0])
    path.write_text(",".join(f"c{k}" for k in range(formats.MAX_COLUMNS + 1)) + "\n1\n")
    with pytest.raises(FedKSeedError, match="line 1: 16,385 columns, at most 16,384 go"):
        list(open_rows(str(path))[1])
