"""Seconds of a sync to w(c) against K: fedkseed beside PyTorch and beside a plain copy, in one run on one machine.

    python benchmarks/sync.py [--weights 134515008] [--sizes 64 256 …] [--dtype float32] [--device cpu] [--json]

A sync sums K directions; rows for one direction in place and for the projections come last. Syncs that would take too
long are timed for a few directions and scaled to K: the column `timed` shows which. A plain copy, out of place, moves
the same bytes as one sync of ours, and is the lower bound. Rows of PyTorch are float32 and work through tensors of
`TENSOR` weights, as in a model: on one tensor of half a gigabyte the paper's way takes two to three times as long,
because each temporary is in new memory.

The family `gaussian` is bound by arithmetic. On a CPU a note under the table has the share of its time that its vector
instructions alone would take, if issued as fast as in a loop of nothing else on the same cores in the same run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from fedkseed.directions import FAMILIES, Pool
from fedkseed.directions.numba_cpu.simd import load_floats, number_at, store
from fedkseed.directions.numba_cpu.threads import compiled, run
from fedkseed.directions.operations import accumulate_, materialize, project
from peers import efficient_sync, paper_sync
from table import Row, best_of, new_parser, show

SIZES = [64, 256, 1024, 4096, 16384]
DEFAULT = 4096  # K of the rows that are about one direction, and of the projections
TENSOR = 1 << 20  # weights; a matrix in a layer of SmolLM2-135M has 110,592 to 884,736
SAMPLE = {"gaussian": 16, "rademacher": 128}  # directions timed; their one pass is scaled, too: 4-8 % too much
COPY, ADD = "PyTorch: plain copy", "PyTorch: w.add_(z, alpha), z at hand"
PAPER, EFFICIENT = "PyTorch: the paper's way", "PyTorch: the paper's more efficient way"
EVERYWHERE = [family.name for family in FAMILIES.values() if family.factored is None]  # no model's shapes needed
STEP = 1e-6  # size of a coefficient: weights stay ordinary numbers however often they are moved

# Instructions on 16 lanes that make 32 normals of 16 words and add them, counted from `kernels.py`:
#   normals       44: u 3, shifted 1, exponent 2, t 3, p 8, radius 6, a 3, s 1, sine 5, cosine 4, products 4, signs 4
#   accumulation   4: two multiplies and two adds
#   Philox        24: 8 of its 10 rounds depend on position and direction; each is 2 multiplies, 2 shifts and 4
#                     exclusive ors, on 2 halves of 8 wide lanes, and the words are enough for 4 times 16
# Two logic operations in a row count as one, as in AVX-512 (without that 11 more are needed); a square root counts as
# one, and loads, stores, shuffles and scalar work as none. So this is a bound from below.
NORMALS, INSTRUCTIONS = 32, 44 + 4 + 24
TURNS, TURN = 1 << 21, 16  # of the loop that measures the issue rate, and its instructions


@dataclass(frozen=True, slots=True)
class Job:
    """One row: `run` does `timed` of the row's `directions`. Jobs with the same `run` are timed once."""

    what: str
    run: Callable[[], object]
    timed: int = 1
    directions: int = 1


def coefficients(count: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=count).astype(np.float32) * np.float32(STEP)


def pytorch(w: Tensor, z: Tensor, sizes: list[int]) -> tuple[Job, list[Job], list[Job]]:
    """Jobs of PyTorch: a pass that adds a given z, and for every K the paper's way and its more efficient way."""
    noise, tensors = torch.empty_like(w[:TENSOR]), w.split(TENSOR)
    paper = partial(paper_sync, list(tensors), 1, STEP)
    efficient = partial(efficient_sync, list(tensors), noise, 2, STEP)
    papers, efficients = ([Job(PAPER, paper, 1, k) for k in sizes], [Job(EFFICIENT, efficient, 2, k) for k in sizes])
    return Job(ADD, partial(w.add_, z, alpha=-STEP)), papers, efficients


def sync(family: str, size: int, w: Tensor, out: Tensor) -> Job:
    pool, count = Pool(1, size, family), min(SAMPLE.get(family, size), size)
    if count == size:
        return Job(f"{family}: sync", partial(materialize, w, pool, coefficients(size), out), size, size)
    return Job(f"{family}: sync", partial(accumulate_, out, pool, np.arange(count), coefficients(count)), count, size)


