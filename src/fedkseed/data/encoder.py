"""Rows of a recipe as tokens: in its wording, and within its limit."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from ..errors import FedKSeedError
from ..recipe.schema import Recipe
from .batches import Encoded
from .chat_template import uses_clock
from .layouts import CONVERSATIONS
from .sources import DataFile
from .split import OwnedRow
from .wording import Wording, cut, encode_all, packed


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Examples with the numbers of their owners, and the rows that were left out."""

    examples: list[Encoded]
    owners: list[int]
    too_long: list[OwnedRow]


@dataclass(frozen=True, slots=True)
class Encoder:
    """The way in which a recipe's rows become tokens."""

    recipe: Recipe
    tokenizer: Any
    wording: Wording

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: Any, files: Sequence[DataFile] = ()) -> "Encoder":
        """The encoder of a recipe.

        With `files`, those of a run in one process, what the recipe leaves open is decided: conversations are worded by
        the chat template, if there is one, and a chat template that writes the date gets today's.
        """
        wording = Wording.of(recipe.data)
        talks = any(file.layout.name in CONVERSATIONS for file in files) and tokenizer.chat_template
        if talks and "template" not in recipe.data.model_fields_set:
            wording = replace(wording, template="chat")
        if files and wording.template == "chat" and wording.date is None and uses_clock(tokenizer):
            wording = replace(wording, date=datetime.now(UTC).date())
        return cls(recipe, tokenizer, wording)

    @property
    def settled(self) -> dict[str, Any]:
        """Keys of the table `data` that the recipe leaves open, as they were decided."""
        ours, data = asdict(self.wording), self.recipe.data
        return {key: value for key, value in ours.items() if value != getattr(data, key)}

    @property
    def held_out_limit(self) -> int:
        return self.recipe.evaluation.max_tokens or self.recipe.data.max_tokens

    def training(self, rows: Sequence[OwnedRow]) -> EncodedRows:
        """Encode rows to train on.

        Raises:
            FedKSeedError: one is too long, and [data] strict refuses that.
        """
        return self._checked(rows, "data", self.recipe.data.max_tokens)

    def held_out(self, rows: Sequence[OwnedRow]) -> EncodedRows:
        """Encode held-out rows, which may have a limit of their own.

        Raises:
            FedKSeedError: one is too long, and [data] strict refuses that.
        """
        table = "data" if self.recipe.evaluation.max_tokens is None else "evaluation"
        return self._checked(rows, table, self.held_out_limit)

    def within(self, rows: Sequence[OwnedRow], limit: int) -> EncodedRows:
        """Encode rows and leave out those of more than `limit` tokens.

        The protocol `official-code` cuts them instead, and leaves them out where no response remains. Texts are
        packed, those of each owner apart.
        """
        cuts = self.recipe.data.protocol == "official-code"
        encoded, texts = EncodedRows([], [], []), dict[int, list[Encoded]]()
        examples = encode_all([row.example for row in rows], self.tokenizer, self.wording)
        for row, example in zip(rows, examples, strict=True):
            if row.example.plain:
                texts.setdefault(row.owner, []).append(example)
            elif example.prompt < limit if cuts else len(example.tokens) <= limit:
                encoded.examples.append(cut(example, limit) if cuts else example)
                encoded.owners.append(row.owner)
            else:
                encoded.too_long.append(row)
        for owner, its_texts in texts.items():
            blocks = packed(its_texts, limit, self.tokenizer)
            encoded.examples.extend(blocks)
            encoded.owners.extend([owner] * len(blocks))
        return encoded

    def _checked(self, rows: Sequence[OwnedRow], table: str, limit: int) -> EncodedRows:
        encoded = self.within(rows, limit)
        if self.recipe.data.strict and encoded.too_long and (file := encoded.too_long[0].file) is not None:
            raise FedKSeedError(
                f"{file.place(encoded.too_long[0].index)}: more than [{table}] max_tokens = {limit} tokens; shorten or "
                "remove the row, raise max_tokens, or set [data] strict = false"
            )
        return encoded
