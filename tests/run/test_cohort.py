"""Asynchronous rounds: the plan in virtual time, the weight of what is late, and whole runs."""

import math
import shutil
from itertools import islice, permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkseed import FedKSeedError, KSeed, LocalWork, Pool, Run, Simulation, State, Upload, encode, resume, start
from fedkseed.randomness import draw_directions
from fedkseed.recipe.algorithms import ALGORITHMS
from fedkseed.recipe.reading import load_recipe
from fedkseed.run import store as storing
from fedkseed.run.cohort import Step, asynchronous, cohort, durations, synchronous, turns
from fedkseed.run.loop import work
from fedkseed.run.store import Store
from fedkseed.strategy import Settings, Strategy
from fedkseed.wire.delta import shorten
from fedkseed.wire.numbers import GRID, scalars

from ..conftest import recipe_text


def plan(times: list[float], steps: int, **settings) -> list[Step]:
    return list(islice(asynchronous(1, times, **settings), steps))


def test_with_equal_clients_and_a_cohort_as_buffer_rounds_are_the_synchronous_ones():
    late = plan([5.0] * 20, 30, buffer=6, concurrency=6)
    assert late == list(islice(synchronous(1, [5.0] * 20, 6), 30))
    assert all(begun == done for done, step in enumerate(late) for begun in step.begun.values())
    assert [list(step.begun) for step in late] == [cohort(1, done, 20, 6) for done in range(30)]
    assert [step.clock for step in late] == [5.0 * (done + 1) for done in range(30)]


def test_a_slow_client_comes_late_with_the_round_that_it_began_with():
    """All three train all the time, client 1 four times as long. At 4 all hand in; the one that began last waits."""
    assert plan([1.0, 4.0, 1.0], 5, buffer=2, concurrency=3) == [
        Step({0: 0, 2: 0}, 1.0),
        Step({0: 1, 2: 1}, 2.0),
        Step({0: 2, 2: 2}, 3.0),
        Step({0: 3, 1: 0}, 4.0),
        Step({0: 4, 2: 3}, 5.0),
    ]
    assert turns(1, 3, 3) == [0, 2, 1]  # in round 3, client 0 began before client 2


def test_a_synchronous_round_waits_for_its_slowest_client():
    times = durations(3, [10] * 10, 0.3, 5.0)
    assert sorted(times) == [10.0] * 7 + [50.0] * 3
    steps = list(islice(synchronous(3, times, 4), 20))
    ends = np.diff([0.0, *(step.clock for step in steps)])
    assert ends.tolist() == [max(times[client] for client in cohort(3, k, 10, 4)) for k in range(20)]


def test_which_clients_are_slow_depends_on_the_seed_only():
    assert durations(3, [1] * 50, 0.2, 7.0) == durations(3, [1] * 50, 0.2, 7.0)
    assert durations(3, [1] * 50, 0.2, 7.0) != durations(4, [1] * 50, 0.2, 7.0)
    assert durations(3, [4, 5, 6], 0.0, 7.0) == [4, 5, 6]


def test_more_steps_are_the_same_steps_and_more():
    settings = {"times": durations(1, [3] * 30, 0.3, 9.5), "buffer": 4, "concurrency": 11}
    assert plan(steps=50, **settings)[:20] == plan(steps=20, **settings)


def test_nobody_waits_for_slow_clients():
    """Every fifth client takes ten times as long; ten train at a time, contributions are taken in fives."""
    times = durations(1, [10] * 100, 0.2, 10.0)
    late, rounds = plan(times, 40, buffer=5, concurrency=10), list(islice(synchronous(1, times, 10), 20))
    assert late[-1].clock < rounds[-1].clock / 2  # as many contributions
    assert max(done - begun for done, step in enumerate(late) for begun in step.begun.values()) > 5


def test_a_client_that_would_be_too_late_is_given_up():
    times = durations(1, [10] * 30, 0.2, 10.0)
    steps = plan(times, 60, buffer=3, concurrency=6, max_staleness=4)
    assert max(done - begun for done, step in enumerate(steps) for begun in step.begun.values()) <= 4
    assert sum(step.given_up for step in steps) > 0


clients = st.lists(st.sampled_from([1.0, 2.0, 3.5, 10.0]), min_size=1, max_size=12)


