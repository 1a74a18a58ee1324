"""Files whose names say another kind than their first bytes: each is named for what it is, with what to do."""

import base64
import gzip
import zipfile
import zlib
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from fedkseed import FedKSeedError
from fedkseed.data.file_formats import PACKINGS, SHEETS
from fedkseed.data.first_bytes import TEXT
from fedkseed.data.sources import Reader

from .test_spreadsheets import ROWS, XLS, ods, ods_row, workbook

CSV = "question,answer\n" + "What is it?,It is this.\n" * 9
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600)
# Kind -> its words in an error, and the ending under which it is read, or a word of what to do.
KINDS = {
    "csv": ("text", ".csv"),
    "utf-16": ("text", ".csv"),
    "json": ("JSON", ".json"),
    "jsonl": ("JSON", ".json"),
    "xlsx": ("an Excel workbook", ".xlsx"),
    "xls": ("an Excel 97 workbook", ".xls"),
    "ods": ("a sheet of OpenDocument", ".ods"),
    "parquet": ("a Parquet file", ".parquet"),
    "gzip": ("a file packed by gzip", ".gz"),
    "zstd": ("a file packed by Zstandard", ".zst"),
    "html": ("a web page", "save the table"),
    "html-utf-8": ("a web page", "save the table"),
    "xml": ("XML", "save the table"),
    "pdf": ("a PDF document", "copy its table"),
    "docx": ("a Word document", "save the table"),
    "doc": ("a Word document", "save the table"),
    "pptx": ("a presentation", "save the table"),
    "odt": ("a document of OpenDocument", "save the table"),
    "numbers": ("a file of Numbers or Pages", "save the table"),
    "xlsb": ("a binary Excel workbook", "save the table"),
    "password": ("a document with a password", "without one"),
    "zip": ("a ZIP file", "unpack it"),
    "7z": ("a packed file", "unpack it"),
    "sqlite": ("a database", "as CSV"),
}
EMBEDDED = "xl/workbook.xml"  # of a workbook that stands in a document as it is
INSIDE = {"docx": "word/document.xml", "pptx": "ppt/presentation.xml", "xlsb": "xl/workbook.bin", "zip": "rows.csv"}


def write(path: Path, kind: str) -> None:
    """Write a file of a kind, whatever its name says."""
    if kind == "xlsx":
        workbook(path.with_suffix(".xlsx"), S=ROWS).rename(path)
    elif kind == "ods":
        ods(path, "".join(map(ods_row, ROWS)))
    elif kind == "parquet":
        parquet.write_table(pyarrow.table({"question": ["a"], "answer": ["b"]}), path)
    elif kind in (*INSIDE, "numbers", "odt"):
        with zipfile.ZipFile(path, "w") as packed:
            if kind == "odt":
                packed.writestr("mimetype", "application/vnd.oasis.opendocument.text")
            packed.writestr(INSIDE.get(kind, "Index/Document.iwa"), "x")
            if kind in ("docx", "pptx"):
                packed.writestr("word/embeddings/sheet.xlsx", EMBEDDED)
    else:
        contents = {
            "csv": CSV.encode(),
            "utf-16": CSV.encode("utf-16"),
            "json": b'[\n {"question": "a", "answer": "b"}]',
            "jsonl": b'{"question": "a", "answer": "b"}\n',
            "xls": zlib.decompress(base64.b85decode(XLS.replace("\n", ""))),
            "gzip": gzip.compress(CSV.encode()),
            "zstd": b"\x28\xb5\x2f\xfd" + bytes(99),
            "html": b"\r\n<table><tr><td>question</td></tr></table>",
            "html-utf-8": b"\xef\xbb\xbf<!DOCTYPE html><html></html>",
            "xml": b'<?xml version="1.0"?>\n<?mso-application progid="Excel.Sheet"?>',
            "pdf": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n",
            "doc": OLE + "WordDocument".encode("utf-16-le"),
            "password": OLE + "\6DataSpaces EncryptedPackage".encode("utf-16-le"),
            "7z": b"7z\xbc\xaf\x27\x1c\x00\x04",
            "sqlite": b"SQLite format 3\0" + bytes(99),
        }
        path.write_bytes(contents[kind])


