"""Headers of GGUF files that announce more than the file holds."""

import json
import struct
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from fedkseed import FedKSeedError
from fedkseed.models import gguf_header
from fedkseed.models.gguf_header import MAX_ITEMS, MAX_PAIRS, MAX_TENSORS, PlainReader, require_sane
from fedkseed.models.load import load_model, load_tokenizer
from fedkseed.tuned.export import export
from fedkseed.tuned.load import open_tuned

from ..conftest import tiny_llama


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(32)
    writer.add_token_list(["a", "bc"])
    for number in range(3):
        writer.add_tensor(f"t{number}", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def check(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    require_sane(path)


def changed(data: bytes, after: bytes, offset: int, new: bytes) -> bytes:
    """The file with some bytes replaced, `offset` bytes behind a text that it has once."""
    assert data.count(after) == 1
    at = data.index(after) + len(after) + offset
    return data[:at] + new + data[at + len(new) :]


def test_a_file_that_is_cut_short_is_refused_with_both_sizes(whole, tmp_path):
    check(tmp_path / "a.gguf", whole)
    with pytest.raises(FedKSeedError, match=r"is damaged: it is cut short: t2 ends at byte \d,\d+, it has .*get it"):
        check(tmp_path / "a.gguf", whole[:-100])  # into the last tensor, which 32 bytes of padding follow at most


ATTACKS = {  # a text, the offset behind it, the new bytes, and the words of the refusal
    "a billion layers": (b"llama.block_count", 4, struct.pack("<I", 1 << 30), "block_count = 1073741824"),
    "layers as a text": (b"llama.block_count", 0, struct.pack("<II", 6, 0), "block_count = 0.0"),
    "a wide matrix": (b"llama.embedding_length", 4, struct.pack("<I", 1 << 30), "embedding_length = 1073741824"),
    "2^60 tokens": (b"tokenizer.ggml.tokens", 8, struct.pack("<Q", 1 << 60), "an array of 1,152,921,504,606,846,976"),
    "a token of 2^60 bytes": (b"tokenizer.ggml.tokens", 16, struct.pack("<Q", 1 << 60), "announces 1,152,921,504,606"),
    "a value of no kind": (b"llama.block_count", 0, struct.pack("<I", 77), "a value of kind 77"),
    "2^60 keys": (b"GGUF", 12, struct.pack("<Q", 1 << 60), "is damaged: its header"),
    "2^60 tensors": (b"GGUF", 4, struct.pack("<Q", 1 << 60), "is damaged: its header"),
    "a tensor of a billion dimensions": (b"t1", 0, struct.pack("<I", 1 << 30), "1,073,741,824 dimensions"),
    "another version": (b"GGUF", 0, struct.pack("<I", 9), "version 9 of GGUF"),
    "no version": (b"GGUF", 0, bytes(4), "is no GGUF file"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_header_that_announces_more_than_the_file_holds_is_refused(whole, tmp_path, name):
    after, offset, new, match = ATTACKS[name]
    path = tmp_path / "a.gguf"
    with pytest.raises(FedKSeedError, match=match):
        check(path, changed(whole, after, offset, new))
    for load in (load_tokenizer, load_model):
        with pytest.raises(FedKSeedError, match=match):
            load(str(path))


def test_a_whole_header_and_one_of_the_other_byte_order_are_taken(whole, tmp_path):
    check(tmp_path / "a.gguf", whole)
    check(tmp_path / "a.gguf", b"GGUF" + struct.pack(">IQQ", 3, 0, 0))


def test_a_part_of_a_model_says_how_the_parts_are_joined(tmp_path):
    path = tmp_path / "m-00001-of-00002.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 2)
    writer.add_tensor("t", np.zeros((2, 32), np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    with pytest.raises(FedKSeedError, match=r"is one of 2 parts of a model; join them: llama-gguf-split --merge"):
        require_sane(path)


def test_arrays_in_arrays_end_somewhere(tmp_path):
    path = tmp_path / "a.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
    with pytest.raises(FedKSeedError, match="a value of kind 9, 2 arrays deep"):
        check(path, head + struct.pack("<IQ", 9, 1) * 10_000)
    with pytest.raises(FedKSeedError, match="an array of 2,097,153 items"):
        check(path, head + struct.pack("<IQ", 0, MAX_ITEMS + 1) + bytes(MAX_ITEMS + 1))


def text(words: bytes) -> bytes:
    return struct.pack("<Q", len(words)) + words


ARRAYS = b"".join(text(b"%d" % k) + struct.pack("<IIQ", 9, 0, MAX_ITEMS // 4) + bytes(MAX_ITEMS // 4) for k in range(5))
CLAIMS = {  # tensors, keys, what follows, and the words of the refusal
    "arrays of bytes": (0, 5, ARRAYS, "an array of 524,288 items, at most 2,097,152 in all go"),
    "keys": (0, MAX_PAIRS + 1, b"".join(text(b"%d" % k) + bytes(5) for k in range(MAX_PAIRS + 1)), "16,385 keys"),
    "tensors": (MAX_TENSORS + 1, 0, bytes(24 * (MAX_TENSORS + 1)), "65,537 tensors, at most 65,536 go"),
    "copies of one tensor": (
        99, 0, b"".join(text(b"%d" % k) + struct.pack("<IQIQ", 1, 256, 0, 0) for k in range(99)) + bytes(2000),
        "its tensors have 101,376 bytes together, it has 5,",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLAIMS)
def test_a_header_of_many_small_parts_is_refused_before_the_library_makes_objects_of_them(tmp_path, monkeypatch, name):
    """Arrays that would become millions of objects, and tensors that share their bytes, are refused unread."""
    tensors, keys, rest, words = CLAIMS[name]
    monkeypatch.setattr(gguf, "GGUFReader", lambda *read: pytest.fail("the library has read it"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest)
    for storage in ("dense", "as stored"):
        with pytest.raises(FedKSeedError, match=words):
            load_model(str(tmp_path / "a.gguf"), storage=storage)


def test_every_cut_and_200_flipped_bytes_are_taken_or_refused(whole, tmp_path):
    path, rng = tmp_path / "a.gguf", np.random.default_rng(4)
    for length in range(0, len(whole), 11):
        with suppress(FedKSeedError):
            check(path, whole[:length])
    for _ in range(200):
        flipped = bytearray(whole)
        flipped[rng.integers(400)] ^= int(rng.integers(1, 256))
        with suppress(FedKSeedError):
            check(path, bytes(flipped))


def test_a_model_is_loaded_with_one_reading_of_its_file_and_one_table_of_names(model_folder, tmp_path, monkeypatch):
    export(open_tuned(model_folder), tmp_path / "gguf", "gguf", kind="f32")
    (path,), done = (tmp_path / "gguf").glob("*.gguf"), list[str]()
    for module, name in ((gguf_header, "PlainReader"), (gguf, "get_tensor_name_map")):
        whole = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, name=name, whole=whole: (done.append(name), whole(*given))[1])
    own = gguf.GGUFReader
    load_tokenizer(str(path))
    assert done == ["PlainReader"]
    for storage in ("dense", "as stored"):
        done.clear()
        load_model(str(path), storage=storage)
        assert sorted(done) == ["PlainReader", "get_tensor_name_map"]
    assert gguf.GGUFReader is own  # nothing is kept


@pytest.mark.parametrize("storage", ["dense", "as stored"])
def test_a_vocabulary_that_the_tensors_lack_takes_no_memory(tmp_path, monkeypatch, storage):
    """Finding 14: a file of 581 bytes with 2^24 tokens took 4.5 GB."""
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    for add, number in (
        (writer.add_block_count, 1), (writer.add_embedding_length, 4), (writer.add_feed_forward_length, 4),
        (writer.add_head_count, 1), (writer.add_context_length, 16), (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_vocab_size, 1 << 24),
    ):  # fmt: skip
        add(number)
    writer.add_tensor("token_embd.weight", np.zeros((2, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr("fedkseed.models.load.AutoModelForCausalLM.from_pretrained", None)
    with pytest.raises(FedKSeedError, match=r"has 67,108,988 weights and .* hold 8 numbers in \d+ bytes"):
        load_model(str(tmp_path / "a.gguf"), storage=storage)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 1 << 26}, "weights and .* its files hold"),
        ({"intermediate_size": 1 << 26}, "weights and .* its files hold"),
        ({"num_hidden_layers": 1 << 30}, "num_hidden_layers is 1,073,741,824, at most 10,000"),
        ({"num_hidden_layers": 10_000}, "has 10,000 layers, its files"),
        ({"head_dim": 1 << 26}, "weights and .* its files hold"),
    ],
)
def test_a_folder_whose_description_is_larger_than_its_weights_takes_no_memory(
    model_folder, tmp_path, monkeypatch, change, words
):
    for path in model_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": None} | change))
    monkeypatch.setattr("fedkseed.models.load.AutoModelForCausalLM.from_pretrained", None)
    with pytest.raises(FedKSeedError, match=words):
        load_model(str(tmp_path))


def test_weights_in_a_pickle_are_not_read(model_folder, tmp_path):
    """Reading a pickle can run code, and the safe kind of reading is a promise of one release of PyTorch."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    torch.save(tiny_llama().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(
        FedKSeedError, match="in pickles, which can run code when read; make safetensors of them: fedkseed convert"
    ):
        load_model(str(tmp_path))


def test_code_that_comes_with_a_model_is_not_run(model_folder, tmp_path):
    for path in model_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Model: pass\n")
    config = json.loads((tmp_path / "config.json").read_text())
    names = {"AutoConfig": "evil.Model", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "evil", "auto_map": names}))
    with pytest.raises(FedKSeedError, match="contains custom code which must be executed"):
        load_model(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_a_plain_reader_reads_what_ggufs_own_reads(whole, tmp_path):
    (path := tmp_path / "a.gguf").write_bytes(whole)
    plain, own = PlainReader(path), gguf.GGUFReader(path)
    assert [*plain.fields] == [*own.fields]
    for field, expected in zip(plain.fields.values(), own.fields.values(), strict=True):
        assert (field.offset, field.data, field.types) == (expected.offset, expected.data, expected.types)
        assert [(type(part), part.dtype, part.tolist()) for part in field.parts] == [
            (np.ndarray, part.dtype, part.tolist()) for part in expected.parts
        ]
    for tensor, expected in zip(plain.tensors, own.tensors, strict=True):
        assert (tensor.name, tensor.tensor_type, tensor.data.shape) == (expected.name, expected.tensor_type, (2, 32))
        np.testing.assert_array_equal(tensor.data, expected.data)
