"""Layouts of rows: which columns hold what, and the examples that they make."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..errors import FedKSeedError

MAX_TURNS = 256  # messages of a conversation; for each earlier answer the chat template is run once more
USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
CONVERSATIONS = ("chat", "sharegpt")  # layouts
ROLES = {  # the formats' names in small letters -> those of chat templates
    **{role: role for role in (USER, ASSISTANT, SYSTEM, TOOL)},
    **{"human": USER, "developer": SYSTEM},
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), ASSISTANT),
    **dict.fromkeys(("function", "observation"), TOOL),
}


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


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The columns of a kind of rows, by their usual names or by those that a file has."""

    name: str
    title: str  # the layout in words, after "rows as"
    columns: Mapping[str, str]  # field -> the name of its column

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return tuple(column for field, column in self.columns.items() if field in REQUIRED)

    def missing(self, row: Mapping[str, Any]) -> list[str]:
        """The needed columns that a row has not."""
        return [column for column in self.needed_columns if column not in row]

    def example(self, row: Mapping[str, Any], where: str) -> Example:
        """The example of a row; it has no response where there is nothing to learn.

        Raises:
            FedKSeedError: a column is missing, or a value is not what the layout has there.
        """

        def value(field: str) -> str:
            """The text of a field; none where the row has no such column, null or NaN."""
            cell = row.get(self.columns[field])
            return "" if _missing(cell) else text(cell, where, self.columns[field])

        if missing := self.missing(row):
            raise FedKSeedError(
                f"{where}: no column {' and no '.join(missing)}; columns found: {', '.join(row) or 'none'}. Columns "
                f"are {EXPECTED}; else [data] columns gives their names, as columns = {{instruction = 'question', "
                "response = 'answer'}, as options of `fedkseed init` do: --column instruction=question --column "
                "response=answer"
            )
        if "messages" in self.columns:
            return _conversation(row[self.columns["messages"]], self.columns["messages"], where, value("category"))
        if "text" in self.columns:
            return Example("", value("text"), category=value("category"), plain=True)
        return Example(value("instruction"), value("response"), value("context"), value("category"))

    def client(self, row: Mapping[str, Any]) -> str:
        """The name of the client that a row belongs to; empty where none is given."""
        name = row.get(self.columns["client"])
        return str(name).strip() if isinstance(name, str | int) else ""


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def text(value: Any, where: str, name: str) -> str:
    """Return a value if it is text that can be written as UTF-8; refuse it otherwise."""
    if not isinstance(value, str):
        raise FedKSeedError(f"{where}: {name} must be text, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise FedKSeedError(f"{where}: {name} holds half a character (a lone surrogate); mend the text") from error
    return value


def _turn(message: Any, where: str) -> Turn:
    """A message with `role` and `content`, or `from` and `value`."""
    if not isinstance(message, dict):
        raise FedKSeedError(f"{where}: expected an object with role and content, got {type(message).__name__}")
    names = ("role", "content") if "role" in message else ("from", "value")
    role, content = (message.get(name) for name in names)
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise FedKSeedError(f"{where}: {names[0]} is one of {', '.join(ROLES)}, got {role!r}")
    if message.get("tool_calls") or message.get("function_call"):
        raise FedKSeedError(f"{where}: calls of tools are not read; write the call as text, or remove the row")
    if isinstance(content, list):  # parts, of which there may be pictures
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise FedKSeedError(f"{where}: {names[1]} has parts that are no text; remove the row")
        content = "".join(text(part.get("text"), where, names[1]) for part in content)
    return Turn(ROLES[role.lower()], "" if _missing(content) else text(content, where, names[1]))


def _conversation(messages: Any, name: str, where: str, category: str) -> Example:
    """A conversation up to its last answer; messages after that teach nothing."""
    messages = [] if _missing(messages) else messages
    if not isinstance(messages, list) or len(messages) > MAX_TURNS:
        got = f"{len(messages)} messages" if isinstance(messages, list) else type(messages).__name__
        raise FedKSeedError(f"{where}: {name} must be a list of at most {MAX_TURNS} messages, got {got}")
    turns = [_turn(message, f"{where}, message {number}") for number, message in enumerate(messages, 1)]
    last = next((k for k in reversed(range(len(turns))) if turns[k].role == ASSISTANT and turns[k].text.strip()), None)
    if last is None:
        return Example("", "", category=category)
    asked = next((turn.text for turn in reversed(turns[:last]) if turn.role == USER), "")
    return Example(asked, turns[last].text, category=category, turns=tuple(turns[:last]))


# Layout -> the layout in words, and its fields with their columns' usual names, beside category and client. Of layouts
# that fit a file, the first wins, since files with its columns were always read by it, and the last loses: Alpaca's own
# file has a column `text` beside the others.
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
    name: RowLayout(name, title, {**columns, "category": "category", "client": "client"})
    for name, (title, columns) in USUAL.items()
}
FIELDS = tuple(dict.fromkeys(field for layout in LAYOUTS.values() for field in layout.columns))
EXPECTED = ", or ".join(f"{' and '.join(layout.needed_columns)} ({name})" for name, layout in LAYOUTS.items())


