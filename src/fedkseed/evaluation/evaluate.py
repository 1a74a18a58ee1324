"""Evaluation of a model: one number for each held-out example and metric."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import copy
from itertools import takewhile
from typing import Any
from unittest.mock import patch  # sets an attribute, and puts it back whatever is raised

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from ..data.batches import Encoded, collate
from ..data.wording import answer_tokens
from ..models.loss import example_losses, has_virtual_tokens, ignores_padding, option_losses, room_for
from .metrics import Metrics
from .statistics import SHOWN, Evaluation

MOST_OPTIONS = 8  # for each prompt of a batch, on average: the logits of all are in memory at once


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    held_out: Sequence[Encoded],
    *,
    metrics: Metrics | None = None,
    generated: int = 0,
    max_new_tokens: int = 64,
    batch_size: int = 8,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Evaluation:
    """Compute the loss on all held-out examples, and other metrics.

    Args:
        generated: number of examples, the first ones, to which greedy answers are written.
        on_progress: called with the number of rows that were put through the model.
    """
    metrics = metrics or Metrics()

    def each(examples: Sequence[Encoded], function: Callable[[list[Encoded]], Sequence[Any]]) -> list[Any]:
        """Results of a function of several examples, one for each of many."""
        results: dict[int, Any] = {}
        order = sorted(range(len(examples)), key=lambda i: len(examples[i].tokens))  # batches then hold little padding
        for begin in range(0, len(order), batch_size):
            rows = order[begin : begin + batch_size]
            results.update(zip(rows, function([examples[i] for i in rows]), strict=True))
            on_progress(len(rows))
        return [results[i] for i in range(len(examples))]

    pad, scores = tokenizer.pad_token_id, dict[str, list[float]]()
    losses = each(held_out, lambda some: example_losses(model, some, pad))
    for name, measure in metrics.predicted.items():
        scores[name] = each(held_out, lambda some, measure=measure: measure(model, collate(some, pad)))
    choices: list[tuple[str, str]] = []
    if metrics.options:
        options = [metrics.options[encoded.example.category] for encoded in held_out]
        chosen = dict[int, str]()
        for rows in _together(held_out, options, batch_size, ignores_padding(model)):
            best = likeliest(model, tokenizer, [held_out[i] for i in rows], [options[i] for i in rows], batch_size)
            chosen.update(zip(rows, best, strict=True))
            on_progress(sum(len(options[i]) for i in rows))
        choices = [(encoded.example.response, chosen[i]) for i, encoded in enumerate(held_out)]
        scores["choice"] = [float(true == choice) for true, choice in choices]
    asked, shown = held_out[:generated], list[list[str]]()
    answers: list[str] = each(asked, lambda some: answers_to(model, tokenizer, some, max_new_tokens))
    if asked:
        examples = [e.example for e in asked]
        shown = [[e.instruction, e.response, a] for e, a in zip(examples[:SHOWN], answers[:SHOWN], strict=True)]
        scores |= {name: list(score(answers, examples)) for name, score in metrics.written.items()}
    rouge, empty = scores.pop("rouge", []), [not a.strip() for a in answers]
    return Evaluation(losses, rouge, empty, scores, choices, answers=shown)


def likeliest(
    model: nn.Module, tokenizer: Any, examples: Sequence[Encoded], options: Sequence[Sequence[str]], batch_size: int
) -> list[str]:
    """The option of each example with the highest probability after its prompt, what ends an answer with it.

    Of equals the first.

    Args:
        examples: with prompts of one length, where padding before them counts.
        batch_size: prompts, or options of one prompt, that go through the model at a time.
    """
    prompts = [encoded.tokens[: encoded.prompt] for encoded in examples]
    tails = [
        [answer_tokens(tokenizer, option, encoded.around) for option in choices]
        for encoded, choices in zip(examples, options, strict=True)
    ]
    if len(examples) == 1:  # there may be hundreds
        parts = [tails[0][k : k + batch_size] for k in range(0, len(tails[0]), batch_size)]
        nats = [[loss for part in parts for loss in option_losses(model, prompts, [part], tokenizer.pad_token_id)[0]]]
    else:
        nats = option_losses(model, prompts, tails, tokenizer.pad_token_id)
    return [choices[losses.index(min(losses))] for choices, losses in zip(options, nats, strict=True)]


def answers_to(model: Any, tokenizer: Any, examples: Sequence[Encoded], max_new_tokens: int) -> list[str]:
    """Greedy answers to the prompts of examples, without what the chat template itself writes before an answer."""
    around = dict.fromkeys(encoded.around for encoded in examples if encoded.around is not None)
    ends = [tokenizer(end.strip(), add_special_tokens=False).input_ids for _, end in around]
    ended = [tokens[-1] for tokens in ends if tokens and tokens[-1] in tokenizer.added_tokens_decoder]
    prompts = [encoded.tokens[: encoded.prompt] for encoded in examples]
    answers = respond(model, tokenizer, prompts, max_new_tokens, ended)
    for k, encoded in enumerate(examples):
        written = tokenizer(encoded.around[0] if encoded.around else "", add_special_tokens=False).input_ids
        lead = tokenizer.decode(written).strip()
        if lead and answers[k].lstrip().startswith(lead):
            answers[k] = answers[k].lstrip().removeprefix(lead)
    return answers


@torch.inference_mode()
def respond(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, ends: Sequence[int] = ()
) -> list[str]:
    """Greedy answers to tokenised prompts: each token is the likeliest, whatever generation_config.json says.

    Args:
        ends: tokens that end an answer, beside those of `greedy`.

    Raises:
        FedKSeedError: a prompt leaves none of the model's positions.
    """
    virtual = has_virtual_tokens(model)
    rooms = [room_for(model, len(prompt), max_new_tokens) for prompt in prompts]
    if len({*rooms}) > 1 or (len({*map(len, prompts)}) > 1 and not ignores_padding(model)):
        return [text for prompt in prompts for text in respond(model, tokenizer, [prompt], max_new_tokens, ends)]
    texts = [torch.tensor(prompt, dtype=torch.long) for prompt in prompts]
    padding: dict[str, Any] = {"batch_first": True, "padding_side": "left"}  # an answer continues its prompt
    tokens = pad_sequence(texts, padding_value=tokenizer.pad_token_id, **padding)
    mask = pad_sequence([torch.ones_like(text) for text in texts], **padding)
    # Two answers in turns would restore each other's settings: but for peft's, a copy that shares the weights answers.
    answering, inner = (model, model.get_base_model()) if hasattr(model, "get_base_model") else [copy(model)] * 2
    settings = greedy(model, tokenizer, ends, rooms[0])
    asked = {"input_ids": tokens.to(model.device), "attention_mask": mask.to(model.device)}
    quiet = warnings.catch_warnings() if virtual else nullcontext()  # which turns would restore, too
    # What an argument does not set, as penalties, would come from the model's own settings.
    with quiet, patch.object(inner, "generation_config", settings):
        if virtual:  # peft's: no position ids are needed
            warnings.filterwarnings("ignore", "Position ids are not supported")
        output = answering.generate(**asked, generation_config=settings)
    last: Any = settings.eos_token_id
    # up to what ends it an answer may have special tokens of its own, as <yes>
    return tokenizer.batch_decode(
        [[*takewhile(lambda n: n not in last, row)] for row in output[:, tokens.shape[1] :].tolist()]
    )


def greedy(model: Any, tokenizer: Any, ends: Sequence[int] = (), max_new_tokens: int | None = None) -> GenerationConfig:
    """Settings of generation that are a function of the tokenizer alone, but for further special tokens that end texts.

    Llama 3 ends a message with one token, a call of a tool with another, and a text with a third: its settings list
    them, and a word in that list is none of them.
    """
    stated = getattr(model.generation_config, "eos_token_id", None)
    further = {*ends, *([stated] if isinstance(stated, int) else stated or [])}
    end = tokenizer.eos_token_id
    special = {*ends, *(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)}
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=[end, *sorted((further & special) - {end})],
    )


def _together(
    examples: Sequence[Encoded], options: Sequence[Sequence[str]], size: int, mixed: bool
) -> Iterator[list[int]]:
    """Groups of at most `size` examples with prompts of similar length, and few enough options for one batch.

    Prompts of a group may differ in length if `mixed`.
    """
    groups = dict[int, list[int]]()
    for i in sorted(range(len(examples)), key=lambda i: examples[i].prompt):
        groups.setdefault(0 if mixed else examples[i].prompt, []).append(i)
    for group in groups.values():
        most = max(1, min(size, size * MOST_OPTIONS // max(len(options[i]) for i in group)))
        for begin in range(0, len(group), most):
            yield group[begin : begin + most]
