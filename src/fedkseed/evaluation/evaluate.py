"""Evaluation of a model: held-out loss, Rouge-L and empty outputs, with standard errors."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from rouge import Rouge
from rouge_score.rouge_scorer import RougeScorer
from torch import nn

from ..data.batches import Encoded, collate
from ..models.loss import example_losses
from .statistics import Evaluation

OnProgress: TypeAlias = Callable[[int], None]


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    held_out: Sequence[Encoded],
    *,
    generated: int = 0,
    max_new_tokens: int = 64,
    rouge: str = "rouge-score",
    batch_size: int = 8,
    on_progress: OnProgress = lambda done: None,
) -> Evaluation:
    """Compute the loss on all held-out examples, and Rouge-L of greedy answers to the first `generated` of them."""
    losses: dict[int, float] = {}
    for rows in _by_length(held_out, batch_size):
        batch = collate([held_out[i] for i in rows], tokenizer.pad_token_id)
        losses.update(zip(rows, example_losses(model, batch), strict=True))
        on_progress(len(rows))
    outputs: dict[int, str] = {}
    for rows in _by_length(held_out[:generated], batch_size):
        prompts = [held_out[i].tokens[: held_out[i].prompt] for i in rows]
        outputs.update(zip(rows, respond(model, tokenizer, prompts, max_new_tokens), strict=True))
        on_progress(len(rows))
    scores = [rouge_l(held_out[i].example.response, outputs[i], rouge) for i in sorted(outputs)]
    empty = [not outputs[i].strip() for i in sorted(outputs)]
    return Evaluation([losses[i] for i in range(len(held_out))], scores, empty)


def rouge_l(reference: str, output: str, package: str = "rouge-score") -> float:
    """Rouge-L F1 as one of two packages defines it.

    `rouge-score` is the standard. `rouge` 1.0.1 is what the official code of FedKSeed used: it is
    case-sensitive, works on sets of words sentence by sentence, and so gives very different numbers; an empty
    output scores 0.
    """
    if package == "rouge-score":
        return RougeScorer(["rougeL"]).score(reference, output)["rougeL"].fmeasure
    try:
        scores: Any = Rouge().get_scores(output, reference)
        return scores[0]["rouge-l"]["f"]
    except (ValueError, RecursionError):  # nothing but punctuation; a text of more than about 900 words
        return 0.0


@torch.inference_mode()
def respond(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[str]:
    """Greedy answers to tokenised prompts."""
    width = max(map(len, prompts))
    virtual = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    if virtual and len({*map(len, prompts)}) > 1:
        # peft counts the padding between virtual tokens and a prompt as positions
        return [text for prompt in prompts for text in respond(model, tokenizer, [prompt], max_new_tokens)]
    tokens = torch.full((len(prompts), width), tokenizer.pad_token_id)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):  # padded on the left: an answer continues its prompt
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    with warnings.catch_warnings() if virtual else nullcontext():  # two answers in turns would restore each other's
        if virtual:  # peft's: no position ids are needed
            warnings.filterwarnings("ignore", "Position ids are not supported")
        output = model.generate(
            tokens.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    return tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)


def _by_length(examples: Sequence[Encoded], size: int) -> Iterator[list[int]]:
    """Groups of examples of similar length, so that batches hold little padding."""
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].tokens))
    for begin in range(0, len(order), size):
        yield order[begin : begin + size]
