"""Conversion of examples to tokens: the wording around instructions, and the tokens that the loss counts."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from string import Template
from types import FrameType
from typing import Any, NamedTuple

from ..errors import FedKSeedError
from .batches import Encoded
from .layouts import ASSISTANT, SYSTEM, USER, Example

MAX_TEMPLATE = 1 << 16  # characters of a chat template, and of what it adds to a text; SmolLM2's has 368
MAX_STEPS = 20_000  # that a chat template may take for a message; SmolLM2's takes fewer than 40
REQUEST = "Write a response that appropriately completes the request."
DOLLY_REQUEST = "Write a response for the task request."
WITH_INPUT = (
    f"Below is an instruction that describes a task, paired with an input that provides further context. {REQUEST}"
)
WITHOUT_INPUT = f"Below is an instruction that describes a task. {REQUEST}"
# Template -> the opening of a prompt with an input, and that of one without.
OPENINGS = {
    "paper": (WITH_INPUT, WITH_INPUT),  # Qin et al., 2024, Appendix C, prompt templates
    "alpaca": (WITH_INPUT, WITHOUT_INPUT),  # Taori et al., 2023, Stanford Alpaca
    # The official code of FedKSeed: its request for Dolly, and its wording of tasks, with an input section always.
    "official-dolly": tuple(text.replace(REQUEST, DOLLY_REQUEST) for text in (WITH_INPUT, WITHOUT_INPUT)),
    "official-ni": (WITH_INPUT, WITH_INPUT),
}
TEMPLATES = ("paper", "alpaca", "chat", "plain", "official-dolly", "official-ni")


def prompt_of(template: str, example: Example, later: bool = False) -> str:
    """The prompt of an instruction, without a separator.

    Args:
        template: `plain` is the instruction as it stands, and the context after a blank line; else a key of OPENINGS.
        later: whether other exchanges are before it: the opening stands at the beginning of a conversation.
    """
    if template == "plain":
        return "\n\n" * later + _request(example)
    opening = "" if later else OPENINGS[template][not example.context]
    has_input = example.context or (template == "official-ni" and not later)
    context = f"### Input:\n{example.context}\n\n" if has_input else ""
    return f"{opening}\n\n### Instruction:\n{example.instruction}\n\n{context}### Response:"


def _request(example: Example) -> str:
    return example.instruction + (f"\n\n{example.context}" if example.context else "")


def _rendered(messages: Sequence[Mapping[str, str]], tokenizer: Any) -> str:
    """The text that the tokenizer's chat template makes of messages, up to where the next response begins."""
    if not tokenizer.chat_template:
        raise FedKSeedError("[data] template = 'chat': the model has no chat template; use 'paper' or 'alpaca'")
    if len(tokenizer.chat_template) > MAX_TEMPLATE:
        raise FedKSeedError(
            f"the model's chat template has {len(tokenizer.chat_template):,} characters, at most {MAX_TEMPLATE:,} go; "
            "use the template 'paper' or 'alpaca'"
        )
    try:
        with _limited_steps():
            prompt = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except FedKSeedError:
        raise
    except Exception as error:  # a template is a program of the model's maker, and may fail as any other
        raise FedKSeedError(
            f"the model's chat template can't be used: {type(error).__name__}: {error}; use 'paper' or 'alpaca'"
        ) from error
    length = sum(len(message["content"]) for message in messages)
    if len(prompt) > length + MAX_TEMPLATE:
        raise FedKSeedError(f"the model's chat template made {len(prompt):,} characters of {length:,}")
    return prompt


@contextmanager
def _limited_steps() -> Iterator[None]:
    """End a chat template after `MAX_STEPS` steps.

    Templates run in a sandbox without a limit of time, where two nested loops can take years. Steps are counted and not
    seconds, so that every machine ends the same templates.
    """
    from jinja2 import filters

    steps, template_files = iter(range(MAX_STEPS)), ("<template>", filters.__file__)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in template_files:
            return None
        if next(steps, None) is None:
            raise FedKSeedError(f"the model's chat template takes over {MAX_STEPS:,} steps; use 'paper' or 'alpaca'")
        return trace

    trace_before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(trace_before)


