"""The remaining rounds of a run with clients on other machines, whatever carries its messages."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ....errors import FedKSeedError
from ....evaluation.statistics import Gain
from ....models.dtypes import with_dtype
from ....models.place import require_device
from ....recipe.algorithms import algorithm_of
from ....recipe.reading import own_recipe
from ....recipe.rules import Where, require_legal
from ....recipe.schema import BEHAVIOUR, Recipe
from ....run.activity import ActivityFile
from ....run.loop import Result, work
from ....run.privacy_plan import kept_secret, with_noise
from ....run.progress import Progress, Silent
from ....run.store import GAINS, KEPT, NONCES, Store
from ....run.trackers import Trackers
from ....strategy import Strategy
from ....wire.codec import encode
from ..carrier import Carrier
from ..envelope import NO_NONCE
from ..networked_recipe import recipe_for_clients, with_network_defaults
from ..receipt_checks import remember_audiences
from ..signatures import ServerSigning
from .client_numbers import ClientNumbers
from .clients import RemoteClients
from .rounds import federation, why_model


def begin(
    file: Path, changes: Sequence[str], directory: Path, *places: Where, note: Callable[[str], object],
    makes: bool = True,
) -> Recipe:  # fmt: skip
    """The recipe of a server; its run's directory is made, or holds the same run, which can go on.

    Args:
        file: of the recipe.
        changes: values in place of the recipe's, as `training.rounds=20`.
        places: of the server, whose rules hold beside those of a network.
        makes: whether the directory is made.

    Raises:
        FedKSeedError: the recipe can't be followed over a network, or the directory holds a run of another.
    """
    wanted = with_network_defaults(own_recipe(file, changes)).absolute()
    begun = Store(directory).load_recipe() if (directory / "recipe.toml").exists() else None
    if begun is not None and wanted.model.dtype == "auto":  # the run that goes on has measured
        wanted = wanted.having(model={"dtype": begun.model.dtype})
    if begun is not None:  # the server has written what is not stated
        written = {fact: getattr(begun.model, fact) for fact in BEHAVIOUR if getattr(wanted.model, fact) is None}
        wanted = wanted.having(model=written)
    wanted = with_dtype(wanted, note)
    require_legal(wanted, Where.NETWORK, *places)  # now, and not when the clients are there
    if why_model(wanted, algorithm_of(wanted.training.algorithm)) is not None:
        require_device(wanted.model.device)
    Trackers(wanted.report.to, Silent().note)  # refuses one whose package is missing
    if begun is not None:
        if begun.having(network=wanted.network, report=wanted.report) != wanted:
            raise FedKSeedError(
                f"{directory} holds a run of another recipe than {file}: undo the change, or choose another "
                "directory for the run; only [network] and [report] may change"
            )
    elif makes:
        with Store.create(directory, wanted.to_toml()):
            pass
    return wanted


def serve(
    directory: Path, carrier: Carrier, folder: str, progress: Progress, interrupt: Callable[[], object] = lambda: None
) -> Result:
    """Carry out the remaining rounds of a run with the clients behind a carrier.

    Args:
        folder: the transport's own in the run's directory, with what signs and the clients' keys.
        interrupt: may raise a `RoundStoppedError`, which ends this; called again and again.

    Raises:
        FedKSeedError: there is no run, another process works on the run, its model or data have changed, or too few
            clients have answered. All finished rounds are kept.
    """
    store = Store(directory)
    activity = ActivityFile(progress, store.load_recipe().report.to)
    with store.locked(), activity.shown_in(directory):
        recipe = store.load_recipe()
        shards = recipe.network.shards
        if shards is not None and (keys := ClientNumbers.registered(directory)) not in (0, len(shards)):
            raise FedKSeedError(f"[network] shards has {len(shards)} shards, {keys} keys are registered: one for each")
        numbers = ClientNumbers(directory, recipe.clients.count if shards is None else len(shards))
        count = numbers.count if shards is None else sum(shards)  # of clients, of all shards
        recipe = with_noise(recipe, count)
        minimum = recipe.network.minimum_of(recipe.clients.cohort_of(count))
        signing = ServerSigning.read(directory / folder, current_nonce(store))
        history = None if signing is None else store.history
        if signing is not None:
            remember_audiences(store, signing.audiences)
        remote = RemoteClients(carrier, numbers, b"", minimum, recipe.network, activity, signing, history, interrupt)
        before = store.rounds
        parts = federation(recipe, remote, kept_secret(recipe, directory), begins=before < 1)
        recipe = parts.recipe
        remote.recipe = recipe_for_clients(recipe, count)
        _keep_behaviour(store, recipe)
        result = work(store, parts)
        if algorithm_of(recipe.training.algorithm).pooled:  # kilobytes
            if was_over := store.rounds == before:  # then those come who were away at its end
                remote.wait_for(remote.numbers.expected.difference(kept_before(store)))
            hand_out(store, parts.strategy, recipe, remote, was_over)
        return replace(result, gains=[Gain.of(table) for table in store.recall(GAINS) or ()])


def _keep_behaviour(store: Store, recipe: Recipe) -> None:
    """Write into the run's recipe what its tokenizer and model do, where `recipe` has come to state it."""
    kept = store.load_recipe()
    stating = kept.having(model={fact: getattr(recipe.model, fact) for fact in BEHAVIOUR})
    if stating != kept:
        store.change_recipe(stating.to_toml())


