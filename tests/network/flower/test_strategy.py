"""FedKSeed in Flower's own loop gives what `run_round` gives, to the bit."""

from tomllib import loads

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message
from flwr.clientapp import ClientApp

from fedkseed import FedKSeedError, Simulation
from fedkseed.network.flower.strategy import FedKSeedStrategy, from_arrays, to_arrays, train
from fedkseed.recipe.reading import parse
from fedkseed.round import run_round
from fedkseed.run.cohort import cohort
from fedkseed.strategies.kseed import State

from .conftest import NODES
from .loopback import LoopbackGrid, to_apps

ROUNDS = 3


@pytest.fixture(scope="module", params=["fedkseed", "fedkseed-pro", "fedavg"])
def simulation(request, setting) -> Simulation:
    return Simulation(parse(loads(setting.text(algorithm=f'algorithm = "{request.param}"'))))


def grid_of(simulation: Simulation, deliver=None) -> LoopbackGrid:
    app = ClientApp()

    @app.train()
    def answer(message, context):
        return train(message, simulation.strategy, simulation.client)

    return LoopbackGrid(lambda: NODES, deliver or to_apps(dict.fromkeys(NODES, app)))


def equal(one, other) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in one.__slots__)


@pytest.mark.parametrize("size", [3, 2])
def test_flowers_loop_and_ours_end_with_the_same_state(simulation, size):
    flowers = FedKSeedStrategy(simulation.strategy, clients=3, size=size, seed=5)
    result = flowers.start(grid_of(simulation), flowers.initial_arrays(), num_rounds=ROUNDS)
    state = simulation.strategy.server.init()
    for round_ in range(ROUNDS):
        state, report = run_round(simulation.strategy, state, cohort(5, round_, 3, size), simulation.transport)
    assert equal(from_arrays(result.arrays, simulation.strategy.server.state), state)
    metrics = result.train_metrics_clientapp[ROUNDS]
    assert (metrics["loss"], metrics["bytes"]) == (report.loss, report.bytes_total)


def test_arrays_that_were_kept_let_a_run_go_on(simulation):
    flowers = FedKSeedStrategy(simulation.strategy, clients=3)
    whole = flowers.start(grid_of(simulation), flowers.initial_arrays(), num_rounds=2)
    first = flowers.start(grid_of(simulation), flowers.initial_arrays(), num_rounds=1)
    second = flowers.start(grid_of(simulation), first.arrays, num_rounds=1)
    kind = simulation.strategy.server.state
    assert equal(from_arrays(second.arrays, kind), from_arrays(whole.arrays, kind))
    assert from_arrays(second.arrays, kind).round == 2


def test_errors_refusals_and_strangers_are_left_out(simulation):
    whole = grid_of(simulation)

    def deliver(message):
        if message.metadata.dst_node_id == NODES[0]:
            yield Message(Error(5, "gone"), reply_to=message)
        else:
            (reply,) = whole._deliver(message)
            yield reply
            yield reply  # twice

    flowers = FedKSeedStrategy(simulation.strategy, clients=3)
    result = flowers.start(grid_of(simulation, deliver), flowers.initial_arrays(), num_rounds=1)
    assert result.train_metrics_clientapp[1]["clients"] == 2
    state, _ = run_round(simulation.strategy, simulation.strategy.server.init(), [1, 2], simulation.transport)
    assert equal(from_arrays(result.arrays, simulation.strategy.server.state), state)


def test_a_round_without_answers_changes_nothing(simulation):
    flowers = FedKSeedStrategy(simulation.strategy, clients=3)
    begin = flowers.initial_arrays()
    result = flowers.start(grid_of(simulation, lambda message: ()), begin, num_rounds=1)
    assert result.train_metrics_clientapp == {}
    assert flowers.aggregate_train(1, []) == (None, None)


@pytest.mark.parametrize("algorithm", ["unlimited-seeds", "fedkseed"])
def test_a_strategy_with_two_legs_or_with_clients_that_remember_rounds_is_refused(setting, algorithm):
    tables = loads(setting.text(algorithm=f'algorithm = "{algorithm}"'))
    masked = {"secure": {"norm": 0.1}, "trust": {"rule": "mean", "agreement": False}}
    strategy = Simulation(parse(tables | (masked if algorithm == "fedkseed" else {}))).strategy
    assert (strategy.second_leg is None) == (algorithm != "fedkseed")
    with pytest.raises(FedKSeedError, match="one leg a round"):
        FedKSeedStrategy(strategy, clients=3)


def test_a_state_is_the_same_after_flowers_arrays():
    state = State(7, np.arange(4.0), np.ones(4), np.arange(4))
    assert equal(from_arrays(to_arrays(state), State), state)
    with pytest.raises(FedKSeedError, match=r"got \['w'\]; begin with initial_arrays"):
        from_arrays(ArrayRecord({"w": Array(np.ones(2))}), State)
