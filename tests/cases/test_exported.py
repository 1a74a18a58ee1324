"""What a model's files hold is what is loaded, and what was tuned is what is exported."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedkseed.errors import FedKSeedError
from fedkseed.models.load import load_model, load_tokenizer
from fedkseed.tuned.gguf import write_gguf

from .tiny import llama

TOKENS = torch.arange(400).repeat(1, 2) % 700
STORAGES = ("dense", "as stored")


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=TOKENS).logits[0, -8:].float()


@pytest.fixture
def copied(tiny_model: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of the plain model with other tensors and another configuration; None takes a tensor out."""

    def copy(tensors: dict[str, Tensor | None] | None = None, **config: Any) -> Path:
        folder = shutil.copytree(tiny_model("plain"), tmp_path / "copy")
        stored = load_file(folder / "model.safetensors") | (tensors or {})
        kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        table = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(table | config))
        return folder

    return copy


def test_a_folder_of_adapters_is_no_model(tiny_model: Callable[[str], Path], copied: Callable[..., Path]) -> None:
    merged = copied()
    shutil.copy(tiny_model("lora") / "adapter_config.json", merged)
    for folder in (tiny_model("lora"), merged):
        for load in (load_model, load_tokenizer):
            with pytest.raises(FedKSeedError, match=r"has adapters of the base model .*lora-base .*merge"):
                load(str(folder))


LOST = {
    "a bias": {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)},
    "a layer": {"model.layers.2.mlp.up_proj.weight": torch.zeros(128, 64)},
    "a head of another kind": {"v_head.summary.weight": torch.zeros(1, 64)},
    "a scale": {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)},
}


@pytest.mark.parametrize("what", LOST)
def test_a_tensor_that_the_model_has_no_place_for_is_refused_by_name(what: str, copied: Callable[..., Path]) -> None:
    (name,) = LOST[what]
    with pytest.raises(FedKSeedError, match=f"no place for, 1 in all, the first is {name}"):
        load_model(str(copied(LOST[what])))


COMPUTED = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.self_attn.masked_bias")


@pytest.mark.parametrize("name", COMPUTED)
def test_a_tensor_that_models_compute_may_be_stored(name: str, copied: Callable[..., Path]) -> None:
    load_model(str(copied({name: torch.ones(8)})))


HALF = torch.ones(801, 64)


@pytest.mark.parametrize(
    ("head", "config", "tied"),
    [
        (HALF, True, False),  # a configuration that is wrong
        (HALF, False, False),
        ("the embedding", True, True),  # stored twice
        (None, True, True),
        (None, False, None),  # refused: it may be tied, or half a model
    ],
)
def test_weights_say_whether_they_are_tied(
    head: Any, config: bool, tied: bool | None, copied: Callable[..., Path], tiny_model: Callable[[str], Path]
) -> None:
    if isinstance(head, str):
        head = load_file(tiny_model("plain") / "model.safetensors")["model.embed_tokens.weight"].clone()
    folder = copied({"lm_head.weight": head}, tie_word_embeddings=config)
    if tied is None:
        with pytest.raises(FedKSeedError, match=r"lacks 1 of its weights, the first is lm_head\.weight"):
            load_model(str(folder))
        return
    model: Any = load_model(str(folder))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied == model.config.tie_word_embeddings
    if head is not None:
        assert torch.equal(model.lm_head.weight, head)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq", "fp8", "compressed-tensors", "mxfp4"])
def test_packed_weights_are_refused_by_the_name_of_their_method(method: str, copied: Callable[..., Path]) -> None:
    with pytest.raises(FedKSeedError, match=f"packed by '{method}'"):
        load_model(str(copied(quantization_config={"quant_method": method, "bits": 4, "load_in_4bit": True})))


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_packed_weights_without_a_description_are_refused(kind: torch.dtype, copied: Callable[..., Path]) -> None:
    with pytest.raises(FedKSeedError, match=r"has lm_head\.weight as [FIU]8.*; take the model in"):
        load_model(str(copied({"lm_head.weight": HALF.to(kind)})))


def test_weights_of_several_types_become_one(copied: Callable[..., Path]) -> None:
    model: Any = load_model(str(copied({"lm_head.weight": HALF.bfloat16()})))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def no_shard(folder: Path) -> None:
    (folder / "model-00002-of-00006.safetensors").unlink()


def half_a_shard(folder: Path) -> None:
    shard = folder / "model-00002-of-00006.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


def an_older_model(folder: Path) -> None:
    save_file({"lm_head.weight": HALF}, folder / "model.safetensors", metadata={"format": "pt"})


