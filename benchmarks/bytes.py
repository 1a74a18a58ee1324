"""Bytes of a client and round of FedKSeed: real messages, encoded. `python benchmarks/bytes.py`"""

import numpy as np
from rich.console import Console
from rich.table import Table

from fedkseed import KSeed, Pool, Run, Upload, encode

STEPS = 200  # τ of the paper
SIZES = {"fedkseed": 4096, "fedkseed-pro": 1024}  # K of the paper
PAPER = {"fedkseed": 17_988, "fedkseed-pro": 9_796}


def main() -> None:
    table = Table("algorithm", "K", "down", "up", "both", "the paper's arithmetic")
    for name, size in SIZES.items():
        run = Run(Pool(0, size, "hadamard"), bytes(32))
        strategy = KSeed(run, rounds=1, steps=STEPS, importance=name == "fedkseed-pro")
        down = len(encode(strategy.broadcast(strategy.init(), [0])[0]))
        pairs = np.zeros(STEPS, np.uint32), np.zeros(STEPS, np.float32)
        up = len(encode(Upload(run, 0, 0, 1, 0.0, *pairs)))
        table.add_row(name, str(size), f"{down:,}", f"{up:,}", f"{down + up:,}", f"{PAPER[name]:,}")
    Console().print(table)


if __name__ == "__main__":
    main()
