"""All keys of a recipe, made from the schema: types, limits, defaults, and the comments beside them."""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w
from pydantic import BaseModel

from .reading import table_of
from .schema import Recipe

HEAD = """# All keys of a recipe

A recipe is a TOML file with these tables and keys; all but `[model] name` have defaults. `fedkseed docs
PAGE` prints docs/PAGE.md.
"""
FIELD = re.compile(r"    (\w+): .*?(?:  # (.*))?$")
NUMBERS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}  # of JSON Schema
KINDS = {"integer": "whole number", "boolean": "true or false", "string": "text", "object": "table of texts"}


def reference() -> str:
    """A page in Markdown: a section for each table of a recipe, and a row for each key."""
    return "\n".join([HEAD, _rows(Recipe), *_tables(Recipe, ())])


def _tables(kind: type[BaseModel], place: tuple[str, ...]) -> Iterator[str]:
    """The sections of the tables inside a table, each followed by those inside of it."""
    for name, field in kind.model_fields.items():
        inner = table_of(field.annotation)
        if inner is None:
            continue
        path, several = (*place, name), "list[" in str(field.annotation)
        title = f"[[{'.'.join(path)}]]" if several else f"[{'.'.join(path)}]"
        about = (inspect.getdoc(inner) or "").replace("\n\n", "\n")
        optional = not several and type(None) in getattr(field.annotation, "__args__", ())
        off = "\n\nWithout the table it is off." if optional else ""
        yield from (f"## {title}\n\n{about}{off}\n", _rows(inner), *_tables(inner, path))


def _rows(kind: type[BaseModel]) -> str:
    """The table of a table's keys, without the tables inside of it."""
    schema, said = kind.model_json_schema(), comments(kind)
    known = schema.get("$defs", {})
    lines = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for name, field in kind.model_fields.items():
        if table_of(field.annotation) is None:
            default = "needed" if field.is_required() else "none" if field.default is None else _toml(field.default)
            cells = _values(schema["properties"][name], known), default, said.get(name) or field.description or ""
            lines.append(" | ".join([f"| `{name}`", *(cell.replace("|", "\\|") for cell in cells)]) + " |")
    return "\n".join(lines) + "\n"


def comments(kind: type[BaseModel]) -> dict[str, str]:
    """The comments above and beside the fields of a table in its source."""
    said, above = {}, list[str]()
    for line in inspect.getsource(kind).splitlines():
        if line.startswith("    # "):
            above.append(line[6:])
            continue
        if (field := FIELD.fullmatch(line)) is not None and field[1] in kind.model_fields:
            said[field[1]] = " ".join(filter(None, [*above, field[2]]))
        above.clear()
    return said


def _values(schema: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """The values that a key may have, in words, from its JSON Schema."""
    if "anyOf" in schema:
        kinds = [one for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(_values(one, known) for one in kinds))
    if "$ref" in schema:
        return _values(known[schema["$ref"].rpartition("/")[2]], known)
    if "enum" in schema or "const" in schema:
        return ", ".join(map(_toml, schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "array":
        return f"list of {_values(schema['items'], known)}"
    limits = [f"{sign} {_short(schema[name])}" for name, sign in NUMBERS.items() if name in schema]
    limits += [f"of at most {schema['maxLength']} characters"] if "maxLength" in schema else []
    limits += ["of 64 hexadecimal digits"] if "pattern" in schema else []
    return " ".join([KINDS.get(schema["type"], "number"), ", ".join(limits)]).strip()


def _short(limit: float) -> str:
    """A limit in a few characters."""
    return f"2^{limit.bit_length() - 1}" if isinstance(limit, int) and limit > 1 << 32 else f"{limit:g}"


def _toml(value: Any) -> str:
    """A value as TOML writes it, as code."""
    return "`{}`" if value == {} else f"`{tomli_w.dumps({'x': value}).removeprefix('x = ').strip()}`"