# The steps of `Wording.exchanges` in Jinja. All white space of it is inside of tags, and none shows in a prompt.
CONVERSATION = Template(
    "{{ $begin }}"
    "{% set now = namespace(asked=[], system=[], later=false) %}"
    "{% macro ask() %}"
    "{% set asked = now.asked | join('\\n\\n') %}{% set system = now.system | join('\\n\\n') %}"
    "{{ ($later) if now.later else ($first) }}"
    "{% endmacro %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% set now.system = now.system + [message['content']] %}"
    "{% elif message['role'] != 'assistant' %}{% set now.asked = now.asked + [message['content']] %}"
    "{% elif message['content'] | trim %}{{ ask() }}{{ message['content'] }}{{ eos_token }}"
    "{% set now.asked = [] %}{% set now.system = [] %}{% set now.later = true %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ask() }}{% endif %}"
)


class PromptedResponse(NamedTuple):
    """A text that the loss skips, and the response to it, which the loss counts."""

    prompt: str
    response: str
    ended: bool = True  # whether the end of text follows, which the loss counts, too


@dataclass(frozen=True, slots=True)
class Wording:
    """The text in which an instruction is put to the model."""

    template: str = "paper"  # a name of TEMPLATES
    # Text between the template's end and the response. With none after "### Response:", SmolLM2-135M-Instruct begins up
    # to 8 of 30 answers with the end of text.
    separator: str = "\n"

    def __post_init__(self) -> None:
        if self.template not in TEMPLATES:
            raise FedKSeedError(f"no template is called {self.template!r}; choose one of {', '.join(TEMPLATES)}")

    def exchanges(self, example: Example, tokenizer: Any) -> list[PromptedResponse]:
        """The example as texts: one exchange for each answer in it. A chat template brings its own separator."""
        if example.plain:
            return [PromptedResponse("", example.response)]
        if self.template == "chat":
            return _answers(example, tokenizer)
        if not example.turns:
            return [PromptedResponse(prompt_of(self.template, example) + self.separator, example.response)]
        exchanges, questions, system = list[PromptedResponse](), list[str](), list[str]()
        for role, text in chain(example.turns, [(ASSISTANT, example.response)]):
            if role == ASSISTANT and text.strip():
                request = Example("\n\n".join(questions), "", "\n\n".join(system))
                prompt = prompt_of(self.template, request, later=bool(exchanges))
                exchanges.append(PromptedResponse(prompt + self.separator, text))
                questions, system = [], []
            elif role != ASSISTANT:
                (system if role == SYSTEM else questions).append(text)
        return exchanges

    def chat_template(self, tokenizer: Any) -> str:
        """A chat template that words a conversation as `exchanges` does, for programs that put messages to a model.

        It is in Jinja, as those of tokenizers are, without a space or line of its own that would show in the text.
        """
        if self.template == "chat":
            _rendered([{"role": USER, "content": ""}], tokenizer)  # refuses what a run would refuse
            return tokenizer.chat_template
        return CONVERSATION.substitute(
            begin=json.dumps(tokenizer.decode(tokenizer("").input_ids), ensure_ascii=False),  # put before each text
            first=_as_jinja(lambda example: prompt_of(self.template, example) + self.separator),
            later=_as_jinja(lambda example: prompt_of(self.template, example, later=True) + self.separator),
        )

    def text(self, example: Example, tokenizer: Any) -> str:
        """The prompt of one example without earlier turns, as text."""
        return self.exchanges(example, tokenizer)[0].prompt

    def prompt(self, example: Example, tokenizer: Any) -> list[int]:
        """The prompt of one example as tokens."""
        encoded = encode(example, tokenizer, self)
        return list(encoded.tokens[: encoded.prompt])


def _as_jinja(prompt: Callable[[Example], str]) -> str:
    """The Jinja expression of a prompt, in which `asked` and `system` stand for the instruction and its context."""
    names = {"\x00": "asked", "\x01": "system"}  # characters that are in no prompt
    asked, system = names

    def expression(example: Example) -> str:
        parts = re.split(f"({asked}|{system})", prompt(example))  # Jinja reads escapes as JSON does
        return " ~ ".join(names.get(part) or json.dumps(part, ensure_ascii=False) for part in parts if part)

    return f"({expression(Example(asked, '', system))}) if system else ({expression(Example(asked, ''))})"