@given(clients, st.data(), st.integers(0, 99), st.sampled_from([0, 1, 3, math.inf]))
def test_every_plan_keeps_its_promises(times, data, seed, limit):
    buffer, concurrency = (data.draw(st.integers(1, len(times))) for _ in range(2))
    steps = list(islice(asynchronous(seed, times, buffer, concurrency, limit), 25))
    begins = {}  # (client, round) -> when
    clocks = [0.0, *(step.clock for step in steps)]
    assert clocks == sorted(clocks)
    for done, step in enumerate(steps):
        assert len(step.begun) == buffer
        assert list(step.begun) == sorted(step.begun)
        for client, begun in step.begun.items():
            assert 0 <= begun <= done
            assert done - begun <= limit
            assert step.clock - clocks[begun] >= times[client]  # nobody is faster than it is
            assert (client, begun) not in begins  # its directions are drawn once
            begins[client, begun] = done
    for client in range(len(times)):  # it is in flight from a round to the step that takes it, and only once
        tasks = sorted((begun, done) for (i, begun), done in begins.items() if i == client)
        assert all(done < begun for (_, done), (begun, _) in zip(tasks, tasks[1:], strict=False))
    work = sum(times[client] for client, _ in begins)
    unfinished = (concurrency + buffer) * max(times)
    assert work <= concurrency * clocks[-1] + unfinished  # concurrency is held
    if len(times) >= concurrency + buffer and limit == math.inf:  # somebody is always idle
        assert work >= concurrency * clocks[-1] - unfinished - buffer * max(times)


RUN = Run(Pool(1, 4, "hadamard"), bytes(32))
NOW = State(5, np.zeros(4), np.zeros(4, np.int64), np.zeros(4, np.int64))


def strategy(**changes) -> Strategy[State]:
    of_work = {name: changes.pop(name) for name in [*changes] if name in LocalWork.__slots__}
    local = LocalWork(**{"rounds": 10, "steps": 1, "lr": 0.5, **of_work})
    return KSeed.make(Settings(RUN, local, **{"max_staleness": 4, "wire": "exact", **changes}))


def upload(client: int, round_: int, found: float, examples: int = 1) -> Upload:
    return Upload(RUN, round_, client, examples, 1.0, scalars(np.array([found])))


def drawn(client: int, round_: int) -> int:
    """The one direction of a client in a round."""
    return int(draw_directions(1, round_, client, 1, 4, None)[0])


def test_a_stale_contribution_is_damped_and_nothing_makes_up_for_it():
    """Three of four examples come 3 rounds late: (1 + 3)^-1/2 = 1/2 of their share."""
    uploads = [upload(1, 2, 8.0, examples=3), upload(2, 5, 8.0)]
    after, late, fresh = strategy().aggregate(NOW, uploads), drawn(1, 2), drawn(2, 5)
    assert late != fresh
    np.testing.assert_array_equal(after.coefficients[[late, fresh]], [-0.5 * 0.75 * 0.5 * 8, -0.5 * 0.25 * 8])
    np.testing.assert_array_equal(after.magnitudes[[late, fresh]] * GRID, [8, 8])
    assert after.magnitudes.sum() * GRID == 16
    assert after.round == 6


@pytest.mark.parametrize(("power", "factor"), [(0.0, 1.0), (1.0, 0.25), (2.0, 0.0625)])
def test_the_power_is_a_setting(power, factor):
    after = strategy(staleness_power=power).aggregate(NOW, [upload(1, 2, 8.0)])
    assert after.coefficients[drawn(1, 2)] == -0.5 * factor * 8


def test_the_learning_rate_is_that_of_the_round_that_the_client_began_with():
    after = strategy(schedule="linear", staleness_power=0.0).aggregate(NOW, [upload(1, 2, 8.0)])
    # Of round 2 of 10; that of round 5, in whose unit it is rounded, is half.
    assert after.coefficients[drawn(1, 2)] == pytest.approx(-0.5 * 0.8 * 8, abs=0.25 * GRID / 2)


def test_fresh_uploads_count_as_in_synchronous_rounds_bit_for_bit():
    rng = np.random.default_rng(0)
    uploads = [upload(i, 5, float(rng.normal()), int(rng.integers(1, 9))) for i in range(9)]
    late, now = (strategy(lr=0.3, max_staleness=s).aggregate(NOW, uploads) for s in (4, 0))
    assert late.coefficients.tobytes() == now.coefficients.tobytes()


def test_the_order_of_uploads_makes_no_difference_also_if_a_client_comes_twice():
    uploads = [upload(1, 2, 0.1), upload(1, 4, 0.7), upload(2, 3, 1 / 3), upload(0, 5, 1e-9, examples=7)]
    states = [strategy().aggregate(NOW, order) for order in permutations(uploads)]
    assert len({state.coefficients.tobytes() for state in states}) == 1


