"""The tail of a model: its last layers, the only ones that are tuned, after layers that run once for each row.

What the layers before the tail make of a row never changes, so it is remembered: each later pass costs the tail alone,
forward and back. The states go into the tail through the layer before it, which returns them in place of its own
output; the model itself makes masks, positions and everything else, so no architecture has code of its own.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from ..data.batches import Batch
from ..errors import FedKSeedError

ROOM = 1 << 30  # bytes of states that a run's processes remember on a machine: 8,000 rows of SmolLM2-135M of 54 tokens


def room(at_once: int) -> int:
    """The share of ROOM of each process: of a run, of as many more that train its clients, or of torchrun's."""
    return ROOM // max(at_once + (at_once > 1), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class EnoughError(Exception):
    """The end of a pass whose first layers alone were wanted."""


@dataclass(slots=True)
class Calls:
    """The calls of a model from which its tail notes states, or to which it gives them.

    Args:
        given: the states that calls begin with, one each; None: they run through all layers, and `noted` grows.
        alone: whether a call ends with the first layers.
    """

    tail: "Tail"
    given: Iterator[Tensor] | None = None
    alone: bool = False
    noted: list[Tensor] = field(default_factory=list)


# Of this greenlet: the points of a step take turns within a pass.
CALLS: ContextVar[Calls | None] = ContextVar("CALLS", default=None)
ATTRIBUTE = "_fedkseed_tail"  # of a model: its tail, which goes with it


def decoder_layers(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """The name of the list of a model's layers, and the layers.

    Raises:
        FedKSeedError: the model has no such list.
    """
    lists = [
        (name, [*module])
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    ]
    if not lists:
        raise FedKSeedError("this model has no list of layers; name the weights to tune by [model] tuned")
    return max(lists, key=lambda found: len(found[1]))


def last_of(model: nn.Module, count: int) -> tuple[str, range]:
    """The name of the list of a model's layers, and the numbers of the last ones; FedKSeedError if there are fewer."""
    place, layers = decoder_layers(model)
    if count > len(layers):
        raise FedKSeedError(f"last_layers is {count}, the model has {len(layers)} layers")
    return place, range(len(layers) - count, len(layers))


def last_layers(model: Any, count: int, head: bool = False) -> list[str]:
    """Patterns of the names of the weights of a model's last layers and of its final norm.

    Args:
        head: whether the output layer's own weights are tuned, too.

    Raises:
        FedKSeedError: the model has fewer layers, or its output layer shares its weights with the input embedding.
    """
    place, numbers = last_of(model, count)
    patterns = [f"{place}.{k}.*" for k in numbers]
    beside = place.rpartition(".")[0]
    for name, module in model.get_submodule(beside).named_children():
        # a norm has vectors alone; one of the embedding, as BLOOM's, comes before all layers
        vectors = [*module.parameters()]
        if vectors and all(p.ndim == 1 for p in vectors) and "emb" not in name:
            patterns.append(f"{beside}.{name}.*" if beside else f"{name}.*")
    if head:
        output = model.get_output_embeddings()
        mine = {id(p) for p in (() if output is None else output.parameters())}
        names = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in mine}
        shared = {id(p) for p in model.get_input_embeddings().parameters()} & mine
        if shared or not names:
            said = "shares its matrix with the input embedding" if shared else "is unknown"
            raise FedKSeedError(f"head = true tunes the model's output layer, which {said}; leave head out")
        patterns += sorted(names)
    return patterns


