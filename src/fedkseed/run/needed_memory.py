"""The memory that a run takes at most, predicted from its model and recipe, and a refusal where it is not there.

A phase takes the tensors that exist at the same time. SMALL, FREED and LIBRARIES are measured: benchmarks/memory.py
--predicted shows how far off it all is. docs/engine.md has the formula.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isqrt

from ..data.batches import Encoded
from ..data.federated import ClientShares
from ..directions import FAMILIES
from ..errors import FedKSeedError
from ..models.hidden_states import ROOM as OUTPUT_ROOM
from ..models.load import skeleton
from ..models.loss import LOGITS_AT_ONCE, MANY_LOGITS, SLICES
from ..models.sizes import Architecture, sizes_of
from ..models.tail import room
from ..recipe.algorithms import ADAM, ONE, OUTPUT, TWO, Algorithm, algorithm_of
from ..recipe.schema import Recipe
from ..weights.free_memory import available
from ..weights.lazy import TILE

GB = 1e9
LIBRARIES = 620_000_000  # bytes of PyTorch, transformers, compiled kernels, threads: 0.56 to 0.77 GB in memory.md
SMALL = 45_000_000  # bytes of what has no term: a tokenizer's tables, rotary tables, blocks of the libraries
FREED = 1.25  # times the tensors of a pass back, kept by glibc when freed; with blocks or checkpointing it can't
TILES = 3 * 4 * TILE  # bytes of a matrix that is made in parts, of its sum and its gradient
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
BLOCK_BITS = {"Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5.0}  # of a weight


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of data: the tokens of the longest, the most that are predicted of one, and the tokens of all."""

    tokens: int
    predicted: int
    every: int = 0

    @classmethod
    def of(cls, encoded: Iterable[Encoded]) -> "Rows":
        rows = [(len(row.tokens), len(row.tokens) - row.counted[0][0]) for row in encoded] or [(0, 0)]
        tokens, predicted = zip(*rows, strict=True)
        return cls(max(tokens), max(predicted), sum(tokens))


@dataclass(frozen=True, slots=True)
class NeededMemory:
    """Bytes that a run takes at most, beside LIBRARIES and SMALL."""

    lasting: dict[str, int]  # what stays, by what it is for; "weights" are w_0
    phases: dict[str, int]  # what one phase takes and gives back
    mapped: bool  # whether w_0 is a file's pages, which the system may drop and read again

    @property
    def total(self) -> int:
        """Bytes of all processes together, the libraries among them."""
        return LIBRARIES + SMALL + sum(self.lasting.values()) + max(self.phases.values())

    @property
    def unavoidable(self) -> int:
        """Bytes of `total` without the libraries of this process, which are loaded, and pages that may be dropped."""
        return self.total - LIBRARIES - self.mapped * self.lasting["weights"]

    def __str__(self) -> str:
        parts = {"libraries": LIBRARIES} | self.lasting | self.phases
        said = ", ".join(f"{name} {size / GB:.2f}" for name, size in parts.items() if size >= GB / 200)
        return f"{self.total / GB:.2f} GB ({said})"


