"""States of a row that are remembered: those before the output layer, or before the tail, if that alone is tuned."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..data.batches import IGNORED, Batch, Encoded, collate
from ..data.layouts import Example
from ..errors import FedKSeedError, first_line
from ..weights.base import Pooled, Weights
from ..weights.layout import Layout
from .loss import example_losses, graph_loss, last_logits, needed, option_losses, output_layer
from .tail import ROOM as TAIL_ROOM
from .tail import Tail, decoder_layers

ROOM = 1 << 28  # bytes of hidden states that are kept: 200,000 response tokens of SmolLM2-135M in bfloat16


def can_keep_states(model: Any, layout: Layout) -> bool:
    """Check that the output layer alone is tuned and that the model's logits are that layer's outputs, unchanged.

    A model that caps or scales its logits, as Gemma 2 does, fails it, and runs all layers in every step.
    """
    inside = {id(module) for module in output_layer(model).modules()}
    if any(id(module) not in inside for entry in layout.tuned for module, _ in entry.places):
        return False
    tokens = torch.tensor([[1, 2]], device=next(model.parameters()).device)
    with torch.no_grad():
        calls, logits = _run(model, tokens, 2)
    match calls:
        case [(Tensor() as hidden, Tensor() as outputs)]:
            return hidden.shape[:2] == tokens.shape and torch.equal(outputs, logits)
    return False


class KeptStates:
    """`output_loss` of a model for which `can_keep_states` holds.

    The hidden states h that predict a row's response are computed once and kept, as long as there is room, so that a
    step costs two products with the output matrix, and making and projecting that. A row runs alone, without padding:
    what is kept does not depend on the batch in which a row comes first, and a resumed run has the same bits.

    Args:
        room: bytes of hidden states to keep; rows beyond it run again in every step.
    """

    def __init__(self, model: Any, room: int = ROOM) -> None:
        self.model, self._layer, self._room = model, output_layer(model), room
        self._kept: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
        self.rows = 0  # number of rows that went through the other layers

    def loss(self, batch: Batch) -> Tensor:
        """The mean loss over a batch's response tokens, with the graph of the output layer."""
        padded = zip(batch.tokens, batch.labels, batch.mask.sum(1).tolist(), strict=True)
        rows = [(tokens[:length], labels[:length]) for tokens, labels, length in padded]
        with torch.no_grad():
            hidden = torch.cat([self._states(tokens, labels) for tokens, labels in rows])
        labels = torch.cat([labels[1:][labels[1:] != IGNORED] for _, labels in rows]).to(hidden.device)
        return cross_entropy(self._layer(hidden).float(), labels)

    def _states(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The hidden states that predict the tokens of a row's response, (n, width)."""
        key = tuple(tokens.tolist()), tuple(labels.tolist())
        if (kept := self._kept.get(key)) is not None:
            return kept
        self.rows += 1
        last, device = needed(labels[None]), next(self.model.parameters()).device
        [(hidden, _)], _ = _run(self.model, tokens[None].to(device), last)
        states = hidden[0, -last:][:-1][(labels[-last:][1:] != IGNORED).to(device)]
        if (room := self._room - states.nbytes) >= 0:
            self._kept[key], self._room = states, room
        return states


def _run(model: Any, tokens: Tensor, kept: int) -> tuple[list[tuple[Any, Any]], Tensor]:
    """Input and output of each call of the output layer, and the logits, of which the last `kept` are needed."""
    calls: list[tuple[Any, Any]] = []
    extra = {"attention_mask": torch.ones_like(tokens), "use_cache": False, **last_logits(model, kept)}
    with output_layer(model).register_forward_hook(
        lambda _, inputs, output: calls.append((inputs[0] if inputs else None, output))
    ):
        return calls, model(input_ids=tokens, **extra).logits


def remember(model: Any, weights: Weights, room: int = TAIL_ROOM) -> Tail | str:
    """Let a model remember what the layers before its tuned ones make of a row; or the reason why it can't.

    Losses and choices that begin with remembered states must equal those of the whole model to the bit, also after
    tuned weights have moved: what comes before the tail must not depend on them.
    """
    try:
        _, layers = decoder_layers(model)
    except FedKSeedError as error:
        return str(error)
    of = {id(module): number for number, layer in enumerate(layers) for module in layer.modules()}
    border = min(of.get(id(module), len(layers)) for entry in weights.layout.tuned for module, _ in entry.places)
    if not 0 < border < len(layers):
        return "the first layer is tuned" if border == 0 else "no layer is tuned"
    encoded = [Encoded(tuple(range(1, n)), n - 3, Example("", "")) for n in (12, 15)]
    prompts, options = [range(1, n) for n in (11, 13)], [[[1], [2, 3]], [[3, 4]]]

    def losses() -> list[Any]:
        """Those of rows alone, as steps take them, and what an evaluation computes."""
        alone = [float(graph_loss(model, collate([one], 0))) for one in encoded]
        return [alone, example_losses(model, encoded, 0), option_losses(model, prompts, options, 0)]

    with torch.no_grad():
        tail = Tail(model, layers[:border], room)
        try:
            at_base = losses()
            _move(weights, 1e-3)
            through = losses()
        except Exception as error:  # whatever an architecture's layers raise where they are passed by
            return f"its layers can't be passed by ({first_line(error)})"
        finally:
            tail.close()
            whole = losses()
            _move(weights, 0.0)
    if whole == at_base:
        return "its tuned weights change nothing"
    return Tail(model, layers[:border], room) if through == whole else "its loss would be another"


def _move(weights: Weights, size: float) -> None:
    """Set weights to w_0 with a change of every tuned tensor; 0 sets them to w_0 again."""
    if isinstance(weights, Pooled):
        weights.load(size * np.random.default_rng(0).normal(size=weights.pool.size))
    elif size:
        weights.shift(0, size)
    else:
        weights.settle()
