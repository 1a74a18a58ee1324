"""The verdict on a run: whether its model became better, in a sentence, and what to know before believing it.

It follows from the run's store alone, so that the terminal, the report and JSON say the same. A change counts if it is
more than two paired standard errors; held-out rows that are training rows, too, don't count.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal, TypeAlias

from ..data.held_out import FEWEST
from ..evaluation import statistics as stats
from ..evaluation.statistics import Estimate, Evaluation, Gain
from ..run.best_round import diverged, lowers_loss
from ..run.store import GAINS, NOTES, STOPPED, Store

VerdictKind: TypeAlias = Literal["better", "mixed", "unresolved", "worse", "diverged", "unknown"]
SHARES = ("choice", "exact match", "accuracy")  # scores in percent
SCORES = (*SHARES, "rouge")  # the first of them that a run has stands beside the loss
ALIKE = 0.95  # share of one choice, from which on it hardly depends on the row
WARNING = "warning: "  # the beginning of a note that is one


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The judgement on a run in a sentence; its warnings are on the data and the clients."""

    kind: VerdictKind
    text: str
    warnings: list[str]

    @classmethod
    def of(cls, store: Store) -> "RunVerdict":
        """The verdict on a run, finished or not."""
        planned, done, gains = store.load_recipe().training.rounds, len(store.reports()), gains_of(store)
        kind, text = _judged(store, gains)
        if done < planned and store.recall(STOPPED) is None:
            text = f"After {done} of {planned} rounds: {text}"
        warnings = [note.removeprefix(WARNING) for note in store.recall(NOTES) or () if note.startswith(WARNING)]
        return cls(kind, text, [*warnings, *_on_clients(store, gains)])


def compared(
    base: Evaluation, tuned: Evaluation, by_loss: bool = True, tune: str = "", repeated: int = 0
) -> tuple[VerdictKind, str]:
    """The kind of a verdict and its sentence, from the scores of two models on the same rows.

    Args:
        by_loss: whether the run is meant to lower the loss.
        tune: the way to find a rate, which ends an advice; empty: there is none here.
        repeated: number of held-out rows that were left out, since they are training rows, too.
    """
    count, changes = len(tuned.losses), tuned.changes(base)
    of_training = f" ({repeated:,} more are also training rows, and don't count)" if repeated else ""
    if count < FEWEST:
        return "unknown", f"Can't say: {count} held-out rows{of_training} are too few, hold out {FEWEST} or more"
    # 1 for a metric that became better, −1 for one that became worse, 0 for a change that is not resolved
    signs = {name: -change.sign if name == "loss" else change.sign for name, change in changes.items()}
    signs = {name: sign for name, sign in signs.items() if len(tuned.measures[name]) >= FEWEST}
    names = [name for name in (*SCORES, *tuned.scores) if name in signs]
    if "choice" not in signs:  # answers of many words are hardly ever the same, and may be better for all that
        names.sort(key=lambda name: signs[name] != 1)
    shown = ["loss", *names[:1]]
    facts = [_fact(name, base.measures[name], tuned.measures[name], changes[name], count) for name in shown]
    said = f"{' and '.join(facts)}, on {count:,} held-out rows{of_training}"
    loss, score, title = signs["loss"], signs[names[0]] if names else None, stats.title_of(shown[-1])
    alike, more = _alike(tuned), f"Next: take more rounds, or find another lr{tune}"
    if score == 1 and alike:
        return "mixed", f"Without regard to the rows, {title} rose: {said}. {alike}. {more}"
    if score == 1 and loss == -1 and by_loss:
        return "mixed", f"The loss rose, and {title} rose, too: {said}"
    if score == 1 or (loss == 1 and score is None):
        return "better", f"Better: {said}"
    if loss == 1:
        fell = f"and {title} fell, too" if score else f"{title} did not rise by more than the noise"
        cause = alike or "The form of answers is learned first, and what is right later"
        return "mixed", f"The loss fell, {fell}: {said}. {cause}. {more}"
    if -1 in (loss, score):
        return "worse", f"Not better: {said}. Next: find a smaller lr{tune}"
    return "unresolved", f"Not resolved: {said}. Next: hold out more rows, take more rounds, or find another lr{tune}"


