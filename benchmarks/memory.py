"""Peak memory of a local step, of fedkseed and of other methods, beside plain inference with the same tokens.

    python benchmarks/memory.py [--model MODEL | --config NAME] [--tokens 128] [--methods streamed …] [--json]
    python benchmarks/memory.py --clients    only whole clients of the presets, of LoRA and of prompt tuning
    python benchmarks/memory.py --once --config llama-3b [--layers 13]    one step and one sync of large models
    python benchmarks/memory.py --predicted  beside what `run` predicts before it loads a model, without its LIBRARIES

Each row has a process of its own. The process takes a step with a tiny model first, which loads the libraries, the
compiled kernels and the threads. The memory resident then is the baseline, which is subtracted. The process then loads
the model, takes a step, and records the highest memory over `STEPS` further steps: the memory of training that goes on
for hours, without that of loading. Memory that is mapped from files counts as far as it is resident. A GB is 10^9
bytes.

With `--once` a step is a single one after loading, in bfloat16, and its peak is in two parts: pages of the model's
file, which the system may drop and read again, and all else. After it comes a sync to the c that the step led to.

A client does a whole round in place of a step: it decodes a broadcast that another process has written to a file,
syncs, takes `STEPS` local steps and encodes its upload.

Inference is one forward pass with our loss, which computes the logits of some tokens at a time, without gradients.
`bfloat16` and `float32` are the types in which weights are used; `Q4_0` and the like are the types in which they are
stored. Needs Linux, or `--device cuda`, where PyTorch's own count of the GPU's memory is read.
"""

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import repeat
from math import nan
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, logging

from factored import adapted, lora_step
from factored import held as held_factored
from fedkseed import Pool
from fedkseed.data.batches import Batch
from fedkseed.models.hidden_states import remember
from fedkseed.models.load import DTYPES, load_model
from fedkseed.models.loss import checkpointed, graph_loss
from fedkseed.models.quantised import QUANTISABLE, quantise
from fedkseed.models.sizes import sizes_of
from fedkseed.models.tail import decoder_layers, last_layers
from fedkseed.planning.memory import Meter
from fedkseed.randomness import Purpose, generator
from fedkseed.recipe.schema import Recipe
from fedkseed.round import answer
from fedkseed.run.needed_memory import LIBRARIES, Rows, predict
from fedkseed.run.setup import Setup
from fedkseed.run.setup import build as set_up
from fedkseed.weights.base import Pooled
from fedkseed.weights.modes import hold
from fedkseed.wire.codec import encode
from peers import EPS, LR, backpropagation, copied_step, inference, paper_step
from step import held, make_batch, our_step
from table import MODEL, Row, new_parser, show

STEPS = 3
TAIL = 3  # layers
POOL = Pool(1, 4096, "hadamard")
BASE = "inference"
Step = Callable[[], object]


def ours(mode: str, family: str = "hadamard") -> Callable[[nn.Module, Batch], Step]:
    pool = Pool(POOL.key, POOL.size, family)
    return lambda model, batch: our_step(model, held(model, pool, mode), batch)


def factored(family: str) -> Callable[[nn.Module, Batch], Step]:
    """A two-point step that makes no weights; `informed` has random factors of rank 4."""
    return lambda model, batch: our_step(model, held_factored(model, ("factored", family), 4), batch)


def derivatives(family: str, mode: str = "factored", *, again: bool = False) -> Callable[[nn.Module, Batch], Step]:
    """All K derivatives of a batch; `again`: with checkpointing."""

    def first(model: nn.Module, batch: Batch) -> Step:
        return gradient_step(model, held_factored(model, (mode, family), 4), batch, again)

    return first


def of_tail(step: Callable[[nn.Module, Pooled, Batch], Step]) -> Callable[[nn.Module, Batch], Step]:
    """A step of the last three layers alone, whose row has run through the others."""

    def first(model: nn.Module, batch: Batch) -> Step:
        weights = hold(model, POOL, last_layers(model, min(TAIL, len(decoder_layers(model)[1]) - 1)))
        if isinstance(why := remember(model, weights), str):
            raise RuntimeError(f"this model's rows run through all layers: {why}")
        return step(model, weights, batch)

    return first


def gradient_step(model: nn.Module, weights: Pooled, batch: Batch, again: bool = False) -> Step:
    def loss() -> Tensor:
        with checkpointed(model) if again else nullcontext():
            return graph_loss(model, batch)

    return lambda: weights.gradient(loss)


def lora(model: nn.Module, batch: Batch) -> Step:
    return partial(lora_step, adapted(model), batch)


