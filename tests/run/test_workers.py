"""Clients side by side give what clients one after the other give."""

import os
import subprocess
import sys
import time
from contextlib import closing

import pytest
from tqdm import tqdm

from fedkseed import FedKSeedError, Simulation
from fedkseed.models.load import load_model
from fedkseed.recipe.reading import load_recipe
from fedkseed.run.start_and_resume import start
from fedkseed.run.store import Store
from fedkseed.run.workers import Workers, threads_of

from ..commands import documented
from ..conftest import recipe_text
from ..wire.codec_calls import Alive


def test_clients_side_by_side_give_the_same_run_bit_for_bit(tmp_path, model_folder, data_file):
    results = []
    for at_once in (1, 2):
        recipe = tmp_path / f"{at_once}.toml"
        recipe.write_text(recipe_text(model_folder, data_file, cohort=f"cohort = 2\nat_once = {at_once}\nthreads = 1"))
        results.append(start(load_recipe(recipe), tmp_path / str(at_once)))
    one, two = results
    assert one.digest == two.digest
    timeless = [[{**r, "seconds": 0, "cpu_seconds": 0} for r in result.reports] for result in results]
    assert timeless[0] == timeless[1]
    assert one.after == two.after
    assert two.step_seconds is not None
    assert (tmp_path / "1/adapter.safetensors").read_bytes() == (tmp_path / "2/adapter.safetensors").read_bytes()


def test_a_run_is_resumed_with_another_number_of_clients_side_by_side(tmp_path, model_folder, data_file):
    """As the error of a process that ends for want of memory says; another recipe than the run's own is refused."""
    recipe, run = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(recipe_text(model_folder, data_file, cohort="cohort = 2\nat_once = 2"))
    digest, threads = start(load_recipe(recipe), run).digest, threads_of(load_recipe(recipe))
    for at_once in (1, 2):
        Store(run).rollback(1)
        assert documented("resume", run, "--at-once", at_once)["digest"] == digest
        assert Store(run).load_recipe().clients.at_once == at_once
        assert Store(run).load_recipe().clients.threads == threads


def test_the_processor_time_of_a_round_is_of_all_processes(recipe_file, monkeypatch):
    recipe = load_recipe(recipe_file)
    monkeypatch.setattr(Workers, "take_cpu_seconds", lambda _: 1e6)
    for at_once in (1, 2):
        with closing(Simulation(recipe.having(clients={"at_once": at_once}))) as simulation:
            report = simulation.round(simulation.strategy.server.init())[1]
            assert report.cpu_seconds is not None
            assert (report.cpu_seconds > 1e6) == (at_once > 1)


def test_a_program_without_a_main_guard_runs_once(recipe_file, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"""
import fedkseed as fk
print("begun")
recipe = fk.load_recipe({str(recipe_file)!r})
simulation = fk.Simulation(recipe.having(clients={{"at_once": 2}}))
state, report = fk.run_round(simulation.strategy, simulation.strategy.server.init(), [0, 1], simulation.transport)
print(len(report.clients))
simulation.close()
""")
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["begun", "2"], ended.stderr


def _busy(seconds):
    def answer(*_):
        begun = time.process_time()
        while time.process_time() < begun + seconds:
            pass
        return b"", [0.5]

    return answer


def test_processor_seconds_of_workers_are_taken_once(tmp_path):
    workers = Workers(2, 1, _busy, 0.1)
    for clients in (3, 1, 0):
        assert len([*workers.answers(dict.fromkeys(range(clients), b"x"))]) == clients
        assert 0.1 * clients <= workers.take_cpu_seconds() <= 0.2 * clients
    workers.close()


def test_clients_that_remember_take_turns(tmp_path, model_folder, data_file):
    recipe = tmp_path / "recipe.toml"
    lines = {"cohort": "cohort = 2\nat_once = 2", "algorithm": 'algorithm = "decomfl"'}
    recipe.write_text(recipe_text(model_folder, data_file, **lines))
    with pytest.raises(FedKSeedError, match=r"decomfl.*remember.*at_once = 1"):
        start(load_recipe(recipe), tmp_path / "run")


def _noting(folder):
    return lambda data, client: ((folder / str(client)).write_bytes(data), (bytes(3), [0.5]))[1]


def test_no_more_clients_are_taken_up_than_there_are_processes(tmp_path):
    """Uploads of all weights would else pile up here while one of them is added."""
    workers = Workers(2, 1, _noting, tmp_path)
    answers = iter(workers.answers(dict.fromkeys(range(6), b"x")))
    for taken in range(1, 7):
        assert next(answers)[1:] == (bytes(3), [0.5])
        time.sleep(0.05)
        assert len([*tmp_path.iterdir()]) <= taken + 1
    assert not [*answers]
    workers.close()


def test_a_simulation_of_averages_holds_one_upload_at_a_time(tmp_path, model_folder, data_file, monkeypatch):
    alive, recipe = Alive(monkeypatch), tmp_path / "recipe.toml"
    lines = {"count": "count = 6", "cohort": "cohort = 5", "algorithm": 'algorithm = "fedit"', "rounds": "rounds = 1"}
    recipe.write_text(recipe_text(model_folder, data_file, **lines, generated="generated = 0"))
    start(load_recipe(recipe), tmp_path / "run")
    assert alive.most == 1


def _dying():
    def answer(data: bytes, client: int):
        os._exit(9)

    return answer


def test_a_process_that_dies_is_a_clear_error():
    workers = Workers(1, 1, _dying)
    with pytest.raises(FedKSeedError, match="takes --at-once N, for fewer clients"):
        list(workers.answers({1: b"", 2: b""}))
    workers.close()


def _lock_of_bars():
    return lambda data, client: (type(tqdm.get_lock()).__module__.encode(), [])


def test_progress_bars_of_libraries_leave_no_semaphore_behind_in_a_process_that_is_terminated():
    workers = Workers(1, 1, _lock_of_bars)
    assert list(workers.answers({1: b""})) == [(1, b"_thread", [])]
    workers.close()


def test_a_device_that_is_not_there_is_refused(model_folder):
    with pytest.raises(FedKSeedError, match="the device 'cuda:99' can't be used"):
        load_model(str(model_folder), device="cuda:99")
    with pytest.raises(FedKSeedError, match="can't be used"):
        load_model(str(model_folder), device="toaster")
