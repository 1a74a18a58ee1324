"""The setup of a recipe on this machine: model, weights, algorithm; clients, servers and simulations each hold one."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from ..data.batches import Encoded, endless_batches, private_batches
from ..data.held_out import HeldOut
from ..data.tokenizer_digest import require_tokenizer
from ..directions.factors import Basis
from ..errors import FedKSeedError
from ..evaluation.evaluate import evaluate
from ..evaluation.metrics import Metrics
from ..evaluation.objectives import Objective, objective_of
from ..evaluation.statistics import NOT_EVALUATED, Evaluation
from ..files import folder
from ..local.client import Client
from ..models.dtypes import note_if_slow
from ..models.hidden_states import KeptStates, can_keep_states, remember
from ..models.known_losses import losses, with_losses
from ..models.load import load_model, load_tokenizer, require_causal, save_model, save_tokenizer
from ..models.loss import checkpointable, checkpointed, graph_loss, output_loss, output_weights
from ..models.peft_adapters import PATTERNS, attach, lora_size
from ..models.tail import last_layers, room, tail_of
from ..randomness import Purpose, generator, share_of
from ..recipe.algorithms import OUTPUT, Algorithm, algorithm_of
from ..recipe.rules import Where, checked_algorithm, require_legal
from ..recipe.schema import VALIDATION, Recipe
from ..strategy import Strategy
from ..weights.adapter import Adapter
from ..weights.base import Pooled, Weights
from ..weights.full import FullWeights
from ..weights.layout import Layout
from ..weights.modes import hold
from ..weights.streamed import InPlace
from ..wire.records import Run
from .loop import Finished, provenance
from .privacy_plan import private_steps
from .progress import Progress, Silent
from .store import Store

if TYPE_CHECKING:
    from ..secure.member import MaskingClient


@dataclass(slots=True)
class Stopwatch:
    """A stopwatch for single local steps; a client's first step, which includes its sync, is not counted."""

    steps: list[float] = field(default_factory=list)
    last: float | None = None

    def tick(self) -> None:
        now = time.perf_counter()
        if self.last is not None:
            self.steps.append(now - self.last)
        self.last = now


def tokenizer_of(recipe: Recipe, progress: Progress) -> Any:
    """The tokenizer of a recipe's model, loaded first: data errors then show before a minute of loading weights.

    Raises:
        FedKSeedError: the recipe can't be followed, or the tokenizer is another than it says.
    """
    # not what only a run needs, as the norm of [secure]: a basis is made for a recipe before `tune` finds its norm
    require_legal(recipe, Where.ALWAYS, Where.ALGORITHM, algorithm=algorithm_of(recipe.training.algorithm))
    objective_of(recipe.training.objective, recipe.evaluation.max_new_tokens)
    progress.note(f"loading the tokenizer of {recipe.model.name}")
    tokenizer = load_tokenizer(recipe.model.name)
    require_tokenizer(tokenizer, recipe.model.tokenizer_digest, recipe.data.template, recipe.model.name)
    return tokenizer


