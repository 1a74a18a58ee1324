"""FedKSeed's server, small enough to check by hand."""

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from fedkseed import Broadcast, FedKSeedError, KSeed, LocalWork, Pool, Run, State, Upload
from fedkseed.strategies.kseed import importance
from fedkseed.strategies.sums import HEAVIEST
from fedkseed.strategy import Settings, Strategy, Trust
from fedkseed.wire.numbers import GRID

from ..test_round import same

RUN = Run(Pool(1, 4, "hadamard"), bytes(32))


def strategy(importance: bool = False, **changes) -> Strategy[State]:
    """Changes are of its local work, where that has the field."""
    local = {"rounds": 10, "steps": 3, "lr": 0.5, "eps": 0.25, "clip": 100.0}
    local |= {name: changes.pop(name) for name in [*changes] if name in LocalWork.__slots__}
    settings = Settings(RUN, LocalWork(**local), **{"wire": "exact", **changes})
    return KSeed.make(settings, importance=importance)


def upload(client: int, found: list[float], **changes) -> Upload:
    """Scalars along three directions; NaN: the probe moved nothing."""
    three = np.array([*found, math.nan, math.nan, math.nan][: max(3, len(found))], np.float32)
    about = {"run": RUN, "round": 0, "client": client, "examples": 1, "loss": 1.0, "scalars": three}
    return Upload(**{**about, **changes})


def drawn(client: int, round_: int = 0, probabilities=None) -> list[int]:
    """What docs/wire.md says, step by step."""
    u = np.random.Generator(np.random.PCG64(np.random.SeedSequence([1, 6, round_, client]))).random(3)
    if probabilities is None:
        return [min(int(x * 4), 3) for x in u]
    sums = [sum(float(p) for p in probabilities[: j + 1]) for j in range(4)]
    return [next(j for j in range(4) if sums[j] > x * sums[3]) for x in u]


def sums(*moves: tuple[int, float]) -> list[float]:
    """What lies on each of the four directions."""
    return [sum(value for j, value in moves if j == k) for k in range(4)]


def test_coefficients_are_minus_lr_times_the_weighted_scalars():
    after = strategy().aggregate(strategy().server.init(), [upload(0, [2.0, 4.0, -8.0], examples=3), upload(1, [10.0])])
    i, j, k = drawn(0)
    first = drawn(1)[0]
    moved = sums((i, 0.75 * 2), (j, 0.75 * 4), (k, 0.75 * -8), (first, 0.25 * 10))
    np.testing.assert_array_equal(after.coefficients, [-0.5 * x for x in moved])
    np.testing.assert_array_equal(after.magnitudes * GRID, sums((i, 2), (j, 4), (k, 8), (first, 10)))
    np.testing.assert_array_equal(after.counts, sums((i, 1), (j, 1), (k, 1), (first, 1)))
    assert after.round == 1


def test_a_probe_that_moved_nothing_leaves_the_others_with_their_directions():
    after = strategy().aggregate(strategy().server.init(), [upload(5, [math.nan, 4.0, 8.0])])
    _, j, k = drawn(5)
    np.testing.assert_array_equal(after.coefficients, sums((j, -2), (k, -4)))
    np.testing.assert_array_equal(after.counts, sums((j, 1), (k, 1)))


def test_signs_move_a_coefficient_by_lr_and_count_as_one():
    signs = strategy(wire="sign", clip=0.1)  # of what clients find, not of signs
    after = signs.aggregate(signs.server.init(), [upload(5, [1.0, -1.0, math.nan], wire="sign")])
    i, j, _ = drawn(5)
    np.testing.assert_array_equal(after.coefficients, sums((i, -0.5), (j, 0.5)))
    np.testing.assert_array_equal(after.magnitudes * GRID, sums((i, 1), (j, 1)))


