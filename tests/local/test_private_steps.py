"""Steps with a client's own noise: the most that one example changes, the size of the noise, and what is reported."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedkseed import FedKSeedError, Pool, hold
from fedkseed.data.batches import IGNORED, Batch, collate, private_batches
from fedkseed.local.derivatives import derivative_steps
from fedkseed.local.optimizers import Optimizer
from fedkseed.local.private_steps import FINE, Private, sensitivity
from fedkseed.local.zeroth_order import zeroth_order_steps
from fedkseed.models.loss import batch_loss, graph_loss
from fedkseed.round import run_round
from fedkseed.wire.codec import decode, encode
from fedkseed.wire.records import Change, Upload

from ..conftest import tiny_llama

SECRET = bytes(range(32))
SILENT = Private(1e-9, 1.0, SECRET)  # σ = 1 in units of a grid of a thousandth and less
EXAMPLE = '[privacy]\nunit = "example"\nepsilon = 8.0\nnorm = 1.0\n'
LOUD = EXAMPLE.replace("8.0", "1e6")  # hardly any noise
wild = st.floats(width=64) | st.sampled_from([0.0, 5e-324, -1e308, 1.7e308, 1e-200, math.inf, math.nan])


def cut(row: np.ndarray, norm: float) -> np.ndarray:
    return row * min(1.0, norm / max(np.linalg.norm(row), 1e-300))


def single(seed: int, tokens: int = 12) -> Batch:
    found = torch.from_numpy(np.random.default_rng(seed).integers(1, 60, (1, tokens)))
    labels = found.clone()
    labels[:, :5] = IGNORED
    return Batch(found, torch.ones_like(found), labels)


def watched(mean, seen: list):
    """`mean` of a step's rows, which are kept in `seen`."""
    return lambda step, rows: (seen.append(rows), mean(step, rows))[1]


@settings(deadline=None)
@given(
    arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=wild),
    st.sampled_from([1e-8, 0.3, 1.0, 1e6]),
)
def test_one_example_changes_a_sum_by_at_most_the_sensitivity(rows, norm):
    private, without = Private(1.0, norm, SECRET), rows.copy()
    without[0] = 0
    changed = private.coded(rows).sum(0) - private.coded(without).sum(0)
    assert sum(int(x) ** 2 for x in changed) <= sensitivity(rows.shape[1]) ** 2
    for row, code in zip(rows, private.coded(rows), strict=True):
        if not np.isfinite(row).all():
            assert not code.any()
        elif np.abs(row).max() < 1e150:  # `cut` squares
            apart = np.abs(code * private.grid(row.size) - cut(row, norm))
            assert apart.max() <= private.grid(row.size) * (0.5 + 1e-6)


@pytest.mark.parametrize("length", [1, 9, 1000])
def test_the_sensitivity_is_no_larger_than_it_has_to_be(length):
    longest = np.full((1, length), 1e9)
    found = math.sqrt(sum(int(x) ** 2 for x in Private(1.0, 1.0, SECRET).coded(longest)[0]))
    assert found == pytest.approx(FINE * math.sqrt(length), rel=1e-3)
    assert sensitivity(length) < found * 1.003


def test_noise_has_the_stated_size_and_is_shared_out_over_the_batch():
    private, rows = Private(0.7, 3.0, SECRET), np.zeros((5, 3000))
    found = private.mean(0, 0, rows)
    expected = 0.7 * 3.0 / 5  # z C / B; the rounding of rows adds 0.05 % and a unit
    assert abs(found.std() / expected - 1) < 6 / math.sqrt(2 * 3000) + 2e-3
    assert abs(found.mean()) < 6 * expected / math.sqrt(3000)


def test_the_same_numbers_have_the_same_noise_and_all_others_have_other_noise():
    private, rows = Private(1.0, 1.0, SECRET), np.full((2, 50), 0.01)
    again, other = Private(1.0, 1.0, SECRET), Private(1.0, 1.0, bytes(32))
    first = private.mean(1, 2, rows)
    assert np.array_equal(again.mean(1, 2, rows), first)
    changed = private.mean(0, 2, rows), private.mean(1, 3, rows), private.mean(1, 2, 1.1 * rows)
    for found in (other.mean(1, 2, rows), *changed):
        # The rows differ by 0.001 at most and the noise by some 0.5: few numbers can be near each other by chance.
        assert (np.abs(found - first) > 0.02).mean() > 0.8


