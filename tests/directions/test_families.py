"""Families are records: those of the package, and one that a program adds."""

import runpy
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedkseed import Broadcast, FedKSeedError, Pool, Run, decode, encode
from fedkseed.directions import FAMILIES, Family, accumulate_, add_family, backends, materialize, project, reference
from fedkseed.directions.families import numbered
from fedkseed.recipe.reading import parse

from . import FACTORED, PLAIN
from .test_operations import DTYPES, TENSOR, bits, expected, weights

CPU = torch.device("cpu")


@pytest.fixture
def sparse(request):
    """The family of docs/examples, as a program has it after importing that file."""
    try:
        yield runpy.run_path(str(request.config.rootpath / "docs" / "examples" / "family.py"))["SPARSE"]
    finally:
        FAMILIES.pop("sparse", None)


def test_numbers_on_the_wire_are_those_of_the_specification():
    names = ["gaussian", "rademacher", "hadamard", "hashed", "separable", "informed", "mixed"]
    assert {family.number: family.name for family in FAMILIES.values()} == dict(enumerate(names))
    assert all(numbered(family.number) is FAMILIES[name] for name, family in FAMILIES.items())


@pytest.mark.parametrize("name", ["numba", "torch"])
def test_fast_backends_have_kernels_for_every_family(name):
    assert set(backends.load(name).KERNELS) == {*PLAIN, *(FACTORED if name == "torch" else [])}
    assert {backends.chosen(CPU, family) for family in PLAIN} == {"numba"}
    assert {backends.chosen(CPU, family) for family in FACTORED} == {"torch"}


def test_importing_the_package_of_directions_loads_neither_torch_nor_numba():
    code = "import sys, fedkseed.directions as d; d.Pool, d.reference; print({'torch', 'numba'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"set()\n"


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("gaussian", 9, "family 'gaussian' has number 0; 'gaussian' with number 9 needs a name and a number of"),
        ("sobol", 2, "family 'hadamard' has number 2; 'sobol' with number 2 needs"),
        ("sobol", 256, "number on the wire is 0 to 255, got 256"),
        ("sobol", -1, "got -1"),
        ("so bol", 9, "a word of letters, digits and _, got 'so bol'"),
    ],
)
def test_a_name_or_number_that_is_taken_or_none_is_refused(name, number, message):
    with pytest.raises(FedKSeedError, match=message):
        add_family(Family(name, number, reference.rademacher))
    assert len(FAMILIES) == 7


def test_a_family_can_not_be_added_twice(sparse):
    for family in (sparse, replace(sparse, name="sparser")):
        with pytest.raises(FedKSeedError, match="family 'sparse' has number 200"):
            add_family(family)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_an_added_family_works_by_its_definition(sparse, dtype):
    assert backends.chosen(CPU, "sparse") == "numpy"
    pool, start = Pool(0x123456789ABCDEF, 64, "sparse"), 4000
    directions, c = np.array([1, 5, 63], np.uint32), np.array([0.5, -0.25, 3], np.float32)
    base = weights(600, dtype)
    w, out = base.clone(), torch.empty_like(base)
    accumulate_(w, pool, directions, c, tensor=TENSOR, start=start)
    want = bits(expected(pool, directions, c, base, start))
    np.testing.assert_array_equal(bits(w), want)
    dense = np.zeros(64, np.float32)
    dense[directions] = c
    materialize(base, pool, dense, out, tensor=TENSOR, start=start)
    np.testing.assert_array_equal(bits(out), want)


def test_the_sums_and_inner_products_of_an_added_family_are_those_of_its_function(sparse):
    pool = Pool(7, 8, "sparse")
    z = np.stack([sparse.elements(pool, j, TENSOR, 4000, 4600) for j in range(8)])
    assert set(np.unique(z)) == {-2.0, 0.0, 2.0}
    w, v = torch.zeros(600), torch.arange(600, dtype=torch.float32) / 64  # exact, and so are their sums
    accumulate_(w, pool, [2, 3], [0.5, -1.0], tensor=TENSOR, start=4000)
    np.testing.assert_array_equal(w.numpy(), 0.5 * z[2] - z[3])
    np.testing.assert_array_equal(project(v, pool, tensor=TENSOR, start=4000), z @ v.numpy())


def test_an_added_family_is_cut_where_the_definition_is_not(sparse, monkeypatch):
    pool, base = Pool(7, 8, "sparse"), weights(600, torch.float32)
    whole, parts = base.clone(), base.clone()
    accumulate_(whole, pool, [2, 3], [0.5, -1.0])
    monkeypatch.setattr(backends.load("numpy"), "CHUNK", 70)
    accumulate_(parts, pool, [2, 3], [0.5, -1.0])
    np.testing.assert_array_equal(bits(parts), bits(whole))


def test_an_added_family_travels_and_is_refused_by_who_does_not_know_it(sparse):
    run = Run(Pool(7, 8, "sparse"), bytes(32))
    data = encode(Broadcast(run, 7, 3e-7, 5e-4, 3, 1e4, np.ones(8, np.float32)))
    assert data[6] == 200
    assert decode(data, Broadcast).run == run
    assert parse({"model": {"name": "x"}, "directions": {"family": "sparse"}}).pool.family == "sparse"
    del FAMILIES["sparse"]
    with pytest.raises(FedKSeedError, match="family number 200; this program knows 0 gaussian, 1 rademacher, 2 had"):
        decode(data, Broadcast)
    with pytest.raises(FedKSeedError, match="no family of directions is called 'sparse'; choose one of gaussian"):
        Pool(7, 8, "sparse")
