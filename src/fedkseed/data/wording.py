"""Conversion of examples to tokens: the wording around instructions, and the tokens that the loss counts."""

import datetime
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from string import Template
from typing import Any, NamedTuple, get_args

from ..errors import FedKSeedError, require_choice
from ..recipe.schema import DataTable
from .batches import Encoded
from .chat_template import INSTEAD, ChatTemplate
from .layouts import ASSISTANT, SYSTEM, USER, Example, Turn

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
TEMPLATES: tuple[str, ...] = get_args(DataTable.model_fields["template"].annotation)
SPACE = " \t\r\n"  # that a chat template may write behind the end of text


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
    around: tuple[str, str] | None = None  # what a chat template writes before and behind what was said


@dataclass(frozen=True, slots=True)
class Wording:
    """The text in which an instruction is put to the model."""

    template: str = "paper"  # a name of TEMPLATES
    # Text between the template's end and the response. With none after "### Response:", SmolLM2-135M-Instruct begins up
    # to 8 of 30 answers with the end of text.
    separator: str = "\n"
    date: datetime.date | None = None  # that a chat template writes; None: one that writes a date is refused

    @classmethod
    def of(cls, data: DataTable) -> "Wording":
        """The wording that a recipe names."""
        return cls(data.template, data.separator, data.date)

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> "Wording":
        """The wording of `facts`; what is not there is the default."""
        default, day = cls(), facts.get("date")
        template, separator = facts.get("template") or default.template, facts.get("separator", default.separator)
        if not isinstance(separator, str):
            raise FedKSeedError(f"the separator of a prompt is a text, got {ascii(separator)[:40]}")
        try:
            date = datetime.date.fromisoformat(str(day)) if day else None
        except ValueError as error:
            raise FedKSeedError(f"the date of a prompt is as 2026-01-31, got {ascii(day)[:40]}") from error
        return cls(template, separator, date)

    @property
    def facts(self) -> dict[str, str]:
        """The wording as texts, for files that describe a tuned model."""
        day = {"date": self.date.isoformat()} if self.date else {}
        return {"template": self.template, "separator": self.separator, **day}

    def __post_init__(self) -> None:
        require_choice("template", self.template, TEMPLATES)

    def exchanges(self, example: Example, tokenizer: Any) -> list[PromptedResponse]:
        """The example as texts: one exchange for each answer that the loss counts.

        A chat template brings its own separator and its own end of an answer.

        Raises:
            FedKSeedError: the chat template can't word the example.
        """
        if example.plain:
            return [PromptedResponse("", example.response)]
        if self.template == "chat":
            return self._chat_exchanges(example, tokenizer)
        if not example.turns:
            return [PromptedResponse(prompt_of(self.template, example) + self.separator, example.response)]
        exchanges, questions, system = list[PromptedResponse](), list[str](), list[str]()
        before = ""  # answers that the loss does not count, with what asks for them
        for turn in chain(example.turns, [Turn(ASSISTANT, example.response)]):
            if turn.role == ASSISTANT and turn.text.strip():
                request = Example("\n\n".join(questions), "", "\n\n".join(system))
                prompt = before + prompt_of(self.template, request, later=bool(exchanges or before)) + self.separator
                questions, system, before = [], [], ""
                if turn.counted:
                    exchanges.append(PromptedResponse(prompt, turn.text))
                else:
                    before = prompt + turn.text + tokenizer.eos_token
            elif turn.role != ASSISTANT:
                (system if turn.role == SYSTEM else questions).append(turn.text)
        return exchanges

    def _chat_exchanges(self, example: Example, tokenizer: Any) -> list[PromptedResponse]:
        """The exchanges in the one text that the chat template makes of a conversation."""
        template, turns = ChatTemplate.of(tokenizer, self.date), _turns(example)
        messages = _messages([*turns, Turn(ASSISTANT, example.response)])
        whole, answers = template.answers(messages, [*(turn.counted for turn in turns), True])
        exchanges, at, end = list[PromptedResponse](), 0, tokenizer.eos_token
        missing = "" if template.written else template.tail  # behind the last answer
        for answer, turn in zip(answers, [*turns, None], strict=True):
            if answer and answer.counted and (turn is None or turn.counted):
                around = whole[answer.begin : answer.said], template.tail or end
                counted = whole[answer.begin : answer.end] + ("" if turn else missing)
                ended = counted.endswith(end) or (turn is None and template.end is None)
                prompt = whole[at : answer.begin]
                exchanges.append(PromptedResponse(prompt, counted.removesuffix(end), ended, around))
                at = answer.end
        if len(exchanges) > 1 and not template.tail:
            raise FedKSeedError(
                "the model's chat template writes nothing that ends an answer, and a model that learns the earlier "
                f"answers of a conversation would not end any; {INSTEAD}"
            )
        if not (answers[-1] and answers[-1].counted):
            raise FedKSeedError(f"the marks of the model's chat template leave out the last answer; {INSTEAD}")
        return exchanges

    def chat_template(self, tokenizer: Any) -> str:
        """A chat template that words a conversation as `exchanges` does, for programs that put messages to a model.

        It is in Jinja, as those of tokenizers are, without a space or line of its own that would show in the text.
        """
        if self.template == "chat":
            return ChatTemplate.of(tokenizer, self.date).text  # refuses what a run would refuse
        return CONVERSATION.substitute(
            begin=json.dumps(tokenizer.decode(beginning(tokenizer)), ensure_ascii=False),
            first=_as_jinja(lambda example: prompt_of(self.template, example) + self.separator),
            later=_as_jinja(lambda example: prompt_of(self.template, example, later=True) + self.separator),
        )

    def text(self, example: Example, tokenizer: Any) -> str:
        """The prompt of one example without earlier answers, as text."""
        if self.template == "chat":
            return ChatTemplate.of(tokenizer, self.date).render(_messages(_turns(example)), asks=True)
        asked = replace(example, response=example.response or "?")  # an exchange has an answer
        return self.exchanges(asked, tokenizer)[0].prompt

    def prompt(self, example: Example, tokenizer: Any) -> list[int]:
        """The prompt of one example as tokens."""
        begin = [] if self.template == "chat" else beginning(tokenizer)
        return begin + tokenizer(self.text(example, tokenizer), add_special_tokens=False).input_ids

    def ends(self, tokenizer: Any) -> list[int]:
        """The tokens that end an answer: the end of text, and that which the chat template writes behind one."""
        end = ChatTemplate.of(tokenizer, self.date).end if self.template == "chat" else None
        return list(dict.fromkeys([tokenizer.eos_token_id, *([] if end is None else [end])]))


