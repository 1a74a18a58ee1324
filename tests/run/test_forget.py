"""Runs recomputed without a client, beside runs whose server has refused each of its uploads."""

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkseed import FedKSeedError
from fedkseed.randomness import draw_directions
from fedkseed.recipe.reading import load_recipe
from fedkseed.round import Broadcasts, run_round
from fedkseed.run.digest_chain import Receipt
from fedkseed.run.forget import OF_UPLOADS, forget
from fedkseed.run.simulation import Simulation
from fedkseed.run.start_and_resume import resume, start
from fedkseed.run.store import DIVERGED, Store, pack
from fedkseed.run.verify import verify
from fedkseed.tuned.load import open_tuned
from fedkseed.wire.codec import decode
from fedkseed.wire.numbers import GRID

from ..conftest import recipe_text
from . import synthetic
from .synthetic import CLIENTS, ROUNDS, carry_on, change, federation, mend
from .test_verify import KINDS

KINDS = KINDS | {
    "centered": {"receipts": 'receipts = true\nrule = "centered clipping"'},
    "Adam, evidence and a schedule": {
        "steps": 'steps = 8\nserver = "adam"\nserver_lr = 0.01\nschedule = "cosine"',
        "receipts": "receipts = true\nagreement = true",
    },
}
DRAWN_BY_STATES = {"Pro", "asynchronous Pro"}  # kinds whose clients draw by what the states say


def states(store: Store) -> list[bytes]:
    kind = federation(store.recipe.read_text()).strategy.server.state
    return [pack(store.state(kind, done)) for done in range(store.rounds + 1)]


def refusing(store: Store, gone: set[int], directory: Path) -> Store:
    """A run in which the same clients are asked, the same uploads come, and those of some clients are refused."""
    recipe = store.recipe.read_text()
    parts, late = federation(recipe), "asynchronous" in recipe
    kept: dict[int, Receipt] = {}

    def round_(state: Any, state_after: Callable[[int], Any], broadcasts: Broadcasts) -> tuple[Any, Any]:
        if state.round == store.rounds:
            raise synthetic.StoppedError
        log = store.receipts(state.round + 1)
        kept.clear()
        kept.update({client: Receipt(receipt.upload) for client, receipt in log.items() if client not in gone})
        began = {client: state_after(state.round - 1) for client in log if late and state.round and client % 2}
        answers = [(client, receipt.upload) for client, receipt in kept.items()]
        after, report = run_round(parts.strategy, state, [*log], lambda _: answers, began, broadcasts=broadcasts)
        return after, dataclasses.replace(report, seconds=0.0, cpu_seconds=0.0)

    parts = dataclasses.replace(parts, round=round_, receipts=lambda: kept)
    if store.rounds < parts.recipe.training.rounds:
        with pytest.raises(synthetic.StoppedError):
            carry_on(directory, recipe, parts)
    else:
        carry_on(directory, recipe, parts)
    return Store(directory)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in DRAWN_BY_STATES | {"large states"}])
@pytest.mark.parametrize(("gone", "stop"), [({1}, None), ({0, 3}, 3)], ids=["one", "two, stopped"])
def test_each_state_is_that_of_a_run_that_has_refused_the_clients_uploads(tmp_path, kind, gone, stop):
    old = made(tmp_path / "old", kind, stop=stop)
    found = forget(old, gone, tmp_path / "new")
    new, expected = Store(tmp_path / "new"), refusing(old, gone, tmp_path / "expected")
    assert states(new) == states(expected)
    assert states(new)[-1] != states(old)[-1]
    assert (found.rounds, found.left_out) == (old.rounds, old.rounds * len(gone))
    reports = [{name: report[name] for name in OF_UPLOADS} for report in new.reports()]
    assert reports == [{name: report[name] for name in OF_UPLOADS} for report in expected.reports()]
    assert [report["bytes_total"] for report in new.reports()] == [report["bytes_total"] for report in old.reports()]
    assert verify(new).uploads == found.uploads == old.rounds * (CLIENTS - len(gone))


def made(directory: Path, kind: str, **options: Any) -> Store:
    return synthetic.begin(directory, synthetic.text(**KINDS[kind]), late="late" in KINDS[kind], **options)


