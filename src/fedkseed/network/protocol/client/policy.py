"""The owner's policy: the limits of what a server's recipe may ask of a client.

A recipe chooses rows and steps, and each answer says something of the rows, so that a recipe is a question about them.
Without a file the defaults below hold; recipes/policy.toml has all of them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import contains, ge, le
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator

from ....errors import FedKSeedError
from ....recipe.algorithms import ALGORITHMS, CHANGE, algorithm_of
from ....recipe.reading import from_file, typed
from ....recipe.schema import Category, Count, Layout, Positive, Recipe, Table, Template

Column = Literal["instruction", "response", "context", "category", "messages", "text"]


class RowLimits(Table):
    """The view of the client's file: the owner's, and no server's."""

    # Field -> its name in the file, or a list of those in several files.
    columns: dict[Column, str | Annotated[list[str], Field(min_length=1)]] = Field(default_factory=dict)
    layout: Layout | None = None  # None: the one that fits the columns of the file
    leave_out_faulty: bool = False  # rows that can't be read are left out and counted; else they refuse the file
    # Categories that a recipe may hold out. The number of examples travels, so each one more tells a server how many
    # rows have it; any value of any column would tell whether that value is there.
    held_out: tuple[Category, ...] = ("summarization",)
    templates: tuple[Template, ...] = get_args(Template)  # all: they are fixed texts around the same rows
    # Between a prompt and its response: with a text of the server's choice there, which value is in the rows shows in
    # the loss.
    separators: tuple[str, ...] = ("\n", "")
    # With fewer, or fewer than the smallest batch, the client takes no part; it replaces [clients] min_examples.
    min_examples: Count = 10
    max_tokens: Count = 2048  # the largest [data] max_tokens
    # Different choices of held_out, template, separator, protocol, max_tokens, algorithm, objective, seed, [directions]
    # and [model] tuned that are answered as long as the state directory lives. Two that differ by one row show what it
    # adds; other directions show other parts of a gradient.
    max_views: Count = 3
    secret_batches: bool = True

    def way_of_reading(self) -> dict[str, Any]:
        """The settings by which the file is read, whatever a recipe says of them."""
        return self.model_dump(include={"columns", "layout", "leave_out_faulty"}) | {"strict": False}


class WorkLimits(Table):
    """The local steps that the client takes for a server."""

    # Those that send scalars or K numbers, and hold weights that are a function of K numbers. The others send weights:
    # after a step they are the gradient, and the rows of the embedding that have one are the example's tokens. With
    # `uplink-seeds` clients hold whatever weights the server sends.
    algorithms: tuple[str, ...] = ("fedkseed", "fedkseed-pro", "fedkseed-plus", "fedkseed-backprop")
    min_batch_size: Count = 4  # scalars of a batch of 1 tell whether a text is in it: AUC 1.000, of 4 0.650
    max_batch_size: Count = 64
    min_steps: Count = 4  # K numbers of one step are those of one batch
    max_steps: Count = 10_000  # and epochs
    max_probes: Count = 256  # of a step; each says more of the same batch
    max_numbers: Count = 16_384  # of an answer of scalars or coefficients
    max_rounds: Count = 1000
    # Tuned weights for each of the K directions. [model] tuned can choose few weights d; as many numbers along known
    # directions are their exact gradient. Of K numbers, the share K / d of its square norm can be seen: 1 %.
    weights_per_direction: Count = 100
    # The most that all answers together, of all runs, may spend of an epsilon at this delta, by noise of clients alone:
    # this one's, or that of the members that its owner lists. None: recipes without [privacy] are answered, too.
    epsilon: Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    masked: bool = False  # answer recipes with [secure] alone: the server then sees the sum of a round's answers
    max_seconds: Positive = 3600.0  # of a task, loading the model included; looked at between two passes of the model

    @field_validator("algorithms")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [name for name in names if name not in ALGORITHMS]:
            raise ValueError(f"no algorithm is called {unknown[0]!r}; choose of {', '.join(ALGORITHMS)}")
        return names


class Unseen(Table):
    """The rows that the client never trains on, by which its owner learns whether it gained."""

    # About this share of the rows, by a hash of their text: the same ones in every run, whatever a recipe says.
    kept_back: Annotated[float, Field(gt=0, lt=1)] | None = None
    examples: Annotated[int, Field(ge=2)] = 200  # of them that are evaluated, at most
    metrics: tuple[Literal["accuracy", "choice"], ...] = ()  # beside the loss; docs/evaluation.md
    # Whether a server that asks is sent their number and the sum of their changes of the loss, once a run, if there are
    # at least 10; never where a recipe has [secure] or [privacy], which promise that single answers stay hidden.
    send: bool = False


