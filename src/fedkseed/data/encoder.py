"""Rows of a recipe as tokens: in its wording, and within its limit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from ..errors import FedKSeedError
from ..recipe.algorithms import ALGORITHMS
from ..recipe.schema import DataTable, Recipe
from .batches import Encoded
from .chat_template import ChatTemplate, uses_clock
from .layouts import Example
from .sources import FAULTS_SHOWN, DataFile
from .split import OwnedRow
from .tokenizer_digest import require_tokenizer
from .wording import Wording, cut, encode_each, packed

UNLIMITED = 10**9  # tokens: this limit or a larger one of a tokenizer is none
MAX_TOKENS = DataTable.model_fields["max_tokens"].default


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Examples with the numbers of their owners, and the rows that were left out or cut.

    Attributes:
        table: of the recipe, whose `max_tokens` is the limit.
        longest: tokens of the longest row that was left out for its length, or cut.
    """

    table: str
    limit: int
    longest: int = 0
    examples: list[Encoded] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    too_long: list[OwnedRow] = field(default_factory=list)
    cut: list[OwnedRow] = field(default_factory=list)
    uncounted: list[OwnedRow] = field(default_factory=list)  # without a token that the loss counts
    refused: list[OwnedRow] = field(default_factory=list)  # by the chat template