@pytest.mark.parametrize(
    ("settings", "uploads", "message"),
    [
        ({}, [upload(2, 0, 1.0)], "answered round 0, the server is in round 5 .* at most 4 rounds old"),
        ({}, [upload(2, 6, 1.0)], "answered round 6, the server is in round 5"),
        ({}, [upload(2, 3, 1.0), upload(1, 3, 1.0), upload(2, 3, 2.0)], "client 2 answered round 3 twice"),
        ({"max_staleness": 0}, [upload(2, 4, 1.0)], "answered round 4, the server is in round 5$"),
    ],
)
def test_what_is_too_old_or_came_twice_is_refused(settings, uploads, message):
    with pytest.raises(FedKSeedError, match=message):
        strategy(**settings).aggregate(NOW, uploads)


@pytest.mark.parametrize("name", ["max_staleness", "staleness_power"])
def test_settings_below_zero_are_refused(name):
    with pytest.raises(FedKSeedError, match=f"{name} must be at least 0, got -1"):
        strategy(**{name: -1})


TABLE = "[asynchronous]\nbuffer = 2\nconcurrency = 4\n"
UNEVEN = "cohort = 2\nslow_share = 0.4\nslow_factor = 6.0"
ROUNDS = 10


def text(model: Path, data: Path, table: str = TABLE, **changes: str) -> str:
    lines = {
        "algorithm": 'algorithm = "fedkseed-pro"', "rounds": f"rounds = {ROUNDS}", "cohort": UNEVEN,
        "count": "count = 6", "generated": "generated = 0",
    }  # fmt: skip
    return recipe_text(model, data, **{**lines, **changes}) + table


def run(folder: Path, recipe: str, name: str = "run"):
    path = folder / f"{name}.toml"
    path.write_text(recipe)
    return start(load_recipe(path), folder / name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model_folder, data_file):
    """An undisturbed run: its directory and its result."""
    folder = tmp_path_factory.mktemp("asynchronous")
    return folder / "run", run(folder, text(model_folder, data_file))


def test_the_reports_are_those_of_the_plan(whole):
    _, result = whole
    steps = islice(asynchronous(3, durations(3, [3] * 6, 0.4, 6.0), 2, 4), ROUNDS)
    for done, (report, step) in enumerate(zip(result.reports, steps, strict=True)):
        assert (report["round"], report["clock"]) == (done, step.clock)
        assert report["clients"] == list(step.begun)
        assert report["staleness"] == [done - begun for begun in step.begun.values()]
    assert max(max(report["staleness"]) for report in result.reports) >= 3  # a slow one came


def test_bytes_are_those_of_encoded_messages(whole):
    directory, result = whole
    store, simulation = Store(directory), Simulation(load_recipe(directory / "recipe.toml"))
    begun = [
        dict(zip(r["clients"], (r["round"] - late for late in r["staleness"]), strict=True)) for r in result.reports
    ]
    whole = [encode(simulation.strategy.server.broadcast(store.state(State, done))) for done in range(ROUNDS)]
    for report in result.reports:
        of = begun[report["round"]]
        held = {client: begun[first - 1].get(client) for client, first in of.items() if first}
        sent = [
            len(whole[first] if held.get(client) is None else shorten(whole[first], whole[held[client]]))
            for client, first in of.items()
        ]
        assert report["total_down"] == sum(sent) <= 2 * len(whole[0])
        assert report["bytes_total"] == sum(sent) + 2 * report["bytes_up"]
    assert any(report["total_down"] < 2 * len(whole[0]) for report in result.reports)  # some were differences


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_run_rolled_back_and_resumed_is_the_undisturbed_one(whole, tmp_path, stop):
    directory, result = whole
    store = Store(Path(shutil.copytree(directory, tmp_path / "run")))
    store.rollback(stop)
    again = resume(store.directory)
    assert again.digest == result.digest
    assert store.adapter.read_bytes() == (directory / "adapter.safetensors").read_bytes()
    timeless = [[{**r, "seconds": 0, "cpu_seconds": 0} for r in reports] for reports in (again.reports, result.reports)]
    assert timeless[0] == timeless[1]


def test_a_run_that_was_stopped_ends_the_same(whole, tmp_path, model_folder, data_file):
    class StopError(Exception):
        pass

    class Stopping(Simulation):
        def answer(self, data: bytes, number: int, *read):
            if not next(moments):  # in the middle of a round
                raise StopError
            return super().answer(data, number, *read)

    moments, (directory, result) = iter([True] * 9 + [False]), whole
    recipe = load_recipe(directory / "recipe.toml")
    with Store.create(tmp_path / "run", recipe.to_toml()) as store, pytest.raises(StopError):
        work(store, Stopping(recipe).federation)
    assert len(store.reports()) == 4
    assert resume(tmp_path / "run").digest == result.digest


