"""Bytes of a client and round of FedKSeed, as lengths of encoded messages. `python benchmarks/bytes.py`"""

from itertools import product

import numpy as np

from fedkseed import KSeed, LocalWork, Pool, Run, Settings, State, Strategy, Upload, encode
from fedkseed.strategies.uploads import wire_of
from fedkseed.wire.delta import shorten
from fedkseed.wire.numbers import WIRES, scalars

STEPS = 200  # τ of the paper
SIZES = {"fedkseed": 4096, "fedkseed-pro": 1024}  # K of the paper
PAPER = {"fedkseed": 17_988, "fedkseed-pro": 9_796}
COHORTS = (1, 4, 10)  # clients a round, for broadcasts sent as differences
BEFORE = 40  # rounds before the broadcast that is sent as a difference


def main() -> None:
    from table import Row, show  # not by other benchmarks, whose processes import no PyTorch

    rows, later = list[Row](), list[Row]()
    for name, wire in product(SIZES, WIRES):
        strategy = made(name, wire)
        down = len(encode(strategy.server.broadcast(strategy.server.init())))
        up = len(encode(upload(strategy, 0, 0)))
        row: Row = {"algorithm": name, "K": SIZES[name], "wire": wire, "down": down, "up": up, "both": down + up}
        rows.append(row | {"the paper's arithmetic": PAPER[name]})
        for cohort in COHORTS:
            whole, shorter = difference(strategy, cohort)
            later.append(
                {
                    "algorithm": name,
                    "wire": wire,
                    "clients a round": cohort,
                    "down": whole,
                    "down, as a difference": shorter,
                }
            )
    show("bytes of a client and round", rows)
    show(f"after {BEFORE} rounds", later)


def made(name: str, wire: str) -> Strategy[State]:
    run = Run(Pool(0, SIZES[name], "hadamard"), bytes(32))
    settings = Settings(run, LocalWork(BEFORE + 1, steps=STEPS), wire=wire)
    return KSeed.make(settings, importance=name == "fedkseed-pro")


def upload(strategy: Strategy[State], round_: int, client: int) -> Upload:
    """An upload with scalars from Student's t with 4 degrees of freedom, of which a few are large, as in training."""
    wire = wire_of(strategy.settings)
    found = scalars(8 * np.random.default_rng([round_, client]).standard_t(4, STEPS), wire)
    return Upload(strategy.run, round_, client, 10, 1.0, found, wire)


def difference(strategy: Strategy[State], cohort: int) -> tuple[int, int]:
    """Bytes of a broadcast to a client that has not kept the last broadcast, and to a client that has."""
    state: State = strategy.server.init()
    sent = before = b""
    for round_ in range(BEFORE + 1):
        sent, before = encode(strategy.server.broadcast(state)), sent
        state = strategy.aggregate(state, [upload(strategy, round_, client) for client in range(cohort)])
    return len(sent), len(shorten(sent, before))


if __name__ == "__main__":
    main()
