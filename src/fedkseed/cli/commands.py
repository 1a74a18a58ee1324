"""The command line: run a recipe, find its settings, look at runs, compare algorithms, reproduce the paper.

Each command imports its modules when it is called: `fedkseed --help` and commands that only read a run load no PyTorch.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import wraps
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import __version__
from ..errors import DIVERGED, INTERRUPTED, REFUSED, FedKSeedError
from ..report.terminal import QUIET, USUAL, VERBOSE, Bars, console, own_bars_alone, print_error, print_json, showing
from .flower import client, server
from .https import join, serve, shard
from .network import CERTS, DirectoryFirst, add, make, members, public, request, revoke, sign
from .peer import peer

if TYPE_CHECKING:
    from ..recipe.schema import Recipe
    from ..run.loop import Result

CODES = (
    f"Exit codes: 0 done; {REFUSED} refused, with the reason in one line on stderr; {DIVERGED} the run diverged and "
    f"was ended, its best model is kept; {INTERRUPTED} stopped by Ctrl-C; 1 an error of the program itself."
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Tune all weights of a language model across parties that never share data, with kilobytes a round.",
    epilog=CODES,
)

Directory = Annotated[Path, typer.Argument(help="The directory of a run, as made by `fedkseed run`.")]
RecipeFile = Annotated[
    Path, typer.Argument(help="The recipe of a run: a TOML file that names model, data and algorithm.")
]
AdapterFile = Annotated[
    Path, typer.Argument(help="The directory of a finished run, an adapter file, or a folder of `fedkseed export`.")
]
TensorBoard = Annotated[
    bool,
    typer.Option("--tensorboard", help="Also write TensorBoard event files; for other trackers see [report] to."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A value in place of the recipe's, as training.rounds=20; none, as training.eps=, leaves the key out. May "
        "be repeated.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout in place of tables; all else goes to stderr.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show results and errors alone, no progress.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show each step, and of an error where it arose.")]
Base = Annotated[
    str | None, typer.Option("--model", help="The base model (folder, file or name), if it has moved since the run.")
]


def _guarded(function: Callable[..., None]) -> Callable[..., None]:
    """A command with --quiet and --verbose, whose refusals are one line on stderr and an exit code."""

    @wraps(function)
    def guarded(*args: Any, quiet: bool, verbose: bool, **options: Any) -> None:
        # progress bars of transformers would run into ours, and into the one line of an error
        environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        level = QUIET if quiet else VERBOSE if verbose else USUAL
        with showing(level, options.get("as_json", False)):
            try:
                function(*args, **options)
            except FedKSeedError as error:
                print_error(error)
                raise typer.Exit(REFUSED) from None
            except KeyboardInterrupt:
                print("fedkseed: stopped", file=sys.stderr)
                raise typer.Exit(INTERRUPTED) from None

    own, more, kind = inspect.signature(function), {"quiet": Quiet, "verbose": Verbose}, inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, kind, default=False, annotation=of) for name, of in more.items()]
    shown: Any = guarded  # typer reads options from the signature
    shown.__signature__ = own.replace(parameters=[*own.parameters.values(), *added])
    shown.__annotations__ = function.__annotations__ | more
    return guarded


def _command(function: Callable[..., None]) -> Callable[..., None]:
    return app.command()(_guarded(function))


@_command
def run(
    recipe: RecipeFile,
    output: Annotated[
        Path | None, typer.Option(help="New directory for the run; default runs/NAME, by the recipe's file name.")
    ] = None,
    tensorboard: TensorBoard = False,
    engine: Annotated[
        str,
        typer.Option(
            help="Engine that carries the messages: own, or flower (Flower's simulation on Ray). The tuned model is "
            "the same, bit for bit."
        ),
    ] = "own",
    changes: Changes = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Load data and model, measure a few local steps, print what the run would cost, and stop."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a recipe with all its clients on this machine: tune the model, evaluate it before and after, save it.

    The run may be stopped at any moment: `fedkseed resume RUN` continues it from its last finished round. A run whose
    held-out loss rises above the base model's is ended with exit code 3 ([evaluation] stop_when_diverged).
    """
    from ..recipe.reading import own_recipe
    from ..run.simulation import start

    if engine not in ("own", "flower"):
        raise FedKSeedError(f"no engine is called {engine!r}; choose own or flower")
    parsed, directory = own_recipe(recipe, changes or ()), output or Path("runs") / recipe.stem
    if dry_run:
        _foretell(parsed, as_json)
        return
    trackers = ["tensorboard"] if tensorboard else []
    with _resumable(directory), Bars(parsed.training.rounds) as bars:
        if engine == "flower":
            from ..network.flower.simulation import run as run_on_flower

            result = run_on_flower(parsed, directory, bars, trackers)
        else:
            result = start(parsed, directory, bars, trackers)
    _end(result, as_json)


