"""Layouts of rows: which columns hold what, and the examples that they make."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, time
from decimal import Decimal
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from typing import Any, NamedTuple, TypeAlias
from unicodedata import normalize

from ..errors import FedKSeedError
from ..recipe.schema import tidy
from .packed_lists import first_answer, unpacked

NAMES_SHOWN, LONGEST_NAME = 8, 60  # in an error, and their characters
MAX_TURNS = 256  # messages of a conversation; for each earlier answer the chat template is run once more
USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
ROLES = {  # the formats' names in small letters -> those of chat templates
    **{role: role for role in (USER, ASSISTANT, SYSTEM, TOOL)},
    **{"human": USER, "developer": SYSTEM},
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), ASSISTANT),
    **dict.fromkeys(("function", "observation"), TOOL),
}
# Keys of messages that say whether the loss counts them, and columns that say it of a whole row.
FLAGS = ("weight", "train", "training", "trainable", "is_trainable", "loss", "loss_scale", "loss_weight")
# Truth values as spreadsheets in five languages write them, and further words for yes and no.
TRUTHS = {
    **dict.fromkeys(("true", "wahr", "vrai", "verdadero", "vero"), True),
    **dict.fromkeys(("false", "falsch", "faux", "falso"), False),
}
YES_OR_NO = TRUTHS | {
    **dict.fromkeys(("yes", "ja", "oui", "sí", "si", "sì"), True), **dict.fromkeys(("no", "nein", "non"), False),
}  # fmt: skip
# Columns and keys of messages that change what is to be learned, and are not read -> what to do.
MEDIA = dict.fromkeys(
    ("image", "images", "audio", "audios", "video", "videos"),
    "pictures, sounds and films are not read; remove the row, or this key where the text is enough",
)
CALLS = "calls of tools are not read; write the call as text, or remove the row"
THOUGHTS = (
    "what the model thinks is learned as part of the answer alone; write it there as the model's template does, or "
    "remove the key"
)
COUNTED = "what the loss counts is said by loss = true or false in each message; remove this"
UNREAD_KEYS = (
    MEDIA
    | dict.fromkeys(("tool_calls", "function_call"), CALLS)
    | dict.fromkeys(("reasoning_content", "reasoning", "thinking"), THOUGHTS)
    | dict.fromkeys(("mask", "masked", "compute_loss", "train_detail", "training_detail", "supervise"), COUNTED)
)
DEFINITIONS = "definitions of tools are not read; write them into a message of the system, or remove the column"
OPTIONS = "options of the chat template are not read; write what they say into a message, or remove the column"
UNREAD_COLUMNS = MEDIA | {
    "loss_mask": "a mask goes with messages, and has a 0 or 1 for each; remove the column",
    "mask": COUNTED,
    "tools": DEFINITIONS,
    "functions": DEFINITIONS,
    "chat_template_kwargs": OPTIONS,
}
# Names of parts of a data set, in names of files and in a column `split` -> what they are for.
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"),
}
UNWANTED = "answers marked as not wanted, for preference tuning, can't be learned; remove the row, or rename the column"
AFTER, SKIPPED = "messages after the last answer", "rows that a flag leaves out"  # counts that are no key's


# Field -> the name of its column, or its names in files that differ, as {"instruction": ("question", "Frage")}.
Columns: TypeAlias = Mapping[str, str | Sequence[str]]


class Turn(NamedTuple):
    """One message of a conversation."""

    role: str  # user, assistant, system or tool
    text: str
    counted: bool = True  # of the assistant's: whether the loss counts it


@dataclass(frozen=True, slots=True)
class Example:
    """One instruction with its response, in the field names of Dolly; or a conversation, or a text."""

    instruction: str  # in a conversation the message before the response
    response: str  # in a conversation the assistant's last message
    context: str = ""
    category: str = ""
    turns: tuple[Turn, ...] = ()  # in a conversation all messages before the response
    plain: bool = False  # whether the response is a text that nothing asks for


# Quotes and brackets before a word, and signs of punctuation behind one.
PUNCTUATION = re.compile(r"(?<!\S)[\"'“”„‘’(¿¡]+|[.,;:!?…\"'“”‘’)]+(?!\S)")


def normal_form(example: Example) -> str:
    """The texts of an example as rows are compared: without regard to case, space, punctuation and form of Unicode."""
    texts = example.instruction, example.context, example.response, *(turn.text for turn in example.turns)
    return "\0".join(" ".join(PUNCTUATION.sub("", normalize("NFKC", text).casefold()).split()) for text in texts)


def row_digest(example: Example) -> bytes:
    """SHA-256 of a row as rows are compared, by which the account of privacy knows it again in another file."""
    return sha256(normal_form(example).encode(errors="surrogatepass")).digest()


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The columns of a kind of rows, by their usual names or by those that a file has."""

    name: str
    title: str  # the layout in words, after "rows as"
    columns: Mapping[str, str]  # field -> the name of its column
    talks: bool = False  # whether rows are messages, which the model's chat template words, if it has one
    packed: bool = False  # whether the messages of prompts and completions are texts that say a list
    has_own_context: bool = False  # whether the recipe names the context; else each row's usual name is looked for

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return tuple(column for field, column in self.columns.items() if field in REQUIRED)

    def missing(self, row: Mapping[str, Any]) -> list[str]:
        """The needed columns that a row has not."""
        written = _as_written(self.columns, row)
        return [column for field, column in written.items() if field in REQUIRED and column not in row]

    def written(self, row: Mapping[str, Any]) -> dict[str, str]:
        """The columns as a row writes them: a context, which rows may lack, has any one usual name."""
        columns = _as_written(self.columns, row)
        if self.has_own_context or columns.get("context", "") in ("", *row):
            return columns
        free = [column for column in row if column not in columns.values() and simplified(column) in CONTEXTS]
        return columns | {"context": free[0]} if len(free) == 1 else columns

    def refusal(self, row: Mapping[str, Any], where: str) -> str:
        """The refusal of a row with needed columns missing, without what to do."""
        return f"{where}: no column {' and no '.join(self.missing(row))}; columns found: {listed(row) or 'none'}"

    def example(self, row: Mapping[str, Any], where: str, counts: Counter[str] | None = None) -> Example:
        """The example of a row; it has no response where there is nothing to learn.

        Args:
            counts: is given what this row has and nothing uses: columns, keys of messages, `AFTER` and `SKIPPED`.

        Raises:
            FedKSeedError: a column is missing, or a value is not what the layout has there.
        """
        counts, columns = Counter[str]() if counts is None else counts, self.written(row)

        def text_of(field: str) -> str:
            """The text of a field; none where the row has no such column, null or NaN."""
            cell = row.get(columns[field])
            if normalised(columns[field]) == "answers":
                cell, has_others = first_answer(cell, where)
                counts.update(["further answers"] * has_others)
            cell = as_text(cell) if field in ("response", "category") else cell
            return "" if _missing(cell) else text(cell, where, columns[field])

        if self.missing(row):
            refusal = self.refusal(row, where)
            if {"chosen", "rejected"} <= set(map(normalised, row)):
                refusal += "; preferences between answers are not read: give `chosen` the name of the response"
            raise FedKSeedError(
                f"{refusal}. Columns are {EXPECTED}, or usual names as question and answer; CSV names them in its "
                "first line. Else [data] columns gives their names, as columns = {instruction = 'Subject', response = "
                "'Body'}, as options of `fedkseed init` do: --column instruction=Subject --column response=Body"
            )
        if alike := _alike(tuple(self.columns.values()), tuple(row)):
            raise FedKSeedError(
                f"{where}: {alike} differ by case or form alone; remove one, or name it in [data] columns"
            )
        used = set(columns.values())
        extras = {normalised(name): name for name in row if name not in used and not _empty(row[name])}
        extras = {name: column for name, column in extras.items() if not _says_nothing(name, row[column])}
        category = tidy(text_of("category"))
        if "text" in self.columns:
            self._count(row, extras, where, counts)
            return Example("", "" if counts[SKIPPED] else text_of("text"), category=category, plain=True)
        of_system = extras.pop("system", None) or extras.pop("system_prompt", None)
        system = _content(row[of_system], where, of_system, counts) if of_system else ""
        if self.talks:
            mask = unpacked(row[extras.pop("loss_mask")]) if "loss_mask" in extras and "messages" in columns else None
            if "mask" in extras and ROLES.get(str(row[extras["mask"]]).casefold()) == USER:
                del extras["mask"]  # NeMo's name of those whose messages are not learned
            self._count(row, extras, where, counts)
            turns = self._turns(row, columns, where, mask, counts)
            names = COMMON["response"] | {"chosen"}
            beside = [column for name, column in extras.items() if simplified(name) in names]
            if beside and turns and turns[-1].role != ASSISTANT and not counts[SKIPPED]:
                raise FedKSeedError(
                    f"{where}: the messages end with a request, and the column {beside[0]} seems to hold its answer, "
                    "which is not learned from there; append it as a message of the assistant, or remove the column"
                )
            example = _conversation(turns, where, category, system, counts)
            return Example("", "", category=category) if counts[SKIPPED] else example
        if not self.talks and self._begins_to_talk(row):
            raise FedKSeedError(f"{where}: messages, where the first row has texts; give either a file of its own")
        history = row[extras["history"]] if "history" in extras else []
        is_history = not isinstance(history, str) or history.lstrip().startswith("[")  # else a text about something
        earlier = _history(unpacked(history), where) if is_history else []
        if "history" in extras and is_history:
            del extras["history"]
        self._count(row, extras, where, counts)
        asked, context, response = text_of("instruction"), text_of("context"), text_of("response")
        response = "" if counts[SKIPPED] else response
        if is_placeholder(context, NO_CONTEXT):
            counts[f"the context {context.strip()!r}"] += 1
            context = ""
        if not system and not earlier:
            return Example(asked, response, context, category)
        asked += f"\n\n{context}" if context else ""
        turns = (*([Turn(SYSTEM, system)] if system else []), *earlier, Turn(USER, asked))
        return Example(asked, response, category=category, turns=turns)

    def _turns(
        self, row: Mapping[str, Any], columns: Mapping[str, str], where: str, mask: Any, counts: Counter[str]
    ) -> list[Turn]:
        """The messages of a row, or those of its prompt, of which the loss counts none, and of its completion."""
        if "messages" in columns:
            return _turns(row[columns["messages"]], columns["messages"], where, mask, counts)
        if "context" in columns and not _empty(row.get(columns["context"])):
            raise FedKSeedError(f"{where}: a context beside messages (column {columns['context']}); write it into one")
        turns = list[Turn]()
        for field, role in (("instruction", USER), ("response", ASSISTANT)):
            cell, name = row[columns[field]], columns[field]
            says_list = self.packed and isinstance(cell, str) and cell.lstrip().startswith(("[", "{"))
            if not says_list and not _are_messages(cell):
                cell = as_text(cell) if role == ASSISTANT else cell
                cell = ([{"role": role, "content": cell}] if cell else []) if isinstance(cell, str) else cell
            part = _turns(cell, name, f"{where}, {name}", None, counts)
            turns += part if role == ASSISTANT else [turn._replace(counted=turn.role != ASSISTANT) for turn in part]
        return turns

    def _begins_to_talk(self, row: Mapping[str, Any]) -> bool:
        """Tell if a row's prompt and completion are messages: lists of them, or texts that each say such a list."""
        columns = _as_written(self.columns, row)
        cells = [row.get(columns[field]) for field in ("instruction", "response") if field in columns]
        lists = [cell for cell in cells if not isinstance(cell, str) and not _empty(cell)]
        texts = [cell for cell in cells if isinstance(cell, str) and cell.strip()]
        return any(map(_are_messages, lists)) if lists else bool(texts) and all(map(_are_messages, texts))

    def _count(self, row: Mapping[str, Any], extras: Mapping[str, str], where: str, counts: Counter[str]) -> None:
        """Obey, refuse or count the columns of a row that are none of the layout's."""
        for name, column in extras.items():
            cell = row[column]
            unread = name in UNREAD_COLUMNS and self.name != "text"
            if name == "functions" or (name == "tools" and not self.talks and self.name != "alpaca"):
                unread = unread and _defines(cell)
            if name in FLAGS and (flag := _row_flag(name, cell, where)) is not None:
                counts[SKIPPED] |= not flag
            elif unread:
                raise FedKSeedError(f"{where}: {UNREAD_COLUMNS[name]} (column {column})")
            elif (name == "kto_tag" and said(cell, TRUTHS) in (0, "0")) or (
                name == "label" and said(cell, TRUTHS) is False and (self.talks or self.name == "prompt-completion")
            ):
                raise FedKSeedError(f"{where}: {UNWANTED} (column {column})")
            else:
                counts[column.strip() or "a column without a name"] += 1

    def client(self, row: Mapping[str, Any]) -> str:
        """The name of the client that a row belongs to; empty where none is given."""
        name = as_text(row.get(_as_written(self.columns, row)["client"]))
        return tidy(name) if isinstance(name, str) else ""


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float | Decimal) and math.isnan(value))


