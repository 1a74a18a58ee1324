"""Conversion of examples to tokens: the wording around an instruction, and the tokens that the loss counts."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ..errors import FedKSeedError
from .batches import Encoded
from .reading import Example

MAX_TEMPLATE = 1 << 16  # characters of a chat template, and of what it adds to a text; SmolLM2's has 368
MAX_STEPS = 20_000  # of a chat template for one message; SmolLM2's takes fewer than 40
ASKED = "Write a response that appropriately completes the request."
WITH_INPUT = (
    f"Below is an instruction that describes a task, paired with an input that provides further context. {ASKED}"
)
WITHOUT_INPUT = f"Below is an instruction that describes a task. {ASKED}"


def paper(example: Example, tokenizer: Any) -> str:
    """Prompt with the same opening with or without an input. Source: Qin et al., 2024, Appendix C, prompt templates"""
    return _sections(WITH_INPUT, example)


def alpaca(example: Example, tokenizer: Any) -> str:
    """Prompt with a separate opening for tasks without an input. Source: Taori et al., 2023, Stanford Alpaca"""
    return _sections(WITH_INPUT if example.context else WITHOUT_INPUT, example)


def official_dolly(example: Example, tokenizer: Any) -> str:
    """Prompt as `alpaca`, but with another request. Source: the official code of FedKSeed, for Dolly"""
    opening = WITH_INPUT if example.context else WITHOUT_INPUT
    return _sections(opening.replace(ASKED, "Write a response for the task request."), example)


def official_ni(example: Example, tokenizer: Any) -> str:
    """Prompt as `paper`, with an input section even without an input. Source: the official code, for its tasks"""
    return f"{WITH_INPUT}\n\n### Instruction:\n{example.instruction}\n\n### Input:\n{example.context}\n\n### Response:"


def chat(example: Example, tokenizer: Any) -> str:
    """Prompt by the tokenizer's own chat template, for models that were tuned to chat."""
    if not tokenizer.chat_template:
        raise FedKSeedError(
            "[data] template = 'chat': the model's tokenizer has no chat template; use 'paper' or 'alpaca'"
        )
    if len(tokenizer.chat_template) > MAX_TEMPLATE:
        raise FedKSeedError(
            f"the model's chat template has {len(tokenizer.chat_template):,} characters, at most {MAX_TEMPLATE:,} go; "
            "use the template 'paper' or 'alpaca'"
        )
    text = example.instruction + (f"\n\n{example.context}" if example.context else "")
    try:
        with _stepwise():
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
    except FedKSeedError:
        raise
    except Exception as error:  # a template is a program of the model's maker, and may fail as any other
        raise FedKSeedError(
            f"the model's chat template can't be used: {type(error).__name__}: {error}; use 'paper' or 'alpaca'"
        ) from error
    if len(prompt) > len(text) + MAX_TEMPLATE:
        raise FedKSeedError(f"the model's chat template made {len(prompt):,} characters of {len(text):,}")
    return prompt


@contextmanager
def _stepwise() -> Iterator[None]:
    """End a chat template after `MAX_STEPS` steps.

    Templates run in a sandbox without a limit of time, where two nested loops can take years. Steps are counted and not
    seconds, so that every machine ends the same templates.
    """
    from jinja2 import filters

    left, before, own = MAX_STEPS, sys.gettrace(), ("<template>", filters.__file__)

    def step(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in own:
            return None
        left -= 1
        if left < 0:
            raise FedKSeedError(
                f"the model's chat template is not done after {MAX_STEPS:,} steps; use the template 'paper' or 'alpaca'"
            )
        return step

    sys.settrace(step)
    try:
        yield
    finally:
        sys.settrace(before)


def _sections(opening: str, example: Example) -> str:
    context = f"### Input:\n{example.context}\n\n" if example.context else ""
    return f"{opening}\n\n### Instruction:\n{example.instruction}\n\n{context}### Response:"


TEMPLATES = {
    "paper": paper,
    "alpaca": alpaca,
    "chat": chat,
    "official-dolly": official_dolly,
    "official-ni": official_ni,
}


@dataclass(frozen=True, slots=True)
class Wording:
    """The text in which an instruction is put to the model.

    Args:
        template: a name of TEMPLATES.
        separator: text between the template's end and the response. With none after
            "### Response:", SmolLM2-135M-Instruct begins up to 8 of 30 answers with the end of text.
    """

    template: str = "paper"
    separator: str = "\n"

    def __post_init__(self) -> None:
        if self.template not in TEMPLATES:
            raise FedKSeedError(f"no template is called {self.template!r}; choose one of {', '.join(TEMPLATES)}")

    def prompts(self, examples: Sequence[Example], tokenizer: Any) -> list[list[int]]:
        """The prompts as tokens; a chat template brings its own separator and special tokens."""
        chat = self.template == "chat"
        texts = [TEMPLATES[self.template](e, tokenizer) + ("" if chat else self.separator) for e in examples]
        return tokenizer(texts, add_special_tokens=not chat).input_ids

    def prompt(self, example: Example, tokenizer: Any) -> list[int]:
        """The prompt of one example as tokens."""
        return self.prompts([example], tokenizer)[0]


def encode(example: Example, tokenizer: Any, wording: Wording) -> Encoded:
    """Encode one example; prompt and response are tokenised apart, so that generation has the same prompt tokens."""
    return encode_all([example], tokenizer, wording)[0]


def encode_all(examples: Sequence[Example], tokenizer: Any, wording: Wording) -> list[Encoded]:
    """Encode many examples, each as `encode` does; fast tokenizers use all cores for a list."""
    if not examples:
        return []
    prompts = wording.prompts(examples, tokenizer)
    responses = tokenizer([e.response for e in examples], add_special_tokens=False).input_ids
    end = tokenizer.eos_token_id
    return [Encoded((*p, *r, end), len(p), e) for p, r, e in zip(prompts, responses, examples, strict=True)]


def cut(encoded: Encoded, limit: int) -> Encoded:
    """The first `limit` tokens of an example, as a tokenizer that truncates would give them."""
    return Encoded(encoded.tokens[:limit], min(encoded.prompt, limit), encoded.example)
