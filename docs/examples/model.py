"""A model of your own: four clients tune a small classifier that is no language model, and no recipe is read.

`fedkseed.tune` does this in one call where all clients live in one process (own_model.py); here every part of it can be
seen and replaced, and each client has a model of its own.

Any torch.nn.Module will do. `fedkseed.hold` takes its weights over, and a client is its weights, its batches and a
function that runs the model and returns a number. Run:  python model.py
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fedkseed as fk

POOL = fk.Pool(key=2024, size=256, family="hadamard")  # the tuned model is 256 numbers, however large it is
TEACHER = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))  # says which of three classes is right


def classifier() -> nn.Module:
    """The base model; it must have the same weights at every party, and a digest in each message checks that."""
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for weights in model.parameters():
        weights.normal_(0, 0.3, generator=generator)
    return model


def points(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points and their classes."""
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return x, (x @ TEACHER.T).argmax(-1)


def client(number: int) -> fk.Client:
    """A party with 64 points of its own, which never leave it."""
    model, (x, classes) = classifier(), points(100 + number, 64)

    def batches(round_: int) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * round_ + number)  # the same batches for the same round
        while True:
            yield torch.randint(64, (16,), generator=generator)

    def loss(batch: torch.Tensor) -> float:
        return float(cross_entropy(model(x[batch]), classes[batch]))

    return fk.Client(number, fk.hold(model, POOL), 64, batches, loss)


def tune(rounds: int = 10) -> tuple[float, float]:
    """The loss on 500 points that no client has, before and after."""
    clients = {number: client(number) for number in range(4)}
    model, (x, classes) = classifier(), points(99, 500)
    weights = fk.hold(model, POOL)
    work = fk.LocalWork(rounds=rounds, steps=50, lr=0.01, eps=1e-3)  # two forward passes a step, and no gradient
    strategy = fk.KSeed.make(fk.Settings(fk.Run(POOL, weights.base_digest), work))

    def transport(messages):
        return [(number, fk.answer(strategy, message, clients[number])) for number, message in messages.items()]

    state, before = strategy.server.init(), float(cross_entropy(model(x), classes))
    for _ in range(rounds):
        state, report = fk.run_round(strategy, state, list(clients), transport)
        print(f"round {state.round}: loss {report.loss:.3f}, {report.bytes_down} bytes down, {report.bytes_up} up")
    strategy.load(state, weights)
    return before, float(cross_entropy(model(x), classes))


if __name__ == "__main__":
    print("loss on points that no client has: {:.3f} before, {:.3f} after".format(*tune()))
