"""The reference of the Python interface: every public name, with the arguments and words of the source."""

import inspect
import re

import pytest
from docs.build.api import api

import fedkseed as fk

FOLDERS = {"directions", "wire"}  # kernels and codecs, which docs/directions.md and docs/wire.md define


def entry(name: str) -> str:
    """The text under a name's heading."""
    (found,) = re.findall(rf"^### {name}\n(.*?)(?=^##|\Z)", api(), re.DOTALL | re.MULTILINE)
    return found


@pytest.mark.parametrize("name", sorted({*fk.__all__} - FOLDERS))
def test_every_public_name_has_its_arguments_and_its_docstring(name):
    """The oracle is the imported object."""
    made, text = getattr(fk, name), entry(name)
    whole = " ".join(text.split())
    first = (inspect.getdoc(made) or "").split("\n\n")[0]
    assert " ".join(first.split()) in whole
    if inspect.isfunction(made):
        for argument in inspect.signature(made).parameters:
            assert re.search(rf"\b{argument}\b", text.partition("```\n")[0]), argument
    for method, function in inspect.getmembers(made, inspect.isfunction) if inspect.isclass(made) else ():
        if method in vars(made) and not method.startswith("_") and function.__doc__:
            assert f"def {method}(" in text


def test_sections_of_a_docstring_are_lists():
    assert "**Raises**\n\n- `FedKSeedError`: " in entry("load_recipe")
    assert "\n\n    model = fedkseed.apply(" in entry("apply")