def test_pro_draws_with_the_probabilities_that_a_client_was_sent():
    """Of its own round: those of an older upload are in the state of then."""
    pro = strategy(importance=True, max_staleness=2, staleness_power=0.0)
    old = State(3, np.zeros(4), np.array([0.0, 9.0, 0.0, 0.0]), np.ones(4, np.int64))
    now = State(4, np.zeros(4), np.array([0.0, 0.0, 0.0, 9.0]), np.ones(4, np.int64))
    for state, uploaded, told in [(old, 3, {}), (now, 4, {}), (now, 3, {3: old})]:
        p = pro.server.broadcast(old if uploaded == 3 else now).probabilities
        after = pro.aggregate(state, [upload(2, [2.0, 4.0, 8.0], round=uploaded)], told)
        i, j, k = drawn(2, uploaded, p)
        np.testing.assert_array_equal(after.coefficients, sums((i, -1), (j, -2), (k, -4)))
    assert drawn(2, 3, pro.server.broadcast(old).probabilities) != drawn(2, 3)
    with pytest.raises(FedKSeedError, match=r"client 2 drew by round 3's state; aggregate\(\) needs it"):
        pro.aggregate(now, [upload(2, [2.0], round=3)])


def test_the_order_of_uploads_makes_no_difference():
    rng = np.random.default_rng(0)
    uploads = [upload(i, (rng.integers(-9999, 9999, 3) * GRID).tolist(), examples=i + 1) for i in range(9)]
    states = [
        strategy().aggregate(strategy().server.init(), [uploads[i] for i in rng.permutation(9)]) for _ in range(5)
    ]
    assert len({state.coefficients.tobytes() for state in states}) == 1


@pytest.mark.parametrize("server", ["sgd", "adam"])
def test_of_three_first_steps_the_server_takes_a_quarter_a_half_and_three_quarters(server):
    """The step is shorter, and not its gradient: Adam's moments and what is known of directions are the same."""
    whole, warming = (strategy(server=server, server_lr=0.5, trust=Trust(warmup=rounds)) for rounds in (0, 3))
    state = whole.server.init()
    for round_, part in enumerate((1 / 4, 2 / 4, 3 / 4, 1, 1)):
        made = [upload(client, [1.0, 2.0, 3.0], round=round_) for client in range(3)]
        full, short = whole.aggregate(state, made), warming.aggregate(state, made)
        assert short.coefficients == pytest.approx(state.coefficients + part * (full.coefficients - state.coefficients))
        assert same(replace(short, coefficients=full.coefficients), full)
        state = full
    assert np.array_equal(short.coefficients, full.coefficients), "to the bit, once it has begun"


def test_the_state_before_is_not_changed():
    state = strategy().server.init()
    strategy().aggregate(state, [upload(0, [2.0])])
    assert not state.coefficients.any()
    assert not state.counts.any()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 0.5, 0.5]),
        ("linear", [0.5, 0.25, 0.05]),
        ("cosine", [0.5, 0.25, 0.5 * (1 - math.cos(0.1 * math.pi)) / 2]),
    ],
)
def test_schedules(schedule, expected):
    got = [strategy(schedule=schedule).settings.local.learning_rate(r) for r in (0, 5, 9)]
    assert got == pytest.approx(expected)


def test_a_schedule_works_because_coefficients_hold_steps():
    """The same scalars in round 0 and round 5 of a linear schedule: steps of 1 and of ½."""
    linear = strategy(schedule="linear", rounds=10, lr=1.0)
    state = linear.aggregate(linear.server.init(), [upload(0, [2.0])])
    late = State(5, state.coefficients, state.magnitudes, state.counts)
    late = linear.aggregate(late, [upload(0, [2.0], round=5)])
    np.testing.assert_allclose(late.coefficients, sums((drawn(0)[0], -2), (drawn(0, 5)[0], -1)))


