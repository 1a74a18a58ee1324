"""Everything that travels between server and clients: records, their bytes, the precision of their numbers.

    records.py    the records that travel
    codec.py      their bytes, one row a kind of message
    numbers.py    the precision of numbers
    int8.py       numbers in 8 bits each
    delta.py      a message as the difference to an earlier one

docs/wire.md is the specification.
"""

from .codec import KINDS, Head, Kind, add_kind, decode, encode, kind_of
from .delta import restore, shorten
from .records import Broadcast, Change, Delta, History, Lack, Run, Subtotal, Upload, Values

__all__ = [
    "KINDS", "Broadcast", "Change", "Delta", "Head", "History", "Kind", "Lack", "Run", "Subtotal", "Upload", "Values",
    "add_kind", "decode", "encode", "kind_of", "restore", "shorten",
]  # fmt: skip
