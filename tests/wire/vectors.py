"""The test vectors of docs/wire.md, src/fedkseed/wire/vectors.json. `make vectors` prints them anew.

Floats are decimal numbers that are exact in their type; null is NaN, or what a message does not have. Bytes are
hexadecimal.
"""

import json
import math
import struct
import zlib
from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from fedkseed.directions import Pool
from fedkseed.randomness import draw_directions
from fedkseed.wire.codec import HEADER, KINDS, TRAILER, Record, decode, encode, sealed
from fedkseed.wire.int8 import compact, pack
from fedkseed.wire.numbers import scalar
from fedkseed.wire.records import Delta, History, Run
from tests.wire.fuzz import pair, specimens

PATH = Path(str(files("fedkseed.wire") / "vectors.json"))
TYPES: dict[str, type] = {  # of arrays; the others are float32
    "directions": np.uint32, "counts": np.uint32, "members": np.uint32, "numbers": np.uint32, "keys": np.uint8,
    "bundles": np.uint8, "there": np.bool_,
}  # fmt: skip
INTEGERS = {"clients": np.uint32, "values": np.int64, "sizes": np.int64, "counts": np.uint32}  # of a subtotal
MASKING = ("Secured", "Masked", "Survivors")
FOUND = [0.0, 1.0, -1.00390625, 1.01171875, 0.3, -0.3, 8.123456789, 1e-50, 1e39, 3.39e38, -3.4e38, math.inf, math.nan]
CLIPS = [math.inf, float(np.float32(0.3)), float(np.float32(3.4e38))]  # as a broadcast carries them
NUMBERS = [[], [0.0, 0.0], [1.0, -2.0, 0.3], [1e-31, 0.0], [3.4e38, -1.0], [k / 64 for k in range(-70, 70)]]


def single(x: float) -> bytes:
    return struct.pack("<f", x)


# Name, specimen, number of the refusal, and the bytes that take the place of its own.
DEFECTS = [
    ("another version", "upload, exact", 3, 4, b"\x03"),
    ("another kind", "upload, exact", 5, 5, b"\x01"),
    ("an unknown family", "upload, exact", 6, 6, b"\x63"),
    ("a pool of 15 for hadamard", "upload, exact", 7, 20, b"\x0e"),
    ("flags of two wires", "upload, exact", 8, 7, b"\x06"),
    ("more scalars than bytes", "upload, exact", 9, 68, b"\x07"),
    ("more than 2^24 scalars", "upload, sign", 9, 68, struct.pack("<I", (1 << 24) + 1)),
    ("another NaN", "upload, exact", 10, 72, b"\x01\0\xc0\x7f"),
    ("a bit after the last sign", "upload, sign", 10, 73, b"\x03"),
    ("a sign of a probe without one", "upload, sign, some skipped", 10, 72, b"\xff"),
    ("flag 8 and no probe without a sign", "upload, sign, some skipped", 10, 74, b"\0\0"),
    ("another NaN as loss", "upload, exact", 10, 64, b"\x01\0\xc0\x7f"),
    ("no examples", "upload, exact", 11, 60, bytes(4)),
    ("a scalar off the grid", "upload, exact", 11, 72, single(2.0**-17)),
    ("a scalar beyond 2^20", "upload, exact", 11, 72, single(2.0**21)),
    ("an infinite scalar", "upload, exact", 11, 72, single(math.inf)),
    ("a scale with low bits", "broadcast, compact", 10, 84, b"\x01"),
    ("an infinite scale", "broadcast, compact", 10, 84, single(math.inf)),
    ("a scale of which 127 are below 1e-30", "change, compact", 10, 84, bytes.fromhex("0089230a")),
    ("a code of -128", "change, compact", 10, 88, b"\x80"),
    ("a block whose largest code is not 127", "change, compact", 10, 96, b"\x7e"),
    ("an infinite coefficient", "broadcast, exact", 11, 84, single(math.inf)),
    ("lr = 0", "broadcast, exact", 11, 56, bytes(8)),
    ("a clip of NaN", "broadcast, exact", 11, 72, single(math.nan)),
    ("no steps", "broadcast, exact", 11, 76, bytes(4)),
    ("2^40 probes in all", "broadcast, exact", 11, 76, struct.pack("<II", 1 << 20, 1 << 20)),
    ("a negative probability", "broadcast, exact, probabilities", 11, 148, single(-1.0)),
    ("no counts a round", "history, nothing missed", 11, 68, bytes(4)),
    ("counts that do not add up", "history", 11, 80, b"\x03"),
    ("a direction beyond the pool", "history, directions", 11, 20, struct.pack("<I", 3)),
    ("a value that is not finite", "values", 11, 72, single(math.nan)),
    ("counts of a change that do not add up", "change, exact, counts", 11, 84, b"\x05"),
    ("clients that are not in order", "subtotal", 11, 76, struct.pack("<II", 12, 3)),
    ("two clients of one weight", "subtotal", 11, 60, struct.pack("<I", 1)),
    ("a size below 0", "subtotal", 11, 84 + 8 * 16 + 7, b"\x80"),
]


