"""Choice of the way to hold a model's weights."""

from collections.abc import Sequence

from torch import nn

from ..directions import Pool
from ..errors import FedKSeedError
from .base import Pooled
from .layout import Layout
from .lazy import Lazy
from .streamed import Streamed
from .written import InPlace, Materialized

MODES = {"streamed": Streamed, "materialized": Materialized, "in place": InPlace}


def hold(model: nn.Module, pool: Pool, tuned: Sequence[str] = ("*",), mode: str = "auto") -> Pooled:
    """Take over a model's weights; `auto` streams them where making them is one cheap pass."""
    layout = Layout(model, tuned)
    if mode == "auto":
        quantised = any(isinstance(entry.tensor, Lazy) for entry in layout.tuned)
        mode = "streamed" if pool.transformed or quantised else "in place"
    if mode not in MODES:
        raise FedKSeedError(f"no mode is called {mode!r}; choose auto, {' or '.join(MODES)}")
    return MODES[mode](layout, pool)
