"""Kinds of files by their first bytes, whatever their names say, each with what to do."""

import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile, ZipFile

from ..files import border
from .text_encodings import BOM, marked_encoding

LOOKED_AT, MOST = 4096, 1 << 26  # bytes of the beginning, and of an old document in which its parts are looked for
CONVERT = "open it in its program, and save the table as .xlsx or CSV"
UNPACK = "unpack it, and give the files in it"
ZIP, OLE = "PK\x03\x04", "\xd0\xcf\x11\xe0"  # of documents of Office, and of those before 2007 or with a password
DOCUMENT = f"{ZIP}(?s:.{{26}})mimetypeapplication/vnd.oasis.opendocument."
TEXT = (".csv", ".tsv", ".json", ".jsonl")


class FileKind(NamedTuple):
    """A kind of files, which are read under some endings, of which the first is proposed, or not at all."""

    begins: str  # a pattern
    title: str
    endings: tuple[str, ...] = ()
    remedy: str = ""  # none: to name it, or to convert it where it is read under no ending
    part: str = ""  # of an office document: a pattern, in the names of a ZIP file's members or in the whole file


KINDS = (  # the first that fits
    FileKind(r"PAR1[^ -~]", "a Parquet file", (".parquet",)),
    FileKind(r"\x1f\x8b", "a file packed by gzip", (".gz",)),
    FileKind(r"\x28\xb5\x2f\xfd", "a file packed by Zstandard", (".zst",)),
    FileKind(r"BZh\d1AY|7z\xbc\xaf|Rar!\x1a|\xfd7zXZ", "a packed file", remedy=UNPACK),
    FileKind("%PDF-", "a PDF document", remedy="copy its table into a sheet, and save that as .xlsx"),
    FileKind("SQLite format 3\0", "a database (SQLite)", remedy="export its table as CSV"),
    FileKind(r"\s*(?i:<!doctype html|<(html|table|head|meta)\b)", "a web page (HTML), which some programs call .xls"),
    FileKind(r"\s*<\?xml", "XML, which some programs call .xls"),
    FileKind(r"\s*(\{\s*\"|\[\s*[\[{])", "JSON", (".json", ".jsonl")),
    FileKind(f"{DOCUMENT}(?!spread)", "a document of OpenDocument (.odt)"),
    FileKind(ZIP, "a sheet of OpenDocument", (".ods",), part=r"^content\.xml$"),
    FileKind(ZIP, "a binary Excel workbook (.xlsb)", part=r"^xl/workbook\.bin$"),
    FileKind(ZIP, "a Word document (.docx)", part=r"^word/document\.xml$"),
    FileKind(ZIP, "a presentation (.pptx)", part=r"^ppt/presentation\.xml$"),
    FileKind(ZIP, "an Excel workbook", (".xlsx", ".xlsm"), part=r"^xl/|^\[Content_Types\]"),
    FileKind(ZIP, "a file of Numbers or Pages", part=r"^Index/|^Index\.zip$"),
    FileKind(ZIP, "a ZIP file", remedy=UNPACK, part="^."),
    FileKind(ZIP, "an office document or ZIP file", (".xlsx", ".xlsm", ".ods"), "it is damaged, copy it again"),
    FileKind(OLE, "a document with a password", remedy="save it as .xlsx without one", part="\0P\0a\0c\0k\0a\0g\0e\0"),
    FileKind(OLE, "an Excel 97 workbook", (".xls",), part="B\0o\0o\0k\0|W\0o\0r\0k\0b\0o\0o\0k\0"),
    FileKind(OLE, "a Word document (.doc)", part="W\0o\0r\0d\0D\0o\0c"),  # may have sheets in it, as sheets have texts
    FileKind(OLE, "a document of an office program before 2007", (".xls",), CONVERT),
    FileKind(r"[^\0-\x08\x0e-\x1a\x1c-\x1f]+\Z", "text", TEXT),
)


def what_it_is(path: Path, ending: str, packed: bytes = b"") -> str:
    """The kind of a file, and what to do; empty where that is unknown, or the ending of its name says it.

    Args:
        packed: the first bytes of what is packed in the file, if they are meant.

    Raises:
        FedKSeedError: it can't be read.
    """
    with border(f"the data file {path} can't be read"), path.open("rb") as file:
        begin = packed or file.read(LOOKED_AT)
        latin, parts = begin.removeprefix(BOM).decode("latin-1"), ""
        if latin.startswith(OLE):
            parts = latin + file.read(MOST).decode("latin-1")
        elif latin.startswith(ZIP) and not packed:
            with suppress(BadZipFile, ValueError, NotImplementedError), ZipFile(file) as members:
                parts = "\n".join(members.namelist())
    texts = (latin, begin.decode(marked_encoding(begin) or "latin-1", "ignore").removeprefix("\ufeff"))
    alike = (kind for text in texts for kind in KINDS if re.match(kind.begins, text))
    kind = next((kind for kind in alike if re.search(kind.part, parts, re.MULTILINE)), None)
    if kind is None or ending in kind.endings:
        return ""
    if packed:
        return f"by its first bytes what is packed in it is {kind.title}: {UNPACK}"
    before = path.name if kind.endings in ((".gz",), (".zst",)) and ending in TEXT else path.stem
    name = before if Path(before).suffix in kind.endings else f"{before}{[*kind.endings, ''][0]}"
    return f"by its first bytes it is {kind.title}: {kind.remedy or (f'name it {name}' if kind.endings else CONVERT)}"
