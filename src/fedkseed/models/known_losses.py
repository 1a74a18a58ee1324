"""The losses of a base model on tokens of our own, by which parties know that their models compute alike.

Digests are of weights. What a model makes of them follows from its config.json and from a library's release, too: with
other positions or another activation the same weights are another model, and no digest tells. What changes longer texts
alone, as a window of 4,096 tokens, is not found.
"""

from math import isfinite
from typing import Any

import torch

from ..data.batches import Batch
from ..errors import FedKSeedError
from ..recipe.schema import KNOWN_LOSSES, Recipe
from .load import positions
from .loss import token_losses

LENGTH = 256  # tokens, or as many as the model takes
PERIOD = 64  # tokens that come again and again, of which a model is certain by their places: positions count most so
# Nats. SmolLM2-135M's change by 0.0000 with other threads, by up to 0.02 in bfloat16, by 0.0003 with a tenth of its
# epsilon, which harms nobody, and by 0.2 to 11 with other positions or another activation, each printed by
# benchmarks/known_losses.py.
TOLERANCE = {"float32": 0.01, "bfloat16": 0.05, "float16": 0.05}


@torch.inference_mode()
def losses(model: Any) -> list[float]:
    """Mean losses of a base model in nats over each quarter of its own predictions of `LENGTH` tokens.

    Empty: they are not finite. Such a model is refused by its rows, of which each tells more.
    """
    rows = int(model.get_input_embeddings().weight.shape[0])
    length = min(LENGTH, positions(model.config) or LENGTH)
    tokens = ((torch.arange(length) % PERIOD + 1) * 7919 % rows)[None]
    of_tokens, _ = token_losses(model, Batch(tokens, torch.ones_like(tokens), tokens))
    means = [round(float(quarter.mean()), 4) for quarter in of_tokens[0].tensor_split(KNOWN_LOSSES)]
    return means if all(map(isfinite, means)) else []


def with_losses(recipe: Recipe, ours: list[float] | None) -> Recipe:
    """The recipe with the losses of its base model, which must be those that it states; as it is for None.

    Raises:
        FedKSeedError: see `require_losses`.
    """
    options = recipe.model
    if ours is None:
        return recipe
    if options.losses is not None:
        require_losses(ours, options.losses, options.dtype, options.name)
    return recipe.having(model={"losses": options.losses or ours or None})


def require_losses(ours: list[float], stated: Any, dtype: str, name: str) -> None:
    """Refuse a base model whose losses are not those that its run states.

    Args:
        stated: the run's, as they stand in a recipe or in the file of a tuned model.
        dtype: of the model's weights.
        name: of the model, for the error.
    """
    theirs = stated if isinstance(stated, list) and len(stated) == len(ours) else []
    pairs = zip(ours, theirs, strict=False)
    if not theirs or not all(isinstance(b, float) and abs(a - b) <= TOLERANCE[dtype] for a, b in pairs):
        raise FedKSeedError(
            f"the model {name} computes otherwise than the run's: its losses on known tokens are {ours}, and those of "
            f"the run's, [model] losses, {ascii(stated)[:80]}; they may differ by {TOLERANCE[dtype]:g}. Get the "
            "config.json that came with the run's base model, or the release of transformers that its parties have; "
            "for a run of another model, type or storage leave losses out, or pin its recipe: fedkseed pin RECIPE"
        )
