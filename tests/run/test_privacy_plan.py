"""The noise that follows from a recipe's epsilon, and a run's end before the budget is passed."""

import math
from collections import Counter
from contextlib import closing

import pytest

from fedkseed import FedKSeedError, Simulation, resume, start
from fedkseed.files import write_table
from fedkseed.recipe.reading import load_recipe
from fedkseed.run.cohort import cohort
from fedkseed.run.privacy_plan import NOISE_KEY, kept_secret, new_secret, participations, private_steps, with_noise
from fedkseed.run.store import Store
from fedkseed.run.verify import verify
from fedkseed.secure.accounting import epsilon_of
from fedkseed.weights.adapter import Adapter

from ..conftest import recipe_text
from . import synthetic

PRIVATE = "[privacy]\nepsilon = 8.0\nnorm = 0.1\n"
EXAMPLE = '[privacy]\nunit = "example"\nepsilon = 8.0\nnorm = 1.0\n'


@pytest.fixture
def recipe(tmp_path, model_folder, data_file):
    """A function from a recipe's lines to a recipe of four clients, two of them in each round."""

    def make(extra: str = PRIVATE, **changes: str):
        path = tmp_path / "recipe.toml"
        path.write_text(recipe_text(model_folder, data_file, **{"cohort": "cohort = 2"} | changes) + extra)
        return load_recipe(path)

    return make


def test_clients_of_a_private_run_take_turns_and_noise_is_for_the_busiest(recipe):
    private = recipe(rounds="rounds = 5")
    assert private.clients.draw == "in turns"
    found = with_noise(private, 4).privacy
    assert found.times == 3  # rounds 1 and 2, 3 and 4 are turns of all four
    assert epsilon_of(found.noise, 3, found.delta) == pytest.approx(8)
    assert [participations(private, private.privacy, 4, done) for done in range(6)] == [0, 1, 1, 2, 2, 3]
    for size, clients, rounds in ((3, 10, 7), (2, 4, 8), (4, 4, 3)):
        drawn = Counter(c for done in range(rounds) for c in cohort(1, done, clients, size, "in turns"))
        plan = recipe(cohort=f"cohort = {size}")
        assert participations(plan, plan.privacy, clients, rounds) == max(drawn.values())
    assert participations(recipe(cohort="cohort = 4"), plan.privacy, 7, 5) == 5  # a draw anew each round: at most all
    drawn = recipe(PRIVATE, cohort='cohort = 2\ndraw = "each round"', rounds="rounds = 40")
    assert with_noise(drawn, 4).privacy.times > 20
    larger = recipe(PRIVATE + "simulated = {clients = 10_000, cohort = 1000}\n", rounds="rounds = 25")
    assert with_noise(larger, 4).privacy.times == 3


def test_what_was_spent_stands_in_rounds_and_in_the_adapter(recipe, tmp_path):
    result = start(recipe(rounds="rounds = 4"), tmp_path / "run")
    privacy = Store(tmp_path / "run").load_recipe().privacy
    expected = [epsilon_of(privacy.noise, times, privacy.delta) for times in (1, 1, 2, 2)]
    assert [report["epsilon"] for report in result.reports] == pytest.approx(expected)
    assert expected[-1] == pytest.approx(8)
    assert [report["scalar"] for report in result.reports] == [None] * 4
    said = Adapter.load(result.output).provenance["privacy"]
    assert (said["unit"], said["delta"], said["rounds of one client"]) == ("client", 1e-6, 2)
    assert said["epsilon"] == pytest.approx(8)


def require_same_after_a_stop(recipe, tmp_path, monkeypatch):
    """A run that was stopped goes on with the secret in its directory, to the same model, and can be verified."""
    monkeypatch.setattr("fedkseed.run.simulation.new_secret", lambda recipe: bytes(range(32)))
    whole = start(recipe, tmp_path / "whole")
    synthetic.start_and_stop(recipe, tmp_path / "stopped", monkeypatch)
    monkeypatch.undo()
    assert resume(tmp_path / "stopped").digest == whole.digest
    assert verify(Store(tmp_path / "stopped")).rounds == 3


