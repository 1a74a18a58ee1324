"""Tables of the costs of algorithms, and of the results of a search for settings."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..planning.compare import ROUNDS_AWAY, AlgorithmCosts
from ..planning.forecast import Forecast
from ..planning.tune import LOST, Tuning, derives
from ..run.eps_ladder import TOLERANCE, Scalars
from ..run.progress import duration
from ..tuned.lm_eval import TaskScore
from .terminal import console, say, short


def print_costs_head(steps: int) -> None:
    """Print what a table of costs is of, and the titles of its columns."""
    say(f"a client and round, {steps} local steps; weights, bytes; back: after {ROUNDS_AWAY} rounds away")
    say("memory: measured; and as it is predicted before a model is loaded, beside the libraries")
    say(_costs_row("algorithm", ("tuned", "down", "back", "up", "memory", "pred."), ("sync", "back", "a step")))


def print_costs(costs: AlgorithmCosts) -> None:
    """Print the row of an algorithm as soon as it is measured."""
    sizes = costs.trainable, costs.bytes_down, costs.bytes_back, costs.bytes_up, costs.peak_memory
    seconds = costs.sync_seconds, costs.back_seconds, costs.step_seconds
    times = (f"{1e3 * time:.2g} ms" if time < 0.1 else f"{time:.3g} s" for time in seconds)
    predicted = "–" if costs.predicted_memory is None else short(costs.predicted_memory)
    say(_costs_row(costs.algorithm, (*map(short, sizes), predicted), times))


def _costs_row(name: str, sizes: Iterable[str], seconds: Iterable[str]) -> str:
    return f"{name:17}" + "".join(f"{text:>7}" for text in sizes) + "".join(f"{text:>9}" for text in seconds)


def print_forecast(costs: Forecast) -> None:
    """Print what a run would cost, one thing a line."""
    table = Table(title=f"a run of {costs.algorithm}, which was not begun", box=SIMPLE_HEAD, show_header=False)
    least, usual, most = costs.examples
    span = " to ".join(f"{steps:,}" for steps in dict.fromkeys(costs.steps))
    predicted = costs.predicted_memory
    quick, slow = f"{costs.quickest_seconds:.3g}", f"{costs.step_seconds:.3g}"
    for name, text in (
        ("weights tuned", f"{costs.weights:,}"),
        ("clients", f"{costs.clients:,} with {least:,} to {most:,} examples, the median {usual:,}"),
        ("training tokens", f"{costs.tokens:,}"),
        ("left out", f"{costs.too_long:,} examples longer than [data] max_tokens"),
        ("held out", f"{costs.held_out:,} examples, evaluated {costs.evaluations} times"),
        ("a round", f"{costs.cohort} clients, {span} local steps each; {costs.rounds} rounds"),
        ("bytes a client and round", f"{costs.bytes_down:,} down + {costs.bytes_up:,} up"),
        ("bytes of the run", f"{short(costs.bytes_of_a_run)}B"),
        ("memory, predicted", "–" if predicted is None else f"{predicted / 1e9:.2f} GB at most, with all clients"),
        ("memory, measured", f"{costs.peak_memory / 1e9:.2f} GB with the model loaded, after some steps"),
        ("a local step", f"{quick} to {slow} s, by the length of a client's examples; {costs.slowest} takes longest"),
        ("time", f"about {duration(costs.seconds)} with one client at a time, written answers not counted"),
    ):
        table.add_row(name, text)
    console.print(table)


def print_tuning(tuning: Tuning) -> None:
    """Print the tables of eps and lr, what follows from them, and the lines for the recipe."""
    training, scalars = tuning.recipe.training, tuning.scalars
    lines = []
    if scalars is not None:
        _print_scalars(tuning, scalars)
        best = f"eps = {scalars.best.eps:g} # least error of those measured"
        lines.append(best if scalars.eps else f"eps = {training.eps:g} # unchanged: rounding hides the scalars")
    if tuning.trials:
        _print_trials(tuning)
    if tuning.spent:
        say("the time is spent before all learning rates were tried: give more --minutes")
    if tuning.lr is not None:
        lines.append(f"lr = {tuning.lr:g} # best of those that lowered the loss by two standard errors")
    else:
        why = "no trial lowered the loss by two standard errors" if tuning.trials else "there was no time for a trial"
        lines.append(f"lr = {tuning.recipe_lr:g} # unchanged: {why}")
    if tuning.clip is not None and not derives(tuning.recipe):
        lines.append(f"clip = {tuning.clip:g} # 8 times the root mean square of rho: what one client can claim")
    if tuning.size is not None:
        lines += ["", "[directions]", f"size = {tuning.size} # the fewest that lose at most {LOST:.0%} of the gain"]
    if tuning.norm is not None:
        norm = f"norm = {tuning.norm:g} # 1.5 times the usual norm of a client's change of c"
        lines += ["", f"[{tuning.table}]", norm]
    say("\n".join(["", "[derivatives]" if derives(tuning.recipe) else "[training]", *lines]))


def print_tasks(scores: Sequence[TaskScore]) -> None:
    """Print the scores of tasks, a metric a row."""
    beside = any(score.base is not None for score in scores)
    table = Table("task", "metric", *(["base", "tuned", "change"] if beside else ["tuned"]), box=SIMPLE_HEAD)
    for score in scores:
        before = [str(score.base)] if beside else []
        change = [score.change.text("+") if score.change is not None else ""] if beside else []
        table.add_row(Text(score.task), Text(score.metric), *before, str(score.tuned), *change)
    console.print(table)


def tuning_table(tuning: Tuning) -> dict[str, Any]:
    """The results of a search as a table of plain values, for JSON."""
    trials = [{"lr": each.lr, "failure": each.failure, **asdict(each.change(tuning.before))} for each in tuning.trials]
    return {
        "table": "derivatives" if derives(tuning.recipe) else "training",
        **{name: getattr(tuning, name) for name in ("eps", "lr", "clip", "norm", "size", "steps", "spent")},
        "lost": tuning.lost(tuning.recipe.directions.size), "enough": tuning.enough,
        "clients": tuning.cohort, "examples": len(tuning.before), "trials": trials,
        "scalars": tuning.scalars.rungs if tuning.scalars else [],
    }  # fmt: skip


def _print_scalars(tuning: Tuning, scalars: Scalars) -> None:
    recipe = tuning.recipe
    table = Table(title=f"scalars of {scalars.samples} batches, {recipe.model.dtype}", box=SIMPLE_HEAD)
    for name in ("eps", "mean |rho|", "rounding", "bias", "error", "from the best"):
        table.add_column(name, justify="right")
    for rung in scalars.rungs:
        row = f"{rung.eps:g}", f"{rung.scalar:.3f}", f"{rung.noise:.2g}", f"{rung.bias:.2g}", f"{rung.error:.1%}"
        table.add_row(*row, "" if rung is scalars.best else f"{rung.apart:.1%}")
    console.print(table)
    say(
        f"a loss is rounded by {scalars.rounding:.1g}; mean rho² = {scalars.square:.3g}; "
        f"tr H = {scalars.curvature.mean:.3g} ± {scalars.curvature.error:.1g}"
    )
    if tuning.cohort_limit is not None:
        limits = f"{tuning.client_limit:.1e}, averaged over {len(tuning.cohort)} clients {tuning.cohort_limit:.1e}"
        say(f"steps can't lower the loss above lr = {limits}")
    if (lost := tuning.lost(size := recipe.directions.size)) is not None:
        enough = f"; {tuning.enough:,} lose at most {LOST:.0%}" if tuning.enough else ""
        say(f"K = {size:,} directions lose about {lost:.0%} of what any number would gain in the run{enough}")
    if scalars.eps is None:
        better = "use float32" if recipe.model.dtype != "float32" else "use larger batches"
        say(f"rounding and curvature spoil half of a scalar or more at every eps: {better}")
    elif scalars.usable:
        low, high = min(scalars.usable), max(scalars.usable)
        say(f"the error is within {TOLERANCE:.0%} for eps from {low:g} to {high:g}")
    else:
        say(f"no eps keeps the error within {TOLERANCE:.0%}")


def _print_trials(tuning: Tuning) -> None:
    same, rounds = tuning.alike, f"a round of {len(tuning.cohort)} clients, {tuning.steps} local steps each"
    table = Table("lr", "change of the loss", "from the best", "", title=rounds, box=SIMPLE_HEAD)
    for trial in sorted(tuning.trials, key=lambda trial: trial.lr):
        if trial.failure:
            table.add_row(f"{trial.lr:g}", "", "", Text(trial.failure))
            continue
        change, apart = trial.change(tuning.before), trial.change(tuning.best.losses)
        verdict = "like the best" if trial.lr in same else "worse" if tuning.worse(trial) else "no gain"
        other = ("", "best") if trial is tuning.best else (apart.text("+", 5), verdict)
        table.add_row(f"{trial.lr:g}", change.text("+", 5), *other)
    console.print(table)
    say(f"on {len(tuning.before)} examples of clients; ± is one standard error over them, paired by example")
    if tuning.lr is not None and len(same) > 1:
        say(f"lr from {min(same):g} to {max(same):g} lower it, and can't be distinguished within two standard errors")
    if tuning.steps < tuning.recipe.training.steps:
        say(
            f"a trial took {tuning.steps} of the recipe's {tuning.recipe.training.steps} local steps: what more of "
            "them do to a client's own model was not seen; take a smaller lr than the best, or give --steps"
        )
