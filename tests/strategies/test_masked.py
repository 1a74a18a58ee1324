"""FedKSeed with masked uploads: the model of a clear sum, from messages that show nothing else."""

import math
from contextlib import closing
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from fedkseed import FedKSeedError, Pool, Run, Simulation, decode, encode
from fedkseed.local.work import LocalWork
from fedkseed.randomness import EVERYONE, draw_directions
from fedkseed.round import Round, run_round
from fedkseed.secure import member, noise
from fedkseed.secure.accounting import noise_for
from fedkseed.secure.grid import Grid
from fedkseed.strategies.kseed import KSeed
from fedkseed.strategies.masked import Masks, masked, simulated_key
from fedkseed.strategy import Masking, Noise, Settings
from fedkseed.wire.records import Masked, Secured, Shares, Survivors

MASKS = "[secure]\nnorm = 0.1\n"
EPSILON, DELTA, TIMES = 2.0, 1e-6, 10


def clear(simulation: Simulation, state, there):
    """The state after a round, from the clear numbers of each client, added up as integers."""
    strategy = simulation.strategy
    total, message, grid = 0, strategy.server.broadcast(state), strategy.aggregator.masks.grid
    for number in there:
        client = simulation.client(number)
        strategy.client.sync(message, client.weights)
        change = strategy.client.change(strategy.client.inner.train(message, client))
        total = total + grid.coded(change, state.round, number)
    mean = grid.change(total, state.round) / len(there)
    if strategy.settings.shared:
        along, mean, pool = mean, np.zeros(strategy.run.pool.size), strategy.run.pool
        np.add.at(mean, draw_directions(pool.key, state.round, EVERYONE, along.size, pool.size, None), along)
    return strategy.server.stepped(state, -mean)


def carried(simulation: Simulation, gone=(), silent=(), seen=None):
    """A transport from which clients are missing in the first leg, or in the second."""

    def transport(messages):
        for client, reply in simulation.transport(messages):
            second = isinstance(decode(messages[client], Secured, Survivors), Survivors)
            if seen is not None:
                seen.append((client, messages[client], reply))
            if client not in (silent if second else gone):
                yield client, reply

    return transport


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": "size = 64\nshared = true"},
        {"algorithm": 'algorithm = "fedkseed-backprop"'},
        {"algorithm": 'algorithm = "fedkseed-plus"', "family": 'family = "rademacher"', "size": "size = 50"},
    ],
    ids=["scalars", "shared", "derivatives", "output"],
)
def test_masked_rounds_have_the_states_of_clear_integer_sums(simulation, options):
    own = simulation(MASKS, **options)
    state = own.strategy.server.init()
    for _ in range(2):
        expected = clear(own, state, range(4))
        state, report = own.round(state)
        assert np.array_equal(state.coefficients, expected.coefficients)
        assert state.coefficients.any()
        assert np.isnan(report.loss), "clients report no losses"


def test_a_client_that_leaves_before_or_between_the_legs_changes_nothing_for_the_others(simulation):
    for gone, silent in [((2,), ()), ((), (3,))]:
        own = simulation(MASKS)
        start = own.strategy.server.init()
        there = [client for client in range(4) if client not in gone]
        state, _ = run_round(own.strategy, start, range(4), carried(own, gone, silent))
        assert np.array_equal(state.coefficients, clear(own, start, there).coefficients)
    for gone, silent, reason in [
        ((1, 2), (), "2 of 4 masked uploads have come, a sum is made from 3 on"),
        ((), (1, 2), "gave shares of client 0's masks, 3 are needed; nothing of the round"),
    ]:
        own = simulation(MASKS)
        with pytest.raises(FedKSeedError, match=reason):
            run_round(own.strategy, own.strategy.server.init(), range(4), carried(own, gone, silent))


def test_what_the_server_sees_is_masked_numbers_and_bytes_counted_are_bytes_encoded(simulation):
    own, seen = simulation(MASKS), []
    state = own.strategy.server.init()
    _, report = run_round(own.strategy, state, range(4), carried(own, seen=seen))
    kinds = [type(decode(reply, Masked, Shares)) for _, _, reply in seen]
    assert kinds == [Masked] * 4 + [Shares] * 4
    assert report.bytes_up == max(sum(len(reply) for c, _, reply in seen if c == client) for client in range(4))
    assert report.bytes_down == max(sum(len(sent) for c, sent, _ in seen if c == client) for client in range(4))
    for client, _, reply in seen[:4]:
        other = decode(seen[4 - client - 1][2], Masked).numbers
        assert not np.array_equal(decode(reply, Masked).numbers, other) or client == 3 - client


