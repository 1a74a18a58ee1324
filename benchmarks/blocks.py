"""Seconds to read quantised weights: a tile over a copy of its float32 result, and a linear layer over a dense one.

A step is two points of the layer along a hadamard direction, streamed, K = 4,096, over two passes of the dense layer.

    python benchmarks/blocks.py [--tokens 128] [--repeats 20] [--json] [--out FILE]

One thread, float32; random bytes with scales of 0.01. The tile has 2^20 weights, the layer 8,960 x 1,536, as those of
Qwen2.5-1.5B. Each is the least of `repeats` passes over all types, in turns. --out writes the table as Markdown.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear

from fedkseed import Pool, hold
from fedkseed.directions.numba_cpu.gguf import LAYOUTS
from fedkseed.models.quantised import PLAIN, Blocks
from fedkseed.weights.lazy import Lazy, Workspace
from table import Row, best_of, commit, machine, markdown, new_parser, show

ROWS, COLUMNS = 8960, 1536
TILE = 1 << 20  # weights
SCALE = np.array([0.01], np.float16)


def blocks(kind: str) -> NDArray[np.uint8]:
    """The layer's bytes in a type."""
    rng = np.random.default_rng(0)
    if kind in PLAIN:
        return rng.integers(32, 60, (ROWS, COLUMNS * 2), np.uint8)  # finite, and none is subnormal, which is slow
    layout = LAYOUTS[kind]
    raw = rng.integers(0, 256, (ROWS * COLUMNS // layout.weights, layout.size), np.uint8)
    for first in (layout.d, layout.d + 2) if layout.m else (layout.d,):
        raw[:, first : first + 2] = SCALE.view(np.uint8)
    return raw.reshape(ROWS, -1)


def step_of(source: Blocks, x: Tensor) -> Callable[[], object]:
    """Both points of a step of the layer alone, whose loss is one of its numbers."""
    layer = nn.Linear(COLUMNS, ROWS, bias=False, device="meta")
    layer.weight = Lazy(source, Workspace())
    weights = hold(layer, Pool(1, 4096, "hadamard"), mode="streamed")
    weights.load(np.random.default_rng(1).normal(size=4096) * 1e-7)
    return partial(weights.both, 2048, 1e-3, lambda: float(layer(x)[0, 0]))


@torch.inference_mode()
def measure(tokens: int, repeats: int) -> list[Row]:
    x, dense, out = torch.randn(tokens, COLUMNS), torch.randn(ROWS, COLUMNS), torch.empty(TILE // COLUMNS, COLUMNS)
    sources = {kind: Blocks(blocks(kind), kind, (ROWS, COLUMNS), torch.float32) for kind in (*LAYOUTS, *PLAIN)}
    tiles = {kind: partial(source.read, [(0, out)]) for kind, source in sources.items()}
    layers = {kind: partial(linear, x, Lazy(source, Workspace())) for kind, source in sources.items()}
    steps = {kind: step_of(source, x) for kind, source in sources.items()}
    tile = best_of(repeats, {"copy": partial(out.copy_, dense[: len(out)]), **tiles})
    layer = best_of(repeats, {"dense": partial(linear, x, dense), **layers})
    step = best_of(repeats, {"dense": lambda: [linear(x, dense) for _ in range(2)], **steps})
    return [
        {
            "type": kind, "bits a weight": 8 * source.raw.numel() / dense.numel(), "ms a tile": 1e3 * tile[kind],
            "over a copy": tile[kind] / tile["copy"], "ms a layer": 1e3 * layer[kind],
            "over dense": layer[kind] / layer["dense"], "ms a step": 1e3 * step[kind],
            "over two passes": step[kind] / step["dense"],
        }
        for kind, source in sources.items()
    ]  # fmt: skip


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="file for the table in Markdown")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(args.tokens, args.repeats)
    title = f"quantised weights, one thread, {args.tokens} tokens"
    show(title, rows, as_json=args.json)
    if args.out:
        about = ", ".join(f"{name} {value}" for name, value in machine().items())
        head = (
            f"# Reading quantised weights\n\n`python benchmarks/blocks.py --out {args.out.name}`, {args.tokens} tokens,"
        )
        args.out.write_text(f"{head}\ncommit {commit()}: {about}.\n\n{markdown(rows)}")


if __name__ == "__main__":
    main()
