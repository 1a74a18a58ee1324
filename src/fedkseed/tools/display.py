"""What a person sees of a run: progress while it goes on, a table at its end."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from ..evaluation.statistics import estimate, paired_change
from ..round import Report
from ..run.loop import Result
from .compare import AWAY, Costs
from .eps_ladder import TOLERANCE, Scalars
from .tune import Trial, Tuning, derives

console = Console(markup=False)  # paths and texts of users may hold brackets


class Bars:
    """Progress on the terminal: one bar for the rounds, if there are any, and one for what is being done now."""

    def __init__(self, rounds: int) -> None:
        columns = (
            TextColumn("{task.description:34}", markup=False),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self.bars = Progress(
            *columns, TextColumn("{task.fields[extra]}", markup=False), console=console, transient=True
        )
        self.rounds = self.bars.add_task("rounds", total=rounds, extra="", visible=rounds > 0)
        self.now = self.bars.add_task("", total=1, extra="", visible=False)
        self.total = rounds
        self.bytes = 0

    def __enter__(self) -> "Bars":
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def note(self, text: str) -> None:
        self.bars.console.print(Text(text, style="dim"))

    def begin(self, what: str, total: int) -> None:
        self.bars.reset(self.now, total=total, description=what, visible=True, extra="")

    def advance(self, count: int = 1, loss: float | None = None) -> None:
        self.bars.update(self.now, advance=count)
        if loss is not None:
            self.bars.update(self.now, extra=f"loss {loss:.3f}")

    def round_done(self, report: Report) -> None:
        self.bytes += report.bytes_total
        self.bars.update(self.rounds, completed=report.round + 1, extra=f"{self.bytes / 1000:.1f} kB so far")
        self.bars.console.print(
            f"round {report.round + 1:3} of {self.total}   clients {len(report.clients)}   "
            f"local loss {report.loss:.4f}   "
            + (f"mean |rho| {report.scalar:.2f}   " if report.scalar is not None else "")
            + (f"replayed {report.replayed:,} coefficients   " if report.replayed else "")
            + (f"staleness up to {max(report.staleness)}   " if any(report.staleness) else "")
            + f"bytes a client: {report.bytes_down:,} down, {report.bytes_up:,} up"
            + (f"   SKIPPED {report.skipped} steps, loss not finite" if report.skipped else ""),
            highlight=False,
        )


def print_result(result: Result) -> None:
    before, after, reports = result.before, result.after, result.reports
    table = Table("measure", "before", "after", "change", title=f"{result.weights:,} weights tuned")

    def compare(what: str, before: Sequence[float], after: Sequence[float]) -> None:
        change = paired_change(before, after)
        table.add_row(what, f"{estimate(before)}", f"{estimate(after)}", f"{change.mean:+.4f} ± {change.error:.4f}")

    if before.losses:
        compare(f"held-out loss, {len(before.losses)} examples (nats a token)", before.losses, after.losses)
    if before.rouge:
        compare(f"Rouge-L, {len(before.rouge)} answers", before.rouge, after.rouge)
        rates = [f"{sum(e.empty) / len(e.empty):.0%}" for e in (before, after)]
        table.add_row("empty outputs", *rates, "")
    if before.losses:
        console.print(table)
    else:
        console.print(f"{result.weights:,} weights tuned; nothing was evaluated", highlight=False)
    costs = Table("cost", Column("value", overflow="fold"))  # a digest is whole or useless
    if reports:
        down, up = max(r["bytes_down"] for r in reports), max(r["bytes_up"] for r in reports)
        costs.add_row("bytes a client and round", f"{down:,} down + {up:,} up = {down + up:,}")
    if result.output is not None:
        size = sum(file.stat().st_size for file in (result.output, *result.output.rglob("*")) if file.is_file())
        costs.add_row("the tuned model", f"{size:,} bytes")
    costs.add_row("peak memory", f"{result.peak_memory / 1e9:.2f} GB")
    if result.step_seconds is not None:
        costs.add_row("a local step (median)", f"{result.step_seconds:.2f} s")
    if result.sync_seconds is not None:
        costs.add_row("sync to the latest model", f"{result.sync_seconds:.2g} s")
    costs.add_row("digest of the tuned model", result.digest)
    console.print(costs)
    if result.output is not None:
        console.print(f"the tuned model is {result.output}", highlight=False)


def print_costs(found: Sequence[Costs], steps: int) -> None:
    """One row an algorithm."""
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


def print_tuning(found: Tuning) -> None:
    """Both ladders, what they say, and the lines for the recipe."""
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
    _say("\n".join(["", "[derivatives]" if derives(found.recipe) else "[training]", *lines]))


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
        other = "" if trial is found.best else f"{apart.mean:+.5f} ± {apart.error:.5f}"
        table.add_row(f"{trial.lr:g}", f"{change.mean:+.5f} ± {change.error:.5f}", other, _verdict(found, trial))
    console.print(table)
    same = found.alike
    _say(f"on {len(found.before)} examples of clients; ± is one standard error over them, paired by example")
    if found.lr is not None and len(same) > 1:
        _say(f"lr from {min(same):g} to {max(same):g} lower it, and can't be told apart within two standard errors")
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


def short(number: float) -> str:
    """Three digits and a letter: 17,748 is 17.7 k, 134,515,008 is 135 M."""
    for letter in ("", " k", " M", " G"):
        if abs(number) < 999.5 or letter == " G":
            break
        number /= 1000
    return f"{number:.3g}{letter}"
