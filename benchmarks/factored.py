"""Steps that make no weights: two points, several probes at once, and derivatives, beside bare passes and LoRA's step.

    python benchmarks/factored.py [--tokens 32 128] [--batch 1 4] [--storage dense "as stored"] [--rank 4] [--json]

Every way takes turns with two bare forward passes of the dense model and, where it backpropagates, with a step of
LoRA (peft, rank 8 in every linear layer: one pass forward and backward, no optimiser). Informed directions come from
random factors of one rank in every matrix; time does not depend on their values. Every token but the first counts as
response, so all logits are computed.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from fedkseed.data.batches import Batch
from fedkseed.directions import Pool
from fedkseed.directions.factors import Basis, Factor, Matrix
from fedkseed.models.load import STORAGES, load_model
from fedkseed.models.loss import batch_loss, graph_loss, graph_losses
from fedkseed.models.peft_adapters import attach
from fedkseed.recipe.schema import PeftTable
from fedkseed.weights.base import Pooled
from fedkseed.weights.factored import FactoredWeights
from fedkseed.weights.layout import Layout
from fedkseed.weights.modes import hold
from peers import EPS, inference
from step import make_batch
from table import MODEL, Row, best_of, new_parser, show

Job: TypeAlias = Callable[[], object]
WAYS = (("streamed", "hadamard"), ("factored", "separable"), ("factored", "informed"), ("factored", "mixed"))
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def random_basis(layout: Layout, rank: int) -> Basis:
    """Random factors of one rank for every tensor."""
    rng, factors, first = np.random.default_rng(0), dict[str, Factor](), 0
    for name, shape in layout.shapes.items():
        matrix = Matrix.of(shape)
        r = min(rank, matrix.rows, matrix.columns)
        left, right = (rng.integers(-127, 128, (n, r)).astype(np.int8) for n in (matrix.rows, matrix.columns))
        scales = (np.full(r, 1 / 70 / np.sqrt(n), np.float32) for n in (matrix.rows, matrix.columns))
        factors[name] = Factor(matrix.rows, matrix.columns, first, left, right, *scales)
        first = factors[name].directions.stop
    return Basis(factors)


def held(model: nn.Module, way: tuple[str, str], rank: int, size: int = 4096) -> Pooled:
    """The weights w(c) in a mode and family, with c as after some rounds; a basis has a size K of its own."""
    mode, family = way
    basis = random_basis(Layout(model), rank) if family in ("informed", "mixed") else None
    if basis is not None:
        size = basis.size if family == "informed" else 1 << (basis.size - 1).bit_length()
    weights = hold(model, Pool(1, size, family, b"" if basis is None else basis.digest()), mode=mode, basis=basis)
    weights.load(np.random.default_rng(1).normal(size=size) * (1e-7 if basis is None else 1e-4))
    return weights


def measure(args: argparse.Namespace, storage: str) -> Iterator[Row]:
    """Rows of one storage."""
    plain = load_model(args.model, device=args.device)
    for way in WAYS:
        model = load_model(args.model, storage=storage, device=args.device)
        weights = held(model, way, args.rank)
        for examples, tokens in product(args.batch, args.tokens):
            batch = make_batch(examples, tokens, args.device)
            jobs = ours(model, weights, batch, args.probes, storage == "dense")
            yield row(args, ", ".join(way), storage, batch, plain, jobs)
        weights.restore()


def ours(model: nn.Module, weights: Pooled, batch: Batch, probes: int, differentiates: bool) -> dict[str, Job]:
    """The jobs of weights in R^K on a batch, by name."""
    jobs: dict[str, Job] = {"two points": lambda: weights.both(1, EPS, lambda: batch_loss(model, batch))}
    if isinstance(weights, FactoredWeights):
        some = [weights.c + np.float32(k * 1e-6) for k in range(-probes, probes)]
        jobs["many points"] = lambda: weights.points(some, lambda: batch_loss(model, batch))
    if differentiates:
        jobs["derivatives"] = lambda: weights.gradient(lambda: graph_loss(model, batch))
    if differentiates and isinstance(weights, FactoredWeights):
        jobs["of each example"] = lambda: weights.gradients(lambda: graph_losses(model, batch), len(batch.tokens))
    return jobs


def row(
    args: argparse.Namespace, way: str, storage: str, batch: Batch, plain: nn.Module, jobs: Mapping[str, Job]
) -> Row:
    """Times over those of two bare forwards; of many points, for each pair of them."""
    bare = inference(plain, batch)
    seconds = best_of(args.repeats, {"bare": lambda: (bare(), bare()), **jobs}, args.device, within=args.seconds)
    ratios = {name: seconds[name] / seconds["bare"] for name in jobs}
    if "many points" in ratios:
        ratios["many points"] /= args.probes
    about: Row = {"way": way, "storage": storage, "tokens": f"{len(batch.tokens)} x {batch.tokens.shape[1]}"}
    about |= {"two bare forwards (s)": seconds["bare"]}
    return about | {n: ratios.get(n, "") for n in ("two points", "many points", "derivatives", "of each example")}


def lora(args: argparse.Namespace) -> Iterator[Row]:
    """LoRA's steps, beside two bare forwards."""
    plain, model = (load_model(args.model, device=args.device) for _ in range(2))
    tuned = adapted(model)
    for examples, tokens in product(args.batch, args.tokens):
        batch = make_batch(examples, tokens, args.device)
        jobs = {"derivatives": partial(lora_step, tuned, batch)}
        yield row(args, "LoRA, rank 8, linear layers", "dense", batch, plain, jobs)


def adapted(model: nn.Module) -> nn.Module:
    """The model with LoRA of rank 8 in every linear layer, ready for its steps."""
    tuned = attach(model, "lora", PeftTable(rank=8, targets=[*LINEAR]), 0)
    for name, parameter in tuned.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return tuned


def lora_step(tuned: nn.Module, batch: Batch) -> None:
    """One pass forward and backward; gradients are dropped."""
    with torch.enable_grad():
        graph_loss(tuned, batch).backward()
    for parameter in tuned.parameters():
        parameter.grad = None


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--storage", choices=STORAGES, nargs="+", default=["dense"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rank", type=int, default=4, help="of the informed families' random factors")
    parser.add_argument("--probes", type=int, default=8, help="pairs of points that are computed as one batch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=7, help="repeats, of which the fastest counts")
    parser.add_argument("--seconds", type=float, default=6, help="time limit of a row; two repeats are always done")
    args = parser.parse_args()
    found = [row for storage in args.storage for row in measure(args, storage)] + list(lora(args))
    title = f"{args.model}: over two bare forwards; many points: {2 * args.probes} at once, for each pair of them"
    show(title, found, as_json=args.json)


if __name__ == "__main__":
    main()