def vectors() -> dict[str, Any]:
    kept, whole = pair()
    return {
        "messages": [
            {"name": name, "kind": type(record).__name__, "fields": fields_of(record), "bytes": encode(record).hex()}
            for name, record in specimens().items()
        ],
        "delta": {"kept": kept.hex(), "delta": encode(specimens()["delta"]).hex(), "whole": whole.hex()},
        "draws": [draw(*labels) for labels in [(7, 0, 3, 16), (2**64 - 1, 9, 12, 2**32), (7, 1, 3, 8)]],
        "scalars": [
            {"found": number(x), "clip": number(clip), "wire": wire, "sent": number(scalar(x, clip, wire))}
            for wire in ("exact", "compact", "sign")
            for clip in CLIPS
            for x in FOUND
        ],
        "compact": [{"numbers": n, "bytes": pack(compact(np.array(n, np.float32))).hex()} for n in NUMBERS],
        "deltas": deltas(),
        "refused": [
            {"name": name, "kind": type(specimens()[of]).__name__, "refusal": number, "bytes": data.hex()}
            for name, of, number, data in refused()
        ],
    }


def deltas() -> list[dict[str, Any]]:
    """Differences that are answered by a lack, or refused, with the message kept."""
    kept, _ = pair()
    good = decode(encode(specimens()["delta"]), Delta)
    other = Run(replace(good.run.pool, key=good.run.pool.key ^ 1), good.run.base)
    longer = zlib.compressobj(9, zlib.DEFLATED, -15)
    body = longer.compress(bytes(len(kept) - HEADER.size - TRAILER.size + 1)) + longer.flush()
    cases: list[tuple[str, str, bytes | None, Delta]] = [
        ("nothing kept", "lack", None, good),
        ("another message kept", "lack", kept, replace(good, kept=good.kept ^ 1)),
        ("of another pool", "refused", kept, replace(good, run=other)),
        ("of another base", "refused", kept, replace(good, run=Run(good.run.pool, bytes(32)))),
        ("another checksum announced", "refused", kept, replace(good, whole=good.whole ^ 1)),
        ("a byte after the end of DEFLATE", "refused", kept, replace(good, difference=good.difference + b"\0")),
        ("DEFLATE cut short", "refused", kept, replace(good, difference=good.difference[:-1])),
        ("no DEFLATE", "refused", kept, replace(good, difference=b"\xff" * 9)),
        ("a byte too many", "refused", kept, replace(good, difference=body)),
    ]
    return [
        {"name": name, "outcome": outcome, "kept": old and old.hex(), "delta": encode(delta).hex()}
        for name, outcome, old, delta in cases
    ]


