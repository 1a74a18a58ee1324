"""Experiments: TOML files in recipes/paper, each with the runs of one experiment and the table and figure made of them.

An experiment at a scale is one tree of tables. It is made of these, each of which overrides values of those before:

    common.toml     [scales.SCALE] of common.toml     NAME.toml     [scales.SCALE] of NAME.toml

A file with `like = "OTHER"` is laid over OTHER.toml and its scale, which are laid over the common ones.

The runs of an experiment are all combinations of the values of its axes, times the seeds. The recipe of one run is made
in the same way of: `recipe`, its data set, its model, its method, the method's learning rate, its variant (and what the
method's own table `variants` says of that), the axes' own values. A variant's table `times` has factors of numbers that
are there already. A method with variants of its own has no others.
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from itertools import product
from typing import Any, TypeAlias, TypeVar

from ..errors import FedKSeedError, require_choice
from ..files import shipped
from ..recipe.reading import parse
from ..recipe.schema import Recipe

Tree: TypeAlias = dict[str, Any]
Options = TypeVar("Options")
SCALES = ("tiny", "stories", "small", "full")
# Axes whose values are names of tables -> the field with those tables.
NAMED = {"dataset": "datasets", "model": "models", "method": "methods", "variant": "variants"}
LETTERS = {
    "directions.size": "K", "training.lr": "η", "training.eps": "ε", "clients.count": "N", "clients.active": "m/N",
}  # fmt: skip
FOLDER, COMMON = "recipes/paper", "common"
TRIAL_ROWS = 64  # held-out rows by which trials are compared, where the recipe has no validation part


@dataclass(frozen=True, slots=True)
class Planned:
    """One run of an experiment."""

    axes: Tree  # axis -> its value, in the experiment's order
    seed: int
    table: Tree  # its recipe; values that begin with $ are places for paths, as $model or $basis/stories.safetensors

    def recipe(self, places: Mapping[str, str]) -> Recipe:
        """The recipe of the run; FedKSeedError where the path of a place is not given, or the recipe is not valid."""
        return parse(filled(self.table, places)).absolute()


@dataclass(frozen=True, slots=True)
class Choice:
    """An axis of which only the value of least loss is used, found in trials for each combination of the others."""

    axis: str
    seeds: int = 2  # number of seeds of the trials, which are not those of the runs
    recipe: Tree = field(default_factory=dict)  # tables over those of a trial's recipe: what the choice needs not
    times: Tree = field(default_factory=dict)  # factors of a trial's numbers, as training.rounds = 0.25

    def trial(self, table: Tree) -> Tree:
        """The recipe of a run's trial, which is compared on rows that no run shows: those after them in one draw."""
        shown = table["evaluation"]["examples"]
        apart = {"examples": shown + min(shown, TRIAL_ROWS), "validation": min(shown, TRIAL_ROWS)}
        further = {} if "validation" in table["evaluation"] else {"evaluation": apart}
        return scaled(reduce(merge, [table, further, self.recipe]), self.times)


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment at one scale; see `load`."""

    name: str
    scale: str
    title: str  # of the table
    item: str  # the paper's table or figure, as "Table 3"
    output: str  # a key of outputs.OUTPUTS or of microbenchmarks.MEASURED, which make table and figure
    note: str = ""  # printed below the table
    seeds: int = 2
    first_seed: int = 0
    axes: dict[str, list[Any]] = field(default_factory=dict)
    choose: Tree = field(default_factory=dict)
    options: Tree = field(default_factory=dict)  # of the output; see `options_of`
    recipe: Tree = field(default_factory=dict)
    datasets: dict[str, Tree] = field(default_factory=dict)
    models: dict[str, Tree] = field(default_factory=dict)
    methods: dict[str, Tree] = field(default_factory=dict)
    variants: dict[str, Tree] = field(default_factory=dict)  # of methods: tables that override the methods' own
    lr: dict[str, float] = field(default_factory=dict)  # method -> η
    examples: dict[str, int] = field(default_factory=dict)  # data set -> mean number of a client; for estimates alone
    bases: dict[str, Tree] = field(default_factory=dict)  # place in recipes -> how `make_bases` makes it

    @property
    def choice(self) -> Choice | None:
        """The axis whose best value is searched; None where no axis is, or one with a single value."""
        choice = Choice(**self.choose) if self.choose else None
        return choice if choice and len(self.axes[choice.axis]) > 1 else None

    @property
    def along_rates(self) -> bool:
        """Whether its table is along learning rates, of which the largest may make a run end with an error."""
        return self.output == "against" and self.options.get("x") == "training.lr" and self.choice is None

    def plan(self, seeds: Sequence[int] | None = None, only: Mapping[str, Any] | None = None) -> list[Planned]:
        """All runs, or those that agree with `only` in its axes."""
        seeds = range(self.first_seed, self.first_seed + self.seeds) if seeds is None else seeds
        planned: list[Planned] = []
        for values in product(*self.axes.values()):
            axes = dict(zip(self.axes, values, strict=True))
            variants = self.methods.get(axes.get("method", ""), {}).get("variants", {})
            has_variant = "variant" not in axes or not variants or axes["variant"] in variants
            if has_variant and {**axes, **(only or {})} == axes:
                planned += [Planned(axes, seed, self.table(axes, seed)) for seed in seeds]
        return planned

    def recipes(self, places: Mapping[str, str], only: str = "") -> list[Recipe]:
        """The recipes of one seed's runs, see `holds`; FedKSeedError where the path of a place is not given."""
        planned = self.plan([0]) if "method" in self.axes else []
        return [each.recipe(places) for each in planned if self.holds(only, each.axes)]

    def holds(self, text: str, axes: Mapping[str, Any]) -> bool:
        """Look for a text in the label of a combination of values, in any case."""
        return text.lower() in self.label(axes).lower()

    def title_of(self, axis: str, value: Any) -> str:
        """The name of a value of an axis in tables and figures."""
        named = getattr(self, NAMED[axis]).get(value, {}) if axis in NAMED else {}
        return named.get("title", f"{value:g}" if isinstance(value, float) else f"{value}")

    def label(self, axes: Mapping[str, Any]) -> str:
        """A combination of values in words, without axes that have only one value."""
        shown = [axis for axis in axes if len(self.axes[axis]) > 1] or list(axes)
        values = (self.title_of(axis, axes[axis]) for axis in shown)
        return ", ".join(v if a in NAMED else f"{short(a)} {v}" for a, v in zip(shown, values, strict=True))

    def table(self, axes: Tree, seed: int = 0) -> Tree:
        """The recipe of a combination of values, with places for paths."""
        named: dict[str, Tree] = {}
        for axis, field_name in NAMED.items():
            if axis in axes:
                tables = getattr(self, field_name)
                if axes[axis] not in tables:
                    raise FedKSeedError(f"no {axis} is called {axes[axis]!r}; there are {', '.join(tables) or 'none'}")
                named[axis] = tables[axes[axis]]
        of_method = named.get("method", {}).get("variants", {}).get(axes.get("variant"), {})
        variant = merge(named.pop("variant", {}), of_method)
        method = axes.get("method")
        rate = {"training": {"lr": self.lr[method]}} if method in self.lr else {}
        of_model = named.get("model", {}).get("methods", {}).get(method, {})
        table = reduce(merge, [*named.values(), rate, of_model, variant], self.recipe)
        table = scaled(table, variant.get("times", {}))
        table = reduce(merge, [nested(axis, value) for axis, value in axes.items() if axis not in NAMED], table)
        other = ("title", "methods", "variants", "times")
        table = {name: part for name, part in table.items() if name not in other}
        # runs and trials of a search draw held-out rows in one order, whatever their seeds
        return merge({"data": {"seed": 0}} if self.choice else {}, table | {"seed": seed})