METHODS: dict[str, Callable[[nn.Module, Batch], Step]] = {
    BASE: inference,
    "streamed": ours("streamed"),
    "materialized": ours("materialized"),
    "in place": ours("in place", "gaussian"),
    "factored, separable": factored("separable"),
    "factored, informed": factored("informed"),
    "the paper's and MeZO's way": paper_step,
    "MeZO with a copy of the weights": lambda model, batch: copied_step(model, batch, torch.bfloat16),
    "MeZO with a float32 copy": lambda model, batch: copied_step(model, batch, torch.float32),
    "backpropagation, SGD": partial(backpropagation, optimiser=torch.optim.SGD),
    "backpropagation, AdamW": partial(backpropagation, optimiser=torch.optim.AdamW),
    "derivatives, streamed, hadamard": derivatives("hadamard", "streamed"),
    "derivatives, factored, separable": derivatives("separable"),
    "derivatives, factored, informed": derivatives("informed"),
    "LoRA of rank 8, forward and backward, no optimiser": lora,
    "derivatives, last 3 layers": of_tail(gradient_step),
    "two points, last 3 layers": of_tail(our_step),
    "derivatives, streamed, hadamard, checkpointing": derivatives("hadamard", "streamed", again=True),
    "derivatives, factored, separable, checkpointing": derivatives("separable", again=True),
    "derivatives, last 3 layers, checkpointing": of_tail(partial(gradient_step, again=True)),
}
ALWAYS, FIRST_ORDER, SAFE = tuple(METHODS)[:7], tuple(METHODS)[9:], tuple(METHODS)[7:9]
# Whole clients, by the algorithm of a recipe; adapters are those of `peft`.
PRESETS = {f"client of {name}": name for name in ("fedkseed", "fedkseed-pro", "fedkseed-plus", "fedkseed-backprop")}
CLIENTS = PRESETS | {
    "LoRA, Adam (client of fedit)": "fedit",
    "prompt tuning, SGD (client of fedprompt)": "fedprompt",
    "all weights, SGD (client of fedavg)": "fedavg",
}
# What --predicted measures, and the tables of a recipe that does the same.
BACKPROP = {"training": {"algorithm": "fedkseed-backprop"}}
AS_RECIPE: dict[str, dict[str, dict[str, Any]]] = {
    "streamed": {},
    "in place": {"model": {"mode": "in place"}},
    "two points, last 3 layers": {"model": {"last_layers": TAIL}},
    "derivatives, streamed, hadamard": BACKPROP,
    "derivatives, factored, separable": BACKPROP | {"directions": {"family": "separable"}},
    "derivatives, last 3 layers": BACKPROP | {"model": {"last_layers": TAIL}},
    "derivatives, streamed, hadamard, checkpointing": BACKPROP | {"derivatives": {"checkpointing": True}},
} | {method: {"training": {"algorithm": algorithm}} for method, algorithm in CLIENTS.items()}
STORED = ("streamed", "factored, separable")  # ways that are measured with quantised weights, too
SHOWN = ("fedkseed-plus", "fedkseed-backprop", "fedit", "fedavg")
OURS = (*tuple(METHODS)[1:6], *PRESETS)

