"""Tables of the costs of algorithms, and of the results of a search for settings."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..planning.compare import AWAY, AlgorithmCosts
from ..planning.forecast import Forecast
from ..planning.tune import Trial, Tuning, derives
from ..run.eps_ladder import TOLERANCE, Scalars
from ..tuned.lm_eval import TaskScore
from .terminal import console, short


def print_costs(found: Sequence[AlgorithmCosts], steps: int) -> None:
    """Print a table of costs with one row an algorithm."""
    table = Table(title=f"A client and round, {steps} local steps; back: after {AWAY} rounds away", box=SIMPLE_HEAD)
    table.add_column("algorithm")
    for name in ("tuned", "down", "down, back", "up", "memory", "sync", "sync, back", "a step"):
        table.add_column(name, justify="right")
    for costs in found:
        memory, seconds = costs.peak_memory, (costs.sync_seconds, costs.back_seconds, costs.step_seconds)
        table.add_row(
            costs.algorithm,
            *(short(n) for n in (costs.trainable, costs.bytes_down, costs.bytes_back, costs.bytes_up, memory)),
            *(f"{value:.2g} s" for value in seconds),
        )
    console.print(table)


def print_forecast(found: Forecast) -> None:
    """Print what a run would cost, one thing a line."""
    table = Table(title=f"a run of {found.algorithm}, which was not begun", box=SIMPLE_HEAD, show_header=False)
    least, usual, most = found.examples
    minutes, left = divmod(round(found.seconds), 60)
    for name, text in (
        ("weights tuned", f"{found.weights:,}"),
        ("clients", f"{found.clients:,} with {least:,} to {most:,} examples, the median {usual:,}"),
        ("training tokens", f"{found.tokens:,}"),
        ("left out", f"{found.too_long:,} examples longer than [data] max_tokens"),
        ("held out", f"{found.held_out:,} examples, evaluated {found.evaluations} times"),
        ("a round", f"{found.cohort} clients, {found.steps} local steps each; {found.rounds} rounds"),
        ("bytes a client and round", f"{found.bytes_down:,} down + {found.bytes_up:,} up"),
        ("bytes of the run", f"{short(found.bytes_of_a_run)}B"),
        ("memory", f"{found.peak_memory / 1e9:.2f} GB with the model loaded, after some steps"),
        ("a local step", f"{found.step_seconds:.3g} s"),
        ("time", f"about {minutes:,} min {left} s with one client at a time, written answers not counted"),
    ):
        table.add_row(name, text)
    console.print(table)


def print_tuning(found: Tuning) -> None:
    """Print the tables of eps and lr, what follows from them, and the lines for the recipe."""
    training, scalars = found.recipe.training, found.scalars
    lines = []
    if scalars is not None:
        _print_scalars(found, scalars)
        best = f"eps = {scalars.best.eps:g} # least error of those measured"
        lines.append(best if scalars.eps else f"eps = {training.eps:g} # unchanged: rounding hides the scalars")
    if found.trials:
        _print_trials(found)
    if found.spent:
        _say("the time is spent before all learning rates were tried: give more --minutes")
    if found.lr is not None:
        lines.append(f"lr = {found.lr:g} # best of those that lowered the loss by two standard errors")
    else:
        why = "no trial lowered the loss by two standard errors" if found.trials else "there was no time for a trial"
        lines.append(f"lr = {found.own:g} # unchanged: {why}")
    if found.clip is not None and not derives(found.recipe):
        lines.append(f"clip = {found.clip:g} # 8 times the root mean square of rho: what one client can claim")
    if found.norm is not None:
        lines += ["", f"[{found.table}]", f"norm = {found.norm:g} # 1.5 times the usual norm of a client's change of c"]
    _say("\n".join(["", "[derivatives]" if derives(found.recipe) else "[training]", *lines]))


def print_tasks(found: Sequence[TaskScore]) -> None:
    """Print the scores of tasks, a metric a row."""
    beside = any(score.base is not None for score in found)
    table = Table("task", "metric", *(["base", "tuned", "change"] if beside else ["tuned"]), box=SIMPLE_HEAD)
    for score in found:
        before = [str(score.base)] if beside else []
        change = [score.change.text("+") if score.change is not None else ""] if beside else []
        table.add_row(Text(score.task), Text(score.metric), *before, str(score.tuned), *change)
    console.print(table)


def tuning_table(found: Tuning) -> dict[str, Any]:
    """The results of a search as a table of plain values, for JSON."""
    trials = [
        {"lr": trial.lr, "failure": trial.failure, **asdict(trial.change(found.before))} for trial in found.trials
    ]
    scalars = [] if found.scalars is None else [asdict(rung) for rung in found.scalars.rungs]
    return {
        "table": "derivatives" if derives(found.recipe) else "training",
        "eps": found.eps,
        "lr": found.lr,
        "clip": found.clip,
        "norm": found.norm,
        "steps": found.steps,
        "clients": found.cohort,
        "examples": len(found.before),
        "trials": trials,
        "scalars": scalars,
        "spent": found.spent,
    }


def _print_scalars(found: Tuning, scalars: Scalars) -> None:
    recipe = found.recipe
    table = Table(title=f"scalars of {scalars.samples} batches, {recipe.model.dtype}", box=SIMPLE_HEAD)
    for name in ("eps", "mean |rho|", "rounding", "bias", "error", "from the best"):
        table.add_column(name, justify="right")
    for rung in scalars.rungs:
        apart = "" if rung is scalars.best else f"{rung.apart:.1%}"
        row = f"{rung.eps:g}", f"{rung.scalar:.3f}", f"{rung.noise:.2g}", f"{rung.bias:.2g}", f"{rung.error:.1%}", apart
        table.add_row(*row)
    console.print(table)
    _say(
        f"a loss is rounded by {scalars.rounding:.1g}; mean rho² = {scalars.square:.3g}; "
        f"tr H = {scalars.curvature.mean:.3g} ± {scalars.curvature.error:.1g}"
    )
    if found.together is not None:
        n = len(found.cohort)
        _say(f"steps can't lower the loss above lr = {found.alone:.1e}, averaged over {n} clients {found.together:.1e}")
    if scalars.eps is None:
        better = "use float32" if recipe.model.dtype != "float32" else "use larger batches"
        _say(f"rounding and curvature spoil half of a scalar or more at every eps: {better}")
    elif scalars.usable:
        low, high = min(scalars.usable), max(scalars.usable)
        _say(f"the error is within {TOLERANCE:.0%} for eps from {low:g} to {high:g}")
    else:
        _say(f"no eps keeps the error within {TOLERANCE:.0%}")


def _print_trials(found: Tuning) -> None:
    rounds = f"a round of {len(found.cohort)} clients, {found.steps} local steps each"
    table = Table("lr", "change of the loss", "from the best", "", title=rounds, box=SIMPLE_HEAD)
    for trial in sorted(found.trials, key=lambda trial: trial.lr):
        if trial.failure:
            table.add_row(f"{trial.lr:g}", "", "", Text(trial.failure))
            continue
        change, apart = trial.change(found.before), trial.change(found.best.losses)
        other = "" if trial is found.best else apart.text("+", 5)
        table.add_row(f"{trial.lr:g}", change.text("+", 5), other, _verdict(found, trial))
    console.print(table)
    same = found.alike
    _say(f"on {len(found.before)} examples of clients; ± is one standard error over them, paired by example")
    if found.lr is not None and len(same) > 1:
        _say(f"lr from {min(same):g} to {max(same):g} lower it, and can't be distinguished within two standard errors")
    if found.steps < found.recipe.training.steps:
        _say(
            f"a trial took {found.steps} of the recipe's {found.recipe.training.steps} local steps: what more of them "
            "do to a client's own model was not seen; take a smaller lr than the best, or give --steps"
        )


def _verdict(found: Tuning, trial: Trial) -> str:
    if trial is found.best:
        return "best"
    if trial.lr in found.alike:
        return "like the best"
    return "worse" if found.worse(trial) else "no gain"


def _say(text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)