@pytest.mark.parametrize("kind", ["synchronous", "asynchronous Pro", "large states"])
def test_the_old_run_stays_as_it_is_and_the_new_one_follows_from_it_alone(tmp_path, kind):
    old = made(tmp_path / "old", kind)
    before = {path: path.read_bytes() for path in old.directory.iterdir()}
    first, second = (forget(old, [1], tmp_path / name) for name in ("first", "second"))
    assert first == second
    assert {path: path.read_bytes() for path in old.directory.iterdir()} == before
    database = (tmp_path / "first" / "run.sqlite").read_bytes()
    uploads = [receipts[1].upload for done in range(1, old.rounds + 1) if (receipts := old.receipts(done))]
    assert not any(upload in database for upload in uploads), "none of the client's uploads is in the new run"


@pytest.mark.parametrize("kind", ["evidence, clipped", "asynchronous", "Adam on the server"])
def test_two_clients_one_after_the_other_are_two_at_once(tmp_path, kind):
    old = made(tmp_path / "old", kind)
    forget(old, [3], tmp_path / "first")
    forget(Store(tmp_path / "first"), [0], tmp_path / "second")
    forget(old, [0, 3], tmp_path / "both")
    second, both = Store(tmp_path / "second"), Store(tmp_path / "both")
    assert second.head(second.rounds) == both.head(both.rounds)
    assert second.forgotten == both.forgotten == "clients 0, 3"


@pytest.mark.parametrize("kind", sorted(DRAWN_BY_STATES))
def test_scalars_stay_along_the_directions_that_clients_have_drawn(tmp_path, kind):
    """FedKSeed-Pro by hand: draws by the old run's probabilities, sums of the others' uploads, new importance."""
    old, gone = made(tmp_path / "old", kind), 1
    forget(old, [gone], tmp_path / "new")
    strategy = federation(old.recipe.read_text()).strategy
    settings, pool, server = strategy.settings, strategy.run.pool, strategy.server
    began, after = ([Store(tmp_path / name).state(server.state, done) for done in range(ROUNDS + 1)]
                    for name in ("old", "new"))  # fmt: skip
    c, sizes, counts = np.zeros(pool.size), Counter[int](), Counter[int]()
    for done in range(ROUNDS):
        total, weight = np.zeros(pool.size), 0
        for client, receipt in old.receipts(done + 1).items():
            if client == gone:
                continue
            upload = decode(receipt.upload, *strategy.aggregator.replies)
            p, count = server.probabilities(began[upload.round]), upload.scalars.size
            drawn = draw_directions(pool.key, upload.round, client, count, pool.size, p)
            factor = (1 + done - upload.round) ** -settings.staleness_power
            for direction, scalar in zip(drawn.tolist(), (upload.scalars.astype(float) / GRID).tolist(), strict=True):
                total[direction] += upload.examples * np.rint(scalar * factor)
                sizes[direction] += abs(scalar)
                counts[direction] += 1
            weight += upload.examples
        c = c - total / weight * (settings.local.learning_rate(done) / settings.local.probes * GRID)
        assert np.array_equal(after[done + 1].coefficients, c)
        assert [counts[k] for k in range(pool.size)] == after[done + 1].counts.tolist()
        assert [sizes[k] for k in range(pool.size)] == after[done + 1].magnitudes.tolist()
    assert not np.array_equal(server.probabilities(after[ROUNDS]), server.probabilities(began[ROUNDS]))
    match = "recomputed without client 1, and its directions were drawn by states of the run before"
    with pytest.raises(FedKSeedError, match=match):
        verify(Store(tmp_path / "new"))
    refused(Store(tmp_path / "new"), tmp_path / "more", match, 0)


def test_only_rounds_of_the_tuned_model_are_recomputed(tmp_path):
    """A run that has diverged, or that chose another round, has a model of fewer rounds than it has done."""
    old = made(tmp_path / "old", "synchronous")
    old.remember(DIVERGED, 2)
    assert forget(old, [1], tmp_path / "new").rounds == 2
    assert Store(tmp_path / "new").rounds == 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Store:
    return made(tmp_path_factory.mktemp("forget") / "run", "synchronous")