def beginning(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer puts before each text by itself; those that it puts behind are left out."""
    whole, text = (tokenizer("a", add_special_tokens=special).input_ids for special in (True, False))
    starts = (k for k in range(len(whole)) if whole[k : k + len(text)] == text)
    return whole[: next(starts, 0)]


def answer_tokens(tokenizer: Any, response: str, around: tuple[str, str] | None) -> tuple[int, ...]:
    """The tokens of another response in the place of an example's, to the end of the answer.

    Args:
        around: that of the example.
    """
    if around is None:
        return *tokenizer(response, add_special_tokens=False).input_ids, tokenizer.eos_token_id
    lead, end = around
    before = tokenizer("\n", add_special_tokens=False).input_ids  # else some tokenizers begin a text with a space
    tokens = tokenizer(f"\n{lead}{response}{end}", add_special_tokens=False).input_ids
    if tokens[: len(before)] == before:
        return tuple(tokens[len(before) :])
    return tuple(tokenizer(f"{lead}{response}{end}", add_special_tokens=False).input_ids)


def _turns(example: Example) -> Sequence[Turn]:
    """The messages before the response; none where nothing is asked."""
    request = _request(example)
    return example.turns or ([Turn(USER, request)] if request else [])


def _messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.text} for turn in turns]


def _as_jinja(prompt: Callable[[Example], str]) -> str:
    """The Jinja expression of a prompt, in which `asked` and `system` stand for the instruction and its context."""
    names = {"\x00": "asked", "\x01": "system"}  # characters that are in no prompt
    asked, system = names

    def expression(example: Example) -> str:
        parts = re.split(f"({asked}|{system})", prompt(example))  # Jinja reads escapes as JSON does
        return " ~ ".join(names.get(part) or json.dumps(part, ensure_ascii=False) for part in parts if part)

    return f"({expression(Example(asked, '', system))}) if system else ({expression(Example(asked, ''))})"


def encode_each(examples: Sequence[Example], tokenizer: Any, wording: Wording) -> list[Encoded | FedKSeedError]:
    """Encode many examples; in place of one that the chat template or the model can't take there is the reason.

    A prompt has the tokens that generation has. Fast tokenizers use all cores for a list.

    A conversation is tokenised as one text, as programs do that are asked in it, and each prompt in it has the tokens
    that it has alone. Where a token would reach over the edge of an answer, and for an instruction in a wording of our
    own, prompts and answers are tokenised apart.
    """

    def tokens(texts: Sequence[str]) -> list[list[int]]:
        return tokenizer(list(texts), add_special_tokens=False).input_ids if texts else []

    rows = getattr(tokenizer, "rows", None) or math.inf
    begin, conversations = beginning(tokenizer), [_attempt(wording, example, tokenizer) for example in examples]
    parts = [[] if isinstance(pieces, FedKSeedError) else _parts(pieces, tokenizer) for pieces in conversations]
    encoded, every = list[Encoded | FedKSeedError](), iter(tokens([text for texts in parts for text in texts]))
    for example, exchanges, texts in zip(examples, conversations, parts, strict=True):
        if isinstance(exchanges, FedKSeedError):
            encoded.append(exchanges)
            continue
        pieces = [next(every) for _ in texts]
        if _is_one_text(exchanges):
            pieces = _as_one_text(pieces, _texts(exchanges, tokenizer), tokens)
        # A text may have been written by a chat template, with the begin and the end of text.
        begins = example.plain and pieces[-1][: len(begin)] == begin
        ends = example.plain and example.response.rstrip(SPACE).endswith(tokenizer.eos_token)
        text, spans = list(begin) if exchanges[-1].around is None and not begins else [], list[tuple[int, int]]()
        for prompt, answer in zip(pieces[::2], pieces[1::2], strict=True):
            spans.append((len(text) + len(prompt), len(text) + len(prompt) + len(answer)))
            text += prompt + answer
        if exchanges[-1].ended and not ends:
            text.append(tokenizer.eos_token_id)
        if text and max(text) >= rows:
            token = tokenizer.convert_ids_to_tokens(max(text))
            encoded.append(
                FedKSeedError(f"the text holds {token!r}, a token for which the model has no row; remove it")
            )
            continue
        encoded.append(Encoded(tuple(text), spans[-1][0], example, tuple(spans[:-1]), exchanges[-1].around))
    return encoded


def _attempt(wording: Wording, example: Example, tokenizer: Any) -> list[PromptedResponse] | FedKSeedError:
    try:
        return wording.exchanges(example, tokenizer)
    except FedKSeedError as error:
        return error


def _texts(exchanges: Sequence[PromptedResponse], tokenizer: Any) -> list[str]:
    """Prompts and answers in turn; the end of text is written behind all answers but the last, where it is a token."""
    ended = [each.ended for each in exchanges[:-1]]
    ends = [*(tokenizer.eos_token if end else "" for end in ended), ""]
    return [text for each, end in zip(exchanges, ends, strict=True) for text in (each.prompt, each.response + end)]


def _is_one_text(exchanges: Sequence[PromptedResponse]) -> bool:
    """Whether exchanges are tokenised as one text; prompt and response of an instruction are tokenised apart."""
    return len(exchanges) > 1 or exchanges[0].around is not None


def _parts(exchanges: Sequence[PromptedResponse], tokenizer: Any) -> list[str]:
    """The texts of an example to tokenise: each; where they are one text, also all together, and the last prompt."""
    texts = _texts(exchanges, tokenizer)
    if not _is_one_text(exchanges):
        return texts
    return [*texts, "".join(texts), *(["".join(texts[:-1])] if len(texts) > 2 else [])]


def _as_one_text(
    pieces: Sequence[list[int]], texts: Sequence[str], tokens: Callable[[Sequence[str]], list[list[int]]]
) -> list[list[int]]:
    """The tokens of each of some texts that are tokenised as one; where one reaches over an edge, those of each apart.

    Args:
        pieces: the tokens of `_parts`.
    """
    apart, whole = [*pieces[: len(texts)]], pieces[len(texts)]
    asked = pieces[-1] if len(texts) > 2 else apart[0]
    if list(chain(*apart)) == whole and whole[: len(asked)] == asked:
        return apart
    beginnings = tokens(list(accumulate(texts)))
    if all(whole[: len(beginning)] == beginning for beginning in beginnings):
        return [whole[first:stop] for first, stop in pairwise([0, *map(len, beginnings)])]
    return apart


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
    return replace(encoded, tokens=encoded.tokens[:limit], prompt=min(encoded.prompt, limit), earlier=earlier)
