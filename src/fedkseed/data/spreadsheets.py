"""Sheets of xlsx, xlsm, xls and ods, each cell as text."""

import re
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile, is_zipfile

from ..errors import FedKSeedError, first_line, needs_extra
from .layouts import as_text

MAX_CELLS = 1 << 26  # of a sheet from its first cell to its last: all are in memory, also the empty ones
PIECE = 1 << 20  # bytes read at once
CELL = re.compile(rb"""\br\s*=\s*["']([A-Za-z]{0,4})(\d{1,9})["']""")  # the address of a row or a cell of xlsx
LONGEST = 32  # bytes of such an address


class Sheet(NamedTuple):
    """The rows of a sheet, the first being that which its program calls 1; those at the end have some text."""

    name: str
    hidden: bool
    rows: list[list[str]]


def sheets_of(path: Path, max_bytes: int) -> list[Sheet]:
    """The sheets of a file that have rows.

    Args:
        max_bytes: what the file may unpack to.

    Raises:
        FedKSeedError: it is no such file, damaged, has a password, or is beyond a limit.
    """
    with needs_extra(f"reading {path} needs", "excel"):
        import python_calamine as calamine
    try:
        if is_zipfile(path):
            _require_size(path, max_bytes)
        with calamine.load_workbook(path) as book:
            sheets = []
            for about in book.sheets_metadata:
                if about.typ == calamine.SheetTypeEnum.WorkSheet:
                    hidden = about.visible != calamine.SheetVisibleEnum.Visible
                    sheets.append(Sheet(about.name, hidden, _rows(book.get_sheet_by_name(about.name))))
    except (FedKSeedError, KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # of many kinds for a damaged file; a panic of Rust is no Exception
        remedy = "open it in its program, and save it as .xlsx without a password"
        raise FedKSeedError(f"the data file {path} can't be read: {first_line(error)}; {remedy}") from error
    return [sheet for sheet in sheets if any(map(any, sheet.rows))]


def _rows(sheet: Any) -> list[list[str]]:
    rows = [[str(as_text(cell)) for cell in row] for row in sheet.to_python(skip_empty_area=False)]
    for (first, column), (last, _) in sheet.merged_cell_ranges or ():  # of ods there are none
        for row in rows[first + 1 : last + 1]:
            row[column : column + 1] = rows[first][column : column + 1]  # a range may be right of all cells
    return rows


def _require_size(path: Path, max_bytes: int) -> None:
    """Refuse a file that unpacks to too much, whatever it claims, or whose first and last cell are too far apart."""
    size = 0
    with ZipFile(path) as packed:
        for member in packed.infolist():
            columns, last, end = {b""}, 0, b""
            with packed.open(member) as file:
                while piece := file.read(PIECE):
                    size += len(piece)
                    if size > max_bytes:
                        raise FedKSeedError(f"{path} unpacks to more than {max_bytes:,} bytes; is it a data file?")
                    addresses = CELL.findall(end + piece) if "/worksheets/" in member.filename else []
                    columns.update(column.upper() for column, _ in addresses)
                    last, end = max([last, *(int(row) for _, row in addresses)]), piece[-LONGEST:]
            far = max(columns, key=lambda column: (len(column), column))
            width = reduce(lambda before, letter: 26 * before + letter - 64, far, 0)  # 1 of A, 27 of AA
            if width * last > MAX_CELLS:
                raise FedKSeedError(
                    f"{path}: a sheet has at most {MAX_CELLS:,} cells, empty ones too, and {member.filename} has "
                    f"{last:,} rows of {width:,}; remove what stands far from the others"
                )
