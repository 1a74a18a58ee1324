"""ε of noisy sums, against the accountants of two other libraries."""

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from opacus.accountants import PRVAccountant

from fedkseed.secure.accounting import epsilon_of, noise_for

CASES = [(2.0, 1e-6, 3), (1.0, 1e-5, 10), (8.0, 1e-6, 30), (0.5, 1e-6, 1)]


@pytest.mark.parametrize(("epsilon", "delta", "times"), CASES)
def test_epsilon_is_that_of_privacy_loss_distributions(epsilon, delta, times):
    noise = noise_for(epsilon, delta, times)
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(noise), times))
    assert accountant.get_epsilon(delta) == pytest.approx(epsilon, abs=1e-3)
    assert epsilon_of(noise, times, delta) == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")  # its logarithms of 0, its first bounds
@pytest.mark.parametrize(("epsilon", "delta", "times"), CASES)
def test_epsilon_is_that_of_opacus(epsilon, delta, times):
    accountant = PRVAccountant()
    accountant.history = [(noise_for(epsilon, delta, times), 1.0, times)]
    assert accountant.get_epsilon(delta) == pytest.approx(epsilon, rel=0.05)


def test_no_sum_spends_nothing_and_less_noise_more():
    assert epsilon_of(1.0, 0, 1e-6) == 0
    assert epsilon_of(2.0, 5, 1e-6) < epsilon_of(1.9, 5, 1e-6) < epsilon_of(1.9, 6, 1e-6)
    # As if it were one sum: 1 / noise² adds up.
    assert epsilon_of(3.0, 9, 1e-6) == pytest.approx(epsilon_of(1.0, 1, 1e-6), rel=1e-9)
