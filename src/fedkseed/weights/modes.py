"""Choice of the way to hold a model's weights."""

from collections.abc import Sequence

from torch import nn

from ..directions import Pool
from ..directions.factors import Basis
from ..errors import FedKSeedError
from .base import Pooled
from .factored import FactoredWeights
from .in_memory import Materialized
from .layout import Layout
from .streamed import InPlace, Streamed

MODES = {"streamed": Streamed, "materialized": Materialized, "in place": InPlace, "factored": FactoredWeights}


def hold(
    model: nn.Module, pool: Pool, tuned: Sequence[str] = ("*",), mode: str = "auto", basis: Basis | None = None
) -> Pooled:
    """Take over a model's weights; `auto`: no weights for factored directions, a sum a point if that is cheap.

    Args:
        basis: the factors of the pool's directions, for the families that need them.
    """
    layout = Layout(model, tuned)
    pool = pool.fitted(layout.shapes, basis)
    if mode == "auto":
        mode = "factored" if pool.factored else "streamed" if pool.transformed else "in place"
    if mode not in MODES:
        raise FedKSeedError(f"no mode is called {mode!r}; choose auto, {' or '.join(MODES)}")
    return MODES[mode](layout, pool)
