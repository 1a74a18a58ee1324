"""Commands that look at runs and tuned models: lists, reports, checks, evaluations, answers, and the way back."""

import secrets
import sys
from contextlib import nullcontext, redirect_stderr
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ..errors import FedKSeedError
from ..report.bars import Bars
from ..report.terminal import QUIET, console, note, print_json, say, shown_level
from .options import AdapterFile, BaseModel, Changes, Directory, Ensemble, Json, RecipeFile, require_packages


def rounds(directory: Directory, as_json: Json = False) -> None:
    """List the finished rounds of a run: clients, training loss, bytes, seconds, means of evaluations.

    fedkseed rounds runs/recipe
    """
    from ..report.results import print_verdict
    from ..report.rounds import print_rounds, rounds_table
    from ..report.verdict import RunVerdict
    from ..report.watch_state import RunView
    from ..run.store import Store, runs_near

    store = Store(directory)
    if not store.path.exists():
        raise FedKSeedError(f"{directory} has a recipe, and no run of it; {runs_near(directory)}")
    view, verdict = RunView.of(store), RunVerdict.of(store)
    if as_json:
        print_json(rounds_table(view) | {"verdict": verdict})
    else:
        print_rounds(view)
        print_verdict(verdict, view.best, view.stopped)


def report(
    directories: Annotated[list[Path], Argument(metavar="RUN...", help="Directories of runs, finished or not.")],
    output: Annotated[Path, Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Write one web page about a run, or comparing several: curves, traffic, directions, clients, recipe.

    fedkseed report runs/recipe
    fedkseed report runs/first runs/second --output both.html
    """
    from ..report.page import write_report

    write_report(directories, output)
    say(f"wrote {output}; open it in a browser")


def watch(
    directory: Annotated[Path, Argument(metavar="RUN", help="The directory of a run, which may not have begun yet.")],
    serve: Annotated[int | None, Option(metavar="PORT", help="Serve a page on this port.", min=0, max=65535)] = None,
    host: Annotated[
        str, Option(help="Address of --serve; others than this machine need the token that is printed.")
    ] = "127.0.0.1",
) -> None:
    """Watch a run while another process works on it: rounds, time left, losses, bytes, clients, notes.

    The run is only read. On a terminal the screen renews itself (q ends it), which needs the package textual; else
    there is a line for each round, until the run has ended. --serve shows the report of the run in a browser, and
    renews it.

    fedkseed watch runs/recipe
    fedkseed watch runs/recipe --serve 8080
    """
    from ..report.watch_state import follow

    if serve is not None:
        from ..network.http_server import listen, listening_at, serve_locally
        from ..network.protocol.addresses import is_loopback
        from ..report.watch_page import RunPage

        with listen(host, serve) as at:
            token = "" if is_loopback(host) else secrets.token_urlsafe(16)
            place = f"http://{listening_at(at)}/" + (f"{token}/" if token else "")
            serve_locally(
                RunPage(directory), at, host, token, lambda: say(f"{place} shows {directory}; Ctrl-C ends it")
            )
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


def verify(
    directory: Directory,
    keys: Annotated[
        list[Path] | None,
        Option(
            help="The clients' public keys that you hold: a folder with client-K.pub, or a file; may be repeated, "
            "also for replaced keys. Without it, the keys are those that the run names, as its server has written."
        ),
    ] = None,
    history: Annotated[
        list[Path] | None, Option(help="A file history.json of a client: is what it saw in this run? May be repeated.")
    ] = None,
    head: Annotated[list[str] | None, Option(help="A head that was shown: is it in this run? May be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Recompute every round of a run from its kept uploads, and say whether each state follows from them.

    Needs no model and no data, takes seconds, and finds the same on any machine: a changed upload, one that was left
    out, a changed state, a signature that is not the client's. The exit code is 2 if something does not follow.

    A server that computes a whole run anew, with keys of its own, is found only by what you bring: --keys, and
    --history or --head.

    Of the directory of a peer (`fedkseed docs peers`), it computes the model of the peer's whole set of uploads.

    fedkseed verify runs/recipe
    fedkseed verify served --keys keys --history runs/client-0/history.json
    """
    from ..network.peers import FILE

    if not (directory / FILE).exists():
        _verify_run(directory, keys or [], history or [], head or [], as_json)
        return
    require_packages("signatures need", "cryptography")
    from ..network.peers.verify import verify as recompute

    uploads = recompute(directory)
    if as_json:
        print_json(uploads)
        return
    follows = "its adapter follows" if uploads.adapter else "there is no adapter yet"
    say(f"{directory}: {uploads.uploads} uploads, all signed; {follows}")
    say(f"run {uploads.run}\nbroadcast of the model {uploads.broadcast}")


def _verify_run(directory: Path, keys: list[Path], histories: list[Path], heads: list[str], as_json: bool) -> None:
    from ..network.protocol.carrier import TRANSPORTS
    from ..run.store import Store
    from ..run.verify import require_head
    from ..run.verify import verify as recompute

    store = Store(directory)
    check = None
    if keys or histories or any((directory / folder).is_dir() for folder in TRANSPORTS):
        require_packages("signatures need", "cryptography")
        from ..network.protocol.receipt_checks import held_keys, require_seen, signature_check

        check = signature_check(store, held_keys(keys) if keys else None)
        for path in histories:
            require_seen(store, path)
    verified = recompute(store, check)
    if as_json:
        print_json(asdict(verified) | {"heads": {head: require_head(store, head) for head in heads}})
        return
    signed = f"{verified.signed} signatures checked" if check else "no signatures checked (its clients have no keys)"
    if verified.unchecked:
        signed = f"{verified.unchecked} signatures NOT checked (the run has no signing.json, its clients' keys)"
    say(f"{directory}: {verified.rounds} rounds follow from {verified.uploads} uploads, {signed}")
    for head in heads:
        say(f"head {head} is that after {require_head(store, head)} rounds")
    if check and not keys:
        say("keys: those that the run itself names; --keys compares with keys that you hold")
    say(f"head {verified.head}")
    lacking = "not known without the model" if store.adapter.exists() else "none yet, the run is not finished"
    say(f"digest of the tuned model {verified.digest or lacking}")


def rollback(
    directory: Directory, to: Annotated[int, Option(help="Number of finished rounds to keep.", min=0)]
) -> None:
    """Return a run to an earlier round and delete all later ones; `fedkseed resume` continues from there.

    fedkseed rollback runs/recipe --to 3
    """
    from ..run.store import Store

    store = Store(directory)
    with store.locked():
        store.rollback(to)
    console.print(f"{directory} is back at {to} finished rounds")


def forget(
    directory: Directory,
    client: Annotated[list[int], Option(help="Number of the client; may be repeated.", min=0)],
    output: Annotated[
        Path | None, Option("--output", "-o", help="Directory of the new run; default RUN-without-K.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Recompute the model of a run without the uploads of a client, as a new run that `fedkseed export` takes.

    Every round is done again with the uploads of the others, which the run has kept, to the bit as if the client's had
    been refused. The run stays as it is. What others computed later began with models that had learned from the
    client: this is no exact unlearning. Copies of the old run and its model have to be deleted by hand.

    fedkseed forget runs/recipe --client 3
    fedkseed export runs/recipe-without-3 exported
    """
    from ..run.forget import forget as recompute
    from ..run.store import Store

    store, clients = Store(directory), sorted({*client})
    at = output or directory.with_name("-".join([f"{directory.resolve().name}-without", *map(str, clients)]))
    with store.locked():
        found = recompute(store, clients, at)
    if as_json:
        print_json(asdict(found) | {"directory": str(at)})
        return
    say(f"{at}: {found.rounds} rounds follow from {found.uploads} uploads, {found.left_out} were left out")
    say(f"head {found.head}\nnot evaluated: fedkseed eval {at}")


def preview(
    recipe: RecipeFile,
    client: Annotated[int, Option(help="Number of the client whose first example is shown.", min=0)] = 0,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Show a training example as tokens with its loss mask, and the split of the data over the clients.

    No weights are loaded.

    fedkseed preview recipe.toml --client 2
    """
    from rich.text import Text

    from ..data.federated import share_out
    from ..randomness import Purpose, generator
    from ..recipe.reading import load_recipe
    from ..run.prerequisites import require_ready

    parsed = load_recipe(recipe, changes or ())
    require_ready(parsed)
    from ..models.load import load_tokenizer
    from ..report.preview import preview_table, print_preview

    tokenizer = load_tokenizer(parsed.model.name)
    shares = share_out(parsed, tokenizer, lambda line: console.print(Text(line, style="dim")))
    if client >= len(shares.clients):
        raise FedKSeedError(f"there is no client {client}; the recipe has clients 0 to {len(shares.clients) - 1}")
    share = shares.clients[client]
    first = share[int(generator(parsed.seed, Purpose.BATCHES, 0, client).permutation(len(share))[0])]
    if as_json:
        print_json(preview_table(first, shares))
    else:
        print_preview(first, shares, client, tokenizer)


def eval(
    tuned: Annotated[
        Path,
        Argument(metavar="RUN", help="A run's directory; with --data or --tasks also an adapter, or any model."),
    ],
    after: Annotated[
        int | None,
        Option(help="Rounds after which the model is; default: all, or the best by [evaluation] best.", min=0),
    ] = None,
    data: Annotated[str | None, Option(help="File or folder of examples, in place of the run's held-out sets.")] = None,
    metrics: Annotated[str, Option(help="With --data: metrics beside the loss, with commas, as accuracy,choice.")] = "",
    tasks: Annotated[str | None, Option(help="Tasks of lm-evaluation-harness, with commas, not the sets.")] = None,
    tasks_from: Annotated[Path | None, Option(help="With --tasks: folder with YAML files of further tasks.")] = None,
    as_tuned: Annotated[bool, Option("--as-tuned", help="With --tasks: in the words on which it was tuned.")] = False,
    shots: Annotated[int | None, Option(help="With --tasks: solved examples before each question.", min=0)] = None,
    examples: Annotated[
        int | None, Option(help="With --data: rows to draw; with --tasks: the first of each; default: all.", min=2)
    ] = None,
    generated: Annotated[int, Option(help="With --data: answers to write, for metrics that score them.", min=0)] = 0,
    max_tokens: Annotated[int | None, Option(help="With --data: tokens of an example, at most.", min=1)] = None,
    beside_base: Annotated[bool, Option("--beside-base", help="With --data or --tasks: the base model, too.")] = False,
    ensemble: Ensemble = 1,
    model: BaseModel = None,
    as_json: Json = False,
) -> None:
    """Evaluate the model of a run, finished or not, on its held-out sets, by default after its last round.

    Where the recipe has [evaluation] best, it is by default the model of the best round so far.

    With --data, evaluate any tuned model on any file of examples, put to it in the words on which it was tuned. With
    --tasks, evaluate it by lm-evaluation-harness; `fedkseed docs evaluation` says how its numbers and ours compare.

    fedkseed eval runs/recipe --after 3
    fedkseed eval runs/recipe --ensemble 4
    fedkseed eval runs/recipe --data questions.csv --metrics accuracy --beside-base
    fedkseed eval runs/recipe --tasks arc_easy --examples 100
    """
    if tasks is not None:
        if data or after is not None or metrics or generated or max_tokens:
            raise FedKSeedError("--data, --after, --metrics, --generated and --max-tokens don't go with --tasks")
        from ..tuned.load import open_ready

        opened = open_ready(tuned, model, note, ensemble)
        from ..report.tables import print_tasks
        from ..tuned.lm_eval import scores as evaluate

        with redirect_stderr(StringIO()) if shown_level.get() == QUIET else nullcontext():  # for the harness's own bars
            options = {"own": tasks_from, "shots": shots, "as_tuned": as_tuned, "beside_base": beside_base}
            scores = evaluate(opened, _split(tasks), examples=examples, **options)
        if as_json:
            print_json(scores)
        else:
            print_tasks(scores)
    elif tasks_from or as_tuned or shots is not None:
        raise FedKSeedError("--tasks-from, --as-tuned and --shots go with --tasks NAMES")
    elif data is not None:
        if after is not None:
            raise FedKSeedError("--after is for the run's own held-out sets; leave it out, or --data")
        from ..report.results import print_scores, sets_table
        from ..tuned.load import open_ready

        opened = open_ready(tuned, model, note, ensemble)
        from ..tuned.measure import measure

        with Bars(0) as bars:
            sizes = {"examples": examples or "all", "generated": generated, "max_tokens": max_tokens}
            base, evaluation = measure(opened, data, _split(metrics), bars, **sizes, beside_base=beside_base)
        if as_json:
            print_json({"data": data, "sets": sets_table(base, evaluation)})
            return
        console.print(f"{tuned} on {data}:", end=" ", highlight=False)
        print_scores(evaluation, base)
    elif metrics or examples or generated or max_tokens or beside_base:
        raise FedKSeedError(
            "--metrics, --generated and --max-tokens go with --data FILE; --examples and --beside-base with that or "
            "with --tasks NAMES"
        )
    else:
        _eval_run(tuned, model, after, ensemble, as_json)


def _eval_run(directory: Path, model: str | None, after: int | None, ensemble: int, as_json: bool) -> None:
    """Evaluate the model of a run after some rounds, on the run's held-out sets."""
    from ..evaluation.statistics import NOT_EVALUATED, Evaluation, gains, gains_table, require_finite
    from ..report.results import print_gains, print_scores, sets_table
    from ..run.ensemble import mean_state
    from ..run.prerequisites import require_ready
    from ..run.store import Store

    store = Store(directory)
    # Evaluation does not read the objective: with the loss, no objective function of the user's has to be loaded.
    recipe = store.load_recipe(model).having(training={"objective": "loss"})
    require_ready(recipe)
    from ..run.simulation import Simulation

    with Bars(recipe.training.rounds) as bars:
        simulation = Simulation(recipe, bars)
        store.require_same(simulation.identity)
        done = store.tuned if after is None else after
        state = mean_state(store, recipe, simulation.strategy.server.state, done, ensemble)
        if state is None:
            raise FedKSeedError(f"{directory} has no finished round yet")
        scores = simulation.federation.evaluator.evaluate(state, "held-out examples", True)
    require_finite(scores, f"the model after {state.round} rounds", recipe.model.dtype)
    base = Evaluation.of(before) if (before := store.evaluations().get(0)) else NOT_EVALUATED
    clients = gains(base, scores)
    if as_json:
        found = {"rounds": state.round, "ensemble": ensemble, "sets": sets_table(base, scores)}
        print_json(found | {"clients": gains_table(clients)})
        return
    which = f", mean of the last {ensemble}" if ensemble > 1 else ""
    console.print(f"after {state.round} rounds{which}:", end=" ")
    print_scores(scores, base)
    print_gains(clients)


def _split(names: str) -> list[str]:
    """The names in a text with commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


def generate(
    adapter: AdapterFile,
    prompt: Annotated[str, Argument(help="The instruction to answer.")],
    context: Annotated[str, Option(help="Further text that the instruction is about.")] = "",
    system: Annotated[str, Option(help="What the system says before it, as in rows with a column `system`.")] = "",
    max_new_tokens: Annotated[int, Option(help="Largest length of an answer, in tokens.", min=1)] = 64,
    ensemble: Ensemble = 1,
    model: BaseModel = None,
) -> None:
    """Answer an instruction with the base model and with the tuned model, to compare them.

    fedkseed generate runs/recipe "The scanner does not switch on." --max-new-tokens 100
    """
    from rich.text import Text

    from ..data.layouts import LAYOUTS, text
    from ..tuned.load import open_ready

    for said in (prompt, context, system):
        text(said, "the command line", "a prompt")
    opened = open_ready(adapter, model, note, ensemble)
    from ..evaluation.evaluate import respond

    tokenizer = opened.tokenizer()
    words = opened.words(tokenizer)
    row = {"instruction": prompt, "response": "", "context": context, "system": system}
    example = LAYOUTS["instruction"].example(row, "the command line")
    tokens, ends = words.prompt(example, tokenizer), words.ends(tokenizer)
    for title, load in (("base", opened.load_base), ("tuned", opened.load)):
        answer = respond(load(), tokenizer, [tokens], max_new_tokens, ends)[0].strip()
        console.print(Text(f"--- {title} ---", style="bold"))
        console.print(Text(answer or "(nothing)"))