@_command
def init(
    output: Annotated[Path, typer.Argument(help="New file for the recipe.")] = Path("recipe.toml"),
    data: Annotated[
        str | None, typer.Option(help="The data: a file, a folder with a file a client, or dolly-sample.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The base model: a folder, a .gguf file, or owner/name on the hub.")
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=NAME", help="A column's name, as instruction=question; may be repeated."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="answers or labels, which are chosen from few; default: by the responses.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Number of clients; default: by the number of rows.", min=2)
    ] = None,
    algorithm: Annotated[
        str, typer.Option(help="What clients do and send: a name of the table in docs/algorithms.md.")
    ] = "fedkseed-backprop",
    estimate: Annotated[bool, typer.Option(help="Load the model and measure what the run would cost.")] = True,
    as_json: Json = False,
) -> None:
    """Write a first recipe for your data, with comments, and say what its run would cost.

    The data is read: its rows, lengths and categories decide the recipe's numbers. On a terminal, data and model are
    asked for if they are not given.
    """
    from tomllib import loads

    from ..data.federated import share_out
    from ..files import write_atomically
    from ..models.load import load_tokenizer
    from ..planning.forecast import forecast
    from ..planning.init import TASKS, draft, look
    from ..recipe.algorithms import algorithm_of
    from ..recipe.reading import parse
    from ..report.tables import print_forecast

    if output.exists():
        raise FedKSeedError(f"{output} exists already; choose another file")
    if task not in (None, *TASKS):
        raise FedKSeedError(f"no task is called {task!r}; choose {' or '.join(TASKS)}")
    algorithm_of(algorithm)  # refuses what is none
    columns = dict(_named(one) for one in column or ())
    source, name = _asked("data", data, "a file with your rows"), _asked("model", model, "a folder or .gguf file")
    tokenizer = load_tokenizer(name)
    found = look(source, columns, tokenizer)
    text = draft(source, columns, name, found, task or found.task, algorithm, clients)
    recipe = parse(loads(text))
    share_out(recipe, tokenizer)  # refuses what a run would refuse
    costs = None
    if estimate:
        with Bars(0) as bars:
            costs = forecast(recipe, bars)
    write_atomically(output, text.encode(), 0o666)
    if as_json:
        print_json({"output": str(output), "data": asdict(found), "costs": costs and asdict(costs)})
        return
    console.print(text, highlight=False, soft_wrap=True)
    if costs is not None:
        print_forecast(costs)
    console.print(f"wrote {output}; run it with: fedkseed run {output}", highlight=False, soft_wrap=True)


def _named(column: str) -> tuple[str, str]:
    """The field and the name of a --column."""
    field, equals, name = column.partition("=")
    if not (field and equals and name):
        raise FedKSeedError(f"--column takes FIELD=NAME, as instruction=question, got {column!r}")
    return field, name


def _asked(what: str, given: str | None, hint: str) -> str:
    """A value that is given, or asked for on a terminal."""
    if given is not None:
        return given
    if not sys.stdin.isatty():
        raise FedKSeedError(f"--{what} is missing: {hint}; it is asked for on a terminal alone")
    return typer.prompt(f"{what} ({hint})")


@_command
def resume(directory: Directory, tensorboard: TensorBoard = False, model: Base = None, as_json: Json = False) -> None:
    """Continue a run that was stopped or killed, from its last finished round.

    The tuned model is the same, bit for bit, as that of a run without a stop.
    """
    from ..run.simulation import resume as resume_run
    from ..run.store import Store

    recipe = Store(directory).load_recipe()
    with _resumable(directory), Bars(recipe.training.rounds) as bars:
        result = resume_run(directory, bars, model, ["tensorboard"] if tensorboard else [])
    _end(result, as_json)


@_command
def rounds(directory: Directory, as_json: Json = False) -> None:
    """List the finished rounds of a run: clients, training loss, bytes, seconds, means of evaluations."""
    from ..report.terminal import print_rounds, rounds_table
    from ..run.store import STOPPED, Store

    store = Store(directory)
    of = store.reports(), store.evaluations(), store.tuned, store.recall(STOPPED)
    if as_json:
        print_json(rounds_table(*of))
    else:
        print_rounds(*of)


