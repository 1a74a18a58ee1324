"""The noise that an (ε, δ) needs, and the ε that was spent, for units that take part in several noisy sums.

Each sum in which a unit takes part is a Gaussian mechanism whose noise is `noise` times the most that the unit changes
it. A number of them is again one, exactly, with

    1 / noise² = Σ 1 / noise_i²

and its ε is that of the analytic Gaussian mechanism, computed by Google's dp-accounting. Neighbouring are two
federations of which one has zeros in place of one unit's numbers. No amplification by sampling is counted: whoever
knows the recipe knows its cohorts, and a server knows them anyway.

Noise on whole numbers is discrete Gaussian. With a standard deviation of 10 and more, as here, it says no more than
the continuous one to far below what is printed, and so does a sum of some of them.

Sources: Balle and Wang, 2018, Theorem 8, https://arxiv.org/abs/1805.06530; Dong, Roth and Su, 2019, Corollary 3.3,
https://arxiv.org/abs/1905.02383; Canonne, Kamath and Steinke, 2020, https://arxiv.org/abs/2004.00010; Kairouz, Liu and
Steinke, 2021, Theorem 1, https://arxiv.org/abs/2102.06387
"""

import math
from typing import Any

from ..errors import needs_extra


def epsilon_of(noise: float, times: float, delta: float) -> float:
    """ε of a unit that takes part in a number of sums.

    Args:
        noise: standard deviation of the noise over the most that the unit changes a sum.
    """
    return 0.0 if times == 0 else float(_library().get_epsilon_gaussian(noise / math.sqrt(times), delta))


def noise_for(epsilon: float, delta: float, times: int) -> float:
    """The least noise with which a unit that takes part in a number of sums keeps (ε, δ)."""
    return float(_library().get_sigma_gaussian(epsilon, delta)) * math.sqrt(max(times, 1))


def _library() -> Any:
    with needs_extra("[privacy] needs", "privacy"):
        import dp_accounting
    return dp_accounting