def options_of(kind: type[Options], experiment: Experiment) -> Options:
    """The options of an experiment's output as a record, with _ for spaces; FedKSeedError where one is unknown."""
    table = {name.replace(" ", "_"): value for name, value in experiment.options.items()}
    if unknown := table.keys() - {f.name for f in fields(kind)}:  # pyright: ignore[reportArgumentType] — a dataclass
        raise FedKSeedError(f"the experiment {experiment.name} has the unknown option {min(unknown)!r}; leave it out")
    return kind(**table)


def names() -> list[str]:
    """The names of all experiments."""
    return sorted(path.stem for path in shipped(FOLDER).glob("*.toml") if path.stem != COMMON)


def load(name: str, scale: str) -> Experiment:
    """An experiment at a scale; FedKSeedError where there is none, or a key is unknown, or a method has two rates."""
    require_choice("experiment", name, names())
    require_choice("scale", scale, SCALES)
    tree: Tree = {}
    for table in _parts(name):
        scales = table.pop("scales", {})
        tree = merge(merge(tree, table), scales.get(scale, {}))
    if unknown := tree.keys() - {f.name for f in fields(Experiment)}:
        raise FedKSeedError(f"the experiment {name} has the unknown key {sorted(unknown)[0]!r}")
    methods = tree["methods"].items()
    if twice := sorted(m for m, table in methods if m in tree["lr"] and "lr" in table.get("training", {})):
        # [lr] would win without a word, and a run take a rate that its file does not seem to have
        raise FedKSeedError(
            f"the experiment {name} gives the method {twice[0]} two rates: [methods.{twice[0]}] has training.lr, and "
            f"[lr] of it or of {COMMON}.toml another; keep the one in [lr] or [scales.{scale}.lr]"
        )
    return Experiment(name=name, scale=scale, **tree)


