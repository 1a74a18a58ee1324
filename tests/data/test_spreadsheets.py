"""Sheets that office programs write, read as rows of text; broken and hostile ones are refused."""

import base64
import zipfile
import zlib
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pytest
from openpyxl.styles import Font

from fedkseed import FedKSeedError
from fedkseed.data import spreadsheets
from fedkseed.data.layouts import Example
from fedkseed.data.sources import Reader
from fedkseed.data.spreadsheets import sheets_of

ROWS = [["Frage", "Antwort"], ["Wann?", "Um 8;\nnicht später"], ["Wo?", "Hier, “links”"]]
EXAMPLES = [Example(*row) for row in ROWS[1:]]
# What xlwt writes of ROWS, in the format of Excel 97.
XLS = """
c-rk)O=uHA6#izDG(R+H5>ug7%Tlmv?M1v4q^=cgy;!Osks{c%T{JXq$~GW+v08H!1W$^WLN8vbUi?81dh;Mu^dJaAqTW0S3Le_5Z{F@=syQ^E
MP<Ha-oAbF&EL+vnSJ|mIaOJ>*IC6+*pC2eP82P5HbE)sKO{l<jw4n79--tY{8NZVXd+uecpQHbmUAfQy9y0=gU?6;?<t+c3`UBUsc#?-avyR+
_F;gez%8;Q(80Y*vz%nPiRB$;K4E!)Emv6%5Vs=6uxyO<_Is=Ngx1Y@3CMaMaGAGk*@JdGm#g^VHQ{nY7_{@b!rz(E6>P;KXx@fR%d~Ta3Nkc-
i}>p3z!%?BpX$oKv33Ene_Lx0H?UvVg1{V{abDnMT98h_b;2P#ciOa8FvbokQwXk+W_!>ooh#ZUvSf3XWu$@QXZ8MlF)KfLrlil#d@PwZ)srn6
afrjn!-S1KYJ00*peGB{n8h|dCbx5T|Ku9?kF#5}lAJ;t>nV1QByI33w?Dr+GBIkLV#^$F`R>86U5*6~F3A#9IKeqQ9Om}2+|BYb*SdxEPL>%O
AKiOK+dXAyo;g=Iw};x<%Xn?<sMB|nUjB6SVORNsv5WMj;p&CV(i>v|-E>e*QF(dIqfhjSn>QpL8U9^(o5(ws9lvZS5iRNU-SJMpHmoAXYKo=%
B;Stk_@V({Fkkcdg82cDuQlLn%ny2e_w9$|fvlx*UuM$w_5(2}C@3f>C@3f>C^P}#eV)rt(x4k=a1apo{_Ct#s;S>3|1FN8NLPu1!$TApmMBm>
-_-iqjF9l_66-AE|1XrtQtLJaq!Zka>895&1#zN&JnJr){CzIeZ2Prl`uT_3{|;&r(-8
"""
ODS = """<?xml version="1.0"?><office:document-content xmlns:office="urn:oasis:names:tc:opendocument:xmlns:office:1.0"
 xmlns:table="urn:oasis:names:tc:opendocument:xmlns:table:1.0"
 xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0">
<office:body><office:spreadsheet><table:table table:name="Tabelle1">{}<table:table-row
 table:number-rows-repeated="1048000"><table:table-cell table:number-columns-repeated="1024"/></table:table-row>
</table:table></office:spreadsheet></office:body></office:document-content>"""


def workbook(path: Path, **sheets: list[list[Any]]) -> Path:
    """A file of openpyxl; the sheets whose names begin with `hidden` are."""
    book = openpyxl.Workbook()
    book.remove(book.worksheets[0])
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        sheet.sheet_state = "hidden" if name.startswith("hidden") else "visible"
        for row in rows:
            sheet.append(row)
    if all(name.startswith("hidden") for name in sheets):
        book.create_sheet("empty")
    book.save(path)
    return path


def ods(path: Path, rows: str) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        kind = "application/vnd.oasis.opendocument.spreadsheet"
        packed.writestr("mimetype", kind)
        packed.writestr("content.xml", ODS.format(rows))
        packed.writestr(
            "META-INF/manifest.xml", f'<manifest><file-entry full-path="/" media-type="{kind}"/></manifest>'
        )
    return path


