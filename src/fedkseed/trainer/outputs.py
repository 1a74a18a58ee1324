"""A model's losses and outputs for the rows of a dataset, as `Trainer.evaluate` and `Trainer.predict` see them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..errors import FedKSeedError
from .client_batches import described


@contextmanager
def evaluating(model: nn.Module, cache: bool) -> Iterator[None]:
    """Keep a model in evaluation mode inside the block, and with or without a cache of keys and values."""
    training = [(module, module.training) for module in model.modules()]
    config: Any = getattr(model, "config", None)
    cached = getattr(config, "use_cache", None)
    model.eval()
    if cached is not None:
        config.use_cache = cache
    try:
        yield
    finally:
        if cached is not None:
            config.use_cache = cached
        for module, was_training in training:
            module.training = was_training


def outputs_of(model: nn.Module, inputs: Any) -> Any:
    """The outputs of a model for a batch of named arguments; one without names is refused."""
    if not isinstance(inputs, Mapping):
        raise FedKSeedError(
            f"{type(model).__name__} can't be called with {described(inputs)}, which names no arguments: give "
            "rows that are dicts, or compute_loss, a function of the model and a batch"
        )
    return model(**inputs)


def loss_and_outputs(model: nn.Module, inputs: Any, label_names: Sequence[str]) -> tuple[Any, Any]:
    """The loss that a model returns for a batch with labels, and all that it returns; one without a loss is refused."""
    outputs = outputs_of(model, inputs)
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if loss is None:
        raise FedKSeedError(
            f"the model {type(model).__name__} returned no loss for {described(inputs)}; give rows with "
            f"{' and '.join(label_names)} (columns that its forward does not take are left out), or compute_loss, a "
            "function of the model and a batch"
        )
    return loss, outputs


def labels_of(batch: Any, label_names: Sequence[str]) -> Any:
    """The labels in a batch: by their names, or the last part of a tuple; None: there are none."""
    if isinstance(batch, Mapping):
        return _one_or_all(tuple(batch[name] for name in label_names if batch.get(name) is not None))
    return batch[-1] if isinstance(batch, tuple | list) else None


def predictions_in(model: nn.Module, outputs: Any) -> Any:
    """The part of a model's outputs that metrics see."""
    if not isinstance(outputs, Mapping):
        return outputs
    ignored = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", ("past_key_values", "cache"))
    return _one_or_all(tuple(part for name, part in outputs.items() if name not in ("loss", *ignored)))


def _one_or_all(parts: tuple[Any, ...]) -> Any:
    return None if not parts else parts[0] if len(parts) == 1 else parts
