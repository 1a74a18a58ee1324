"""The 16 KB file: whole, for the right base, and giving the very model that was tuned."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save

from fedkseed import Adapter, FedKSeedError, Pool, apply, hold
from fedkseed.directions.factors import Basis
from fedkseed.weights.adapter import _checksum
from fedkseed.weights.layout import Layout

from ..conftest import small_basis, tiny_llama

PROVENANCE = {"model": "tiny", "dtype": "float32", "template": "paper", "separator": "\n"}


def adapter_of(pool: Pool, basis: Basis | None = None) -> Adapter:
    weights = hold(tiny_llama(), pool, basis=basis)
    weights.load(np.random.default_rng(0).normal(size=pool.size) * 1e-3)
    digests = weights.base_digest.hex(), weights.digest().hex()
    return Adapter(weights.pool, weights.c, *digests, ("*",), PROVENANCE, basis)


@pytest.fixture
def adapter() -> Adapter:
    return adapter_of(Pool(8, 4096, "hadamard"))


@pytest.fixture
def path(adapter, tmp_path):
    adapter.save(tmp_path / "adapter.safetensors")
    return tmp_path / "adapter.safetensors"


def test_at_4096_directions_it_has_at_most_20_kb(path):
    assert path.stat().st_size <= 20_000


def test_applied_to_the_base_it_gives_the_tuned_model_bit_for_bit(adapter, path):
    model = apply(tiny_llama(), path)
    assert Layout(model).digest().hex() == adapter.tuned


def test_it_is_the_same_file_every_time(adapter, path, tmp_path):
    adapter.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
    assert Adapter.load(path).provenance == adapter.provenance


def test_another_base_model_is_refused_with_both_digests(adapter, path):
    other = tiny_llama().bfloat16()
    digest = Layout(other).digest().hex()
    with pytest.raises(FedKSeedError, match=f"{adapter.base}.*{digest}.*load tiny in float32"):
        apply(other, path)
    assert Layout(other).digest().hex() == digest


def test_every_cut_and_bytes_at_the_end_are_refused(path):
    data = path.read_bytes()
    for broken in [*(data[:length] for length in [*range(0, 1500, 7), len(data) - 1]), data + b"\0"]:
        path.write_bytes(broken)
        with pytest.raises(FedKSeedError, match="not a whole fedkseed adapter"):
            Adapter.load(path)


def test_flipped_bits_are_refused(path):
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for at in [*range(8, header), *range(header, len(data), 97)]:
        broken = bytearray(data)
        broken[at] ^= 0x10
        if json_spaces_only(data, broken, header):
            continue
        path.write_bytes(bytes(broken))
        with pytest.raises(FedKSeedError):
            Adapter.load(path)


def json_spaces_only(data: bytes, broken: bytearray, header: int) -> bool:
    """The header is padded with spaces; a change that leaves its JSON as it was changes nothing."""
    try:
        return json.loads(bytes(broken[8:header])) == json.loads(data[8:header])
    except ValueError:
        return False


def test_files_that_are_no_adapters_are_refused(tmp_path):
    with pytest.raises(FedKSeedError, match="No such file"):
        Adapter.load(tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(FedKSeedError, match="not a whole fedkseed adapter"):
        Adapter.load(tmp_path / "text.safetensors")


def test_files_that_are_made_to_harm_are_refused(tmp_path):
    hostile = save({"coefficients": np.zeros(8, np.float32)}, metadata={"fedkseed": "[" * 100_000})
    (tmp_path / "deep.safetensors").write_bytes(hostile)
    with pytest.raises(FedKSeedError, match="not a whole fedkseed adapter"):
        Adapter.load(tmp_path / "deep.safetensors")
    with (tmp_path / "large.safetensors").open("wb") as file:
        file.truncate(1 << 40)  # takes no space
    for path in (tmp_path / "large.safetensors", Path("/dev/zero")):
        with pytest.raises(FedKSeedError, match="is no adapter: one is a regular file of at most"):
            Adapter.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"patterns": [1]}, {"patterns": 1}, {"pool": {"key": "x"}}, {"pool": []}, {"provenance": 3},
        {"pool": {"key": 8, "size": 64, "family": "separable", "tensors": {"0": [1, 1]}}},
        {"pool": {"key": 8, "size": 128, "family": "mixed", "basis": 7}},
        {"pool": {"key": 8, "size": 128, "family": "mixed", "basis": "xy"}},
        {"pool": {"size": 128, "family": "mixed"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_field_of_another_type_is_refused_also_with_a_checksum_that_fits(adapter, tmp_path, change):
    path = rewritten(adapter, tmp_path / "a.safetensors", **change)
    with pytest.raises(FedKSeedError, match="lacks or mistakes a field"):
        Adapter.load(path)


def test_a_newer_format_is_refused(adapter, tmp_path):
    path = rewritten(adapter, tmp_path / "a.safetensors", format=3)
    with pytest.raises(FedKSeedError, match="has format 3, this program reads 1 and 2"):
        Adapter.load(path)


def test_a_result_that_differs_is_refused_and_undone(adapter, tmp_path):
    wrong = Adapter(adapter.pool, adapter.coefficients, adapter.base, "00" * 32, ("*",), PROVENANCE)
    model = tiny_llama()
    with pytest.raises(FedKSeedError, match="run `fedkseed directions`"):
        wrong.apply(model)
    assert Layout(model).digest().hex() == adapter.base


def test_an_adapter_that_does_not_tell_its_model_cannot_be_made(adapter):
    with pytest.raises(FedKSeedError, match="missing: model, dtype"):
        Adapter(adapter.pool, adapter.coefficients, adapter.base, "", ("*",), {"template": "paper", "separator": ""})


# --- with a basis -------------------------------------------------------------------------------


@pytest.fixture
def informed() -> Adapter:
    basis = small_basis(tiny_llama())
    return adapter_of(Pool(8, 128, "mixed", basis.digest()), basis)


def about_of(path: Path) -> dict:
    with safe_open(path, framework="np") as file:
        return json.loads(file.metadata()["fedkseed"])


def rewritten(adapter: Adapter, path: Path, **changes) -> Path:
    """The adapter's file with other words beside the numbers, and a checksum that fits."""
    adapter.save(path)
    about = {name: value for name, value in about_of(path).items() if name != "checksum"} | changes
    text = json.dumps({**about, "checksum": _checksum(about, adapter.coefficients)}, sort_keys=True)
    path.write_bytes(save(load_file(path), metadata={"fedkseed": text}))
    return path


