"""A recipe's tables, typed: every key, its default and its limits."""

import datetime
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias
from unicodedata import normalize

import tomli_w
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from .. import strategy
from ..directions import FAMILIES, Pool
from ..errors import FedKSeedError
from ..randomness import pool_key
from ..strategies.robust import RULES
from ..wire.records import MAX_BROADCAST
from . import own_code

VERSION = 1  # the next one reads a key otherwise than this one, or lacks it: docs/policies.md
KNOWN_LOSSES = 4  # of a model, over as many parts of a text
BEHAVIOUR = ("tokenizer_digest", "losses")  # keys of [model] with what tokenizer and model do, whatever their files are
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Dtype = Literal["float32", "bfloat16", "float16"]
Layout = Literal["instruction", "alpaca", "prompt-completion", "chat", "sharegpt", "text"]
Template = Literal["paper", "alpaca", "chat", "plain", "official-dolly", "official-ni"]


def _portion(value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not whole and not (isinstance(value, float) and 0 < value < 1):
        raise PydanticCustomError("portion", "Input should be a share of rows as 0.1, or a number of rows as 5")
    return value


def _one_of(names: Iterable[str], name: str) -> str:
    if name not in names:
        *others, last = map(repr, names)
        raise PydanticCustomError("name", "Input should be {names}", {"names": f"{', '.join(others)} or {last}"})
    return name


Portion = Annotated[int | float, BeforeValidator(_portion)]  # a number of rows, or a share of them


class Table(BaseModel):
    """A table of the recipe: unknown keys are refused, and values can't be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="after")
    def _check(self) -> Self:
        for problem in self.problems():
            raise ValueError(problem)
        return self

    def problems(self) -> Iterator[str]:
        """Sentences on keys of this table that do not go together."""
        yield from ()


def tidy(name: str) -> str:
    """A name in the one form of its characters, without space around it, so that rows and recipes have the same."""
    return normalize("NFC", name).strip().strip("\ufeff\u200b").strip()


Category = Annotated[str, AfterValidator(tidy)]


class ModelTable(Table):
    """The base model, its storage, and the part of it that is tuned."""

    name: Annotated[str, Field(description="folder, .gguf file, package:NAME/FILE.gguf, or owner/name on the hub")]
    # Of the weights when they are used; auto: bfloat16 where the first machine is as quick in it, else float32.
    dtype: Literal[Dtype, "auto"] = "float32"
    storage: Literal["dense", "as stored", "Q8_0", "Q4_0", "Q4_1"] = "dense"  # of the base weights in memory
    device: str = "auto"  # cpu, cuda, cuda:1, mps, …; auto: a GPU if there is one
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None  # of the base weights w_0: by `fedkseed pin`
    # Of what the tokenizer does: by a run or server that loads it, or by `fedkseed pin`. All parties have the same.
    tokenizer_digest: Annotated[str, Field(pattern="^[0-9a-f]{48}$")] | None = None
    # Of the base model on known tokens, in nats: by the same. The same weights have others under another config.json.
    losses: Annotated[list[float], Field(min_length=KNOWN_LOSSES, max_length=KNOWN_LOSSES)] | None = None
    tuned: list[str] | None = None  # patterns of parameter names; None: the algorithm's own choice
    # Tune the last layers and the final norm alone; the layers before run once a row. `fedkseed pin` writes `tuned`.
    last_layers: Count | None = None
    head: bool = False  # with last_layers: the output layer, too, where it has a matrix of its own
    # Where tuned weights live: docs/engine.md. Models that write to their weights need "materialized".
    mode: Literal["auto", "streamed", "materialized", "in place", "factored"] = "auto"

    def problems(self) -> Iterator[str]:
        if self.storage != "dense" and self.mode not in ("auto", "streamed", "factored"):
            yield f"weights kept {self.storage} can't be written to; set mode = 'streamed', not {self.mode!r}"
        if self.digest is not None and self.dtype == "auto":
            yield "digest is that of weights in one type: give their dtype in place of 'auto', or leave digest out"
        if self.head and self.last_layers is None:
            yield "head tunes the output layer beside the last layers; set last_layers, too, or leave it out"


class DataTable(Table):
    """The examples, their wording, and the share held out for evaluation."""

    source: str = "dolly-sample"  # a file, a folder (see [clients] split), dolly-sample or intents
    format: Literal["rows", "natural-instructions"] = "rows"  # the second is a folder of tasks
    protocol: Literal["paper", "official-code"] = "paper"  # where the two differ: see docs/data.md
    # Of rows; None: what fits the columns of each file. See docs/data.md.
    layout: Layout | None = None
    # Field (as instruction, response, category, client) -> its name in the file, or a list of those in several files.
    columns: dict[str, str | Annotated[list[str], Field(min_length=1)]] = {}
    strict: bool = False  # refuse rows without a response, repeated and too long ones, which are counted otherwise
    # true: rows that can't be read as their layout are left out and counted; else one is enough to refuse the file.
    leave_out_faulty: bool | None = None
    # Conversations get the tokenizer's chat template, where it has one and the recipe names no template.
    template: Template = "paper"
    separator: Annotated[str, Field(max_length=64)] = "\n"  # between "### Response:" and the response
    # That a chat template writes as today's, as 2026-11-26; None: the day on which a run in one process begins.
    date: datetime.date | None = None
    max_tokens: Count = 1024  # longer examples are left out; the context of the model, if that is smaller
    # A category, or a share of all rows; for data without the category of the default 0.1.
    held_out: Category | Annotated[float, Field(gt=0, lt=1)] = "summarization"
    # Of the draw of held-out rows, which runs of several seeds then share; None: the recipe's seed.
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, table: Any) -> Any:
        """Let the protocol `official-code` default to the official code's own wording."""
        if not isinstance(table, dict) or table.get("protocol") != "official-code":
            return table
        template = "official-ni" if table.get("format") == "natural-instructions" else "official-dolly"
        return {"template": template, "separator": ""} | table

    def problems(self) -> Iterator[str]:
        if (self.columns or self.layout) and self.format != "rows":
            yield "columns name the fields of rows, and layout their kind; natural-instructions has its own"


class ClientsTable(Table):
    """The clients: the split of the data over them, and the cohort that takes part in a round.

    With the splits `files`, `column` and `tasks` the data decides the number of clients: `len(shares.clients)`.
    """

    # files: a client for each file or folder in [data] source; column: for each name in the column `client`
    split: Literal["dirichlet", "even", "files", "column", "tasks"] = "dirichlet"
    count: Count | None = None  # default 200; with the last three splits their number, which a given count must equal
    cohort: Count = 10  # clients of a round
    active: Annotated[float, Field(gt=0, le=1)] | None = None  # in place of cohort: its share of all clients
    # Of a round's cohort: from all clients, or from those that have not had their turn yet.
    draw: Literal["each round", "in turns"] = "each round"  # with [privacy] in turns, unless it is given
    alpha: Positive = 0.5  # of the Dirichlet split over categories: 0.5 is uneven, 5.0 nearly even
    min_examples: Count = 10  # default with tasks 20
    backpropagating: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of clients that do, in KSeed's algorithms
    slow_share: Annotated[float, Field(ge=0, le=1)] = 0.0  # of slow clients, in virtual time: docs/algorithms.md
    slow_factor: Annotated[float, Field(ge=1)] = 10.0  # time of a slow client over that of another
    at_once: Count = 1  # number of clients that train side by side, each in a process of its own
    threads: Count | None = None  # of a client: results depend on it in their last bits; default: all / at_once

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, table: Any) -> Any:
        """Fill in the defaults that depend on the split."""
        if not isinstance(table, dict) or table.get("split") in ("files", "column"):
            return table
        return ({"min_examples": 20} if table.get("split") == "tasks" else {"count": 200}) | table

    def problems(self) -> Iterator[str]:
        if self.active is not None and self.cohort != type(self).model_fields["cohort"].default:
            yield "cohort is a number of clients and active a share of them: give one, not both"
        if self.count is not None:
            self.cohort_of(self.count)

    def cohort_of(self, count: int) -> int:
        """Size of a cohort of `count` clients: `cohort`, refused if fewer; or the share `active`, at least 1."""
        if self.active is not None:
            return max(1, int(self.active * count + 1e-9))  # 0.29 * 100 is 28.999…
        if self.cohort > count:
            raise FedKSeedError(f"a cohort of {self.cohort} can't be drawn from {count} clients")
        return self.cohort