@pytest.mark.parametrize(
    ("magnitudes", "counts", "scaled"),
    [
        ([2, 12, 4, 9], [2, 2, 1, 3], [0, 1, 0.6, 0.4]),  # means 1, 6, 4, 3
        ([1, 0, 6, 2], [1, 0, 2, 1], [0, 0.5, 1, 0.5]),  # means 1, –, 3, 2: one that was never drawn is average
        ([0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]),  # nothing is known
        ([2, 2, 2, 2], [1, 1, 1, 1], [0, 0, 0, 0]),
    ],
)
def test_importance_is_the_softmax_of_the_min_max_normalised_mean_magnitude(magnitudes, counts, scaled):
    weights = np.exp(scaled)
    state = State(1, np.zeros(4), np.array(magnitudes), np.array(counts))
    np.testing.assert_allclose(importance(state), weights / weights.sum(), rtol=1e-15)


def test_only_pro_sends_probabilities():
    state = strategy().server.init()
    assert strategy().server.broadcast(state).probabilities is None
    assert strategy(importance=True).server.broadcast(state).probabilities is not None


@pytest.mark.parametrize(
    ("uploads", "message"),
    [
        ([], "got no upload"),
        ([upload(2, [1.0]), upload(2, [2.0])], "client 2 answered round 0 twice"),
        ([upload(2, [1.0], round=1)], "answered round 1, the server is in round 0"),
        ([upload(2, [math.nan, 101.0])], "scalar gradient of 101, at most 100 is allowed"),
        ([upload(2, [1.0] * 4)], "reports 4 scalars, 3 were asked for"),
        ([upload(2, [1.0], scalars=np.ones(2, np.float32))], "reports 2 scalars, 3 were asked for"),
        ([upload(2, [1.0], wire="compact")], "sends scalars 'compact', not 'exact'; use the same recipe"),
        ([upload(2, [1.0], run=Run(Pool(2, 4, "hadamard"), bytes(32)))], "same recipe"),
        (
            [upload(2, [1.0], run=Run(RUN.pool, b"x" * 32))],
            f"digest {(b'x' * 32).hex()}, this party's has {bytes(32).hex()}",
        ),
    ],
)
def test_uploads_that_do_not_belong_are_refused(uploads, message):
    with pytest.raises(FedKSeedError, match=message):
        strategy().aggregate(strategy().server.init(), uploads)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scalars": np.array([1, np.inf], np.float32)}, "or NaN, got 1 beyond"),
        ({"scalars": np.array([1.0])}, "a row of float32, got float64"),
        ({"scalars": np.array([1.00001], np.float32)}, "must be rounded to multiples of 1.52588e-05 first"),
        ({"scalars": np.array([1.0009765625], np.float32), "wire": "compact"}, "must be rounded to bfloat16 first"),
        ({"scalars": np.array([0.0], np.float32), "wire": "sign"}, "signs are 1 or -1"),
        ({"wire": "zip"}, "no wire of this message is called 'zip'; choose one of exact, compact, sign"),
        ({"examples": 0}, "at least one example"),
    ],
)
def test_an_upload_that_is_not_sound_cannot_be_made(changes, message):
    with pytest.raises(FedKSeedError, match=message):
        upload(0, [1.0], **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": math.nan}, "lr must be a positive number"),
        ({"eps": 0.0}, "eps must be a positive number"),
        ({"steps": 0}, "at least one step"),
        ({"coefficients": np.zeros(3, np.float32)}, "holds 4 coefficients, got 3"),
        ({"coefficients": np.array([0, np.inf, 0, 0], np.float32)}, "1 are NaN or infinite"),
        ({"probabilities": np.array([1, -1, 1, 1], np.float32)}, "probabilities of at least 0"),
        ({"probabilities": np.zeros(4, np.float32)}, "probabilities of at least 0"),
    ],
)
def test_a_broadcast_that_is_not_sound_cannot_be_made(changes, message):
    with pytest.raises(FedKSeedError, match=message):
        replace(Broadcast(RUN, 0, 1.0, 1.0, 1, 1.0, np.zeros(4, np.float32)), **changes)


