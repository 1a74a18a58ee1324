"""Verification of runs whose server has changed something and mended all digests afterwards, and of honest ones."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedkseed import Adapter, FedKSeedError, Pool
from fedkseed.recipe.reading import load_recipe
from fedkseed.recipe.rules import checked_algorithm
from fedkseed.run import digest_chain as chain
from fedkseed.run.store import Store, pack
from fedkseed.run.verify import verify
from fedkseed.wire.codec import decode, encode

from . import synthetic
from .synthetic import CLIENTS, ROUNDS, change, mend

OTHER_BROADCAST = "the broadcast that the clients were sent is not made of the state"
KINDS = {
    "synchronous": {},
    "Pro": {"algorithm": 'algorithm = "fedkseed-pro"'},
    "signs": {"rounds": f'rounds = {ROUNDS}\nwire = "sign"'},
    "mixed with changes": {"cohort": f"cohort = {CLIENTS}\nbackpropagating = 0.5"},
    "Adam on the server": {"steps": 'steps = 8\nserver = "adam"\nserver_lr = 0.01'},
    "evidence, clipped": {"receipts": 'receipts = true\nagreement = true\nrule = "clipped"'},
    "shorter first steps": {"receipts": "receipts = true\nagreement = true\nwarmup = 3"},
    "asynchronous": {"late": "[asynchronous]\nbuffer = 4\nmax_staleness = 1"},
    "asynchronous Pro": {"algorithm": 'algorithm = "fedkseed-pro"', "late": "[asynchronous]\nbuffer = 4"},
    "large states": {"size": "size = 131072", "rounds": "rounds = 4"},
}


def begin(directory: Path, kind: str, **options) -> Store:
    return synthetic.begin(directory, synthetic.text(**KINDS[kind]), late="late" in KINDS[kind], **options)


@pytest.mark.parametrize("kind", KINDS)
def test_an_honest_run_verifies_before_its_end_and_after(tmp_path, kind):
    store = begin(tmp_path / "run", kind, stop=2)
    assert (found := verify(store)).rounds == 2
    assert found.head == store.head(2).hex()

    store = Store(tmp_path / "run")
    synthetic.resume(store.directory, late="late" in KINDS[kind])
    found, rounds = verify(store), load_recipe(store.recipe).training.rounds
    assert (found.rounds, found.uploads, found.signed, found.unchecked) == (rounds, rounds * CLIENTS, 0, 0)
    assert found.head == store.head(rounds).hex()
    assert len(list(store.directory.glob("state-*"))) == (2 if kind == "large states" else 0)


def test_the_kinds_of_runs_are_what_they_are_called(tmp_path):
    """Else the test above could hold ten times the same run to be honest."""
    late = begin(tmp_path / "late", "asynchronous")
    assert {age for report in late.reports() for age in report["staleness"]} == {0, 1}
    mixed = begin(tmp_path / "mixed", "mixed with changes")
    assert len({len(receipt.upload) for receipt in mixed.receipts(1).values()}) == 2
    coefficients = set()
    for kind in KINDS:
        store = begin(tmp_path / f"{kind}, again", kind)
        coefficients.add(Adapter.load(store.adapter).coefficients.tobytes())
    assert len(coefficients) == len(KINDS)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return begin(tmp_path_factory.mktemp("verify") / "run", "synchronous", sign=signature).directory


@pytest.fixture
def run(finished, tmp_path) -> Store:
    return Store(Path(shutil.copytree(finished, tmp_path / "run")))


def signature(done: int, client: int, broadcast: bytes, upload: bytes) -> bytes:
    """SHA-256 with a secret of the client's; network/protocol/test_receipt_checks.py has real keys."""
    return hashlib.sha256(b"secret" + bytes([done, client]) + broadcast + upload).digest()


def signed(done: int, client: int, broadcast: bytes, upload: bytes, made: bytes) -> bool:
    return made == signature(done, client, broadcast, upload)


def found(store: Store, match: str, check=None) -> None:
    """Verify a run whose digests fit, and expect that the attack is found."""
    mend(store)
    store.require_sound()
    with pytest.raises(FedKSeedError, match=match):
        verify(store, check)


def other_upload(store: Store, done: int, client: int) -> bytes:
    """The upload of a client with its scalars turned around."""
    strategy = synthetic.federation(store.recipe.read_text()).strategy
    upload = decode(store.receipts(done)[client].upload, *strategy.aggregator.replies)
    return encode(replace(upload, scalars=-upload.scalars))