def test_processes_side_by_side_give_the_same_states(simulation):
    one, two = simulation(MASKS), simulation(MASKS, count="count = 4\nat_once = 2\nthreads = 1")
    states = []
    for own in (one, two):
        state = own.strategy.server.init()
        for _ in range(2):
            state, _ = own.round(state)
        states.append(state.coefficients)
    assert np.array_equal(*states)


def test_a_wrong_share_spoils_the_round_and_not_the_state(simulation):
    own = simulation(MASKS)

    def transport(messages):
        for client, reply in own.transport(messages):
            if client == 1 and isinstance(record := decode(reply, Masked, Shares), Shares):
                yield client, encode(replace(record, data=bytes([record.data[0] ^ 1]) + record.data[1:]))
            else:
                yield client, reply

    state = own.strategy.server.init()
    with pytest.raises(FedKSeedError, match="a wrong share or numbers beyond the grid"):
        run_round(own.strategy, state, range(4), transport)
    assert not state.coefficients.any()


def test_ten_clients_send_seven_kilobytes():
    """The sizes that docs/privacy.md states."""
    run, keys = Run(Pool(1, 4096, "hadamard"), bytes(32)), {n: bytes(32) for n in range(10)}
    settings = Settings(run, LocalWork(rounds=1, steps=200), secure=Masking(1.0, keys=keys))
    both = [masked(KSeed.make(replace(settings, shared=shared))) for shared in (False, True)]
    sizes = [len(encode(one.client.example(0, 1, 1, False, np.random.default_rng(0)))) for one in both]
    assert sizes == [6921, 1161]


def noisy(
    colluding: float = 0.0, multiplier: float | None = None, bits: int = 8, neighbours: int | None = None
) -> Masks:
    """The masks of a run whose policy allows EPSILON for TIMES rounds."""
    noise = Noise(multiplier or noise_for(EPSILON, DELTA, TIMES), colluding=colluding)
    settings = Settings(Run(Pool(1, 64), bytes(32)), LocalWork(rounds=1, steps=1), noise=noise)
    return Masks(settings, Masking(1.0, bits, neighbours), Grid(1.0, bits, 64, 1))


def true_epsilon(masks: Masks, variance: float) -> float:
    """ε by dp-accounting of TIMES answers that this noise alone hides."""
    return dp_accounting.get_epsilon_gaussian(math.sqrt(variance / TIMES) / masks.grid.sensitivity, DELTA)


@pytest.mark.parametrize("colluding", [0.0, 0.2, 0.49])
def test_invented_clients_do_not_raise_epsilon(colluding):
    """The attack: a list of clients whose keys are the server's, but for one; it was 652 in place of 2 of 10,000."""
    masks = noisy(colluding)
    for variance in {masks.variance(clients, listed=False) for clients in range(2, 10_001)}:
        assert true_epsilon(masks, variance) <= EPSILON * (1 + 1e-9)
    accountant = PLDAccountant()
    event = dp_accounting.GaussianDpEvent(math.sqrt(masks.variance(10, listed=False)) / masks.grid.sensitivity)
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, TIMES))
    assert accountant.get_epsilon(DELTA) == pytest.approx(EPSILON, abs=1e-3)


@pytest.mark.parametrize("listed", [False, True])
def test_a_client_adds_noise_enough_for_what_its_owner_can_verify(simulation, monkeypatch, listed):
    own, added = simulation(MASKS + "[privacy]\nepsilon = 2.0\ndelta = 1e-6\n"), []
    monkeypatch.setattr(member, "discrete_gaussian", lambda *of: added.append(of) or noise.discrete_gaussian(*of))
    strategy, masks = own.strategy, own.strategy.aggregator.masks
    client = own.client(1)
    if not listed:
        client = replace(client, member=replace(client.member, members=None))
    strategy.client.train(decode(Round.begin(strategy, strategy.server.init(), range(4)).whole[1], Secured), client)
    ((variance, *_),) = added
    times, honest = own.recipe.privacy.times, 3 if listed else 1  # of four, all sums have three clients
    found = dp_accounting.get_epsilon_gaussian(math.sqrt(honest * variance / times) / masks.grid.sensitivity, 1e-6)
    assert 1.999 < found <= 2.0 * (1 + 1e-9)