@dataclass(slots=True)
class Setup:
    """A recipe's model, algorithm and loss on this machine; made by `build`.

    Attributes:
        recipe: what is followed; of a run that begins, with the losses of its base model.
        strategy: the algorithm; `strategy.server.init()` is the state before the first round.
        weights: the model's weights, which training and syncs change.
        patterns: patterns of the tuned tensors' names.
        basis: the factors of the directions, for the families that need them.
        remembered: the loss of clients that take derivatives of the output layer, where nothing before it is tuned.
    """

    recipe: Recipe
    algorithm: Algorithm
    tokenizer: Any
    model: nn.Module
    weights: Weights
    patterns: tuple[str, ...]
    strategy: Strategy[Any]
    objective: Objective
    progress: Progress
    basis: Basis | None = None
    remembered: KeptStates | None = None

    def client(
        self,
        number: int,
        count: int,
        examples: Sequence[Encoded],
        on_step: Callable[[float], None],
        secret: int | None = None,
        member: "MaskingClient | None" = None,
        noise: bytes = b"",
    ) -> Client[Any]:
        """Client `number` of `count`, with its examples.

        Args:
            secret: seed of the batches; None: the recipe's, which others know.
            member: its keys, where uploads are masked.
            noise: secret from which the noise of its steps follows, where single examples are protected.
        """
        recipe, graph = self.recipe, self.graph_of(number, count)
        steps = self.strategy.settings.work(graph is not None).steps
        private = private_steps(recipe, number, len(examples), steps, noise)
        drawn = endless_batches if private is None else private_batches

        def batches(round_: int) -> Iterator[Any]:
            rng = generator(recipe.seed if secret is None else secret, Purpose.BATCHES, round_, number)
            return drawn(examples, recipe.training.batch_size, self.tokenizer.pad_token_id, rng)

        loss = partial(self.objective, self.model, self.tokenizer)
        return Client(number, self.weights, len(examples), batches, loss, on_step, graph, member, private)

    def graph_of(self, number: int, count: int) -> Callable[[Any], Tensor] | None:
        """The loss that client `number` of `count` differentiates; None for a client that takes no derivatives."""
        share = self.recipe.clients.backpropagating
        if self.algorithm.backpropagates or number in share_of(self.recipe.seed, count, share):
            return self._graph_of_all_layers
        if self.algorithm.local != OUTPUT:
            return None
        return partial(output_loss, self.model) if self.remembered is None else self.remembered.loss

    def _graph_of_all_layers(self, batch: Any) -> Tensor:
        with checkpointed(self.model) if self.recipe.derivatives.checkpointing else nullcontext():
            return graph_loss(self.model, batch)

    def load(self, state: Any) -> float:
        """Set the model's weights to those of a state; returns the seconds taken."""
        start = time.perf_counter()
        self.strategy.load(state, self.weights)
        return time.perf_counter() - start

    def score(self, held_out: Sequence[Encoded], what: str, write: bool, metrics: Metrics) -> Evaluation:
        """Score the model as it is on held-out examples; `write` the answers that the recipe asks for."""
        options = self.recipe.evaluation
        generated = options.generated if write and metrics.written else 0
        self.progress.begin(what, metrics.work(held_out, generated))
        sizes = {"generated": generated, "max_new_tokens": options.max_new_tokens, "batch_size": options.batch_size}
        parts = self.model, self.tokenizer, held_out
        return evaluate(*parts, metrics=metrics, on_progress=self.progress.advance, **sizes)

    def save(self, state: Any, store: Store) -> Path | None:
        """Write the model of a state into a run's directory: coefficients, adapters or all weights."""
        self.load(state)
        if self.algorithm.pooled:
            self.held(state.round).save(store.adapter)
            return store.adapter
        if not self.recipe.save:
            return None
        with folder(store.model) as part:
            save_model(self.model, part)
            save_tokenizer(self.tokenizer, part)
        return store.model

    def adapter(self, state: Any) -> Adapter:
        """The model of a state as an adapter, if it is a function of K coefficients; the weights are set to it."""
        self.load(state)
        return self.held(state.round)

    def held(self, rounds: int) -> Adapter:
        """The model as it is after some rounds, if it is a function of K coefficients, as an adapter."""
        weights, origin = self.weights, provenance(self.recipe, rounds)
        if not isinstance(weights, Pooled):
            algorithm = self.recipe.training.algorithm
            raise FedKSeedError(f"the model of {algorithm} is not a function of K coefficients; use save()")
        base, digest = weights.base_digest.hex(), weights.digest().hex()
        return Adapter(weights.pool, weights.c.copy(), base, digest, self.patterns, origin, self.basis)


def build(
    recipe: Recipe,
    tokenizer: Any,
    basis: Basis | None,
    *,
    serves: bool,
    begins: bool = False,
    progress: Progress | None = None,
    keys: Mapping[int, bytes] | None = None,
    secret: bytes = b"",
) -> Setup:
    """Load a recipe's model, put its weights under the recipe's pool of directions, and make its algorithm.

    Args:
        tokenizer: from `tokenizer_of`.
        basis: from `with_basis`, as the recipe.
        serves: whether this party aggregates; a server of weights holds a copy of them.
        begins: whether `recipe` of what is returned states the losses of the base model: that of a run that begins.
        keys: public keys of the clients, where uploads are masked.
        secret: of a server that adds noise.

    Raises:
        FedKSeedError: the model can't be loaded or tuned as the recipe says, or its digest or losses are not those of
            [model].
    """
    algorithm, options, progress = checked_algorithm(recipe), recipe.model, progress or Silent()
    progress.note(f"loading the model {options.name}")
    model = load_model(options.name, options.dtype, options.storage, options.device)
    require_causal(model, options.name)
    note_if_slow(options.dtype, options.device, progress.note)
    known = losses(model) if begins or options.losses is not None else None  # before anything is added to it
    patterns: Sequence[str] = PATTERNS.get(algorithm.tuned, ())
    if algorithm.adapts:
        model = attach(model, algorithm.tuned, recipe.peft, recipe.seed, options.last_layers)
    else:
        patterns = tuned_patterns(recipe, algorithm, model)
    pool, start = algorithm.pool(recipe), np.empty(0, np.float32)
    if algorithm.pooled:
        weights: Weights = hold(model, pool, patterns, options.mode, basis)
    else:
        weights = full = FullWeights(Layout(model, patterns), pool)
        start = full.values() if serves else start
    if options.digest not in (None, weights.base_digest.hex()):
        raise FedKSeedError(
            f"[model] digest is {options.digest}, the base model {options.name} has {weights.base_digest.hex()}: load "
            "the same weights in the same type, or pin the recipe to these: fedkseed pin RECIPE"
        )
    recipe = with_losses(recipe, known)
    if recipe.derivatives.checkpointing:
        checkpointable(model)  # refuse before anything is evaluated
    tensors = tuple((entry.number, entry.tensor.numel()) for entry in weights.layout.tuned)
    strategy = algorithm.make(recipe, Run(pool, weights.base_digest), start, tensors, keys, secret)
    objective = objective_of(recipe.training.objective, recipe.evaluation.max_new_tokens)
    if options.last_layers is not None:
        require_moving(weights, basis)
        found = remember(model, weights, room(recipe.clients.at_once))
        once = f"the layers before the last {options.last_layers} run once a row"
        progress.note(f"every pass runs all layers: {found}" if isinstance(found, str) else once)
    kept = KeptStates(model) if algorithm.local == OUTPUT and can_keep_states(model, weights.layout) else None
    parts = recipe, algorithm, tokenizer, model, weights, tuple(patterns), strategy, objective
    return Setup(*parts, progress, basis, kept)


