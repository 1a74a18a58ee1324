"""Optimisers on K numbers, beside PyTorch's."""

import numpy as np
import pytest
import torch

from fedkseed import FedKSeedError
from fedkseed.local.optimizers import Optimizer

GRADIENTS = np.random.default_rng(0).normal(size=(6, 5)) * 1e-3


def path(optimizer: Optimizer, lr: float) -> np.ndarray:
    c, moments = np.zeros(5), optimizer.init(5)
    for t, gradient in enumerate(GRADIENTS, 1):
        step, moments = optimizer.step(moments, gradient, t)
        c = c - lr * step
    return c


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Optimizer("sgd"), lambda p: torch.optim.SGD(p, lr=0.1)),
        (Optimizer("adam"), lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-20)),
    ],
    ids=["sgd", "adam"],
)
def test_steps_are_those_of_pytorch(ours, theirs):
    c = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    other = theirs([c])
    for gradient in GRADIENTS:
        c.grad = torch.from_numpy(gradient.copy())
        other.step()
    np.testing.assert_allclose(path(ours, 0.1), c.detach().numpy(), rtol=1e-6)


def test_coefficients_without_a_gradient_stay_where_they_are():
    for kind in ("sgd", "adam"):
        optimizer = Optimizer(kind)
        step, _ = optimizer.step(optimizer.init(3), np.array([0.0, 2.0, 0.0]), 1)
        assert step[0] == step[2] == 0 != step[1]
        nothing, _ = optimizer.step(optimizer.init(3), np.zeros(3), 1)
        assert not nothing.any()


def test_settings_that_do_not_exist_are_refused():
    with pytest.raises(FedKSeedError, match="no optimiser is called 'adma'; choose one of sgd, adam"):
        Optimizer("adma")