class DirectionsTable(Table):
    """The pool of K directions of one family. The pool's key follows from the recipe's seed."""

    # hadamard, rademacher, gaussian, hashed, separable, informed or mixed: docs/directions.md.
    family: Annotated[str, AfterValidator(partial(_one_of, FAMILIES))] = "hadamard"
    size: Count = 4096  # K
    # Whether all clients of a round step along the same directions, so that their scalars align.
    shared: bool = False  # with [secure] true, unless it is given or some clients send K numbers
    basis: str | None = None  # file of `fedkseed basis`, for the families informed and mixed
    basis_digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None  # of that file; a run fills it in

    def problems(self) -> Iterator[str]:
        Pool(0, self.size, self.family, bytes(32 * self.informed))  # refuses a size that the family can't have
        if self.size > MAX_BROADCAST:
            yield f"size: at most {MAX_BROADCAST} are sent, got {self.size}"
        named_one = self.basis is not None or self.basis_digest is not None
        if self.informed and not named_one:
            yield f"the family {self.family} takes its directions from a basis: make one with `fedkseed basis`"
        if named_one and not self.informed:
            yield f"the family {self.family} has no basis: leave basis and basis_digest out"

    @property
    def factored(self) -> bool:
        """Whether directions are outer products, see `Pool.factored`."""
        return FAMILIES[self.family].factored is not None

    @property
    def informed(self) -> bool:
        """Whether a basis has the factors of the directions."""
        return FAMILIES[self.family].informed


