"""Commands before and during a run: its first recipe, the run, costs of algorithms, and a search for lr and eps."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Exit, Option

from ..errors import INTERRUPTED, FedKSeedError, require_choice
from ..files import require_absent
from ..report.bars import Bars
from ..report.terminal import note, print_json, say
from .guide import recipe_of
from .options import BaseModel, Changes, Directory, Json, Output, RecipeFile, end_run

if TYPE_CHECKING:
    from ..run.ranks import Ranks
    from ..run.ray_actors import RayActors

TensorBoard = Annotated[
    bool, Option("--tensorboard", help="Also write TensorBoard's files; other trackers: report.to.")
]
ENGINES = "own", "torch", "ray"
Engine = Annotated[
    str,
    Option(help="What trains clients: own, torch (processes that torchrun starts), ray (RAY_ADDRESS names a cluster)."),
]


def run(
    recipe: Annotated[Path | None, Argument(help="The recipe: a TOML file that names model, data, algorithm.")] = None,
    example: Annotated[
        str | None, Option(metavar="NAME", help="In place of a file: a recipe of `fedkseed examples`, as quickstart.")
    ] = None,
    output: Output = None,
    tensorboard: TensorBoard = False,
    engine: Engine = "own",
    changes: Changes = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Measure a few steps, print what the run would cost, and stop.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a recipe with all its clients on this machine: tune the model, evaluate it before and after, save it.

    The run may be stopped at any moment: `fedkseed resume RUN` continues it from its last finished round. A run whose
    held-out loss rises above the base model's is ended with exit code 3 ([evaluation] stop_when_diverged).

    fedkseed run recipe.toml
    fedkseed run recipe.toml --output runs/second --set training.rounds=20
    fedkseed run recipe.toml --dry-run
    torchrun --nproc-per-node 2 -m fedkseed run recipe.toml --engine torch
    """
    from ..recipe.reading import own_recipe
    from ..recipe.rules import Where
    from ..run.prerequisites import require_ready
    from ..run.store import Store

    _require_engine(engine)
    file = recipe_of(recipe, example)
    parsed, directory = own_recipe(file, changes or ()), output or Path("runs") / file.stem
    places, chosen = [Where.RUN, Where.SIMULATION], ["tensorboard"] if tensorboard else []
    if not dry_run and engine != "torch":  # a rank that torchrun starts again goes on
        Store.require_new(directory)
    if engine != "own":
        places.append(Where.ENGINE)
        if dry_run:
            raise FedKSeedError(f"--dry-run measures one process: leave --engine {engine} out")
    require_ready(parsed, *places, trackers=chosen)
    if dry_run:
        from ..planning.forecast import forecast
        from ..report.tables import print_forecast
        from ..run.simulation import Simulation

        with Bars(0) as bars:
            costs = forecast(Simulation(parsed.absolute(), bars))
        if as_json:
            print_json(costs)
        else:
            print_forecast(costs)
        return
    from ..run.start_and_resume import resume, start

    with _processes(engine) as others, _resumable(directory), Bars(parsed.training.rounds) as bars:
        if others is not None and others.restarted and (directory / "run.sqlite").exists():
            result = resume(directory, bars, None, chosen, others)
        else:
            result = start(parsed, directory, bars, chosen, engine=others)
    end_run(result, directory, as_json)


