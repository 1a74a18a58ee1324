"""Evidence about clients, by synthetic gradients: a part that all honest clients have in common, and noise of each."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations, product

import numpy as np
import pytest

from fedkseed import FedKSeedError, KSeed, LocalWork, Pool, Run, State, decode, encode, run_round
from fedkseed.network.protocol.networked_recipe import CLIP, with_network_defaults
from fedkseed.randomness import draw_directions
from fedkseed.round import Transport
from fedkseed.run.setup import WithModel
from fedkseed.run.store import Store
from fedkseed.strategies.agreement import WHOLE, weighed
from fedkseed.strategies.robust import cut
from fedkseed.strategies.sums import Contribution
from fedkseed.strategy import Settings, Strategy, Trust
from fedkseed.wire.numbers import GRID, scalar
from fedkseed.wire.records import Upload

from ..test_round import same

K, DRAWN, UNIT = 256, 40, 1e6
RUN = Run(Pool(1, 64, "hadamard"), bytes(32))
WORK = LocalWork(rounds=6, steps=48, lr=0.01)
COMMON = np.random.default_rng(1).normal(size=K)
OTHER = np.random.default_rng(2).normal(size=K)  # of clients whose data are of their own kind
# The gradient along the drawn directions that a client reports: (round, client, directions).
Reports = Callable[[int, int, np.ndarray], np.ndarray]


def strategy(run: Run = RUN, **trust: object) -> Strategy[State]:
    return KSeed.make(Settings(run, WORK, wire="exact", trust=Trust(rule="clipped", **trust)))


BEGUN = strategy(Run(Pool(1, K, "hadamard"), bytes(32)), agreement=True).server.init()  # a state without evidence


def honest(round_: int, client: int, drawn: np.ndarray, common: np.ndarray = COMMON) -> np.ndarray:
    """A common part, and as much noise of the client's own batches."""
    return common[drawn] + np.random.default_rng([round_, client, 5]).normal(size=drawn.size)


def flipped(round_: int, client: int, drawn: np.ndarray) -> np.ndarray:
    return -honest(round_, client, drawn)


def noise(round_: int, client: int, drawn: np.ndarray) -> np.ndarray:
    return np.random.default_rng([round_, client, 6]).normal(size=drawn.size)


def own_kind(round_: int, client: int, drawn: np.ndarray) -> np.ndarray:
    """Another task, of which a part is common to all."""
    return honest(round_, client, drawn, 0.6 * COMMON + 0.8 * OTHER)


def contribution(round_: int, client: int, report: Reports = honest) -> Contribution:
    drawn = np.sort(np.random.default_rng([round_, client]).choice(K, DRAWN, replace=False)).astype(np.uint32)
    values = np.rint(report(round_, client, drawn) * UNIT).astype(np.int64)
    return Contribution(client, 1, drawn, values, np.abs(values), np.ones(DRAWN, np.int64))


def weights(reports: Sequence[Reports], rounds: int) -> list[list[int]]:
    """The weights of the clients of each round."""
    state, found = BEGUN, []
    for number in range(rounds):
        made = cut([contribution(number, client, report) for client, report in enumerate(reports)])
        of, state = weighed(state, made, 0.2)
        found.append(of)
    return found


def test_evidence_of_another_version_is_refused():
    of_four_parts = replace(BEGUN, gradients=np.zeros((4, K), np.int64), draws=np.zeros((4, K), np.int64))
    with pytest.raises(FedKSeedError, match="has 4 parts, this program keeps 8"):
        weighed(of_four_parts, [contribution(0, client) for client in range(5)], 0.2)


def test_without_evidence_all_count_alike():
    alone = [contribution(0, 0)]
    assert weighed(BEGUN, alone, 0.2)[0][0] > 0
    drawn = [np.arange(40 * k, 40 * (k + 1), dtype=np.uint32) for k in range(5)]
    apart = [replace(contribution(0, k), directions=drawn[k]) for k in range(5)]  # nobody has drawn what another has
    found, after = weighed(BEGUN, apart, 0.2)
    assert len({*found}) == 1
    assert found[0] > 0
    assert not after.agreement.any()


