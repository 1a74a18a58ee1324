"""Peers as a user starts them: real processes that are killed and cut off from each other. Minutes; not run by CI."""

import itertools
import sqlite3
import time
from contextlib import closing

import numpy as np
import pytest

from fedkseed import start
from fedkseed.network.peers import FILE
from fedkseed.network.peers.verify import recompute, verify
from fedkseed.network.protocol.networked_recipe import with_network_defaults
from fedkseed.run.simulation import Simulation

from .network import Peers, running

pytestmark = pytest.mark.network


def test_peers_that_are_not_disturbed_end_with_the_digest_of_the_recipe_in_one_process(model_folder, tmp_path):
    peers = Peers(tmp_path / "peers", model_folder, 3, 8.0)
    with running(peers, 300):
        peers.begin(30.0)
        for number in range(3):
            peers.run(number, "--until", 6)
        outcomes = peers.outcomes(200)
    alone = start(with_network_defaults(peers.recipe), tmp_path / "alone")
    assert {found["digest"] for found in outcomes} == {alone.digest}
    assert {(found["uploads"], found["from_here"], found["contradictions"]) for found in outcomes} == {(9, 9, 0)}
    assert len({found["set"] for found in outcomes}) == 1


def central_digest(peers: Peers, number: int) -> str:
    """Digest of the tuned model that the engine makes of the uploads that one peer has kept."""
    rule, state, _ = recompute(peers.state(number))
    setup = Simulation(with_network_defaults(peers.recipe)).setup
    assert rule.strategy.run == setup.strategy.run
    setup.load(state)
    return setup.held(state.round).tuned or ""


@pytest.mark.parametrize("count", [6, 20])
def test_peers_that_were_cut_off_and_killed_end_with_one_digest_that_of_the_central_run(model_folder, tmp_path, count):
    """Cuts and kills are drawn from a seed, one of each a round; some last for several rounds, over the end."""
    rounds, seconds = 6, 24.0
    rng, peers = np.random.default_rng(11), Peers(tmp_path / "peers", model_folder, count, seconds, rounds="rounds = 6")
    with running(peers, 1200):
        peers.begin(20.0 + 8.0 * count)  # PyTorch begins slowly, and two at a time
        for number in range(count):
            peers.run(number, "--until", 60)
        down: list[int] = []
        for round_ in range(rounds):
            time.sleep(max(0.0, peers.opens(round_) + 0.1 * seconds - time.time()))
            for number in down:
                peers.run(number, "--until", 60)
            order = [int(k) for k in rng.permutation(count)]
            cuts = sorted({0, count, *(int(k) for k in rng.integers(1, count, rng.integers(1, 4)))})
            peers.part([order[first:last] for first, last in itertools.pairwise(cuts)])
            time.sleep(max(0.0, peers.opens(round_) + float(rng.uniform(0.15, 0.6)) * seconds - time.time()))
            down = [int(k) for k in rng.permutation(count)[:2]]
            for number in down:
                peers.programs[number].kill()
        for number in down:
            peers.run(number, "--until", 60)
        time.sleep(max(0.0, peers.opens(rounds) + 5 - time.time()))
        assert len({copied(peers, number) for number in range(count)}) > 1, "they were apart"
        peers.part([range(count)])
        outcomes = peers.outcomes(400)
        print(outcomes[0], [one.output.count("done") for one in peers.programs.values()])
        assert len({(found["digest"], found["set"], found["uploads"]) for found in outcomes}) == 1
        assert outcomes[0]["contradictions"] == 0
        assert outcomes[0]["uploads"] > count * rounds / 2
        assert outcomes[0]["from_here"] < outcomes[0]["uploads"], "some were trained without what the others had"
        assert outcomes[0]["digest"] == central_digest(peers, 0)
        assert len({verify(peers.state(number)).broadcast for number in range(count)}) == 1


def copied(peers: Peers, number: int) -> frozenset[bytes]:
    """Names of the uploads that a peer has now."""
    with closing(sqlite3.connect(peers.state(number) / FILE)) as database:
        return frozenset(name for (name,) in database.execute("SELECT name FROM entries"))
