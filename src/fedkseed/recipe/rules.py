"""The one table of which recipes are legal: where a rule holds, what breaks it, and what to do instead.

Limits of a single key, and of keys of one table, stand with their field in `schema`. A strategy says what it needs as
data (`reads`, `weights`, `remembers`, `needs_single_uploads`), which the rules read. Packages that only some recipes
need have a table beside it: a missing one is found before data is read or a model loaded. Nothing else refuses a
recipe; what is refused later depends on files, data or messages.
"""

from collections.abc import Callable, Iterator
from enum import Enum, auto
from importlib.util import find_spec
from typing import TypeAlias, cast

from ..errors import FedKSeedError
from ..strategies.robust import memory_of
from .algorithms import ALGORITHMS, ONE, TWO, Algorithm, algorithm_of
from .schema import OBJECTIVES, DerivativesTable, PeftTable, Recipe, Table, TrustTable

LARGEST_SHARD_UPLOAD = 1 << 16  # directions, or scalars, of an upload that a shard reads before it has a recipe
LEAST_SAID = 0.1  # GB of uploads that a server of a rule holds, from which on the run says them
COMPARES_ALONG_DIRECTIONS = ("trimmed", "median", "nnm-trimmed")  # rules for clients with the same directions


class Where(Enum):
    """The places in which a rule holds."""

    ALWAYS = auto()  # for every recipe, by its text alone
    ALGORITHM = auto()  # for every recipe whose algorithm is known: a user's own is known once its file has been run
    STATED = auto()  # for settings in a user's file that would have no effect; a run's own recipe lists all
    RUN = auto()  # where a run begins: it needs numbers that `fedkseed tune` finds, so a recipe without them is read
    SIMULATION = auto()  # in which one model stands in for all clients
    NETWORK = auto()  # for servers and clients, which all have files of their own
    PEERS = auto()  # for clients without a server
    PAGE = auto()  # for a server that clients join by a page in their browser
    FLOWER_SERVER = auto()
    ENGINE = auto()  # for a simulation whose clients another engine's processes train
    REMARK = auto()  # for what is allowed and hardly meant: the run says it, and goes on


OF_ALGORITHMS = (Where.ALGORITHM, Where.STATED, Where.REMARK)  # whose rules say nothing of a user's own algorithm
# What breaks a rule in a recipe `r` with an algorithm called `name`: the `got` of its message. False: nothing does.
Condition: TypeAlias = Callable[[Recipe, Algorithm], object]


def checked_algorithm(recipe: Recipe, *places: Where) -> Algorithm:
    """The algorithm of a recipe that is to be run; a file of the user's that has it is run.

    Args:
        places: further places whose rules hold.

    Raises:
        FedKSeedError: no algorithm has the name, the recipe breaks a rule, or a package is missing.
    """
    algorithm = algorithm_of(recipe.training.algorithm)
    require_legal(recipe, Where.ALWAYS, Where.ALGORITHM, Where.RUN, *places, algorithm=algorithm)
    require_packages(recipe, algorithm)
    return algorithm


def require_legal(recipe: Recipe, *places: Where, algorithm: Algorithm | None = None) -> None:
    """Refuse a recipe that breaks a rule of some places.

    Args:
        algorithm: the recipe's; None: the built-in one of its name. Code of the user's is neither run nor looked at.

    Raises:
        FedKSeedError: the message of the first rule that is broken.
    """
    for _, message in broken_rules(recipe, *places, algorithm=algorithm):
        raise FedKSeedError(message)


def require_packages(recipe: Recipe, algorithm: Algorithm) -> None:
    """Refuse a recipe for want of a package; the text says what installs it."""
    for what, module, extra, needed in PACKAGES:
        if needed(recipe, algorithm) and find_spec(module) is None:
            what = what.format(name=recipe.training.algorithm)
            raise FedKSeedError(f"{what} the package {module}: pip install 'fedkseed[{extra}]'")


def broken_rules(recipe: Recipe, *places: Where, algorithm: Algorithm | None = None) -> Iterator[tuple[str, str]]:
    """The rules of some places that a recipe breaks, and their formatted messages, in the order of the table."""
    row = algorithm or ALGORITHMS.get(recipe.training.algorithm)
    for place, rules in RULES.items():
        if place not in places or (row is None and place in OF_ALGORITHMS):
            continue
        for rule, broken in rules.items():
            if got := broken(recipe, cast("Algorithm", row)):  # a network refuses None first
                yield rule, rule.format(r=recipe, name=recipe.training.algorithm, got=got)


