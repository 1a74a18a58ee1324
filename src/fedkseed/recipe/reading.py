"""Reader of recipe files, with clear error messages. No file, model or code that a recipe names is opened or run."""

import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from ..directions import Pool
from ..errors import FedKSeedError
from ..files import border
from ..wire.records import MAX_BROADCAST
from .algorithms import require_known
from .schema import Recipe


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe's file.

    Raises:
        FedKSeedError: the file is missing, is not TOML, has an unknown key (the message names the nearest known
            one) or a value that is not allowed.
    """
    path = Path(path)
    with border(f"can't read the recipe {path}"):
        data = path.read_bytes()
    try:
        return parse(tomllib.loads(data.decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedKSeedError(f"{path} is not valid TOML: {error}") from error
    except FedKSeedError as error:
        raise FedKSeedError(f"{path}: {error}") from error


def parse(table: dict[str, Any]) -> Recipe:
    """A recipe from the tables of a TOML file."""
    try:
        recipe = Recipe.model_validate(table)
        require_known(recipe)
        Pool(0, recipe.directions.size, recipe.directions.family)
        if recipe.directions.size > MAX_BROADCAST:
            raise FedKSeedError(f"[directions] size: at most {MAX_BROADCAST} are sent, got {recipe.directions.size}")
    except ValidationError as error:
        raise FedKSeedError("; ".join(_explain(detail) for detail in error.errors())) from error
    return recipe


def _explain(detail: Any) -> str:
    place = [
        str(part)
        for part in detail["loc"]
        if part not in ("str", "float", "constrained-float", "constrained-int") and "literal" not in str(part)
    ]
    where = f"[{'.'.join(place[:-1])}] " if len(place) > 1 else ""
    if detail["type"] == "extra_forbidden":
        known = list(_fields(place[:-1]))
        near = get_close_matches(place[-1], known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it knows {', '.join(known)}"
        return f"{where}has no key {place[-1]!r}; {hint}" if where else f"unknown table or key {place[-1]!r}; {hint}"
    if detail["type"] == "missing":
        return f"{where}{place[-1]} is missing"
    if detail["type"] == "value_error":
        return f"[{'.'.join(place)}] {detail['ctx']['error']}" if place else str(detail["ctx"]["error"])
    return f"{where}{place[-1]}: {detail['msg'][0].lower()}{detail['msg'][1:]}, got {detail['input']!r}"


def _fields(place: list[str]) -> dict[str, Any]:
    fields: dict[str, Any] = dict(Recipe.model_fields)
    for name in place:
        annotation = fields[name].annotation
        (part,) = (kind for kind in (annotation, *get_args(annotation)) if hasattr(kind, "model_fields"))
        fields = part.model_fields
    return fields