@_command
def report(
    directories: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of runs, finished or not.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Write one web page about a run, or comparing several: curves, traffic, directions, clients, recipe."""
    from ..report.page import write_report

    write_report(directories, output)
    console.print(f"wrote {output}; open it in a browser", highlight=False)


@_command
def watch(
    directory: Annotated[
        Path, typer.Argument(help="The directory of a run: one that goes on, has ended, or has not begun yet.")
    ],
    serve: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", help="Serve it as a page on this port, in place of the terminal.", min=0, max=65535
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="With --serve: address to listen on. Whoever reaches it can read the page.")
    ] = "127.0.0.1",
) -> None:
    """Watch a run while another process works on it: rounds, time left, losses, bytes, clients, notes.

    The run is only read. On a terminal the screen renews itself (q ends it), which needs the package textual; else
    there is a line for each round, until the run has ended. --serve shows the report of the run in a browser, and
    renews it.
    """
    from ..report.watch_lines import follow

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    if serve is not None:
        from ..report.watch_page import serve as serve_page

        serve_page(directory, host, serve, say)
        return
    if host != "127.0.0.1":
        raise FedKSeedError("--host is the address of the page: give --serve PORT, too")
    if sys.stdin.isatty() and sys.stdout.isatty():
        try:
            from ..report.watch_screen import Screen
        except ModuleNotFoundError as error:
            say(f"a line a round: the screen needs the package {error.name}: pip install 'fedkseed[watch]'")
        else:
            Screen(directory).run()
            return
    follow(directory, say)


@_command
def verify(
    directory: Directory,
    keys: Annotated[
        list[Path] | None,
        typer.Option(
            help="The clients' public keys that you hold: a folder with files client-K.pub, or such a file. May be "
            "repeated, also for keys of one client that were replaced. Without it, the keys are those that the run "
            "itself names, and its server has written them."
        ),
    ] = None,
    history: Annotated[
        list[Path] | None,
        typer.Option(
            help="The file history.json of a client's directory: is what it saw in this run? May be repeated."
        ),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(help="A head that was printed or sent to you before: is it in this run? May be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Recompute every round of a run from its kept uploads, and say whether each state follows from them.

    Needs no model and no data, takes seconds, and finds the same on any machine: a changed upload, one that was left
    out, a changed state, a signature that is not the client's. The exit code is 2 if something does not follow.

    A server that computes a whole run anew, with keys of its own, is found only by what you bring: --keys, and
    --history or --head.

    Of the directory of a peer (docs/peers.md), it computes the model of the peer's whole set of uploads.
    """
    from ..network.peers.store import FILE

    if (directory / FILE).exists():
        from ..network.peers.verify import verify as recomputed

        set_ = recomputed(directory)
        if as_json:
            print_json(asdict(set_))
            return
        follows = "its adapter follows" if set_.adapter else "there is no adapter yet"
        console.print(f"{directory}: {set_.uploads} uploads, all signed; {follows}", highlight=False, soft_wrap=True)
        console.print(f"run {set_.run}\nbroadcast of the model {set_.broadcast}", highlight=False, soft_wrap=True)
        return
    from ..network.protocol.carrier import TRANSPORTS
    from ..run.store import Store
    from ..run.verify import require_head
    from ..run.verify import verify as recompute

    store = Store(directory)
    check = None
    if keys or history or any((directory / folder).is_dir() for folder in TRANSPORTS):
        from ..network.protocol.receipts import checks, held_keys, require_seen

        check = checks(store, held_keys(keys) if keys else None)
        for path in history or ():
            require_seen(store, path)
    found = recompute(store, check)
    if as_json:
        print_json(asdict(found) | {"heads": {one: require_head(store, one) for one in head or ()}})
        return
    signed = f"{found.signed} signatures checked" if check else "no signatures checked (its clients have no keys)"
    if found.unchecked:
        signed = f"{found.unchecked} signatures NOT checked ({directory / 'flower' / 'signing.json'} is lacking)"
    console.print(f"{directory}: {found.rounds} rounds follow from {found.uploads} uploads, {signed}", highlight=False)
    for one in head or ():
        console.print(f"head {one} is that after {require_head(store, one)} rounds", highlight=False)
    if check and not keys:
        console.print("keys: those that the run itself names; --keys compares with keys that you hold", highlight=False)
    console.print(f"head {found.head}", highlight=False)


@_command
def rollback(
    directory: Directory, to: Annotated[int, typer.Option(help="Number of finished rounds to keep.", min=0)]
) -> None:
    """Return a run to an earlier round and delete all later ones; `fedkseed resume` continues from there."""
    from ..run.store import Store

    store = Store(directory)
    with store.locked():
        store.rollback(to)
    console.print(f"{directory} is back at {to} finished rounds")


@_command
def eval(
    tuned: Annotated[
        Path,
        typer.Argument(
            help="The directory of a run. With --data or --tasks also an adapter file, a folder of `fedkseed export`, "
            "any folder of a model, or a .gguf file."
        ),
    ],
    after: Annotated[
        int | None,
        typer.Option(
            help="Number of rounds after which to evaluate the model; default: all finished ones, or the best by "
            "[evaluation] best.",
            min=0,
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="File or folder of examples, in place of the run's held-out sets.")
    ] = None,
    metrics: Annotated[
        str, typer.Option(help="With --data: metrics beside the loss, with commas: accuracy, choice, rouge, …")
    ] = "",
    tasks: Annotated[
        str | None,
        typer.Option(help="Tasks of lm-evaluation-harness, with commas, in place of the run's held-out sets."),
    ] = None,
    tasks_from: Annotated[
        Path | None, typer.Option(help="With --tasks: folder with YAML files of further tasks.")
    ] = None,
    as_tuned: Annotated[
        bool, typer.Option("--as-tuned", help="With --tasks: put them in the words on which the model was tuned.")
    ] = False,
    shots: Annotated[
        int | None, typer.Option(help="With --tasks: solved examples before each question.", min=0)
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(help="With --data: rows to draw; with --tasks: of each, the first ones; default: all.", min=2),
    ] = None,
    generated: Annotated[
        int, typer.Option(help="With --data: answers to write, for metrics that score them.", min=0)
    ] = 0,
    max_tokens: Annotated[
        int | None, typer.Option(help="With --data: longer examples are left out; default: as in the run.", min=1)
    ] = None,
    beside_base: Annotated[
        bool,
        typer.Option(
            "--beside-base", help="With --data or --tasks: evaluate the base model, too, and show the change."
        ),
    ] = False,
    model: Base = None,
    as_json: Json = False,
) -> None:
    """Evaluate the model of a run, finished or not, on its held-out sets, by default after its last round.

    Where the recipe has [evaluation] best, it is by default the model of the best round so far.

    With --data, evaluate any tuned model on any file of examples, put to it in the words on which it was tuned. With
    --tasks, evaluate it by lm-evaluation-harness; docs/evaluation.md says how its numbers and ours compare.
    """
    from ..evaluation.statistics import NOT_EVALUATED, Evaluation, gains, gains_table
    from ..report.terminal import print_gains, print_scores, sets_table
    from ..run.simulation import Simulation, with_model
    from ..run.store import Store

    if tasks is not None:
        _eval_tasks(
            tuned, model, tasks, as_json, own=tasks_from, shots=shots, examples=examples, as_tuned=as_tuned,
            beside_base=beside_base, unused=[data, after is not None, metrics, generated, max_tokens],
        )  # fmt: skip
        return
    if tasks_from or as_tuned or shots is not None:
        raise FedKSeedError("--tasks-from, --as-tuned and --shots go with --tasks NAMES")
    if data is not None:
        from ..tuned.load import open_tuned
        from ..tuned.measure import measure

        if after is not None:
            raise FedKSeedError("--after is for the run's own held-out sets; leave it out, or --data")
        names = [name.strip() for name in metrics.split(",") if name.strip()]
        with Bars(0) as bars:
            base, scores = measure(
                open_tuned(tuned, model), data, names, bars, examples=examples or "all", generated=generated,
                max_tokens=max_tokens, beside_base=beside_base,
            )  # fmt: skip
        if as_json:
            print_json({"data": data, "sets": sets_table(base, scores)})
            return
        console.print(f"{tuned} on {data}:", end=" ", highlight=False)
        print_scores(scores, base)
        return
    if metrics or examples or generated or max_tokens or beside_base:
        raise FedKSeedError(
            "--metrics, --generated and --max-tokens go with --data FILE; --examples and --beside-base with that or "
            "with --tasks NAMES"
        )
    store = Store(tuned)
    recipe = with_model(store.load_recipe(), model)
    # Evaluation does not read the objective: with the loss, no objective function of the user's has to be loaded.
    trained = {"training": recipe.training.model_copy(update={"objective": "loss"})}
    with Bars(recipe.training.rounds) as bars:
        simulation = Simulation(recipe.model_copy(update=trained), bars)
        store.require_same(simulation.identity)
        if after is None:
            after = store.tuned
        state = store.state(simulation.strategy.state, after)
        if state is None:
            raise FedKSeedError(f"{tuned} has no finished round yet")
        scores = simulation.federation.evaluator.evaluate(state, "held-out examples", True)
    base = Evaluation.of(known) if (known := store.evaluations().get(0)) else NOT_EVALUATED
    if as_json:
        of_clients = {"clients": gains_table(gains(base, scores))}
        print_json({"rounds": state.round, "sets": sets_table(base, scores)} | of_clients)
        return
    console.print(f"after {state.round} rounds:", end=" ")
    print_scores(scores, base)
    print_gains(gains(base, scores))


def _eval_tasks(
    tuned: Path, model: str | None, tasks: str, as_json: bool, *, unused: Sequence[Any], **settings: Any
) -> None:
    """Evaluate a model by lm-evaluation-harness."""
    from ..report.tables import print_tasks
    from ..tuned.lm_eval import scores
    from ..tuned.load import open_tuned

    if any(unused):
        raise FedKSeedError("--data, --after, --metrics, --generated and --max-tokens don't go with --tasks")
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    with own_bars_alone():
        found = scores(open_tuned(tuned, model), names, **settings)
    if as_json:
        print_json([asdict(score) for score in found])
    else:
        print_tasks(found)


@_command
def export(
    adapter: AdapterFile,
    output: Annotated[Path, typer.Argument(help="New folder for the tuned model; it must not exist yet.")],
    model: Base = None,
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            help="hf: a whole model, for transformers. peft: a LoRA, which the peft library loads onto the base model. "
            "gguf: a whole model, for llama.cpp, Ollama, LM Studio. lora-gguf: a LoRA for llama.cpp. fedkseed: the "
            "coefficients.",
        ),
    ] = "hf",
    kind: Annotated[
        str, typer.Option(help="With --format gguf: f32, f16, bf16, q8_0, q4_1 or q4_0, from exact to small.")
    ] = "f16",
    rank: Annotated[
        int | None,
        typer.Option(
            help="With --format peft or lora-gguf: the nearest LoRA of this rank, whose error is printed; needed where "
            "the tuned model's change has no low rank.",
            min=1,
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="With --format hf: float32, bfloat16 or float16; default: as it was tuned.")
    ] = None,
) -> None:
    """Write the tuned model as a folder, with a model card, for programs that know nothing of fedkseed.

    docs/export.md says how each format is loaded.
    """
    from ..tuned.export import export as write
    from ..tuned.load import open_tuned

    for note in write(open_tuned(adapter, model), output, format_, kind=kind, rank=rank, dtype=dtype):
        console.print(note, highlight=False, soft_wrap=True)
    console.print(f"wrote the model to {output}", highlight=False)


