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
from ...weights.adapter import NAME, Adapter
from ...wire.codec import decode
from ...wire.records import Broadcast, Run
from .merge_rule import Rule, model_of
from .roster import Roster
from .store import FILE, UploadStore

RUN = "run of"  # the fact with recipe, base model and roster


@dataclass(frozen=True, slots=True)
class SetVerdict:
    """The extent of what was found right."""

    run: str  # digest of the run, hexadecimal
    uploads: int  # all that are kept, each with a signature that was checked
    broadcast: str  # SHA-256 of the broadcast that is made of the last state: peers with equal sets have the same
    adapter: bool  # whether there was one


def describe(copy: UploadStore, text: bytes, roster: Roster) -> None:
    """Keep in a copy what its verification needs besides the entries."""
    base = copy.rule.strategy.run.base.hex()
    copy.remember(RUN, {"recipe": text.decode(), "base": base, "roster": roster.model_dump(mode="json")})


def central(directory: Path) -> tuple[Rule, State, int]:
    """The rule of a peer's run, the state after all rounds of the set that the peer has kept, and the set's size.

    Raises:
        FedKSeedError: there is no such set, or an entry does not belong to it.
    """
    path = directory / FILE
    if not path.is_file():
        raise FedKSeedError(f"there is no {path}: {directory} is not the directory of a peer")
    with (
        border(f"can't read {path}"),
        closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as opened,
    ):
        facts = opened.execute("SELECT value FROM facts WHERE name = ?", (RUN,)).fetchone()
        entries = [data for (data,) in opened.execute("SELECT data FROM entries ORDER BY name")]
    try:
        table = json.loads(facts[0])
        text, base, roster = table["recipe"].encode(), bytes.fromhex(table["base"]), typed(Roster, table["roster"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise FedKSeedError(f"{path} does not say of which run it is: {error!r}") from error
    recipe = parse(tables(text))
    require_legal(recipe, Where.NETWORK, Where.PEERS)
    algorithm = checked_algorithm(recipe)
    rule = Rule.of(text, recipe, algorithm.make(recipe, Run(algorithm.pool(recipe), base)), roster)
    return rule, model_of(rule, entries), len(entries)


def verify(directory: Path) -> SetVerdict:
    """Recompute a peer's tuned model from its uploads.

    Raises:
        FedKSeedError: an upload does not belong to the set, or the adapter does not follow from them.
    """
    rule, state, uploads = central(directory)
    found = (directory / NAME).exists()
    if found:
        adapter, message = Adapter.load(directory / NAME), decode(rule.broadcast(state), Broadcast)
        run = rule.strategy.run
        if (adapter.pool, adapter.base) != (run.pool, run.base.hex()):
            raise FedKSeedError(f"{directory / NAME} is for {adapter.pool} and another base model than the run's")
        if not np.array_equal(adapter.coefficients, message.coefficients):
            raise FedKSeedError(
                f"{directory / NAME} does not hold the coefficients that follow from the {uploads} uploads: some came "
                "after it was written (start the peer again, and it writes another), or something was changed"
            )
    return SetVerdict(rule.run.hex(), uploads, rule.base(state).hex(), found)
