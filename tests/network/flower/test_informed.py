"""Informed directions over a network: each party has the basis' file of its own, and a server can do without."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from tomllib import loads

import pytest

from fedkseed import Adapter, FedKSeedError, apply, start
from fedkseed.models.load import load_model
from fedkseed.network.protocol.client.recipe_consent import accepted_recipe
from fedkseed.network.protocol.client.task_handler import TaskHandler
from fedkseed.network.protocol.client.training_client import load_client
from fedkseed.network.protocol.envelope import Code, RefusedError, Reply, Status, Task, recipe_digest
from fedkseed.network.protocol.networked_recipe import recipe_for_clients, with_network_defaults
from fedkseed.network.protocol.server.client_numbers import ClientNumbers
from fedkseed.recipe.reading import parse, tables
from fedkseed.recipe.schema import Recipe
from fedkseed.run.store import Store
from fedkseed.run.verify import verify
from fedkseed.weights.basis_file import load_basis, save_basis
from fedkseed.weights.layout import Layout

from ...conftest import small_basis, tiny_llama
from .conftest import NODES, to_workers


@pytest.fixture
def recipe(setting, basis_file) -> Recipe:
    """A server's recipe before it is sent: the basis by its path alone."""
    table = parse(loads(setting.text())).model_dump(exclude_none=True)
    table["directions"] = {"family": "mixed", "size": 128, "basis": str(basis_file)}
    return parse(table)


@pytest.fixture
def files(tmp_path, basis_file) -> list[Path]:
    """The copies of the basis that three clients have."""
    return [Path(shutil.copy(basis_file, tmp_path / f"basis-{k}")) for k in range(3)]


def worker(setting, number: int, basis: Path | None) -> TaskHandler:
    return TaskHandler(partial(load_client, setting.owner(number, basis=basis and str(basis))))


def served(setting, directory: Path, recipe: Recipe, files: list[Path]):
    with Store.create(directory, recipe.to_toml()):
        ClientNumbers.register(directory, range(3))
    workers = {node: worker(setting, k, files[k]) for k, node in enumerate(NODES)}
    return setting.serve(directory, to_workers(workers))


def task(recipe: Recipe) -> bytes:
    text = recipe_for_clients(with_network_defaults(recipe), 3)
    return Task(1, 600.0, recipe_digest(text), text, b"").encode()


def test_a_federation_ends_with_the_digest_of_a_run_in_one_process(setting, recipe, files, tmp_path):
    alone = start(with_network_defaults(recipe), tmp_path / "alone")
    assert served(setting, tmp_path / "run", with_network_defaults(recipe), files).digest == alone.digest
    assert verify(Store(tmp_path / "run")).rounds == 3


def without_model(setting, recipe: Recipe) -> Recipe:
    """The recipe of a server that has neither model nor data."""
    sent, digest = with_network_defaults(recipe), Layout(load_model(str(setting.model))).digest().hex()
    model, data = sent.model.model_copy(update={"digest": digest}), sent.data.model_copy(update={"source": "elsewhere"})
    return sent.model_copy(update={"model": model, "data": data})


def test_a_server_without_model_and_basis_runs_the_rounds_and_its_adapter_takes_the_basis_later(
    setting, recipe, files, basis_file, tmp_path
):
    alone = start(with_network_defaults(recipe), tmp_path / "alone")
    sent = without_model(setting, recipe)
    bare = sent.model_copy(update={"directions": sent.directions.model_copy(update={"basis": None})})
    assert served(setting, tmp_path / "run", bare, files).digest is None  # it has no model
    found = Adapter.load(tmp_path / "run" / "adapter.safetensors")
    assert found.basis is None
    with pytest.raises(FedKSeedError, match="the adapter lacks its basis"):
        apply(load_model(str(setting.model)), tmp_path / "run" / "adapter.safetensors")
    replace(found, basis=load_basis(basis_file)).apply(model := load_model(str(setting.model)))
    assert Layout(model).digest().hex() == alone.digest
    assert verify(Store(tmp_path / "run")).rounds == 3


def test_a_server_with_the_basis_and_no_model_puts_it_into_the_adapter(setting, recipe, files, tmp_path):
    sent = without_model(setting, recipe)
    served(setting, tmp_path / "run", sent, files)
    found = Adapter.load(tmp_path / "run" / "adapter.safetensors")
    assert found.basis is not None
    assert found.basis.digest().hex() == sent.directions.basis_digest


@pytest.mark.parametrize("have", ["none", "another", "a broken one", "a file that is not there"])
def test_a_client_without_the_basis_of_the_run_answers_with_one_word(setting, recipe, tmp_path, have):
    mine = tmp_path / "mine"
    if have == "another":
        save_basis(small_basis(tiny_llama(), seed=6), mine)
    if have == "a broken one":
        mine.write_bytes(b"no basis")
    reply = worker(setting, 1, None if have == "none" else mine).reply(task(recipe))
    assert (reply.status, reply.text) == (Status.REFUSED, "basis")
    assert Reply.decode(reply.encode()).text == Code.BASIS


def test_a_client_says_in_full_to_its_owner_what_it_lacks(setting, recipe):
    sent = with_network_defaults(recipe)
    with pytest.raises(RefusedError, match=f"needs the basis {sent.directions.basis_digest}: .* --basis FILE"):
        accepted_recipe(recipe_for_clients(sent, 3), setting.owner(1))


def test_a_server_can_not_name_a_file_of_the_client(setting, recipe, files):
    sent = with_network_defaults(recipe)
    hostile = sent.directions.model_copy(update={"basis": "/etc/passwd"})
    text = sent.model_copy(update={"directions": hostile}).to_toml().encode()
    owner = setting.owner(1, basis=str(files[1]))
    assert accepted_recipe(text, owner).directions.basis == str(files[1])
    with pytest.raises(RefusedError, match="needs the basis"):
        accepted_recipe(text, replace(owner, basis=None))
    other = parse(loads(setting.text()))
    assert accepted_recipe(recipe_for_clients(other, 3), owner).directions.basis is None


def test_clients_get_the_digest_and_no_path(recipe, basis_file):
    sent = parse(tables(recipe_for_clients(with_network_defaults(recipe), 3)))
    assert sent.directions.basis is None
    assert sent.directions.basis_digest == load_basis(basis_file).digest().hex()
