"""Costs of a simulated federation beyond its clients' training: milliseconds a visit, beside pfl-research and Flower.

    python benchmarks/simulation.py [--only cnn lora messages fedkseed] [--pfl PYTHON] [--flower PYTHON] [--json]

The set-up is pfl-research's comparison on CIFAR-10, with synthetic data of its shapes: 1,000 users of 50 images, 50
users a round, one epoch in batches of 10 by SGD on one thread. Models, data and training are those of
peers_simulation/shared.py in each framework. A framework's rounds take turns with as many visits done bare, one
resident model in a plain loop, in the same process; what a round takes longer, divided by its visits, is the cost of
the framework.

    cnn        FedAvg of a network of 1,626,442 weights
    lora       FedAvg of adapters of 102,480 weights
    messages   of our `cnn`, the messages alone
    fedkseed   FedKSeed, K = 4,096, 200 scalars up, compact: the loss costs nothing, and all of a visit counts

--pfl and --flower name the Python of an environment that has PyTorch and `pfl` or `flwr[simulation]`.
"""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import median

from table import Row, new_parser, show

SCRIPTS = Path(__file__).parent / "peers_simulation"
TASKS = {
    "cnn": "FedAvg", "lora": "FedAvg of LoRA", "messages": "FedAvg, messages alone", "fedkseed": "FedKSeed, free loss",
}  # fmt: skip
SHARED = ("cnn", "lora")  # tasks of all frameworks


def row(framework: str, python: str, task: str, rounds: int, visits: int) -> Row:
    """The costs of a framework for one task, found by a process of its own; each spread is from least to most."""
    script = SCRIPTS / f"with_{framework}.py"
    command = [python, str(script), task, str(rounds), str(visits)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}; its messages are above")
    reported = json.loads(done.stdout.strip().rpartition("\n")[2])
    turns = [[seconds / visits * 1e3 for seconds in turn] for turn in reported["turns"]]
    beyond = [wall - bare for wall, _, bare, _ in turns]
    computed = [cpu - bare for _, cpu, _, bare in turns]
    whole = median(wall for wall, *_ in turns)
    return {
        "task": TASKS[task], "framework": ", ".join(reported["versions"]),
        "bare, ms a visit": median(bare for _, _, bare, _ in turns),
        "beyond bare, ms": median(beyond), "spread": f"{min(beyond):.2f} to {max(beyond):.2f}",
        "beyond bare, CPU ms": median(computed), "its spread": f"{min(computed):.2f} to {max(computed):.2f}",
        "visits a minute": round(60e3 / whole),
    }  # fmt: skip


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--pfl", help="the Python of an environment with pfl")
    parser.add_argument("--flower", help="the Python of an environment with flwr[simulation]")
    parser.add_argument("--rounds", type=int, default=8, help="turns that are measured, after one that warms up")
    parser.add_argument("--cohort", type=int, default=50, help="visits of a round")
    options = parser.parse_args()
    frameworks = {"fedkseed": sys.executable, "pfl": options.pfl, "flower": options.flower}
    rows = [
        row(framework, python, task, options.rounds, options.cohort)
        for task, (framework, python) in product(options.only, frameworks.items())
        if python and (framework == "fedkseed" or task in SHARED)
    ]
    show("a simulated client's visit", rows, as_json=options.json)


if __name__ == "__main__":
    main()
