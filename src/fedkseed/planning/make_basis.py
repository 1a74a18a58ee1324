"""A basis of directions: the leading singular vectors of a model's mean gradient on public examples.

Gradients of different texts have much in common, so vectors from public text hold more of a client's gradient than
random ones do. The loss is far steeper along some of them than along others, and the steepest limit the learning rate
of all; so each is made shorter the steeper it is on the same text.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.batches import Encoded, collate
from ..data.encoder import Encoder
from ..data.natural_instructions import subsample
from ..data.sources import Reader
from ..data.split import OwnedRow, rows_of
from ..directions.factors import Basis, Factor, Matrix
from ..directions.pool import Pool
from ..errors import FedKSeedError
from ..models.dtypes import with_dtype
from ..models.known_losses import losses, require_losses
from ..models.load import load_model
from ..models.loss import graph_loss
from ..randomness import Purpose, generator
from ..recipe.algorithms import algorithm_of
from ..recipe.schema import Recipe
from ..run.progress import Progress
from ..run.setup import tokenizer_of, tuned_patterns
from ..weights.layout import Layout
from ..weights.lazy import Lazy
from ..weights.modes import hold

INT8_LIMIT = 127  # of int8; −128 is not used, so that a column and its negative are alike
MAX_RANK = 64  # rank of one tensor, at most
OVERDRAWN = 8  # times the examples wanted are tokenised: some are longer than the limit


def make_basis(
    model: nn.Module,
    patterns: Sequence[str],
    examples: Sequence[Encoded],
    *,
    size: int,
    pad: int,
    rank: int | None = None,
    about: dict[str, Any] | None = None,
    on_example: Callable[[], None] = lambda: None,
) -> Basis:
    """Factors of the tuned tensors of a model whose weights are dense.

    Ranks are shared out so that the singular values squared, per coefficient, that the next rank of a tensor adds are
    as large as can be: rank r of a tensor takes r² coefficients, so the next one takes 2 r + 1.

    Args:
        size: K, the most coefficients of all tensors together.
        pad: the token that fills up batches.
        rank: the same rank for every tensor instead (less for a tensor that has less), as far as `size` goes.

    Raises:
        FedKSeedError: there are no examples, the model is quantised, or no gradient is finite and above 0.
    """
    layout = Layout(model, patterns)
    if not examples:
        raise FedKSeedError("a basis is made from examples; the data has none within the token limit")
    if any(isinstance(entry.tensor, Lazy) for entry in layout.tuned):
        raise FedKSeedError("a basis is made from gradients, which dense weights have: set [model] storage = 'dense'")
    vectors = {name: leading(g) for name, g in gradients(model, layout, examples, pad, on_example)}
    ranks = shared_out({name: values for name, (_, values, _) in vectors.items() if len(values)}, size, rank)
    if not ranks:
        raise FedKSeedError("no gradient of the examples is finite and above 0; is the loss one of the tuned weights?")
    factors, first = dict[str, Factor](), 0
    for name in sorted(ranks):
        outputs, _, inputs = vectors[name]
        (u, su), (v, sv) = quantised(outputs[:, : ranks[name]]), quantised(inputs[:, : ranks[name]])
        factors[name] = Factor(len(u), len(v), first, u, v, su, sv)
        first = factors[name].directions.stop
    return Basis(factors, about or {})


def rescaled(basis: Basis, slopes: NDArray[np.float64]) -> Basis:
    """The basis with other scales of its columns, so that the loss is about as steep along each direction.

    F_j = mean over examples of (∂L/∂c_j)² is the diagonal of the empirical Fisher matrix, which stands in for the
    curvature. Direction (a, b) of a tensor is multiplied by l_a r_b: log l_a + log r_b is the least-squares fit to
    −½ log F_ab over the tensor, up to a constant that is the same for all tensors and makes the geometric mean of
    F_j^−½ 1. F_j counts as 10⁻⁶ of the median of those above 0, at least.

    Args:
        slopes: of each example along each direction, at c = 0, shape (N, K).

    Raises:
        FedKSeedError: no example has finite slopes that are not all 0.
    """
    steep = np.square(slopes[np.isfinite(slopes).all(1)]).sum(0)  # N F: a factor drops out
    if not steep.any():
        raise FedKSeedError("no example has finite slopes above 0, which give directions their scales; use --no-scaled")
    logs = -0.5 * np.log(np.maximum(steep, 1e-6 * np.median(steep[steep > 0])))
    logs -= logs.mean()
    factors = dict[str, Factor]()
    for name, factor in basis.factors.items():
        of_tensor = logs[factor.directions].reshape(factor.ranks)
        rows, columns = np.exp(of_tensor.mean(1)), np.exp(of_tensor.mean(0) - of_tensor.mean())
        left, right = factor.left_scale * rows, factor.right_scale * columns
        factors[name] = replace(factor, left_scale=left.astype(np.float32), right_scale=right.astype(np.float32))
    return Basis(factors, {**basis.about, "scaled": True})


def basis_of(
    recipe: Recipe, data: str, examples: int, rank: int | None, progress: Progress, scaled: bool = True
) -> Basis:
    """The basis for a recipe's model and number of directions, from public instruction data.

    Args:
        data: a file as `[data] source` names it, or an archive of Super-NaturalInstructions, of which each task of the
            training list gives its first example.
        examples: the most examples to use, drawn from those that are within the recipe's limit of tokens.
        rank: see `make_basis`.
        scaled: whether columns get the scales of `rescaled`; else they have length 1.

    Raises:
        FedKSeedError: the data or the model can't be read, or see `make_basis` and `rescaled`.
    """
    recipe = with_dtype(recipe, progress.note)
    options, tokenizer = recipe.model, tokenizer_of(recipe, progress)
    is_archive = ".tar" in Path(data).name
    tasks = [first for first, *_ in subsample(data, recipe.seed).clients.values()] if is_archive else []
    files = [] if is_archive else [Reader().file(data)]
    rows = [*map(OwnedRow, tasks), *rows_of(files)]
    order = generator(recipe.seed, Purpose.BASIS).permutation(len(rows))[: OVERDRAWN * examples]
    encoder = Encoder.of(recipe, tokenizer, files)
    drawn = encoder.within([rows[k] for k in order])
    encoder.note_remarks(drawn, len(order), "rows drawn", progress.note)
    chosen, pad = drawn.examples[:examples], tokenizer.pad_token_id
    model = load_model(options.name, options.dtype, "dense", options.device)
    if options.losses is not None and options.storage == "dense":
        require_losses(losses(model), options.losses, options.dtype, options.name)
    progress.begin("gradients", len(chosen) * (1 + scaled))
    name = Path(options.name).name if Path(options.name).is_absolute() else options.name
    about = {"model": name, "dtype": options.dtype, "data": Path(data).name, "examples": len(chosen)}
    about |= {"max_tokens": drawn.limit, "seed": recipe.seed, **encoder.wording.facts}
    algorithm = algorithm_of(recipe.training.algorithm)
    patterns = tuned_patterns(recipe, algorithm, model) if options.last_layers else options.tuned or ["*"]
    size, advance = recipe.directions.size, progress.advance
    basis = make_basis(model, patterns, chosen, size=size, pad=pad, rank=rank, about=about, on_example=advance)
    if not scaled:
        return basis
    weights, slopes = hold(model, Pool(0, basis.size, "informed", basis.digest()), basis=basis), list[NDArray[Any]]()
    for example in chosen:
        batch = collate([example], pad)
        loss, slope = weights.gradient(lambda batch=batch: graph_loss(model, batch))
        slopes.append(slope if isfinite(loss) else np.full_like(slope, np.nan))
        advance()
    return rescaled(basis, np.stack(slopes))


def gradients(
    model: nn.Module, layout: Layout, examples: Sequence[Encoded], pad: int, on_example: Callable[[], None]
) -> Iterator[tuple[str, Tensor]]:
    """The gradient of the mean of the examples' losses, tensor by tensor, as float32 matrices."""
    with layout.trainable() as parameters:
        for example in examples:
            with torch.enable_grad():
                loss = graph_loss(model, collate([example], pad))
                if bool(torch.isfinite(loss.detach())):
                    loss.backward()
            on_example()
        for entry, parameter in zip(layout.tuned, parameters, strict=True):
            if parameter.grad is not None:
                matrix = Matrix.of(entry.tensor.shape)
                yield entry.name, parameter.grad.float().view(matrix.rows, matrix.columns)
                parameter.grad = None