# What needs a package, its module, the extra that brings it, and the recipes that do. Packages for kinds of files
# (data/file_formats.py), trackers (run/trackers.py) and commands stand with what needs them.
PACKAGES: tuple[tuple[str, str, str, Condition], ...] = (
    ("the adapters of {name} need", "peft", "peft", lambda r, a: a.adapts),
    ("[secure] needs", "cryptography", "secure", lambda r, a: r.secure),
    ("[secure] needs", "shamir", "secure", lambda r, a: r.secure),
    ("[privacy] needs", "cryptography", "privacy", lambda r, a: r.privacy),
    ("[privacy] needs", "dp_accounting", "privacy", lambda r, a: r.privacy),
    (
        "[evaluation] rouge = 'rouge' needs",
        "rouge",
        "rouge",
        lambda r, a: "rouge" in r.evaluation.measured and r.evaluation.rouge == "rouge",
    ),
)


def _compares(recipe: Recipe) -> bool:
    """Whether the server compares single uploads."""
    return recipe.trust.rule != "mean" or recipe.trust.agreement


def _held(recipe: Recipe, algorithm: Algorithm) -> float:
    """The GB of a round's uploads that are compared with each other; 0 where they are added as they come, or few."""
    clients, late, training = recipe.clients, recipe.asynchronous, recipe.training
    if not (algorithm.pooled and _compares(recipe)) or (clients.count is None and clients.active is not None):
        return 0.0
    uploads = late.buffer if late else clients.cohort if clients.count is None else clients.cohort_of(clients.count)
    size, scalars = recipe.directions.size, not _differentiates(recipe, algorithm)
    numbers = min(size, training.steps * training.probes) if scalars else size
    held = memory_of(recipe.trust.rule, recipe.trust.agreement, uploads, numbers, size, scalars) / 1e9
    return held if held >= LEAST_SAID else 0.0


def _draws(algorithm: Algorithm) -> bool:
    """Whether clients draw from the recipe's K directions, and send scalars along them."""
    return algorithm.pooled and algorithm.local == TWO


def _differentiates(recipe: Recipe, algorithm: Algorithm) -> bool:
    """Whether some clients take derivatives."""
    return algorithm.differentiates or recipe.clients.backpropagating > 0


def _beyond(recipe: Recipe) -> str:
    """The setting of asynchronous rounds that needs more clients than there are."""
    late, count = recipe.asynchronous, recipe.clients.count
    if late is None or count is None:
        return ""
    needed = {"buffer": late.buffer, "concurrency": late.concurrency or 0}
    return next((f"{name} = {number}" for name, number in needed.items() if number > count), "")


def _stated(table: Table, *keys: str) -> str:
    """The first of some keys that a file has set, and not to its default."""
    changed = (key for key in keys if getattr(table, key) != type(table).model_fields[key].default)
    return next((key for key in changed if key in table.model_fields_set), "")


# Whether a recipe sets what not every strategy reads, by the names of `ServerPart.reads`.
OPTIONAL_SETTINGS: dict[str, Callable[[Recipe], bool]] = {
    "[asynchronous]": lambda r: r.asynchronous is not None,
    "[clients] backpropagating": lambda r: r.clients.backpropagating > 0,
    "[derivatives]": lambda r: r.derivatives != DerivativesTable(),
    "[directions] shared": lambda r: r.directions.shared,
    "[privacy]": lambda r: r.privacy is not None,
    "[secure]": lambda r: r.secure is not None,
    "[training] wire": lambda r: r.training.wire not in (None, "exact"),
    "[training] server": lambda r: r.training.server != "sgd",
    "[trust]": lambda r: r.trust.summing != TrustTable().summing,
}
NO_SHARDS = "[network] shards is for `fedkseed serve` without a page, and this is {}: remove it"