@pytest.mark.parametrize("hostile", [flipped, lambda *which: 10 * flipped(*which)], ids=["flip", "flip x 10"])
@pytest.mark.parametrize("place", range(5))
def test_one_of_five_that_turns_its_gradient_around_is_left_out_within_few_rounds(hostile, place):
    reports: list[Reports] = [honest] * 5
    reports[place] = hostile
    found = np.array(weights(reports, 8))
    assert (found[3:, place] == 0).all(), found
    others = np.delete(found, place, axis=1)
    assert (others[3:] >= WHOLE // 2).all(), "no honest one is left out"
    assert others[3:].mean() > 0.9 * WHOLE


def test_five_honest_clients_keep_their_weights():
    found = np.array(weights([honest] * 5, 10))
    assert (found[3:] >= WHOLE // 2).all(), found
    assert found.mean() > 0.9 * WHOLE


def test_a_client_that_always_says_the_same_does_not_agree_with_itself():
    """The cheapest way to push in one direction: a vector of its own, at right angles to what the others find."""
    of_constant, of_others = [], []
    for place, seed in product(range(5), range(4)):
        own = np.random.default_rng([9, seed]).normal(size=K)
        own -= own @ COMMON / (COMMON @ COMMON) * COMMON
        own *= np.sqrt(2 / np.mean(np.square(own)))  # as large as an honest client's
        reports: list[Reports] = [honest] * 5
        reports[place] = lambda round_, client, drawn, own=own: own[drawn]
        found = np.array(weights(reports, 24))[8:]
        of_constant.append(found[:, place].mean())
        of_others.append(np.delete(found, place, axis=1).mean())
    # compared with its own memory, too, its mean weight is 12.7
    assert np.mean(of_constant) < WHOLE / 2 < 0.9 * WHOLE < np.mean(of_others), of_constant


def test_noise_counts_for_less_than_an_honest_upload():
    found = np.array(weights([honest, honest, noise, honest, honest], 12))[4:]
    assert found[:, 2].mean() < WHOLE / 2 < 0.9 * WHOLE < np.delete(found, 2, axis=1).mean(), found


def test_a_client_whose_data_are_of_another_kind_keeps_its_weight():
    found = np.array(weights([honest, honest, own_kind, honest, honest], 12))[4:]
    assert found[:, 2].mean() > 0.8 * WHOLE, found


def test_a_client_that_turns_hostile_later_is_left_out_then():
    def turning(round_: int, client: int, drawn: np.ndarray) -> np.ndarray:
        return (flipped if round_ >= 10 else honest)(round_, client, drawn)

    found = np.array(weights([turning] + [honest] * 4, 24))
    assert found[5:10, 0].mean() > 0.9 * WHOLE
    assert (found[20:, 0] == 0).all(), found[:, 0]


def test_the_order_of_clients_that_were_met_makes_no_difference_to_the_bits():
    """Contributions come in the order of clients; who took part first must not matter to the kept arrays' order."""
    _, evidence = weighed(BEGUN, [contribution(0, client) for client in (1, 3)], 0.2)
    _, evidence = weighed(evidence, [contribution(1, client) for client in (0, 3)], 0.2)
    assert evidence.clients.tolist() == [0, 1, 3]
    assert [getattr(evidence, name).shape for name in ("agreement", "directions")] == [(3,), (3,)]


def test_the_order_of_a_clients_directions_makes_no_difference_to_the_bits():
    made = [contribution(0, client) for client in range(5)]
    order = np.random.default_rng(9).permutation(DRAWN)
    names = ("directions", "values", "sizes", "counts")
    turned = [replace(one, **{name: getattr(one, name)[order] for name in names}) for one in made]
    (one, first), (two, second) = (weighed(BEGUN, each, 0.2) for each in (made, turned))
    assert one == two
    assert same(first, second)


def uploads(round_: int, turned: int = 4) -> list[Upload]:
    """Of five clients, of whom one turns its gradient around."""
    made = []
    for client in range(5):
        drawn = draw_directions(RUN.pool.key, round_, client, WORK.scalars, RUN.pool.size, None)
        found = honest(round_, client, drawn) * (-1 if client == turned else 1)
        made.append(Upload(RUN, round_, client, 10, 1.0, (np.rint(found / GRID) * GRID).astype(np.float32), "exact"))
    return made


def test_the_order_of_uploads_makes_no_difference_to_the_bits_of_a_state():
    of = strategy(agreement=True)
    state = of.aggregate(of.server.init(), uploads(0))
    for order in list(permutations(range(5)))[::17]:
        made = uploads(1)
        assert same(of.aggregate(state, [made[k] for k in order]), of.aggregate(state, made))


def test_the_state_holds_the_evidence_so_that_resuming_equals_not_stopping(tmp_path):
    of = strategy(agreement=True)
    state = of.server.init()
    with Store.create(tmp_path / "run", "") as store:
        store.commit(state, None)
        for number in range(5):
            state = of.aggregate(state, uploads(number))
            store.commit(state, None)
            kept = Store(store.directory).state(State)  # by another process
            assert same(kept, state)
            assert same(of.aggregate(kept, uploads(number + 1)), of.aggregate(state, uploads(number + 1)))
    assert state.agreement.any()
    forgotten = replace(of.server.init(), round=5, coefficients=state.coefficients)
    made = uploads(5, turned=-1)  # client 4 is honest now, of which only the evidence knows better
    assert not np.array_equal(of.aggregate(forgotten, made).coefficients, of.aggregate(state, made).coefficients)


def test_a_hostile_client_moves_the_model_less_with_evidence_than_without():
    def after(of: Strategy[State], clients: range) -> np.ndarray:
        state = of.server.init()
        for number in range(6):
            state = of.aggregate(state, [upload for upload in uploads(number) if upload.client in clients])
        return state.coefficients

    honest_alone = after(strategy(), range(4))
    away = [np.linalg.norm(after(strategy(agreement=on), range(5)) - honest_alone) for on in (False, True)]
    assert away[1] < away[0] / 2


def test_without_evidence_asked_for_its_arrays_are_empty():
    of = strategy()
    state = of.aggregate(of.server.init(), uploads(0))
    kept = ("gradients", "draws", "clients", "agreement", "directions")
    assert [getattr(state, name).size for name in kept] == [0] * 5


def test_poisoned_first_rounds_end_no_worse_than_the_base(simulation):
    """One of three sends ten times its scalars turned around, at a high rate; whole steps end worse than the base."""
    changes = {"cohort": "cohort = 3", "count": "count = 3", "seed": "seed = 4", "held_out": "held_out = 0.3"}
    changes |= {"lr": "lr = 6e-3", "steps": "steps = 10", "size": "size = 1024", "examples": 'examples = "all"'}
    risen = []
    for trust in ("", "[trust]\nwarmup = 0\n"):
        made = simulation(trust, **changes)
        recipe, held_out = with_network_defaults(made.recipe), WithModel(made.setup, made.shares.held_out)
        made.setup.strategy = of = made.setup.algorithm.make(recipe, made.strategy.run)
        base = state = of.server.init()
        for _ in range(3):
            state, _ = run_round(of, state, range(3), partial(with_a_hostile_client, made.transport, clip=CLIP))
        before, after = (np.array(held_out.evaluate(each, "held out", False).losses) for each in (base, state))
        risen.append(after - before)
    noise = [rise.std(ddof=1) / math.sqrt(rise.size) for rise in risen]
    assert risen[0].mean() < 2 * noise[0]
    assert risen[1].mean() > 2 * noise[1]


def with_a_hostile_client(honest: Transport, messages: Mapping[int, bytes], clip: float) -> Iterator[tuple[int, bytes]]:
    """The replies of honest clients, but for client 2, which scales its scalars by −10."""
    for client, data in honest(messages):
        own = decode(data, Upload)
        turned = np.array([scalar(-10 * x, clip, own.wire) for x in own.scalars], np.float32)
        yield client, encode(replace(own, scalars=turned)) if client == 2 else data