def test_noise_without_a_secret_is_refused():
    with pytest.raises(FedKSeedError, match="needs a secret of its own, got none"):
        Private(1.0, 1.0, b"")


@pytest.mark.parametrize("mode", ["streamed", "in place"])
def test_derivative_steps_are_those_of_the_mean_of_cut_gradients(mode):
    pool, batches = Pool(1, 64, "hadamard"), [[single(k), single(k + 9, 20)] for k in range(3)]
    model = tiny_llama()
    weights = hold(model, pool, mode=mode)
    lengths, c = [], np.zeros(64)
    for batch in batches:
        weights.load(c)
        rows = [weights.gradient(partial(graph_loss, model, one))[1] for one in batch]
        lengths += [np.linalg.norm(row) for row in rows]
        c = c - 1e-4 * np.mean([cut(row, 20.0) for row in rows], 0)
    assert min(lengths) < 20 < max(lengths) or min(lengths) > 20  # something is cut
    weights.load(np.zeros(64))
    private = Private(1e-9, 20.0, SECRET)
    moved = derivative_steps(
        weights, partial(graph_loss, model), iter(batches),
        steps=3, lr=1e-4, optimizer=Optimizer(), noised=partial(private.mean, 0),
    )  # fmt: skip
    most = 3 * 1e-4 * private.grid(64) * 6  # three steps, and per step noise of a unit and rounding, over two examples
    np.testing.assert_allclose(moved.change, c, atol=most, rtol=1e-4)
    assert np.abs(c).max() > 20 * most
    assert math.isnan(moved.loss)
    assert moved.skipped == 0


@pytest.mark.parametrize(
    ("family", "mode"), [("hadamard", "streamed"), ("rademacher", "in place"), ("separable", "auto")]
)
def test_forward_only_steps_are_those_of_the_mean_of_cut_rows(family, mode):
    model, batches = tiny_llama(), [[single(k), single(k + 9, 20)] for k in range(2)]
    weights = hold(model, Pool(1, 64, family), mode=mode)
    directions = np.arange(6, dtype=np.uint32)
    private, taken = Private(1e-9, 5.0, SECRET), []
    noised = watched(partial(private.mean, 0), taken)
    found = zeroth_order_steps(
        weights, partial(batch_loss, model), iter(batches), directions, probes=3, lr=1e-4, eps=1e-3, noised=noised
    )
    assert [rows.shape for rows in taken] == [(2, 3), (2, 3)]
    expected = np.concatenate([np.mean([cut(row, 5.0) for row in rows], 0) for rows in taken])
    np.testing.assert_allclose(found.scalars, expected, atol=6 * private.grid(3))
    assert np.abs(expected).max() > 60 * private.grid(3)
    assert math.isnan(found.loss)
    # The first step's rows are two-point estimates of each example by itself, all at the first point.
    for j in range(3):
        weights.load(np.zeros(64))
        for row, one in enumerate(batches[0]):
            above, below = weights.both(j, 1e-3, partial(batch_loss, model, one))
            assert taken[0][row, j] == pytest.approx((above - below) / 2e-3, abs=2e-2)  # a loss has 2^-21 of rounding


def test_a_row_does_not_depend_on_the_other_examples_of_its_batch():
    model = tiny_llama()
    for family in ("hadamard", "separable"):
        found = []
        for other in (single(1), single(2, 40)):
            weights, seen = hold(model, Pool(1, 64, family)), []
            noised = watched(lambda step, rows: np.zeros(rows.shape[1]), seen)
            directions = np.arange(2, dtype=np.uint32)
            loss, batch = partial(batch_loss, model), [single(0), other]
            zeroth_order_steps(weights, loss, [batch], directions, probes=2, lr=1e-4, eps=1e-3, noised=noised)
            derivative_steps(
                weights, partial(graph_loss, model), [batch], steps=1, lr=1.0, optimizer=Optimizer(), noised=noised
            )
            found.append([rows[0] for rows in seen])
            weights.restore()
        for first, second in zip(*found, strict=True):
            assert np.array_equal(first, second)