def refused() -> list[tuple[str, str, int, bytes]]:
    """Messages that no decoder takes, each but for its defect a specimen: name, specimen, refusal of docs/wire.md."""
    upload, made = encode(specimens()["upload, exact"]), list[tuple[str, str, int, bytes]]()
    made += [
        ("59 bytes", "upload, exact", 1, upload[:59]),
        ("another magic", "upload, exact", 2, b"PK" + upload[2:]),
        ("a bit flipped", "upload, exact", 4, upload[:-5] + bytes([upload[-5] ^ 1]) + upload[-4:]),
    ]
    for name, of, number, at, new in DEFECTS:
        whole = encode(specimens()[of])
        made.append((name, of, number, sealed(whole[:at], new, whole[at + len(new) : -TRAILER.size])))
    return made


def draw(key: int, round_: int, client: int, size: int) -> dict[str, Any]:
    """Twelve directions; from eight with probabilities."""
    p = np.arange(size, dtype=np.float32) if size == 8 else None
    found = draw_directions(key, round_, client, 12, size, p)
    of = {"key": f"{key:016x}", "round": round_, "client": client, "size": size}
    return {**of, "probabilities": None if p is None else p.tolist(), "directions": found.tolist()}


def fields_of(record: Record) -> dict[str, Any]:
    found = {field.name: plain(getattr(record, field.name)) for field in fields(record)}
    return found | ({"b": record.counts.shape[1]} if isinstance(record, History) else {})


def plain(value: Any) -> Any:
    match value:
        case Run():
            pool = value.pool
            named = {"key": f"{pool.key:016x}", "size": pool.size, "family": pool.family, "base": value.base.hex()}
            return named | ({"basis": pool.basis.hex()} if pool.basis else {})
        case np.ndarray():
            return [plain(part) for part in value.tolist()]
        case list():
            return [plain(part) for part in value]
        case bytes():
            return value.hex()
        case float():
            return number(value)
        case _:
            return value


def number(x: float) -> float | str | None:
    return None if math.isnan(x) else str(x) if math.isinf(x) else x


def real(x: float | str | None) -> float:
    return math.nan if x is None else float(x)


def record_of(kind: str, table: dict[str, Any]) -> Record:
    """A record from its fields."""
    of = next(row.record for row in KINDS.values() if row.record.__name__ == kind)
    made, b = {}, table.get("b")
    for name, value in table.items():
        if name == "b":
            continue
        match value:
            case {"base": base, "key": key, "size": size, "family": family}:
                made[name] = Run(
                    Pool(int(key, 16), size, family, bytes.fromhex(value.get("basis", ""))), bytes.fromhex(base)
                )
            case list() if name in TYPES and kind in MASKING:
                made[name] = np.array(value, TYPES[name])
            case list() if kind == "Subtotal":
                made[name] = np.array(value, INTEGERS[name])
            case list() if name == "counts" and kind == "History":
                made[name] = np.array(value, np.uint32).reshape(len(value), b)
            case list():
                made[name] = np.array([x if name in TYPES else real(x) for x in value], TYPES.get(name, np.float32))
            case str() if name in ("difference", "broadcast", "data"):
                made[name] = bytes.fromhex(value)
            case _:
                made[name] = real(value) if name in ("loss", "clip") else value
    return of(**made)


def text() -> str:
    return in_lines(vectors())


def in_lines(groups: dict[str, Any]) -> str:
    """JSON with one line a vector."""
    parts = []
    for name, found in groups.items():
        lines = ",\n  ".join(json.dumps(one) for one in (found if isinstance(found, list) else [found]))
        parts.append(f'"{name}": ' + (f"[\n  {lines}\n ]" if isinstance(found, list) else lines))
    return "{\n " + ",\n ".join(parts) + "\n}\n"


if __name__ == "__main__":
    PATH.write_text(text())
    print(f"wrote {PATH}")