# Shapes of Llama models, by the names that `LlamaConfig` has.
SHAPE = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
)  # fmt: skip
CONFIGS = {
    "tiny": dict(zip(SHAPE, (2, 256, 512, 4, 2, 4096), strict=True)),
    "smollm2-135m": dict(zip(SHAPE, (30, 576, 1536, 9, 3, 49152), strict=True)) | {"tie_word_embeddings": True},
    "tinyllama-1.1b": dict(zip(SHAPE, (22, 2048, 5632, 32, 4, 32000), strict=True)),
    "datajuicer-1.3b": dict(zip(SHAPE, (24, 2048, 5504, 16, 16, 32000), strict=True)),  # the paper's two models
    "llama-3b": dict(zip(SHAPE, (26, 3200, 8640, 32, 32, 32000), strict=True)),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    method: str
    dtype: str
    storage: str = "dense"


def cases(methods: list[str], *, is_gguf: bool) -> list[Case]:
    """The rows to measure: inference always, for comparison, and the methods asked for."""
    storages = ["Q8_0", "Q4_0", *(["as stored"] if is_gguf else [])]
    every = [
        *(Case(method, dtype) for method in ALWAYS for dtype in ("bfloat16", "float32")),
        *(Case(way, dtype, kind) for way in STORED for kind in storages for dtype in ("bfloat16", "float32")),
        *(Case(method, "float32", "Q4_0") for method in FIRST_ORDER if method.endswith("checkpointing")),
        *(Case(method, "bfloat16") for method in SAFE),
        *(Case(method, "float32") for method in FIRST_ORDER),
        *(Case(method, dtype) for method in PRESETS for dtype in ("bfloat16", "float32")),
        *(Case(method, "float32") for method in CLIENTS if method not in PRESETS),
    ]
    return [case for case in every if case.method in (BASE, *methods)]


def predictable() -> list[Case]:
    """The cases of --predicted."""
    backprop, float32 = "derivatives, streamed, hadamard", ("two points, last 3 layers", *tuple(AS_RECIPE)[4:7])
    return [
        *(Case(method, dtype) for method in ("streamed", "in place", backprop) for dtype in ("float32", "bfloat16")),
        *(Case("streamed", "float32", storage) for storage in ("as stored", "Q4_0")),
        Case(backprop, "float32", "Q4_0"),
        *(Case(method, "float32") for method in float32),
        *(Case(method, "float32") for name, method in zip(CLIENTS.values(), CLIENTS, strict=True) if name in SHOWN),
    ]


def measure(case: Case, model: str, tokens: int, device: str, message: Path | None = None) -> tuple[float, float]:
    """Bytes of the baseline, and the most above it during the steps; `message`: a file with a client's broadcast."""
    meter = Meter(device)
    logging.set_verbosity_error()  # hides advice about GGUF
    warm_up(case, device)
    baseline = meter.now()
    step = first_step(case, model, make_batch(1, tokens, device), device, message)
    step()
    meter.now()  # gives back what is not in use
    with meter.watch():
        for _ in range(1 if case.method in CLIENTS else STEPS):
            step()
    return baseline, meter.peak - baseline


def first_step(case: Case, model: str, batch: Batch, device: str, message: Path | None) -> Step:
    """Load the model, and return the step; of a client, the round."""
    if message is None:
        return METHODS[case.method](load_model(model, case.dtype, case.storage, device), batch)
    own = party(case, model, device, serves=False)
    whole = own.client(0, 1, (), lambda loss: None)
    client = replace(whole, examples=1, batches=lambda round_: repeat(batch))
    return lambda: answer(own.strategy, message.read_bytes(), client)


def party(case: Case, model: str, device: str, *, serves: bool) -> Setup:
    """A client, or a server, of the case's algorithm."""
    return set_up(recipe_of(case, model, device), None, None, serves=serves)


def recipe_of(case: Case, model: str, device: str) -> Recipe:
    """The recipe of a case of --predicted."""
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": model, "dtype": case.dtype, "storage": case.storage, "device": device},
        "training": {"steps": STEPS, "lr": LR, "eps": EPS},
        "directions": {"size": POOL.size},
    }
    changes = AS_RECIPE[case.method]
    names = tables | changes
    return Recipe.model_validate({name: tables.get(name, {}) | changes.get(name, {}) for name in names})


def write_message(case: Case, model: str, device: str, file: Path) -> None:
    """Write the broadcast of the second round: that of the first has coefficients of 0, which nothing is made of."""
    server = party(case, model, device, serves=True)
    differentiates = server.graph_of(0, 1) is not None
    upload = server.strategy.client.example(0, 0, 1, differentiates, generator(0, Purpose.BATCHES))
    state = server.strategy.aggregate(server.strategy.server.init(), [upload])
    file.write_bytes(encode(server.strategy.server.broadcast(state)))


def warm_up(case: Case, device: str) -> None:
    """Take two steps with a tiny model."""
    if case.method in CLIENTS:
        with TemporaryDirectory() as folder:
            save(CONFIGS["tiny"], folder)
            message = Path(folder) / "message"
            write_message(case, folder, device, message)
            step = first_step(case, folder, make_batch(1, 128, device), device, message)
            step()
            step()
        return
    for kind in QUANTISABLE if case.storage == "as stored" else (case.storage,):
        tiny = build(CONFIGS["tiny"], case.dtype)
        model = tiny.to(device) if kind == "dense" else quantise(tiny, kind, device)
        step = METHODS[case.method](model, make_batch(1, 128, device))
        step()
        step()


def build(shape: dict[str, int], dtype: str = "bfloat16") -> Any:
    """A Llama model of random weights."""
    options: Any = shape
    made: Any = AutoModelForCausalLM.from_config(LlamaConfig(**options), dtype=DTYPES[dtype])
    return made.requires_grad_(False).eval()


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function that runs in a new process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(function, *args).result()