class Tail:
    """The states that a model's layers before the tail make of rows, and passes of the model that begin with them.

    Rows are private: states are in memory alone, `room` bytes at most, in the model's type; what finds no room runs
    through all layers each time. A row runs alone and without padding, whether it is remembered or not, so that no bit
    depends on what finds room.

    Args:
        first: the layers before the tail.
        room: bytes of states to remember.

    Attributes:
        kept: what is remembered, by the tokens of a row or the key of a part of an evaluation.
        passes: the number of rows, and of parts of evaluations, that went through the first layers.
        left_out: those among them that found no room.
    """

    def __init__(self, model: nn.Module, first: Sequence[nn.Module], room: int = ROOM) -> None:
        self._model, self._first, self._room = model, first, room
        self.kept: dict[Any, list[Tensor]] = {}
        self._newest: tuple[Tensor, Tensor] | None = None  # tokens and states of a batch, for its other passes
        self._more = 0  # how much a layer returns beside the states, as attention weights; -1: no tuple
        self.passes = self.left_out = 0
        for number, layer in enumerate(first):
            layer.forward = partial(self._forward, number, layer.forward)
        vars(model)[ATTRIBUTE] = self

    def close(self) -> None:
        """Undo the changes to the model's layers."""
        vars(self._model).pop(ATTRIBUTE, None)
        for layer in self._first:
            del layer.forward

    def _forward(self, number: int, forward: Any, *args: Any, **named: Any) -> Any:
        """Return what a layer before the tail returns; where states are given, it passes on what it gets."""
        calls, last = CALLS.get(), number == len(self._first) - 1
        if calls is None or calls.tail is not self:
            return forward(*args, **named)
        if calls.given is None:
            output = forward(*args, **named)
            if last:
                states, *more = output if isinstance(output, tuple) else (output,)
                self._more = len(more) if isinstance(output, tuple) else -1
                calls.noted.append(states)
                if calls.alone:
                    raise EnoughError
            return output
        states = args[0] if args else named["hidden_states"]
        cache = next((each for each in (*args, *named.values()) if isinstance(each, Cache)), None)
        if cache is not None:  # the model asks its first layers how many tokens came before
            cache.update(*[states.new_zeros(*states.shape[:1], 1, states.shape[1], 1)] * 2, number)
        states = next(calls.given) if last else states
        return states if self._more < 0 else (states, *[None] * self._more)

    def batch(self, batch: Batch) -> AbstractContextManager[None]:
        """A call of the model with a batch, which begins with its states unless the call belongs to an evaluation."""
        if CALLS.get() is not None or not bool(batch.mask[:, 0].all()):
            return nullcontext()
        return self._made(Calls(self, iter([self._states(batch)])))

    @contextmanager
    def shared(self, key: Any) -> Iterator[None]:
        """Calls that are made again in each evaluation, and begin with the states of the last time.

        Args:
            key: all that their first layers depend on.
        """
        if CALLS.get() is not None:  # inside of another part
            yield
            return
        if (kept := self.kept.get(key)) is not None:
            with self._made(Calls(self, iter(kept))):
                yield
            return
        calls = Calls(self)
        with self._made(calls):
            yield
        self._keep(key, calls.noted)

    def _states(self, batch: Batch) -> Tensor:
        """The states of a batch, (B, T, width); those of padding, which comes last, are 0.

        They enter the graph of a pass with gradients, so that they are not made under `inference_mode`.
        """
        if self._newest is not None and self._newest[0] is batch.tokens:
            return self._newest[1]
        with torch.inference_mode(False), torch.no_grad():
            rows = zip(batch.tokens.tolist(), batch.mask.sum(1).tolist(), strict=True)
            states = pad_sequence([self._row(tokens[:count]) for tokens, count in rows], batch_first=True)
        self._newest = batch.tokens, states
        return states

    def _row(self, tokens: Sequence[int]) -> Tensor:
        if (kept := self.kept.get(key := tuple(tokens))) is not None:
            return kept[0]
        row = torch.tensor([tokens], device=next(self._model.parameters()).device)
        calls = Calls(self, alone=True)
        with suppress(EnoughError), self._made(calls):
            self._model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False)
        return self._keep(key, [calls.noted[0][0].clone()])[0]

    def _keep(self, key: Any, states: list[Tensor]) -> list[Tensor]:
        self.passes += 1
        if (room := self._room - sum(each.nbytes for each in states)) < 0:
            self.left_out += 1
        else:
            self._room, self.kept[key] = room, states
        return states

    @contextmanager
    def _made(self, calls: Calls) -> Iterator[None]:
        """Passes of the model inside the block are such calls."""
        before = CALLS.set(calls)
        try:
            yield
        finally:
            CALLS.reset(before)


def tail_of(model: nn.Module) -> Tail | None:
    """The tail of a model whose first layers run once a row."""
    return vars(model).get(ATTRIBUTE)


def tail_shared(model: nn.Module, *key: Any) -> AbstractContextManager[None]:
    """Calls of a model that each evaluation makes again, see `Tail.shared`."""
    return nullcontext() if (tail := tail_of(model)) is None else tail.shared(key)
