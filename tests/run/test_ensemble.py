"""The mean of a run's last rounds."""

import numpy as np
import pytest

from fedkseed.errors import FedKSeedError
from fedkseed.recipe.reading import load_recipe
from fedkseed.run.ensemble import mean_state
from fedkseed.run.simulation import Simulation
from fedkseed.run.start_and_resume import start
from fedkseed.run.store import Store


def test_the_mean_of_coefficients_is_the_mean_of_weights(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file, ["training.wire=exact"])
    start(recipe, tmp_path / "run")
    store, simulation = Store(tmp_path / "run"), Simulation(recipe)
    kind, weights = simulation.strategy.server.state, []

    def loaded(state: object) -> np.ndarray:
        simulation.setup.load(state)
        return np.concatenate([each.detach().double().numpy().ravel() for each in simulation.setup.model.parameters()])

    weights = [loaded(store.state(kind, done)) for done in (1, 2, 3)]
    together = loaded(mean_state(store, recipe, kind, None, 3))
    assert np.abs(together - np.mean(weights, axis=0)).max() < 1e-7 < np.abs(together - weights[2]).max()
    with pytest.raises(FedKSeedError, match="has 2 rounds to take the mean of"):
        mean_state(store, recipe, kind, 2, 3)
