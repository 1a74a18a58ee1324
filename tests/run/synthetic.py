"""Runs without a model, in milliseconds: real strategies and stores, and uploads of seeded random scalars."""

import dataclasses
import hashlib
import random
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from tomllib import loads
from typing import Any

import numpy as np
import pytest

from fedkseed import FedKSeedError, Recipe, start
from fedkseed.evaluation.statistics import Evaluation
from fedkseed.recipe.reading import parse
from fedkseed.recipe.rules import checked_algorithm
from fedkseed.round import Broadcasts, run_round
from fedkseed.run import digest_chain as chain
from fedkseed.run.digest_chain import Receipt
from fedkseed.run.loop import Federation, Result, WithoutModel, work
from fedkseed.run.store import Store
from fedkseed.strategy import Strategy
from fedkseed.wire.codec import decode, encode
from fedkseed.wire.records import Broadcast, Run

BASE = bytes(range(32))
ROUNDS, CLIENTS = 6, 4
RECIPE = f"""
seed = 7
[model]
name = "none"
[clients]
count = {CLIENTS}
cohort = {CLIENTS}
[directions]
size = 32
[training]
algorithm = "fedkseed"
rounds = {ROUNDS}
steps = 8
lr = 0.01
eps = 0.001
[trust]
receipts = true
"""
# Signature of an upload by a client: (rounds done before, client, broadcast, upload).
Sign = Callable[[int, int, bytes, bytes], bytes]


class StoppedError(Exception):
    """The end of a process, in the middle of a run."""


def start_and_stop(recipe: Recipe, directory: Path, monkeypatch: pytest.MonkeyPatch, rounds: int = 1) -> None:
    """Begin a run with a model, and end it after some rounds."""
    commit = Store.commit

    def stopping(self, state, *rest, **others):
        commit(self, state, *rest, **others)
        if state.round == rounds:
            raise StoppedError

    with monkeypatch.context() as patch:
        patch.setattr(Store, "commit", stopping)
        with pytest.raises(StoppedError):
            start(recipe, directory)


@dataclasses.dataclass(frozen=True)
class Scored(WithoutModel):
    """An evaluator whose scores follow from the state, so that runs have evaluations, too."""

    def evaluate(self, state: Any, what: str, write: bool) -> Evaluation:
        return Evaluation([float(np.abs(state.coefficients).sum()), 1.0], [], [])


def text(**changes: str) -> str:
    """The recipe; `changes` replace whole lines by their first word, or add lines to [trust]."""
    lines = [changes.pop(line.split(" ")[0], line) if line else line for line in RECIPE.splitlines()]
    return "\n".join((*lines, *changes.values())) + "\n"