def _empty(value: Any) -> bool:
    return _missing(value) or (isinstance(value, str | list | dict | tuple) and not value)


def _says_nothing(name: str, cell: Any) -> bool:
    """Tell if a column that is not read is empty, as a list of no tools or options of which none is set."""
    cells = unpacked(cell) if name in UNREAD_COLUMNS else cell
    are_options = UNREAD_COLUMNS.get(name) == OPTIONS and isinstance(cells, dict)
    return all(map(_empty, cells.values())) if are_options else _empty(cells)


def _defines(cell: Any) -> bool:
    """Tell if a cell holds definitions of tools, an object or a list of them; others have a list of hammers."""
    cells = unpacked(cell)
    return isinstance(cells, dict) or (isinstance(cells, list) and any(isinstance(each, dict) for each in cells))


def _are_messages(value: Any) -> bool:
    """Tell if a cell holds messages, in any form; of a text all roles have to be known, as it may say anything."""
    cells = unpacked(value)
    cells = [cells] if isinstance(cells, dict) else cells
    if not isinstance(cells, list) or not cells or not all(isinstance(cell, dict) for cell in cells):
        return False
    rows = [{normalised(str(key)): cell for key, cell in each.items()} for each in cells]
    if not isinstance(value, str):
        return all("role" in row or "from" in row for row in rows)
    roles = [row.get("role", row.get("from")) for row in rows]
    has_texts = all("content" in row or "value" in row for row in rows)
    return has_texts and all(isinstance(role, str) and normalised(role) in ROLES for role in roles)