HELD_OUT, VALIDATION = "held-out", "validation"  # the set that is always there, and the part of it that chooses
OWN_ROWS = "own rows"  # the set of [evaluation] clients
OWN_FUNCTION = "or a function of yours as 'FILE.py:FUNCTION' or 'PACKAGE.MODULE:FUNCTION'"
OBJECTIVES = ("loss", "accuracy", "exact match", "rouge")  # the built-in ones


class TrainingTable(Table):
    """The algorithm and its numbers."""

    algorithm: str = "fedkseed"  # a name of docs/algorithms.md, or FILE.py:NAME of your own: docs/extending.md
    rounds: Count = 40
    steps: Count = 200  # τ, local steps of a client in a round
    epochs: Count | None = None  # instead of steps, for algorithms that backpropagate; one epoch in the paper
    probes: Count = 1  # P, directions a step
    batch_size: Count = 1  # examples of a step
    lr: Positive | None = None  # η; None: 3e-7 for zeroth-order steps, 3e-4 for others, the paper's
    eps: Positive = 5e-4  # ε, the perturbation scale
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of η over the rounds, down to 0
    clip: Positive | None = None  # largest |ρ|; the paper has no limit
    server_lr: Positive | None = None  # factor of the mean update, default 1; in KSeed's algorithms, evofed, ferret
    server: Literal["sgd", "adam"] = "sgd"  # the optimiser that applies the mean update, in KSeed's algorithms
    wire: Literal["exact", "compact", "sign"] | None = None  # encoding of numbers; None: compact in KSeed's algorithms
    # loss, accuracy, exact match, rouge, FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION: docs/evaluation.md.
    objective: str = "loss"

    def problems(self) -> Iterator[str]:
        if self.server == "adam" and self.server_lr is None:
            yield "server = 'adam' moves each coefficient by about server_lr a round: give it, 3e-6 or so"
        if self.objective not in OBJECTIVES and not own_code.is_own(self.objective):
            yield f"objective is {', '.join(map(repr, OBJECTIVES))}, {OWN_FUNCTION}, got {self.objective!r}"