def test_a_stopped_private_run_goes_on_with_the_same_noise_and_can_be_verified(recipe, tmp_path, monkeypatch):
    require_same_after_a_stop(recipe(rounds="rounds = 3"), tmp_path, monkeypatch)
    write_table(tmp_path / "stopped" / NOISE_KEY, {"secret": "00" * 32})
    with pytest.raises(FedKSeedError, match="the state is not what the algorithm makes"):
        verify(Store(tmp_path / "stopped"))
    (tmp_path / "stopped" / NOISE_KEY).unlink()
    with pytest.raises(FedKSeedError, match=r"noise\.key is missing"):
        verify(Store(tmp_path / "stopped"))
    assert not (tmp_path / "stopped" / NOISE_KEY).exists(), "to verify is to read"


def test_a_run_ends_before_its_budget_is_passed(recipe, tmp_path):
    noise = with_noise(recipe(rounds="rounds = 2"), 4).privacy.noise  # enough for one time
    result = start(recipe(PRIVATE + f"noise = {noise!r}\n", rounds="rounds = 6"), tmp_path / "run")
    assert len(result.reports) == 2
    assert "round 3 would spend epsilon" in result.stopped
    assert result.output.exists()


def test_private_rounds_are_not_done_again(recipe, tmp_path):
    start(recipe(rounds="rounds = 2"), tmp_path / "run")
    with pytest.raises(FedKSeedError, match="what its clients gave can't be taken back"):
        Store(tmp_path / "run").rollback(1)
    assert Store(tmp_path / "run").rounds == 2


def test_the_secret_is_random_kept_and_only_the_owners(recipe, tmp_path):
    private = recipe()
    assert new_secret(private) != new_secret(private)
    assert new_secret(recipe("")) == b""
    secret = kept_secret(private, tmp_path)
    assert kept_secret(private, tmp_path) == secret
    assert (tmp_path / NOISE_KEY).stat().st_mode & 0o077 == 0
    text = (tmp_path / NOISE_KEY).read_bytes()
    for k in range(0, len(text), 7):  # another secret would be another noise, in silence
        (tmp_path / NOISE_KEY).write_bytes(text[:k] + bytes([text[k] ^ 1]) + text[k + 1 :])
        with pytest.raises(FedKSeedError, match="is damaged"):
            kept_secret(private, tmp_path)
    write_table(tmp_path / NOISE_KEY, {"secret": "ab"})
    with pytest.raises(FedKSeedError, match="holds no secret of 32 bytes"):
        kept_secret(private, tmp_path)


def test_noise_of_a_run_does_not_follow_from_its_recipe(recipe):
    private = recipe()
    with closing(Simulation(private)) as one, closing(Simulation(private)) as other:
        assert one.strategy.settings.noise.secret != other.strategy.settings.noise.secret


