"""A model's losses and outputs for the rows of a dataset, as `Trainer.evaluate` and `Trainer.predict` see them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any, cast

import torch
from torch import nn
from transformers.trainer_pt_utils import EvalLoopContainer, find_batch_size
from transformers.trainer_utils import EvalPrediction, denumpify_detensorize

from ..errors import FedKSeedError
from .client_batches import described
from .datasets import Batches


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


@dataclass(frozen=True, slots=True)
class Seen:
    """The outputs of a model for the rows of a dataset; None for those that it has not."""

    predictions: Any
    labels: Any
    losses: list[float]  # one a row

    def metrics(self, compute: Callable[[EvalPrediction], dict[str, Any]] | None) -> dict[str, Any]:
        """The mean loss, and what a user's function computes from outputs and labels."""
        metrics: dict[str, Any] = {}
        if compute is not None and self.predictions is not None and self.labels is not None:
            metrics |= cast(Any, denumpify_detensorize(compute(EvalPrediction(self.predictions, self.labels))))
        return metrics | ({"loss": fmean(self.losses)} if self.losses else {})


@torch.no_grad()
def see(
    batches: Batches, look: Callable[[Any], tuple[Any, Any, Any]], keep: bool, on_batch: Callable[[], object]
) -> Seen:
    """Run a model over batches.

    Args:
        look: the loss, outputs and labels of a batch; None for what it has not.
        keep: whether outputs and labels are kept.
    """
    losses, predictions, references = list[float](), EvalLoopContainer(), EvalLoopContainer()
    for batch in batches:
        loss, outputs, labels = look(batch)
        losses += [] if loss is None else [float(loss)] * (find_batch_size(batch) or batches.size)
        if keep:
            predictions.add(outputs)
            references.add(labels)
        on_batch()
    return Seen(predictions.get_arrays(), references.get_arrays(), losses)


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
            f"{' and '.join(label_names)}, or compute_loss, a function of the model and a batch"
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
