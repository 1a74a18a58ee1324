"""Peak memory of `fedkseed.Trainer` beside a bare forward pass of the same model and batch, and transformers' Trainer.

    python benchmarks/trainer.py [--config smollm2-135m] [--tokens 128] [--ways forward …] [--json]

Each row has a process of its own, as in memory.py: it trains a tiny model first, which loads the libraries, the
compiled kernels and the threads; the memory resident then is the baseline, which is subtracted. The process then makes
a Llama model of random weights, takes `STEPS` steps, and records the highest memory over `STEPS` further ones, from the
beginning of `train()` to its end. The forward pass is `model(**batch)` with labels, without gradients and without a
cache, as transformers computes the loss. Needs Linux. A GB is 10^9 bytes.
"""

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments, logging

import fedkseed
from fedkseed.planning.memory import Meter
from memory import CONFIGS, apart, build
from table import Row, new_parser, show

STEPS = 3
FORWARD = "forward pass"
STEPS_OF = {"Trainer, two points": "two points", "Trainer, derivatives, Adam": "adam"}
BACKWARD = "transformers' Trainer, AdamW"
WAYS = (FORWARD, *STEPS_OF, BACKWARD)


def work(way: str, model: nn.Module, tokens: int, folder: str) -> Callable[[], object]:
    """A function that takes `STEPS` steps, or makes as many forward passes."""
    numbers = torch.arange(tokens) % 4096
    rows: Any = [{"input_ids": numbers, "labels": numbers}] * STEPS
    if way == FORWARD:
        bare, batches = partial(model, use_cache=False), [{k: v[None] for k, v in row.items()} for row in rows]
        return torch.inference_mode()(lambda: [bare(**row).loss.item() for row in batches])
    args = TrainingArguments(
        folder, max_steps=STEPS, learning_rate=1e-6, per_device_train_batch_size=1, save_strategy="no", use_cpu=True,
        disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    if way == BACKWARD:
        model.requires_grad_(True)
        trainer: Any = Trainer(model, args, train_dataset=rows)
    else:
        trainer = fedkseed.Trainer(model, rows, args=args, eps=1e-3, steps_of=STEPS_OF[way], tuned="*")
    trainer.remove_callback(PrinterCallback)
    return trainer.train


def measure(way: str, config: str, dtype: str, tokens: int) -> tuple[float, float]:
    """Bytes of the baseline, and the most bytes above it during the steps."""
    logging.set_verbosity_error()
    meter = Meter()
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):  # a trainer's words, which are not the table's
        work(way, build(CONFIGS["tiny"], dtype), tokens, folder)()
        baseline = meter.now()
        steps = work(way, build(CONFIGS[config], dtype), tokens, folder)
        steps()
        meter.now()  # gives back what is not in use
        with meter.watch():
            steps()
    return baseline, meter.peak - baseline


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--config", choices=CONFIGS, default="smollm2-135m", help="the shape of the model")
    parser.add_argument("--types", choices=("float32", "bfloat16"), nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS, help="beside the forward pass")
    args = parser.parse_args()
    rows: list[Row] = []
    for dtype in args.types:
        ways = dict.fromkeys((FORWARD, *args.ways))
        found = {way: apart(measure, way, args.config, dtype, args.tokens) for way in ways}
        for way, (baseline, peak) in found.items():
            row: Row = {"way": way, "type": dtype, "GB": peak / 1e9, "over the forward pass": peak / found[FORWARD][1]}
            rows.append(row | {"baseline, GB": baseline / 1e9})
    show(f"the shape of {args.config}, 1 x {args.tokens} tokens, K = 4,096", rows, as_json=args.json)


if __name__ == "__main__":
    main()
