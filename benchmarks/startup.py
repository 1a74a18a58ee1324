"""CPU seconds of errors that need no model, each of a cold process, and of the first kernels that a run compiles.

    python benchmarks/startup.py [--kernels] [--json]

User and system time are added up: other processes on the machine change them little. Every command that loads a model
is given every fault of a recipe that it could find before.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from tempfile import TemporaryDirectory
from typing import NamedTuple

FEDKSEED = (sys.executable, "-m", "fedkseed")
# What a run of the README's example compiles: blocks of a GGUF file, a sync, and a projection of gradients.
KERNELS = """
import torch
from fedkseed import Pool, materialize, project
from fedkseed.directions.numba_cpu import gguf, threads
w, pool = torch.zeros(5000), Pool(7, 4096, "hadamard")
{}
"""
FIRST = {
    "none, the import of PyTorch and Numba": "import fedkseed.directions.numba_cpu.backend",
    "sync": "materialize(w, pool, [0.5] * 4096, w)",
    "sync and projection": "materialize(w, pool, [0.5] * 4096, w); project(w, pool)",
    "sync, projection and GGUF": "materialize(w, pool, [0.5] * 4096, w); project(w, pool); "
    "threads.compiled(gguf.WORKERS[torch.float32])",
}


class Case(NamedTuple):
    """A command that is refused, and a part of the reason."""

    command: str
    fault: str
    arguments: tuple[str, ...]
    reason: str


# What is wrong in a recipe -> the change by --set, and a part of the reason; {0} is the folder of `inputs`.
FAULTS = {
    "unknown key": ("training.round=3", "has no key 'round'; did you mean 'rounds'"),
    "illegal value": ("training.rounds=0", "rounds: input should be greater than or equal to 1"),
    "illegal combination": ("evaluation.best=loss", "best and patience choose among the evaluations"),
    "no such algorithm": ("training.algorithm=fedkseeed", "no algorithm is called 'fedkseeed'"),
    "no such folder of a model": ("model.name={0}/nowhere", "no model at"),
    "no such GGUF file": ("model.name={0}/model.gguf", "no model at"),
    "no such package of a model": ("model.name=package:no_such_model/m.gguf", "is not installed"),
    "a model without a tokenizer": ("model.name={0}/mute", "the folder has no tokenizer.json"),
    "a model in pickles": ("model.name={0}/pickles", "in pickles, which can run code"),
    "no such file of rows": ("data.source={0}/nothing.csv", "nothing.csv"),
    "a faulty row": ("data.source={0}/faulty.jsonl", "line 2"),
    "no such column": ("data.columns.instruction=quetsion", "quetsion"),
    "too few rows": ("clients.count=40", "40 clients with at least 1 examples each need 40"),
    "a cohort larger than all": ("clients.cohort=9", "a cohort of 9 can't be drawn from 4 clients"),
    "no such category": ("data.held_out=poems", "held_out is no category of the data: 'poems'"),
    "no such basis": ("directions.basis={0}/no.basis", "the family hadamard has no basis"),
    "no such file of an objective": ("training.objective={0}/my.py:score", "there is no file"),
}
PACKAGES = {  # a package that is missing -> the changes by --set that need it
    "peft": ("training.algorithm=fedit", "directions.size=", "derivatives="),
    "cryptography": ("secure.norm=1.0",),
    "shamir": ("secure.norm=1.0",),
    "dp_accounting": ("privacy.epsilon=8.0", "privacy.norm=1.0"),
    "rouge": ('evaluation.metrics=["loss", "rouge"]', "evaluation.rouge=rouge", "evaluation.generated=2"),
    "datasets": ("data.source={0}/rows.parquet",),
    "wandb": ('report.to=["wandb"]',),
    "mlflow": ('report.to=["mlflow"]',),
    "tensorboard": ('report.to=["tensorboard"]',),
}
WITH_CHANGES = {"run": (), "run --dry-run": (), "tune": (), "compare": (), "preview": ()}


def inputs(folder: Path) -> Path:
    """Files that are right and files that are wrong; returns a recipe's, of which all are there."""
    for name in ("model", "mute", "pickles"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
        (folder / name / "tokenizer.json").write_text("{}")
    (folder / "mute" / "tokenizer.json").unlink()
    (folder / "pickles" / "pytorch_model.bin").write_text("")
    rows = [json.dumps({"instruction": f"Say {n}.", "response": f"It is {n}."}) for n in range(30)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "faulty.jsonl").write_text("\n".join([rows[0], '{"instruction": ', *rows]))
    (folder / "rows.parquet").write_bytes(b"PAR1" + bytes(8) + b"PAR1")
    (folder / "few.csv").write_text("instruction,response\na,b\n")
    (folder / "there").mkdir()
    (folder / "there" / "recipe.toml").write_text("")
    recipe = folder / "recipe.toml"
    recipe.write_text(
        f"[model]\nname = '{folder}/model'\n[data]\nsource = '{folder}/rows.jsonl'\nheld_out = 0.2\n"
        "[clients]\nsplit = 'even'\ncount = 4\ncohort = 2\nmin_examples = 1\n[training]\nrounds = 2\n"
    )
    (folder / "broken.toml").write_text("[model\n")
    return recipe


def cases(folder: Path) -> Iterator[Case]:
    """Every command with every fault that it could find before PyTorch is loaded."""
    recipe, broken, absent = (str(folder / name) for name in ("recipe.toml", "broken.toml", "absent.toml"))
    new, there = str(folder / "new"), str(folder / "there")
    rest = {"basis": ("--data", "dolly-sample", "--output", new), "pin": ()}
    for command, more in (WITH_CHANGES | rest).items():
        words = tuple(command.split())
        yield Case(command, "no such recipe", (*words, absent, *more), "No such file")
        yield Case(command, "no TOML", (*words, broken, *more), "not valid TOML")
        for fault, (change, reason) in FAULTS.items() if command in WITH_CHANGES else ():
            yield Case(command, fault, (*words, recipe, "--set", change.format(folder)), reason)
        for package, changes in PACKAGES.items() if command in WITH_CHANGES else ():
            settings = [part for change in changes for part in ("--set", change.format(folder))]
            yield Case(command, f"without {package}", (*words, recipe, *settings), "pip install")
    yield Case("run", "the folder is there", ("run", recipe, "--output", there), "there")
    yield Case("run", "no such example", ("run", "--example", "slowstart"), "slowstart")
    yield Case("docs", "no such page", ("docs", "cooking"), "no page is called 'cooking'")
    yield Case("examples", "no such example", ("examples", "slowstart"), "slowstart")
    yield Case("run", "no such engine", ("run", recipe, "--engine", "mpi"), "no engine is called 'mpi'")
    yield Case("run", "without ray", ("run", recipe, "--engine", "ray"), "pip install 'fedkseed[ray]'")
    yield Case("tune", "the file is there", ("tune", recipe, "--output", recipe), "exists already")
    yield Case("basis", "no such data", ("basis", recipe, "--data", f"{folder}/no.csv", "--output", new), "no.csv")
    yield Case("basis", "the file is there", ("basis", recipe, "--data", "x", "--output", recipe), "exists already")
    init, model = ("init", f"{new}.toml"), ("--model", f"{folder}/model")
    rows = ("--data", f"{folder}/rows.jsonl")
    yield Case("init", "the file is there", ("init", recipe, *rows, *model), "exists already")
    yield Case("init", "no such data", (*init, "--data", f"{folder}/no.csv", *model), "no.csv")
    yield Case("init", "no such model", (*init, *rows, "--model", f"{folder}/nowhere"), "no model at")
    yield Case("init", "a faulty row", (*init, "--data", f"{folder}/faulty.jsonl", *model), "line 2")
    yield Case("init", "too few rows", (*init, "--data", f"{folder}/few.csv", *model), "two clients need 20")
    yield Case("init", "no such task", (*init, *rows, *model, "--task", "poems"), "no task is called 'poems'")
    yield Case("init", "no such algorithm", (*init, *rows, *model, "--algorithm", "x"), "no algorithm is called 'x'")
    for command, more in {
        "resume": (), "rounds": (), "verify": (), "eval": (), "report": ("--output", new), "rollback": ("--to", "1"),
        "generate": ("Hello",), "export": (new,), "serve-model": (), "forget": ("--client", "1"),
    }.items():  # fmt: skip
        yield Case(command, "no such run", (command, f"{folder}/no-run", *more), "no-run")
        yield Case(command, "another folder", (command, there, *more), "there")
    for command, more in {"generate": ("Hello",), "export": (new,), "serve-model": (), "eval --data x": ()}.items():
        first, *others = command.split()
        yield Case(command, "a model in pickles", (first, f"{folder}/pickles", *more, *others), "in pickles")
    yield Case("export", "the folder is there", ("export", f"{folder}/model", there), "exists already")
    yield Case("export", "no such format", ("export", f"{folder}/model", new, "--format", "onnx"), "'onnx'")
    yield Case("convert", "no pickles", ("convert", f"{folder}/model", new), "has no pytorch_model*.bin")
    yield Case("convert", "the folder is there", ("convert", f"{folder}/pickles", there), "exists already")
    yield Case("untie", "no such model", ("untie", f"{folder}/nowhere", new), "no model at")
    yield Case("untie", "the folder is there", ("untie", f"{folder}/model", there), "exists already")
    yield Case("reproduce", "no such experiment", ("reproduce", "figure-99"), "figure-99")
    yield Case("reproduce", "no such scale", ("reproduce", "figure-9", "--scale", "huge"), "huge")
    certs = ("--certs", f"{folder}/no-keys")
    yield Case("serve", "no such recipe", ("serve", absent, *certs), "No such file")
    yield Case("serve", "no split by files", ("serve", recipe, *certs), "split = 'files'")
    yield Case("serve", "no keys", ("serve", recipe, *certs, "--set", "clients.split=files", "--set", "clients.count=",
               "--set", "data.held_out=", "--output", f"{new}-run"), "no-keys")  # fmt: skip
    yield Case("serve", "no TLS elsewhere", ("serve", recipe, *certs, "--no-tls", "--host", "192.0.2.1"), "without TLS")
    party = ("--key", f"{folder}/no-key", "--ca", f"{folder}/no-ca.pem")
    url = "https://localhost:1"
    yield Case("join", "no such data", ("join", url, "--data", f"{folder}/no.csv", *party), "no.csv")
    yield Case("join", "no such key", ("join", url, *rows, *party), "no-")
    yield Case("join", "no such policy", ("join", url, *rows, *party, "--policy", absent), "absent.toml")
    yield Case("doctor", "neither a client nor a server", ("doctor", recipe), "a server with --certs")
    yield Case("shard", "no such key", ("shard", url, *certs, *party), "no-")
    peer = ("--peers", absent, "--cert", f"{folder}/no.pem", *rows, *party)
    yield Case("peer", "no such recipe", ("peer", absent, *peer), "absent.toml")
    yield Case("peer", "no such key", ("peer", recipe, *peer), "no-")
    yield Case("peer", "no address", ("peer", recipe, *peer, "--listen", "here"), "takes HOST:PORT")
    yield Case("watch", "no port", ("watch", f"{folder}/no-run", "--host", "192.0.2.1"), "give --serve PORT")


def seconds_of(command: tuple[str, ...], **settings: str) -> tuple[float, str]:
    """CPU seconds of a cold process, and what it wrote to stderr."""
    before = getrusage(RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | settings)  # noqa: S603 - fixed words
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stderr


def measured(folder: Path) -> Iterator[dict[str, str | float]]:
    """A row for each case whose packages are all there: no process of this benchmark hides one."""
    inputs(folder)
    for case in cases(folder):
        if not case.fault.startswith("without "):
            spent, said = seconds_of((*FEDKSEED, *case.arguments))
            as_said = case.reason in said
            yield {"command": case.command, "fault": case.fault, "CPU s": round(spent, 2), "as meant": str(as_said)}


def compiled() -> Iterator[dict[str, str | float]]:
    """A row for the kernels of each kind of run, compiled into an empty folder; the second time they are read."""
    for what, code in FIRST.items():
        with TemporaryDirectory() as folder:
            command = (sys.executable, "-c", KERNELS.format(code))
            first, again = (seconds_of(command, NUMBA_CACHE_DIR=folder)[0] for _ in range(2))
        yield {"kernels": what, "CPU s": round(first, 2), "again": round(again, 2)}


def main() -> None:
    from table import new_parser, show  # loads PyTorch, without which the cases above are tested

    parser = new_parser(__doc__)
    parser.add_argument("--kernels", action="store_true", help="the first kernels, not errors")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        rows = list(compiled() if arguments.kernels else measured(Path(folder)))
    show("the first kernels" if arguments.kernels else "errors without a model", rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
