"""The test vectors of docs/aggregation.md, src/fedkseed/strategies/vectors.json. `make vectors` prints them anew.

Uploads are the bytes of messages in hexadecimal; numbers of a state are integers, or float64 as `float.hex`.
"""

import json
import math
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from fedkseed import KSeed, LocalWork, Pool, Run, State, decode, encode
from fedkseed.strategies.robust import RULES
from fedkseed.strategy import Settings, Strategy, Trust
from fedkseed.wire.numbers import rounded, scalar
from fedkseed.wire.records import Change, Upload

PATH = Path(str(files("fedkseed.strategies") / "vectors.json"))
RUN = Run(Pool(1, 16, "hadamard"), bytes(range(32)))
NONE = np.empty(0, np.uint32)
CASES = [
    *({"name": rule, "trust": {"rule": rule}} for rule in RULES),
    {"name": "mean, Pro", "importance": True},
    {"name": "mean, signs", "wire": "sign"},
    {"name": "mean, equal weights", "trust": {"most_examples": 1}},
    {"name": "clipped, agreement", "trust": {"rule": "clipped", "agreement": True}},
    {"name": "clipped, agreement, warm-up", "trust": {"rule": "clipped", "agreement": True, "warmup": 2}},
    {"name": "mean, some changes", "changes": True},
    {"name": "nnm-trimmed, changes", "changes": True, "trust": {"rule": "nnm-trimmed"}},
]


def strategy(case: dict[str, Any]) -> Strategy[State]:
    local = LocalWork(rounds=3, steps=6, lr=0.01, probes=2)
    own = LocalWork(rounds=3, steps=2, steps_of="sgd") if case.get("changes") else None
    trust, importance = Trust(**case.get("trust", {})), case.get("importance", False)
    return KSeed.make(Settings(RUN, local, own, wire=case.get("wire"), trust=trust), importance=importance)


def uploads(case: dict[str, Any], round_: int) -> list[str]:
    """Five clients' messages: random numbers, one of them a hundred times as large, one probe that moved nothing."""
    made, wire = [], case.get("wire", "compact")
    for client in range(5):
        rng = np.random.default_rng([round_, client])
        found = rng.normal(size=16 if case.get("changes") and client % 2 else 12) * (100 if client == 3 else 1)
        if case.get("changes") and client % 2:
            values = rounded(found * 1e-3, "compact")
            made.append(Change(RUN, round_, client, 10 + client, 1.5, 0, values, NONE, "compact"))
        else:
            scalars = np.array([scalar(x, math.inf, wire) for x in found], np.float32)
            scalars[client] = math.nan
            made.append(Upload(RUN, round_, client, 10 + client, 1.5, scalars, wire))
    return [encode(one).hex() for one in made]


def next_state(case: dict[str, Any], order: int = 1) -> list[dict[str, Any]]:
    """The states after each round of a case, with the uploads in a given order (1 or -1)."""
    of = strategy(case)
    state, found = of.server.init(), []
    for messages in case["uploads"]:
        state = of.aggregate(state, [decode(bytes.fromhex(data), Upload, Change) for data in messages[::order]])
        found.append(plain(state))
    return found


def plain(state: State) -> dict[str, Any]:
    table: dict[str, Any] = {"round": state.round}
    for field in fields(state)[1:]:
        numbers = getattr(state, field.name)
        if numbers.size:
            table[field.name] = [x.hex() for x in numbers.tolist()] if numbers.dtype.kind == "f" else numbers.tolist()
    return table


def vectors() -> dict[str, Any]:
    made = []
    for case in CASES:
        full = {**case, "uploads": [uploads(case, 0), uploads(case, 1)]}
        made.append({**full, "after": next_state(full)})
    return {"version": 2, "rounds": made}


if __name__ == "__main__":
    PATH.write_text(json.dumps(vectors(), indent=1) + "\n")
    print(f"wrote {PATH}")