def ods_row(cells: list[str]) -> str:
    texts = ("".join(f"<text:p>{line}</text:p>" for line in cell.split("\n")) for cell in cells)
    each = (f'<table:table-cell office:value-type="string">{text}</table:table-cell>' for text in texts)
    return f"<table:table-row>{''.join(each)}</table:table-row>"


def file_of(path: Path, **options: Any) -> Any:
    return Reader(**options).file(str(path))


def test_the_same_rows_are_read_of_each_kind_of_file(tmp_path):
    workbook(tmp_path / "a.xlsx", Fragen=ROWS)
    ods(tmp_path / "a.ods", "".join(map(ods_row, ROWS)))
    (tmp_path / "a.XLS").write_bytes(zlib.decompress(base64.b85decode("".join(XLS.split()))))
    for name, sheet in (("a.xlsx", "Fragen"), ("a.ods", "Tabelle1"), ("a.XLS", "Fragen")):
        file = file_of(tmp_path / name)
        assert file.examples == EXAMPLES
        assert file.summary() == f"{name}: 2 rows as instruction and response (Frage, Antwort); sheet '{sheet}'"
        assert file.places == ["row 2", "row 3"]


def test_cells_that_are_no_text_are_read_as_text(tmp_path):
    cells = [
        1.0,
        2.5,
        True,
        date(2024, 5, 1),
        datetime(2024, 5, 1, 13, 30),
        time(8, 5),
        timedelta(hours=30),
        None,
        "=1+1",
    ]
    path = workbook(tmp_path / "a.xlsx", S=[["question", "answer"], *([cell, "x"] for cell in cells)])
    assert [row[0] for row in sheets_of(path, 1 << 20)[0].rows[1:]] == [
        "1", "2.5", "true", "2024-05-01", "2024-05-01T13:30:00", "08:05:00", "1 day, 6:00:00", "", "",
    ]  # fmt: skip
    file = file_of(path)  # a formula has the result that its program kept, and this one kept none
    assert "2 without a question" in file.summary()
    assert len(file.examples) == len(cells)


def test_merged_cells_are_those_of_each_row_and_empty_rows_are_none(tmp_path):
    book = openpyxl.Workbook()
    sheet: Any = book.active
    for row in (["Frage", "Antwort", ""], ["Wann?", "früh", ""], [None, "spät", ""], [], ["Wo?", "hier", ""], [], []):
        sheet.append(row)
    sheet.merge_cells("A2:A3")
    sheet.merge_cells("E1:E3")  # right of all cells
    sheet["B400"].font = Font(bold=True)
    book.save(tmp_path / "a.xlsx")
    file = file_of(tmp_path / "a.xlsx")
    assert file.examples == [Example("Wann?", "früh"), Example("Wann?", "spät"), Example("Wo?", "hier")]
    assert (file.places, file.empty, file.unused) == (["row 2", "row 3", "row 5"], 0, {})


def test_sheets_that_are_not_used_and_lines_above_the_names_are_said(tmp_path):
    rows = [["Fragenkatalog 2024"], ["Stand", "Mai"], *ROWS]
    path = workbook(tmp_path / "a.xlsx", Legende=[["x", "y"], ["1", "2"]], Fragen=rows, leer=[], hidden=ROWS)
    file = file_of(path)
    assert file.examples == EXAMPLES
    assert file.places == ["sheet 'Fragen', row 4", "sheet 'Fragen', row 5"]
    assert file.summary().endswith(
        "; sheet 'Fragen', sheet 'Legende' not used (2 rows), hidden sheet 'hidden' not used (3 rows), 2 lines above "
        "the names of columns not used"
    )


def test_sheets_of_the_same_columns_are_read_together_and_of_others_refused(tmp_path):
    path = workbook(tmp_path / "a.xlsx", A=ROWS, B=[["Antwort", "Frage", "Datum"], ["da", "Wer?", date(2024, 1, 1)]])
    file = file_of(path)
    assert file.examples == [*EXAMPLES, Example("Wer?", "da")]
    assert file.places[-1] == "sheet 'B', row 2"
    assert "sheets 'A', 'B', not used: Datum (1)" in file.summary()
    workbook(path, A=ROWS, B=[["question", "answer"], ["q", "a"]])
    with pytest.raises(
        FedKSeedError, match=r"the sheets 'A' \(Frage, Antwort\) and 'B' \(question, answer\) have diff"
    ):
        file_of(path)


