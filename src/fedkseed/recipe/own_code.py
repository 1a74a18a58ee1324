"""The user's own Python code, named by a local recipe as FILE.py:NAME or PACKAGE.MODULE:NAME. Loading runs the code."""

import re
import sys
from collections.abc import Callable
from hashlib import sha256
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from ..errors import FedKSeedError

PATTERN = re.compile(r"(.+\.py|\w+(\.\w+)*):\w+")


def is_own(name: str) -> bool:
    """Whether a recipe's value has the form FILE.py:NAME or PACKAGE.MODULE:NAME."""
    return PATTERN.fullmatch(name) is not None


def absolute(name: str) -> str:
    """The same name with its path made absolute, so that any working directory will do."""
    file, _, member = name.rpartition(":")
    return f"{Path(file).expanduser().resolve()}:{member}" if file.endswith(".py") else name


def load(name: str, setting: str, what: str, fits: Callable[[Any], bool]) -> Any:
    """The object of a name. An error raised by the user's code itself is not caught: Python shows its traceback.

    Args:
        setting: the recipe's key, as `[training] objective`, for error messages.
        what, fits: the kind of object that is wanted, in words and as a test.

    Raises:
        FedKSeedError: there is no such file, module or member, or the member is of another kind.
    """
    place, _, member = name.rpartition(":")
    if place.endswith(".py"):
        names = _file(place, name, setting)
    else:
        try:
            names = vars(import_module(place))
        except ModuleNotFoundError as error:
            hint = f"install it, or name a file as 'FILE.py:{member}'"
            raise FedKSeedError(f"{setting} = {name!r}: {error}; {hint}") from error
    if not fits(names.get(member)):
        there = ", ".join(key for key, value in names.items() if fits(value)) or "none"
        raise FedKSeedError(f"{setting} = {name!r}: {place} has no {what} {member!r}; its {what}s are: {there}")
    return names[member]


def require_file(name: str, setting: str) -> None:
    """Refuse a name of a file that is not there; the file is not run, and other names are not looked up."""
    path = Path(name.rpartition(":")[0]).expanduser()
    if path.suffix == ".py" and not path.is_file():
        raise FedKSeedError(f"{setting} = {name!r}: there is no file {path.resolve()}; correct the path")


def _file(place: str, name: str, setting: str) -> dict[str, Any]:
    require_file(name, setting)
    path = Path(place).expanduser()
    # One module for equal files, in sys.modules: dataclasses look their module up there, and a second load would make
    # a second class of a run's states, which the first does not equal.
    key = f"fedkseed_own_{sha256(str(path.resolve()).encode() + path.read_bytes()).hexdigest()[:16]}"
    if key not in sys.modules:
        spec: Any = spec_from_file_location(key, path)  # a file .py has a loader
        module = sys.modules[key] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[key]
            raise
    return vars(sys.modules[key])