class DerivativesTable(Table):
    """The local steps of clients that take derivatives along all K directions at once."""

    optimizer: Literal["sgd", "adam"] = "adam"
    lr: Positive = 1e-5
    steps: Count | None = None  # default: [training] steps
    schedule: Literal["constant", "linear", "cosine"] | None = None  # default: [training] schedule
    checkpointing: bool = False  # inference's memory, more time: layers, and logits in slices, are made twice


class PeftTable(Table):
    """The adapters of algorithms that tune adapters; the defaults are the paper's sizes."""

    rank: Count = 8  # of LoRA
    alpha: Positive = 16.0  # of LoRA
    vector: Count = 4096  # numbers of the one vector of Uni-LoRA
    targets: list[str] | None = None  # modules that LoRA adapts; None: peft's choice for the architecture
    virtual_tokens: Count = 20  # of P-tuning and prompt tuning


class AsynchronousTable(Table):
    """Asynchronous rounds: the server steps whenever `buffer` contributions have come (docs/algorithms.md)."""

    buffer: Count = 10  # B, contributions of a server's step
    concurrency: Count | None = None  # number of clients that train at any time; None: a cohort
    staleness_power: Annotated[float, Field(ge=0)] = 0.5  # a contribution s rounds old has the weight (1 + s)^−power
    max_staleness: Annotated[int, Field(ge=0)] | None = None  # rounds; clients that would be later are given up


