"""Encodings of text: by a byte order mark, by zeros, as UTF-8, or guessed by how five languages are written."""

import codecs
import re

from ..errors import FedKSeedError

BOM = codecs.BOM_UTF8
MARKED = {  # byte order marks of other encodings, the longer first, since one begins with another -> their names
    **dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-32"),
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-16"),
}
REMEDY = "; save the file as UTF-8, which Excel calls 'CSV UTF-8'"
# What programs of offices write beside Unicode, as Excel's CSV, CSV (Macintosh) and CSV (MS-DOS); the likelier first.
GUESSED = {"cp1252": "Windows-1252", "mac_roman": "Mac Roman", "cp850": "DOS 850"}
SMALL = "àáâäæçèéêëìíîïñòóôöœùúûüß"
CAPITAL = SMALL[:-1].upper()
LETTER = f"A-Za-z{SMALL}{CAPITAL}"
MARKS = "–—…«»„“”‚¿¡§°€£©®™²³µ·•½ªº\xa0"
# Characters beyond ASCII as English, German, French, Spanish and Italian have them: at most two such letters in a row,
# a capital after no small one, a mark between no two letters. In a wrong encoding they stand elsewhere.
USUAL = re.compile(
    f"(?<![{SMALL}{CAPITAL}])[{SMALL}]{{1,2}}(?![{SMALL}{CAPITAL}])"
    f"|(?<![a-z{SMALL}{CAPITAL}])[{CAPITAL}](?![{SMALL}{CAPITAL}]{{2}})"
    f"|[’‘´]|(?<![{LETTER}])[{MARKS}]|[{MARKS}](?![{LETTER}])"
)
LEAST_USUAL = 0.8  # share of the characters beyond ASCII; with fewer, no guess is made
WORDS_SHOWN = 3  # of a guess


def marked_encoding(begin: bytes) -> str | None:
    """The encoding other than UTF-8 that the first bytes of a text show, by a mark or as every second one is zero."""
    for mark, encoding in MARKED.items():
        if begin.startswith(mark):
            return encoding
    zeros = [2 * half.count(0) > len(half) for half in (begin[1::2], begin[::2])]
    return {(True, False): "utf-16-le", (False, True): "utf-16-be"}.get((zeros[0], zeros[1]))


def encoding_of(content: bytes | bytearray, where: str) -> tuple[str, str]:
    """The encoding of a text without zeros and marks, and what to say of it: nothing of UTF-8.

    Text that is mostly valid UTF-8 is UTF-8: whoever decodes it refuses the rest.

    Raises:
        FedKSeedError: in none of the encodings does it look like a text of the five languages.
    """
    plain = len(content.decode("ascii", "ignore"))
    beyond = len(content) - plain
    valid = len(content.decode(errors="ignore").encode()) - plain
    if content.startswith(BOM) or 2 * valid > beyond or not beyond:
        return "utf-8", ""
    texts = {encoding: content.decode(encoding, "replace") for encoding in GUESSED}
    usual = {encoding: sum(map(len, USUAL.findall(text))) for encoding, text in texts.items()}
    encoding = max(GUESSED, key=usual.__getitem__)  # of equal ones the first
    found = dict.fromkeys(re.findall(r"\w*[^\x00-\x7f]\w*", texts[encoding]))
    words = ", ".join(f'"{word:.20}"' for word in list(found)[:WORDS_SHOWN])
    if usual[encoding] < LEAST_USUAL * beyond:
        others = ", ".join(GUESSED.values())
        raise FedKSeedError(f"{where}: not valid UTF-8, and no likely words as {others}, but {words}{REMEDY}")
    return encoding, f"read as {GUESSED[encoding]}, a guess, with {words}"


def decode(content: bytes | bytearray, where: str, encoding: str = "utf-8") -> str:
    """Decode a text; other bytes are refused with an error that names their place."""
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        byte = f"byte 0x{content[error.start]:02X} at {error.start + 1:,}"
        byte += ", perhaps of Windows-1252" if encoding == "utf-8" else ""
        name = GUESSED.get(encoding, encoding.upper())
        raise FedKSeedError(f"{where}: not valid {name} ({byte}){REMEDY}") from error
