"""Bytes of a client and round of FedKSeed, as lengths of encoded messages. `python benchmarks/bytes.py`"""

import numpy as np
from rich.console import Console
from rich.table import Table

from fedkseed import KSeed, LocalWork, Pool, Run, State, Upload, encode
from fedkseed.wire.delta import shorten
from fedkseed.wire.numbers import WIRES, scalars

STEPS = 200  # τ of the paper
SIZES = {"fedkseed": 4096, "fedkseed-pro": 1024}  # K of the paper
PAPER = {"fedkseed": 17_988, "fedkseed-pro": 9_796}
COHORTS = (1, 4, 10)  # clients a round, for broadcasts sent as differences
BEFORE = 40  # rounds before the broadcast that is sent as a difference


def main() -> None:
    table = Table("algorithm", "K", "wire", "down", "up", "both", "the paper's arithmetic")
    for name in SIZES:
        for wire in WIRES:
            strategy = made(name, wire)
            down = len(encode(strategy.broadcast(strategy.init(), [0])[0]))
            up = len(encode(upload(strategy, 0, 0)))
            cells = (name, str(SIZES[name]), wire, f"{down:,}", f"{up:,}", f"{down + up:,}", f"{PAPER[name]:,}")
            table.add_row(*cells)
    Console().print(table)
    table = Table(
        "algorithm", "wire", "clients a round", "down", "down, as a difference", title=f"after {BEFORE} rounds"
    )
    for name in SIZES:
        for wire in WIRES:
            for cohort in COHORTS:
                whole, shorter = difference(made(name, wire), cohort)
                table.add_row(name, wire, str(cohort), f"{whole:,}", f"{shorter:,}")
    Console().print(table)


def made(name: str, wire: str) -> KSeed:
    run = Run(Pool(0, SIZES[name], "hadamard"), bytes(32))
    return KSeed(run, LocalWork(BEFORE + 1, steps=STEPS), importance=name == "fedkseed-pro", wire=wire)


def upload(strategy: KSeed, round_: int, client: int) -> Upload:
    """An upload with scalars from Student's t with 4 degrees of freedom, of which a few are large, as in training."""
    found = scalars(8 * np.random.default_rng([round_, client]).standard_t(4, STEPS), strategy.wire)
    return Upload(strategy.run, round_, client, 10, 1.0, found, strategy.wire)


def difference(strategy: KSeed, cohort: int) -> tuple[int, int]:
    """Bytes of a broadcast to a client that has not kept the last broadcast, and to a client that has."""
    state: State = strategy.init()
    sent = before = b""
    for round_ in range(BEFORE + 1):
        sent, before = encode(strategy.broadcast(state, [0])[0]), sent
        state = strategy.aggregate(state, [upload(strategy, round_, client) for client in range(cohort)])
    return len(sent), len(shorten(sent, before))


if __name__ == "__main__":
    main()
