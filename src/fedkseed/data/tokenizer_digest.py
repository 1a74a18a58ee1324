"""The digest of a tokenizer, by which the parties of a run, and those who use its model, know that theirs is the same.

It is of what the tokenizer does and not of its files: those of one tokenizer differ by release and by format.
"""

import hashlib
import json
from datetime import date
from typing import Any

from ..errors import FedKSeedError
from ..recipe.schema import Recipe
from .chat_template import conversation
from .layouts import ASSISTANT, SYSTEM, USER
from .wording import beginning

# What the parts of a digest are of, each 16 of its 48 hexadecimal digits: they are to find accidents. Each party makes
# its own, and none trusts another's.
PARTS = ("vocabulary", "tokens of the same texts", "chat template")
PART = 16
# Scripts, digits, signs, white space and forms of letters, for which tokenizers have rules of their own.
TEXTS = (
    "Where is the station? It's beside bridge 81, isn't it?",
    "  two spaces,\ta tab,\r\n\n\nlines   and an end ",
    "In 2026, 1234567 × 0.5 = 617283.5; 12:30, €99.95, 50 % & #3",
    "Größe, naïve, ﬁne, Ａ１, e\u0301 é, İSTANBUL straße 'quoted' “so” – and — …",
    "Это проверка. 这是一个测试。これはテストです。 이것은 시험이다. هذا اختبار.",
    "זה מבחן. यह एक परीक्षण है। นี่คือการทดสอบ 👩\u200d🔬🇪🇺",
    'def f(x_1: int) -> str:\n    return f"{x_1!r}"  # https://example.org/a?b=c&d=%20\n\\frac{a}{b} <b>&amp;</b>',
)
DAY = date(2026, 1, 31)  # for chat templates that write one
# (what is said by role, whether an answer is asked for behind it); templates may refuse some.
TALKS = (
    (((USER, "Where is it?"),), True),
    (((USER, "Where is it?"), (ASSISTANT, "There."), (USER, " And the\nother? "), (ASSISTANT, "Here.")), False),
    (((SYSTEM, "Be short."), (USER, "Where is it?"), (ASSISTANT, "There."), (USER, "And now?")), True),
    (((ASSISTANT, "Hello."), (USER, "Where is it?"), (ASSISTANT, "<think>\nHm.\n</think>\n\nThere.")), False),
)


def tokenizer_digest(tokenizer: Any) -> str:
    """The digest of a tokenizer from `load_tokenizer`: 16 digits for each of `PARTS`.

    Tokens that were added to the vocabulary count where they begin or end a text or stand in the chat template: others,
    as for padding, are in no text.
    """
    added = tokenizer.get_added_vocab()
    words = sorted((number, word) for word, number in tokenizer.get_vocab().items() if word not in added)
    cut = tokenizer([*TEXTS], add_special_tokens=False).input_ids
    return "".join(
        hashlib.sha256(json.dumps(part).encode()).hexdigest()[:PART]
        for part in (words, (beginning(tokenizer), cut, tokenizer.eos_token_id), _talks(tokenizer))
    )


def _talks(tokenizer: Any) -> list[Any]:
    """The tokens that the chat template makes of `TALKS`, and the characters that its marks name as answers'."""
    written = list[Any]()
    for said, asks in TALKS if tokenizer.chat_template else ():
        try:
            text, marked = conversation(tokenizer, [{"role": role, "content": text} for role, text in said], DAY, asks)
        except FedKSeedError:
            written.append("refused")
            continue
        written.append((tokenizer(text, add_special_tokens=False).input_ids, marked))
    return written


def with_tokenizer(recipe: Recipe, tokenizer: Any) -> Recipe:
    """The recipe with the digest of its model's tokenizer, which must be the one that the recipe says.

    Raises:
        FedKSeedError: see `require_tokenizer`.
    """
    model = recipe.model
    if model.tokenizer_digest is None:
        return recipe.having(model={"tokenizer_digest": tokenizer_digest(tokenizer)})
    require_tokenizer(tokenizer, model.tokenizer_digest, recipe.data.template, model.name)
    return recipe


def require_tokenizer(tokenizer: Any, stated: str | None, template: str, model: str) -> None:
    """Refuse a tokenizer with another digest than a run's.

    Args:
        stated: the run's digest; None: a run of before there was one, and nothing is compared.
        template: of the run, [data] template: the chat template counts where it is `chat`.
        model: the place of the tokenizer, for the error.
    """
    if stated is None:
        return
    ours = tokenizer_digest(tokenizer)
    parts = PARTS if template == "chat" else PARTS[:-1]
    at = {part: slice(k * PART, (k + 1) * PART) for k, part in enumerate(parts)}
    if unlike := [part for part in parts if ours[at[part]] != str(stated)[at[part]]]:
        raise FedKSeedError(
            f"the tokenizer of {model} is not the run's: unlike are its {' and '.join(unlike)} "
            f"([model] tokenizer_digest is {stated}, this one has {ours}). Get the files of the tokenizer again that "
            "came with the run's base model, as tokenizer.json, tokenizer_config.json and chat_template.jinja"
        )