# For each place: what its rules say, and the condition under which they do.
RULES: dict[Where, dict[str, Condition]] = {
    Where.ALWAYS: {
        # Sums of which the server sees nothing else: masked uploads, and sums with noise.
        "[secure] hides uploads from the server, and [trust] rule and agreement compare them: choose. Against a "
        "curious server: [trust] rule = 'mean' and agreement = false; "
        "against hostile clients: no [secure]": lambda r, a: r.secure and _compares(r),
        "[{got}] needs rounds that clients begin together; leave [asynchronous] out": lambda r, a: (
            r.asynchronous and ((r.secure and "secure") or (r.privacy and "privacy"))
        ),
        "[privacy] norm and [secure] norm are one thing where uploads are masked: give the second": lambda r, a: (
            r.secure and (noise := r.protecting("client")) and noise.norm is not None
        ),
        "[privacy] norm is missing: the largest norm of one example's gradient, or of its scalars": lambda r, a: (
            (noise := r.protecting("example")) and noise.norm is None
        ),
        "[privacy] knows how much one client changes a sum, and not what it changes by [trust] rule or agreement: "
        "set rule = 'mean' and agreement = false": lambda r, a: r.protecting("client") and _compares(r),
        "[trust] warmup waits for evidence about clients, which agreement = true gathers: set that, or leave warmup "
        "out": lambda r, a: r.trust.warmup and not r.trust.agreement,
        "[training] epochs makes as many steps as a client has rows, and [privacy] unit = 'example' counts the steps "
        "in which a row takes part: "
        "set steps in place of epochs": lambda r, a: r.protecting("example") and r.training.epochs is not None,
        "[trust] guard does rounds again, and [privacy] pays for each: leave guard out": lambda r, a: (
            r.privacy and r.trust.guard is not None
        ),
        "[evaluation.sets] {got[0]!r} measures on the clients' own rows, without noise: give a path in place of "
        "clients": lambda r, a: r.privacy and [kept.name for kept in r.evaluation.further if kept.clients is not None],
        "[privacy] simulated scales the server's noise: leave [secure] out": lambda r, a: (
            r.privacy and r.privacy.simulated and r.secure
        ),
        # Settings of two tables that need each other, or exclude each other.
        "[model] mode = 'factored' is for directions that are outer products, not for [directions] family = "
        "{r.directions.family!r}": lambda r, a: r.model.mode == "factored" and not r.directions.factored,
        "[trust] guard watches the held-out loss between rounds: set [evaluation] every, too": lambda r, a: (
            r.trust.guard is not None and not r.evaluation.every
        ),
        "[data] format = {r.data.format!r} does not go with [clients] split = {r.clients.split!r}; format "
        "'natural-instructions' and split 'tasks' need each "
        "other": lambda r, a: (r.data.format == "natural-instructions") != (r.clients.split == "tasks"),
        "[asynchronous] has no cohorts, and [clients] draw is of them: leave one of the two out": lambda r, a: (
            r.asynchronous and r.clients.draw != "each round"
        ),
        "[asynchronous] {got} needs as many clients, there are {r.clients.count}": lambda r, a: _beyond(r),
    },
    Where.ALGORITHM: {
        "[training] wire = 'sign' moves a coefficient by lr in a step: give it, about that of 'compact' times the mean "
        "|rho| of `fedkseed rounds`": lambda r, a: r.training.wire == "sign" and r.training.lr is None and _draws(a),
        "{name} can't tune a model whose weights are kept {r.model.storage}: "
        "set [model] storage = 'dense'": lambda r, a: r.model.storage != "dense" and not a.pooled,
        "{name} keeps weights, and those of past rounds are gone: [evaluation] best is for algorithms whose model "
        "is K coefficients, as fedkseed; leave it out": lambda r, a: r.evaluation.best is not None and not a.pooled,
        "{name} makes its directions from other pools than the recipe's, and [directions] family = "
        "{r.directions.family!r} is for algorithms whose model is K coefficients: "
        "take one, as fedkseed, or the family rademacher": lambda r, a: r.directions.factored and a.draws,
        "{name} does not read [privacy] unit = 'example': set unit = 'client', or use an algorithm whose model is "
        "K coefficients, as fedkseed": lambda r, a: r.protecting("example") and not a.pooled,
        **{
            f"{{name}} does not read {setting}: leave it out, or use an algorithm whose model is K coefficients, as "
            "fedkseed": lambda r, a, setting=setting, is_set=is_set: is_set(r) and setting not in a.strategy.reads
            for setting, is_set in OPTIONAL_SETTINGS.items()
        },
        "{name} takes derivatives, and {r.training.objective!r} has no gradient: set [training] objective = 'loss', or "
        "an algorithm with zeroth-order steps alone, "
        "as 'fedkseed'": lambda r, a: _differentiates(r, a) and r.training.objective != "loss",
        "{name} tunes the {got}, which is no part of the last layers: leave [model] last_layers out": lambda r, a: (
            r.model.last_layers
            and a.tuned not in ("all", "lora", "uni-lora")
            and ("output layer" if a.tuned == "output" else "input of the first layer")
        ),
        "{name} tunes adapters, and the output layer has none: leave [model] head out": lambda r, a: (
            r.model.head and a.adapts
        ),
        "[secure] hides the sizes of single clients' scalars, by which FedKSeed-Pro draws directions: "
        "use fedkseed": lambda r, a: r.secure and not a.sums,
        "[directions] shared is for scalars, and some clients of this recipe send K numbers: leave it "
        "out": lambda r, a: r.secure and r.directions.shared and (a.local != TWO or r.clients.backpropagating > 0),
        "[privacy] has no noise for the sizes of single clients' scalars, by which FedKSeed-Pro draws directions and "
        "which everybody could read in its broadcasts: "
        "use fedkseed": lambda r, a: r.protecting("client") and not a.sums and a.pooled,
        "[privacy] is for uploads of weights or of K numbers along a pool: use fedkseed": lambda r, a: (
            r.protecting("client") and not a.sums
        ),
    },
    Where.STATED: {
        "[training] {got} would change nothing: it is of two-point steps, and {name} takes none: "
        "set [derivatives] lr": lambda r, a: a.pooled and a.local not in (ONE, TWO) and _stated(r.training, "lr"),
        "[training] {got} would change nothing: it is of zeroth-order steps, and {name} takes none: "
        "leave it out": lambda r, a: (
            # A clip bounds the K numbers of clients that take derivatives, too (strategies/uploads.py).
            a.local not in (ONE, TWO) and _stated(r.training, "eps", "probes", *(() if a.pooled else ("clip",)))
        ),
        "[training] {got} would change nothing: it is of steps that take derivatives, and {name} takes none: "
        "set [training] steps": lambda r, a: not _differentiates(r, a) and _stated(r.training, "epochs"),
        "[derivatives] {got} would change nothing: it is of clients that take derivatives, and {name} has none: "
        "set [training] in its place, or [clients] backpropagating": lambda r, a: (
            a.pooled and not _differentiates(r, a) and _stated(r.derivatives, *DerivativesTable.model_fields)
        ),
        "[peft] {got} would change nothing: it is of adapters, and {name} tunes none: leave it out": lambda r, a: (
            not a.adapts and _stated(r.peft, *PeftTable.model_fields)
        ),
    },
    Where.RUN: {
        "masked uploads need [secure] norm, the largest norm of a client's change: "
        "`fedkseed tune` prints one": lambda r, a: r.secure and r.secure.norm is None,
        "[privacy] norm is missing: the largest norm of a client's change in a round; `fedkseed tune` prints "
        "it": lambda r, a: not r.secure and (noise := r.protecting("client")) and noise.norm is None,
    },
    Where.SIMULATION: {
        "clients of {name} remember the rounds that they have seen, and one model stands in for all of them here: "
        "set [clients] at_once = 1": lambda r, a: a.strategy.remembers and r.clients.at_once > 1
    },
    Where.ENGINE: {
        "clients of {name} have to remember every round, and the engine moves them from process to process: "
        "use --engine own": lambda r, a: a.strategy.remembers
    },
    Where.NETWORK: {
        "[model] dtype = 'auto' is measured on one machine, and all parties take the same type: `fedkseed pin RECIPE` "
        "writes it": lambda r, a: r.model.dtype == "auto",
        # Parties with files of their own: nobody runs code of another, and nobody sees another's rows.
        "[training] algorithm = {name!r} would run code of the server's on the clients' machines; over a network "
        "it is one of {got}": lambda r, a: r.training.algorithm not in ALGORITHMS and ", ".join(ALGORITHMS),
        "[training] objective = {r.training.objective!r} would run a function on the clients' machines; over a "
        "network it is one of {got}": lambda r, a: r.training.objective not in OBJECTIVES and ", ".join(OBJECTIVES),
        "[clients] split = {r.clients.split!r} shares out data that one party holds; over a network every client "
        "has a file of its own: set split = 'files'": lambda r, a: r.clients.split != "files",
        "[data] held_out = {r.data.held_out} draws from the rows of all parties, which no party sees; name a category: "
        "each client leaves it out of its file, "
        "and the server evaluates on its own rows of it": lambda r, a: not isinstance(r.data.held_out, str),
        "[evaluation.sets] {got[0].name!r}: clients = {got[0].clients} keeps back rows of the clients, which no server "
        "sees over a network: take path, a file of the server's, or held_out, a category that each client leaves out "
        "of its file; [evaluation] clients asks each client for what it "
        "gained": lambda r, a: [kept for kept in r.evaluation.sets or () if kept.clients is not None],
        "[directions] basis_digest is missing, by which each client checks its own file: `fedkseed serve` writes it, "
        "or `fedkseed pin RECIPE`": lambda r, a: r.directions.informed and r.directions.basis_digest is None,
        "[model] last_layers needs the names of its weights as tuned, by which clients know them: `fedkseed pin "
        "RECIPE` writes them": lambda r, a: r.model.last_layers and r.model.tuned is None and not a.adapts,
        "[asynchronous] is in virtual time; a network's rounds are synchronous: remove it": lambda r, a: r.asynchronous,
        "clients of {name} have to remember every round, and over a network one that is restarted forgets: "
        "choose another [training] algorithm": lambda r, a: a.strategy.remembers,
        # Servers that stand between the first one and the clients, and hand up sums.
        "[clients] count says {r.clients.count}, and [network] shards add up to {got}": lambda r, a: (
            r.network.shards and r.clients.count not in (None, total := sum(r.network.shards)) and total
        ),
        f"a shard reads uploads of {LARGEST_SHARD_UPLOAD:,} numbers, those of this recipe have up to {{got:,}}: set "
        "[directions] size or [training] steps lower, or take one server": lambda r, a: (
            (largest := max(r.directions.size, r.training.steps * r.training.probes)) > LARGEST_SHARD_UPLOAD
            and r.network.shards
            and largest
        ),
        "[evaluation] clients asks each client for what it gained, and shards hand up sums: remove it": lambda r, a: (
            r.network.shards and r.evaluation.clients is not None
        ),
        "[network] shards is for uploads that are added up along K directions, where neither [secure] nor the "
        "[privacy] of clients is set: choose fedkseed, -pro, -plus or -backprop, "
        "or one server": lambda r, a: r.network.shards and (not a.pooled or r.secure or r.protecting("client")),
        "[trust] rule = {r.trust.rule!r} with agreement = {got} compares single uploads, and a root with [network] "
        "shards sees sums: set rule = 'mean' "
        "and agreement = false": lambda r, a: r.network.shards and _compares(r) and str(r.trust.agreement).lower(),
    },
    Where.PAGE: {NO_SHARDS.format("one with a page"): lambda r, a: r.network.shards},
    Where.FLOWER_SERVER: {NO_SHARDS.format("a server over Flower"): lambda r, a: r.network.shards},
    Where.PEERS: {
        NO_SHARDS.format("a federation without one"): lambda r, a: r.network.shards,
        "[{got}] needs a server between the clients: peers see each upload. Remove it, "
        "or take `fedkseed serve`": lambda r, a: (r.secure and "secure") or (r.privacy and "privacy"),
        "[training] algorithm = {name!r}: peers take fedkseed, fedkseed-plus and fedkseed-backprop, whose uploads "
        "can be added up by whoever has another model at the moment": lambda r, a: not (a.pooled and a.sums),
    },
    Where.REMARK: {
        "[directions] shared = false: each client draws directions of its own, and the sum along one that few have "
        "drawn tells the server almost what one client sent, masked or not (`fedkseed docs privacy`); leave it out, "
        "or add noise by [privacy]": lambda r, a: _draws(a) and not r.directions.shared and r.secure and not r.privacy,
        "[trust] rule = {r.trust.rule!r} compares numbers along one direction, and here each client draws directions "
        "of its own: it leaves hardly anything of them; "
        "set [directions] shared = true, or rule = 'clipped'": lambda r, a: (
            _draws(a) and not r.directions.shared and r.trust.rule in COMPARES_ALONG_DIRECTIONS
        ),
        "[trust] rule = {r.trust.rule!r} and agreement = {r.trust.agreement} compare all uploads of a round, which the "
        "server holds for it, up to {got:.1f} GB; rule = 'mean' without agreement adds them up as they come": _held,
    },
}