def test_an_adapter_of_informed_directions_needs_no_other_file(informed, tmp_path):
    informed.save(tmp_path / "a")
    model = apply(tiny_llama(), tmp_path / "a")
    assert Layout(model).digest().hex() == informed.tuned
    loaded = Adapter.load(tmp_path / "a")
    assert loaded.basis.digest() == informed.pool.basis
    assert loaded.basis.about == {"made": "at random"}
    loaded.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    about = about_of(tmp_path / "a")
    assert about["format"] == 2
    assert about["pool"] == {"key": 8, "size": 128, "family": "mixed", "basis": informed.pool.basis.hex()}


def test_a_basis_that_does_not_say_how_it_was_made_is_refused(informed, tmp_path):
    for about in (None, [], "made"):
        path = rewritten(informed, tmp_path / "a.safetensors", basis=about)
        with pytest.raises(FedKSeedError, match="must have a table of how its basis was made, got "):
            Adapter.load(path)


def test_separable_directions_need_no_basis_and_their_tensors_are_not_written(tmp_path):
    separable = adapter_of(Pool(8, 64, "separable"))
    separable.save(tmp_path / "a")
    assert about_of(tmp_path / "a")["pool"] == {"key": 8, "size": 64, "family": "separable"}
    assert Layout(apply(tiny_llama(), tmp_path / "a")).digest().hex() == separable.tuned


def test_other_adapters_are_written_as_before(adapter, path):
    about = about_of(path)
    assert about.pop("checksum")
    assert about == {
        "format": 1, "pool": {"key": 8, "size": 4096, "family": "hadamard"}, "base": adapter.base,
        "tuned": adapter.tuned, "patterns": ["*"], "provenance": PROVENANCE,
    }  # fmt: skip


def test_an_adapter_of_a_server_without_the_basis_says_what_it_lacks_and_takes_it_later(informed, tmp_path):
    replace(informed, basis=None).save(tmp_path / "a")
    bare, model = Adapter.load(tmp_path / "a"), tiny_llama()
    with pytest.raises(FedKSeedError, match=f"the adapter lacks its basis, of digest {informed.pool.basis.hex()}"):
        bare.apply(model)
    assert Layout(model).digest().hex() == informed.base
    replace(bare, basis=informed.basis).apply(model)
    assert Layout(model).digest().hex() == informed.tuned


def test_another_basis_is_refused(informed, adapter, tmp_path):
    other = small_basis(tiny_llama(), seed=6)
    for one, pool in ((informed, informed.pool.basis.hex()), (adapter, "none")):
        with pytest.raises(FedKSeedError, match=f"basis is that of its pool, {pool}, got {other.digest().hex()}"):
            replace(one, basis=other)
    informed.save(tmp_path / "a")
    data = bytearray((tmp_path / "a").read_bytes())
    for at in range(len(data) - 1, len(data) - 6000, -997):  # numbers of the basis lie at the end
        broken = bytearray(data)
        broken[at] ^= 1
        (tmp_path / "b").write_bytes(broken)
        with pytest.raises(FedKSeedError):
            Adapter.load(tmp_path / "b")


def test_only_a_basis_makes_a_large_file(informed, tmp_path, monkeypatch):
    monkeypatch.setattr("fedkseed.weights.adapter.MAX_BYTES", 10_000)
    informed.save(tmp_path / "a")
    assert (tmp_path / "a").stat().st_size > 10_000
    Adapter.load(tmp_path / "a")
    path = rewritten(replace(informed, provenance=PROVENANCE | {"note": "x" * 10_000}), tmp_path / "b", format=1)
    with pytest.raises(FedKSeedError, match="at most 10,000 bytes"):
        Adapter.load(path)


def test_numbers_of_a_type_that_numpy_lacks_are_refused(path):
    data = path.read_bytes().replace(b'"dtype":"F32","shape":[4096]', b'"dtype":"F8_E4M3","shape":[16384]')
    grown = len('"F8_E4M3","shape":[16384]') - len('"F32","shape":[4096]')
    path.write_bytes((int.from_bytes(data[:8], "little") + grown).to_bytes(8, "little") + data[8:])
    with pytest.raises(FedKSeedError, match="not a whole fedkseed adapter"):
        Adapter.load(path)
