"""A first recipe for a user's data: the data is looked at, and every value that is written has its reason beside it."""

import datetime
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import fmean, median
from time import monotonic
from tomllib import loads
from typing import TYPE_CHECKING, Any, Literal

import tomlkit

from ..data.encoder import MAX_TOKENS, Encoder, context_of
from ..data.federated import ClientShares, share_out
from ..data.file_formats import open_rows
from ..data.held_out import FEWEST
from ..data.layouts import LAYOUTS, MOST_LABELS, Columns, names_of, normalised
from ..data.sources import DataFile, Reader, counted, doubt_of, require_columns
from ..data.split import DEFAULT_CATEGORY, is_folder, rows_of
from ..errors import FedKSeedError
from ..models.place import require_there
from ..recipe.algorithms import ONE, OUTPUT, TWO, algorithm_of
from ..recipe.reading import parse
from ..recipe.rules import Where, require_legal
from ..recipe.schema import ClientsTable, DataTable, ModelTable, Recipe, TrainingTable
from ..run.progress import Progress

if TYPE_CHECKING:  # rows are looked at before PyTorch is loaded
    from ..run.eps_ladder import Clock
    from .forecast import Forecast
    from .tune import Tuning

TASKS = ("answers", "labels")
SECONDS = 55.0  # of `init` in all
MAX_CLIENTS, ROWS_A_CLIENT = 20, 20  # the most clients of a draft, and the rows that each has on average, at least
SEPARATOR = DataTable.model_fields["separator"].default
TOKEN_STEP = 32  # max_tokens is a multiple of this
HELD_OUT = 0.1  # share of the rows
RATES = {"fedkseed-backprop": 6e-5, "fedkseed-plus": 1e-5}  # of results/classification/small and recipes/dolly.toml
MEASURE_MORE = (
    "give `fedkseed tune RECIPE --minutes 20 --output NEW` more time; where that finds none, look at the rows "
    "(`fedkseed preview RECIPE`), or take another model"
)
LAST_LAYERS = (  # the line that changes it: benchmarks/results/init.md says why a search can't choose
    "# last_layers = 6 # tune these alone: for one task that all clients share, with two to three times the rounds"
)
WAITING = """
[network] # the server's patience; all of it may be changed between two starts of the server
minimum = {} # uploads that make a round; as many as cohort: nobody is left out, and a member that is gone stops the run
deadline = 600.0 # seconds of a round; after 3 deadlines without the minimum, see attempts, the server stops
# grace = 60.0 # seconds for the others once the minimum has answered; default: half of what it took, 10 at least;
# where one of them has just started, and loads the model, twice what the slowest minimum took, 60 at least
patience = 600.0 # seconds to wait for all clients when the server starts"""
MAX_OWNERS = 200  # different values of a column, up to which they may be clients
# Words in the names of columns whose values are often the parties that hold the rows.
OWNER_WORDS = {
    "author", "bank", "branch", "client", "clinic", "company", "country", "customer", "department", "dept", "device",
    "group", "hospital", "institution", "office", "org", "owner", "party", "region", "school", "silo", "site", "source",
    "speaker", "team", "tenant", "user", "ward",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DataSummary:
    """The size and the kind of some data."""

    source: str
    columns: Columns  # those that the user has named
    rows: int
    categories: dict[str, int]  # name -> rows; empty where rows have none
    labels: int  # different responses
    longest_label: int  # in tokens; 0 of responses that are no labels
    tokens: tuple[int, int, int]  # of an example: the median, the 95th percentile, the most
    files: int | None  # of a folder, one a client; None for one file
    owners: tuple[str, int] | None = None  # a column whose values may be clients, and their number
    template: str = "paper"
    separator: str = SEPARATOR
    why: str = ""  # that template
    date: datetime.date | None = None  # that it writes
    max_tokens: int = MAX_TOKENS
    too_long: int = 0  # rows over `max_tokens`, which a run leaves out
    doubts: str = ""  # numbers of rows without a question, or with an answer as "n/a"

    @property
    def task(self) -> str:
        """The kind of task: labels where few responses come again and again."""
        return "labels" if 2 <= self.labels <= min(MOST_LABELS, self.rows // 4) else "answers"


@dataclass(frozen=True, slots=True)
class FirstRecipe:
    """A recipe for some data, and what was loaded for it.

    Attributes:
        recipe: of the text; of one for a network, a run on this machine in which the server's rows stand for all.
    """

    data: DataSummary
    text: str
    recipe: Recipe
    tokenizer: Any
    shares: ClientShares


def first_recipe(
    source: str,
    columns: Columns,
    model: str,
    *,
    task: str | None,
    algorithm: str,
    clients: int | None,
    network: bool = False,
) -> FirstRecipe:
    """Read the data and write a recipe for it.

    Args:
        columns: field -> column, for those that don't have a usual name.
        task: one of TASKS; None: by the responses.
        clients: number of them; None: by the number of rows, or one for each file of a folder.
        network: whether clients have files of their own, and the data is the server's.

    Raises:
        FedKSeedError: the data can't be read or is too small, or a run would refuse the recipe.
    """
    if task not in (None, *TASKS):
        raise FedKSeedError(f"no task is called {task!r}; choose {' or '.join(TASKS)}")
    algorithm_of(algorithm)  # refuses an unknown one before the data is read
    require_there(model)
    read = _files_of(source, columns)
    files = len(read) if is_folder(source) else None
    if files and clients not in (None, files):
        raise FedKSeedError(f"--clients {clients}: {source} has {files} files, one a client; leave --clients out")
    if network and not files and clients is None:
        raise FedKSeedError(f"--network: {source} is one file, and says no number of clients; add it, as --clients 3")
    from ..models.load import load_tokenizer  # PyTorch, once faulty rows are refused

    tokenizer = load_tokenizer(model)
    data = summary(source, columns, tokenizer, algorithm)
    text = draft(data, model, task or data.task, algorithm, clients, network)
    recipe = parse(loads(text))
    if network:
        require_legal(recipe, Where.NETWORK)
        if not data.files:
            alike = {"split": "even", "count": clients, "cohort": recipe.clients.cohort, "min_examples": 1}
            recipe = recipe.having(clients=ClientsTable.model_validate(alike))
    return FirstRecipe(data, text, recipe, tokenizer, share_out(recipe, tokenizer))  # refuses what a run would refuse


def longest_of(labels: Iterable[str], tokenizer: Any) -> int:
    """The tokens of the longest label."""
    return max(len(tokenizer(label, add_special_tokens=False).input_ids) for label in labels)


def summary(source: str, columns: Columns, tokenizer: Any, algorithm: str = "fedkseed-backprop") -> DataSummary:
    """Read the data and measure it; refused where it can't be read, or has fewer than ROWS_A_CLIENT rows.

    Lengths are those in the words of the recipe. All rows are within its limit where the longest has MAX_TOKENS or
    fewer; of longer ones as many as 95 of 100 are, where the model's context allows it.
    """
    clients, in_folder = _files_of(source, columns), is_folder(source)
    read = [file for files in clients for file in files]
    rows = [row for file in read for row in file.examples]
    encoder, why = _worded(read, tokenizer, algorithm)
    sizes = sorted(encoder.lengths(rows_of(read)))
    long, longest = sizes[int(0.95 * (len(sizes) - 1))], sizes[-1]
    texts, labels = all(row.plain for row in rows), {row.response for row in rows}
    covered = longest if longest <= MAX_TOKENS else MAX_TOKENS if texts else max(MAX_TOKENS, long)
    limit = min(-(-covered // TOKEN_STEP) * TOKEN_STEP, context_of(encoder.recipe, tokenizer) or covered + TOKEN_STEP)
    return DataSummary(
        source=source,
        columns=columns,
        rows=len(rows),
        categories=dict(Counter(row.category for row in rows if row.category).most_common()),
        labels=len(labels),
        longest_label=0 if len(labels) > MOST_LABELS else longest_of(labels, tokenizer),
        tokens=(int(median(sizes)), long, longest),
        files=len(clients) if in_folder else None,
        owners=None if in_folder else _owner_column(source, columns),
        template=encoder.wording.template,
        separator=encoder.wording.separator,
        why=why,
        date=encoder.wording.date,
        max_tokens=limit,
        too_long=0 if texts else sum(size > limit for size in sizes),
        doubts=counted(Counter(map(doubt_of, rows))),
    )


def _files_of(source: str, columns: Columns) -> list[list[DataFile]]:
    """The files of each client in a folder, or one file; refused if they have fewer than ROWS_A_CLIENT rows."""
    reader = Reader(columns)
    clients = [*reader.folder(source).values()] if is_folder(source) else [[reader.file(source)]]
    read = [file for files in clients for file in files]
    require_columns(read)
    if (rows := sum(len(file.examples) for file in read)) < ROWS_A_CLIENT:
        raise FedKSeedError(f"{source} has {rows} rows; two clients need {ROWS_A_CLIENT} at least")
    return clients


def _worded(files: Sequence[DataFile], tokenizer: Any, algorithm: str) -> tuple[Encoder, str]:
    """The encoder of some files by the template that is best for a model, and why it is.

    Where a model has a chat template, it was tuned in its words, and programs ask it in them.
    """
    rows, talks = rows_of(files), any(file.layout.talks for file in files)

    def encoder_of(template: Literal["chat", "paper"] | None) -> Encoder:
        data = DataTable() if template is None else DataTable(template=template)
        settings = {"data": data, "training": TrainingTable(algorithm=algorithm)}
        return Encoder.of(Recipe(model=ModelTable(name="the model"), **settings), tokenizer, files)

    if all(row.example.plain for row in rows):
        return encoder_of(None), "of what is asked later, as rows of plain text have no words around them"
    why = "as the model has no chat template"
    if tokenizer.chat_template:
        encoder = encoder_of("chat")
        refused = encoder.refused(rows)
        if not refused or (talks and len(refused) < len(rows)):  # of conversations, a run names these rows
            return encoder, "the model's own chat template"
        why = f"as {' '.join(str(refused[0][1]).split())}"
    return encoder_of("paper"), f"the wording of the paper, {why}"


def _owner_column(source: str, columns: Columns) -> tuple[str, int] | None:
    """The column of a file that looks most like the owner of a row, and the number of its different values.

    Its name has one of OWNER_WORDS as a word, every row has a value, few are different, and each is there again and
    again. The column that `columns` names for the client is taken whatever it is.
    """
    counts, total = dict[str, Counter[str]](), 0
    for _, row in open_rows(source, columns)[1]:
        total += 1
        for column, value in row.items() if isinstance(row, dict) else ():
            if isinstance(value, str | int) and not isinstance(value, bool) and (text := str(value).strip()):
                counts.setdefault(str(column), Counter())[text] += 1
    if "client" in columns:
        candidates = [name for name in counts if normalised(name) in map(normalised, names_of(columns, ["client"]))]
    else:
        layouts = [columns, *(layout.columns for layout in LAYOUTS.values())]
        used = {normalised(name) for named in layouts for name in names_of(named)} - {"client"}
        candidates = [
            column
            for column, values in counts.items()
            if normalised(column) not in used
            and _words(column) & OWNER_WORDS
            and 2 <= len(values) <= min(MAX_OWNERS, total // 4)
            and values.total() == total
        ]
    if not candidates:
        return None
    column = min(candidates, key=lambda column: (normalised(column) != "client", len(counts[column])))
    return column, len(counts[column])


def _words(column: str) -> set[str]:
    """The words of a column's name, which may be in camel case."""
    return set(re.split(r"[^a-z]+", normalised(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column))))


def draft(
    data: DataSummary, model: str, task: str, algorithm: str, clients: int | None = None, network: bool = False
) -> str:
    """The text of a recipe, with comments.

    Args:
        task: one of TASKS.
        algorithm: a name of ALGORITHMS.
        clients: number of them; None: by the number of rows.
        network: whether clients have files of their own, and the data is the server's.
    """
    named = data.owners[1] if data.owners and "client" in data.columns and clients is None else 0
    count = data.files or clients or named or max(2, min(MAX_CLIENTS, data.rows // ROWS_A_CLIENT))
    usual, long, longest = data.tokens
    share = f"{100 * data.too_long / data.rows:.3g} %"
    left_out = f"{data.too_long:,} rows ({share}) are longer and left out" if data.too_long else "none is left out"
    share_of_rows = f"held_out = {HELD_OUT} # share of the rows that no client trains on; or the name of a category"
    category = f"each client leaves out; where this file has no rows of it, {HELD_OUT:g} of them"
    kept, of_category = DEFAULT_CATEGORY, data.categories.get(DEFAULT_CATEGORY, 0) if network else 0
    held_out = max(2, min(64, of_category or round(HELD_OUT * data.rows)))  # as many rows as a run holds out
    uneven = len(data.categories) > 1
    split = "files" if data.files or network else "column" if named else "dirichlet" if uneven else "even"
    leaves_out = data.doubts and task == "answers"  # among labels "none" may be one
    splits = {
        "files": "each client has a file of its own" if network else "one client for each file of the folder",
        "column": f"one client for each of the {count} values of that column",
        "dirichlet": "clients have uneven shares of the categories, see alpha",
        "even": "clients have equal shares",
    }
    kinds = f" in {len(data.categories)} categories" if data.categories else ""
    lines = [
        f"# A first recipe for {data.source}: {data.rows:,} rows{kinds}. Every key: fedkseed init --keys",
        "seed = 1",
        "\n[model]",
        f"name = {_toml(model)}",
        *([LAST_LAYERS] if algorithm == "fedkseed-backprop" else []),
        "\n[data]",
        f"source = {_toml(data.source)}",
        *([f"columns = {_toml(data.columns)}"] if data.columns else []),
        *([f"leave_out_faulty = true # {data.doubts}; false: they are trained on"] if leaves_out else []),
        f"template = {_toml(data.template)} # {data.why}; others: `fedkseed docs data`",
        *([f"separator = {_toml(data.separator)}"] if data.separator != SEPARATOR else []),
        *([f"date = {data.date} # that the chat template writes"] if data.date else []),
        f"max_tokens = {data.max_tokens} # examples have {usual} tokens as the median, {long} at 95 %, {longest} at "
        f"most: {left_out}",
        f"held_out = {_toml(kept)} # a category, which {category}" if network else share_of_rows,
        "\n[clients]",
        f"split = {_toml(split)} # {splits[split]}",
        *([] if split in ("files", "column") else [f"count = {count}"]),
        *(_owners_as_clients(*data.owners, data.columns) if data.owners and not named and not network else []),
        f"cohort = {min(4, count)} # clients of a round",
        *(["alpha = 0.5 # smaller is more uneven"] if split == "dirichlet" else []),
        "min_examples = 1",
        *_training(algorithm),
        *([WAITING.format((min(4, count) + 1) // 2)] if network else []),
        "\n[evaluation]",
        f"examples = {_toml('all') if held_out < 64 else 64} # of the held-out rows",
        "every = 5 # rounds",
        "# patience = 2 # end after 2 evaluations without a better one, with the best round's model: half of the rows",
        "# then choose that round, and the other half is reported (`fedkseed docs evaluation`)",
        "# clients = 0.1 # of each client's rows, which it does not train on: did each client gain?"
        + " Over a network, where [evaluation] of its policy has kept_back = 0.1 and send = true" * network,
    ]
    if task == "labels":
        lines += [
            f'metrics = ["choice", "exact match"] # {data.labels} different responses',
            f"generated = {held_out} # answers to write, for the exact match",
            f"max_new_tokens = {max(8, data.longest_label + 1)}",
        ]
    return "\n".join(lines) + "\n"


def _training(algorithm: str) -> list[str]:
    """The lines of [training], and of [derivatives] where the algorithm's learning rate is there."""
    row = algorithm_of(algorithm)
    zeroth_order = row.local in (ONE, TWO)
    backward = "with a pass back through the model; fedkseed-plus needs none"
    why = "clients run the model forward only" if zeroth_order or row.local == OUTPUT else backward
    steps, papers = (200, "; the paper's number") if zeroth_order else (4, "")
    searched = "not measured; `fedkseed tune RECIPE` does"
    of_derivatives, rate = algorithm in RATES, f"lr = {_number(RATES.get(algorithm, row.lr))}"
    return [
        "\n[training]",
        f"algorithm = {_toml(algorithm)} # {why}; `fedkseed docs algorithms` compares them",
        "rounds = 10",
        f"steps = {steps} # of a client in a round{papers}",
        "batch_size = 4",
        *([] if of_derivatives else [f"{rate} # the paper's, {searched}"]),
        'schedule = "linear"',
        *(["\n[derivatives]", f"{rate} # of other runs, {searched}"] if of_derivatives else []),
    ]


def few_held_out(first: FirstRecipe, network: bool) -> list[str]:
    """A warning where the held-out rows are too few to show what a run gains."""
    count, rows = len(first.shares.held_out), first.data.rows
    if count >= FEWEST:
        return []
    more = "" if network else f"set [data] held_out = {min(0.5, math.ceil(100 * FEWEST / rows) / 100):g}, or "
    return [f"warning: {count} held-out rows show little of what a run gains: {more}give {FEWEST} or more of them"]


def measured(
    first: FirstRecipe, recipe: Recipe, begin: float, progress: Progress, clock: "Clock" = monotonic
) -> "tuple[Forecast | None, Tuning]":
    """The costs of a run, and the rate, by a model that is loaded once: what is measured until SECONDS after `begin`.

    Args:
        recipe: that of `first`, or one that differs in settings of training.
        begin: of the minute, by `clock`. Loading can't be ended early; after it is late, there are no costs.

    Raises:
        FedKSeedError: the recipe can't be run, or the base model's losses are not finite.
    """
    from ..run.simulation import Simulation
    from .forecast import forecast
    from .tune import search

    loaded, until = {"shares": first.shares, "tokenizer": first.tokenizer}, begin + SECONDS
    with closing(Simulation(recipe.absolute(), progress, **loaded)) as simulation:
        costs, now = None, clock()
        if now < until:
            progress.note(f"loaded {now - begin:.0f} s after the start; measuring a few steps")
            costs = forecast(simulation, (now + until) / 2, clock)
            left = until - clock()
            rates = f"trying learning rates for {left:.0f} s" if left > 0 else "no time is left to try learning rates"
            progress.note(f"a step takes {costs.step_seconds:.2g} s; {rates}")
        return costs, search(recipe, simulation, until, step_seconds=costs and costs.step_seconds, clock=clock)


def with_measured(text: str, tuning: "Tuning") -> tuple[str, str]:
    """The text of a recipe with the rate that was measured, and eps where there is one; and a warning, or nothing.

    Where no rate has lowered the loss for sure, the recipe gets one that is lower than all that have raised it.
    """
    from .tune import RATE_FACTOR

    trials, lr = tuning.trials, tuning.lr
    rates = f"{_counted(len(trials), 'rate')} tried" + (", then the minute was over" if tuning.spent else "")
    clients = len(tuning.cohort)
    steps = f"{_counted(tuning.steps * clients, 'step')} of {_counted(clients, 'client')}"
    if lr is not None:
        before, after = fmean(tuning.before), next(trial.mean for trial in trials if trial.lr == lr)
        why = f"measured: loss {before:.4g} -> {after:.4g} in {steps}; {rates}"
    elif not trials:
        lr, why = tuning.recipe_lr, f"not measured: {steps} would have passed the minute"
    else:
        tried, raised = ", ".join(f"{trial.lr:g}" for trial in trials), tuning.best.change(tuning.before).mean >= 0
        lr = float(f"{min(trial.lr for trial in trials) / RATE_FACTOR:.1e}") if raised else tuning.best.lr
        why = f"a guess: of {rates} ({tried}) none lowered the loss for sure in {steps}"
    warning = "" if tuning.lr else f"warning: lr = {_number(lr)} is {why}: {MEASURE_MORE}"
    lines = [f"lr = {_number(lr)} # {why}"]
    if tuning.eps is not None:
        lines.insert(0, f"eps = {tuning.eps:g} # measured: the least error by rounding and curvature")
    return re.sub(r"(?m)^lr = .*$", "\n".join(lines), text), warning


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _number(rate: float) -> str:
    return f"{rate:g}".replace("e-0", "e-")


def _owners_as_clients(column: str, count: int, named: Columns) -> list[str]:
    """Comment lines that propose a column as the clients."""
    columns = {**named, **({"client": column} if normalised(column) != "client" else {})}
    return [
        f"# The column {column!r} has {count} values, each in several rows: are they the parties that hold the rows?",
        "# Then, in place of split and count:",
        '# split = "column"',
        *([f"# and in [data]: columns = {_toml(columns)}"] if columns != named else []),
    ]


def _toml(value: str | Sequence[str] | Columns) -> str:
    """A value as TOML writes it, in one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(text)}" for key, text in value.items()) + " }"
    return tomlkit.item(value).as_string()
