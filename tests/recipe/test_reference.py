"""The reference of a recipe's keys: every key of the schema, its limits and default, and the source's comments."""

import subprocess
import sys

from pydantic import BaseModel

from fedkseed.recipe.reading import table_of
from fedkseed.recipe.reference import comments, reference
from fedkseed.recipe.schema import ClientsTable, Recipe


def keys(kind: type[BaseModel], place: str = "") -> set[str]:
    found = set()
    for name, field in kind.model_fields.items():
        inner = table_of(field.annotation)
        found |= {f"{place}{name}"} if inner is None else keys(inner, f"{place}{name}.")
    return found


def test_the_command_prints_the_page_and_asks_for_nothing():
    code = "import sys; from fedkseed.cli import app; app(['init', '--keys'], standalone_mode=False);"
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{reference().strip()}\n\nFalse"


def test_every_key_has_a_row_under_its_table():
    place, listed = "", set()
    for line in reference().splitlines():
        if line.startswith("## "):
            place = line.strip("# []") + "."
        elif line.startswith("| `"):
            listed.add(place + line.split("`")[1])
    assert listed == keys(Recipe)
    assert {"seed", "model.name", "evaluation.sets.path", "privacy.simulated.cohort"} <= listed


def test_rows_say_values_defaults_and_meanings():
    lines = reference().splitlines()
    for row in (
        "| `alpha` | number > 0 | `0.5` | of the Dirichlet split over categories: 0.5 is uneven, 5.0 nearly even |",
        "| `seed` | whole number ≥ 0, < 2^63 | `0` | of all draws: directions, data, cohorts, batches |",
        '| `held_out` | text or number > 0, < 1 | `"summarization"` | A category, or a share of all rows; for data '
        "without the category of the default 0.1. |",
        "| `clip` | number > 0 | none | largest \\|ρ\\|; the paper has no limit |",
        "| `probes` | whole number ≥ 1 | `1` | P, directions a step |",
    ):
        assert row in lines
    assert comments(ClientsTable)["draw"].startswith(
        "Of a round's cohort: from all clients, or from those that have not"
    )
    assert lines.count("## [[evaluation.sets]]") == 1
