"""Contract: every algorithm x every property that a federation rests on, with real messages and a real model."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedkseed import Broadcast, Client, FedKSeedError, Pool, Run, Upload, answer, decode, encode, hold, run_round
from fedkseed.algorithms import ALGORITHMS
from fedkseed.config import Training
from fedkseed.directions import FAMILIES
from fedkseed.models.loss import Batch, batch_loss
from fedkseed.randomness import Purpose, generator

from .conftest import tiny_llama

every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)
TRAINING = Training(rounds=5, steps=6, lr=1e-3, eps=1e-3)


class Federation:
    """Four clients with data of their own, each with its own copy of the model."""

    def __init__(self, name: str, family: str = "hadamard", dtype: torch.dtype = torch.float32) -> None:
        self.pool = Pool(99, 64, family)
        self.dtype = dtype
        self.clients = {number: self.client(number) for number in (2, 3, 5, 7)}
        self.strategy = ALGORITHMS[name](TRAINING, Run(self.pool, self.clients[2].weights.base_digest))
        self.messages: list[tuple[bytes, dict[int, bytes]]] = []

    def client(self, number: int) -> Client:
        model = tiny_llama().to(self.dtype)

        def batches(round_: int):
            rng = generator(0, Purpose.BATCHES, round_, number)
            while True:
                tokens = torch.from_numpy(rng.integers(0, 400, (2, 12)))
                yield Batch(tokens, torch.ones_like(tokens), tokens)

        return Client(number, hold(model, self.pool), 10 + number, batches, lambda batch: batch_loss(model, batch))

    def transport(self, message: bytes, cohort):
        replies = {number: answer(self.strategy, message, self.clients[number]) for number in cohort}
        self.messages.append((message, replies))
        return replies.items()

    def run(self, rounds: int):
        state = self.strategy.init()
        for _ in range(rounds):
            state, report = run_round(self.strategy, state, list(self.clients), self.transport)
        return state, report


@every_algorithm
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_model_rebuilt_from_messages_is_the_one_that_the_client_trained(name, family, dtype):
    federation = Federation(name, family, dtype)
    federation.run(2)
    message, replies = federation.messages[-1]
    for number, reply in replies.items():
        trained = federation.clients[number].weights
        rebuilt = hold(tiny_llama().to(dtype), federation.pool, mode="materialized")
        down, up = decode(message, Broadcast), decode(reply, Upload)
        c = down.coefficients.copy()
        for j, scalar in zip(up.directions, up.scalars, strict=True):
            c[j] += np.float32(-down.lr * float(scalar))
        rebuilt.load(c)
        assert trained.digest() == rebuilt.digest()


@every_algorithm
def test_the_order_of_replies_makes_no_difference(name):
    forward, backward = Federation(name), Federation(name)
    backward.clients = dict(reversed(backward.clients.items()))
    assert forward.run(2)[0].coefficients.tobytes() == backward.run(2)[0].coefficients.tobytes()


@every_algorithm
def test_a_newcomer_has_the_model_of_a_veteran(name):
    federation = Federation(name)
    state, _ = federation.run(3)
    message = encode(federation.strategy.broadcast(state))
    veteran, newcomer = federation.clients[5], federation.client(5)
    assert answer(federation.strategy, message, veteran) == answer(federation.strategy, message, newcomer)
    assert veteran.weights.digest() == newcomer.weights.digest()


@every_algorithm
def test_bytes_counted_are_bytes_encoded(name):
    federation = Federation(name)
    _, report = federation.run(1)
    message, replies = federation.messages[-1]
    assert report.bytes_down == len(message)
    assert report.bytes_up == max(map(len, replies.values()))
    assert report.bytes_total == 4 * len(message) + sum(map(len, replies.values()))
    assert report.clients == (2, 3, 5, 7)


@every_algorithm
def test_the_model_moves_and_the_local_loss_is_reported(name):
    state, report = Federation(name).run(1)
    assert np.count_nonzero(state.coefficients) > 10
    assert report.loss == pytest.approx(np.log(400), rel=0.1)  # a random model knows nothing of 400 tokens


@every_algorithm
def test_a_client_of_another_base_model_is_refused_and_unchanged(name):
    federation = Federation(name)
    message = encode(federation.strategy.broadcast(federation.strategy.init()))
    model = tiny_llama().bfloat16()
    stranger = replace(federation.clients[2], weights=hold(model, federation.pool))
    before = stranger.weights.digest()
    with pytest.raises(FedKSeedError, match=f"digest {federation.strategy.run.base.hex()}.*{before.hex()}"):
        answer(federation.strategy, message, stranger)
    assert stranger.weights.digest() == before


@every_algorithm
def test_a_reply_signed_by_another_client_is_refused(name):
    federation = Federation(name)

    def swapped(message: bytes, cohort):
        return {3: answer(federation.strategy, message, federation.clients[2])}.items()

    with pytest.raises(FedKSeedError, match="reply of client 3 is signed by client 2"):
        run_round(federation.strategy, federation.strategy.init(), [2, 3], swapped)


def test_a_step_whose_loss_is_not_finite_moves_nothing_and_is_not_reported():
    federation = Federation("fedkseed")
    losses = iter([float("nan"), 1.0, 2.0, float("inf"), 3.0, 1.0] + [1.0] * 6)
    client = replace(federation.clients[2], loss=lambda batch: next(losses))
    message = encode(federation.strategy.broadcast(federation.strategy.init()))
    reply = answer(federation.strategy, message, client)
    up = decode(reply, Upload)
    assert up.scalars.size == TRAINING.steps - 2
    assert up.scalars[0] == pytest.approx((3.0 - 1.0) / (2 * TRAINING.eps))
    assert np.isfinite(client.weights.c).all()


def test_scalars_are_clipped_before_they_are_applied():
    federation = Federation("fedkseed")
    strategy = replace(federation.strategy, clip=5.0)
    losses = iter([100.0, 1.0] * 6)
    client = replace(federation.clients[2], loss=lambda batch: next(losses))
    up = decode(answer(strategy, encode(strategy.broadcast(strategy.init())), client), Upload)
    np.testing.assert_array_equal(up.scalars, np.full(6, 5.0))
    assert client.weights.c.sum() == pytest.approx(-6 * 5 * 1e-3)


def test_steps_that_were_skipped_are_counted_and_leave_the_other_losses_alone():
    federation = Federation("fedkseed")
    federation.clients[3] = replace(federation.clients[3], loss=lambda batch: float("nan"))
    state, report = federation.run(1)
    assert report.skipped == TRAINING.steps
    assert report.loss == pytest.approx(np.log(400), rel=0.1)
    assert state.counts.sum() == 3 * TRAINING.steps


def test_a_client_that_answers_twice_is_refused():
    federation = Federation("fedkseed")

    def twice(message: bytes, cohort):
        for _ in range(2):
            yield 2, answer(federation.strategy, message, federation.clients[2])

    with pytest.raises(FedKSeedError, match="client 2 answered twice"):
        run_round(federation.strategy, federation.strategy.init(), [2], twice)


def test_several_directions_a_step_are_averaged_on_one_batch_at_one_point():
    federation = Federation("fedkseed")
    strategy = replace(federation.strategy, steps=2, probes=3)
    client, pool = federation.clients[2], federation.pool
    reply = answer(strategy, encode(strategy.broadcast(strategy.init())), client)
    up = decode(reply, Upload)
    assert up.scalars.size == 6
    # by hand: the second step's first probe, at the point that the first step's mean leads to
    other = federation.client(2)
    batches = other.batches(0)
    next(batches)
    c = np.zeros(pool.size, np.float32)
    for j, scalar in zip(up.directions[:3], up.scalars[:3], strict=True):
        c[j] += np.float32(-strategy.lr / 3 * float(scalar))
    batch, losses = next(batches), []
    for sign in (1, -1):
        point = c.copy()
        point[up.directions[3]] += np.float32(sign * strategy.eps)
        other.weights.load(point)
        losses.append(other.loss(batch))
    assert up.scalars[3] == np.float32((losses[0] - losses[1]) / (2 * strategy.eps))
    after = strategy.aggregate(strategy.init(), [up])
    np.testing.assert_allclose(after.coefficients, client.weights.c, atol=1e-9)
