"""The loss: negative log-likelihood of the response's tokens, in nats."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from functools import partial
from itertools import takewhile
from typing import Any, cast
from unittest.mock import patch  # sets an attribute, and puts it back whatever is raised

import torch
from greenlet import getcurrent
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import ModelOutput

from ..data.batches import IGNORED, Batch, Encoded, collate
from ..data.layouts import Example
from ..errors import FedKSeedError
from ..weights.lazy import UsableWithoutValues
from .load import positions, return_large_blocks
from .tail import EnoughError, tail_of, tail_shared

CHECKPOINT_ATTRIBUTE = "_gradient_checkpointing_func"  # the function by which transformers runs a layer
MIN_SHARED = 8  # tokens at the beginning of all texts, from which on a pass of their own is worth it
CACHES = ("cache", "past_key_values")  # names of a cache, from and until transformers 5.24
LOGITS_AT_ONCE = 1 << 20  # logits whose losses are computed together
MANY_LOGITS = 1 << 23  # from which on those of tokens that count are made alone, as many at a time: 34 MB in float32
SLICES = 4  # at most, of logits with a graph: one slice and its gradients take as much memory as all do without


def response_logits(model: nn.Module, batch: Batch, cache: DynamicCache | None = None) -> tuple[Tensor, Tensor]:
    """Logits that predict the tokens from the first response token on, (B, T', V), and their labels, (B, T').

    Args:
        cache: what the model keeps of tokens that all rows begin with, before their first response token.
    """
    # Logits are the largest activation (49,152 a token for SmolLM2): make only those in use, where the model can.
    kept = needed(batch.labels)
    logits = _output(model, batch, cache, **last_logits(model, kept)).logits
    return logits[:, -kept:][:, :-1], batch.labels[:, -kept:][:, 1:].to(logits.device)


def token_losses(model: nn.Module, batch: Batch, cache: DynamicCache | None = None) -> tuple[Tensor, Tensor]:
    """Losses of the tokens from the first response token on, and a mask of those that count; both (B, T')."""
    labels = batch.labels[:, 1 - needed(batch.labels) :]
    if (losses := _losses_in_slices(model, partial(_output, model, batch, cache), labels, -1)) is not None:
        return losses, (labels != IGNORED).to(losses.device)
    predictions, labels = response_logits(model, batch, cache)
    # Some positions at a time: float32 copies of all logits would be the peak of memory in a 4-bit model.
    step = max(1, LOGITS_AT_ONCE // (predictions.shape[0] * predictions.shape[2]))
    parts = zip(predictions.split(step, 1), labels.split(step, 1), strict=True)
    return torch.cat([_losses(logits, tokens) for logits, tokens in parts], 1), labels != IGNORED


def _output(model: Any, batch: Batch, cache: DynamicCache | None, **more: Any) -> Any:
    """A model's output for a batch, or for what comes after its cache."""
    tail = tail_of(model) if cache is None else None
    beginning = nullcontext() if tail is None else tail.batch(batch)
    batch = batch.to(next(model.parameters()).device)
    if cache is not None:
        return _continued(model, batch.tokens[:, cache.get_seq_length() :], batch.mask, cache, **more)
    with beginning:
        return model(input_ids=batch.tokens, attention_mask=batch.mask, use_cache=False, **more)


def _losses_in_slices(model: Any, run: Callable[[], Any], labels: Tensor, end: int | None = None) -> Tensor | None:
    """The losses of labels (B, T'), where all logits would be many: those of tokens that count exist, slice by slice.

    With checkpointing a pass back makes them again. None, before it is called, for few logits, and for a model that
    does not say which part of it makes the last hidden states.

    Args:
        run: calls the model, whose last hidden states predict the labels, without those from `end` on.
    """
    again = torch.is_grad_enabled() and any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    parts: Any = (getattr(model, f"get_{part}", lambda: None)() for part in ("output_embeddings", "decoder"))
    head, decoder = parts
    if decoder in (None, model) or not hasattr(head, "weight") or has_virtual_tokens(model):
        return None
    per_token, most = len(head.weight), LOGITS_AT_ONCE if again else MANY_LOGITS
    # the points of a step take turns inside of a pass: what the model returns is for one of them
    if labels.numel() * per_token <= most or getcurrent().parent is not None:
        return None
    device, outputs = next(model.parameters()).device, list[ModelOutput]()
    # a factored output layer may need to know each token's example
    of_any = not isinstance(getattr(head.weight, "source", None), UsableWithoutValues)

    def stop(_: Any, __: Any, output: Any) -> None:
        if isinstance(output, ModelOutput):
            outputs.append(output)
            raise EnoughError

    with suppress(EnoughError), decoder.register_forward_hook(stop):
        return _losses(run().logits[:, :end][:, -labels.shape[1] :], labels.to(device))  # another kind of output
    kind, states = type(outputs[0]), cast(Any, outputs.pop()).last_hidden_state[:, :end][:, -labels.shape[1] :]
    labels = chosen = labels.to(device)
    if of_any:
        chosen, states = labels[labels != IGNORED][None], states[labels != IGNORED][None]

    def slice_losses(states: Tensor, labels: Tensor) -> Tensor:
        """The model itself makes the logits, with its scales and caps."""
        output = kind(last_hidden_state=states)
        with patch.object(decoder, "forward", lambda *_, **__: output):  # which does not run
            tokens, mask = labels.clamp(min=0), torch.ones_like(labels)  # of which only the shapes are used
            return _losses(model(input_ids=tokens, attention_mask=mask, use_cache=False).logits, labels)

    make, step = slice_losses, max(1, most // (len(chosen) * per_token))
    if again:
        make = partial(checkpoint, slice_losses, use_reentrant=False, preserve_rng_state=False)
        step = max(step, -(-chosen.shape[1] // SLICES))
    elif torch.is_grad_enabled():  # what is kept of all logits is kept of those of slices
        step = chosen.shape[1]
    parts = zip(states.split(step, 1), chosen.split(step, 1), strict=True)
    losses = torch.cat([make(*part) for part in parts], 1)
    return losses.new_zeros(labels.shape).masked_scatter(labels != IGNORED, losses) if of_any else losses


def _losses(predictions: Tensor, labels: Tensor) -> Tensor:
    flat = predictions.flatten(0, 1).float()
    return cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="none").view(labels.shape)


def graph_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss L of the paper: the mean over a batch's response tokens; with its graph, where gradients are on."""
    losses, counted = token_losses(model, batch)
    return losses.sum() / counted.sum().to(losses.device)


def graph_losses(model: nn.Module, batch: Batch, cache: DynamicCache | None = None) -> Tensor:
    """The mean loss over the response tokens of each example, shape (B,); with its graph, where gradients are on."""
    losses, counted = token_losses(model, batch, cache)
    return losses.sum(1) / counted.sum(1).to(losses.device)


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Make forward passes keep the inputs of layers only, and no logits; a pass back runs each forward once more.

    Layers recompute only in training mode. They leave it while they run, so that there is no dropout.
    """
    return_large_blocks()

    def run_again(layer: nn.Module, function: Any, *inputs: Any) -> Any:
        layer.training = False
        try:
            return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
        finally:
            layer.training = True

    layers = checkpointable(model)
    before = [layer.__dict__.get(CHECKPOINT_ATTRIBUTE) for layer in layers]
    try:
        for layer in layers:
            layer.gradient_checkpointing = layer.training = True
            setattr(layer, CHECKPOINT_ATTRIBUTE, partial(run_again, layer))
        yield
    finally:
        for layer, function in zip(layers, before, strict=True):
            layer.gradient_checkpointing = layer.training = False
            setattr(layer, CHECKPOINT_ATTRIBUTE, function)


def checkpointable(model: nn.Module) -> list[Any]:
    """The layers that a backward pass can run again.

    Raises:
        FedKSeedError: the model has no such layer.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise FedKSeedError("this model's layers can't be run again; set [derivatives] checkpointing = false")
    return layers


def output_loss(model: Any, batch: Batch) -> Tensor:
    """`graph_loss` with the graph of the output layer only: the layers before it run as in inference.

    The derivatives of a loss by the output layer's weights, Σ_t (softmax_t − one-hot_t) h_tᵀ, need the last hidden
    states h and the logits, both of which a forward pass has: nothing goes back through the network.

    Raises:
        FedKSeedError: the model does not say which layer makes its logits.
    """
    hook = output_layer(model).register_forward_pre_hook(lambda *_: torch.set_grad_enabled(True) and None)
    with torch.no_grad(), hook:
        return graph_loss(model, batch)


def output_weights(model: Any) -> list[str]:
    """The names of the output layer's weights, and of the input embedding's, where the two are tied.

    Raises:
        FedKSeedError: the model does not say which layer makes its logits.
    """
    weights = {id(parameter) for parameter in output_layer(model).parameters()}
    return [name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in weights]


def output_layer(model: Any) -> nn.Module:
    """The layer that makes the logits.

    Raises:
        FedKSeedError: the model does not say which it is.
    """
    layer = model.get_output_embeddings()
    if layer is None:
        raise FedKSeedError("the model does not say which layer makes its logits; use derivatives of all layers")
    return layer


@torch.inference_mode()
def batch_loss(model: nn.Module, batch: Batch) -> float:
    """`graph_loss` as a number, without a graph."""
    return float(graph_loss(model, batch))


@torch.inference_mode()
def example_losses(model: nn.Module, encoded: Sequence[Encoded], pad: int) -> list[float]:
    """The mean loss over the response tokens of each example.

    What the prompts of all begin with, as a system message, goes through the model once.
    """
    texts, most = tuple(e.tokens for e in encoded), min(e.counted[0][0] for e in encoded) - 1
    with tail_shared(model, texts, most):
        cache = _cache_of_beginning(model, texts, most)
        return graph_losses(model, collate(encoded, pad), cache).tolist()


@torch.inference_mode()
def option_losses(
    model: nn.Module, prompts: Sequence[Sequence[int]], options: Sequence[Sequence[Sequence[int]]], pad: int
) -> list[list[float]]:
    """The negative log-likelihood of each option after its prompt, in nats, the sum over its tokens.

    What all prompts begin with, as a system message, goes through the model once, then what remains of them as one
    batch, then all options, each after the cache of its prompt. Shorter prompts are padded on the left. A model
    without a cache that can be shared, as one with a recurrent state or virtual tokens, gets prompt and option
    together, one by one.

    Args:
        prompts: as tokens; they have one length where padding before them counts (`ignores_padding`).
        options: the possible continuations of each prompt, as tokens.
    """
    with tail_shared(model, *(tuple(map(tuple, each)) for each in (prompts, *options))):
        return _option_losses(model, prompts, options, pad)


def _option_losses(
    model: nn.Module, prompts: Sequence[Sequence[int]], options: Sequence[Sequence[Sequence[int]]], pad: int
) -> list[list[float]]:
    device = next(model.parameters()).device
    cache = _cache_of_beginning(model, prompts, min(map(len, prompts)) - 1)
    cache = _empty_cache(model) if cache is None else cache
    shared = 0 if cache is None else cache.get_seq_length()
    tails = [prompt[shared:] for prompt in prompts]
    width = max(map(len, tails))
    tokens = torch.tensor([[pad] * (width - len(tail)) + [*tail] for tail in tails], device=device)
    mask = torch.tensor([[1] * shared + [0] * (width - len(tail)) + [1] * len(tail) for tail in tails], device=device)
    after_prompts = None if cache is None else _continued(model, tokens, mask, cache, **last_logits(model, 1))
    if after_prompts is None or cache is None or _cache_in(after_prompts) is not cache:
        of_no_row, nats = Example("", ""), []
        for prompt, its_options in zip(prompts, options, strict=True):
            alone = [Encoded((*prompt, *option), len(prompt), of_no_row) for option in its_options]
            nats.append([example_losses(model, [text], pad)[0] * (len(text.tokens) - text.prompt) for text in alone])
        return nats
    texts, counts = [torch.tensor(option) for each in options for option in each], [len(each) for each in options]
    rows = torch.arange(len(prompts)).repeat_interleave(torch.tensor(counts)).to(device)
    for layer in cache.layers:  # rows of a layer's states exist while it runs, not those of all layers
        cast(Any, layer).update = partial(_updated, copy(layer), rows)
    tokens, labels = (pad_sequence(texts, batch_first=True, padding_value=filler) for filler in (pad, IGNORED))
    tokens, labels, predictions = tokens.to(device), labels.to(device), after_prompts.logits[:, -1:]
    parts = [part.split(max(1, MANY_LOGITS // predictions.shape[-1])) for part in (rows, labels[:, :1])]
    losses = torch.cat([_losses(predictions[some], firsts) for some, firsts in zip(*parts, strict=True)])
    if (later := tokens.shape[1] - 1) > 0:
        read = torch.ones(len(texts), later, dtype=mask.dtype, device=device)  # what follows an option is not used
        run = partial(_continued, model, tokens[:, :-1], torch.cat([mask[rows], read], 1), cache)
        if (after := _losses_in_slices(model, run, labels[:, 1:])) is None:
            after = _losses(run().logits[:, -later:], labels[:, 1:])
        losses = torch.cat([losses, after], 1)
    nats = iter(losses.sum(1).tolist())
    return [[next(nats) for _ in range(count)] for count in counts]


def _updated(layer: Any, rows: Tensor, *states: Any, **more: Any) -> Any:
    """The states that a cache's layer has of some rows, and new ones after them; the layer stays as it is."""
    chosen = copy(layer)
    chosen.batch_select_indices(rows)
    return chosen.update(*states, **more)


def ignores_padding(model: nn.Module) -> bool:
    """Tell if padding before a text changes nothing: a model takes positions, and has no recurrent state.

    GPT-Neo's local layers count the padding in their window.
    """
    has_windows = "local" in getattr(getattr(model, "config", None), "attention_layers", ())
    return _takes_positions(model) and _empty_cache(model) is not None and not has_windows


def _takes_positions(model: nn.Module) -> bool:
    """Whether a model takes the positions of its tokens, counted from 0; RoBERTa's kind counts from its padding on."""
    inner: Any = _without_adapters(model)
    from_padding = getattr(getattr(getattr(inner, "base_model", None), "embeddings", None), "padding_idx", None)
    return "position_ids" in _arguments(model) and from_padding is None


def _cache_of_beginning(model: nn.Module, texts: Sequence[Sequence[int]], most: int) -> DynamicCache | None:
    """A cache of what all texts begin with, of at most a given number of tokens, for a batch of them.

    None where it is not worth a pass, or the model can't go on from one.
    """
    alike = sum(1 for _ in takewhile(lambda column: len({*column}) == 1, zip(*texts, strict=False)))
    if len(texts) == 1 or (shared := min(alike, most)) < MIN_SHARED or not _takes_positions(model):
        return None
    cache = _empty_cache(model)
    if cache is None or any(cache.is_sliding):  # a window would count the padding between the beginning and the rest
        return None
    tokens = torch.tensor([texts[0][:shared]], device=next(model.parameters()).device)
    output = _continued(model, tokens, torch.ones_like(tokens), cache, **last_logits(model, 1))
    if _cache_in(output) is not cache:
        return None
    cache.batch_repeat_interleave(len(texts))
    return cache


def _empty_cache(model: nn.Module) -> DynamicCache | None:
    """An empty cache, rows of which can be taken again and again.

    None for a model that has no such cache: one with a recurrent state, or with virtual tokens before a text.
    """
    if has_virtual_tokens(model) or not hasattr(model, "config") or _cache_name(model) is None:
        return None
    cache = DynamicCache(config=cast(Any, model).config)
    return cache if all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers) else None


def has_virtual_tokens(model: nn.Module) -> bool:
    """Whether adapters of peft put tokens before each text."""
    return getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)


def room_for(model: Any, prompt: int, wanted: int) -> int:
    """The number of tokens that an answer may have: `wanted`, or what a prompt leaves of the model's positions.

    Beyond them some models end with an error of an index, and others write what nobody has trained.

    Raises:
        FedKSeedError: the prompt leaves none.
    """
    if (most := positions(model.config)) is None:
        return wanted
    if has_virtual_tokens(model):
        most -= model.active_peft_config.num_virtual_tokens
    if prompt >= most:
        raise FedKSeedError(f"a prompt of {prompt:,} tokens leaves no answer of the model's {most:,} positions; cut it")
    return min(wanted, most - prompt)


def _continued(model: Any, tokens: Tensor, mask: Tensor, cache: Any, **more: Any) -> Any:
    """A model's output for tokens after those in its cache, which grows by them; `mask` is of both."""
    if _takes_positions(model):
        more["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    more |= {_cache_name(model) or CACHES[0]: cache}
    return model(input_ids=tokens, attention_mask=mask, use_cache=True, **more)


def _cache_name(model: nn.Module) -> str | None:
    """The argument by which a model takes a cache; None: it takes none."""
    return next((name for name in CACHES if name in _arguments(model)), None)


def _cache_in(output: Any) -> Any:
    """The cache in a model's output."""
    return next((cache for name in CACHES if (cache := getattr(output, name, None)) is not None), None)


def needed(labels: Tensor) -> int:
    """The number of last positions of labels (B, T) that are in use, from the one before any first response token."""
    return labels.shape[1] - max(int((labels != IGNORED).any(0).int().argmax()) - 1, 0)


def last_logits(model: nn.Module, count: int) -> dict[str, int]:
    """The argument that makes a model compute the last logits only, if it has one."""
    return {"logits_to_keep": count} if "logits_to_keep" in _arguments(model) else {}


def _arguments(model: nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(_without_adapters(model).forward).parameters)  # peft passes unknown ones on


def _without_adapters(model: nn.Module) -> Any:
    return getattr(model, "get_base_model", lambda: model)()
