"""Bases of an experiment: where their files go, what they are made of, and what the results say of them."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedkseed.errors import FedKSeedError
from fedkseed.paper.experiment_bases import EXAMPLES, all_places, describe_bases, make_bases
from fedkseed.paper.experiments import Experiment, load
from fedkseed.weights.basis_file import load_basis

PLAIN, SCALED = "$basis/plain.safetensors", "$basis/scaled.safetensors"


def along(place: str) -> dict:
    directions = {"family": "informed", "basis": place, "size": 16}
    return {"training": {"algorithm": "fedkseed-backprop"}, "derivatives": {"lr": 1e-2}, "directions": directions}


@pytest.fixture
def experiment(model_folder, data_file) -> Experiment:
    """One run along each of two bases, whose own type is bfloat16, and one along none."""
    whole = load("informed", "tiny")
    return replace(
        whole,
        axes={"model": ["tiny"], "dataset": ["dolly-uneven"], "method": ["hadamard", "plain", "scaled"]},
        choose={},
        recipe={"data": {"source": str(data_file), "max_tokens": 200}, "clients": {"count": 4, "cohort": 2}},
        models={"tiny": {"model": {"name": str(model_folder), "device": "cpu", "dtype": "bfloat16"}}},
        datasets={"dolly-uneven": {}},
        methods={
            "hadamard": {"training": {"algorithm": "fedkseed-backprop"}, "derivatives": {"lr": 1e-6}},
            "plain": along(PLAIN),
            "scaled": along(SCALED),
        },
        bases={PLAIN: {"scaled": False, "examples": 4}, SCALED: {"scaled": True, "examples": 3}},
    )


def test_bases_that_can_be_made_have_a_folder_of_the_experiment_and_one_alone_a_file(experiment, tmp_path):
    folder, given = tmp_path / "bases" / "tiny" / "informed", {"model": "m"}
    file = given | {"basis": str(folder / "basis.safetensors")}
    assert all_places(experiment, tmp_path, given, "text") == given | {"basis": str(folder)}
    alone = replace(experiment, bases={"$basis": {"scaled": False}})
    assert all_places(alone, tmp_path, given, "text") == file
    shipped = replace(experiment, bases={"$basis": {"scaled": False, "data": "package:dolly-sample"}})
    assert all_places(shipped, tmp_path, given, None) == file


def test_a_basis_that_is_given_stays_and_without_text_there_is_none(experiment, tmp_path):
    tiny = {"model": str(tmp_path / "models" / "tiny")}
    assert all_places(experiment, tmp_path, {"basis": "mine"}, None) == tiny | {"basis": "mine"}
    assert all_places(experiment, tmp_path, {}, None) == tiny
    half = replace(experiment, bases={PLAIN: {"scaled": False, "data": "some"}, SCALED: {"scaled": True}})
    assert all_places(half, tmp_path, {}, None) == tiny
    with pytest.raises(FedKSeedError, match="not both"):
        all_places(experiment, tmp_path, {"basis": "mine"}, "text")
    with pytest.raises(FedKSeedError, match="informed makes no basis of public text; leave --public out"):
        all_places(replace(experiment, bases={}), tmp_path, {}, "text")


def test_each_basis_is_made_once_for_its_runs_in_float32_and_described(experiment, data_file, tmp_path):
    given = all_places(experiment, tmp_path, {}, str(data_file))
    make_bases(experiment, given, str(data_file))
    plain, scaled = (Path(given["basis"]) / Path(place).name for place in (PLAIN, SCALED))
    assert sorted(plain.parent.iterdir()) == [plain, scaled]
    first, second = load_basis(plain), load_basis(scaled)
    assert (first.about["examples"], second.about["examples"]) == (4, 3)
    assert first.about["dtype"] == second.about["dtype"] == "float32"
    assert first.digest() != second.digest()

    recipes = [run.recipe(given) for run in experiment.plan([0])]
    shown = {row["file"]: row for row in describe_bases([*recipes, *recipes])}
    size = len(plain.read_bytes())
    assert shown[plain.name] == {"file": plain.name, "digest": first.digest().hex(), "bytes": size, **first.about}
    assert [*shown] == [plain.name, scaled.name]

    before = plain.read_bytes(), plain.stat().st_mtime_ns
    scaled.unlink()
    assert [row["file"] for row in describe_bases(recipes)] == [plain.name]
    make_bases(experiment, given, str(data_file))
    assert (plain.read_bytes(), plain.stat().st_mtime_ns) == before
    assert load_basis(scaled).digest() == second.digest()


def test_a_basis_of_no_run_is_not_made_and_text_that_is_not_there_leaves_no_file(experiment, data_file, tmp_path):
    given = all_places(experiment, tmp_path, {}, str(data_file))
    fewer = replace(experiment, axes=experiment.axes | {"method": ["hadamard", "plain"]})
    with pytest.raises(FedKSeedError, match="missing"):
        make_bases(fewer, given, str(tmp_path / "missing.jsonl"))
    folder = Path(given["basis"])
    assert not [*folder.iterdir()]
    make_bases(fewer, given, str(data_file))
    assert [path.name for path in folder.iterdir()] == [Path(PLAIN).name]


def test_a_basis_is_of_64_examples_where_the_experiment_says_nothing_else(experiment, data_file, tmp_path):
    silent = replace(experiment, bases={PLAIN: {"scaled": False}})
    given = all_places(silent, tmp_path, {}, str(data_file))
    make_bases(silent, given, str(data_file))
    assert load_basis(Path(given["basis"]) / Path(PLAIN).name).about["examples"] == min(EXAMPLES, 36)
