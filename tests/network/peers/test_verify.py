"""A peer's directory is verified from its uploads: what does not follow from them is refused."""

import sqlite3
from contextlib import closing
from tomllib import loads

import numpy as np
import pytest
from typer.testing import CliRunner

from fedkseed import Adapter, FedKSeedError
from fedkseed.cli import app
from fedkseed.network.peers import FILE
from fedkseed.network.peers.merge_rule import model_of
from fedkseed.network.peers.store import UploadStore
from fedkseed.network.peers.verify import recompute, remember_run, verify
from fedkseed.recipe.reading import parse
from fedkseed.run.loop import Coefficients, provenance
from fedkseed.run.store import pack
from fedkseed.wire.codec import decode
from fedkseed.wire.records import Broadcast

from .synthetic import RECIPE, ROUNDS, TRUST, Federation, roster


@pytest.fixture
def directory(tmp_path):
    """As a peer leaves it; the model's digest is any."""
    federation, text = Federation.of(), RECIPE + TRUST
    with closing(UploadStore(tmp_path / FILE, federation.rule)) as store:
        remember_run(store, text.encode(), roster())
        store.add(federation.everything(), ROUNDS)
        weights = Coefficients()
        weights.load(decode(store.rule.broadcast(store.state(ROUNDS)), Broadcast).coefficients)
    run = federation.rule.strategy.run
    made = provenance(parse(loads(text)), ROUNDS)
    Adapter(run.pool, weights.c, run.base.hex(), "00" * 32, ("*",), made).save(tmp_path / "adapter.safetensors")
    return tmp_path


def test_the_model_of_a_directory_is_that_of_its_set_and_its_adapter_follows(directory):
    federation = Federation.of()
    rule, state, uploads = recompute(directory)
    assert rule.run == federation.rule.run
    assert pack(state) == pack(model_of(federation.rule, federation.everything()))
    found = verify(directory)
    assert (found.uploads, found.adapter) == (uploads, True)
    assert uploads == len(federation.everything()) - 2  # of four contradicting ones two are kept
    shown = CliRunner().invoke(app, ["verify", str(directory)])
    assert shown.exit_code == 0
    assert f"{uploads} uploads, all signed; its adapter follows" in shown.output
    assert found.broadcast in shown.output


def test_an_upload_that_came_after_the_adapter_was_written_shows(directory):
    federation = Federation.of()
    with closing(UploadStore(directory / FILE, federation.rule)) as store:
        store.add([federation.entry(0, 0, draw=1).encoded], ROUNDS)
    with pytest.raises(FedKSeedError, match="does not hold the coefficients that follow from the 23 uploads"):
        verify(directory)
    (directory / "adapter.safetensors").unlink()
    assert not verify(directory).adapter


def test_an_upload_that_was_changed_or_is_of_nobody_shows(directory):
    with closing(sqlite3.connect(directory / FILE)) as database, database:
        (data,) = database.execute("SELECT data FROM entries LIMIT 1").fetchone()
        changed = bytearray(data)
        changed[-1] ^= 1
        database.execute("UPDATE entries SET data = ? WHERE data = ?", (bytes(changed), data))
    with pytest.raises(FedKSeedError, match="is not signed with the key of peer"):
        verify(directory)
    shown = CliRunner().invoke(app, ["verify", str(directory)])
    assert shown.exit_code == 2


def test_a_directory_of_nothing_and_one_without_its_facts_are_refused(directory, tmp_path):
    with pytest.raises(FedKSeedError, match="is not the directory of a peer"):
        verify(tmp_path / "nothing")
    with closing(sqlite3.connect(directory / FILE)) as database, database:
        database.execute("DELETE FROM facts")
    with pytest.raises(FedKSeedError, match="does not say of which run it is"):
        verify(directory)


def test_a_model_of_equal_weights_is_the_mean_of_what_two_parts_have_found_apart():
    """docs/peers.md, rule 3: with the mean, equal weights, and the same peers in each round."""
    federation = Federation.of(RECIPE + "[trust]\nmost_examples = 1\n")
    parts = [[federation.entry(c, r).encoded for c in part for r in range(ROUNDS)] for part in ((0, 1), (2, 3, 4))]
    apart = [model_of(federation.rule, part).coefficients for part in parts]
    together = model_of(federation.rule, parts[0] + parts[1]).coefficients
    np.testing.assert_allclose(together, (2 * apart[0] + 3 * apart[1]) / 5, rtol=1e-12, atol=1e-18)