def test_a_newcomer_gets_the_model_of_a_veteran(whole):
    directory, result = whole
    simulation = Simulation(load_recipe(directory / "recipe.toml"))
    store, simulated = Store(directory), simulation.strategy
    for done in (ROUNDS // 2, ROUNDS - 1):  # a model that has gone through other states, forward and back
        simulation.round(store.state(State, done), lambda begun: store.state(State, begun))
    last = store.state(State)
    simulated.load(last, simulation.setup.weights)
    assert simulation.setup.weights.digest().hex() == result.digest


def test_clients_side_by_side_give_the_same_run(whole, tmp_path, model_folder, data_file):
    """Their messages differ: one began earlier than the other."""
    changes = {"cohort": UNEVEN + "\nat_once = 2\nthreads = 1"}
    assert run(tmp_path, text(model_folder, data_file, **changes)).digest == whole[1].digest


def test_with_equal_clients_and_a_cohort_as_buffer_the_run_is_the_synchronous_one(tmp_path, model_folder, data_file):
    even, table = {"cohort": "cohort = 2", "rounds": "rounds = 4"}, "[asynchronous]\nbuffer = 2\n"
    late = run(tmp_path, text(model_folder, data_file, table, **even), "late")
    rounds = run(tmp_path, text(model_folder, data_file, "", **even), "synchronous")
    assert late.digest == rounds.digest
    timeless = [[{**r, "seconds": 0, "cpu_seconds": 0} for r in reports] for reports in (late.reports, rounds.reports)]
    assert timeless[0] == timeless[1]


def test_clients_given_up_are_told(tmp_path, model_folder, data_file):
    result = run(tmp_path, text(model_folder, data_file, TABLE + "max_staleness = 1\n"))
    assert max(max(report["staleness"]) for report in result.reports) <= 1
    assert sum(report["given_up"] for report in result.reports) > 0


def test_large_states_are_kept_as_long_as_somebody_trains_with_them(
    whole, tmp_path, monkeypatch, model_folder, data_file
):
    monkeypatch.setattr(storing, "LARGE", 100)  # bytes
    assert run(tmp_path, text(model_folder, data_file)).digest == whole[1].digest
    assert 2 < len(list((tmp_path / "run").glob("state-*.safetensors"))) < ROUNDS


def test_a_round_without_the_states_it_needs_is_refused(whole):
    directory, result = whole
    simulation = Simulation(load_recipe(directory / "recipe.toml"))
    done = next(r["round"] for r in result.reports if any(r["staleness"]))
    with pytest.raises(FedKSeedError, match=r"began with the state after \d+ rounds; give round"):
        simulation.round(Store(directory).state(State, done))


@pytest.mark.parametrize("name", [name for name, algorithm in ALGORITHMS.items() if not algorithm.pooled])
def test_an_algorithm_that_is_no_sum_is_refused_at_once(name, tmp_path, model_folder, data_file):
    recipe = text(model_folder, data_file, algorithm=f'algorithm = "{name}"')
    with pytest.raises(FedKSeedError, match=rf"{name} does not read \[asynchronous\]: leave it out"):
        run(tmp_path, recipe)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("buffer = 0", r"\[asynchronous\] buffer: input should be greater than or equal to 1, got 0"),
        ("buffer = 7", r"\[asynchronous\] buffer = 7 needs as many clients, there are 6"),
        ("buffer = 2\nconcurrency = 7", r"\[asynchronous\] concurrency = 7 needs as many clients, there are 6"),
        ("staleness_power = -1.0", r"\[asynchronous\] staleness_power: .* greater than or equal to 0, got -1.0"),
        ("max_staleness = -1", r"\[asynchronous\] max_staleness: .* greater than or equal to 0, got -1"),
        ("max_stalenes = 1", r"\[asynchronous\] has no key 'max_stalenes'; did you mean 'max_staleness'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(table, message, tmp_path, model_folder, data_file):
    with pytest.raises(FedKSeedError, match=message):
        run(tmp_path, text(model_folder, data_file, f"[asynchronous]\n{table}\n"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("slow_share = 1.5", r"\[clients\] slow_share: input should be less than or equal to 1, got 1.5"),
        ("slow_factor = 0.5", r"\[clients\] slow_factor: input should be greater than or equal to 1, got 0.5"),
    ],
)
def test_speeds_that_make_no_sense_are_refused(line, message, tmp_path, model_folder, data_file):
    with pytest.raises(FedKSeedError, match=message):
        run(tmp_path, text(model_folder, data_file, cohort=line))


def test_with_files_the_data_say_how_many_clients_there_are(tmp_path, model_folder, data_file):
    (tmp_path / "data").mkdir()
    shutil.copy(data_file, tmp_path / "data")
    recipe = text(model_folder, tmp_path / "data", "[asynchronous]\nbuffer = 2\n", count='split = "files"', alpha="")
    with pytest.raises(FedKSeedError, match=r"buffer = 2 needs as many clients, there are 1"):
        run(tmp_path, recipe.replace("cohort = 2", "cohort = 1"))