def federation(recipe: str, *, stop: int | None = None, late: bool = False, sign: Sign | None = None) -> Federation:
    """The parts of a run whose clients answer with scalars that depend on seed, round, client and broadcast alone.

    Args:
        stop: number of rounds after which the process ends.
        late: whether odd clients began a round before, from the second round on.
    """
    parsed = parse(loads(recipe))
    algorithm = checked_algorithm(parsed)
    pool = algorithm.pool(parsed)
    strategy, kept = algorithm.make(parsed, Run(pool, BASE)), dict[int, Receipt]()

    def answers(messages: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        kept.clear()
        for client, data in messages.items():
            message = decode(data, Broadcast)
            rng = np.random.default_rng([message.round, client, *hashlib.sha256(data).digest()[:4]])
            differentiates = parsed.clients.backpropagating > 0 and client % 2 == 1
            upload = encode(strategy.client.example(message.round, client, 10 + client, differentiates, rng))
            kept[client] = Receipt(upload, sign(message.round, client, data, upload) if sign else b"")
            yield client, upload

    def round_(state: Any, state_after: Callable[[int], Any], broadcasts: Broadcasts) -> tuple[Any, Any]:
        if state.round == stop:
            raise StoppedError
        cohort = range(CLIENTS)
        began = {client: state_after(state.round - 1) for client in cohort if late and state.round and client % 2}
        after, report = run_round(strategy, state, cohort, answers, began, broadcasts=broadcasts)
        return after, dataclasses.replace(report, seconds=0.0, cpu_seconds=0.0)

    identity = {"directions": str(pool), "a base model of digest": BASE.hex(), "data of digest": "00"}
    evaluator = Scored(parsed, strategy)
    reach = 1 if late else 0
    return Federation(parsed, strategy, identity, round_, evaluator, reach=reach, holdings={"held_out": 2},
                      receipts=lambda: kept)  # fmt: skip


def carry_on(directory: Path, recipe: str, parts: Federation) -> Result:
    """A run from its beginning, or from its last finished round, to its end or to where its parts stop it."""
    if not (directory / "recipe.toml").exists():
        with Store.create(directory, recipe) as store:
            return work(store, parts)
    with (store := Store(directory)).locked():
        return work(store, parts)


def begin(directory: Path, recipe: str | None = None, **options: Any) -> Store:
    """A new run, done as far as `stop` says."""
    recipe = recipe or text()
    with Store.create(directory, recipe) as store, suppress(StoppedError):
        work(store, federation(recipe, **options))
    return Store(directory)


def resume(directory: Path, **options: Any) -> bytes:
    """Continue a run as `fedkseed resume` does; returns the tuned model."""
    store = Store(directory)
    with store.locked():
        store.load_recipe()
        work(store, federation(store.recipe.read_text(), **options))
    return store.adapter.read_bytes()


def flips(path: Path, count: int) -> Iterator[str]:
    """Flip one bit of a file at a seeded random place, and bring it back; `count` times, or each bit once."""
    whole = path.read_bytes()
    rng, bits = random.Random(path.name), len(whole) * 8
    for bit in rng.sample(range(bits), min(count, bits)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        yield f"bit {bit % 8} of byte {bit // 8}"
    path.write_bytes(whole)


def refused(action: Callable[[], object]) -> bool:
    """Whether an action ends with our own error; any other exception passes on."""
    try:
        action()
    except FedKSeedError:
        return True
    return False


def change(store: Store, statement: str, *values: Any) -> None:
    """Change a run's database as whoever has the file can."""
    with closing(sqlite3.connect(store.directory / "run.sqlite")) as database, database:
        assert database.execute(statement, values).rowcount, "the attack changes nothing"


def mend(store: Store, strategy: Strategy[Any] | None = None) -> None:
    """Recompute all digests of a run's rounds, as an attacker would who has changed something.

    Args:
        strategy: makes the broadcasts of the states, as they now are; None: their digests stay.
    """
    _mend(store, lambda done, parts: parts[-chain.SIZE :])
    if strategy is not None:
        _mend(
            store,
            lambda done, parts: chain.digest(
                encode(strategy.server.broadcast(store.state(strategy.server.state, done)))
            ),
        )


def _mend(store: Store, broadcast: Callable[[int, bytes], bytes]) -> None:
    with closing(sqlite3.connect(store.directory / "run.sqlite")) as database, database:
        before: bytes | None = None
        for done, state, report, parts in database.execute(
            "SELECT done, state, report, parts FROM rounds ORDER BY done"
        ).fetchall():
            rows = database.execute("SELECT client, upload, signature FROM uploads WHERE done = ?", (done,)).fetchall()
            receipts = {client: Receipt(upload, signature) for client, upload, signature in rows}
            made = chain.parts(state, report, receipts, broadcast(done, parts))
            if state == b"":  # it has a file of its own, or had one
                file = store.directory / f"state-{done}.safetensors"
                first = chain.digest(file.read_bytes()) if file.exists() else parts[: chain.SIZE]
                made = first + made[chain.SIZE :]
            before = chain.head(before, chain.link_of(made))
            database.execute("UPDATE rounds SET parts = ?, head = ? WHERE done = ?", (made, before, done))