class Policy(Table):
    """All that the owner of a client decides about the recipes of servers."""

    data: RowLimits = RowLimits()
    training: WorkLimits = WorkLimits()
    evaluation: Unseen = Unseen()

    def require(self, recipe: Recipe) -> None:
        """Refuse a recipe that asks for more than the owner allows.

        Raises:
            FedKSeedError: it does; the text names the recipe's key and the policy's, for the owner.
        """
        rows, work, data, training = self.data, self.training, recipe.data, recipe.training
        own, further = recipe.derivatives.steps, recipe.evaluation.categories
        least, most = min(training.steps, own or training.steps), max(training.steps, own or 0, training.epochs or 0)
        limits: list[tuple[str, Any, Callable[[Any, Any], bool], Any, str]] = [
            ("[data] columns", [{}, rows.columns], contains, data.columns, "columns"),
            ("[data] held_out", rows.held_out, contains, data.held_out, "held_out"),
            *(("[evaluation.sets] held_out", rows.held_out, contains, name, "held_out") for name in further),
            ("[data] template", rows.templates, contains, data.template, "templates"),
            ("[data] separator", rows.separators, contains, data.separator, "separators"),
            ("[data] max_tokens", rows.max_tokens, ge, data.max_tokens, "max_tokens"),
            ("[training] algorithm", work.algorithms, contains, training.algorithm, "algorithms"),
            ("[training] batch_size", work.min_batch_size, le, training.batch_size, "min_batch_size"),
            ("[training] steps", work.min_steps, le, least, "min_steps"),
            ("[training] batch_size", work.max_batch_size, ge, training.batch_size, "max_batch_size"),
            ("[training] steps", work.max_steps, ge, most, "max_steps"),
            ("[training] probes", work.max_probes, ge, training.probes, "max_probes"),
            ("[training] rounds", work.max_rounds, ge, training.rounds, "max_rounds"),
        ]
        for name, allowed, fits, asked, key in limits:
            if not fits(allowed, asked):
                raise _refusal(name, asked, f"{key} = {list(allowed) if fits is contains else allowed}")
        # After the limit of algorithms: what is found here would load one from a file.
        if (numbers := numbers_of(recipe)) > work.max_numbers:
            raise _refusal("numbers of an answer", numbers, f"max_numbers = {work.max_numbers}")
        if work.masked and recipe.secure is None:
            raise _refusal("uploads without masks, [secure]", None, "masked = true")
        if work.epsilon is not None:
            self._require_private(recipe, work.epsilon)

    def _require_private(self, recipe: Recipe, epsilon: float) -> None:
        """Refuse a recipe whose whole run would spend more than the owner allows."""
        privacy, delta = recipe.privacy, self.training.delta
        if privacy is None or privacy.times is None or (privacy.unit == "client" and recipe.secure is None):
            raise _refusal("uploads without [privacy], or with noise of the server's", None, f"epsilon = {epsilon:g}")
        if privacy.unit == "example":  # whose noise this client finds itself, from these two
            kept = privacy.epsilon is not None and privacy.epsilon <= epsilon and privacy.delta <= delta
            found = privacy.epsilon
        else:
            from ....secure.accounting import epsilon_of

            found = math.inf if privacy.noise is None else epsilon_of(privacy.noise, privacy.times, delta)
            kept = found <= epsilon * (1 + 1e-9)
        if not kept:
            raise _refusal("[privacy] epsilon", found, f"epsilon = {epsilon:g}, delta = {delta:g}")

    def require_weights(self, recipe: Recipe, weights: int) -> None:
        """Refuse a recipe whose answers have too many numbers for as few tuned weights, the model being loaded.

        Raises:
            FedKSeedError: it is one; the text names the recipe's key and the policy's, for the owner.
        """
        pooled, each = algorithm_of(recipe.training.algorithm).pooled, self.training.weights_per_direction
        numbers = recipe.directions.size if pooled else numbers_of(recipe)
        if weights < each * numbers:
            allowed = f"weights_per_direction = {each}, and [model] tuned, or last_layers, chooses {weights:,} weights"
            raise _refusal("numbers along directions", numbers, allowed)

    def followed(self, recipe: Recipe) -> Recipe:
        """The recipe with the owner's columns, layout, smallest number of examples, and evaluation.

        It is not strict: a refusal of repeated rows would tell that there are some.
        """
        least = max(self.data.min_examples, self.training.min_batch_size)  # a batch holds no more than all examples
        own = {"examples": self.evaluation.examples, "metrics": list(self.evaluation.metrics), "generated": 0}
        own |= {"batch_size": min(recipe.evaluation.batch_size, self.training.max_batch_size)}
        return recipe.having(data=self.data.way_of_reading(), clients={"min_examples": least}, evaluation=own)


def load_policy(path: Path) -> Policy:
    """Read an owner's policy.

    Raises:
        FedKSeedError: the file is missing, is no TOML, has an unknown key or a value that is not allowed.
    """
    return from_file(path, "the policy", partial(typed, Policy))


def numbers_of(recipe: Recipe) -> int:
    """The scalars or coefficients in a client's answer; 0 for an algorithm that sends weights."""
    algorithm, training = algorithm_of(recipe.training.algorithm), recipe.training
    scalars = training.steps * training.probes if algorithm.up == "scalars" else 0
    if algorithm.up == CHANGE or recipe.clients.backpropagating > 0:
        return max(scalars, recipe.directions.size)
    return scalars


@dataclass(frozen=True, slots=True)
class RowView:
    """The choices of a recipe that decide which rows it sees, as which tokens, and along which directions.

    Old entries of a journal lack the last ones; what they were is not known, and they count as views all the same.
    """

    held_out: str
    template: str
    separator: str
    protocol: str
    max_tokens: int
    algorithm: str = ""
    objective: str = ""
    pool: str = ""  # with its key, which follows from the recipe's seed
    tuned: str = ""

    @classmethod
    def of(cls, recipe: Recipe) -> "RowView":
        data, training = recipe.data, recipe.training
        held_out = ", ".join(map(str, (data.held_out, *recipe.evaluation.categories)))
        template = f"{data.template} of {data.date}" if data.date else data.template
        rows = held_out, template, data.separator, data.protocol, data.max_tokens
        tuned, last = str(recipe.model.tuned), recipe.model.last_layers
        tuned += f", {last}, {recipe.model.head}" if last else ""
        return cls(*rows, training.algorithm, training.objective, str(recipe.pool), tuned)


def _refusal(name: str, asked: object, allowed: str) -> FedKSeedError:
    return FedKSeedError(
        f"the server's recipe asks for {name} = {asked!r}, the policy says {allowed}; "
        "to allow it, change that in the file of --policy"
    )