@_command
def generate(
    adapter: AdapterFile,
    prompt: Annotated[str, typer.Argument(help="The instruction to answer.")],
    context: Annotated[str, typer.Option(help="Further text that the instruction is about.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Largest length of an answer, in tokens.", min=1)] = 64,
    model: Base = None,
) -> None:
    """Answer an instruction with the base model and with the tuned model, to compare them."""
    from rich.text import Text

    from ..data.layouts import Example
    from ..evaluation.evaluate import respond
    from ..tuned.load import open_tuned

    opened = open_tuned(adapter, model)
    tokenizer = opened.tokenizer()
    tokens = opened.wording.prompt(Example(prompt, "", context), tokenizer)
    for title, load in (("base", opened.load_base), ("tuned", opened.load)):
        answer = respond(load(), tokenizer, [tokens], max_new_tokens)[0].strip()
        console.print(Text(f"--- {title} ---", style="bold"))
        console.print(Text(answer or "(nothing)"))


@_command
def serve_model(
    adapter: AdapterFile,
    host: Annotated[
        str, typer.Option(help="Address to listen at; others than this machine need 0.0.0.0.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0: any free one.", min=0, max=65535)] = 8000,
    model: Base = None,
) -> None:
    """Answer OpenAI-compatible requests with the tuned model, and with the base model beside it, until Ctrl-C.

    The models are called tuned and base. Messages are put to both in the words on which the first was tuned. There are
    no passwords: whoever reaches the port can ask.
    """
    from ..tuned.endpoint import listen, load, require_server, serve
    from ..tuned.load import open_tuned

    require_server()
    opened = open_tuned(adapter, model)
    with listen(host, port) as at:
        models = load(opened)
        address = "{}:{}".format(*at.getsockname())
        console.print(f"models {' and '.join(models)} at http://{address}/v1, until Ctrl-C", highlight=False)
        serve(models, at)
    raise typer.Exit(INTERRUPTED)  # nothing else ends it; under load its server returned as if it had not been stopped