def leading(g: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The leading singular vectors and values of a matrix: (o, r), (r,), (i, r).

    They are the eigenvectors of the smaller one of GᵀG and GGᵀ, in float64.
    """
    if not bool(torch.isfinite(g).all()):
        return np.empty((len(g), 0)), np.empty(0), np.empty((g.shape[1], 0))
    wide = g.shape[1] > g.shape[0]
    tall = (g.T if wide else g).double()  # (n, m), m ≤ n
    squares, vectors = torch.linalg.eigh(tall.T @ tall)  # ascending
    squares, vectors = squares.flip(0)[:MAX_RANK], vectors.flip(1)[:, :MAX_RANK]
    above_0 = squares > 1e-12 * squares[:1].clamp(min=1e-300)  # what float64 tells from 0
    values, small = squares[above_0].sqrt(), vectors[:, above_0]
    large = tall @ small / values
    outputs, inputs = (small, large) if wide else (large, small)
    return outputs.cpu().numpy(), values.cpu().numpy(), inputs.cpu().numpy()


def shared_out(values: dict[str, NDArray[np.float64]], size: int, rank: int | None) -> dict[str, int]:
    """The rank of each tensor; tensors without one are left out.

    Args:
        values: singular values of each tensor, in descending order, MAX_RANK at most.
        size: coefficients of all tensors together, at most.
    """
    # The gain of a tensor's next rank falls with each rank, and its price grows: in sorted order no rank is skipped.
    queue = sorted(
        (r if rank else -(float(value) ** 2) / (2 * r + 1), name, r)
        for name, of_tensor in values.items()
        for r, value in enumerate(of_tensor[:rank])
    )
    ranks = dict[str, int]()
    for _, name, r in queue:
        if 2 * r + 1 <= size:  # else a smaller one may still fit
            ranks[name], size = r + 1, size - (2 * r + 1)
    return ranks


def quantised(columns: NDArray[np.float64]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Unit columns as int8 with one scale each: column = int8 · scale, to half a unit."""
    scales = (np.abs(columns).max(0) / INT8_LIMIT).astype(np.float32)
    return np.rint(columns / scales).clip(-INT8_LIMIT, INT8_LIMIT).astype(np.int8), scales