def _judged(store: Store, gains: Sequence[Gain]) -> tuple[VerdictKind, str]:
    """The verdict's kind and sentence: of the tuned model, or of that of the latest evaluation."""
    evaluations, by_loss = store.evaluations(), lowers_loss(store.load_recipe())
    last, holdings = max(evaluations, default=0), store.recall("clients") or {}
    if not last or 0 not in evaluations:
        score = f"score it on rows that no client trains on: fedkseed eval {store.directory} --data FILE"
        early = evaluations or not store.reports()
        why = "no round is evaluated yet" if early else f"there are no held-out rows here; {score}"
        return _by_clients(gains) if gains else ("unknown", f"Can't say: {why}")
    tune = f": fedkseed tune {store.directory / 'recipe.toml'}" if holdings else ""  # needs the rows
    tuned, sign = store.tuned if store.tuned in evaluations else last, diverged(evaluations, by_loss)
    if sign is not None and tuned in (0, last):
        kept = f"the model after {tuned} rounds" if tuned else "the base model"
        return "diverged", f"Diverged: {sign}; {kept} is kept. Next: find a smaller lr{tune}"
    repeated = set((holdings.get("repeated") or {}).get("", ()))
    base, after = (without(Evaluation.of(evaluations[done]), repeated) for done in (0, tuned or last))
    kind, text = compared(base, after, by_loss, tune, len(repeated))
    if not tuned:
        return "worse", f"No round was better, and the base model is kept. The last one: {text}"
    return kind, text if sign is None else f"{text}. Later the run diverged: {sign}"


def without(evaluation: Evaluation, rows: Collection[int]) -> Evaluation:
    """An evaluation without some rows, by their numbers, and without other sets; answers are to the first rows."""

    def kept(values: Sequence[Any]) -> list[Any]:
        return [value for k, value in enumerate(values) if k not in rows]

    lists = {name: kept(getattr(evaluation, name)) for name in ("losses", "rouge", "empty", "choices")}
    return replace(evaluation, **lists, scores={k: kept(v) for k, v in evaluation.scores.items()}, sets={}, answers=[])


def gains_of(store: Store) -> list[Gain]:
    """The gain of each client by the tuned model, or by that of the latest evaluation; those that clients have sent."""
    if (sent := store.recall(GAINS)) is not None:
        return [Gain.of(table) for table in sent]
    by_rounds = store.evaluations()
    if 0 not in by_rounds:
        return []
    tuned = store.tuned if store.tuned in by_rounds else max(by_rounds)
    return stats.gains(Evaluation.of(by_rounds[0]), Evaluation.of(by_rounds[tuned])) if tuned else []


def clients_of(store: Store) -> int:
    """The number of a run's clients; where the run does not say it, one more than the greatest that took part."""
    if holdings := store.recall("clients"):
        return len(holdings["examples"])
    expected = (store.recall("identity") or {}).get("a number of clients of", 0)
    return max([int(expected), *(1 + client for report in store.reports() for client in report["clients"])])


def _fact(name: str, before: Sequence[float], after: Sequence[float], change: Estimate, count: int) -> str:
    """A metric's two means, with their paired change and its standard error."""
    unit, scale, digits = (" %", 100, 1) if name in SHARES else ("", 1, 2 if change.error >= 0.005 else 4)
    first, second = (f"{scale * fmean(values):.{digits}f}{unit}" for values in (before, after))
    moved = Estimate(scale * change.mean, scale * change.error).text("+", digits) + " points" * bool(unit)
    part = f", {len(after)} written answers" if len(after) < count else ""
    return f"{stats.title_of(name)} {first} → {second} ({moved}{part})"


def _alike(tuned: Evaluation) -> str:
    """A sentence on choices that are nearly all the same, though the right ones differ; else empty."""
    label, share = stats.most_frequent(tuned.choices) if tuned.choices else ("", 0.0)
    right = sum(true == label for true, _ in tuned.choices) / max(1, len(tuned.choices))
    said = f"It chooses {label.strip()[:40]!r} for {100 * share:.0f} % of the rows"
    return f"{said}, and it is right for {100 * right:.0f} %" if share >= ALIKE > right else ""


def _by_clients(gains: Sequence[Gain]) -> tuple[VerdictKind, str]:
    """The verdict by the clients' own rows, where there are no others."""
    counts = Counter(gain.verdict for gain in gains)
    said = (
        f"of {len(gains)} clients {counts['gained']} gained and {counts['lost']} lost, by the loss on rows of their own"
    )
    if counts["gained"] and not counts["lost"]:
        return "better", f"Better: {said}"
    return ("mixed", f"Mixed: {said}") if counts["gained"] else ("unresolved", f"No client is known to gain: {said}")


def _on_clients(store: Store, gains: Sequence[Gain]) -> Iterator[str]:
    """Warnings on clients: those that lost, and those that are always asked and took part in no round."""
    recipe, count, names = store.load_recipe(), clients_of(store), (store.recall("clients") or {}).get("names")
    lost = [gain.client for gain in gains if gain.verdict == "lost"]
    if lost:
        yield f"{len(lost)} of {len(gains)} clients lost by it, on rows of their own: {_first(lost)}"
    active = {client for report in store.reports() for client in report["clients"]}
    everyone = recipe.clients.cohort >= count if recipe.clients.active is None else recipe.clients.active == 1
    always = everyone and recipe.asynchronous is None and recipe.network.shards is None
    away = [names[k] if names else f"client {k}" for k in range(count) if k not in active]
    if away and active and always:
        yield f"{len(away)} of {count} clients took part in no round: {_first(away)}"


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + ", …" * (len(names) > 5)
