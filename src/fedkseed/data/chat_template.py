"""A tokenizer's chat template: the text that it writes, the places of answers in it, and the token that ends one.

A template is a program of the model's maker. It is run within limits of steps and characters, and what it does to an
answer is found by trying: it is given a conversation whose answers are known.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

from ..errors import FedKSeedError
from .layouts import ASSISTANT, USER

MAX_TEMPLATE = 1 << 16  # characters of a chat template, and of what it adds to a text; SmolLM2's has 368
MAX_STEPS = 20_000  # that a chat template may take for a conversation; SmolLM2's takes fewer than 40 a message
SHOWN = 120  # characters of a rendering in an error
INSTEAD = "use the template 'paper' or 'alpaca'"
THOUGHT = re.compile(r"</?(?:think|thinking|thought|reasoning)>")  # tags around a thought, which templates write anew
CLOCK = "strftime_now"  # transformers' function for templates that write the date
# What templates ask of it; a format is cut into these, and all else of it is copied.
DIRECTIVES = (*(f"%{letter}" for letter in "aAbBcdeDFHIjmMpSTuUVwWxXyY"), "%-d", "%-m")
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
QUESTION, ANSWER = "Where is the station?", "Station 7364 is beside bridge 81."

Messages = Sequence[Mapping[str, str]]


class Answer(NamedTuple):
    """The place of an answer in a rendered conversation, in characters."""

    begin: int  # where the text ends with which the template asks for it
    said: int  # where its own text begins: a template may write something before it, as an empty thought
    end: int  # behind what ends it
    counted: bool = True  # by the template's own marks, where it has any


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A tokenizer's chat template with the date that it writes, and the texts that it puts around an answer."""

    tokenizer: Any
    text: str  # the template
    leads: tuple[str, ...]  # what may stand between the request for an answer and the answer
    tail: str  # what ends an answer, up to the first special token
    written: bool  # whether it follows the last answer, too; if not, it is the start of the next message
    closing: str  # special tokens behind the tail of the last answer
    special: str  # a pattern of the tokenizer's special tokens

    @classmethod
    def of(cls, tokenizer: Any, day: date | None) -> "ChatTemplate":
        """The chat template of a tokenizer.

        Args:
            day: the date for a template that writes one.

        Raises:
            FedKSeedError: there is none, it can't be used, it needs a date, or an answer can't be found in what it
                writes.
        """
        return _tried(tokenizer, pinned(tokenizer, day))

    @property
    def end(self) -> int | None:
        """The special token that ends an answer; None: there is none, or words end one."""
        token = re.search(self.special, self.tail)
        return self.tokenizer.convert_tokens_to_ids(token[0]) if token else None

    def render(self, messages: Messages, asks: bool = False) -> str:
        """The text of messages; with a request for an answer if it `asks`."""
        return _rendered(self.tokenizer, self.text, messages, asks)[0]

    def answers(self, messages: Messages, wanted: Sequence[bool]) -> tuple[str, list[Answer | None]]:
        """The text of messages, and where each is an answer; None: no answer, not wanted, or empty before the last.

        Raises:
            FedKSeedError: an answer stands elsewhere than the template asks for it, or otherwise than it is; or the
                template leaves a message out.
        """
        has_marks = bool(MARKS.search(self.text))
        whole, marks = _rendered(self.tokenizer, self.text, messages, marked=has_marks)
        self._require_all(whole, messages)
        answers = list[Answer | None]()
        for k, message in enumerate(messages):
            is_said = message["content"].strip() or k == len(messages) - 1
            if message["role"] != ASSISTANT or not is_said or not wanted[k]:
                answers.append(None)
                continue
            answer = self._place(whole, messages, k, max((a.end for a in answers if a), default=0))
            marked = next((stop for first, stop in marks if first < answer.end and answer.said < stop), None)
            if marked is not None:  # the maker's own mark also says what ends the answer
                answer = answer._replace(end=max(answer.end, len(whole[:marked].rstrip())))
            answers.append(answer._replace(counted=marked is not None or not has_marks))
        last = answers[-1] if answers else None
        if last and whole.startswith(self.closing, last.end):
            answers[-1] = last._replace(end=last.end + len(self.closing))
        return whole, answers

    def _require_all(self, whole: str, messages: Messages) -> None:
        """Refuse messages of which one changes nothing in what the template writes: some have no part for a role.

        The words of one that is left out may well stand in a later message, as a tool's result in the answer: all have
        to stand in their order, and what the template could have written by itself is tried, too.
        """
        at, ordered = 0, True
        for message in messages:
            begin = whole.find(words := message["content"].strip(), at)
            ordered &= begin >= 0
            at = max(at, begin + len(words))
        doubtful = dict[int, Mapping[str, str]]()  # the place of an answer is looked for
        for k, message in enumerate(messages):
            words = message["content"].strip()
            if message["role"] != ASSISTANT and words and not (ordered and words not in self.text):
                doubtful[k] = {**message, "content": f"{words} {ANSWER} {k}."}
        changed = ""
        with suppress(FedKSeedError):  # all in one rendering, and those that are not there one by one
            changed = self.render([doubtful.get(k, message) for k, message in enumerate(messages)]) if doubtful else ""
        for k, message in doubtful.items():
            if message["content"] in changed:
                continue
            if self.render([*messages[:k], message, *messages[k + 1 :]]) == whole:
                words = messages[k]["content"].strip()
                raise FedKSeedError(
                    f"the model's chat template leaves out message {k + 1}, {words[:40]!r} of the role "
                    f"{message['role']}; write it into a message of another role, or {INSTEAD}"
                )

    def _place(self, whole: str, messages: Messages, k: int, at: int) -> Answer:
        """The place of message `k`, an answer, in the text of all messages.

        Args:
            at: where the answer before it ends.
        """
        text, asked = messages[k]["content"], ""
        try:
            asked = self.render(messages[:k], asks=True)
        except FedKSeedError:
            if k:
                raise
        header = self.header() if k <= 1 else ""  # of a greeting, for which some templates can't ask
        if asked and whole.startswith(asked):
            begin = len(asked)
            if header and not asked.endswith(header) and whole.startswith(header, begin):
                begin += len(header)
        elif k == 0 and header:
            begin = whole.find(header, at) + len(header)
        else:
            begin = len(whole)
        # Templates take white space away at an answer's ends, some of them line ends alone.
        strips = (str.strip, str.lstrip, str.rstrip)
        forms = dict.fromkeys([text, *(strip(text, of) for of in ("\n", None) for strip in strips)])
        places = [
            Answer(begin, begin + len(lead), begin + len(lead + form))
            for lead in self.leads
            for form in forms
            if whole.startswith(lead + form, begin)
        ]
        ended = [place for place in places if whole.startswith(self.tail, place.end)]
        if ended:
            return ended[0]._replace(end=ended[0].end + len(self.tail))
        for place in places:  # an earlier answer may end by another token than the last
            if token := re.compile(rf"\s*({self.special})").match(whole, place.end):
                return place._replace(end=token.end())
        # A template may write the thought of an answer in a form of its own: what it adds to the request is the answer.
        alone = self.render(messages[: k + 1]) if begin < len(whole) else ""
        added = alone[begin:] if alone.startswith(whole[:begin]) else ""
        added = added[: added.rfind(self.tail) + len(self.tail)] if self.tail and self.written else added.rstrip()
        if added.strip() and whole.startswith(added, begin):
            if (word := _lacking(text, added)) is not None:
                raise FedKSeedError(
                    f"the model's chat template leaves {word[:40]!r} out of the answer {text[:40]!r}; remove its "
                    f"thought, or {INSTEAD}"
                )
            end = begin + len(added)
            behind = len(self.tail) if not self.written and whole.startswith(self.tail, end) else 0
            return Answer(begin, begin, end + behind)
        written = whole[max(0, len(asked) - SHOWN // 2) :][:SHOWN]
        raise FedKSeedError(
            f"the model's chat template writes the answer {text[:40]!r} otherwise than it asks for one, and the loss "
            f"could not find it: it asks by …{asked[-SHOWN // 2 :]!r}, and writes …{written!r}…; {INSTEAD}"
        )

    def header(self) -> str:
        """The text with which the template asks for an answer, without what is before it."""
        question = [{"role": USER, "content": QUESTION}]
        asked, plain = self.render(question, asks=True), self.render(question)
        return asked.removeprefix(plain) if asked.startswith(plain) else ""


def _lacking(text: str, written: str) -> str | None:
    """The first word of a text that is not in what was written, in the text's order; tags of a thought are no words."""
    at = 0
    for word in THOUGHT.sub(" ", text).split():
        if (begin := written.find(word, at)) < 0:
            return word
        at = begin + len(word)
    return None


@lru_cache(maxsize=16)
def _tried(tokenizer: Any, text: str) -> ChatTemplate:
    question, answer = ({"role": role, "content": said} for role, said in ((USER, QUESTION), (ASSISTANT, ANSWER)))
    asked, plain = (_rendered(tokenizer, text, [question], asks)[0] for asks in (True, False))
    last, earlier = _rendered(tokenizer, text, [question, answer])[0], ""
    # A template that cares for turns may refuse a second question, and one of a single exchange a second answer.
    with suppress(FedKSeedError):
        earlier = _rendered(tokenizer, text, [question, answer, question, answer])[0]
    behind = [whole.removeprefix(asked).partition(ANSWER) for whole in (last, earlier) if whole.startswith(asked)]
    leads = dict.fromkeys(lead for lead, found, _ in behind if found)
    if not leads:
        raise FedKSeedError(
            "the model's chat template does not write an answer behind what asks for it: it asks by "
            f"{asked[-SHOWN:]!r}, and writes {last[-SHOWN:]!r}; {INSTEAD}"
        )
    if asked == plain and all(lead.strip() for lead in leads):
        raise FedKSeedError(
            f"the model's chat template writes {next(iter(leads))!r} before an answer and does not ask by it: it has "
            f"no part for add_generation_prompt; add one, or {INSTEAD}"
        )
    behind_last, behind_first = last.removeprefix(asked).partition(ANSWER)[2], earlier.partition(ANSWER)[2]
    special = sorted((token for token in tokenizer.get_added_vocab() if token.strip()), key=len, reverse=True)
    tokens = "|".join(map(re.escape, special)) or r"(?!)"
    first = re.search(tokens, behind_last)
    tail = behind_last[: first.end()] if first else behind_last.rstrip()
    closing = re.match(rf"(\s*({tokens}))*", behind_last[len(tail) :]) if first and asked != plain else None
    if asked == plain and not behind_first.startswith(tail):
        tail = ""  # the template asks for an answer always, also behind the last
    header = re.match(rf"\s*({tokens})", behind_first) if not tail else None
    shape = tuple(leads), header[0] if header else tail, bool(tail), closing[0] if closing else "", tokens
    return ChatTemplate(tokenizer, text, *shape)


def conversation(tokenizer: Any, messages: Messages, day: date, asks: bool) -> tuple[str, list[tuple[int, int]]]:
    """The text that a tokenizer's chat template makes of messages, and the spans that its own marks name.

    Args:
        day: the date for a template that writes one.
        asks: whether the text asks for an answer behind them; there are no spans then.
    """
    text = pinned(tokenizer, day)
    return _rendered(tokenizer, text, messages, asks, marked=not asks and bool(MARKS.search(text)))


def request(tokenizer: Any, messages: Messages, day: date) -> str:
    """The text by which a tokenizer's chat template asks for an answer to messages; `day` is as in `conversation`."""
    return conversation(tokenizer, messages, day, asks=True)[0]


def uses_clock(tokenizer: Any) -> bool:
    """Whether a tokenizer's chat template writes today's date."""
    text = _own_text(tokenizer)
    return text is not None and CLOCK in text and not re.search(rf"macro\s+{CLOCK}", text)


def pinned(tokenizer: Any, day: date | None) -> str:
    """A tokenizer's chat template, in which the date is always the same one.

    A macro of the name of transformers' function comes before it; other programs that run templates know macros, too.
    """
    text = _own_text(tokenizer)
    if not text:
        raise FedKSeedError(f"[data] template = 'chat': the model has no chat template; {INSTEAD}")
    if len(text) > MAX_TEMPLATE:
        raise FedKSeedError(
            f"the model's chat template has {len(text):,} characters, at most {MAX_TEMPLATE:,} go; {INSTEAD}"
        )
    if not uses_clock(tokenizer):
        return text
    if day is None:
        raise FedKSeedError(
            "the model's chat template writes today's date, which differs from day to day and from party to party; "
            f"give one date for all: [data] date = {date.today()}"
        )
    written = "".join(f" | replace({name!r}, {day.strftime(name)!r})" for name in DIRECTIVES)
    return f"{{% macro {CLOCK}(format) %}}{{{{ format{written} }}}}{{% endmacro %}}\n{text}"


def _own_text(tokenizer: Any) -> str | None:
    """The template, the one named `default` where there are several."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _rendered(
    tokenizer: Any, text: str, messages: Messages, asks: bool = False, marked: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    """The text that a template makes of messages, and the spans that its own marks name where `marked`."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        with _limited_steps():
            (rendered,), spans = render_jinja_template(
                [[dict(message) for message in messages]],
                chat_template=text,
                add_generation_prompt=asks,
                return_assistant_tokens_mask=marked,
                **tokenizer.special_tokens_map,
            )
    except FedKSeedError:
        raise
    except Exception as error:  # a template is a program of the model's maker, and may fail as any other
        raise FedKSeedError(
            f"the model's chat template can't be used: {type(error).__name__}: {error}; {INSTEAD}"
        ) from error
    length = sum(len(message["content"]) for message in messages)
    if len(rendered) > length + MAX_TEMPLATE:
        raise FedKSeedError(f"the model's chat template made {len(rendered):,} characters of {length:,}")
    return rendered, [(int(first), int(stop)) for first, stop in (spans[0] if marked else ())]


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
            raise FedKSeedError(f"the model's chat template takes over {MAX_STEPS:,} steps; {INSTEAD}")
        return trace

    trace_before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(trace_before)
