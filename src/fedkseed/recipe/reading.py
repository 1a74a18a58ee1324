"""Reader of recipe files, with clear error messages. No file, model or code that a recipe names is opened or run."""

import re
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ..errors import FedKSeedError
from ..files import read_whole
from .algorithms import require_known
from .rules import Where, broken_rules, require_legal
from .schema import Recipe

MAX_BYTES = 1 << 16  # of a recipe, as of one that travels; the longest of ours has 2 KB
MAX_DOTS = 64  # in a line of TOML: tomllib takes n² memory for a key of n parts, 4.4 GB for 64 KB of "a.a.a."
MAX_DEPTH = 8  # parts of a dotted key of --set; tables of ours are two deep
MAX_SHOWN = 200  # characters of a wrong value that an error repeats

Table = TypeVar("Table", bound=BaseModel)
Typed = TypeVar("Typed")


def load_recipe(path: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe's file, of a user or of a run.

    Args:
        changes: values that come before those of the file, as `training.rounds=20`; see `changed`.

    Raises:
        FedKSeedError: the file is missing, is not TOML, has an unknown key (the message names the nearest known
            one) or a value that is not allowed.
    """
    path = Path(path)
    if not path.exists() or path.is_dir():
        raise FedKSeedError(_no_recipe(path))
    return from_file(path, "the recipe", lambda table: parse(changed(table, changes)))


def from_file(path: Path, what: str, of: Callable[[dict[str, Any]], Typed]) -> Typed:
    """The typed content of a user's TOML file, by a function of its tables; each error begins with the file.

    Args:
        what: the file's kind, where it can't be read.
    """
    data = read_whole(path, MAX_BYTES, f"{what} {path}")
    try:
        return of(tables(data))
    except FedKSeedError as error:
        raise FedKSeedError(f"{path}: {error}") from error


def _no_recipe(path: Path) -> str:
    """The message on a path where no recipe's file is, with what may have been meant."""
    if path.is_dir():
        resume = f"; that is a run, which goes on by: fedkseed resume {path}" * (path / "recipe.toml").is_file()
        return f"can't read the recipe {path}: it is no regular file but a folder{resume}"
    files = [f"{file}" for file in sorted(path.parent.glob("*.toml"))]
    near = [f"{path}.toml"] if f"{path}.toml" in files else get_close_matches(f"{path}", files)
    return f"can't read the recipe {path}: No such file; " + (
        f"did you mean {near[0]}?" if near else f"write one: fedkseed init {path}"
    )


def own_recipe(path: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe that a user wants to run, as `load_recipe`, and refuse settings that its algorithm would ignore."""
    recipe = load_recipe(path, changes)
    for _, message in broken_rules(recipe, Where.STATED):
        raise FedKSeedError(f"{path}: {message}")
    return recipe


def changed(table: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """The tables of a recipe with some values changed.

    Args:
        changes: dotted keys with values, as `training.rounds=20`. A value is TOML; text that is none is taken as it is,
            so that `training.algorithm=fedavg` needs no quotes. Without a value, as `training.eps=`, the key is left
            out. Of two changes of one key the last counts.

    Raises:
        FedKSeedError: a change has no `=`, or goes into something that is no table.
    """
    table = deepcopy(table)
    for change in changes:
        key, equals, value = change.partition("=")
        *place, name = names = [part.strip() for part in key.split(".")]
        if not equals or not all(names) or len(names) > MAX_DEPTH:
            raise FedKSeedError(f"--set takes KEY=VALUE, as training.rounds=20, got {_shown(change)}")
        inner: Any = table
        for part in place:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise FedKSeedError(f"--set goes into tables, and {part} is none: change the recipe's file instead")
        inner.pop(name, None)
        inner |= {name: _value(value.strip())} if value.strip() else {}
    return table


def _value(text: str) -> Any:
    """The value of a piece of TOML; other text is a value itself."""
    with suppress(FedKSeedError):
        parsed = tables(f"value = {text}".encode())
        return parsed["value"] if len(parsed) == 1 else text
    return text


def tables(data: bytes) -> dict[str, Any]:
    """The tables of a TOML file of a stranger; bytes that are none, or made to take memory, are refused."""
    if len(data) > MAX_BYTES:
        raise FedKSeedError(f"not valid TOML of ours: at most {MAX_BYTES:,} bytes go, got {len(data):,}")
    if (dots := max(line.count(b".") for line in data.split(b"\n"))) > MAX_DOTS:
        raise FedKSeedError(f"not valid TOML of ours: a line has {dots} dots, at most {MAX_DOTS} go; break it")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))  # some programs begin with a mark
    except UnicodeDecodeError as error:
        raise FedKSeedError(f"not valid TOML, which is UTF-8: {error}; save it as UTF-8") from error
    except (ValueError, RecursionError) as error:  # of TOML, of a number of 5,000 digits; "[[[[["
        escapes = re.search("escape|hex", str(error))  # the two words of tomllib's
        path = "; a path with \\ goes between single quotes, or with /" if escapes and b"\\" in data else ""
        raise FedKSeedError(f"not valid TOML: {error}{path}") from error


def parse(table: dict[str, Any]) -> Recipe:
    """A recipe from the tables of a TOML file."""
    recipe = typed(Recipe, table)
    require_known(recipe.training.algorithm)
    require_legal(recipe, Where.ALWAYS, Where.ALGORITHM)
    return recipe


def typed(kind: type[Table], table: dict[str, Any]) -> Table:
    """The typed form of the tables of a TOML file; unknown keys and values that are not allowed are refused."""
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        raise FedKSeedError("; ".join(_explain(kind, detail) for detail in error.errors())) from error


def _explain(kind: type[BaseModel], detail: Any) -> str:
    table: Any = kind
    inner, place, has_keys = table, list[str](), False
    for part in detail["loc"]:
        if not isinstance(part, str) or part == "[key]" or (table is None and not has_keys):
            continue  # the number of a table of an array; pydantic's names of a key's types
        place = [*place, part]
        if has_keys := table is not None:
            inner, field = table, table.model_fields.get(part)
            table, has_keys = field and table_of(field.annotation), get_origin(field and field.annotation) is dict
    where = f"[{'.'.join(place[:-1])}] " if len(place) > 1 else ""
    if detail["type"] == "extra_forbidden":
        keys = list(inner.model_fields)
        near = get_close_matches(place[-1], keys, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it knows {', '.join(keys)}"
        return f"{where}has no key {place[-1]!r}; {hint}" if where else f"unknown table or key {place[-1]!r}; {hint}"
    if detail["type"] == "missing":
        return f"{where}{place[-1]} is missing"
    if detail["type"] == "value_error":
        return f"[{'.'.join(place)}] {detail['ctx']['error']}" if place else str(detail["ctx"]["error"])
    name, words = place[-1] if place else kind.__name__.lower(), detail["msg"][0].lower() + detail["msg"][1:]
    return f"{where}{name}: {words}, got {_shown(detail['input'])}"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        return "a number that is too long to show"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def table_of(annotation: Any) -> Any:
    """The table in an annotation, which may be optional, or an array of tables."""
    if hasattr(annotation, "model_fields"):
        return annotation
    return next((table for part in get_args(annotation) if (table := table_of(part)) is not None), None)