def test_listed_clients_share_the_noise_of_the_smallest_sum_that_lies_give():
    """Of 10 clients 6, of 100 51, and with three of ten on the server's side two others: docs/privacy.md."""
    for clients, colluding, honest in [
        (10, 0.0, 6),
        (21, 0.0, 11),
        (100, 0.0, 51),
        (10, 0.3, 2),
        (10, 0.4, 1),
        (3, 0.0, 2),
    ]:
        masks = noisy(colluding)
        assert masks.variance(clients, listed=True) == -(-masks.variance(2, listed=False) // honest)
    # Where not all share masks with all, helpers may stand around one client.
    assert noisy(0.1).variance(100, listed=True) == noisy(0.1).variance(100, listed=False)
    assert noisy(0.1, neighbours=254).variance(100, listed=True) < noisy(0.1).variance(100, listed=False)


@pytest.mark.parametrize(("multiplier", "colluding"), [(1e-3, 0.0), (None, 0.4)])
def test_other_noise_shares_no_mask(multiplier, colluding):
    """The attack: one client counts on the noise of others, which are sent a recipe that asks for less."""
    message = Secured(noisy().settings.run, 0, np.arange(4, dtype=np.uint32), np.zeros((4, 32), np.uint8), b"")
    one, same, other = (of.roster(message, b"run") for of in (noisy(), noisy(), noisy(colluding, multiplier)))
    assert one.context == same.context != other.context


def test_sums_that_no_masked_number_holds_are_refused_before_training():
    assert noisy().width(10_000) == 23
    with pytest.raises(FedKSeedError, match=r"masked numbers of 10000 clients and their noise need 33 bits, 32 go"):
        noisy(multiplier=60.0, bits=16).width(10_000)


@pytest.mark.parametrize(
    ("extra", "changes", "reason"),
    [
        (MASKS + '[trust]\nrule = "median"\n', {}, r"\[secure\] hides uploads .* choose"),
        (MASKS + "[trust]\nagreement = true\n", {}, r"\[secure\] hides uploads .* choose"),
        (MASKS + "[asynchronous]\nbuffer = 2\n", {}, r"leave \[asynchronous\] out"),
        (MASKS, {"algorithm": 'algorithm = "fedkseed-pro"'}, "FedKSeed-Pro draws directions: use fedkseed"),
        (MASKS, {"algorithm": 'algorithm = "fedavg"'}, r"does not read \[secure\]"),
        ("", {"algorithm": 'algorithm = "fedavg"', "size": "size = 64\nshared = true"}, r"\[directions\] shared"),
        (MASKS, {"algorithm": 'algorithm = "fedkseed-plus"', "size": "size = 64\nshared = true"}, "shared is for scal"),
        ("[secure]\nnorm = 0.1\nneighbours = 3\n", {"count": "count = 5", "cohort": "cohort = 5"}, "an even number"),
        (MASKS, {"cohort": "cohort = 2"}, "3 to 65,535 clients"),
    ],
)
def test_settings_that_masks_do_not_go_with_are_refused(simulation, extra, changes, reason):
    def run() -> None:
        own = simulation(extra, **changes)
        own.round(own.strategy.server.init())

    with pytest.raises(FedKSeedError, match=reason):
        run()


def test_a_client_without_a_key_and_a_message_of_another_round_are_refused(simulation):
    own = simulation(MASKS)
    state = own.strategy.server.init()
    message = decode(Round.begin(own.strategy, state, range(4)).whole[0], Secured)
    with pytest.raises(FedKSeedError, match="client 1 has no key for masks"):
        own.strategy.client.train(message, replace(own.client(1), member=None))
    with pytest.raises(FedKSeedError, match="holds the broadcast of round 0"):
        own.strategy.client.sync(replace(message, round=1), own.setup.weights)
    with pytest.raises(FedKSeedError, match=r"clients \[7\] have no key"):
        Round.begin(own.strategy, state, [1, 2, 3, 7])


def test_simulated_keys_differ_from_client_to_client():
    assert len({simulated_key(seed, client) for seed in range(3) for client in range(3)}) == 9


def test_shared_directions_without_masks_align_the_scalars_of_a_round(simulation):
    """Clear rounds with and without shared directions differ; with them all uploads speak of the same ones."""
    own = simulation("", size="size = 64\nshared = true")
    strategy, state = own.strategy, own.strategy.server.init()
    seen = []

    def transport(messages):
        for client, reply in own.transport(messages):
            seen.append(reply)
            yield client, reply

    after, _ = run_round(strategy, state, range(4), transport)
    steps = strategy.settings.local.scalars
    assert 0 < np.count_nonzero(after.coefficients) <= steps
    assert after.counts.sum() == 4 * steps


def test_the_adapter_of_a_masked_run_is_that_of_its_last_state(simulation, tmp_path):
    own = simulation(MASKS)
    state = own.strategy.server.init()
    with closing(own):
        state, _ = own.round(state)
        own.setup.load(state)
        adapter = own.setup.held(state.round)
    assert np.allclose(adapter.coefficients, state.coefficients, atol=np.abs(state.coefficients).max() / 100)
