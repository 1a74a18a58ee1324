"""Examples as tokens, and batches of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from .layouts import Example

if TYPE_CHECKING:  # rows are read, and faulty ones refused, before PyTorch is loaded
    import torch
    from torch import Tensor

IGNORED = -100  # label of a token that is not part of the response


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples side by side, padded on the right."""

    tokens: "Tensor"  # (B, T) int64
    mask: "Tensor"  # (B, T) int64, 0 on padding
    labels: "Tensor"  # (B, T) int64, IGNORED outside responses
    examples: "Sequence[Encoded]" = ()  # B, the examples of the rows; the loss does not need them

    def to(self, device: "torch.device") -> "Batch":
        tokens, mask, labels = (part.to(device, non_blocking=True) for part in (self.tokens, self.mask, self.labels))
        return replace(self, tokens=tokens, mask=mask, labels=labels)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One example as tokens: tokens[:prompt] is the prompt, the rest is the response and the end of text."""

    tokens: tuple[int, ...]
    prompt: int
    example: Example
    earlier: tuple[tuple[int, int], ...] = ()  # spans of earlier responses in the prompt, which the loss counts, too
    around: tuple[str, str] | None = None  # what a chat template writes before and behind the response in it

    @property
    def counted(self) -> tuple[tuple[int, int], ...]:
        """The spans of the tokens that the loss counts: begin and end of each, in their order."""
        return *self.earlier, (self.prompt, len(self.tokens))


def collate(encoded: Sequence[Encoded], pad: int) -> Batch:
    """Examples side by side, padded on the right."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    tokens = pad_sequence([torch.tensor(e.tokens) for e in encoded], True, pad)
    mask = pad_sequence([torch.ones(len(e.tokens), dtype=torch.long) for e in encoded], True)
    labels = torch.full_like(tokens, IGNORED)
    for row, e in enumerate(encoded):
        for begin, end in e.counted:
            labels[row, begin:end] = tokens[row, begin:end]
    return Batch(tokens, mask, labels, encoded)


def endless_batches(encoded: Sequence[Encoded], size: int, pad: int, generator: np.random.Generator) -> Iterator[Batch]:
    """Endless batches that use every example once a pass; with fewer than `size` examples, a batch holds them all."""
    size = min(size, len(encoded))
    queue: list[int] = []
    while True:
        if len(queue) < size:
            queue.extend(generator.permutation(len(encoded)).tolist())
        yield collate([encoded[i] for i in queue[:size]], pad)
        queue = queue[size:]


def private_batches(
    encoded: Sequence[Encoded], size: int, pad: int, generator: np.random.Generator
) -> Iterator[list[Batch]]:
    """Endless batches as lists of batches of one example, for steps with noise.

    A pass uses every example at most once: those that are too few for a further batch go without. So of τ steps an
    example takes part in at most ⌈τ / ⌊n / B⌋⌉, and all batches have the same size.
    """
    size = min(size, len(encoded))
    while True:
        order = generator.permutation(len(encoded)).tolist()
        for end in range(size, len(order) + 1, size):
            yield [collate([encoded[i]], pad) for i in order[end - size : end]]
