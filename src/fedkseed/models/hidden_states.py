"""The loss of a model of which the output layer alone is tuned: the layers before it run once for each row."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..data.batches import IGNORED, Batch
from ..weights.layout import Layout
from .loss import last_logits, needed, output_layer

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
