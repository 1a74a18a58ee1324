"""Verification of a peer's result from the uploads that it has kept: the whole set, once more, from nothing.

No model and no data are needed. Every entry is checked as if it came from a stranger, the model is computed by its
definition (`model_of`), and the adapter must hold its coefficients.
"""

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import FedKSeedError
from ...files import border
from ...recipe.reading import parse, tables, typed
from ...recipe.rules import Where, checked_algorithm, require_legal
from ...strategies.kseed import State
from ...weights.adapter import ADAPTER, Adapter
from ...wire.codec import decode
from ...wire.records import Broadcast, Run
from . import FILE
from .merge_rule import MergeRule, model_of
from .roster import Roster
from .store import UploadStore

RUN = "run of"  # the fact with recipe, base model and roster


@dataclass(frozen=True, slots=True)
class SetVerdict:
    """The facts that were checked and are right."""

    run: str  # digest of the run, hexadecimal
    uploads: int  # all that are kept, each with a signature that was checked
    broadcast: str  # SHA-256 of the last state's broadcast: peers with equal sets have the same
    adapter: bool  # whether there is one


def remember_run(store: UploadStore, text: bytes, roster: Roster) -> None:
    """Keep beside the uploads what else their verification needs.

    Args:
        text: the recipe as all peers have it.
    """
    base = store.rule.strategy.run.base.hex()
    store.remember(RUN, {"recipe": text.decode(), "base": base, "roster": roster.model_dump(mode="json")})


def recompute(directory: Path) -> tuple[MergeRule, State, int]:
    """The rule of a peer's run, the state after all rounds by the uploads that the peer has kept, and their number.

    Raises:
        FedKSeedError: there are none, or one of them does not belong to the run.
    """
    path = directory / FILE
    if not path.is_file():
        raise FedKSeedError(f"there is no {path}: {directory} is not the directory of a peer")
    address = f"{path.absolute().as_uri()}?mode=ro"
    with border(f"can't read {path}"), closing(sqlite3.connect(address, uri=True)) as database:
        facts = database.execute("SELECT value FROM facts WHERE name = ?", (RUN,)).fetchone()
        uploads = [data for (data,) in database.execute("SELECT data FROM entries ORDER BY name")]
    try:
        table = json.loads(facts[0])
        text, base, roster = table["recipe"].encode(), bytes.fromhex(table["base"]), typed(Roster, table["roster"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise FedKSeedError(f"{path} does not say of which run it is: {error!r}") from error
    recipe = parse(tables(text))
    require_legal(recipe, Where.NETWORK, Where.PEERS)
    algorithm = checked_algorithm(recipe)
    rule = MergeRule.of(text, recipe, algorithm.make(recipe, Run(algorithm.pool(recipe), base)), roster)
    return rule, model_of(rule, uploads), len(uploads)


def verify(directory: Path) -> SetVerdict:
    """Recompute a peer's tuned model from its uploads.

    Raises:
        FedKSeedError: an upload does not belong to the set, or the adapter does not follow from them.
    """
    rule, state, uploads = recompute(directory)
    has_adapter = (directory / ADAPTER).exists()
    if has_adapter:
        adapter, message = Adapter.load(directory / ADAPTER), decode(rule.broadcast(state), Broadcast)
        run = rule.strategy.run
        if (adapter.pool, adapter.base) != (run.pool, run.base.hex()):
            raise FedKSeedError(f"{directory / ADAPTER} is for {adapter.pool} and another base model than the run's")
        if not np.array_equal(adapter.coefficients, message.coefficients):
            raise FedKSeedError(
                f"{directory / ADAPTER} does not hold the coefficients that follow from the {uploads} uploads: some "
                "came after it was written (start the peer again, and it writes another), or something was changed"
            )
    return SetVerdict(rule.run.hex(), uploads, rule.broadcast_digest(state).hex(), has_adapter)
