"""Noise on sums: by the server, or by clients under masks; its size, and what stays hidden beside it."""

import math

import numpy as np
import pytest

from fedkseed import Simulation, decode
from fedkseed.round import run_round
from fedkseed.wire.records import Change

CENTRAL = "[privacy]\nepsilon = 8.0\nnorm = 0.1\n"
MASKED = "[privacy]\nepsilon = 8.0\n[secure]\nnorm = 0.1\n"
SECRET = bytes(range(32))


def after(simulation: Simulation):
    """The state after one round, and its report."""
    strategy = simulation.strategy
    return run_round(strategy, strategy.server.init(), simulation.cohort(0), simulation.transport)


@pytest.mark.parametrize("extra", [CENTRAL, MASKED])
def test_noise_of_the_stated_size_is_all_that_a_private_round_adds(simulation, extra):
    noisy = simulation(extra, size="size = 512\nshared = false")
    strategy = noisy.strategy
    silent = "[secure]\nnorm = 0.1\n"
    own = "size = 512\nshared = false"
    clear, _ = after(simulation(silent, size=own))
    state, report = after(noisy)
    masks = extra == MASKED
    grid = strategy.aggregator.masks.grid if masks else strategy.aggregator.grid(512)
    noise, clients = strategy.settings.noise, 4
    added = (state.coefficients - clear.coefficients) * clients / grid.step  # in whole numbers
    once = noise.multiplier * grid.sensitivity
    # Under masks each of the four adds a third of the variance: the noise of three is enough.
    expected = once * math.sqrt(4 / 3) if masks else once
    assert abs(np.std(added) / expected - 1) < 6 / math.sqrt(2 * 512)
    assert abs(np.mean(added)) < 6 * expected / math.sqrt(512)
    assert math.isnan(report.loss)
    assert report.scalar is None
    assert report.skipped == 0


def test_weights_get_noise_too_and_clients_count_alike(simulation):
    noisy = simulation(CENTRAL, algorithm='algorithm = "fedit"', lr="lr = 1e-2")
    state, uploads = noisy.strategy.server.init(), []

    def transport(messages):
        for client, reply in noisy.transport(messages):
            uploads.append(decode(reply, Change))
            yield client, reply

    after_noise, report = run_round(noisy.strategy, state, noisy.cohort(0), transport)
    changes = [upload.values.astype(float) - state.values for upload in uploads]
    cut = [change * min(1, 0.1 / np.linalg.norm(change)) for change in changes]
    added = (after_noise.values - state.values - np.mean(cut, axis=0)) * 4
    grid = noisy.strategy.aggregator.grid(state.values.size)
    expected = noisy.strategy.settings.noise.multiplier * grid.sensitivity * grid.step
    assert abs(np.std(added) / expected - 1) < 6 / math.sqrt(2 * added.size)
    assert math.isnan(report.loss)


@pytest.mark.parametrize("extra", [CENTRAL, MASKED])
def test_the_same_secret_gives_the_same_noise_and_another_one_another(simulation, extra):
    first, again, other = (after(simulation(extra, secret))[0] for secret in (SECRET, SECRET, bytes(32)[:31] + b"1"))
    assert np.array_equal(first.coefficients, again.coefficients)
    assert not np.array_equal(first.coefficients, other.coefficients)