def init(
    output: Annotated[Path, Argument(help="New file for the recipe.")] = Path("recipe.toml"),
    data: Annotated[str | None, Option(help="The data: a file, a folder of clients' files, or dolly-sample.")] = None,
    model: Annotated[str | None, Option(help="The base model: a folder, .gguf file, or owner/name on the hub.")] = None,
    column: Annotated[
        list[str] | None, Option(metavar="FIELD=NAME", help="A column, as instruction=question; one or more a field.")
    ] = None,
    task: Annotated[str | None, Option(help="answers, or labels of a few kinds; default: by the responses.")] = None,
    clients: Annotated[int | None, Option(help="Number of clients; default: by the number of rows.", min=2)] = None,
    algorithm: Annotated[str, Option(help="A name of the table in `fedkseed docs algorithms`.")] = "fedkseed-backprop",
    network: Annotated[
        bool,
        Option("--network", help="For `fedkseed serve`: clients have files of their own; the data is the server's."),
    ] = False,
    estimate: Annotated[
        bool, Option(help="Load the model, measure what the run would cost, and search the rate: one minute in all.")
    ] = True,
    keys: Annotated[bool, Option("--keys", help="Print all keys of a recipe, as Markdown, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Write a first recipe for your data, with comments, and say what its run would cost.

    The data is read: its rows, lengths and categories decide the recipe's numbers. The learning rate is that which
    lowers the loss most in short trials from the base model, until a minute is over. On a terminal, data and model are
    asked for if they are not given.

    fedkseed init recipe.toml --data departments --model models/SmolLM2-135M-Instruct
    fedkseed init --data rows.csv --model model.gguf --column instruction=question --column response=answer
    """
    if keys:
        from ..recipe.reference import reference

        print(reference())
        return
    require_absent(output, "file")
    named = dict[str, list[str]]()
    for text in column or ():
        field, _, own = text.partition("=")
        if not field or not own:
            raise FedKSeedError(f"--column takes FIELD=NAME, as instruction=question, got {text!r}")
        named.setdefault(field, []).append(own)
    columns = {field: names[0] if len(names) == 1 else names for field, names in named.items()}
    source = data or _prompted("data", "a file with your rows")
    name = model or _prompted("model", "a folder or .gguf file")
    begin = monotonic()
    from ..files import write_atomically
    from ..planning.init import few_held_out, first_recipe, measured, with_measured

    settings = {"task": task, "algorithm": algorithm, "clients": clients, "network": network}
    note(f"reading {source} by the tokenizer of {name}")
    first = first_recipe(source, columns, name, **settings)
    from ..report.tables import print_forecast, tuning_table

    text, recipe, costs, rate, warnings = first.text, first.recipe, None, None, few_held_out(first, network)
    for line in () if as_json else first.shares.notes:
        say(line)
    if network:
        from ..network.protocol.client.policy import Policy
        from ..network.protocol.networked_recipe import with_network_defaults

        recipe = with_network_defaults(recipe)
        try:  # as clients whose owners have no policy; the columns are those of this file alone
            Policy().require(recipe.having(data={"columns": {}}))
        except FedKSeedError as error:
            warnings.append(f"warning: clients whose owners allow no more than the default refuse this recipe: {error}")
    if estimate:
        with Bars(0) as bars:
            costs, tuning = measured(first, recipe, begin, bars)
        rate = tuning_table(tuning)
        text, warning = with_measured(text, tuning)
        warnings += [warning] * bool(warning)
        if costs is None:
            warnings.append(f"warning: costs are not measured, either: `fedkseed run {output} --dry-run` does")
    write_atomically(output, text.encode(), 0o666)
    if as_json:
        notes = [*first.shares.notes, *warnings]
        print_json({"output": output, "data": first.data, "costs": costs, "rate": rate, "notes": notes})
        return
    say(text)
    if costs is not None:
        print_forecast(costs)
    for line in warnings:
        say(line)
    how = f"serve it with: fedkseed serve {output} --certs KEYS" if network else f"run it with: fedkseed run {output}"
    say(f"wrote {output} in {monotonic() - begin:.0f} s; {how}")


def resume(
    directory: Directory,
    tensorboard: TensorBoard = False,
    model: BaseModel = None,
    at_once: Annotated[
        int | None, Option(help="Clients that train side by side, where the recipe's number needs too much.", min=1)
    ] = None,
    engine: Engine = "own",
    as_json: Json = False,
) -> None:
    """Continue a run that was stopped or killed, from its last finished round.

    The tuned model is the same, bit for bit, as that of a run without a stop.

    fedkseed resume runs/recipe
    """
    from ..recipe.rules import Where
    from ..run.prerequisites import require_ready
    from ..run.store import Store

    _require_engine(engine)
    recipe, chosen = Store(directory).load_recipe(model), ["tensorboard"] if tensorboard else []
    if (directory / "https").is_dir():  # its clients have the data
        again = f"fedkseed serve {directory / 'recipe.toml'} --certs KEYS --output {directory}"
        raise FedKSeedError(f"{directory} is the run of a server; with its folder of keys it goes on by: {again}")
    places = [] if engine == "own" else [Where.ENGINE]
    require_ready(recipe, Where.RUN, Where.SIMULATION, *places, trackers=chosen)
    from ..run.start_and_resume import resume as resume_run

    with _processes(engine) as others, _resumable(directory), Bars(recipe.training.rounds) as bars:
        result = resume_run(directory, bars, model, chosen, others, at_once)
    end_run(result, directory, as_json)


def tune(
    recipe: RecipeFile,
    minutes: Annotated[
        float, Option(help="Time limit, loading included, which no trial may pass; 0: only eps.", min=0)
    ] = 5.0,
    steps: Annotated[
        int | None,
        Option(help="Local steps of a client in a trial; default the recipe's, at most 32 for all clients.", min=1),
    ] = None,
    output: Annotated[
        Path | None, Option("--output", "-o", help="New file for the recipe with the values found.")
    ] = None,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Find the perturbation scale (eps) and learning rate (lr) for a recipe, in minutes.

    eps: scalar gradients lose their precision to the rounding of the losses where eps is small, and to curvature where
    it is large. Both errors are measured on the base model for a series of values; the best eps has the least error.

    lr: short rounds from the base model try one rate after another, below the limit that the curvature gives, on the
    same batches and directions. Values within two standard errors of the best are reported as equal. Algorithms that
    backpropagate have no eps. All losses are of the clients' training examples; held-out examples are not used.

    `fedkseed docs algorithms` has the formulas and an example.

    fedkseed tune recipe.toml --minutes 10 --output tuned.toml
    """
    from ..files import write_atomically
    from ..recipe.reading import own_recipe
    from ..recipe.rules import Where
    from ..run.prerequisites import require_ready

    if output is not None:
        require_absent(output, "file")
    parsed = own_recipe(recipe, changes or ())
    require_ready(parsed, Where.SIMULATION)
    from ..planning.tune import tune as find_settings
    from ..report.tables import print_tuning, tuning_table

    with Bars(0) as bars:
        tuning = find_settings(parsed, minutes, steps, bars)
    if as_json:
        print_json(tuning_table(tuning))
    else:
        print_tuning(tuning)
    if output is not None:
        write_atomically(output, tuning.suggested.to_toml().encode(), 0o666)
        say(f"wrote {output}")


def compare(
    recipe: RecipeFile,
    algorithm: Annotated[list[str] | None, Option(help="Algorithm to measure; may be repeated. Default: all.")] = None,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Measure the costs of each algorithm to a client, on a recipe's model and data: bytes, memory, seconds.

    fedkseed compare recipe.toml --algorithm fedkseed-backprop --algorithm fedavg
    """
    from ..recipe.algorithms import ALGORITHMS
    from ..recipe.own_code import is_own
    from ..recipe.reading import load_recipe
    from ..run.prerequisites import require_ready

    parsed = load_recipe(recipe, changes or ())
    names = algorithm or list(dict.fromkeys([*ALGORITHMS, parsed.training.algorithm]))
    if unknown := [name for name in names if name not in ALGORITHMS and not is_own(name)]:
        raise FedKSeedError(f"no algorithm is called {unknown[0]!r}; choose from {', '.join(ALGORITHMS)}")
    require_ready(parsed)
    from ..models.dtypes import with_dtype
    from ..planning.compare import compare as measure_all
    from ..report.tables import print_costs, print_costs_head

    rows = []
    with Bars(0) as bars:
        bars.begin("measuring algorithms", len(names))
        for name, outcome in measure_all(with_dtype(parsed, bars.note), names):
            bars.advance()
            if isinstance(outcome, FedKSeedError):
                say(f"{name} can't run this recipe: {outcome}")
                continue
            if not rows:
                print_costs_head(parsed.training.steps)
            rows.append(outcome)
            print_costs(outcome)
    if as_json:
        print_json(rows)


def _prompted(what: str, hint: str) -> str:
    """A value that is asked for on a terminal."""
    if not sys.stdin.isatty():
        raise FedKSeedError(f"--{what} is missing: {hint}; it is asked for on a terminal alone")
    return typer.prompt(f"{what} ({hint})")


def _require_engine(name: str) -> None:
    require_choice("engine", name, ENGINES)
    if name == "ray" and find_spec("ray") is None:
        raise FedKSeedError("--engine ray needs Ray; install it with: pip install 'fedkseed[ray]'")


@contextmanager
def _processes(engine: str) -> "Iterator[Ranks | RayActors | None]":
    """The processes of another engine; those of torchrun above rank 0 train here until the run ends."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if engine != "torch":
        if started > 1:
            raise FedKSeedError(f"torchrun has started {started} processes: add --engine torch")
        if engine == "own":
            yield None
            return
    from ..run.simulation import answering

    if engine == "ray":
        from ..run.ray_actors import RayActors

        with RayActors(answering) as actors:
            yield actors
        return
    from ..run.ranks import Ranks

    with Ranks() as ranks:
        if ranks.rank:
            ranks.serve(answering)
            raise Exit(0)
        yield ranks


@contextmanager
def _resumable(directory: Path) -> Iterator[None]:
    """Say on Ctrl-C how the run goes on, if it has begun."""
    try:
        yield
    except KeyboardInterrupt:
        begun = (directory / "run.sqlite").exists()
        kept = f"its finished rounds are kept: fedkseed resume {directory}" if begun else "the run had not begun"
        print(f"fedkseed: stopped; {kept}", file=sys.stderr)
        raise Exit(INTERRUPTED) from None