@dataclass(frozen=True, slots=True)
class Encoder:
    """The way in which a recipe's rows become tokens.

    Attributes:
        recipe: with the limits that hold for the tokenizer's model.
    """

    recipe: Recipe
    tokenizer: Any
    wording: Wording
    _encoded: dict[Example, Encoded | FedKSeedError] = field(default_factory=dict)

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: Any, files: Sequence[DataFile] = ()) -> "Encoder":
        """The encoder of a recipe.

        With `files`, those of a run in one process, what the recipe leaves open is decided: conversations are worded by
        the chat template, if there is one, and a chat template that writes the date gets today's. Rows of plain text
        are in no words of ours, and the model that they tune is asked in its own: its chat template, or none.

        Raises:
            FedKSeedError: the recipe names a limit of tokens that is beyond the model's context, or has the digest of
                another tokenizer.
        """
        wording = Wording.of(recipe.data)
        layouts, talks = {file.layout.name for file in files}, any(file.layout.talks for file in files)
        given = recipe.data.model_fields_set
        if "template" not in given and layouts == {"text"}:
            separator = wording.separator if "separator" in given else ""
            wording = replace(wording, template="chat") if _can_chat(tokenizer) else Wording("plain", separator)
        elif "template" not in given and talks and tokenizer.chat_template:
            wording = replace(wording, template="chat")
        if files and wording.template == "chat" and wording.date is None and uses_clock(tokenizer):
            wording = replace(wording, date=datetime.now(UTC).date())
        require_tokenizer(tokenizer, recipe.model.tokenizer_digest, wording.template, recipe.model.name)
        return cls(within_context(recipe, tokenizer), tokenizer, wording)

    @property
    def settled(self) -> dict[str, Any]:
        """Keys of the table `data` that the recipe leaves open, as they were decided."""
        ours, data = asdict(self.wording), self.recipe.data
        return {key: value for key, value in ours.items() if value != getattr(data, key)}

    def refused(self, rows: Sequence[OwnedRow]) -> list[tuple[OwnedRow, FedKSeedError]]:
        """Encode rows; returns those that the chat template refuses, with its reasons."""
        examples = {row.example: None for row in rows if row.example not in self._encoded}
        self._encoded.update(zip(examples, encode_each([*examples], self.tokenizer, self.wording), strict=True))
        return [(row, error) for row in rows if isinstance(error := self._encoded[row.example], FedKSeedError)]

    def prepare(self, rows: Sequence[OwnedRow]) -> None:
        """Encode rows that are asked for later: one error names all of a file that the chat template refuses.

        Raises:
            FedKSeedError: it refuses all rows, or some whose owner has not asked to leave them out.
        """
        new, refused = {row.example for row in rows} - self._encoded.keys(), self.refused(rows)
        all_of_them = len(rows) == len(refused) > 1 and all(row.example in new for row in rows)
        for row, error in refused:
            fault = FedKSeedError(f"{_place(row)}: {error}")
            if row.file is None or all_of_them:  # it is the template, and not a row
                raise fault
            if row.example in new:
                row.file.add_fault(fault)
        for file in {id(row.file): row.file for row, _ in refused}.values():
            if file is not None:
                file.refuse_faults()

    def lengths(self, rows: Sequence[OwnedRow]) -> list[int]:
        """The tokens of each row that the chat template does not refuse; of a text, before it is packed."""
        self.prepare(rows)
        encoded = (self._encoded[row.example] for row in rows)
        return [len(example.tokens) for example in encoded if not isinstance(example, FedKSeedError)]

    def within(self, rows: Sequence[OwnedRow], held_out: bool = False) -> EncodedRows:
        """Encode rows, and leave out those that are too long or have no token that the loss counts.

        The protocol `official-code` cuts long rows instead, and leaves out those of which no response remains. Texts
        are packed, those of each owner apart.

        Args:
            held_out: whether they are held-out rows, which may have a limit of their own.

        Raises:
            FedKSeedError: see `prepare`.
        """
        self.prepare(rows)
        own = self.recipe.evaluation.max_tokens if held_out else None
        table, limit = ("data", self.recipe.data.max_tokens) if own is None else ("evaluation", own)
        cuts, texts, longest = self.recipe.data.protocol == "official-code", dict[int, list[Encoded]](), 0
        encoded = EncodedRows(table, limit)
        for row in rows:
            example = self._encoded[row.example]
            if isinstance(example, FedKSeedError):
                encoded.refused.append(row)
                continue
            if row.example.plain and limit > 1:
                texts.setdefault(row.owner, []).append(example)
                continue
            if len(example.tokens) > limit:
                longest, remains = max(longest, len(example.tokens)), cuts and example.prompt < limit
                (encoded.cut if remains else encoded.too_long).append(row)
                if not remains:
                    continue
                example = cut(example, limit)
            if all(end <= max(begin, 1) for begin, end in example.counted):  # nothing predicts a first token
                encoded.uncounted.append(row)
                continue
            encoded.examples.append(example)
            encoded.owners.append(row.owner)
        for owner, its_texts in texts.items():
            blocks = packed(its_texts, limit, self.tokenizer)
            encoded.examples.extend(blocks)
            encoded.owners.extend([owner] * len(blocks))
        return replace(encoded, longest=longest)

    def note_remarks(self, encoded: EncodedRows, total: int, name: str, note: Callable[[str], None]) -> str:
        """Note the `remarks`; returns them as the end of an error that too few rows are there."""
        remarks = list(self.remarks(encoded, total, name))
        for remark in remarks:
            note(remark)
        return "".join(f"; {remark.removeprefix('warning: ')}" for remark in remarks)

    def remarks(self, encoded: EncodedRows, total: int, name: str) -> Iterator[str]:
        """Warnings on what was left out of `total` rows, each with its share; and a line on rows that were cut.

        Args:
            name: of the rows, as "training rows".
        """

        def share(rows: Sequence[OwnedRow]) -> str:
            return f"{len(rows):,} of {total:,} {name} ({100 * len(rows) / total:.3g} %)"

        over = f"over {encoded.limit:,} tokens ([{encoded.table}] max_tokens)"
        longest, context = f"the longest has {encoded.longest:,}", context_of(self.recipe, self.tokenizer)
        advice = "shorten or split them"
        if context is None or encoded.longest <= context:
            advice = f"max_tokens = {encoded.longest} keeps all, and takes more memory; else {advice}"
        elif encoded.limit < context:
            advice = f"raise max_tokens up to the model's context of {context:,}, or {advice}"
        if encoded.too_long:
            yield f"warning: {share(encoded.too_long)} {over} left out, {longest}: {advice}"
        if encoded.cut:
            yield f"{share(encoded.cut)} {over} cut, as [data] protocol says, {longest}"
        if encoded.uncounted:
            yield f"warning: {share(encoded.uncounted)} left out without a token that the loss counts"
        unknown = self.tokenizer.unk_token_id if self.tokenizer.unk_token_id != self.tokenizer.eos_token_id else None
        if rows := sum(unknown in example.tokens for example in encoded.examples):
            about = f"{rows:,} of {len(encoded.examples):,} examples of the {name} have words or letters unknown to the"
            yield f"warning: {about} tokenizer, which makes {self.tokenizer.unk_token} of them"
        special = {n: token.content for n, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        if tokens := [token for each in encoded.examples if (token := _special_in(each, special))]:
            about = f"{len(tokens):,} of {len(encoded.examples):,} examples of the {name} have special tokens in their"
            yield f"warning: {about} own text, as {tokens[0]}, which the model reads as such: rewrite or remove them"
        if encoded.refused:
            first = _place(encoded.refused[0])
            yield f"warning: {share(encoded.refused)} left out that the chat template refuses, the first is {first}"

    def checked(self, rows: Sequence[OwnedRow], held_out: bool = False) -> EncodedRows:
        """Encode rows as `within` does; one that is too long is refused where [data] strict says so."""
        encoded = self.within(rows, held_out)
        long = [row for row in encoded.too_long if row.file is not None]
        if self.recipe.data.strict and long:
            others = ", ".join(map(_place, long[1:FAULTS_SHOWN]))
            raise FedKSeedError(
                f"{_place(long[0])}: more than [{encoded.table}] max_tokens = {encoded.limit} tokens"
                + (f", as {len(long) - 1:,} more rows: {others}" if others else "")
                + "; shorten or remove the row, raise max_tokens, or set [data] strict = false"
            )
        return encoded


def _can_chat(tokenizer: Any) -> bool:
    """Tell if a tokenizer has a chat template by which a model can be asked."""
    try:
        return bool(tokenizer.chat_template and ChatTemplate.of(tokenizer, datetime.now(UTC).date()))
    except FedKSeedError:
        return False


def _special_in(encoded: Encoded, special: Mapping[int, str]) -> str | None:
    """A special token that a row's own text has; those in a plain text are its format."""
    example = encoded.example
    parts = () if example.plain else (example.instruction, example.context, example.response)
    texts = [*parts, *(turn.text for turn in example.turns)]
    there = (special[number] for number in dict.fromkeys(encoded.tokens) if number in special)
    return next((token for token in there if any(token in text for text in texts)), None)


def context_of(recipe: Recipe, tokenizer: Any) -> int | None:
    """The most tokens of an example for which the model has positions; None: it knows no limit.

    Virtual tokens take positions, too.
    """
    if tokenizer.model_max_length >= UNLIMITED:
        return None
    algorithm = ALGORITHMS.get(recipe.training.algorithm)
    prompts = algorithm is not None and algorithm.tuned in ("p-tuning", "prompt")
    return tokenizer.model_max_length - recipe.peft.virtual_tokens * prompts


def within_context(recipe: Recipe, tokenizer: Any) -> Recipe:
    """The recipe with the limit of tokens that holds for a model: the default is the context, where that is smaller.

    Raises:
        FedKSeedError: a limit that the recipe names is beyond the context.
    """
    context, data = context_of(recipe, tokenizer), recipe.data
    if context is None:
        return recipe
    # A run's recipe, and one that a server sends, states all keys, and has not chosen the default.
    chosen = "max_tokens" in data.model_fields_set and not data.model_fields_set >= {"format", "protocol", "strict"}
    if data.max_tokens == MAX_TOKENS > context > 1 and not chosen:
        data = data.model_copy(update={"max_tokens": context})
    for table, limit in (("data", data.max_tokens), ("evaluation", recipe.evaluation.max_tokens or 1)):
        if limit > context:
            virtual = tokenizer.model_max_length - context
            raise FedKSeedError(
                f"[{table}] max_tokens = {limit:,} is beyond the context of {recipe.model.name}: it has positions for "
                f"{tokenizer.model_max_length:,} tokens"
                + (f", of which [peft] virtual_tokens takes {virtual:,}" if virtual else "")
                + (f"; set max_tokens = {context} or fewer, or leave it out" if context > 1 else "; take fewer")
            )
    return recipe.having(data=data)


def _place(row: OwnedRow) -> str:
    return "a task's row" if row.file is None else row.file.place(row.index)
