"""Examples to tokens: the wording around an instruction, and which tokens the loss sees."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..models.loss import IGNORED, Batch
from .jsonl import Example

# Qin et al., 2024, Appendix C.2: one wording, with and without an input (Alpaca's, Taori et al., 2023)
OPENING = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)


def alpaca(example: Example, tokenizer: Any) -> str:
    """The paper's prompt."""
    context = f"### Input:\n{example.context}\n\n" if example.context else ""
    return f"{OPENING}\n\n### Instruction:\n{example.instruction}\n\n{context}### Response:"


def chat(example: Example, tokenizer: Any) -> str:
    """The tokenizer's own chat template, for models that were tuned to chat."""
    text = example.instruction + (f"\n\n{example.context}" if example.context else "")
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )


TEMPLATES = {"alpaca": alpaca, "chat": chat}


@dataclass(frozen=True, slots=True)
class Encoded:
    """One example as the model sees it: tokens[:prompt] asks, the rest is the response and the end."""

    tokens: tuple[int, ...]
    prompt: int
    example: Example


def encode(example: Example, tokenizer: Any, template: str) -> Encoded:
    """Prompt and response are tokenised apart, so that a prompt has the same tokens in generation."""
    prompt = tokenizer(TEMPLATES[template](example, tokenizer), add_special_tokens=template != "chat").input_ids
    response = tokenizer(example.response, add_special_tokens=False).input_ids
    return Encoded((*prompt, *response, tokenizer.eos_token_id), len(prompt), example)


def encode_all(
    examples: Sequence[Example], tokenizer: Any, template: str, max_tokens: int
) -> tuple[list[Encoded], int]:
    """Encode all, leave out those longer than `max_tokens`, and say how many those were."""
    encoded = [encode(example, tokenizer, template) for example in examples]
    kept = [e for e in encoded if len(e.tokens) <= max_tokens]
    return kept, len(encoded) - len(kept)


def collate(encoded: Sequence[Encoded], pad: int) -> Batch:
    """Examples side by side, padded on the right."""
    width = max(len(e.tokens) for e in encoded)
    tokens = torch.full((len(encoded), width), pad)
    mask = torch.zeros(len(encoded), width, dtype=torch.long)
    labels = torch.full((len(encoded), width), IGNORED)
    for row, e in enumerate(encoded):
        n = len(e.tokens)
        tokens[row, :n] = torch.tensor(e.tokens)
        mask[row, :n] = 1
        labels[row, e.prompt : n] = tokens[row, e.prompt : n]
    return Batch(tokens, mask, labels)


def endless_batches(encoded: Sequence[Encoded], size: int, pad: int, generator: np.random.Generator) -> Iterator[Batch]:
    """Batches for ever, every example once in each pass; a small client's batch is all it has."""
    size = min(size, len(encoded))
    queue: list[int] = []
    while True:
        if len(queue) < size:
            queue.extend(generator.permutation(len(encoded)).tolist())
        yield collate([encoded[i] for i in queue[:size]], pad)
        queue = queue[size:]