def test_an_upload_that_the_server_has_changed_is_found(run):
    change(run, "UPDATE uploads SET upload = ? WHERE done = 3 AND client = 1", other_upload(run, 3, 1))
    found(run, "^round 3: the state is not what the algorithm makes of the 4 uploads")


@pytest.mark.parametrize(
    ("attack", "match"),
    [
        ("DELETE FROM uploads WHERE done = 4 AND client = 2", "4: the state is not what the algorithm makes of the 3"),
        ("DELETE FROM uploads WHERE done = 2", "2: its uploads can't be added up: round 1 got no upload"),
        (
            "INSERT INTO uploads SELECT done, 77, upload, signature FROM uploads WHERE done = 2 AND client = 0",
            "2: the upload of client 77 says that it is of client 0",
        ),
        ("UPDATE uploads SET upload = x'00' WHERE done = 5 AND client = 0", "5: the upload of client 0 can't be read"),
        (
            "UPDATE uploads SET done = 99 WHERE done = 2; UPDATE uploads SET done = 2 WHERE done = 3; "
            "UPDATE uploads SET done = 3 WHERE done = 99",
            "2: ",
        ),
        (
            "UPDATE uploads SET client = 99 WHERE done = 2 AND client = 0; UPDATE uploads SET client = 0 WHERE done = "
            "2 AND client = 1; UPDATE uploads SET client = 1 WHERE done = 2 AND client = 99",
            "2: the upload of client 0 says that it is of client 1",
        ),
    ],
    ids=["one left out", "all left out", "of nobody", "no message", "two rounds swapped", "two clients swapped"],
)
def test_other_uploads_than_the_clients_are_found(run, attack, match):
    for statement in attack.split("; "):
        change(run, statement)
    found(run, f"^round {match}")


@pytest.mark.parametrize("name", ["coefficients", "magnitudes", "counts"])
def test_a_state_that_the_server_has_changed_is_found(run, name):
    strategy = synthetic.federation(run.recipe.read_text()).strategy
    for done in (0, 2, ROUNDS):
        copy = Store(Path(shutil.copytree(run.directory, run.directory.with_name(f"copy {done}"))))
        state = copy.state(strategy.server.state, done)
        values = getattr(state, name).copy()
        values[5] += 1
        change(copy, "UPDATE rounds SET state = ? WHERE done = ?", pack(replace(state, **{name: values})), done)
        found(copy, f"^round {done}: the state is not what")


def adapter(store: Store, **changes) -> None:
    """Write another adapter into the run, with a checksum that fits."""
    replace(Adapter.load(store.adapter), **changes).save(store.adapter)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"coefficients": np.zeros(32, np.float32)}, "does not hold the coefficients of the state after 6 rounds"),
        ({"base": "ab" * 32}, "is for .* and a base model of digest abab"),
        ({"pool": Pool(1, 32, "hadamard")}, r"is for Pool\(key=1"),
        ({"patterns": ("lm_head*",)}, r"tunes \['lm_head\*'\], the run tuned \['\*'\]"),
    ],
)
def test_an_adapter_that_the_server_has_changed_is_found(run, changes, match):
    adapter(run, **changes)
    found(run, match)


@pytest.mark.parametrize(("name", "value"), [("model", "another"), ("rounds", 5), ("template", "alpaca")])
def test_an_adapter_that_claims_another_origin_is_found(run, name, value):
    adapter(run, provenance=Adapter.load(run.adapter).provenance | {name: value})
    found(run, f"says {name} = {value!r}")


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("a base model of digest", "ab" * 32, f"^round 0: {OTHER_BROADCAST}"),
        ("a base model of digest", "no hex", "does not say with which base model it began"),
        ("a base model of digest", 7, "does not say with which base model it began"),
        ("a base model of digest", "ab", "a base model's digest has 32 bytes, got 1"),
        ("directions", "Pool of another key", "the run began with Pool of another key, its recipe says"),
    ],
)
def test_a_run_that_claims_another_base_or_pool_is_found(run, name, value, match):
    run.remember("identity", run.recall("identity") | {name: value})
    found(run, match)


@pytest.mark.parametrize("value", [None, [], 3, {}])
def test_a_run_that_claims_no_base_at_all_is_found(run, value):
    run.remember("identity", value)
    found(run, "does not say with which base model it began")


