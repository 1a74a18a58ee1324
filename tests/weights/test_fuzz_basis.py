"""The campaign against the reader of bases: it reaches every check, and finds a reader that breaks."""

import json

import numpy as np
import pytest
from safetensors.numpy import save

from fedkseed import FedKSeedError
from fedkseed.weights.basis_file import load_basis, save_basis
from tests.weights import fuzz_basis
from tests.weights.fuzz_basis import judge, specimen
from tests.wire.fuzz import BLOCK, campaign, files, try_block

CHECKS = {  # the refusals of load_basis, from_entries, Factor and Basis, by their first words
    "FILE is not a whole fedkseed basis", "the basis FILE has format", "the basis FILE must hold left",
    "the basis FILE must hold int", "factors of a", "each of a factor", "a tensor", "the basis FILE is damaged",
}  # fmt: skip


def others():
    """Bases that differ from one to the next."""
    while True:
        for number in range(100):
            made = specimen()
            made.factors["b"].left[0] = number
            yield made


OTHERS = others()


def test_four_thousand_files_are_refused_or_bases_and_every_check_is_reached():
    tally = campaign(4 * BLOCK, seed=1, tell=lambda line: None, target="bases")
    assert tally.inputs == 4 * BLOCK
    assert tally.accepted["Basis"] > BLOCK / 2
    assert set(tally.refused) >= CHECKS


def test_the_specimen_is_judged_sound(tmp_path):
    save_basis(specimen(), tmp_path / "basis.safetensors")
    assert judge((tmp_path / "basis.safetensors").read_bytes()) == ("Basis", "")


def test_inputs_are_a_function_of_seed_and_number():
    assert list(files(3, 5)) == list(files(3, 5))
    assert len({tuple(files(seed, block)) for seed, block in [(3, 5), (3, 6), (4, 5)]}) == 3


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (lambda path: {}["no such key"], "KeyError"),
        (lambda path: next(OTHERS), "another one when it is written and read again"),
    ],
)
def test_a_reader_that_breaks_is_found(monkeypatch, broken, what):
    monkeypatch.setattr(fuzz_basis, "load_basis", broken)
    with pytest.raises(FedKSeedError, match=rf"input 2000 of seed 0 is neither refused nor sound.*{what}"):
        try_block(0, 2, "bases")


def test_a_type_that_numpy_does_not_have_is_refused(tmp_path):
    """The campaign's first finding: float8 was an AttributeError."""
    path = tmp_path / "basis.safetensors"
    save_basis(specimen(), path)
    path.write_bytes(path.read_bytes().replace(b'"dtype":"I8","shape":[4,3]', b'"dtype":"F8_E4M3","shape":[4,3]'))
    data = bytearray(path.read_bytes())
    data[0] += len("F8_E4M3") - len("I8")  # the header's length
    path.write_bytes(bytes(data))
    with pytest.raises(FedKSeedError, match="is not a whole fedkseed basis"):
        load_basis(path)


def test_what_a_file_says_is_shown_without_its_control_characters(tmp_path):
    """The campaign's second finding: half of a surrogate pair, which no terminal takes."""
    text = json.dumps({"format": "\x1b[2J" + chr(0xD800), "about": {}})
    (tmp_path / "b").write_bytes(save({"w.left": np.zeros((1, 1), np.int8)}, metadata={"fedkseed": text}))
    with pytest.raises(FedKSeedError, match=r"has format '\\x1b\[2J\\ud800', this program reads 1"):
        load_basis(tmp_path / "b")
