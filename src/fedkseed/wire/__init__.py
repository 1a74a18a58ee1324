"""Everything that travels between server and clients: records, their bytes, the precision of their numbers.

records.py: what travels. codec.py: its bytes, one row a kind of message. numbers.py, int8.py: the precision of numbers.
delta.py: a message as the difference to an earlier one.
"""

from .codec import KINDS, Head, Kind, add_kind, decode, encode, kind_of
from .delta import restore, shorten
from .records import Broadcast, Change, Delta, History, Lack, Run, Upload, Values

__all__ = [
    "KINDS",
    "Broadcast",
    "Change",
    "Delta",
    "Head",
    "History",
    "Kind",
    "Lack",
    "Run",
    "Upload",
    "Values",
    "add_kind",
    "decode",
    "encode",
    "kind_of",
    "restore",
    "shorten",
]
