"""The work that every framework does in `simulation.py`: models, synthetic data, bare training, and the clock.

It needs PyTorch alone, so that each framework can be run in an environment of its own.

    cnn     3x3 convolutions to 32 and 64 channels, pooling by 2, dense layers of 128 and 10: 1,626,442 weights, the
            layers of the network that pfl-research trains on CIFAR-10, without dropout
    lora    the same, frozen, with adapters of rank 8 beside both dense layers: 102,480 weights

A user holds 50 images of 32 x 32 x 3 and takes one epoch of SGD in batches of 10: five steps.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

USERS, COHORT, EXAMPLES, BATCH, LR = 1_000, 50, 50, 10, 0.01
DISTINCT = 100  # users' data repeat after as many: 61 MB of images rather than 614
RANK = 8
MODELS = ("cnn", "lora")


class Adapted(nn.Module):
    """A dense layer with an adapter: W x + b + B A x, with B = 0 at the start."""

    def __init__(self, dense: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.dense = dense.requires_grad_(False)
        rows, columns = dense.weight.shape
        self.a = nn.Parameter(torch.randn(RANK, columns, generator=generator) / columns**0.5)
        self.b = nn.Parameter(torch.zeros(rows, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x) + linear(linear(x, self.a), self.b)


def model(name: str) -> nn.Sequential:
    """The network of one of MODELS; its tuned weights are those that require gradients, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    made = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    for tensor in made.parameters():
        nn.init.normal_(tensor, 0, tensor[0].numel() ** -0.5 if tensor.ndim > 1 else 0, generator=generator)
    if name == "lora":
        made.requires_grad_(False)
        for place, layer in enumerate(made):
            if isinstance(layer, nn.Linear):
                made[place] = Adapted(layer, generator)
    return made


def tuned(network: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained and sent."""
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def users() -> list[tuple[Tensor, Tensor]]:
    """Images and labels of each user, shapes (50, 3, 32, 32) and (50,)."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(DISTINCT, EXAMPLES, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (DISTINCT, EXAMPLES), generator=generator)
    return [(images[user % DISTINCT], labels[user % DISTINCT]) for user in range(USERS)]


def batches(user: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch of a user's data."""
    return zip(*(part.split(BATCH) for part in user), strict=True)


def train(network: nn.Module, optimizer: torch.optim.Optimizer, user: tuple[Tensor, Tensor]) -> None:
    """Take a user's local steps."""
    for images, labels in batches(user):
        cross_entropy(network(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def bare(name: str, cohort: int = COHORT) -> Callable[[], None]:
    """A function that trains one resident model on the data of a cohort, user after user, and nothing else."""
    network, visited = model(name), users()[:cohort]
    optimizer = torch.optim.SGD(tuned(network), lr=LR)

    def visits() -> None:
        for user in visited:
            train(network, optimizer, user)

    return visits


class Meter:
    """A clock of rounds that take turns with bare training of as many visits, `work`, in one process."""

    def __init__(self, work: Callable[[], object], processor: Callable[[], float] = time.process_time) -> None:
        # of each turn but the first, which warms up: seconds and processor seconds of the round, and of bare training
        self.turns: list[tuple[float, float, float, float]] = []
        self._work, self._processor, self._warm = work, processor, False
        self._cpu = self._wall = 0.0

    def begin(self) -> None:
        """Start the clock; reading the processor's is not on it."""
        self._cpu = self._processor()
        self._wall = time.perf_counter()

    def _end(self) -> tuple[float, float]:
        return time.perf_counter() - self._wall, self._processor() - self._cpu

    def turn(self) -> None:
        """End a round, train bare, and begin the next round."""
        round_ = self._end()
        self.begin()
        self._work()
        if self._warm:
            self.turns.append((*round_, *self._end()))
        self._warm = True
        self.begin()


def descendants() -> float:
    """Processor seconds of the processes that this one has started, and they, in steps of 10 ms."""
    found: dict[int, tuple[int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            about, _, rest = path.read_text().rpartition(")")
            fields = rest.split()
            found[int(about.split()[0])] = int(fields[1]), int(fields[11]) + int(fields[12])  # parent, ticks
    family = {os.getpid()}
    while more := {own for own, (parent, _) in found.items() if parent in family} - family:
        family |= more
    return sum(found[own][1] for own in family - {os.getpid()}) / os.sysconf("SC_CLK_TCK")


def asked() -> tuple[str, int, int]:
    """The model, the number of rounds and the size of a cohort that this process was started with."""
    name, rounds, cohort = sys.argv[1:]
    return name, int(rounds), int(cohort)


def report(meter: Meter, versions: Sequence[str]) -> None:
    """Print the turns for the process that started this one; it reads the last line."""
    print(json.dumps({"turns": meter.turns, "versions": list(versions)}))