def a_stale_shard(folder: Path) -> None:
    shutil.copy(folder / "model-00002-of-00006.safetensors", folder / "model-00001-of-00006.safetensors")


def another_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": None}))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (None, None),
        (no_shard, "lacks model-00002-of-00006.safetensors"),
        (half_a_shard, "model-00002-of-00006.safetensors is damaged or not complete"),
        (an_older_model, "has two models"),
        (a_stale_shard, "is in .*model-00001-of-00006.safetensors and in model-00002"),
        (another_index, "no table weight_map"),
    ],
)
def test_shards_are_one_whole_model(
    change: Callable[[Path], None] | None, match: str | None, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    whole: Any = load_model(str(tiny_model("plain")))
    whole.save_pretrained(tmp_path, max_shard_size="100KB")
    if change is None or match is None:
        assert torch.equal(logits(load_model(str(tmp_path))), logits(whole))
        return
    change(tmp_path)
    with pytest.raises(FedKSeedError, match=match):
        load_model(str(tmp_path))


def rewritten(source: Path, to: Path, fields: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Path:
    """A copy of a GGUF file with more fields and tensors."""
    reader, writer = GGUFReader(source), GGUFWriter(to, "llama")
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")) and (content := field.contents()) not in ([], ""):
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, content, field.types[0], inner)
    for name, content in fields.items():
        {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(content)](name, content)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


@pytest.mark.parametrize("storage", STORAGES)
def test_biases_of_a_gguf_file_are_the_models(storage: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    name = str(tiny_model("biased"))
    model = load_model(name)
    write_gguf(tmp_path / "m.gguf", model, load_tokenizer(name), "f32")
    assert torch.equal(logits(load_model(str(tmp_path / "m.gguf"), storage=storage)), logits(model))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.attn_q_norm.weight", "rope_factors_long.weight"])
def test_a_tensor_of_a_gguf_file_without_a_place_is_refused(
    storage: str, name: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    plain = str(tiny_model("plain"))
    write_gguf(tmp_path / "m.gguf", load_model(plain), load_tokenizer(plain), "f32")
    file = rewritten(tmp_path / "m.gguf", tmp_path / "more.gguf", {}, {name: np.ones(64, np.float32)})
    with pytest.raises(FedKSeedError, match=rf"no place for, 1 in all, the first is {name}|lacks .*bias"):
        load_model(str(file), storage=storage)


SCALED: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    *(
        {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": length}
        | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        for factor, length in ((8.0, 8192), (32.0, 64), (2.0, 100))
    ),
]


@pytest.mark.parametrize("rope", SCALED)
def test_positions_scaled_by_factors_are_those_of_the_written_model(
    rope: dict[str, Any], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers does not read the factors, which every Llama since 3.1 has."""
    settings = {"hidden_size": 256, "rope_parameters": {"rope_theta": 5e5, **rope}}
    model = llama(801, **settings)
    write_gguf(tmp_path / "m.gguf", model, load_tokenizer(str(tiny_model("plain"))), "f32")
    for storage in STORAGES:
        again: Any = load_model(str(tmp_path / "m.gguf"), storage=storage)
        assert again.config.rope_parameters == model.config.rope_parameters
        assert torch.equal(logits(again), logits(model))


FIELDS: list[tuple[dict[str, Any], dict[str, Any] | str]] = [
    ({"type": "none", "factor": 4.0}, {"rope_type": "default"}),
    ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    (
        {"type": "yarn", "factor": 4.0, "original_context_length": 128},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ),
    ({"type": "longrope", "factor": 4.0}, "'longrope'"),
    ({"type": "yarn", "factor": 4.0, "original_context_length": 128, "attn_factor": 2.0}, "attn_factor"),
]


@pytest.mark.parametrize(("fields", "rope"), FIELDS)
def test_positions_scaled_by_fields_are_used_or_refused(
    fields: dict[str, Any], rope: dict[str, Any] | str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    plain = str(tiny_model("plain"))
    write_gguf(tmp_path / "m.gguf", load_model(plain), load_tokenizer(plain), "f32")
    scaling = {f"llama.rope.scaling.{name}": field for name, field in fields.items()}
    file = str(rewritten(tmp_path / "m.gguf", tmp_path / "scaled.gguf", scaling))
    for storage in STORAGES:
        if isinstance(rope, str):
            with pytest.raises(FedKSeedError, match=rope):
                load_model(file, storage=storage)
        else:
            expected = llama(801, rope_parameters={"rope_theta": 1e4, **rope})
            assert torch.equal(logits(load_model(file, storage=storage)), logits(expected))