class NetworkTable(Table):
    """A server's waiting times for clients of a real network (docs/operations.md); simulations ignore them."""

    minimum: Count | None = None  # number of answers that make a round; default: half of the cohort, rounded up
    deadline: Positive = 600.0  # seconds of a round; later answers are left out, if there is the minimum
    grace: Positive | None = None  # seconds for the others once the minimum has answered; None: 10, or half its time
    attempts: Count = 3  # deadlines that a round may pass before the run stops for want of the minimum
    patience: Positive = 600.0  # seconds to wait for all clients to connect, when a server starts
    required: list[Annotated[int, Field(ge=0)]] = []  # clients without whom a server's rounds don't begin
    # Number of clients of each server that stands between this one and them, and adds up their uploads: the first has
    # the clients from 0 on, the next those after it (docs/operations.md). Minimum, default all, and patience are then
    # of shards. None: the clients' uploads come to this server.
    shards: Annotated[list[Count], Field(min_length=1)] | None = None

    def members(self, shard: int) -> range:
        """The clients of a shard."""
        before = (self.shards or [])[: shard + 1]
        return range(sum(before[:-1]), sum(before))

    def minimum_of(self, cohort: int) -> int:
        """Number of clients of a cohort, or of shards, that have to answer; a minimum above it is refused."""
        most, what = (cohort, "clients of a round") if self.shards is None else (len(self.shards), "shards")
        if self.minimum is not None and self.minimum > most:
            raise FedKSeedError(f"[network] minimum = {self.minimum} is more than the {most} {what}")
        return self.minimum or (most if self.shards else (cohort + 1) // 2)


class SecureTable(Table):
    """Secure aggregation: the server learns the sum of a round's uploads alone (docs/privacy.md)."""

    # Largest Euclidean norm of a client's change of c in a round; larger ones are cut. `fedkseed tune` finds one.
    norm: Positive | None = None
    bits: Annotated[int, Field(ge=4, le=16)] = 8  # of a client's number; with fewer a wrong share may go unseen
    neighbours: Annotated[int, Field(ge=2)] | None = None  # with which each shares masks, even; None: 20, or all


class Simulated(Table):
    """A larger federation that a simulation stands for; its noise is scaled to the clients that there are."""

    clients: Count
    cohort: Count

    def problems(self) -> Iterator[str]:
        if self.cohort > self.clients:
            yield f"a cohort of {self.cohort} can't be drawn from {self.clients} clients"


class PrivacyTable(Table):
    """Differential privacy: noise that follows from epsilon and delta (docs/privacy.md)."""

    unit: Literal["client", "example"] = "client"  # what is protected: all of a client's rows, or one row
    epsilon: Positive | None = None  # of the whole run, for one unit
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    # Largest norm of what a unit adds: a client to a round's sum ([secure] norm, where uploads are masked), an example
    # to a step's. Larger ones are cut.
    norm: Positive | None = None
    # Share of a cohort that may tell the server its own noise: the others' is then enough.
    colluding: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    # σ of the noise over the most that a unit changes a sum. None: from epsilon; a run fills in both of these.
    noise: Positive | None = None
    times: Count | None = None  # rounds of the run, at most, in which one client takes part
    simulated: Simulated | None = None  # no protection of the clients that there are

    def problems(self) -> Iterator[str]:
        if self.epsilon is None and self.noise is None:
            yield "[privacy] has neither epsilon nor noise: give epsilon, and delta far below 1 / clients"
        if self.unit == "example" and (self.noise is not None or self.simulated is not None or self.colluding):
            yield "[privacy] unit = 'example': each client finds its own noise; leave noise, simulated, colluding out"


class TrustTable(Table):
    """Limits of what one client can do to a run (docs/security.md); `fedkseed serve` has stricter defaults."""

    # Of strategies/robust.py; a server's default: clipped.
    rule: Annotated[str, AfterValidator(partial(_one_of, RULES))] = "mean"
    hostile: Annotated[float, Field(ge=0, lt=0.5)] = 0.2  # share of the clients that may be hostile
    agreement: bool = False  # clients count by how well they agree with the others; a server's default: true
    most_examples: Count | None = None  # largest weight of a client; None: all that it claims; a server's default: 1
    # Number N of first rounds that move the model less, as there is no evidence about clients yet: round r = 1 … N by
    # r / (N + 1) of its step; a server's default, with agreement: 3.
    warmup: Annotated[int, Field(ge=0)] = 0
    guard: Positive | None = None  # rise of the held-out loss over its lowest, in nats, at which a run goes back
    receipts: bool = True  # keep the uploads of each round, for `fedkseed verify`; K numbers alone

    @property
    def summing(self) -> strategy.Trust:
        """The part that a strategy reads."""
        return strategy.Trust(self.rule, self.hostile, self.agreement, self.most_examples, self.warmup)


PREDICTED = ("loss", "accuracy", "choice")  # metrics of predictions; the others score written answers
METRICS = (*OBJECTIVES, "choice")  # the built-in ones
Examples: TypeAlias = Annotated[int, Field(ge=2)] | Literal["all"]


class HeldOutSetTable(Table):
    """A further held-out set: a file, a category, or rows that are kept back from each client."""

    name: str
    path: str | None = None  # a file or a folder of files, read as [data] source is
    held_out: Category | None = None  # a category, whose rows no client trains on
    clients: Portion | None = None  # a share or a number of each client's rows, which it does not train on
    examples: Examples | None = None  # None: as many as [evaluation] examples, or all if there are fewer

    def problems(self) -> Iterator[str]:
        name = self.name
        if name in (HELD_OUT, VALIDATION):
            yield f"the name {name!r} is taken: choose another for a further set"
        if not (0 < len(name) <= 40 and name.isprintable() and name == name.strip() and not set(name) & set(":/")):
            yield f"a name is 1 to 40 printable characters, without a colon or a slash, or space around, got {name!r}"
        sources = [key for key in ("path", "held_out", "clients") if getattr(self, key) is not None]
        if len(sources) != 1:
            yield (
                f"the set {self.name!r} has {' and '.join(sources) or 'no rows'}: give one of path (a file), held_out "
                "(a category) and clients (a share or a number of each client's rows)"
            )


class EvaluationTable(Table):
    """The measurements before the first round, after the last, and every few rounds."""

    # Rounds between evaluations, or a list of the rounds after which there is one; 0: only before and after all.
    every: Annotated[int, Field(ge=0)] | Annotated[list[Count], Field(min_length=1)] = 0
    examples: Examples = 64  # held-out ones that are evaluated; with 64 all, where there are fewer
    sets: list[HeldOutSetTable] | None = None  # beside the rows of [data] held_out
    # Of these examples, those that only choose the best round; the others alone are the held-out set that is reported.
    validation: Portion | None = None  # with best 0.5, unless it is given
    # The metric whose best round on the validation part is the tuned model; with patience the loss, unless it is given.
    best: str | None = None  # None: the last round's
    patience: Count | None = None  # evaluations without a better one, after which a run ends early
    # Of each client's rows, a share or a number that it does not train on: did each client gain? A set of all of them,
    # with the name "own rows". Over a network each owner's policy says which rows, and what the server learns.
    clients: Portion | None = None
    stop_when_diverged: bool = True  # a server's default: false, it warns; see docs/evaluation.md
    max_tokens: Count | None = None  # of a held-out example; default as for training
    # loss (always), choice, accuracy, exact match, rouge, FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION.
    metrics: list[str] | None = None  # None: loss, and rouge if answers are generated
    generated: Annotated[int, Field(ge=0)] = 0  # answers to write, before and after, for the metrics that score them
    rouge: Literal["rouge-score", "rouge"] = "rouge-score"  # the package whose Rouge-L; the official code: `rouge`
    max_new_tokens: Count = 64
    batch_size: Count = 8

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, table: Any) -> Any:
        """Fill in what a choice of the best round needs: patience is by the loss, and half of the examples choose."""
        if not isinstance(table, dict):
            return table
        table = ({"best": "loss"} if table.get("patience") is not None else {}) | table
        return ({"validation": 0.5} if table.get("best") is not None else {}) | table

    def problems(self) -> Iterator[str]:
        for name in self.measured:
            if name not in METRICS and not own_code.is_own(name):
                yield f"metrics are {', '.join(map(repr, METRICS))}, {OWN_FUNCTION}, got {name!r}"
        if self.written and not self.generated:
            yield f"the metric {self.written[0]!r} scores written answers, and generated = 0: set generated = 16"
        if sum(rows.clients is not None for rows in self.further) > 1:
            yield "two sets are of the clients' own rows: give one, with as many rows as you need"
        for what in ("name", "held_out"):
            values = [value for rows in self.further if (value := getattr(rows, what)) is not None]
            if twice := sorted({value for value in values if values.count(value) > 1}):
                yield f"two sets have the {what} {twice[0]!r}: give each its own"
        choosing = [name for name in self.measured if name in PREDICTED]
        if self.best not in (None, *choosing):
            names = " or ".join(map(repr, choosing))
            yield f"best is a metric that every evaluation measures, {names} in this recipe, got {self.best!r}"
        if self.best is not None and not self.every:
            yield "best and patience choose among the evaluations of a run: set every, too, as every = 5"

    def due(self, done: int) -> bool:
        """Tell whether an evaluation is due after some rounds; those before the first and after the last always are."""
        return done in self.every if isinstance(self.every, list) else self.every > 0 and done % self.every == 0

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of the metrics, each once."""
        metrics = self.metrics if self.metrics is not None else ["rouge"] if self.generated else []
        return tuple(dict.fromkeys(["loss", *metrics]))

    @property
    def written(self) -> tuple[str, ...]:
        """The metrics that score written answers."""
        return tuple(name for name in self.measured if name not in PREDICTED)

    @property
    def further(self) -> tuple[HeldOutSetTable, ...]:
        """The held-out sets beside that of [data] held_out, the clients' own rows last."""
        clients, sets = self.clients, self.sets or []
        return (*sets, *([HeldOutSetTable(name=OWN_ROWS, clients=clients, examples="all")] if clients else []))

    @property
    def categories(self) -> tuple[str, ...]:
        """The categories that are sets of their own."""
        return tuple(rows.held_out for rows in self.further if rows.held_out is not None)