@pytest.mark.parametrize(
    ("extra", "changes", "says"),
    [
        ("[privacy]\nnorm = 0.1\n", {}, "neither epsilon nor noise"),
        ("[privacy]\nepsilon = 2.0\n", {}, "norm is missing"),
        (PRIVATE + "[secure]\nnorm = 1.0\n", {}, "are one thing"),
        (PRIVATE + '[trust]\nrule = "median"\n', {}, "rule = 'mean'"),
        (PRIVATE + "[asynchronous]\nbuffer = 2\n", {}, "leave \\[asynchronous\\] out"),
        (PRIVATE + 'unit = "example"\nnoise = 1.0\n', {}, "each client finds its own noise"),
        (PRIVATE + "times = 7\n", {}, "leave times out"),
        (PRIVATE, {"algorithm": 'algorithm = "fedkseed-pro"'}, "use fedkseed"),
        (PRIVATE, {"algorithm": 'algorithm = "evofed"'}, "does not read \\[privacy\\]"),
        (PRIVATE, {"algorithm": 'algorithm = "uplink-seeds"'}, "uploads of weights or of K numbers"),
        (EXAMPLE, {"steps": "epochs = 1"}, "set steps in place of epochs"),
        (EXAMPLE, {"algorithm": 'algorithm = "fedavg"'}, "does not read \\[privacy\\] unit"),
        (EXAMPLE, {"algorithm": 'algorithm = "decomfl"'}, "does not read \\[privacy\\]"),
        (EXAMPLE.replace("norm = 1.0\n", ""), {}, "largest norm of one example"),
        (EXAMPLE.replace("epsilon = 8.0\n", "noise = 1.0\n"), {}, "each client finds its own noise"),
        (EXAMPLE + "[asynchronous]\nbuffer = 2\n", {}, "leave \\[asynchronous\\] out"),
        (EXAMPLE + "times = 7\n", {}, "leave times out"),
    ],
)
def test_what_would_tell_more_is_refused(recipe, extra, changes, says):
    with pytest.raises(FedKSeedError, match=says):
        Simulation(recipe(extra, **changes)).close()


def test_an_example_takes_part_in_no_more_steps_than_its_epsilon_pays_for(recipe):
    given, whole = recipe(EXAMPLE, rounds="rounds = 5", steps="steps = 4"), 0
    with closing(Simulation(given)) as simulation:
        for number, share in enumerate(simulation.shares.clients):
            client, times = simulation.client(number), Counter()
            for round_ in range(5):
                if number in simulation.cohort(round_):
                    batches = client.batches(round_)
                    times.update(id(one.examples[0]) for _ in range(4) for one in next(batches))
            assert set(times) <= {id(one) for one in share}
            found = epsilon_of(client.private.multiplier, max(times.values()), 1e-6)
            assert found <= 8 * (1 + 1e-6)
            # A row that is in as many steps as it can be, in three rounds, spends all; the others' noise is the same.
            if max(times.values()) == 3 * math.ceil(4 / (len(share) // 2)):
                assert found == pytest.approx(8)
                whole += 1
        assert whole


def test_a_run_that_protects_examples_says_what_it_has_spent(recipe, tmp_path):
    result = start(recipe(EXAMPLE, rounds="rounds = 4"), tmp_path / "run")
    spent = [report["epsilon"] for report in result.reports]
    assert spent[0] == spent[1] < spent[2] == spent[3] == pytest.approx(8)  # rounds 1 and 2 are one turn of all four
    assert [report["skipped"] for report in result.reports] == [0] * 4
    assert [report["loss"] for report in result.reports] == [None] * 4
    said = Adapter.load(result.output).provenance["privacy"]
    assert (said["unit"], said["delta"], said["rounds of one client"]) == ("example", 1e-6, 2)
    assert said["epsilon"] == pytest.approx(8)


@pytest.mark.parametrize("algorithm", ["fedkseed", "fedkseed-backprop"])
def test_a_stopped_run_that_protects_examples_goes_on_to_the_same_model(recipe, tmp_path, monkeypatch, algorithm):
    given = recipe(EXAMPLE, rounds="rounds = 3", algorithm=f'algorithm = "{algorithm}"')
    require_same_after_a_stop(given, tmp_path, monkeypatch)


def test_noise_of_examples_needs_the_plan_of_the_run_and_a_secret(recipe):
    given = recipe(EXAMPLE)
    with pytest.raises(FedKSeedError, match="times is missing"):
        private_steps(given, 0, 10, 3, bytes(32))
    planned = with_noise(given, 4)
    with pytest.raises(FedKSeedError, match="a secret of its own"):
        private_steps(planned, 0, 10, 3, b"")
    first, second = (private_steps(planned, number, 10, 3, bytes(32)) for number in (0, 1))
    assert first.multiplier == second.multiplier
    assert first.secret != second.secret
    assert private_steps(recipe(PRIVATE), 0, 10, 3, bytes(32)) is None
