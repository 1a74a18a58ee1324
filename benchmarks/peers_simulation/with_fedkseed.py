"""Rounds of fedkseed, with messages encoded, checksummed and checked both ways as over a network.

    PYTHON with_fedkseed.py cnn|lora|fedkseed|messages ROUNDS COHORT

`fedkseed` is FedKSeed on the network `cnn`, 200 steps with two values of a loss that costs nothing. `messages` is the
messages of `cnn` and nothing else: the broadcast is encoded and decoded once, each upload by itself, and all are held
until the last has come.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import repeat
from typing import Any

import numpy as np
import shared
import torch
from torch.nn.functional import cross_entropy

from fedkseed import Client, KSeed, LocalWork, Pool, Run, Settings, Strategy, answer, decode, encode, hold, run_round
from fedkseed.round import decode_once
from fedkseed.run.cohort import cohort
from fedkseed.strategies.averaging import Averaging
from fedkseed.weights.full import FullWeights
from fedkseed.weights.layout import Layout

SEED, STEPS = 3, 200
GOLDEN = 0.6180339887498949  # its multiples modulo 1 are spread evenly


def averaging(name: str, rounds: int) -> tuple[Strategy, Callable[[int], Client]]:
    """FedAvg of a model of `shared`, and its clients, which share one resident model."""
    network, users = shared.model(name), shared.users()
    names = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    weights = FullWeights(Layout(network.requires_grad_(False), names), Pool(SEED, 1))
    tensors = tuple((entry.number, entry.tensor.numel()) for entry in weights.layout.tuned)
    work = LocalWork(rounds, "sgd", steps=shared.EXAMPLES // shared.BATCH, lr=shared.LR)
    run = Run(weights.pool, weights.base_digest)
    strategy = Averaging.make(Settings(run, work, start=weights.values(), tensors=tensors))

    def loss(batch: Any) -> torch.Tensor:
        return cross_entropy(network(batch[0]), batch[1])

    def client(number: int) -> Client[FullWeights]:
        return Client(number, weights, shared.EXAMPLES, lambda _: shared.batches(users[number]), float, graph=loss)

    return strategy, client


def scalars(rounds: int) -> tuple[Strategy, Callable[[int], Client]]:
    """FedKSeed, and its clients, whose loss is a number that costs nothing and differs from call to call."""
    weights = hold(shared.model("cnn").requires_grad_(False), Pool(SEED, 4096))
    run = Run(weights.pool, weights.base_digest)
    strategy = KSeed.make(Settings(run, LocalWork(rounds, steps=STEPS, lr=1e-4)))
    calls = 0

    def loss(_: None) -> float:
        nonlocal calls
        calls += 1
        return calls * GOLDEN % 1

    return strategy, lambda number: Client(number, weights, shared.EXAMPLES, lambda _: repeat(None), loss)


def exchange(strategy: Strategy, cohort: Sequence[int]) -> None:
    """Encode and decode a round's messages, without training or a sum."""
    decode(encode(strategy.server.broadcast(strategy.server.init())), strategy.client.message)
    rng = np.random.default_rng(SEED)
    sent = {number: encode(strategy.client.example(0, number, shared.EXAMPLES, True, rng)) for number in cohort}
    for data in sent.values():
        decode(data, *strategy.aggregator.replies)


def main() -> None:
    torch.set_num_threads(1)
    name, rounds, size = shared.asked()
    free = name in ("fedkseed", "messages")  # of training
    model = "cnn" if name == "messages" else name
    strategy, client = scalars(rounds + 1) if name == "fedkseed" else averaging(model, rounds + 1)

    def transport(messages: Mapping[int, bytes]) -> Iterable[tuple[int, bytes]]:
        read = decode_once()
        for number, data in messages.items():
            yield number, answer(strategy, data, client(number), read)

    state, meter = strategy.server.init(), shared.Meter(int if free else shared.bare(name, size))
    meter.begin()
    for round_ in range(rounds + 1):
        drawn = cohort(SEED, round_, shared.USERS, size)
        if name == "messages":
            exchange(strategy, drawn)
        else:
            state, _ = run_round(strategy, state, drawn, transport)
        meter.turn()
    shared.report(meter, [f"fedkseed {version('fedkseed')}", f"torch {torch.__version__}"])


if __name__ == "__main__":
    main()
