"""What one party makes of a recipe: model, weights, algorithm. Clients, servers and simulations are made of it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..data.batches import Encoded, endless_batches
from ..errors import FedKSeedError
from ..evaluation.evaluate import evaluate
from ..evaluation.objectives import objective_of
from ..evaluation.statistics import Evaluation
from ..files import folder
from ..local.client import Client
from ..models.load import load_model, load_tokenizer
from ..models.loss import checkpointable, checkpointed, graph_loss, output_loss, output_weights
from ..models.peft_adapters import PATTERNS, Adapters, attach
from ..randomness import Purpose, generator, share_of
from ..recipe.algorithms import OUTPUT, chosen
from ..recipe.schema import Recipe
from ..weights.adapter import Adapter
from ..weights.base import Pooled, Weights
from ..weights.full import Free
from ..weights.hold import hold
from ..weights.layout import Layout
from ..wire.records import Run
from .progress import Progress, Silent
from .store import Store

NEWCOMER = (1 << 32) - 1  # a client that has seen nothing: what it is sent gives the whole model


@dataclass(slots=True)
class Stopwatch:
    """Seconds of single local steps; a client's first step also waits for its sync."""

    steps: list[float] = field(default_factory=list)
    last: float | None = None

    def tick(self) -> None:
        now = time.perf_counter()
        if self.last is not None:
            self.steps.append(now - self.last)
        self.last = now


class Party:
    """A model, its tokenizer and an algorithm, made from a recipe; `take_model` loads the weights.

    Two steps, so that data which can't be used is refused before a minute of loading.

    Attributes:
        strategy: the algorithm; `strategy.init()` is the state before the first round.
        weights: those of the model, as they are now.
    """

    def __init__(self, recipe: Recipe, progress: Progress | None = None) -> None:
        self.recipe, self.progress = recipe, progress or Silent()
        self.algorithm = chosen(recipe)
        self.objective = objective_of(recipe.training.objective, recipe.evaluation.max_new_tokens)
        self.progress.note(f"loading {recipe.model.name}")
        self.tokenizer = load_tokenizer(recipe.model.name)
        self.stopwatch = Stopwatch()

    def take_model(self, serves: bool) -> None:
        """Load the weights, and make the algorithm for them.

        Args:
            serves: does this party aggregate? A server of weights holds a copy of them.
        """
        recipe, algorithm = self.recipe, self.algorithm
        self.model = load_model(recipe.model.name, recipe.model.dtype, recipe.model.storage, recipe.model.device)
        patterns = recipe.model.tuned
        if patterns is None:
            patterns = output_weights(self.model) if algorithm.tuned == "output" else ["*"]
        if algorithm.adapts:
            patterns = PATTERNS[algorithm.tuned]
            self.model = attach(self.model, algorithm.tuned, Adapters(**recipe.peft.model_dump()), recipe.seed)
        pool, start = algorithm.pool(recipe), np.empty(0, np.float32)
        if algorithm.pooled:
            self.weights: Weights = hold(self.model, pool, patterns, recipe.model.mode)
        else:
            self.weights = full = Free(Layout(self.model, patterns), pool)
            start = full.values() if serves else start
        self.run = Run(pool, self.weights.base_digest)
        tensors = tuple((entry.number, entry.tensor.numel()) for entry in self.weights.layout.tuned)
        self.strategy = algorithm.make(recipe, self.run, start, tensors)
        self.patterns = tuple(patterns)
        if recipe.derivatives.checkpointing:
            checkpointable(self.model)  # refuse before anything is evaluated

    def client_of(
        self, number: int, count: int, examples: Sequence[Encoded], on_step: Callable[[float], None]
    ) -> Client:
        """Client `number` of `count`, with its examples."""
        recipe = self.recipe

        def batches(round_: int) -> Iterator[Any]:
            rng = generator(recipe.seed, Purpose.BATCHES, round_, number)
            return endless_batches(examples, recipe.training.batch_size, self.tokenizer.pad_token_id, rng)

        return Client(
            number,
            self.weights,
            len(examples),
            batches,
            loss=lambda batch: self.objective(self.model, self.tokenizer, batch),
            on_step=on_step,
            graph=self.graph_of(number, count),
        )

    def graph_of(self, number: int, count: int) -> Callable[[Any], Tensor] | None:
        """What client `number` of `count` differentiates, if it does."""
        if self.algorithm.backpropagates:
            return self._graph_of_all_layers
        if number in share_of(self.recipe.seed, count, self.recipe.clients.backpropagating):
            return self._graph_of_all_layers
        if self.algorithm.local == OUTPUT:
            return lambda batch: output_loss(self.model, batch)
        return None

    def _graph_of_all_layers(self, batch: Any) -> Tensor:
        again = self.recipe.derivatives.checkpointing
        with checkpointed(self.model) if again else nullcontext():
            return graph_loss(self.model, batch)

    def score(self, state: Any, held_out: Sequence[Encoded], what: str, write: bool) -> Evaluation:
        """Score the model of a state on held-out examples; `write` the answers that the recipe asks for."""
        self.load(state)
        options = self.recipe.evaluation
        generated = options.generated if write else 0
        self.progress.begin(what, len(held_out) + generated)
        return evaluate(
            self.model,
            self.tokenizer,
            held_out,
            generated=generated,
            max_new_tokens=options.max_new_tokens,
            rouge=options.rouge,
            batch_size=options.batch_size,
            on_progress=self.progress.advance,
        )

    def load(self, state: Any) -> float:
        """Give the model the weights of a state; returns the seconds it took."""
        start = time.perf_counter()
        self.strategy.sync(self.strategy.broadcast(state, [NEWCOMER])[NEWCOMER], self.weights)
        return time.perf_counter() - start

    def save(self, state: Any, store: Store) -> Path | None:
        """Write the model of a state into a run's directory: coefficients, adapters or all weights."""
        if self.algorithm.pooled:
            self.adapter(state).save(store.adapter)
            return store.adapter
        self.load(state)
        if not self.recipe.save:
            return None
        with folder(store.model) as part:
            self.model.save_pretrained(part)  # pyright: ignore[reportCallIssue] — a module to pyright
            self.tokenizer.save_pretrained(part)
        return store.model

    def adapter(self, state: Any) -> Adapter:
        """The model of a state as a file.

        Raises:
            FedKSeedError: the algorithm's model is not a function of K coefficients.
        """
        self.load(state)
        recipe, weights = self.recipe, self.weights
        if not isinstance(weights, Pooled):
            raise FedKSeedError(
                f"the model of {recipe.training.algorithm} is not a function of K coefficients; use save()"
            )
        provenance = {
            "model": recipe.model.name,
            "dtype": recipe.model.dtype,
            "storage": recipe.model.storage,
            "template": recipe.data.template,
            "separator": recipe.data.separator,
            "algorithm": recipe.training.algorithm,
            "rounds": state.round,
            "seed": recipe.seed,
        }
        return Adapter(
            pool=weights.pool,
            coefficients=weights.c.copy(),
            base=weights.base_digest.hex(),
            tuned=weights.digest().hex(),
            patterns=self.patterns,
            provenance=provenance,
        )