def singles(v: Tensor, out: Tensor) -> list[Job]:
    """Jobs of one direction in every family, and of the K inner products in the fast families."""
    pools = [Pool(1, DEFAULT, family) for family in EVERYWHERE]
    ones = [Job(f"{p.family}: one direction in place", partial(accumulate_, out, p, [7], [STEP])) for p in pools]
    fast = [pool for pool in pools if pool.family not in SAMPLE]
    return [*ones, *(Job(f"{pool.family}: project", partial(project, v, pool), DEFAULT, DEFAULT) for pool in fast)]


def measure(weights: int, sizes: list[int], dtype: torch.dtype, device: str, repeats: int) -> tuple[list[Row], Row]:
    """Time all jobs on `weights` weights; returns rows and notes."""
    # `full`, not `zeros`: zeros that were never written are one shared page of memory, which is read from the cache.
    w, z, out = (torch.full((weights,), value, device=device) for value in (0.02, 0.5, 0.02))
    base, target = w.to(dtype), out.to(dtype)

    def ours(few: slice) -> tuple[list[list[Job]], list[Job]]:
        b, v, t = base[few], z[few], target[few]
        return [[sync(family, size, b, t) for family in EVERYWHERE] for size in sizes], singles(v, t)

    by_size, single = ours(slice(1 << 16))
    for job in chain(*by_size, single):
        job.run()  # compiles
    by_size, single = ours(slice(None))
    copy, (add, papers, efficients) = Job(COPY, partial(target.copy_, base)), pytorch(w, z, sizes)
    syncs = [
        job
        for paper, efficient, mine in zip(papers, efficients, by_size, strict=True)
        for job in (paper, efficient, *mine)
    ]
    jobs = [copy, add, *syncs, *single]
    seconds = best_of(repeats, {job.run: job.run for job in jobs}, device, warm=False)
    one_efficient = seconds[efficients[0].run] / efficients[0].timed

    def row(job: Job) -> Row:
        took = seconds[job.run] * job.directions / job.timed
        timed = "all" if job.timed == job.directions else f"{job.timed}, scaled"
        return {
            "what": job.what, "K": job.directions, "timed": timed, "seconds": took,
            "G elements/s": weights * job.directions / took / 1e9, "plain copies": took / seconds[copy.run],
            "times the efficient way": one_efficient * job.directions / took,
        }  # fmt: skip

    gaussian = min(seconds[job.run] / job.timed for job in syncs if job.what == "gaussian: sync")
    return [row(job) for job in jobs], bound(gaussian / weights, repeats) if device == "cpu" else {}


def bound(seconds: float, repeats: int) -> Row:
    """Notes that compare the `seconds` of one gaussian number with those of its instructions alone."""
    floats = np.ones((10, 16), np.float32)
    job = np.array([floats.ctypes.data, TURNS], np.int64)
    loop = compiled(turns)
    threads = torch.get_num_threads()
    took = best_of(repeats, {"turns": partial(run, loop, job, threads)})["turns"]
    instruction = took / TURNS / TURN
    share = instruction * INSTRUCTIONS / NORMALS / threads / seconds
    notes: Row = {"ns of a 16-lane instruction on a core": instruction * 1e9}
    return notes | {"share of its instructions alone in a gaussian sync": share}


def turns(job):
    """Multiply and add in turns, in 8 chains: enough to keep every unit of a core busy."""
    at, count = number_at(job), number_at(job + 8)
    a, m = load_floats(at), load_floats(at + 64)
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = a
    for _ in range(count):
        s0, s1, s2, s3, s4, s5, s6, s7 = s0 + a, s1 * m, s2 + a, s3 * m, s4 + a, s5 * m, s6 + a, s7 * m
        s0, s1, s2, s3, s4, s5, s6, s7 = s0 * m, s1 + a, s2 * m, s3 + a, s4 * m, s5 + a, s6 * m, s7 + a
    store(at + 128, s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--weights", type=int, default=134_515_008, help="d; SmolLM2-135M's by default")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="K, powers of two")
    types = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=types, default="float32", help="type in our rows")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=5, help="repeats, of which the fastest counts")
    args = parser.parse_args()
    rows, notes = measure(args.weights, args.sizes, getattr(torch, args.dtype), args.device, args.repeats)
    title = f"{args.weights:,} weights on {args.device}; ours and the copy in {args.dtype}, the rest in float32"
    show(f"{title}; best of {args.repeats}", rows, as_json=args.json, notes=notes)


if __name__ == "__main__":
    main()