def asks_for_gains(recipe: Recipe, progress: Progress) -> bool:
    """True if clients are to be asked what they gained; says so if masked uploads keep them from being asked."""
    if recipe.evaluation.clients is not None and recipe.secure is not None:
        progress.note("[secure] hides what is of one client: each measures its own gain, and the server is sent none")
    return recipe.evaluation.clients is not None and recipe.secure is None


def hand_out(store: Store, strategy: Strategy[Any], recipe: Recipe, remote: RemoteClients, unhurried: bool) -> None:
    """Send the tuned model of a finished run to the clients that are connected, and keep the gains that they send."""
    server, measuring = strategy.server, asks_for_gains(recipe, remote.progress)
    message = encode(server.broadcast(store.state(server.state, store.tuned)))
    sums = remote.hand_out(store.rounds, message, measuring, unhurried)
    kept = {*sums, *kept_before(store)}
    store.remember(KEPT, [current_nonce(store).hex(), sorted(kept)])
    who = "clients have kept" if recipe.network.shards is None else "shards have sent their clients"
    lacking = remote.numbers.expected - kept
    remedy = f"; the same command waits for {remote.named(*sorted(lacking))}, and sends it again" if lacking else ""
    remote.progress.note(f"{len(kept)} of {remote.numbers.count} {who} the tuned model{remedy}")
    gains = [gain_sum.gain(client) for client, gain_sum in sorted(sums.items()) if gain_sum is not None]
    if measuring:
        names = {gain.client for gain in gains}
        before = [table for table in store.recall(GAINS) or () if table["client"] not in names]
        store.remember(GAINS, before + [asdict(gain) for gain in gains])
        remote.progress.note(f"{len(gains)} of them have sent what they gained, as their owners allow")


def kept_before(store: Store) -> list[int]:
    """The clients that have kept the tuned model of a finished run by now; none after a rollback."""
    nonce, clients = store.recall(KEPT) or ("", [])
    return clients if nonce == current_nonce(store).hex() else []


def current_nonce(store: Store) -> bytes:
    """The random bytes that tell this run's tasks and answers from those of any other run, and of any other history.

    They are drawn when there are none since the beginning, or since the last rollback.
    """
    nonces = store.recall(NONCES) or [[0, None]]  # rounds done at the time, the nonce
    if nonces[-1][1] is None:
        nonces[-1][1] = secrets.token_bytes(len(NO_NONCE)).hex()
        store.remember(NONCES, nonces)
    return bytes.fromhex(nonces[-1][1])
