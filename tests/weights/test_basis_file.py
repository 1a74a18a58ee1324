"""The file of a basis: whole, the same bytes every time, and refused wherever it is damaged."""

import json

import numpy as np
import pytest
from safetensors.numpy import save

from fedkseed import FedKSeedError
from fedkseed.weights.basis_file import entries, load_basis, save_basis

from ..directions.test_factors import basis


@pytest.fixture
def path(tmp_path):
    save_basis(basis(), tmp_path / "basis.safetensors")
    return tmp_path / "basis.safetensors"


def test_what_was_saved_is_loaded(path, tmp_path):
    loaded = load_basis(path)
    assert loaded.digest() == basis().digest()
    assert loaded.size == basis().size
    save_basis(loaded, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_every_cut_is_refused(path):
    data = path.read_bytes()
    for length in [*range(0, 1500, 11), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(FedKSeedError):
            load_basis(path)


def test_every_changed_byte_of_the_numbers_is_refused(path):
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    for place in np.random.default_rng(0).integers(begin, len(data), 60):
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(place) % 8
        path.write_bytes(damaged)
        with pytest.raises(FedKSeedError, match=r"damaged|positive finite scale"):
            load_basis(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.left": None}, "must hold left, right"),
        ({"stranger": np.zeros(3, np.float32)}, "must hold left, right"),
        ({"a.left": np.zeros((100, 3), np.float32)}, "int8 matrices"),
        ({"a.left": np.zeros(100, np.int8)}, "int8 matrices"),
        ({"a.left_scale": np.ones(3)}, "int8 matrices"),
        ({"a.left_scale": np.ones(2, np.float32)}, "positive finite scale"),
        ({"a.left": np.zeros((100, 2000), np.int8)}, "1 to 1024 columns"),
    ],
)
def test_entries_that_make_no_basis_are_refused(change, message, path):
    arrays = {k: v for k, v in {**entries(basis()), **change}.items() if v is not None}
    about = {"format": 1, "digest": basis().digest().hex(), "about": {}}
    path.write_bytes(save(arrays, metadata={"fedkseed": json.dumps(about)}))
    with pytest.raises(FedKSeedError, match=message):
        load_basis(path)


def test_another_format_is_refused(path):
    path.write_bytes(save(entries(basis()), metadata={"fedkseed": json.dumps({"format": 9, "about": {}})}))
    with pytest.raises(FedKSeedError, match="has format 9, this program reads 1"):
        load_basis(path)