def test_scalars_that_would_overflow_the_broadcast_are_refused():
    uploads = [upload(client, [1e6] * 3) for client in range(2)]
    with pytest.raises(FedKSeedError, match="overflow float32; set a clip"):
        strategy(clip=math.inf, lr=1e34).aggregate(strategy().server.init(), uploads)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        *(({name: 0}, f"{name} must be at least 1, got 0") for name in ("rounds", "steps", "probes")),
        ({"schedule": "step"}, "no schedule is called 'step'"),
    ],
)
def test_counts_below_one_and_unknown_schedules_are_refused(changes, match):
    with pytest.raises(FedKSeedError, match=match):
        strategy(**changes)


SERVER = """
import sys
import numpy as np
from fedkseed import KSeed, LocalWork, Pool, Run, Settings, Upload, encode, run_round

run = Run(Pool(1, 4096, "hadamard"), bytes(32))

def transport(messages):
    for client in messages:
        rng = np.random.default_rng(client)
        scalars = rng.integers(-99, 99, 200).astype(np.float32)
        yield client, encode(Upload(run, 0, client, 10, 1.0, scalars, "compact"))

strategy = KSeed.make(Settings(run, LocalWork(rounds=1)))
state, report = run_round(strategy, strategy.server.init(), range(10_000), transport)
assert state.counts.sum() == 2_000_000 and len(report.clients) == 10_000
assert "torch" not in sys.modules
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def test_a_server_aggregates_10_000_uploads_with_no_model_and_under_200_mb():
    done = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 200e6  # getrusage would count what pytest had when it forked


@pytest.mark.parametrize("rule", ["mean", "clipped"])
def test_weights_that_agreement_multiplies_can_not_overflow_a_sum(rule):
    """Sums of int64 wrap without a word: three clients at the bounds turned the sum around."""
    of = strategy(clip=math.inf, trust=Trust(rule, agreement=True))
    all_ = [2.0**20, 2.0**20, 2.0**20]
    for examples in (((1 << 24) - 1) // 3, ((1 << 20) - 1) // 3, (1 << 32) - 1):
        after = of.aggregate(of.server.init(), [upload(client, all_, examples=examples) for client in range(3)])
        assert (after.coefficients <= 0).all()
        assert (after.coefficients < 0).any()


@pytest.mark.parametrize("agreement", [False, True])
def test_a_claim_that_passes_alone_does_not_break_the_round_of_the_others(agreement):
    """One client that claims 2^32 − 1 examples ended a run: its answer was tried alone, and fitted."""
    of = strategy(trust=Trust("mean", agreement=agreement))
    after = of.aggregate(of.server.init(), [upload(0, [1.0], examples=(1 << 32) - 1), upload(1, [1.0], examples=10)])
    assert after.round == 1


def test_numbers_that_cancel_do_not_decide_which_directions_are_drawn():
    """ρ of ±999 along a direction that a client has drawn twice: no norm, and Σ |ρ| of a hundred honest clients."""
    twice = next(c for c in range(99) if len({*drawn(c)}) == 2 and drawn(c)[0] == drawn(c)[1])
    uploads = [upload(c, [1.0, -1.0, 1.0]) for c in range(100, 104)] + [upload(twice, [90.0, -90.0, 1.0])]
    of = strategy(trust=Trust("clipped"), importance=True)
    assert of.aggregate(of.server.init(), uploads).magnitudes.sum() * GRID <= 15.01


def test_late_uploads_of_a_client_count_as_uploads_where_weights_are_cut():
    """Four uploads of two clients: each weighs at most a quarter of what integers hold, whoever claims more."""
    late = strategy(max_staleness=1, staleness_power=0.0)
    began = late.server.init()
    claims = {0: HEAVIEST // 2, 1: HEAVIEST // 4}

    def after(examples: dict[int, int]) -> list[float]:
        uploads = [
            upload(client, [1.0 + client, 2.0, 3.0], round=round_, examples=examples[client])
            for client in (0, 1)
            for round_ in (0, 1)
        ]
        return late.aggregate(replace(began, round=1), uploads, {0: began}).coefficients.tolist()

    assert after(claims) == after(dict.fromkeys(claims, HEAVIEST // 4))
