"""fedkseed: federated full-parameter tuning of language models with a few kilobytes a round."""

from .adapter import Adapter, apply
from .config import Recipe, load_recipe
from .directions import Pool, accumulate_, materialize, project
from .errors import FedKSeedError
from .messages import Broadcast, Run, Upload
from .round import answer, run_round
from .simulate import Simulation, resume, start
from .strategies.kseed import KSeed, State
from .strategy import Client, Strategy
from .weights import hold
from .wire import decode, encode

__version__ = "0.1.0"

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