def predict(
    recipe: Recipe, sizes: Architecture, rows: Rows, held_out: Rows | None = None, cohort: int = 0, tuned: int = 0
) -> NeededMemory:
    """The most memory that the process of a client needs, or that of a run with all its clients.

    Args:
        rows: the clients'.
        held_out: rows that are evaluated.
        cohort: clients of a round, whose server is in the process, too; 0: a client alone.
        tuned: number of weights that are tuned; 0: as the algorithm and [model] last_layers say.
    """
    algorithm, options, table = algorithm_of(recipe.training.algorithm), recipe.model, recipe.evaluation
    size, dense, more = BYTES[options.dtype], options.storage == "dense", held_out or Rows(0, 0)
    chooses = "choice" in table.measured
    tuned = tuned or sizes.tuned(algorithm.tuned, recipe.peft, options.last_layers)
    bits = BLOCK_BITS.get(options.storage, 8 * size)
    weights = sizes.stored if options.storage == "as stored" else int(sizes.weights * bits / 8)
    mapped = options.storage == "as stored" or (dense and sizes.stored_as == options.dtype)
    # what is read is the largest matrix twice in float32, and a dense model where blocks are made
    loading = 0 if mapped else 8 * sizes.output + (0 if dense else sizes.weights * size)
    if algorithm.pooled:
        copies = tuned * {"materialized": size, "in place": 4}.get(_mode(recipe), 0)  # w; a float32 sum
    else:  # the exact numbers, and those that a replayed round begins from
        exact = algorithm.local in (ONE, TWO) or (size < 4 and not algorithm.adapts)
        copies = 4 * tuned * (exact + algorithm.strategy.remembers)
    remembered = 0
    if options.last_layers is not None:
        tokens = rows.every + more.every * (1 + chooses)  # an evaluation's losses and choices each remember theirs
        remembered = min(room(recipe.clients.at_once), tokens * sizes.hidden * size)
    elif algorithm.local == OUTPUT and not sizes.tied:
        remembered = min(OUTPUT_ROOM, rows.every * sizes.hidden * size)
    # what comes down stays until the upload is written: values, their bytes, and these with their check
    message = 0 if algorithm.pooled or algorithm.strategy.remembers else 4 * tuned
    caches = table.batch_size * (more.tokens + table.max_new_tokens * bool(table.generated))
    caches *= 2 * sizes.shared * sizes.layers * size * bool(more.tokens)
    some = table.batch_size * more.predicted  # losses need logits of a few tokens at a time, accuracy those of all
    some = some if "accuracy" in table.measured else min(some, MANY_LOGITS // sizes.vocabulary)
    evaluation = _pass(sizes, size, table.batch_size * more.tokens, some) + caches * chooses
    phases = {
        "loading": loading, "a step": message + _step(recipe, algorithm, sizes, rows, tuned), "messages": 4 * message,
        "an evaluation": max(evaluation, caches * bool(table.generated)),
    }  # fmt: skip
    process = copies + remembered + max(phases.values())
    lasting = {"weights": weights, "copies": copies, "remembered rows": remembered}
    # w at the start, w now, its bytes; 16 bytes a weight of an exact sum
    lasting["the server"] = 7 * message if cohort else 0
    if (count := recipe.clients.at_once) > 1:
        lasting[f"{count} processes more"] = count * (LIBRARIES + SMALL + process + (not mapped) * weights)
    return NeededMemory(lasting, phases, mapped)


def _mode(recipe: Recipe) -> str:
    """The way in which `weights.modes.hold` holds the weights."""
    directions, mode = recipe.directions, recipe.model.mode
    if mode != "auto":
        return mode
    return "factored" if directions.factored else "streamed" if FAMILIES[directions.family].transform else "in place"


def _step(recipe: Recipe, algorithm: Algorithm, sizes: Architecture, rows: Rows, tuned: int) -> int:
    """Bytes of a local step beside all weights and their copies."""
    batch, size, mode = recipe.training.batch_size, BYTES[recipe.model.dtype], _mode(recipe)
    tokens = batch * rows.tokens
    # of tokens that count, where those of all from the first one on would be many
    logits = max(batch * rows.predicted * sizes.vocabulary, min(tokens * sizes.vocabulary, MANY_LOGITS))
    if algorithm.tuned in ("prompt", "p-tuning"):
        tokens += batch * recipe.peft.virtual_tokens
    backpropagates = algorithm.backpropagates or recipe.clients.backpropagating > 0
    if not backpropagates and algorithm.local != OUTPUT:
        beside = algorithm.pooled and mode != "materialized"  # the other point of a step
        return _pass(sizes, size, (1 + beside) * tokens, batch * rows.predicted) + TILES
    again = backpropagates and recipe.derivatives.checkpointing
    kept = logits * (4 + 3 * size) / (SLICES if again else 1)  # the softmax; gradients as they are cut and joined
    if backpropagates:
        of_layer, layers = _kept(recipe, algorithm, sizes, size), recipe.model.last_layers or sizes.layers
        kept += tokens * (layers * sizes.hidden * size + of_layer if again else layers * of_layer)
    gradients = TILES
    if not algorithm.pooled:
        gradients = tuned * (4 + (size < 4) * size + 8 * (algorithm.local == ADAM))
    elif mode == "materialized":
        gradients = sizes.output * size  # of the largest tensor
    return int(kept * (1 if again or recipe.model.storage != "dense" else FREED) + gradients)


def _kept(recipe: Recipe, algorithm: Algorithm, sizes: Architecture, size: int) -> int:
    """Bytes of a token and layer that a pass back needs: inputs of products, and the norms' in float32."""
    numbers = 2 * sizes.attention + 2 * sizes.shared + 3 * sizes.intermediate
    if algorithm.pooled and recipe.directions.factored:  # no gradient of a weight, but of its factors
        numbers += 2 * sizes.hidden + 16 * isqrt(recipe.directions.size)
    elif algorithm.tuned == "all":
        numbers += 4 * sizes.hidden + sizes.intermediate
    elif "lora" in algorithm.tuned:
        numbers += sizes.hidden
    return size * numbers + 8 * sizes.hidden


def _pass(sizes: Architecture, size: int, tokens: int, predicted: int) -> int:
    """Bytes of a forward pass: a layer's activations, all logits, and losses of some of them."""
    of_layer = 3 * sizes.hidden + max(2 * sizes.attention + 2 * sizes.shared, 3 * sizes.intermediate)
    logits = predicted * sizes.vocabulary
    return tokens * of_layer * size + logits * size + 8 * min(logits, LOGITS_AT_ONCE)


def require_room(recipe: Recipe, shares: ClientShares, cohort: int) -> NeededMemory | None:
    """Refuse a run, or a client's part of it, that needs more memory than there is, before its model is loaded.

    Returns:
        what it needs, see `needed_by`; None where the sizes of its model can't be read.

    Raises:
        FedKSeedError: it can't fit.
    """
    needed = needed_by(recipe, shares, cohort)
    there = available(recipe.model.device)
    if needed is not None and needed.unavoidable > there:
        raise FedKSeedError(
            f"this run needs {needed}, and {there / GB:.2f} GB are free; set [clients] at_once or [training] "
            "batch_size to less, [derivatives] checkpointing = true, [model] storage = 'Q4_0' (of a GGUF file "
            "'as stored') or [directions] family = 'hadamard', or take an algorithm that sends no weights"
        )
    return needed


def needed_by(recipe: Recipe, shares: ClientShares, cohort: int = 0) -> NeededMemory | None:
    """The memory of a recipe with its rows, see `predict`; None where the sizes of its model can't be read.

    Args:
        cohort: clients of a round; 0: a client alone, which evaluates nothing.
    """
    try:
        sizes, tuned = sizes_of(recipe.model.name), _named(recipe)
    except FedKSeedError:
        return None
    held_out = [shares.held_out, *(each.examples for each in shares.sets.values())] if cohort else []
    of_clients, of_sets = (Rows.of(row for rows in parts for row in rows) for parts in (shares.clients, held_out))
    return predict(recipe, sizes, of_clients, of_sets, cohort, tuned)


def _named(recipe: Recipe) -> int:
    """The number of the weights that [model] tuned names; 0 where it names none, or last_layers says it."""
    patterns = recipe.model.tuned
    if patterns is None or recipe.model.last_layers is not None or algorithm_of(recipe.training.algorithm).adapts:
        return 0
    named = skeleton(recipe.model.name).named_parameters()
    return sum(p.numel() for name, p in named if any(fnmatchcase(name, pattern) for pattern in patterns))
