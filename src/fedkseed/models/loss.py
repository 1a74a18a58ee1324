"""The loss: negative log-likelihood of the response's tokens, in nats."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from ..data.batches import IGNORED, Batch, Encoded, collate
from ..data.reading import Example
from ..errors import FedKSeedError

RUN_AGAIN = "_gradient_checkpointing_func"  # attribute by which transformers runs a layer
NOTHING = Example("", "")
SLICE = 1 << 20  # logits whose losses are computed together


def response_logits(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits that predict the tokens from the first response token on, (B, T', V), and their labels, (B, T')."""
    # Logits are the largest activation (49,152 a token for SmolLM2): make only those in use, where the model can.
    first = max(int((batch.labels != IGNORED).any(0).int().argmax()) - 1, 0)  # which predicts the first response token
    kept = batch.tokens.shape[1] - first
    batch = batch.to(next(model.parameters()).device)
    inner: Any = getattr(model, "get_base_model", lambda: model)()  # a PEFT model passes unknown arguments on to it
    extra = {"logits_to_keep": kept} if "logits_to_keep" in inspect.signature(inner.forward).parameters else {}
    logits = model(input_ids=batch.tokens, attention_mask=batch.mask, use_cache=False, **extra).logits
    return logits[:, -kept:][:, :-1], batch.labels[:, -kept:][:, 1:]


def token_losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Losses of the tokens from the first response token on, and a mask of those that count; both (B, T')."""
    predictions, labels = response_logits(model, batch)
    # Some positions at a time: float32 copies of all logits would be the peak of memory in a 4-bit model.
    step = max(1, SLICE // (predictions.shape[0] * predictions.shape[2]))
    losses = [_losses(part, of) for part, of in zip(predictions.split(step, 1), labels.split(step, 1), strict=True)]
    return torch.cat(losses, 1), labels != IGNORED


def _losses(predictions: Tensor, labels: Tensor) -> Tensor:
    flat = predictions.flatten(0, 1).float()
    return cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="none").view(labels.shape)


def graph_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss L of the paper: the mean over a batch's response tokens; with its graph, where gradients are on."""
    losses, counted = token_losses(model, batch)
    return losses.sum() / counted.sum().to(losses.device)


def graph_losses(model: nn.Module, batch: Batch) -> Tensor:
    """The mean loss over the response tokens of each example, shape (B,); with its graph, where gradients are on."""
    losses, counted = token_losses(model, batch)
    return losses.sum(1) / counted.sum(1).to(losses.device)


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Make forward passes keep the inputs of layers only; a backward pass runs each layer forward once more.

    Layers recompute only in training mode. They leave it while they run, so that there is no dropout.
    """
    layers = checkpointable(model)
    before = [layer.__dict__.get(RUN_AGAIN) for layer in layers]
    try:
        for layer in layers:
            layer.gradient_checkpointing = layer.training = True
            setattr(layer, RUN_AGAIN, partial(_run_again, layer))
        yield
    finally:
        for layer, function in zip(layers, before, strict=True):
            layer.gradient_checkpointing = layer.training = False
            setattr(layer, RUN_AGAIN, function)


def checkpointable(model: nn.Module) -> list[Any]:
    """The layers that a backward pass can run again.

    Raises:
        FedKSeedError: the model has no such layer.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise FedKSeedError("this model's layers can't be run again; set [derivatives] checkpointing = false")
    return layers


def _run_again(layer: nn.Module, function: Any, *inputs: Any) -> Any:
    layer.training = False
    try:
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    finally:
        layer.training = True


def output_loss(model: Any, batch: Batch) -> Tensor:
    """`graph_loss` with the graph of the output layer only: the layers before it run as in inference.

    The derivatives of a loss by the output layer's weights, Σ_t (softmax_t − one-hot_t) h_tᵀ, need the last hidden
    states h and the logits, both of which a forward pass has: nothing goes back through the network.

    Raises:
        FedKSeedError: the model does not say which layer makes its logits.
    """
    layer = _output_layer(model)
    with torch.no_grad():
        hook = layer.register_forward_pre_hook(lambda *_: torch.set_grad_enabled(True) and None)
        try:
            return graph_loss(model, batch)
        finally:
            hook.remove()


def output_weights(model: Any) -> list[str]:
    """The names of the output layer's weights, and of the input embedding's, where the two are tied.

    Raises:
        FedKSeedError: the model does not say which layer makes its logits.
    """
    own = {id(parameter) for parameter in _output_layer(model).parameters()}
    return [name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in own]


def _output_layer(model: Any) -> nn.Module:
    layer = model.get_output_embeddings()
    if layer is None:
        raise FedKSeedError("the model does not say which layer makes its logits; use derivatives of all layers")
    return layer


@torch.inference_mode()
def batch_loss(model: nn.Module, batch: Batch) -> float:
    """`graph_loss` as a number, without a graph."""
    return float(graph_loss(model, batch))


@torch.inference_mode()
def example_losses(model: nn.Module, batch: Batch) -> list[float]:
    """The mean loss over the response tokens of each example."""
    return graph_losses(model, batch).tolist()


@torch.inference_mode()
def option_losses(
    model: nn.Module, prompts: Sequence[Sequence[int]], options: Sequence[Sequence[Sequence[int]]], pad: int
) -> list[list[float]]:
    """The negative log-likelihood of each option after its prompt, in nats, the sum over its tokens.

    The prompts go through the model once, as one batch, and all options after their caches. A model without a cache
    that can be shared, as one with a recurrent state or virtual tokens, gets prompt and option together, one by one.

    Args:
        prompts: of one length, so that none is padded.
        options: of each prompt.
    """
    of: Any = model
    inner: Any = getattr(model, "get_base_model", lambda: model)()
    device = next(model.parameters()).device
    virtual = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(inner.forward).parameters else {}
    first = None if virtual else of(input_ids=torch.tensor(prompts, device=device), use_cache=True, **last)
    cache = getattr(first, "past_key_values", None)
    if first is None or not isinstance(cache, DynamicCache):
        return [
            [
                loss * len(option)
                for option in own
                for loss in example_losses(model, collate([Encoded((*prompt, *option), len(prompt), NOTHING)], pad))
            ]
            for prompt, own in zip(prompts, options, strict=True)
        ]
    tails, counts = [option for own in options for option in own], [len(own) for own in options]
    rows = torch.arange(len(prompts)).repeat_interleave(torch.tensor(counts)).to(device)
    cache.batch_select_indices(rows)
    width = max(map(len, tails))
    tokens = torch.full((len(tails), width), pad)
    labels = torch.full((len(tails), width), IGNORED)
    for row, option in enumerate(tails):
        tokens[row, : len(option)] = labels[row, : len(option)] = torch.tensor(option)
    predictions = first.logits[:, -1:][rows]
    if width > 1:
        mask = torch.ones(
            len(tails), len(prompts[0]) + width - 1, device=device
        )  # tokens after an option change nothing
        more = of(input_ids=tokens[:, :-1].to(device), attention_mask=mask, past_key_values=cache, use_cache=True)
        predictions = torch.cat([predictions, more.logits[:, -(width - 1) :]], 1)
    nats = iter(_losses(predictions, labels.to(device)).sum(1).tolist())
    return [[next(nats) for _ in range(count)] for count in counts]