def test_an_example_whose_loss_is_not_finite_adds_zeros_and_skips_nothing():
    model = tiny_llama()
    weights, batch = hold(model, Pool(1, 64, "hadamard")), [single(0), single(1)]
    broken = {id(batch[1])}
    seen = []
    noised = watched(partial(SILENT.mean, 0), seen)

    def loss(one: Batch) -> float:
        return math.inf if id(one) in broken else batch_loss(model, one)

    directions = np.arange(2, dtype=np.uint32)
    steps = zeroth_order_steps(weights, loss, [batch], directions, probes=2, lr=1e-4, eps=1e-3, noised=noised)
    moved = derivative_steps(
        weights, lambda one: graph_loss(model, one) * (math.nan if id(one) in broken else 1), [batch],
        steps=1, lr=1e-4, optimizer=Optimizer(), noised=noised,
    )  # fmt: skip
    assert (steps.skipped, moved.skipped) == (0, 0)
    for codes in map(SILENT.coded, seen):
        assert codes[0].any()
        assert not codes[1].any()


@pytest.mark.parametrize(("count", "size", "steps"), [(7, 3, 20), (6, 3, 6), (5, 8, 4), (4, 1, 9), (5, 3, 1)])
def test_an_example_is_in_a_batch_once_and_in_a_round_as_often_as_stated(count, size, steps, encoded):
    rng = np.random.default_rng(0)
    batches = private_batches(encoded[:count], size, 0, rng)
    taken = [[one.examples[0] for one in next(batches)] for _ in range(steps)]
    b = min(size, count)
    assert {len(batch) for batch in taken} == {b}
    assert all(len({id(one) for one in batch}) == b for batch in taken)
    times = [sum(any(one is e for one in batch) for batch in taken) for e in encoded[:count]]
    assert max(times) == math.ceil(steps / (count // b))


@pytest.fixture
def encoded(simulation):
    return [one for share in simulation("").shares.clients for one in share]


KINDS = ["fedkseed", "fedkseed-pro", "fedkseed-plus", "fedkseed-backprop"]


@pytest.mark.parametrize("algorithm", KINDS)
def test_an_upload_says_neither_loss_nor_count_and_is_the_same_again(simulation, algorithm):
    one = simulation(EXAMPLE, algorithm=f'algorithm = "{algorithm}"')
    strategy = one.strategy
    message = encode(strategy.server.broadcast(strategy.server.init()))
    data, _ = one.answer(message, 0)
    upload = decode(data, Upload, Change)
    assert math.isnan(upload.loss)
    assert (upload.examples, upload.skipped) == (1, 0)
    assert len(one.shares.clients[0]) > 1
    assert one.answer(message, 0)[0] == data
    other = simulation(EXAMPLE, bytes(32), algorithm=f'algorithm = "{algorithm}"')
    assert other.answer(message, 0)[0] != data


@pytest.mark.parametrize("algorithm", ["fedkseed", "fedkseed-backprop"])
def test_clients_of_both_kinds_learn_where_there_is_hardly_any_noise(simulation, algorithm):
    loud = LOUD.replace("norm = 1.0", "norm = 100.0") + "[derivatives]\nlr = 1e-3\n"
    one = simulation(loud, algorithm=f'algorithm = "{algorithm}"', steps="steps = 10\nprobes = 2")
    strategy, state = one.strategy, one.strategy.server.init()

    def loss() -> float:
        one.setup.load(state)
        rows = [e for share in one.shares.clients for e in share]
        return float(np.mean([batch_loss(one.setup.model, collate([e], 0)) for e in rows]))

    before = loss()
    for _ in range(3):
        state, report = run_round(strategy, state, one.cohort(0), one.transport)
    assert loss() < before - 0.05
    assert math.isnan(report.loss)


def test_masked_uploads_add_up_to_those_in_the_clear(simulation):
    own = "size = 64\nshared = false"
    masked = simulation(EXAMPLE + "[secure]\nnorm = 0.1\nbits = 16\n", size=own)
    clear = simulation(EXAMPLE, size=own)
    states = []
    for one in (masked, clear):
        state, report = run_round(one.strategy, one.strategy.server.init(), one.cohort(0), one.transport)
        assert math.isnan(report.loss)
        states.append(state.coefficients)
    step = masked.strategy.aggregator.masks.grid.step
    assert np.abs(states[0] - states[1]).max() < 2 * step  # each of four is rounded to a step
    assert np.abs(states[1]).max() > 20 * step
