"""The test vectors of docs/wire.md, tests/wire/vectors.json. `make vectors` prints them anew.

Floats are decimal numbers that are exact in their type; null is NaN, or what a message does not have. Bytes are
hexadecimal.
"""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from fedkseed.directions import Pool
from fedkseed.randomness import draw_directions
from fedkseed.tools.fuzz import pair, specimens
from fedkseed.wire.codec import KINDS, Record, encode
from fedkseed.wire.int8 import compact, pack
from fedkseed.wire.numbers import scalar
from fedkseed.wire.records import Run

PATH = Path(__file__).parent / "vectors.json"
TYPES: dict[str, type] = {  # of arrays; the others are float32
    "directions": np.uint32, "counts": np.uint32, "members": np.uint32, "numbers": np.uint32, "keys": np.uint8,
    "bundles": np.uint8, "there": np.bool_,
}  # fmt: skip
MASKING = ("Secured", "Masked", "Survivors")
FOUND = [0.0, 1.0, -1.00390625, 1.01171875, 0.3, -0.3, 8.123456789, 1e-50, 1e39, 3.39e38, -3.4e38, math.inf, math.nan]
CLIPS = [math.inf, float(np.float32(0.3)), float(np.float32(3.4e38))]  # as a broadcast carries them
NUMBERS = [[], [0.0, 0.0], [1.0, -2.0, 0.3], [1e-31, 0.0], [3.4e38, -1.0], [k / 64 for k in range(-70, 70)]]


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
    }


def draw(key: int, round_: int, client: int, size: int) -> dict[str, Any]:
    """Twelve directions; from eight with probabilities."""
    p = np.arange(size, dtype=np.float32) if size == 8 else None
    found = draw_directions(key, round_, client, 12, size, p)
    of = {"key": f"{key:016x}", "round": round_, "client": client, "size": size}
    return {**of, "probabilities": None if p is None else p.tolist(), "directions": found.tolist()}


def fields_of(record: Record) -> dict[str, Any]:
    return {field.name: plain(getattr(record, field.name)) for field in fields(record)}


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
    made = {}
    for name, value in table.items():
        match value:
            case {"base": base, "key": key, "size": size, "family": family}:
                made[name] = Run(
                    Pool(int(key, 16), size, family, bytes.fromhex(value.get("basis", ""))), bytes.fromhex(base)
                )
            case list() if name in TYPES and kind in MASKING:
                made[name] = np.array(value, TYPES[name])
            case list() if name == "counts" and kind == "History":
                made[name] = np.array(value, np.uint32).reshape(len(value), -1 if value else 2)
            case list():
                made[name] = np.array([x if name in TYPES else real(x) for x in value], TYPES.get(name, np.float32))
            case str() if name in ("difference", "broadcast", "data"):
                made[name] = bytes.fromhex(value)
            case _:
                made[name] = real(value) if name in ("loss", "clip") else value
    return of(**made)


def text() -> str:
    """One line a vector."""
    parts = []
    for name, found in vectors().items():
        lines = ",\n  ".join(json.dumps(one) for one in (found if isinstance(found, list) else [found]))
        parts.append(f'"{name}": ' + (f"[\n  {lines}\n ]" if isinstance(found, list) else lines))
    return "{\n " + ",\n ".join(parts) + "\n}\n"


if __name__ == "__main__":
    PATH.write_text(text())
    print(f"wrote {PATH}")