def as_text(value: Any) -> Any:
    """A number, a truth value, a date or a time as text, so that 1 and 1.0 are one label; all else as it is."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53):
        return str(int(value))
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    if isinstance(value, Decimal) and value.is_finite():
        return format(value.normalize(), "f")
    return value


def text(value: Any, where: str, name: str) -> str:
    """Return a value if it is text that can be written as UTF-8; refuse it otherwise."""
    if not isinstance(value, str):
        remedy = "write it as text"
        if isinstance(value, dict) and value and all(str(key).isdecimal() for key in value):
            remedy = "a table is written row by row, in pandas by to_json(orient='records')"
        raise FedKSeedError(f"{where}: {name} must be text, got {type(value).__name__}: {remedy}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise FedKSeedError(f"{where}: {name} holds half a character (a lone surrogate); mend the text") from error
    return value


DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")


def said(value: Any, words: Mapping[str, bool]) -> Any:
    """The truth value that a word stands for; anything else as it is."""
    return words.get(tidy(value).casefold(), value) if isinstance(value, str) else value


def _flag(value: Any) -> bool | None:
    """Whether a flag says yes; None for anything but true, false, 0 and 1."""
    return bool(value) if isinstance(value, bool | int | float | Decimal) and value in (0, 1) else None


def _row_flag(name: str, value: Any, where: str) -> bool | None:
    """Whether a row is learned, by a column with the name of a flag; None where it seems to say something else."""
    value = said(value, YES_OR_NO)
    if isinstance(value, str):  # as all of CSV
        with suppress(ValueError):
            value = float(value.replace(",", ".") if DECIMAL_COMMA.fullmatch(value.strip()) else value)
    is_number = isinstance(value, int) or (isinstance(value, float | Decimal) and math.isfinite(value))
    if not is_number or (name == "loss" and not isinstance(value, bool)):  # a loss that was measured
        return None
    if (flag := _flag(value)) is None:
        raise FedKSeedError(
            f"{where}, column {name}: a row is learned or left out, as 1 or 0 or true or false say, got {value}; "
            "repeat a row to give it more weight, or rename the column if it says something else"
        )
    return flag


def _turn(message: Any, where: str, mask: Any, counts: Counter[str]) -> Turn:
    """A message with `role` and `content`, or `from` and `value`.

    Args:
        mask: the row's flag for this message; None where it has none.
    """
    if not isinstance(message, dict):
        raise FedKSeedError(f"{where}: expected an object with role and content, got {type(message).__name__}")
    pairs = [(normalised(key), cell) for key, cell in message.items() if not _empty(cell)]
    cells = dict(pairs)
    if len(cells) < len(pairs):
        raise FedKSeedError(f"{where}: two keys differ by case or form alone; keys found: {', '.join(message)}")
    for key in UNREAD_KEYS.keys() & cells.keys():
        raise FedKSeedError(f"{where}: {UNREAD_KEYS[key]} (key {key})")
    role_key = "role" if "role" in cells else "from"
    role = cells.pop(role_key, None)
    if not isinstance(role, str) or normalised(role) not in ROLES:
        raise FedKSeedError(f"{where}: {role_key} is one of {', '.join(ROLES)}, got {role!r:.60}")
    role, name = ROLES[normalised(role)], "value" if "content" not in cells and "value" in cells else "content"
    if name not in cells and not {"content", "value"} & set(map(normalised, message)):
        raise FedKSeedError(f"{where}: no content and no value; keys found: {', '.join(message)}")
    content = cells.pop(name, "")
    flags = {key: cells.pop(key) for key in (*FLAGS, "loss_mask") if key in cells}
    flags |= {} if mask is None else {"loss_mask of the row": mask}
    counts.update(f"{key} of messages" for key in cells)
    words = _content(as_text(content) if role == ASSISTANT else content, where, name, counts)
    return Turn(role, words, _is_counted(flags, role, where))


def _content(content: Any, where: str, name: str, counts: Counter[str]) -> str:
    """The text of a message, which may be in parts."""
    if not isinstance(content, list | dict):
        return text(content, where, name)
    texts = []
    for part in [content] if isinstance(content, dict) else content:
        kind = type(part).__name__
        if isinstance(part, dict):
            kind = part.get("type") or ("text" if "text" in part else None)
        if not isinstance(part, dict) or kind not in ("text", "input_text", "output_text"):
            kind = f"an object of {listed(part)}" if isinstance(part, dict) and kind is None else repr(kind)
            raise FedKSeedError(f"{where}: {name} has parts that are no text, as {kind:.80}; remove the row")
        texts.append(text(part.get("text"), where, name))
        counts.update(
            f"{key} of messages" for key, cell in part.items() if key not in ("type", "text") and not _empty(cell)
        )
    return "".join(texts)


def _is_counted(flags: Mapping[str, Any], role: str, where: str) -> bool:
    """Whether the loss counts a message, by its flags."""
    if not flags:
        return True
    answers = {_flag(flag) for flag in flags.values()}
    said = ", ".join(f"{key} = {flag!r:.60}" for key, flag in flags.items())
    if None in answers:
        raise FedKSeedError(
            f"{where}: the loss counts an answer or skips it, as true or false or 1 or 0 say, got {said}"
        )
    if len(answers) > 1:
        raise FedKSeedError(f"{where}: {said} say different things; keep one of them")
    if role != ASSISTANT and True in answers:
        raise FedKSeedError(
            f"{where}: {said}, and the loss counts answers of the assistant alone; set it to false or 0"
        )
    return role != ASSISTANT or False not in answers


def _turns(messages: Any, name: str, where: str, mask: Any, counts: Counter[str]) -> list[Turn]:
    """The messages of a list.

    Args:
        mask: a flag for each message; None: there is none.
    """
    messages = [] if _missing(messages) else unpacked(messages)
    messages = [messages] if isinstance(messages, dict) else messages
    if not isinstance(messages, list) or len(messages) > MAX_TURNS:
        got = f"{len(messages)} messages" if isinstance(messages, list) else type(messages).__name__
        is_text = ", which says no list in JSON or as Python prints it" if isinstance(messages, str) else ""
        raise FedKSeedError(f"{where}: {name} must be a list of at most {MAX_TURNS} messages, got {got}{is_text}")
    flags = [None] * len(messages) if mask is None else mask
    if not isinstance(flags, list) or len(flags) != len(messages):
        got = f"{len(flags)} entries" if isinstance(flags, list) else type(flags).__name__
        raise FedKSeedError(
            f"{where}: loss_mask must be a list of {len(messages)}, a 0 or 1 for each message, got {got}"
        )
    pairs = enumerate(zip(messages, flags, strict=True), 1)
    return [_turn(message, f"{where}, message {number}", flag, counts) for number, (message, flag) in pairs]


def _conversation(turns: list[Turn], where: str, category: str, system: str, counts: Counter[str]) -> Example:
    """A conversation up to its last answer that the loss counts; messages after that teach nothing.

    Args:
        system: text for a message before the others; empty: none.
    """
    if len(turns) > MAX_TURNS:
        raise FedKSeedError(f"{where}: a conversation has at most {MAX_TURNS} messages, got {len(turns)}")
    if system and (not turns or turns[0][:2] != (SYSTEM, system)):
        turns = [turn for turn in turns if turn.role != SYSTEM or turn.text.strip()]
        if any(turn.role == SYSTEM for turn in turns):
            raise FedKSeedError(f"{where}: a column system and a message of the system say different things; keep one")
        turns.insert(0, Turn(SYSTEM, system))
    answers = [k for k, turn in enumerate(turns) if turn.role == ASSISTANT and turn.counted and turn.text.strip()]
    if not answers:
        return Example("", "", category=category)
    last = answers[-1]
    counts[AFTER] += len(turns) - 1 - last
    asked = next((turn.text for turn in reversed(turns[:last]) if turn.role == USER), "")
    return Example(asked, turns[last].text, category=category, turns=tuple(turns[:last]))


def _history(pairs: Any, where: str) -> list[Turn]:
    """Earlier exchanges, as Alpaca's files have them: a list of pairs of a request and its answer."""
    turns = list[Turn]()
    for pair in pairs if isinstance(pairs, list) else [None]:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise FedKSeedError(
                f"{where}, column history: expected a list of pairs [request, answer], got {pairs!r:.60}; mend it, or "
                "rename the column if it says something else"
            )
        turns += [Turn(USER, text(pair[0], where, "history")), Turn(ASSISTANT, text(pair[1], where, "history"))]
    return turns