def may_be_read(kind: str, ending: str) -> bool:
    own = KINDS[kind][1]
    if own in (".csv", ".json"):
        return ending in TEXT and not (own == ".json" and ending in (".csv", ".tsv"))
    return ending in {".xlsx": (".xlsx", ".xlsm")}.get(own, (own,))


@pytest.mark.parametrize("kind", KINDS)
def test_under_each_wrong_ending_a_file_is_named_for_what_it_is(tmp_path, kind):
    words, remedy = KINDS[kind]
    for ending in (*TEXT, *SHEETS, ".parquet", *(f".csv{packing}" for packing in PACKINGS), ".txt", ""):
        path = tmp_path / f"staff{ending}"
        write(path, kind)
        if may_be_read(kind, path.suffix):
            continue
        with pytest.raises(FedKSeedError) as raised:
            Reader().file(str(path))
        said = str(raised.value)
        for part in (str(path), f"by its first bytes it is {words}"):
            assert part in said, (ending, said)
        assert remedy in said


@pytest.mark.parametrize("kind", ["xlsx", "pdf", "html", "json"])
def test_what_is_packed_in_a_file_is_named_too(tmp_path, kind):
    write(tmp_path / "inside", kind)
    path = tmp_path / "staff.csv.gz"
    path.write_bytes(gzip.compress((tmp_path / "inside").read_bytes()))
    with pytest.raises(FedKSeedError, match=r"by its first bytes what is packed in it is .*: unpack it"):
        Reader().file(str(path))


@pytest.mark.parametrize("kind", ["xls", "parquet"])
@pytest.mark.parametrize("zeros", [64, 4096])
def test_binary_files_with_zeros_in_every_second_place_are_no_text(tmp_path, kind, zeros):
    path = tmp_path / "staff.csv"
    write(path, kind)
    path.write_bytes(path.read_bytes()[:8] + b"A\0" * zeros + path.read_bytes()[8:])
    with pytest.raises(FedKSeedError, match=f"it is {KINDS[kind][0]}: name it staff{KINDS[kind][1]}"):
        Reader().file(str(path))


def test_a_damaged_document_is_said_to_be_damaged(tmp_path):
    write(path := tmp_path / "staff.xlsx", "xlsx")
    (tmp_path / "staff.csv").write_bytes(path.read_bytes()[:-99])
    with pytest.raises(FedKSeedError, match="it is an office document or ZIP file: it is damaged, copy it again"):
        Reader().file(str(tmp_path / "staff.csv"))


@pytest.mark.parametrize("ending", [*TEXT, *SHEETS, ".parquet", ".csv.gz"])
def test_an_empty_file_is_said_to_be_empty(tmp_path, ending):
    path = tmp_path / f"staff{ending}"
    path.touch()
    with pytest.raises(FedKSeedError, match="can't be read: it is empty, and holds no examples; save or copy it again"):
        Reader().file(str(path))


@pytest.mark.parametrize(
    ("name", "kind", "better"),
    [
        ("staff.csv", "xlsx", "staff.xlsx"),
        ("staff.CSV", "gzip", "staff.CSV.gz"),
        ("staff.csv.gz", "csv", "staff.csv"),
        ("staff.txt", "csv", "staff.csv"),
        ("staff", "jsonl", "staff.json"),
    ],
)
def test_the_name_that_is_proposed_is_read(tmp_path, name, kind, better):
    path = tmp_path / name
    write(path, kind)
    with pytest.raises(FedKSeedError, match=f"name it {better}$"):
        Reader().file(str(path))
    path.rename(tmp_path / better)
    assert Reader().file(str(tmp_path / better)).examples


def test_a_folder_names_what_is_in_it(tmp_path):
    for name, kind in (("hr.csv", "xlsx"), ("it.docx", "docx"), ("legal.xlsx", "html")):
        write(tmp_path / name, kind)
    with pytest.raises(FedKSeedError) as raised:
        Reader().folder(str(tmp_path))
    for words in ("name it hr.xlsx", "it is a Word document", "it is a web page"):
        assert words in str(raised.value)