def normalised(column: str) -> str:
    """The name of a column as names are compared: without regard to case and to space around it."""
    return column.strip().casefold()


def fit(row: Mapping[str, Any], named: Mapping[str, str], layout: str | None, where: str) -> RowLayout:
    """The layout of a file by the columns of its first row; names of columns are compared as `normalised`.

    Args:
        named: field -> the name of its column, as a recipe gives it. A recipe may have files with other columns, too:
            one that has none of these is read by the layouts' own names.
        layout: the layout that a recipe names; None: the one that fits.

    Raises:
        FedKSeedError: no layout fits, or several do.
    """
    if unknown := sorted(set(named) - set(FIELDS)):
        raise FedKSeedError(f"[data] columns: no field is called {unknown[0]!r}; fields are {', '.join(FIELDS)}")
    named = _as_written(named, row)
    there = {field for field, column in named.items() if column in row}
    usual = [
        replace(candidate, columns=_as_written(candidate.columns, row))
        for name, candidate in LAYOUTS.items()
        if layout in (None, name) and there <= set(candidate.columns)
    ]
    if not usual:
        which = f"the layout {layout!r} has" if layout else "one layout has"
        raise FedKSeedError(f"[data] columns names {', '.join(sorted(there))}, and not {which} all of these fields")
    candidates = [_renamed(candidate, named) for candidate in usual]
    fitting = [candidate for candidate in candidates if not candidate.missing(row)]
    if not fitting and not there.intersection(REQUIRED):
        optional = {field: column for field, column in named.items() if field not in REQUIRED}
        fitting = [_renamed(candidate, optional) for candidate in usual if not candidate.missing(row)]
    if not fitting:  # the `example` of the nearest names the missing columns
        return max(candidates, key=lambda near: len(near.needed_columns) - len(near.missing(row)))
    # Two that take the same columns, as a recipe may name them, are one.
    different = {candidate.needed_columns: candidate.name for candidate in reversed(fitting)}
    names = [name for name in reversed(different.values()) if name != "text"]
    if fitting[0].name != "instruction" and len(names) > 1:
        raise FedKSeedError(
            f"{where}: the columns {', '.join(row)} fit the layouts {' and '.join(names)}; say which, as [data] layout "
            f"= {names[0]!r}"
        )
    return fitting[0]


def _as_written(columns: Mapping[str, str], row: Mapping[str, Any]) -> dict[str, str]:
    """Names of columns as a file writes them, where it has columns of these names."""
    written = {normalised(str(column)): column for column in reversed(list(row))}
    return {field: name if name in row else written.get(normalised(name), name) for field, name in columns.items()}


def _renamed(layout: RowLayout, named: Mapping[str, str]) -> RowLayout:
    return replace(layout, columns={field: named.get(field, column) for field, column in layout.columns.items()})
