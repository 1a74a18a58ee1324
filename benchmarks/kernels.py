"""Sync to w(c): our kernels beside PyTorch and beside a plain copy, in one run on one machine.

    python benchmarks/kernels.py [--weights 134515008] [--size 4096] [--dtype float32] [--json]

A sync sums K directions, and one pass in place adds a single one. What would take too long is timed
for a few directions and scaled to K; the table says where. Rows of PyTorch are float32 and work
through tensors of `TENSOR` weights, as in a model: on one tensor of half a gigabyte the paper's way
takes two to three times as long, because each temporary is fresh memory. The weight decay of the
paper's code, a further pass over the weights even when it is zero, is left out.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedkseed.directions import FAMILIES, Pool
from fedkseed.directions.operations import accumulate_, materialize, project
from table import Row, best_of, show

TENSOR = 1 << 20  # weights; a matrix in a layer of SmolLM2-135M has 110,592 to 884,736
SAMPLE = {"gaussian": 16, "rademacher": 128}  # directions timed; scaling their one pass too adds some 4-8 %
COPY, EFFICIENT = "PyTorch: plain copy", "PyTorch: the paper's more efficient way"
STEP = 1e-6  # size of a coefficient: weights stay ordinary numbers however often they are moved


@dataclass(frozen=True, slots=True)
class Job:
    """One row: `run` does `timed` of the `directions` that the row is about."""

    what: str
    run: Callable[[], object]
    timed: int = 1
    directions: int = 1


def pytorch(w: Tensor, z: Tensor, out: Tensor, size: int) -> list[Job]:
    """Rows of PyTorch.

    Source: Qin et al., 2024, "Further Optimization on Updating Models": both ways of syncing
    """
    rng = torch.Generator()
    tensors, buffer = list(w.split(TENSOR)), torch.empty(min(TENSOR, w.numel()))

    def paper() -> None:
        rng.manual_seed(1)
        for k, tensor in enumerate(tensors):
            noise = torch.normal(0.0, 1.0, tensor.shape, generator=rng)
            tensors[k] = tensor - 1e-3 * (1e-3 * noise)

    def efficient() -> None:
        for seed in range(2):
            rng.manual_seed(seed)
            for tensor in w.split(TENSOR):
                noise = buffer[: tensor.numel()].normal_(generator=rng)
                tensor.add_(noise, alpha=-STEP)

    return [
        Job(COPY, lambda: out.copy_(w)),
        Job("PyTorch: w.add_(z, alpha), z at hand", lambda: w.add_(z, alpha=-STEP)),
        Job("PyTorch: the paper's way", paper, 1, size),
        Job(EFFICIENT, efficient, 2, size),
    ]


def ours(w: Tensor, v: Tensor, out: Tensor, size: int) -> list[Job]:
    """Rows of ours: the sync and one direction in every family, the projection in the fast ones."""
    c = np.random.default_rng(1).normal(size=size).astype(np.float32) * np.float32(STEP)
    pools = [Pool(1, size, family) for family in FAMILIES]

    def sync(pool: Pool) -> Job:
        name = f"{pool.family}: sync"
        if pool.family not in SAMPLE:
            return Job(name, lambda: materialize(w, pool, c, out), size, size)
        few = np.arange(min(SAMPLE[pool.family], size))
        return Job(name, lambda: accumulate_(out, pool, few, c[few]), few.size, size)

    def one(pool: Pool) -> Job:
        return Job(f"{pool.family}: one direction in place", lambda: accumulate_(out, pool, [size // 2], [STEP]))

    def projection(pool: Pool) -> Job:
        return Job(f"{pool.family}: project", lambda: project(v, pool), size, size)

    fast = [pool for pool in pools if pool.family not in SAMPLE]
    return [*map(sync, pools), *map(one, pools), *map(projection, fast)]


def measure(weights: int, size: int, dtype: torch.dtype, repeats: int) -> list[Row]:
    """Time everything on `weights` weights and K = `size` directions."""
    # Filled, not `zeros`: untouched zeros are one shared page, and reading that is no reading at all.
    w, z, out = torch.full((weights,), 0.02), torch.full((weights,), 0.5), torch.full((weights,), 0.02)
    base, target = w.to(dtype), out.to(dtype)
    for job in ours(base[: 1 << 14], z[: 1 << 14], target[: 1 << 14], size):
        job.run()  # compiles
    jobs = [*pytorch(w, z, out, size), *ours(base, z, target, size)]
    seconds = best_of(repeats, {job.what: job.run for job in jobs})
    one_efficient = next(seconds[job.what] / job.timed for job in jobs if job.what == EFFICIENT)

    def row(job: Job) -> Row:
        took = seconds[job.what] * job.directions / job.timed
        part = "all" if job.timed == job.directions else f"{job.timed}, scaled"
        return {
            "what": job.what,
            "directions": f"{job.directions:,}",
            "timed": part,
            "seconds": took,
            "G elements/s": weights * job.directions / took / 1e9,
            "faster than the efficient PyTorch (times)": one_efficient * job.directions / took,
            "plain copies": took / seconds[COPY],
        }

    return [row(job) for job in jobs]


def main() -> None:
    parser = argparse.ArgumentParser(description="Our kernels beside PyTorch and a plain copy.")
    parser.add_argument("--weights", type=int, default=134_515_008, help="d; SmolLM2-135M's by default")
    parser.add_argument("--size", type=int, default=4096, help="K, a power of two")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of our rows")
    parser.add_argument("--repeats", type=int, default=5, help="the best of so many")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = measure(args.weights, args.size, getattr(torch, args.dtype), args.repeats)
    title = f"{args.weights:,} weights, {args.size:,} directions; ours in {args.dtype}, PyTorch in float32"
    show(f"{title}; best of {args.repeats}", rows, as_json=args.json)


if __name__ == "__main__":
    main()
