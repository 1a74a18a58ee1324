"""Checks of a machine before a run, a client's or a server's, each with a line that says what to do where it fails.

A check calls what decides the same for `join`, `serve` or a worker: what that refuses is the check's text.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import httpx
from packaging.requirements import Requirement

from ..errors import FedKSeedError, first_line
from ..files import locked
from ..models.dtypes import note_if_slow, slowness, with_dtype
from ..recipe.algorithms import algorithm_of
from ..recipe.basis_digest import with_basis
from ..recipe.rules import checked_algorithm
from ..recipe.schema import Recipe
from ..run.privacy_plan import with_noise
from ..run.progress import Silent
from .http_client import AnswerError
from .http_server import listen
from .https.join import HttpsClient, client_of
from .https.server import own_tls, require_keys
from .protocol import certs
from .protocol.addresses import SPACE
from .protocol.client.policy import RowView
from .protocol.client.recipe_consent import Owner, RecipeJournal, accepted_recipe, usable_rows
from .protocol.networked_recipe import ENVELOPE, largest_request, recipe_for_clients, with_network_defaults
from .protocol.server.rounds import why_model

ROUND = 1 << 14  # bytes of a round's reports and evaluation
# A name; what returns a line, or raises a FedKSeedError that says what to do; checks without which it can't be tried.
Check: TypeAlias = tuple[str, Callable[[], str], tuple[str, ...]]


class Finding(NamedTuple):
    """The result of a check: whether it has passed, None where it was not tried, and a line."""

    check: str
    passed: bool | None
    said: str


def findings(checks: list[Check]) -> Iterator[Finding]:
    """The results of some checks, in their order; whatever one of them raises, the others go on."""
    passed = set[str]()
    for name, found, needs in checks:
        lacking, done = [need for need in needs if need not in passed], False
        try:
            said = f"not tried, for want of {', '.join(lacking)}" if lacking else found()
            done = not lacking or None
        except FedKSeedError as error:
            said = str(error)
        except Exception as error:  # of another library, or of this program
            said = f"the check itself has failed ({type(error).__name__}: {first_line(error)})"
        passed |= {name} if done else set()
        yield Finding(name, done, said)


def client_checks(
    recipe_of: Callable[[], Recipe], owner_of: Callable[[], Owner], url: str, ca: Path, key: Path, directory: Path,
    reported: list[Finding] | None = None,
) -> list[Check]:  # fmt: skip
    """The checks of a client, in the order in which it meets what they find; see `client_of`.

    Args:
        reported: the findings so far, which the server gets in the end; None: it does not.
    """
    owner, notes, tokens = cache(owner_of), list[str](), list[str]()

    def asked(ask: Callable[[HttpsClient], str]) -> str:
        client = client_of(owner(), url, ca, key, directory)
        with closing(client.session.http):
            try:
                return ask(client)
            except (AnswerError, httpx.TransportError) as error:
                wait = "start the server, or let `fedkseed join` wait for it"
                raise FedKSeedError(f"{client.refuse_lasting(error)}; {wait}") from error

    def server(client: HttpsClient) -> str:
        ends = list[str]()
        client.session.challenge(lambda connection: ends.append(connection.getpeercert()["notAfter"]))
        return f"{url} answers{client.by}, with a certificate until {ends[0]}"

    def clock(client: HttpsClient) -> str:
        client.session.challenge()
        if not client.session.date:
            return f"{url} says no time, as an older release does"
        ahead = (datetime.now(UTC) - parsedate_to_datetime(client.session.date)).total_seconds()
        said = f"the clock here is {abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
        if abs(ahead) > certs.BEHIND.total_seconds():
            raise FedKSeedError(f"{said}, and certificates bear {certs.BEHIND.seconds:,} s: set the wrong one right")
        return said

    def registered(client: HttpsClient) -> str:
        if locked(directory / "client.lock"):  # a session would end that of the other
            return f"not asked, as `fedkseed join` is at work in {directory}"
        number = client.session.begin()
        tokens.append(client.session.token)
        return f"the server knows the key as that of client {number}"

    def report(client: HttpsClient) -> str:
        if not tokens:
            return "not reported, for want of a session"
        client.session.token = tokens[-1]
        client.session.tell(failed := [finding.check for finding in reported or () if finding.passed is False])
        return f"the server knows that {'these fail: ' + ', '.join(failed) if failed else 'all checks pass'}"

    @cache
    def recipes() -> tuple[Recipe, Recipe, int]:  # the server's, the client's, a number of clients
        recipe = recipe_of()
        basis = owner().basis if recipe.directions.informed else None
        recipe = with_dtype(with_network_defaults(recipe.having(directions={"basis": basis})), id)
        count = recipe.clients.count or recipe.clients.cohort
        followed = accepted_recipe(recipe_for_clients(recipe, count), owner())
        RecipeJournal(directory).require_room(RowView.of(followed), owner().policy.data.max_views)
        checked_algorithm(followed)
        return recipe, followed, count

    @cache
    def rows() -> tuple[Any, list[Any]]:
        from ..data.federated import own_share
        from ..run.setup import tokenizer_of

        (_, recipe, _), kept_back = recipes(), owner().policy.evaluation.kept_back or 0.0
        tokenizer = tokenizer_of(recipe, Silent())
        return tokenizer, own_share(recipe, tokenizer, notes.append, kept_back)[0]

    def step() -> str:
        from ..planning.forecast import step_seconds
        from ..run.setup import build

        (sent, recipe, count), (tokenizer, examples), limits = recipes(), rows(), owner().policy
        plain = recipe.having(secure=None, privacy=recipe.protecting("example"))  # without masks
        plain, basis = with_basis(with_noise(plain, count))
        setup = build(plain, tokenizer, basis, serves=True)
        limits.require_weights(recipe, setup.weights.layout.size)
        steps = setup.strategy.settings.work(setup.graph_of(0, count) is not None).count(len(examples))
        one = step_seconds(
            setup.strategy, [0],
            lambda watch: setup.client(0, count, examples, lambda loss: watch.tick(), noise=b"of no answer"),
        )  # fmt: skip
        said = f"a local step takes {one:.3g} s, the {steps:,} of a round {steps * one:.3g} s"
        if steps * one > (most := min(limits.training.max_seconds, sent.network.deadline)):
            remedy = "ask the server's owner for fewer or a later deadline, or take a quicker machine"
            raise FedKSeedError(f"{said}; the policy's max_seconds and [network] deadline leave {most:g} s: {remedy}")
        return said

    checks: list[Check] = [
        ("versions", versions, ()),
        ("settings", lambda: asked(lambda client: f"{key}, {ca} and {owner().data} can be used"), ()),
        ("server", lambda: asked(server), ("settings",)),
        ("clock", lambda: asked(clock), ("server",)),
        ("registered", lambda: asked(registered), ("server",)),
        ("disk", lambda: has_space(directory, SPACE), ()),
        ("policy", lambda: f"{recipes()[1].training.algorithm} may be asked for", ("settings",)),
        ("rows", lambda: usable_rows(owner()), ("settings",)),
        ("tokens", lambda: "; ".join([f"{len(rows()[1]):,} examples to train on", *notes]), ("policy", "rows")),
        ("processor", lambda: is_quick(recipes()[1]), ("policy",)),
        ("memory", lambda: has_memory(recipes()[1], [rows()[1]], []), ("tokens",)),
        ("step", step, ("memory",)),
    ]
    if reported is not None:
        checks.append(("reported", lambda: asked(report), ("registered",)))
    return checks


def server_checks(recipe_of: Callable[[], Recipe], directory: Path, keys: Path, host: str, port: int) -> list[Check]:
    """The checks of a server, in the order in which it meets what they find; see `serve` and `begin`."""

    @cache
    def recipe() -> Recipe:
        checked_algorithm(found := recipe_of())
        return found

    def cohort() -> int:
        shards = recipe().network.shards
        return recipe().clients.cohort_of(len(certs.public_keys(keys)) if shards is None else sum(shards))

    def certificate() -> str:
        warning = certs.check(keys)
        own_tls(keys)
        return warning or f"{keys / 'server.pem'} is valid for more than 30 days"

    def clients() -> str:
        require_keys(recipe(), count := len(certs.public_keys(keys)), keys)
        least = recipe().network.minimum_of(cohort())
        return f"{keys} has the keys of {count} clients, and a round is made of {least} answers or more"

    def free() -> str:
        with closing(listen(host, port)):
            return f"port {port} of {host} is free"

    def disk() -> str:
        asked, algorithm = recipe(), algorithm_of(recipe().training.algorithm)
        uploads = asked.keeps_uploads * cohort() * (largest_request(asked) - ENVELOPE)
        needed = asked.training.rounds * (ROUND + 16 * asked.directions.size + uploads)
        if not algorithm.pooled:  # the states of two rounds, the tuned model, and uploads that wait
            from ..models.sizes import sizes_of

            tuned = sizes_of(asked.model.name).tuned(algorithm.tuned, asked.peft, asked.model.last_layers)
            needed = 4 * tuned * (3 + cohort())
        return has_space(directory, SPACE + needed)

    def memory() -> str:
        if why_model(recipe(), algorithm_of(recipe().training.algorithm)) is None:
            return "no model is loaded"
        from ..data.federated import own_held_out
        from ..run.setup import tokenizer_of

        held_out, sets = own_held_out(recipe(), tokenizer_of(recipe(), Silent()))
        rows = [row for each in (held_out, *sets.values()) for row in each.examples]
        return f"{has_memory(recipe(), [], rows)} with {len(rows):,} held-out rows"

    return [
        ("versions", versions, ()),
        ("recipe", lambda: f"{recipe().training.algorithm} can be served", ()),
        ("certificate", certificate, ()),
        ("clients", clients, ("recipe",)),
        ("port", free, ()),
        ("disk", disk, ("clients",)),
        ("memory", memory, ("recipe",)),
    ]


def versions() -> str:
    """The versions of packages; refuses those that this release of fedkseed does not take."""
    for wanted in map(Requirement, requires("fedkseed") or ()):
        applies = wanted.marker is None or wanted.marker.evaluate({"extra": "https"})
        if applies and not wanted.specifier.contains(there := version(wanted.name), prereleases=True):
            raise FedKSeedError(f"{wanted} is needed, {there} is here: pip install --upgrade 'fedkseed[https]'")
    shown = ", ".join(f"{name} {version(name)}" for name in ("fedkseed", "torch", "transformers"))
    return f"Python {sys.version.split()[0]}, {shown}"


def has_space(directory: Path, needed: int) -> str:
    """Refuse a directory that can't be written, or has too little room."""
    there = next(path for path in (directory.resolve(), *directory.resolve().parents) if path.exists())
    free, said = shutil.disk_usage(there).free, f"up to {needed / 1e6:,.1f} MB are needed in {directory}"
    if free < needed or not os.access(there, os.W_OK | os.X_OK):
        raise FedKSeedError(f"{said}, and {there} can't be written or has {free / 1e6:,.1f} MB alone: take another")
    return f"{said}, {free / 1e6:,.1f} are free"


def is_quick(recipe: Recipe) -> str:
    """Refuse a processor that emulates the type of the recipe's weights."""
    slow, model = list[str](), recipe.model
    note_if_slow(model.dtype, model.device, slow.append)
    if slow:
        raise FedKSeedError(f"{slow[0]}: the recipe's owner can choose that, else rounds take so much longer here")
    ratio = slowness("bfloat16", model.device)
    return f"weights are {model.dtype}; bfloat16 takes {ratio:.2g} times as long as float32"


def has_memory(recipe: Recipe, clients: list[list[Any]], held_out: list[Any]) -> str:
    """Refuse a recipe with too little memory for a client, or for a server, which trains none."""
    from ..data.federated import ClientShares
    from ..run.needed_memory import require_room

    recipe = recipe.having(clients={"at_once": 1})
    needed = require_room(recipe, ClientShares(clients, held_out, 0), int(not clients))
    return "not predicted: the sizes of the model can't be read" if needed is None else f"at most {needed}"