def test_a_sheet_with_other_columns_is_refused_with_their_names_and_can_be_named(tmp_path):
    path = workbook(tmp_path / "a.xlsx", Legende=[["a"], ["1"]], Daten=[["Text A", "Text B"], ["q", "r"]])
    columns = {"instruction": "Text A", "response": "Text B"}
    assert file_of(path, columns=columns).examples == [Example("q", "r")]
    workbook(path, Legende=[["a"], ["1"]], Daten=[["Text A", "Text B"], ["q", "r"], ["s", "t"]])
    with pytest.raises(
        FedKSeedError, match=r"a.xlsx, sheet 'Daten', row 2: no column .*; columns found: Text A, Text B"
    ):
        file_of(path)
    workbook(path, S=[["Frage", "Antwort", "Antwort"], ["q", "a", "b"]])
    with pytest.raises(FedKSeedError, match=r"a.xlsx, row 1: two columns have the name 'Antwort'; rename one"):
        file_of(path)
    for rows in ([], [["Frage", "Antwort"]]):
        with pytest.raises(FedKSeedError, match=r"a.xlsx holds no examples"):
            file_of(workbook(path, S=rows))
    with pytest.raises(FedKSeedError, match=r"a.xlsx has rows in hidden sheets alone"):
        file_of(workbook(path, hidden=ROWS))


def test_a_file_that_is_none_or_damaged_is_refused(tmp_path):
    path = workbook(tmp_path / "a.xlsx", S=ROWS)
    whole = path.read_bytes()
    for content in (b"", b"no sheet", b"<html><table><tr><td>Frage</td></tr></table></html>", whole[:-40], whole[:900]):
        path.write_bytes(content)
        with pytest.raises(FedKSeedError, match=r"a.xlsx can't be read: "):
            file_of(path)
    rng = np.random.default_rng(3)
    for _ in range(150):
        flipped = bytearray(whole)
        flipped[rng.integers(len(whole))] ^= int(rng.integers(1, 256))
        path.write_bytes(flipped)
        with suppress(FedKSeedError):
            file_of(path)


def test_a_cell_far_from_the_others_is_refused_before_it_takes_memory(tmp_path):
    book = openpyxl.Workbook()
    sheet: Any = book.active
    sheet["A1"], sheet["XFD1048576"] = "Frage", "x"
    book.save(tmp_path / "a.xlsx")
    with pytest.raises(FedKSeedError, match=r"sheet1.xml has 1,048,576 rows of 16,384; remove what stands far"):
        file_of(tmp_path / "a.xlsx")
    cell = '<table:table-cell table:number-columns-repeated="16384" office:value-type="string"><text:p>x</text:p>'
    row = f'<table:table-row table:number-rows-repeated="1048576">{cell}</table:table-cell></table:table-row>'
    with pytest.raises(FedKSeedError, match=r"a.ods can't be read: Cell limit exceeded"):
        file_of(ods(tmp_path / "a.ods", row))


def test_a_file_that_unpacks_to_more_than_it_may_is_refused_whatever_it_claims(tmp_path, monkeypatch):
    path = tmp_path / "a.xlsx"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("xl/worksheets/sheet1.xml", bytes(1 << 24))
        packed.writestr("xl/workbook.xml", bytes(1 << 20))
    with pytest.raises(FedKSeedError, match=r"a.xlsx unpacks to more than 16,777,216 bytes; is it a data file"):
        file_of(path)
    claimed = path.read_bytes().replace((1 << 24).to_bytes(4, "little"), (1 << 10).to_bytes(4, "little"))
    path.write_bytes(claimed)
    with pytest.raises(FedKSeedError, match=r"a.xlsx can't be read: "):
        file_of(path)
    monkeypatch.setattr(spreadsheets, "MAX_CELLS", 5)
    with pytest.raises(FedKSeedError, match=r"at most 5 cells, empty ones too, and .*sheet1.xml has 3 rows"):
        file_of(workbook(path, S=ROWS))