def _answers(example: Example, tokenizer: Any) -> list[PromptedResponse]:
    """The exchanges of an example in the text that the chat template makes of it.

    Each answer begins where the template, given the messages before it, asks for one. The end of text is counted where
    the template writes it.

    Raises:
        FedKSeedError: the template writes earlier answers elsewhere, or otherwise than they are.
    """
    messages, end = [{"role": turn.role, "content": turn.text} for turn in example.turns], tokenizer.eos_token
    messages = messages or [{"role": USER, "content": _request(example)}]
    whole, exchanges, at = _rendered(messages, tokenizer), list[PromptedResponse](), 0
    for k, message in enumerate(messages):
        text = message["content"]
        if message["role"] != ASSISTANT or not text.strip() or k == 0:
            continue
        asked = _rendered(messages[:k], tokenizer)
        begin = len(whole) - len(whole[len(asked) :].lstrip())
        answer = next((form for form in (text.lstrip(), text.strip()) if whole.startswith(form, begin)), None)
        if answer is None or not whole.startswith(asked):
            raise FedKSeedError(
                "the model's chat template writes an earlier answer of a conversation otherwise than it asks for one, "
                "and the loss could not find it; use the template 'paper' or 'alpaca'"
            )
        ended = whole.startswith(end, begin + len(answer))
        exchanges.append(PromptedResponse(whole[at:begin], answer, ended))
        at = begin + len(answer) + len(end) * ended
    return [*exchanges, PromptedResponse(whole[at:], example.response)]


def encode(example: Example, tokenizer: Any, wording: Wording) -> Encoded:
    """Encode one example; prompt and response are tokenised apart, so that generation has the same prompt tokens."""
    return encode_all([example], tokenizer, wording)[0]


def encode_all(examples: Sequence[Example], tokenizer: Any, wording: Wording) -> list[Encoded]:
    """Encode many examples, each as `encode` does; fast tokenizers use all cores for a list."""

    def tokens(texts: Sequence[str], special: bool = False) -> list[list[int]]:
        return tokenizer(list(texts), add_special_tokens=special).input_ids if texts else []

    is_chat, encoded = wording.template == "chat", list[Encoded]()
    conversations = [wording.exchanges(example, tokenizer) for example in examples]
    firsts = tokens([exchanges[0].prompt for exchanges in conversations], special=not is_chat)
    begin = tokens([""], special=True)[0] if is_chat and any(e.plain for e in examples) else []
    later = iter(tokens([exchange.prompt for exchanges in conversations for exchange in exchanges[1:]]))
    answers = iter(tokens([exchange.response for exchanges in conversations for exchange in exchanges]))
    for example, exchanges, first in zip(examples, conversations, firsts, strict=True):
        text, spans = list(begin if is_chat and example.plain else first), list[tuple[int, int]]()
        for k, exchange in enumerate(exchanges):
            text += next(later) if k else []
            start = len(text)
            text += [*next(answers), tokenizer.eos_token_id] if exchange.ended else next(answers)
            spans.append((start, len(text)))
        encoded.append(Encoded(tuple(text), spans[-1][0], example, tuple(spans[:-1])))
    return encoded


def packed(texts: Sequence[Encoded], limit: int, tokenizer: Any) -> list[Encoded]:
    """Texts one after the other, cut into blocks of `limit` tokens; those of each category are apart.

    The first token of a block is its prompt: nothing before it could predict it.
    """
    blocks = []
    for category in dict.fromkeys(text.example.category for text in texts):
        stream = [token for text in texts if text.example.category == category for token in text.tokens]
        for block in (stream[at : at + limit] for at in range(0, len(stream), limit)):
            if len(block) > 1:
                example = Example("", tokenizer.decode(block[1:]), category=category, plain=True)
                blocks.append(Encoded(tuple(block), 1, example))
    return blocks


def cut(encoded: Encoded, limit: int) -> Encoded:
    """The first `limit` tokens of an example, as a tokenizer that truncates would give them."""
    earlier = tuple((begin, min(end, limit)) for begin, end in encoded.earlier if begin < limit)
    return Encoded(encoded.tokens[:limit], min(encoded.prompt, limit), encoded.example, earlier)
