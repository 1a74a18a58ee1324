"""fedkseed: federated full-parameter tuning of language models with a few kilobytes a round."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import directions, wire
    from .directions import Pool
    from .directions.operations import accumulate_, materialize, project
    from .errors import DivergedError, FedKSeedError
    from .local.client import Client
    from .local.work import LocalWork
    from .models.tail import last_layers
    from .recipe.reading import load_recipe
    from .recipe.schema import Recipe
    from .round import answer, run_round
    from .run.simulation import Simulation
    from .run.start_and_resume import resume, start
    from .strategies.kseed import KSeed, State
    from .strategy import Settings, Strategy
    from .trainer.own_model import Parties
    from .trainer.trainer import Trainer
    from .trainer.tune import Tuned, tune
    from .weights.adapter import Adapter, apply
    from .weights.modes import hold
    from .wire.codec import decode, encode
    from .wire.records import Broadcast, Run, Upload

__version__ = "0.1.0"

# Imported when first used: a server that only aggregates never loads PyTorch.
_HOMES = {
    "weights.adapter": ("Adapter", "apply"),
    "recipe.schema": ("Recipe",),
    "recipe.reading": ("load_recipe",),
    "directions": ("Pool",),
    "directions.operations": ("accumulate_", "materialize", "project"),
    "errors": ("DivergedError", "FedKSeedError"),
    "local.work": ("LocalWork",),
    "models.tail": ("last_layers",),
    "wire.records": ("Broadcast", "Run", "Upload"),
    "round": ("answer", "run_round"),
    "trainer.own_model": ("Parties",),
    "trainer.tune": ("Tuned", "tune"),
    "run.simulation": ("Simulation",),
    "run.start_and_resume": ("resume", "start"),
    "trainer.trainer": ("Trainer",),
    "strategies.kseed": ("KSeed", "State"),
    "local.client": ("Client",),
    "strategy": ("Settings", "Strategy"),
    "weights.modes": ("hold",),
    "wire.codec": ("decode", "encode"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Adapter", "Broadcast", "Client", "DivergedError", "FedKSeedError", "KSeed", "LocalWork", "Parties", "Pool",
    "Recipe", "Run", "Settings", "Simulation", "State", "Strategy", "Trainer", "Tuned", "Upload", "accumulate_",
    "answer", "apply", "decode", "directions", "encode", "hold", "last_layers", "load_recipe", "materialize",
    "project", "resume", "run_round", "start", "tune", "wire",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_FOLDERS = ("directions", "wire")  # kernels and codecs, as `fedkseed.directions.project`, `fedkseed.wire.encode`


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