def tuned_patterns(recipe: Recipe, algorithm: Algorithm, model: Any) -> list[str]:
    """Patterns of the names of the weights that a recipe tunes, where it tunes no adapters.

    Raises:
        FedKSeedError: the model has no such layers, or the recipe names other weights beside its last layers.
    """
    options = recipe.model
    if options.last_layers is None:
        every = output_weights(model) if algorithm.tuned == "output" else ["*"]
        return every if options.tuned is None else options.tuned
    patterns = last_layers(model, options.last_layers, options.head)
    if options.tuned not in (None, patterns):
        raise FedKSeedError(
            f"[model] tuned names {options.tuned}, and last_layers = {options.last_layers} tunes {patterns}: give one"
        )
    return patterns


def require_moving(weights: Weights, basis: Basis | None) -> None:
    """Refuse a basis with directions of tensors that are not tuned: they would cost numbers and change nothing."""
    dead = set(weights.pool.tensors or ()) - {entry.number for entry in weights.layout.tuned}
    if basis is not None and dead:
        raise FedKSeedError(
            f"the basis has directions of {len(dead)} tensors that are not tuned, as "
            f"{weights.layout.entries[min(dead)].name}: make one for this recipe: fedkseed basis"
        )


@dataclass(frozen=True, slots=True)
class WithModel:
    """The evaluator of a party that holds the model: scores and saves it, and computes its digest."""

    setup: Setup
    held_out: Sequence[Encoded]  # empty: nothing is scored
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    metrics: Metrics = field(default_factory=Metrics)  # none but the loss
    sets: Mapping[str, HeldOut] = field(default_factory=dict)  # the others, by name

    def evaluate(self, state: Any, what: str, write: bool) -> Evaluation:
        if not self.held_out:
            return NOT_EVALUATED
        self.setup.load(state)
        evaluation = self.setup.score(self.held_out, what, write, self.metrics)
        for name, held_out in self.sets.items():
            metrics = replace(self.metrics, options=held_out.options)
            writes = write and name != VALIDATION  # which chooses by metrics of predictions
            scores = self.setup.score(held_out.examples, f"{what}, {name}", writes, metrics)
            evaluation.sets[name] = replace(scores, owners=held_out.owners)
        return evaluation

    def finish(self, state: Any, store: Store) -> Finished:
        setup = self.setup
        if (tail := tail_of(setup.model)) is not None and tail.left_out:
            said = f"{tail.left_out:,} of {tail.passes:,} passes of the first layers"
            setup.progress.note(f"{said} found no room in memory for their states, and are made again each time")
        if isinstance(setup.weights, InPlace) and setup.weights.again:
            said = f"sums of {setup.weights.again:,} weights were made again for clients that begin with the same model"
            setup.progress.note(f"{said}: memory has no room to keep them")
        output = setup.save(state, store)
        seconds = None if setup.algorithm.strategy.remembers else setup.load(state)
        lora = lora_size(setup.weights.layout.shapes) if setup.algorithm.pooled else None
        digest, size = setup.weights.digest().hex(), setup.weights.layout.size
        return Finished(output, self.stopwatch.steps, seconds, size, digest, lora)