class ReportTable(Table):
    """The trackers of experiments that get a copy of a run's numbers, and no text (docs/report.md)."""

    # The copies stay on this machine unless a tracker's own environment variables, as WANDB_MODE, say else.
    to: list[Literal["tensorboard", "trackio", "mlflow", "wandb"]] = []
    project: Annotated[str, Field(min_length=1, max_length=100)] = "fedkseed"  # of the run, there; MLflow's experiment


class Recipe(Table):
    """All settings that decide a run's result."""

    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0  # of all draws: directions, data, cohorts, batches
    save: bool = True  # write the tuned model at the end; one of coefficients is written in any case
    model: ModelTable
    data: DataTable = DataTable()
    clients: ClientsTable = ClientsTable()
    directions: DirectionsTable = DirectionsTable()
    training: TrainingTable = TrainingTable()
    derivatives: DerivativesTable = DerivativesTable()
    asynchronous: AsynchronousTable | None = None  # None: rounds are synchronous
    peft: PeftTable = PeftTable()
    evaluation: EvaluationTable = EvaluationTable()
    network: NetworkTable = NetworkTable()
    trust: TrustTable = TrustTable()
    secure: SecureTable | None = None  # None: the server sees each upload
    privacy: PrivacyTable | None = None  # None: no noise
    report: ReportTable = ReportTable()

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, table: Any) -> Any:
        """Fill in the defaults of private runs, where the recipe is a tree of tables.

        With [privacy] clients take turns: the noise is for the one that takes part most often. With [secure] all
        clients that send scalars step along the same directions: where few others have drawn a direction, the sum of
        scalars along it is almost one client's (docs/privacy.md).
        """
        if not isinstance(table, dict):
            return table
        parts = {name: table.get(name) or {} for name in ("clients", "directions", "training")}
        if not all(isinstance(part, dict) for part in parts.values()):
            return table
        if table.get("privacy") is not None:
            parts["clients"] = {"draw": "in turns"} | parts["clients"]
        scalars = parts["training"].get("algorithm", "fedkseed") == "fedkseed"
        if table.get("secure") is not None and scalars and not parts["clients"].get("backpropagating"):
            parts["directions"] = {"shared": True} | parts["directions"]
        return table | {name: part for name, part in parts.items() if part or name in table}

    @property
    def held_out_seed(self) -> int:
        """The seed of the draw of held-out rows."""
        return self.seed if self.data.seed is None else self.data.seed

    def protecting(self, unit: str) -> PrivacyTable | None:
        """[privacy], where it protects this unit."""
        return self.privacy if self.privacy is not None and self.privacy.unit == unit else None

    @property
    def keeps_uploads(self) -> bool:
        """Whether a run keeps its uploads for `fedkseed verify`, which can do nothing with masked ones."""
        return self.trust.receipts and self.secure is None

    @property
    def pool(self) -> Pool:
        """The K directions; refused while they need a basis whose digest is not known yet, see `with_basis`."""
        directions = self.directions
        if directions.informed and directions.basis_digest is None:
            raise FedKSeedError("[directions] basis_digest is missing: a run writes it, and so does `fedkseed pin`")
        digest = bytes.fromhex(directions.basis_digest or "")
        return Pool(pool_key(self.seed), directions.size, directions.family, digest)

    def having(self, **changes: Any) -> "Recipe":
        """The same recipe with other keys, unchecked: those of a table as a dictionary, or a table as a whole."""
        tables = {k: getattr(self, k).model_copy(update=v) if isinstance(v, dict) else v for k, v in changes.items()}
        return self.model_copy(update=tables)

    def absolute(self) -> "Recipe":
        """The same recipe with local paths made absolute, so that any working directory will do."""
        basis, sets, metrics = self.directions.basis, self.evaluation.sets, self.evaluation.metrics
        sets = sets and [rows.model_copy(update={"path": rows.path and absolute_path(rows.path)}) for rows in sets]
        return self.having(
            model={"name": absolute_path(self.model.name)},
            data={"source": absolute_path(self.data.source)},
            directions={"basis": basis and absolute_path(basis)},
            training={name: own_code.absolute(getattr(self.training, name)) for name in ("algorithm", "objective")},
            evaluation={"metrics": metrics and [*map(own_code.absolute, metrics)], "sets": sets},
        )

    def to_toml(self, defaults: bool = True) -> str:
        """The recipe as a file's text, with or without the keys that have their default."""
        return tomli_w.dumps(self.model_dump(exclude_none=True, exclude_defaults=not defaults))


def absolute_path(name: str) -> str:
    """The absolute path of a file or a folder; a name of something else stays as it is."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name
