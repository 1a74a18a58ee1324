"""fedkseed: federated full-parameter tuning of language models with a few kilobytes a round."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapter import Adapter, apply
    from .config import Recipe, load_recipe
    from .directions import Pool
    from .directions.operations import accumulate_, materialize, project
    from .errors import FedKSeedError
    from .messages import Broadcast, Run, Upload
    from .round import answer, run_round
    from .simulate import Simulation, resume, start
    from .strategies.kseed import KSeed, State
    from .strategy import Client, Strategy
    from .weights import hold
    from .wire import decode, encode

__version__ = "0.1.0"

# Imported when first used: a server that only aggregates never loads PyTorch.
_HOMES = {
    "adapter": ("Adapter", "apply"),
    "config": ("Recipe", "load_recipe"),
    "directions": ("Pool",),
    "directions.operations": ("accumulate_", "materialize", "project"),
    "errors": ("FedKSeedError",),
    "messages": ("Broadcast", "Run", "Upload"),
    "round": ("answer", "run_round"),
    "simulate": ("Simulation", "resume", "start"),
    "strategies.kseed": ("KSeed", "State"),
    "strategy": ("Client", "Strategy"),
    "weights": ("hold",),
    "wire": ("decode", "encode"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Adapter",
    "Broadcast",
    "Client",
    "FedKSeedError",
    "KSeed",
    "Pool",
    "Recipe",
    "Run",
    "Simulation",
    "State",
    "Strategy",
    "Upload",
    "accumulate_",
    "answer",
    "apply",
    "decode",
    "encode",
    "hold",
    "load_recipe",
    "materialize",
    "project",
    "resume",
    "run_round",
    "start",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