@_command
def preview(
    recipe: RecipeFile,
    client: Annotated[int, typer.Option(help="Number of the client whose first example is shown.", min=0)] = 0,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Show a training example as tokens with its loss mask, and the split of the data over the clients.

    No weights are loaded.
    """
    from rich.table import Table
    from rich.text import Text

    from ..data.federated import share_out
    from ..models.load import load_tokenizer
    from ..randomness import Purpose, generator
    from ..recipe.reading import load_recipe

    parsed = load_recipe(recipe, changes or ())
    tokenizer = load_tokenizer(parsed.model.name)
    shares = share_out(parsed, tokenizer, lambda line: console.print(Text(line, style="dim")))
    if client >= len(shares.clients):
        raise FedKSeedError(f"there is no client {client}; the recipe has clients 0 to {len(shares.clients) - 1}")
    first = shares.clients[client][
        int(generator(parsed.seed, Purpose.BATCHES, 0, client).permutation(len(shares.clients[client]))[0])
    ]
    if as_json:
        holdings = [Counter(e.example.category for e in share) for share in shares.clients]
        print_json(
            {
                "tokens": first.tokens,
                "counted": first.counted,
                "clients": [{"examples": counts.total(), "categories": counts} for counts in holdings],
                "too_long": shares.too_long,
                "held_out": len(shares.held_out),
                "sets": {name: len(one.examples) for name, one in shares.sets.items()},
            }
        )
        return
    text, mask, at = Text(""), "", 0
    for begin, end in first.counted:
        text.append(tokenizer.decode(first.tokens[at:begin]), style="dim")
        text.append(tokenizer.decode(first.tokens[begin:end]), style="bold green")
        mask, at = mask + "0" * (begin - at) + "1" * (end - begin), end
    last = "" if first.earlier else "the last "
    console.print(Text(f"client {client}: {len(first.tokens)} tokens, loss on {last}{mask.count('1')} (bold)"))
    console.print(text)
    console.print("tokens:", " ".join(map(str, first.tokens)), highlight=False)
    console.print("mask:  ", mask, highlight=False)
    sizes = sorted(len(share) for share in shares.clients)
    console.print(
        f"\n{len(sizes)} clients hold {sum(sizes)} examples, {sizes[0]} to {sizes[-1]} each, "
        f"median {sizes[len(sizes) // 2]}; "
        f"{shares.too_long} are too long and left out; {len(shares.held_out)} are held out"
        + "".join(f", {len(one.examples)} in the set {name}" for name, one in shares.sets.items())
        + (f"; {shares.too_small} tasks are too small for a client" if shares.too_small else "")
    )
    table = Table("client", "examples", "categories")
    for number, share in list(enumerate(shares.clients))[:10]:
        counts = Counter(e.example.category or "-" for e in share).most_common()
        name = f" {shares.names[number]}" if shares.names else ""
        table.add_row(Text(f"{number}{name}"), str(len(share)), Text(", ".join(f"{of} {n}" for of, n in counts)))
    console.print(table)


@_command
def compare(
    recipe: RecipeFile,
    algorithm: Annotated[
        list[str] | None, typer.Option(help="Name of an algorithm to measure; may be repeated. Default: all.")
    ] = None,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Measure the costs of each algorithm to a client, on a recipe's model and data: bytes, memory, seconds."""
    from ..planning.compare import compare as measure_all
    from ..recipe.algorithms import ALGORITHMS
    from ..recipe.own_code import is_own
    from ..recipe.reading import load_recipe
    from ..report.tables import print_costs

    parsed = load_recipe(recipe, changes or ())
    names = algorithm or list(dict.fromkeys([*ALGORITHMS, parsed.training.algorithm]))
    if unknown := [name for name in names if name not in ALGORITHMS and not is_own(name)]:
        raise FedKSeedError(f"no algorithm is called {unknown[0]!r}; choose from {', '.join(ALGORITHMS)}")
    with console.status("sharing out the data") as status:

        def done(algorithm: str, error: FedKSeedError | None) -> None:
            console.print(f"{algorithm}: measured" if error is None else f"{algorithm} can't run this recipe: {error}")
            left = names[names.index(algorithm) + 1 :]
            status.update(f"measured {algorithm}" + (f", now {left[0]}" if left else ""))

        found = measure_all(parsed, names, done)
    if as_json:
        print_json([asdict(costs) for costs in found])
    else:
        print_costs(found, parsed.training.steps)


@_command
def basis(
    recipe: RecipeFile,
    data: Annotated[str, typer.Option(help="Public instruction data, no client's: a file or an archive of tasks.")],
    output: Annotated[Path, typer.Option(help="New file for the basis.")],
    examples: Annotated[int, typer.Option(help="Examples of the data to use.", min=1)] = 64,
    rank: Annotated[
        int | None, typer.Option(help="The same rank for every tensor, in place of ranks by energy.", min=1)
    ] = None,
    scaled: Annotated[
        bool, typer.Option(help="Make directions shorter the steeper the loss is along them, on the same text.")
    ] = True,
) -> None:
    """Make a basis from public text, for directions that know where gradients point.

    The file has the leading singular vectors of the model's mean gradient on the examples, as int8, for as many
    coefficients as [directions] size says, each shorter the steeper the loss is along it. Every party needs the same
    file; it takes a minute or two, once for a model.
    In a recipe: [directions] family = "informed" (or "mixed", for clients that only run forward) and basis = "FILE".

    The data may be of any kind that is public, the closer to the clients' the better. docs/directions.md has the
    definition, and what such directions can and can't learn.
    """
    from ..planning.make_basis import basis_of
    from ..recipe.reading import load_recipe
    from ..weights.basis_file import save_basis

    if output.exists():
        raise FedKSeedError(f"{output} exists already; choose another file")
    with Bars(0) as bars:
        made = basis_of(load_recipe(recipe), data, examples, rank, bars, scaled)
    save_basis(made, output)
    ranks, used = sorted(max(factor.ranks) for _, factor in made), int(str(made.about["examples"]))
    console.print(
        f"wrote {output}: {made.size} directions in {len(ranks)} tensors, ranks {ranks[0]} to {ranks[-1]}, of {used} "
        f"examples, {output.stat().st_size:,} bytes, digest {made.digest().hex()}",
        highlight=False,
    )
    if used < examples:
        console.print(f"{examples} examples were asked for: no more of those drawn are within [data] max_tokens")


@_command
def tune(
    recipe: RecipeFile,
    minutes: Annotated[
        float,
        typer.Option(help="Time limit, loading included: no trial is begun that would pass it. 0: only eps.", min=0),
    ] = 5.0,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Local steps of a client in a trial; default the recipe's, but at most 32 for all clients together.",
            min=1,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="New file for the recipe with the values found in place of its own.")
    ] = None,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Find the perturbation scale (eps) and learning rate (lr) for a recipe, in minutes.

    eps: a scalar gradient (L(w + eps z) - L(w - eps z)) / 2 eps loses its precision to the rounding of the losses
    where eps is small, and to curvature where eps is large. Both errors are measured on the base model for a series
    of values; the best eps has the least error.

    lr: the curvature gives an upper limit for steps that can lower the loss. Short rounds from the base model then
    try one learning rate after another, on the same batches and directions. Values within two standard errors of
    the best are reported as equal. For algorithms that backpropagate, which have no eps, only learning rates are
    tried. All losses are of the clients' training examples; held-out examples are not used.

    docs/tune.md has the formulas and an example.
    """
    from ..files import write_atomically
    from ..planning.tune import tune as find_settings
    from ..recipe.reading import own_recipe
    from ..report.tables import print_tuning, tuning_table

    if output is not None and output.exists():
        raise FedKSeedError(f"{output} exists already; choose another file")
    with Bars(0) as bars:
        found = find_settings(own_recipe(recipe, changes or ()), minutes, steps, bars)
    if as_json:
        print_json(tuning_table(found))
    else:
        print_tuning(found)
    if output is not None:
        write_atomically(output, found.suggested.to_toml().encode(), 0o666)
        console.print(f"wrote {output}", highlight=False)


@_command
def pin(recipe: RecipeFile) -> None:
    """Write the digest of the base model into a recipe: clients then check their copy, and a server needs no model.

    The model is loaded once, here. The keys written are [model] digest and, for an algorithm that tunes the output
    layer, [model] tuned with the names of that layer's weights; [directions] basis_digest, where there is a basis.
    Comments and order of the file stay as they are.
    """
    from ..planning.pin import pin as write

    with Bars(0) as bars:
        found = write(recipe, bars)
    for table, keys in found.items():
        for name, value in keys.items():
            console.print(f"{name} = {value!r}", highlight=False, soft_wrap=True)
        console.print(f"written to {recipe}, [{table}]", highlight=False)


@_command
def untie(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, package:NAME/FILE.gguf or name on the hub.")],
    output: Annotated[Path, typer.Argument(help="New folder for the model; it must not exist yet.")],
    dtype: Annotated[str, typer.Option(help="Type of its weights: float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Write a model with an output matrix of its own, where it shares one with the input embedding.

    It predicts what it did. Clients of fedkseed-plus then run each of their rows through the layers once, and a step
    costs the output layer alone.
    """
    from ..tuned.untie import untie as write

    more = write(model, output, dtype)
    console.print(f"wrote the model to {output}, with {more:,} weights more", highlight=False)