def once(mode: str, family: str, model: str, tokens: int) -> list[Row]:
    """Rows of one two-point step and of one sync, with the memory of each above the libraries."""
    meter, case = Meter("cpu"), Case(mode, "bfloat16")
    warm_up(case, "cpu")
    baseline, rows = meter.now(), list[Row]()
    libraries = mapped()
    loaded = load_model(model, case.dtype)
    weights = hold(loaded, Pool(POOL.key, POOL.size, family), mode=mode)
    step, moved = our_step(loaded, weights, make_batch(1, tokens, "cpu")), weights.layout.size
    for what, job in (("a step", step), ("a sync", lambda: weights.load(weights.c.copy()))):
        begin = perf_counter()
        with meter.watch():
            job()
        seconds, of_file = perf_counter() - begin, mapped() - libraries
        rest = meter.peak - baseline - of_file
        rows.append({
            "mode": mode, "directions": family, "weights": moved, "what": what, "peak, GB": (rest + of_file) / 1e9,
            "mapped, GB": of_file / 1e9, "beside it, GB": rest / 1e9, "bytes a weight beside it": rest / moved,
            "seconds": seconds,
        })  # fmt: skip
    return rows


def mapped() -> int:
    """Resident bytes of this process that are pages of files."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) * 1024


def beside_predicted(model: str, args: argparse.Namespace, message: Path) -> list[Row]:
    """A row for each case: the memory that it needs above the libraries, measured and predicted."""
    rows = list[Row]()
    for case in predictable() if args.model.endswith(".gguf") else []:
        print(*astuple(case), sep=", ", file=sys.stderr)
        given = (message,) if case.method in CLIENTS else ()
        if given:
            apart(write_message, case, model, args.device, message)
        _, measured = apart(measure, case, model, args.tokens, args.device, *given)
        row = Rows(args.tokens, args.tokens - 1, args.tokens)
        needed = predict(recipe_of(case, model, args.device), sizes_of(model), row)
        predicted = replace(needed, phases=needed.phases | {"loading": 0}).total - LIBRARIES
        rows.append({
            "method": case.method, "type": case.dtype, "storage": case.storage, "predicted, GB": predicted / 1e9,
            "measured, GB": measured / 1e9, "predicted over measured": predicted / measured,
        })  # fmt: skip
    return rows


def measure_all(model: str, args: argparse.Namespace, message: Path) -> list[Row]:
    needed: dict[Case, tuple[float, float]] = {}
    for case in cases(list(CLIENTS) if args.clients else args.methods, is_gguf=model.endswith(".gguf")):
        print(*astuple(case), sep=", ", file=sys.stderr)
        given = (message,) if case.method in CLIENTS else ()
        try:
            if given:
                apart(write_message, case, model, args.device, message)
            needed[case] = apart(measure, case, model, args.tokens, args.device, *given)
        except BrokenProcessPool:  # killed: this machine has too little memory for the case
            needed[case] = nan, nan

    def over(case: Case, dtype: str) -> float:
        return needed[case][1] / needed[Case(BASE, dtype)][1]

    return [
        {
            "method": case.method, "type": case.dtype, "storage": case.storage, "GB": peak / 1e9,
            "over inference in this type": over(case, case.dtype), "over 16-bit inference": over(case, "bfloat16"),
            "baseline, GB": baseline / 1e9,
        }
        for case, (baseline, peak) in needed.items()
    ]  # fmt: skip


def save(shape: dict[str, int], folder: str) -> None:
    build(shape).save_pretrained(folder)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--config", choices=CONFIGS, help="random weights of this shape instead of a model")
    parser.add_argument("--tokens", type=int, default=128)
    every = [*METHODS, *CLIENTS]
    parser.add_argument("--methods", choices=every, nargs="+", default=every, help="beside inference")
    parser.add_argument("--clients", action="store_true", help="whole clients only, beside inference")
    parser.add_argument("--once", action="store_true", help="one step and one sync, streamed and in place")
    parser.add_argument("--layers", type=int, help="of --config in place of all")
    parser.add_argument("--predicted", action="store_true", help="cases beside their predicted memory, of a GGUF file")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        model, name = args.model, args.model
        if args.config:
            layers = {} if args.layers is None else {SHAPE[0]: args.layers}
            apart(save, CONFIGS[args.config] | layers, folder)
            model, name = folder, f"the shape of {args.config}" + f", {args.layers} layers" * bool(layers)
        if args.once:
            ways = [way for way in (("streamed", "hadamard"), ("in place", "gaussian")) if way[0] in args.methods]
            rows = [row for way in ways for row in apart(once, *way, model, args.tokens)]
        else:
            rows = (beside_predicted if args.predicted else measure_all)(model, args, Path(folder) / "message")
    show(f"{name}, 1 x {args.tokens} tokens, K = {POOL.size:,}", rows, as_json=args.json)


if __name__ == "__main__":
    main()