# Layout -> the layout in words, and its fields with their columns' usual names, beside category and client. If
# several fit a file, the first is taken, as always, and `text` only if no other fits: Alpaca's own file has a column
# `text` beside the others.
ASKED = ("instruction", "response", "context")
USUAL = {
    "instruction": ("instruction and response", dict(zip(ASKED, ASKED, strict=True))),
    "alpaca": ("instruction, input and output", dict(zip(ASKED, ("instruction", "output", "input"), strict=True))),
    "prompt-completion": ("prompt and completion", dict(zip(ASKED, ("prompt", "completion", "context"), strict=True))),
    "chat": ("conversations", {"messages": "messages"}),
    "sharegpt": ("conversations", {"messages": "conversations"}),
    "text": ("plain text", {"text": "text"}),
}
REQUIRED = ("instruction", "response", "messages", "text")  # fields that must be there, where a layout has them
LAYOUTS = {
    name: RowLayout(name, title, {**columns, "category": "category", "client": "client"}, "messages" in columns)
    for name, (title, columns) in USUAL.items()
}
FIELDS = tuple(dict.fromkeys(field for layout in LAYOUTS.values() for field in layout.columns))
# Field -> names of its column in English, German, French, Spanish and Italian, as `simplified`: for files whose columns
# no layout has.
COMMON_NAMES = {
    "instruction": "instruction instructions prompt input question questions query request q problem issue "
    "frage fragen anfrage anliegen aufgabe anweisung demande requete consigne probleme pregunta preguntas consulta "
    "solicitud instruccion problema domanda domande richiesta istruzione quesito",
    "response": "response responses completion output answer answers reply a solution antwort antworten losung loesung "
    "reponse reponses respuesta respuestas contestacion solucion risposta risposte soluzione",
    "context": "context kontext contexte contexto contesto",
    "category": "category kategorie categorie categoria",
}
COMMON = {field: frozenset(names.split()) for field, names in COMMON_NAMES.items()}
LABEL_NAMES = {"label", "labels", "target", "summary", "sentiment", "intent"}  # of what classifiers and summaries learn
CONTEXTS = COMMON["context"] | {"input", "passage"}  # names of a context's column beside those of the needed fields
KNOWN_NAMES = {name for layout in LAYOUTS.values() for name in layout.columns.values()}.union(*COMMON.values())
MOST_LABELS = 32  # different responses of a kind of task: more are hardly labels, and a choice reads all of them
# Answers that stand for none, as `simplified`: "n/a", "k. A.", "s. d." …
PLACEHOLDERS = {
    "na", "nv", "nan", "nil", "null", "none", "tbd", "tba", "todo", "ka", "keine", "keineangabe", "entfallt", "offen",
    "nd", "neant", "aucun", "aucune", "ninguno", "ninguna", "nessuno", "nessuna",
}  # fmt: skip
NO_CONTEXT = {"na", "nan", "nil", "null", "none", "noinput"}  # of a context, which words of a language may well be
# A dash or dots; an error of a cell, as #REF!; what databases and pandas write for a null, and sites for what is gone.
MARKS_ALONE = re.compile(r"[-–—_.…/?*\s]+|#\S+[!?]|\\N|NaT|[\[(<](?i:blank|empty|removed|deleted|undefined)[\])>]")
EXPECTED = ", or ".join(f"{' and '.join(layout.needed_columns)} ({name})" for name, layout in LAYOUTS.items())


