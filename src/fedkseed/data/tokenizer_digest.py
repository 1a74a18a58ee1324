"""The digest of a tokenizer, by which the parties of a run, and those who use its model, know that theirs is the same.

It is of what the tokenizer does and not of its files: those of one tokenizer differ by release and by format.
"""

import hashlib
import json
from datetime import date
from functools import lru_cache
from typing import Any

from ..errors import FedKSeedError
from ..recipe.schema import Recipe
from .chat_template import conversation
from .layouts import ASSISTANT, SYSTEM, TOOL, USER
from .wording import beginning

# What the parts of a digest are of, each 16 of its 48 hexadecimal digits: they are to find accidents. Each party makes
# its own, and none trusts another's.
PARTS = ("vocabulary", "tokens of the same texts", "chat template")
PART = 16
NO_TALKS = "0" * PART  # in the place of the last part where the wording has no chat template
# Scripts, digits, signs, white space and forms of letters, for which tokenizers have rules of their own. Letters and
# their accents are composed: GGUF files name no rule that would compose them, and their folders may have one.
TEXTS = (
    "Where is the station? It's beside bridge 81, isn't it?",
    "  two spaces,\ta tab,\r\n\n\nlines   and an end ",
    "In 2026, 1234567 × 0.5 = 617283.5; 12:30, €99.95, 50 % & #3",
    "Größe, naïve, ﬁne, Ａ１, é, İSTANBUL straße 'quoted' “so” – and — …",
    "Это проверка. 这是一个测试。これはテストです。 이것은 시험이다. هذا اختبار.",
    "זה מבחן. यह एक परीक्षण है। นี่คือการทดสอบ 👩\u200d🔬🇪🇺",
    'def f(x_1: int) -> str:\n    return f"{x_1!r}"  # https://example.org/a?b=c&d=%20\n\\frac{a}{b} <b>&amp;</b>',
)
DAY = date(2026, 1, 31)  # for chat templates that write one
# (what is said by role, whether an answer is asked for behind it); templates may refuse some.
LONG = tuple((role, f"Number {k}.") for k in range(5) for role in (USER, ASSISTANT))
TALKS = (
    (((USER, "Where is it?"),), True),
    (((USER, "Where is it?"), (ASSISTANT, "There."), (USER, " And the\nother? "), (ASSISTANT, "Here.")), False),
    (((SYSTEM, "Be short."), (USER, "Where is it?"), (ASSISTANT, "There."), (USER, "And now?")), True),
    (((ASSISTANT, "Hello."), (USER, "Where is it?"), (ASSISTANT, "<think>\nHm.\n</think>\n\nThere.")), False),
    (((SYSTEM, "Be short."), *LONG), False),
    ((*LONG[:3], (TOOL, "Found."), LONG[1]), False),
    ((*LONG[:2], (SYSTEM, "Be short."), *LONG[2:4]), False),
)


def tokenizer_digest(tokenizer: Any, template: str) -> str:
    """The digest of a tokenizer from `load_tokenizer`: 16 digits for each of `PARTS`.

    Special tokens that were added to the vocabulary count where they begin or end a text, or stand in the chat
    template: others, as for padding, are in no text.

    Args:
        template: of the wording, [data] template: the chat template counts where it is `chat`.
    """
    ends = *beginning(tokenizer), tokenizer.eos_token_id
    return _digest(tokenizer, len(tokenizer), ends, str(tokenizer.chat_template) if template == "chat" else None)


@lru_cache(maxsize=4)
def _digest(tokenizer: Any, size: int, ends: tuple[int, ...], chat_template: str | None) -> str:
    """The digest, kept for a tokenizer until one of these changes: a party needs it two or three times."""
    added = tokenizer.added_tokens_decoder
    words = [
        (number, word, added[number].special if number in added else None)
        for word, number in sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
        if not (number in added and added[number].special) and word != f"[PAD{number}]"  # GGUF's of a row without one
    ]
    cut = tokenizer([*TEXTS], add_special_tokens=False).input_ids
    parts: list[Any] = [words, [cut, ends]]
    parts += [] if chat_template is None else [_talks(tokenizer)]
    digests = [hashlib.sha256(json.dumps(part).encode()).hexdigest()[:PART] for part in parts]
    return "".join(digests).ljust(len(PARTS) * PART, "0")


def _talks(tokenizer: Any) -> list[Any]:
    """The tokens that the chat template makes of `TALKS`, and the characters that its marks name as answers'."""
    written = list[Any]()
    for said, asks in TALKS:
        try:
            text, marked = conversation(tokenizer, [{"role": role, "content": text} for role, text in said], DAY, asks)
            written.append((tokenizer(text, add_special_tokens=False).input_ids, marked))
        except (FedKSeedError, TypeError):  # the second of a text that is no Unicode
            written.append("refused")
    return written


def with_tokenizer(recipe: Recipe, tokenizer: Any) -> Recipe:
    """The recipe with the digest of its model's tokenizer, which must be the one that the recipe says.

    Raises:
        FedKSeedError: see `require_tokenizer`.
    """
    stated, template = recipe.model.tokenizer_digest, recipe.data.template
    if stated is None:
        return recipe.having(model={"tokenizer_digest": tokenizer_digest(tokenizer, template)})
    require_tokenizer(tokenizer, stated, template, recipe.model.name)
    return recipe


def require_tokenizer(tokenizer: Any, stated: str | None, template: str, model: str) -> None:
    """Refuse a tokenizer with another digest than a run's.

    Args:
        stated: the run's digest; None: a run of before there was one, and nothing is compared.
        template: of the run, [data] template.
        model: the place of the tokenizer, for the error.
    """
    if stated is None:
        return
    ours, places = tokenizer_digest(tokenizer, template), range(0, len(PARTS) * PART, PART)
    pairs = ((part, ours[k : k + PART], str(stated)[k : k + PART]) for part, k in zip(PARTS, places, strict=True))
    # A recipe that was pinned before its wording was decided says nothing of the chat template, the last part.
    unlike = [part for part, here, there in pairs if here != there]
    if ours.endswith(NO_TALKS) or str(stated).endswith(NO_TALKS):
        unlike = [part for part in unlike if part != PARTS[-1]]
    if unlike:
        raise FedKSeedError(
            f"the tokenizer of {model} is not the run's: unlike are its {' and '.join(unlike)} ([model] "
            f"tokenizer_digest is {ascii(stated)[:60]}, this one has {ours!r}). Get the files of the tokenizer that "
            "came with the run's base model, as tokenizer.json, tokenizer_config.json and chat_template.jinja, or the "
            "GGUF file"
        )
