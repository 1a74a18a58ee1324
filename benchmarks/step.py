"""Time of a two-point local step beside that of its two bare forward passes, in one run.

    python benchmarks/step.py [--dtype float32 …] [--storage dense …] [--tokens 32 128 512] [--device cpu] [--json]

A bare pass is a forward pass of the dense model in the same type, with the loss. Every token but the first counts as
response, so all logits are computed. Each kind of step takes turns with the bare passes and is compared with them. The
last write of a round (`settle`, one pass in `τ` steps) is left out. With --last-layers, steps of the last layers alone
follow, of rows that have run through the others: by two points, and by all K derivatives. The paper's way comes last,
where dense weights are timed.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import nn

from fedkseed.data.batches import IGNORED, Batch
from fedkseed.directions import Pool
from fedkseed.errors import FedKSeedError
from fedkseed.models.hidden_states import remember
from fedkseed.models.load import DTYPES, STORAGES, load_model
from fedkseed.models.loss import batch_loss, graph_loss
from fedkseed.models.tail import last_layers
from fedkseed.weights.base import Pooled, Weights
from fedkseed.weights.modes import MODES, hold
from peers import EPS, LR, inference, paper_step
from table import MODEL, Row, best_of, new_parser, show

WAYS = [
    ("streamed", "hadamard"), ("streamed", "hashed"), ("materialized", "hadamard"),
    ("in place", "rademacher"), ("in place", "gaussian"),
]  # fmt: skip


def make_batch(examples: int, tokens: int, device: str = "cpu") -> Batch:
    """A batch of random tokens, of which all but the first of each example are predicted."""
    drawn = torch.randint(1000, (examples, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    labels = drawn.clone()
    labels[:, 0] = IGNORED
    return Batch(drawn, torch.ones_like(drawn), labels)


def held(model: nn.Module, pool: Pool, mode: str) -> Pooled:
    """The weights w(c) in a mode, with c as after some rounds; `in place` takes the same time for any c, so 0 there."""
    weights = hold(model, pool, mode=mode)
    if mode != "in place":
        weights.load(np.random.default_rng(1).normal(size=pool.size) * 1e-7)
    return weights


def our_step(model: nn.Module, weights: Weights, batch: Batch) -> Callable[[], object]:
    """One step as repeated by `zeroth_order_steps`."""
    direction = weights.pool.size // 2

    def step() -> None:
        above, below = weights.both(direction, EPS, lambda: batch_loss(model, batch))
        weights.move(direction, -LR * (above - below) / (2 * EPS))

    return step


def measure(args: argparse.Namespace, dtype: str) -> Iterator[Row]:
    """Rows of one type: fedkseed's steps in every storage and mode, then the paper's."""
    # a separate model: streaming slows down the model that is streamed
    plain = load_model(args.model, dtype, device=args.device)
    batches = [make_batch(args.batch, tokens, args.device) for tokens in args.tokens]

    def row(name: str, storage: str, batch: Batch, step: Callable[[], object]) -> Row:
        bare = inference(plain, batch)
        jobs = {"bare": lambda: (bare(), bare()), "step": step}
        seconds = best_of(args.repeats, jobs, args.device, within=args.seconds)
        about: Row = {"one step": name, "type": dtype, "storage": storage, "tokens": batch.tokens.shape[1]}
        about |= {"seconds": seconds["step"], "two bare forwards beside it": seconds["bare"]}
        return about | {"over two bare forwards": seconds["step"] / seconds["bare"]}

    for storage in args.storage:
        model = load_model(args.model, dtype, storage, args.device)
        for mode, family in WAYS:
            if mode in args.mode and (storage == "dense" or mode == "streamed"):
                weights = held(model, Pool(1, args.size, family), mode)
                for batch in batches:
                    yield row(f"{mode}, {family}", storage, batch, our_step(model, weights, batch))
                weights.restore()
    for storage, count in product(args.storage, args.last_layers):
        model = load_model(args.model, dtype, storage, args.device)
        weights = hold(model, Pool(1, args.size, "hadamard"), last_layers(model, count))
        if isinstance(why := remember(model, weights), str):
            raise FedKSeedError(f"rows run through all layers in each step: {why}")
        weights.load(np.random.default_rng(1).normal(size=args.size) * 1e-7)
        for batch in batches:
            yield row(f"streamed, hadamard, last {count} layers", storage, batch, our_step(model, weights, batch))
            derivatives = partial(weights.gradient, partial(graph_loss, model, batch))
            yield row(f"derivatives, last {count} layers", storage, batch, derivatives)
    for batch in batches if "dense" in args.storage else ():  # last, because rounding changes the weights a little
        yield row("the paper's way", "dense", batch, paper_step(plain, batch))


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--storage", choices=STORAGES, nargs="+", default=["dense"], help="of streamed weights")
    parser.add_argument("--mode", choices=MODES, nargs="+", default=list(MODES), help="modes to time")
    parser.add_argument("--last-layers", type=int, nargs="+", default=[], help="of steps that tune these alone")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128, 512], help="tokens of an example")
    parser.add_argument("--batch", type=int, default=1, help="examples a step")
    parser.add_argument("--size", type=int, default=4096, help="K, a power of two")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=7, help="repeats, of which the fastest counts")
    parser.add_argument("--seconds", type=float, default=3, help="time limit of a row; two repeats are always done")
    args = parser.parse_args()
    rows = [row for dtype in args.dtype for row in measure(args, dtype)]
    title = f"{args.model}, {args.batch} example a step, K = {args.size:,}; best of 2 to {args.repeats}"
    show(title, rows, as_json=args.json)


if __name__ == "__main__":
    main()