@lru_cache(maxsize=1 << 12)
def normalised(column: str) -> str:
    """The name of a column as names are compared: without regard to case, form of Unicode, and space around it."""
    return normalize("NFC", tidy(column).casefold())


def listed(names: Collection[str]) -> str:
    """The first names of columns, for an error: a file may have thousands, and as many faulty rows."""
    first = [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…" for name in islice(names, NAMES_SHOWN)]
    more = len(names) - len(first)
    return ", ".join([*first, *([f"and {more:,} more"] if more else [])])


@lru_cache(maxsize=1 << 12)
def simplified(text: str) -> str:
    """The letters and digits of a text without accents and case, as names of COMMON are compared."""
    return "".join(filter(str.isalnum, normalize("NFKD", text.casefold())))


def alike_in_form(responses: Iterable[str]) -> tuple[str, ...]:
    """Two labels that differ by case, outer space or form of Unicode alone; empty where there are none."""
    forms = dict[str, str]()
    pair: tuple[str, ...] = ()
    for response in responses:
        first = forms.setdefault(normalised(response), response)
        if len(forms) > MOST_LABELS:
            return ()
        if first != response and not pair:
            pair = tuple(sorted((first, response)))
    return pair


def is_placeholder(text: str, names: Collection[str] = PLACEHOLDERS) -> bool:
    """Whether a text stands for none, as "n/a" or "-": by its letters, or as signs alone."""
    words = text.strip()
    return len(words) < 20 and (simplified(words) in names or MARKS_ALONE.fullmatch(words) is not None)


def names_of(columns: Columns, fields: Iterable[str] = ()) -> list[str]:
    """The names of columns that a recipe gives, for some fields or for all."""
    each = (columns[field] for field in fields or columns if field in columns)
    return [name for names in each for name in ([names] if isinstance(names, str) else names)]


def needed_columns(names: Sequence[str], named: Columns) -> tuple[str, ...]:
    """The needed columns of the layout that a file's names fit; empty if none does."""
    row = dict.fromkeys(names)
    with suppress(FedKSeedError):
        layout = fit(row, named, None, "")
        return () if layout.missing(row) else layout.needed_columns
    return ()


def fit(row: Mapping[str, Any], columns: Columns, layout: str | None, where: str) -> RowLayout:
    """The layout of a file by the columns of its first row; names of columns are compared as `normalised`.

    Args:
        columns: as a recipe gives them. A recipe may have files with other columns, too: one that has none of these is
            read by the layouts' own names, or by those of COMMON.
        layout: the layout that a recipe names; None: the one that fits.

    Raises:
        FedKSeedError: no layout fits, or several do, or several columns could be one field's.
    """
    if unknown := sorted(set(columns) - set(FIELDS)):
        raise FedKSeedError(f"[data] columns: no field is called {unknown[0]!r}; fields are {', '.join(FIELDS)}")
    named, there = dict[str, str](), set[str]()
    for field in columns:
        names = names_of(columns, [field])
        here = [name for name in names if _as_written({field: name}, row)[field] in row]
        if len(here) > 1:
            raise FedKSeedError(
                f"{where}: {' and '.join(here)} are names of {field} in [data] columns, and columns of one file; "
                "leave one out"
            )
        named[field] = [*here, *names][0]
        there.update([field] * len(here))
    usual = [
        candidate for name, candidate in LAYOUTS.items() if layout in (None, name) and there <= set(candidate.columns)
    ]
    if not usual:
        which = f"the layout {layout!r} has" if layout else "one layout has"
        raise FedKSeedError(f"[data] columns names {', '.join(sorted(there))}, and not {which} all of these fields")
    candidates = [_renamed(candidate, named) for candidate in usual]
    fitting = [candidate for candidate in candidates if not candidate.missing(row)]
    if not fitting and not there.intersection(REQUIRED):
        optional = {field: column for field, column in named.items() if field not in REQUIRED}
        fitting = [_renamed(candidate, optional) for candidate in usual if not candidate.missing(row)]
    if layout in (None, "instruction") and {own.name for own in fitting} <= {"text"} - ({"text"} & there):
        fitting = _common(row, {field: named[field] for field in there}, where) or fitting
    if not fitting:  # the `example` of the nearest names the missing columns
        return max(candidates, key=lambda near: len(near.needed_columns) - len(near.missing(row)))
    # Two that take the same columns, as a recipe may name them, are one.
    different = {tuple(map(normalised, layout.needed_columns)): layout.name for layout in reversed(fitting)}
    names = [name for name in reversed(different.values()) if name != "text"]
    if fitting[0].name != "instruction" and len(names) > 1:
        raise FedKSeedError(
            f"{where}: the columns {listed(row)} fit the layouts {' and '.join(names)}; say which, as [data] layout "
            f"= {names[0]!r}"
        )
    is_named = "context" in there or ("context" in named and bool(there & set(REQUIRED)))
    return _of_messages(replace(fitting[0], has_own_context=is_named), row)


def answer_beside(layout: RowLayout, row: Mapping[str, Any]) -> str:
    """A column of plain texts' rows that looks like their answer, as `label`; empty where there is none."""
    taken = set(_as_written(layout.columns, row).values())
    others = (name for name in row if name not in taken and simplified(name) in COMMON["response"] | LABEL_NAMES)
    return next(others, "") if layout.name == "text" else ""


def _of_messages(layout: RowLayout, row: Mapping[str, Any]) -> RowLayout:
    """A layout of prompts and completions, as one of conversations where they are messages."""
    if layout.talks or not layout._begins_to_talk(row):
        return layout
    columns = _as_written(layout.columns, row)
    packed = any(isinstance(cell := row.get(column), str) and _are_messages(cell) for column in columns.values())
    return replace(layout, talks=True, title=f"conversations, of {layout.title}", packed=packed)


def _common(row: Mapping[str, Any], named: Mapping[str, str], where: str) -> list[RowLayout]:
    """The layout of instructions by the common names of a file's columns, where there is one for both needed fields."""
    taken, found = set(_as_written(named, row).values()), dict[str, list[str]]()
    for field, names in COMMON.items():
        own = [column for column in row if column not in taken and simplified(column) in names]
        found[field] = [named[field]] if field in named else own
    if not found["instruction"] or not found["response"]:
        return []
    for field in ("instruction", "response"):
        if len(found[field]) > 1:
            first, *others = found[field]
            raise FedKSeedError(
                f"{where}: each of the columns {', '.join([first, *others])} could be the {field}; say which, as "
                f"[data] columns = {{{field} = {first!r}}}, as options of `fedkseed init` do: --column {field}={first}"
            )
    chosen = {field: columns[0] for field, columns in found.items() if len(columns) == 1}
    layout = _renamed(LAYOUTS["instruction"], {**named, **chosen})
    return [replace(layout, title=f"{layout.title} ({chosen['instruction']}, {chosen['response']})")]


def _as_written(columns: Mapping[str, str], row: Mapping[str, Any]) -> dict[str, str]:
    """Names of columns as a row writes them, where it has columns of these names."""
    return dict(_written(tuple(columns.items()), tuple(row)))


@lru_cache(maxsize=1 << 10)
def _written(columns: tuple[tuple[str, str], ...], names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    written = {normalised(name): name for name in reversed(names)}
    return tuple((field, name if name in names else written.get(normalised(name), name)) for field, name in columns)


@lru_cache(maxsize=1 << 10)
def _alike(columns: tuple[str, ...], names: tuple[str, ...]) -> str:
    """The columns of a file that could each be the same column of a layout; empty if there are none."""
    for column in columns:
        alike = [name for name in names if normalised(name) == normalised(column)]
        if len(alike) > 1 and column not in names:
            return "the columns " + " and ".join(map(repr, alike))
    return ""


def _renamed(layout: RowLayout, named: Mapping[str, str]) -> RowLayout:
    return replace(layout, columns={field: named.get(field, column) for field, column in layout.columns.items()})