def other_recipe(store: Store, old: str, new: str) -> None:
    text = store.recipe.read_text()
    assert old in text
    store.change_recipe(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("lr = 0.01", "lr = 10.0", f"^round 0: {OTHER_BROADCAST}"),
        ("steps = 8", "steps = 9", f"^round 0: {OTHER_BROADCAST}"),
        ("[trust]", '[trust]\nrule = "clipped"', "^round 1: the state is not what the algorithm makes"),
    ],
)
def test_a_recipe_that_the_server_has_changed_is_found(run, old, new, match):
    other_recipe(run, old, new)
    found(run, match)


def test_a_broadcast_that_is_not_made_of_the_state_is_found(run):
    """The attack: a chosen model for one round, which the log names, and the true state after it."""
    parts = run.row(3).parts[: -chain.SIZE] + chain.digest(b"a broadcast of another model")
    change(run, "UPDATE rounds SET parts = ? WHERE done = 3", parts)
    found(run, f"^round 3: {OTHER_BROADCAST}")


def test_a_recipe_that_pins_another_base_is_found(run):
    other_recipe(run, 'name = "none"', f'name = "none"\ndigest = "{"ab" * 32}"')
    found(run, "its recipe says another")


def test_no_code_is_run_that_a_strangers_run_names(run, tmp_path):
    """The attack: a run's directory with a Python file in it, sent to whoever wants to verify it."""
    trap, sprung = tmp_path / "trap.py", tmp_path / "sprung"
    trap.write_text(f"import pathlib; pathlib.Path({str(sprung)!r}).touch()\n")
    other_recipe(run, 'algorithm = "fedkseed"', f'algorithm = "{trap}:ROW"')
    found(run, "no code is run that a run's recipe names")
    assert not sprung.exists()
    with pytest.raises(FedKSeedError):
        checked_algorithm(load_recipe(run.recipe))
    assert sprung.exists(), "the trap works"


def test_a_server_that_computes_all_later_rounds_anew_is_found_by_the_signatures_alone(tmp_path):
    """It has turned an upload around in round 2 and carried the run on from there, so that each state follows."""
    store = begin(tmp_path / "run", "synchronous", stop=2, sign=signature)
    change(store, "UPDATE uploads SET upload = ? WHERE done = 2 AND client = 1", other_upload(store, 2, 1))
    strategy = synthetic.federation(store.recipe.read_text()).strategy
    uploads = [decode(receipt.upload, *strategy.aggregator.replies) for receipt in store.receipts(2).values()]
    forged = strategy.aggregate(store.state(strategy.server.state, 1), uploads)
    change(store, "UPDATE rounds SET state = ? WHERE done = 2", pack(forged))
    mend(store, strategy)
    synthetic.resume(store.directory, sign=signature)
    assert (passed := verify(store)).rounds == ROUNDS
    assert (passed.signed, passed.unchecked) == (0, ROUNDS * CLIENTS), "and says that no signature was checked"
    found(store, "^round 2: the upload of client 1 is not signed by it for this run and its broadcast", signed)


def test_signatures_of_an_honest_run_are_checked_for_the_broadcast_that_the_states_make(run, tmp_path):
    assert (verify(run, signed).signed, verify(run, signed).unchecked) == (ROUNDS * CLIENTS, 0)
    late = begin(tmp_path / "late", "asynchronous Pro", sign=signature)
    assert verify(late, signed).signed == ROUNDS * CLIENTS


@pytest.mark.parametrize("value", [b"", bytes(32)])
def test_a_missing_or_forged_signature_is_found(run, value):
    change(run, "UPDATE uploads SET signature = ? WHERE done = 4 AND client = 3", value)
    found(run, "^round 4: the upload of client 3 is not signed by it", signed)


def test_a_run_without_uploads_is_refused_and_not_called_right(tmp_path):
    store = synthetic.begin(tmp_path / "run", synthetic.text(receipts="receipts = false"))
    with pytest.raises(FedKSeedError, match="were not kept: only runs of K coefficients"):
        verify(store)


def test_a_run_that_has_not_begun_is_refused(tmp_path):
    with Store.create(tmp_path / "run", synthetic.text()) as store:
        store.require_same(synthetic.federation(synthetic.text()).identity)
    with pytest.raises(FedKSeedError, match="no state yet; there is nothing to recompute"):
        verify(store)


def test_digests_are_mended_as_the_store_makes_them(run):
    """Else the attacks above would be found by their digests."""
    heads = [run.head(done) for done in range(ROUNDS + 1)]
    change(run, "UPDATE rounds SET parts = x'00', head = x'00'")
    mend(run, synthetic.federation(run.recipe.read_text()).strategy)
    assert [run.head(done) for done in range(ROUNDS + 1)] == heads
