"""The source of an experiment's table and figure: its finished runs, and the options of its file."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from .experiments import Experiment, Tree, options_of, short
from .results import RunOutcome, group, spread


@dataclass(frozen=True, slots=True)
class ComparisonOptions:
    """The table `options` of an experiment with runs. Each output reads those of its rows that it shows."""

    reference: Tree = field(default_factory=dict)  # axis -> the value with which all others of the axis are compared
    rival: Any = None  # a second such value
    line: str = "method"  # the axis with a line for each of its values
    x: str = ""  # the axis along which a figure is drawn
    y: str = ""  # the axis upwards, of a grid
    measure: str = ""  # a key of results.MEASURES; of a figure with one
    measures: Sequence[str] = ("rouge", "loss")  # of a figure with a panel for each
    error: str = "std"  # what a band along a line is: "std", or "standard error"
    xlabel: str = ""
    limits: tuple[float, float] | None = None  # least and largest number upwards
    log: bool = False  # whether x is logarithmic
    clock: str = "processor"  # or "virtual", see run/cohort.py
    steps: int = 0  # local steps after which methods are compared
    steps_a_round: int | Mapping[str, int] = 1  # local steps of a round, by method where they differ

    def steps_of(self, method: str) -> int:
        """Local steps of a round with a method."""
        steps = self.steps_a_round
        return steps if isinstance(steps, int) else steps.get(method, steps["default"])


@dataclass(frozen=True)
class Comparison:
    """Finished runs of an experiment, and how they are to be shown."""

    experiment: Experiment
    options: ComparisonOptions
    outcomes: Sequence[RunOutcome]

    @classmethod
    def of(cls, experiment: Experiment, outcomes: Sequence[RunOutcome]) -> "Comparison":
        options = options_of(ComparisonOptions, experiment)
        if options.clock == "virtual":
            outcomes = [replace(outcome, clock=outcome.virtual) for outcome in outcomes]
        return cls(experiment, options, outcomes)

    def axes_without(self, *axes: str) -> list[str]:
        """The axes of the experiment without those named, and without the one whose best value was searched."""
        choice = self.experiment.choice
        searched = [choice.axis] if choice else []
        return [axis for axis in self.experiment.axes if axis not in (*axes, *searched)]

    def by(self, *axes: str) -> dict[tuple[Any, ...], list[RunOutcome]]:
        """All runs, grouped by their values on some axes."""
        return group(self.outcomes, axes)

    @cached_property
    def references(self) -> list[tuple[str, Any]]:
        """Axes and the values on them with which others are compared: the reference, and the rival on its axis."""
        pairs = [
            (axis, value) for axis, first in self.options.reference.items() for value in (first, self.options.rival)
        ]
        return list(dict.fromkeys((axis, value) for axis, value in pairs if value is not None))

    def title(self, axis: str, value: Any) -> str:
        """The name of a value of an axis."""
        return self.experiment.title_of(axis, value)

    def titles(self, axes: Sequence[str], values: Iterable[Any]) -> dict[str, str]:
        """The names of values, by the short names of their axes."""
        return {short(axis): self.title(axis, value) for axis, value in zip(axes, values, strict=True)}

    def panel_title(self, axes: Sequence[str], values: Sequence[Any]) -> str:
        """The title of a panel: its values on those axes that have several."""
        return ", ".join(
            self.title(axis, value) if axis in ("model", "dataset", "method") else f"{short(axis)} = {value}"
            for axis, value in zip(axes, values, strict=True)
            if len(self.experiment.axes[axis]) > 1
        )

    def measured(self, measures: Sequence[str]) -> list[str]:
        """Those measures that all runs have; the loss if there are none, as without generated answers."""
        return [name for name in measures if spread(self.outcomes, name) is not None] or ["loss"]

    @property
    def notes(self) -> tuple[str, ...]:
        """The experiment's own note, where it has one."""
        return tuple(filter(None, [self.experiment.note]))
