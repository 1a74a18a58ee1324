"""The type `auto`: measured once, by whoever writes the recipe of a run; all others read what was measured."""

import pytest

from fedkseed import FedKSeedError
from fedkseed.models import dtypes
from fedkseed.models.dtypes import slowness
from fedkseed.network.protocol.client.policy import Policy
from fedkseed.network.protocol.client.recipe_consent import Owner, accepted_recipe
from fedkseed.network.protocol.networked_recipe import recipe_for_clients
from fedkseed.network.protocol.server.serving import begin
from fedkseed.planning.pin import pin
from fedkseed.recipe.reading import load_recipe, parse, tables, typed
from fedkseed.recipe.rules import Where, require_legal
from fedkseed.run.progress import Silent
from fedkseed.run.start_and_resume import resume, start
from fedkseed.run.store import Store

from ..conftest import recipe_text


class Noting(Silent):
    def __init__(self):
        self.notes = list[str]()

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def times(monkeypatch):
    """What a product in another type takes, as a list of one number to change, and the types that were measured."""
    ratio, asked = [0.5], list[str]()
    monkeypatch.setattr(dtypes, "slowness", lambda dtype, device: asked.append(dtype) or ratio[0])
    return ratio, asked


@pytest.fixture
def automatic(tmp_path, model_folder, data_file):
    path = tmp_path / "auto.toml"
    path.write_text(recipe_text(model_folder, data_file, name=f'name = "{model_folder}"\ndtype = "auto"'))
    return path


@pytest.mark.parametrize(("ratio", "dtype"), [(0.5, "bfloat16"), (1.0, "bfloat16"), (1.01, "float32")])
def test_a_run_measures_once_and_goes_on_in_its_type_on_a_machine_of_other_speed(
    times, automatic, tmp_path, ratio, dtype
):
    times[0][0], seen = ratio, Noting()
    result = start(load_recipe(automatic), tmp_path / "run", seen)
    says = f"[model] dtype = 'auto' is {dtype} here: bfloat16 takes {ratio:.2g} times as long as float32"
    assert [text for text in seen.notes if "auto" in text] == [says]
    store = Store(tmp_path / "run")
    assert (store.load_recipe().model.dtype, 'dtype = "auto"' in store.recipe.read_text()) == (dtype, False)
    fixed = tmp_path / "fixed.toml"
    fixed.write_text(automatic.read_text().replace('"auto"', f'"{dtype}"'))
    assert start(load_recipe(fixed), tmp_path / "fixed").digest == result.digest
    times[0][0] = 9.0 if dtype == "bfloat16" else 0.1  # the other type, were it measured again
    assert resume(tmp_path / "run").digest == result.digest


def test_pin_writes_the_type_beside_the_digest_that_holds_for_it_alone(times, automatic):
    written = pin(automatic)["model"]
    pinned = load_recipe(automatic).model
    assert (pinned.dtype, pinned.digest) == ("bfloat16", written["digest"])
    again = pin(automatic)["model"]
    assert again == {name: written[name] for name in ("digest", "tokenizer_digest", "losses")}
    with pytest.raises(FedKSeedError, match="digest is that of weights in one type: give their dtype in place of"):
        parse(tables(automatic.read_bytes().replace(b'"bfloat16"', b'"auto"')))


def test_a_server_measures_once_and_its_clients_are_sent_the_type(times, automatic, tmp_path, data_file):
    networked = automatic.read_text().replace("count = 4", 'split = "files"\ncount = 4').replace("alpha = 1.0\n", "")
    automatic.write_text(networked)
    for ratio in (3.0, 0.5):  # the second is a machine to which the run has moved
        times[0][0] = ratio
        wanted = begin(automatic, (), tmp_path / "run", note=print)
        assert wanted.model.dtype == load_recipe(tmp_path / "run" / "recipe.toml").model.dtype == "float32"
    assert times[1] == ["bfloat16"]
    allowed = Owner(str(data_file), "model", "cpu", typed(Policy, {"data": {"held_out": ["capital"]}}))
    text = recipe_for_clients(wanted, 4)
    assert b"auto" not in text.replace(b'device = "auto"', b"").replace(b'mode = "auto"', b"")
    asked = text.replace(b'device = "auto"', b'device = "auto"\ndtype = "auto"').replace(b'dtype = "float32"\n', b"")
    with pytest.raises(FedKSeedError, match="'auto' is measured on one machine, and all parties take the same type"):
        accepted_recipe(asked, allowed)
    with pytest.raises(FedKSeedError, match="`fedkseed pin RECIPE` writes it"):
        require_legal(load_recipe(automatic), Where.NETWORK, Where.PEERS)


def test_a_run_in_a_slow_type_says_how_slow_it_is(times, automatic, tmp_path):
    automatic.write_text(automatic.read_text().replace('"auto"', '"bfloat16"'))
    for ratio, count in ((9.21, 1), (1.2, 0)):
        times[0][0], seen = ratio, Noting()
        start(load_recipe(automatic), tmp_path / f"{count}", seen)
        said = "[model] dtype = 'bfloat16' takes 9.2 times as long as float32 here, which needs twice the memory"
        assert [text for text in seen.notes if "dtype" in text] == [said] * count
    times[1].clear()
    automatic.write_text(automatic.read_text().replace('"bfloat16"', '"float32"'))
    start(load_recipe(automatic), tmp_path / "float32")
    assert times[1] == []


def test_the_measurement_is_of_this_machine_and_made_once_in_a_process():
    slowness.cache_clear()
    ratios = {slowness("float16", "cpu") for _ in range(3)}
    assert len(ratios) == 1
    assert 0 < ratios.pop() < 1000
    assert slowness.cache_info().misses == 1