def _parts(name: str) -> list[Tree]:
    """The tables that make an experiment: the common one, those that `like` names, and its own, each over the last."""
    table = _read(name)
    if name == COMMON:
        return [table]
    if (like := table.pop("like", COMMON)) not in (COMMON, *names()):
        raise FedKSeedError(f"the experiment {name} is like {like!r}, which is none; there are {', '.join(names())}")
    return [*_parts(like), table]


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """The tables `under` with those of `over` merged into them, in all depths; other values of `over` replace."""
    both = {k: v for k, v in over.items() if isinstance(v, dict) and isinstance(under.get(k), dict)}
    return {**under, **over, **{k: merge(under[k], v) for k, v in both.items()}}


def scaled(table: Mapping[str, Any], factors: Mapping[str, Any]) -> Tree:
    """The table with its numbers multiplied by the factors, which lie in tables of the same names."""
    scaled_table = dict(table)
    for k, f in factors.items():  # 6e-07, not 5.99999999e-07
        scaled_table[k] = scaled(table[k], f) if isinstance(f, dict) else float(f"{table[k] * f:.6g}")
    return scaled_table


def nested(path: str, value: Any) -> Tree:
    """The nested tables in which a dotted name has a value."""
    head, _, below = path.partition(".")
    return {head: nested(below, value) if below else value}


def short(axis: str) -> str:
    """The paper's letter for an axis, or the last part of its dotted name."""
    return LETTERS.get(axis, axis.rpartition(".")[2])


def fingerprint(recipe: Recipe) -> str:
    """A hash of a recipe's values that change a run; without the defaults, so that a new key changes no hash."""
    changed = recipe.model_dump(exclude_defaults=True, exclude={"save": True, "clients": {"at_once": True}})
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:10]


def filled(table: Any, given: Mapping[str, str]) -> Any:
    """A table, or a value of one, with the paths given in place of `$model` and the like; FedKSeedError without one."""
    if isinstance(table, dict):
        return {name: filled(value, given) for name, value in table.items()}
    if isinstance(table, str) and table.startswith("$"):
        name, slash, below = table[1:].partition("/")
        if name not in given:
            instead = ", or --public, the text to make it of" if name == "basis" else ""
            raise FedKSeedError(f"this experiment needs a path: give --{name}{instead}")
        return given[name] + slash + below
    return table


def _read(name: str) -> Tree:
    path = shipped(FOLDER) / f"{name}.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise FedKSeedError(f"{path} is not valid TOML: {error}") from error