@_command
def directions(
    device: Annotated[str, typer.Option(help="Device that computes the directions: cpu, cuda, cuda:1, mps, …")] = "cpu",
    as_json: Json = False,
) -> None:
    """Check that this machine computes the random directions of docs/directions.md, bit for bit.

    Every backend of the device is compared with the published test vectors of every family of directions. Parties
    that differ in one bit would end with different models.
    """
    from rich.table import Table

    from ..directions.vectors import check

    table = Table("backend", "vectors", "wrong")
    found = [(backend, checked, list(failed)) for backend, checked, failed in check(device)]
    for backend, checked, failed in found:
        table.add_row(backend, str(checked), ", ".join(failed) or "none")
    wrong = sum(len(failed) for *_, failed in found)
    if as_json:
        print_json([dict(zip(("backend", "vectors", "wrong"), row, strict=True)) for row in found])
    else:
        console.print(table)
    if wrong:
        raise FedKSeedError(
            f"{wrong} test vectors are wrong: models made here differ from those of other parties; report it"
        )
    if not as_json:
        console.print("all bits agree with docs/directions.md")


@_command
def reproduce(
    name: Annotated[str, typer.Argument(help="Name of an experiment, or all; --list shows the names.")] = "",
    scale: Annotated[
        str,
        typer.Option(help="Size of the experiment: tiny (minutes), stories, small (hours) or full (the paper's)."),
    ] = "tiny",
    output: Annotated[Path, typer.Option(help="Directory for runs, tables and figures.")] = Path("results"),
    model: Annotated[str | None, typer.Option(help="Folder of the model, needed by --scale stories.")] = None,
    dolly: Annotated[str | None, typer.Option(help="File with the whole data set Dolly-15K, for --scale full.")] = None,
    natural_instructions: Annotated[
        str | None, typer.Option(help="Folder of the data set Super-NaturalInstructions.")
    ] = None,
    basis: Annotated[
        str | None,
        typer.Option(
            help="File of `fedkseed basis`, for experiments with informed directions; for `unlike` a folder of them."
        ),
    ] = None,
    public: Annotated[
        str | None,
        typer.Option(help="Public instruction data to make such bases of, in place of --basis: a file or an archive."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Number of seeds, instead of the experiment's own number.", min=1)
    ] = None,
    only: Annotated[str, typer.Option(help="Limit the experiment to runs whose label contains this text.")] = "",
    part: Annotated[str, typer.Option(help="I/N: every N-th run from the I-th; N processes share the work.")] = "1/1",
    records: Annotated[
        Path | None,
        typer.Option(help="Folder of results, as a checkout's; runs that are on record there are not done again."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option(help="Print sizes, bytes, forward and backward passes and a rough time; load no weights.")
    ] = False,
    seconds_per_step: Annotated[
        float | None,
        typer.Option(help="Seconds of a local step of two forward passes, for --dry-run; default: estimated."),
    ] = None,
    redraw: Annotated[
        bool, typer.Option(help="Make table and figure again from the records in OUTPUT/NAME/SCALE; run nothing.")
    ] = False,
    show_list: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    as_json: Json = False,
) -> None:
    """Run an experiment of the paper and write its table and figure.

    It may be stopped at any moment: the same command continues it, and finished runs are not repeated.
    """
    from rich.table import Table

    from ..paper import experiments
    from ..paper.bases import placed
    from ..paper.dry_run import estimate as estimated
    from ..paper.reproduce import parts, with_tiny
    from ..paper.reproduce import redraw as redrawn
    from ..paper.reproduce import reproduce as run_experiment

    if show_list or not name:
        table = Table("name", "paper", "what")
        known = [experiments.load(one, scale) for one in experiments.names()]
        rows = [(one.name, one.item, one.title) for one in known]
        for row in rows:
            table.add_row(*row)
        if as_json:
            print_json([dict(zip(("name", "paper", "what"), row, strict=True)) for row in rows])
        else:
            console.print(table)
        return
    paths = {"model": model, "dolly": dolly, "natural-instructions": natural_instructions, "basis": basis}
    given = {place: str(Path(path).expanduser()) for place, path in paths.items() if path is not None}
    documents = {}  # experiment -> its JSON
    for wanted in experiments.names() if name == "all" else [name]:
        experiment = experiments.load(wanted, scale)
        if seeds is not None:
            experiment = replace(experiment, seeds=seeds)
        text = public if experiment.bases or name != "all" else None
        if dry_run:
            with_paths = placed(experiment, output, with_tiny(scale, output, given), text)
            found = estimated(experiment, with_paths, only, seconds_per_step)
            documents[wanted] = {"rows": found.rows, "notes": found.notes}
            if not as_json:
                print(found.markdown(f"{wanted}, {scale}"))
            continue
        folder = (
            redrawn(experiment, output)
            if redraw
            else run_experiment(
                experiment,
                output,
                given,
                only=only,
                part=parts(part),
                records=records,
                public=text,
                command=["fedkseed", *sys.argv[1:]],
            )
        )
        documents[wanted] = {"folder": None if folder is None else str(folder)}
        if folder is None:
            console.print("this part is finished; once all parts are, the command without --part writes the table")
        else:
            console.print((folder / "table.md").read_text(), highlight=False)
            console.print(f"written to {folder}", highlight=False)
    if as_json:
        print_json(documents)


certs = typer.Typer(cls=DirectoryFirst, help=CERTS, no_args_is_help=True)
for keys_command in (make, request, add, revoke, sign, members, public):
    certs.command()(_guarded(keys_command))
app.add_typer(certs, name="certs")
for network_command in (serve, shard, join, peer, server, client):
    _command(network_command)


def _end(result: "Result", as_json: bool) -> None:
    """Print the result of a run.

    Raises:
        typer.Exit: it has diverged.
    """
    from ..report.terminal import show_result

    show_result(result, as_json)
    if result.diverged:
        raise typer.Exit(DIVERGED)


def _foretell(recipe: "Recipe", as_json: bool) -> None:
    """Print what a run would cost."""
    from ..planning.forecast import forecast
    from ..report.tables import print_forecast

    with Bars(0) as bars:
        found = forecast(recipe, bars)
    if as_json:
        print_json(asdict(found) | {"bytes_of_a_run": found.bytes_of_a_run, "seconds": found.seconds})
    else:
        print_forecast(found)


@contextmanager
def _resumable(directory: Path) -> Iterator[None]:
    """Say on Ctrl-C how the run goes on, if it has begun."""
    try:
        yield
    except KeyboardInterrupt:
        begun = (directory / "run.sqlite").exists()
        kept = f"its finished rounds are kept: fedkseed resume {directory}" if begun else "the run had not begun"
        print(f"fedkseed: stopped; {kept}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def _version(value: bool) -> None:
    if value:
        print(f"fedkseed {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""


def main() -> None:
    """Entry point of the command `fedkseed`."""
    app()