def refused(store: Store, directory: Path, match: str, *clients: int) -> None:
    with pytest.raises(FedKSeedError, match=match):
        forget(store, clients, directory)
    assert not directory.exists()


def test_a_client_that_never_took_part_is_refused(finished, tmp_path):
    match = r"client 9 has no upload in the 6 rounds .* clients \[0, 1, 2, 3\] have: it has nothing of client 9"
    refused(finished, tmp_path / "new", match, 1, 9)


def test_a_round_of_which_nothing_is_left_is_refused(tmp_path):
    """Also where the client is alone in a round that its log has by right."""
    old = synthetic.begin(tmp_path / "old", synthetic.text(), stop=2)
    match = r"round 1 of .* has uploads of clients \[0, 1, 2, 3\] alone: without them no model follows"
    refused(old, tmp_path / "new", match, 0, 1, 2, 3)


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        ({"receipts": "receipts = false"}, "were not kept: only runs of K coefficients"),
        ({"late": "[secure]"}, "were masked, and the server has their sums alone"),
        (
            {"late": "[privacy]\nepsilon = 8.0\ndelta = 1e-5\nnorm = 0.1"},
            r"have noise, which is paid for by \[privacy\] once: a second sum",
        ),
        ({"algorithm": 'algorithm = "fedavg"'}, "the uploads of fedavg were not kept"),
        ({"algorithm": 'algorithm = "trap.py:ROW"'}, "no code is run that a run's recipe names"),
    ],
)
def test_a_run_that_lacks_what_it_needs_is_refused(finished, tmp_path, lines, match):
    refused(other(finished, tmp_path, lines), tmp_path / "new", match, 1)


def other(finished: Store, tmp_path: Path, lines: dict[str, str]) -> Store:
    """A run with another recipe: what it needs is looked up there before any round is."""
    store = Store(Path(shutil.copytree(finished.directory, tmp_path / "other")))
    store.change_recipe(synthetic.text(**lines))
    return store


def test_a_log_that_does_not_follow_is_refused_and_nothing_is_left_behind(finished, tmp_path):
    store = other(finished, tmp_path, {})
    change(store, "DELETE FROM uploads WHERE done = 4 AND client = 2")
    mend(store)
    refused(store, tmp_path / "new", "^round 4: the state is not what the algorithm makes", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_nothing_takes_the_place_of_what_is_there(finished, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with pytest.raises(FedKSeedError, match=r"mine exists already; choose another folder"):
        forget(finished, [1], tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_a_run_with_a_model_is_recomputed_finished_and_not_gone_on_with(tmp_path, model_folder, data_file):
    """By the whole path: tiny clients that train, the tuned model of the states, its evaluation by `resume`."""
    (tmp_path / "recipe.toml").write_text(recipe_text(model_folder, data_file, cohort="cohort = 4"))
    start(load_recipe(tmp_path / "recipe.toml"), tmp_path / "old")
    old = Store(tmp_path / "old")
    forget(old, [2], tmp_path / "new")
    tuned, before = open_tuned(tmp_path / "new"), open_tuned(tmp_path / "old")
    assert tuned.remark == "round 3 of 3; recomputed without client 2"
    assert tuned.adapter is not None
    assert before.adapter is not None
    assert not np.array_equal(tuned.adapter.coefficients, before.adapter.coefficients)

    simulation = Simulation(old.load_recipe())
    state = simulation.strategy.server.init()
    for done in range(3):
        uploads = [decode(receipt.upload, *simulation.strategy.aggregator.replies)
                   for client, receipt in old.receipts(done + 1).items() if client != 2]  # fmt: skip
        state = simulation.strategy.aggregate(state, uploads)
    assert np.array_equal(tuned.adapter.coefficients, simulation.setup.adapter(state).coefficients)

    result = resume(tmp_path / "new")
    assert result.stopped == f"recomputed without client 2, from a run with the head {old.head(3).hex()}"
    assert result.digest == simulation.setup.adapter(state).tuned
    assert verify(Store(tmp_path / "new")).digest == result.digest
    with (store := Store(tmp_path / "new")).locked():
        store.rollback(2)
    with pytest.raises(FedKSeedError, match="without client 2, and further rounds could count uploads of theirs"):
        resume(tmp_path / "new")
