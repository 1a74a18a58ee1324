"""What a model's files hold is what is loaded, and what was tuned is what is exported."""

import copy
import errno
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from fedkseed.errors import FedKSeedError
from fedkseed.models.load import load_model, load_tokenizer, save_model
from fedkseed.models.peft_adapters import load_adapters
from fedkseed.recipe.reading import load_recipe
from fedkseed.run.start_and_resume import start
from fedkseed.tuned.export import export
from fedkseed.tuned.gguf import write_gguf
from fedkseed.tuned.load import open_tuned
from fedkseed.tuned.read_back import Reference, probe

from ..conftest import tiny_llama
from .tiny import llama, save, tokenizer

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


def test_a_model_of_another_task_is_refused_by_its_kind(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 90, "d_model": 32, "d_ff": 32, "d_kv": 16, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    with pytest.raises(FedKSeedError, match=r"is an encoder-decoder \(t5\)"):
        load_model(str(tmp_path / "t5"))
    bert = BertConfig(vocab_size=90, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    BertForSequenceClassification(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(FedKSeedError, match="this one is a BertForSequenceClassification, and no BertLMHeadModel"):
        load_model(str(tmp_path / "bert"))


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


DIMENSIONS = {"vocab_size": 801, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = {**DIMENSIONS, "intermediate_size": 96, "num_key_value_heads": 2}
GPT = {"vocab_size": 801, "n_embd": 64, "n_layer": 2, "n_head": 4}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": GATED,
    "Mistral": GATED,
    "Qwen2": GATED,
    "Qwen3": {**GATED, "head_dim": 32},
    "Gemma": {**GATED, "head_dim": 16},
    "Gemma2": {**GATED, "head_dim": 16},
    "Gemma3Text": {**GATED, "head_dim": 16},
    "Phi": GATED,
    "Phi3": {**GATED, "pad_token_id": 0},
    "GPT2": GPT,
    "GPTJ": {**GPT, "rotary_dim": 8},
    "GPTNeoX": {**DIMENSIONS, "intermediate_size": 96},
    "OPT": {**DIMENSIONS, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "Falcon": DIMENSIONS,
    "Bloom": {"vocab_size": 801, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "StableLm": GATED,
    "Olmo2": GATED,
    "Cohere": GATED,
    "Granite": GATED,
    "Mamba": {"vocab_size": 801, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "Mixtral": {**GATED, **EXPERTS},
}
WITHOUT_LORA = {"Mamba": "A_log", "Mixtral": "experts"}  # a tensor that LoRA can't hold
GGUF_KINDS = ("Llama", "Mistral", "Qwen2", "Qwen3")
ROWS = [{"instruction": f"Say {number}", "response": f"The word is {number * 7}."} for number in range(24)]
Runner: TypeAlias = Callable[..., Path]


@pytest.fixture
def run_of(recipe_for: Callable[..., Path], tmp_path: Path) -> Runner:
    """A finished run of one round on a model's folder or file."""

    def run(model: Path, family: str = "hadamard", storage: str = "dense", **lines: str) -> Path:
        named = {
            "name": f"name = {json.dumps(str(model))}\nstorage = {json.dumps(storage)}",
            "size": f'size = 64\nfamily = "{family}"',
        }
        recipe = recipe_for("plain", ROWS, **named, rounds="rounds = 1", **lines)
        start(load_recipe(recipe), tmp_path / f"run-{family}")
        return tmp_path / f"run-{family}"

    return run


def model_of(kind: str, folder: Path) -> Path:
    of = tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        special = {"bos_token_id": 800, "eos_token_id": 800, "pad_token_id": None}
        config = getattr(transformers, f"{kind}Config")(**special | ARCHITECTURES[kind])
        model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    of.save_pretrained(folder)
    return folder


def is_near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() < 1e-4 * other.std())


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set")  # peft's, of GPT-2's head
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_other_programs_load_what_was_tuned(kind: str, run_of: Runner, tmp_path: Path) -> None:
    base = model_of(kind, tmp_path / "base")
    run = run_of(base)
    tuned, untuned = logits(open_tuned(run).load()), logits(load_model(str(base)))
    assert not is_near(tuned, untuned)
    export(open_tuned(run), tmp_path / "hf")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()), tuned)
    if kind in GGUF_KINDS:
        export(open_tuned(run), tmp_path / "gguf", "gguf", kind="f32")
        assert is_near(logits(load_model(str(tmp_path / "gguf" / "model-f32.gguf"))), tuned)
    else:
        with pytest.raises(FedKSeedError, match=r"can't be written as GGUF, only llama, mistral"):
            export(open_tuned(run), tmp_path / "gguf", "gguf")
    run = run_of(base, "separable")
    if kind in WITHOUT_LORA:
        with pytest.raises(FedKSeedError, match=f"{WITHOUT_LORA[kind]}.* was tuned, and LoRA can't hold it"):
            export(open_tuned(run), tmp_path / "peft", "peft")
    else:
        export(open_tuned(run), tmp_path / "peft", "peft")
        adapted = load_adapters(load_model(str(base)), str(tmp_path / "peft"))
        assert is_near(logits(adapted), logits(open_tuned(run).load()))


@pytest.mark.parametrize("storage", ["dense", "as stored"])
def test_a_run_on_a_gguf_file_with_biases_is_exported_with_what_was_tuned(
    storage: str, tiny_model: Callable[[str], Path], run_of: Runner, tmp_path: Path
) -> None:
    name = str(tiny_model("biased"))
    write_gguf(tmp_path / "base.gguf", load_model(name), load_tokenizer(name), "q8_0")
    run = run_of(tmp_path / "base.gguf", storage=storage)
    tuned = logits(open_tuned(run).load())
    export(open_tuned(run), tmp_path / "gguf", "gguf", kind="f32")
    assert is_near(logits(load_model(str(tmp_path / "gguf" / "model-f32.gguf"))), tuned)
    export(open_tuned(run), tmp_path / "hf")
    assert is_near(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()), tuned)


def test_two_matrices_are_exported_as_two_whatever_the_configuration_says(
    tiny_model: Callable[[str], Path], run_of: Runner, tmp_path: Path
) -> None:
    run = run_of(tiny_model("tied_but_head"))
    tuned = logits(open_tuned(run).load())
    export(open_tuned(run), tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()), tuned)
    export(open_tuned(run), tmp_path / "gguf", "gguf", kind="f32")
    assert is_near(logits(load_model(str(tmp_path / "gguf" / "model-f32.gguf"))), tuned)


TARGETS = ["q_proj", "v_proj", "up_proj"]
ADAPTERS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {  # settings; what is refused of which format
    "plain": ({}, {}),
    "rank-stabilised": ({"use_rslora": True}, {}),
    "DoRA": ({"use_dora": True}, {"lora-gguf": "no change of matrices alone"}),
    "biases": ({"bias": "lora_only", "target_modules": ["q_proj"]}, {}),
    "tuned biases": ({"bias": "lora_only", "target_modules": ["q_proj"]}, {"lora-gguf": "holds matrices alone"}),
    "a bias of its own": (
        {"lora_bias": True},
        {"hf": "can't be merged", "gguf": "can't be merged", "lora-gguf": "no change of matrices alone"},
    ),
    "a saved head": ({"modules_to_save": ["lm_head"]}, {"lora-gguf": "holds matrices alone"}),
    "alpha by the end of a path": ({"alpha_pattern": {"q_proj": 32, "layers.1.mlp.up_proj": 64}}, {}),
    "rank by the end of a path": ({"rank_pattern": {"q_proj": 2}}, {}),
    "the head of a tied model": ({"target_modules": ["lm_head"]}, {"lora-gguf": "one of the two uses"}),
    "the embedding of a tied model": ({"target_modules": ["embed_tokens"]}, {"lora-gguf": "one of the two uses"}),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_of_every_kind_are_exported_as_they_compute_or_refused(name: str, tmp_path: Path) -> None:
    settings, refused = ADAPTERS[name]
    save(tmp_path / "base", tokenizer(), llama(801, tie_word_embeddings="tied" in name, attention_bias="tuned" in name))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of transformers and of tied matrices
        adapted = get_peft_model(model, LoraConfig(**lora)).requires_grad_(False)
        for part, parameter in adapted.named_parameters():
            if "lora_" in part or "modules_to_save" in part or part.endswith("q_proj.base_layer.bias"):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
        adapted.save_pretrained(str(tmp_path / "adapters"))
        tuned = logits(adapted.eval())
        for format_ in ("hf", "peft", "gguf", "lora-gguf"):
            folder = tmp_path / format_
            if format_ in refused:
                with pytest.raises(FedKSeedError, match=refused[format_]):
                    export(open_tuned(tmp_path / "adapters"), folder, format_)
                assert [*tmp_path.glob(f"*{format_}*")] == []
                continue
            export(open_tuned(tmp_path / "adapters"), folder, format_, kind="f32")
            loaders: dict[str, Callable[[], Any]] = {
                "hf": lambda where=folder: AutoModelForCausalLM.from_pretrained(where).eval(),
                "gguf": lambda where=folder: load_model(str(where / "model-f32.gguf")),
                "peft": lambda where=folder: load_adapters(load_model(str(tmp_path / "base")), str(where)),
            }
            if format_ in loaders:
                assert is_near(logits(loaders[format_]()), tuned), format_


def test_embeddings_of_another_size_than_described_are_refused_with_both(copied: Callable[..., Path]) -> None:
    with pytest.raises(FedKSeedError, match=r"of the shape \(801, 64\), its description says \(808, 64\); mend its"):
        load_model(str(copied(vocab_size=808)))


def test_files_beside_a_model_that_are_not_its_own_are_not_read(copied: Callable[..., Path]) -> None:
    expected = logits(load_model(str(folder := copied())))
    for name in ("consolidated.safetensors", "model-00002-of-00003.safetensors"):
        (folder / name).write_text("version https://git-lfs.github.com/spec/v1\n")
    assert torch.equal(logits(load_model(str(folder))), expected)


@pytest.fixture
def lora(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model("lora"), tmp_path / "lora")


def renamed(stored: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {name.replace(old, new): tensor.clone() for name, tensor in stored.items()}


MISFITS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "of a model of pictures": (lambda of: renamed(of, "model.layers", "language_model.layers"), "for which it has no"),
    "of a compiled model": (lambda of: renamed(of, "base_model.model.", "base_model.model._orig_mod."), "has no place"),
    "without peft's prefix": (lambda of: renamed(of, "base_model.model.", ""), "for which it has no place"),
    "of a deeper model": (
        lambda of: of | renamed(of, "layers.1.", "layers.2."),
        r"the first is .*layers\.2\.",
    ),
    "of half of the layers": (lambda of: {n: t for n, t in of.items() if "layers.1." not in n}, "which the file lacks"),
    "of nothing": (lambda of: {"x": next(iter(of.values()))}, "no place the first is x"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_adapters_that_do_not_fit_their_base_model_are_refused(name: str, lora: Path) -> None:
    changed, fault = MISFITS[name]
    save_file(changed(load_file(lora / "adapter_model.safetensors")), lora / "adapter_model.safetensors")
    with pytest.raises(FedKSeedError, match=rf"are not of the base model .*{fault}"):
        open_tuned(lora).load()


def test_adapters_in_a_pickle_are_refused(lora: Path, tiny_model: Callable[[str], Path]) -> None:
    (lora / "adapter_model.safetensors").rename(lora / "adapter_model.bin")
    shutil.copy(tiny_model("plain") / "model.safetensors", lora / "others.safetensors")
    with pytest.raises(FedKSeedError, match=r"no adapter_model\.safetensors; adapters in pickles, which can run code"):
        open_tuned(lora).load()


def test_an_embedding_beside_a_lora_is_not_left_out_of_a_file_for_llama_cpp(lora: Path, tmp_path: Path) -> None:
    stored, base = load_file(lora / "adapter_model.safetensors"), load_model(str(open_tuned(lora).base))
    stored["base_model.model.model.embed_tokens.weight"] = base.get_input_embeddings().weight * 3
    save_file(stored, lora / "adapter_model.safetensors")
    with pytest.raises(FedKSeedError, match=r"embed_tokens\.weight was tuned, and a LoRA for llama.cpp holds matrices"):
        export(open_tuned(lora), tmp_path / "file", "lora-gguf")


def test_adapters_beside_merged_weights_are_refused(copied: Callable[..., Path], tiny_model: Any) -> None:
    folder = copied()
    shutil.copy(tiny_model("lora") / "adapter_config.json", folder)
    with pytest.raises(FedKSeedError, match="has adapters"):
        open_tuned(folder)


def other_weight(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    stored["model.norm.weight"][3] += 1e-7
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def other_setting(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 77.0  # moves the logits by less than a tenth of what tuning moved them
    (folder / "config.json").write_text(json.dumps(config))


def no_weight(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    del stored["model.norm.weight"]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def full_disk(_: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (other_weight, r"model\.norm\.weight differs"),
        (other_setting, "does not compute as the tuned model"),
        (no_weight, r"lacks 1 of its weights.*model\.norm\.weight"),
        (full_disk, "No space left on device"),
    ],
)
def test_a_folder_that_is_not_the_tuned_model_is_an_error_and_nothing_is_left(
    fault: Callable[[Path], None], match: str, run_of: Runner, tiny_model: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    run = run_of(tiny_model("plain"))
    monkeypatch.setattr("fedkseed.tuned.export.save_model", lambda *a: (save_model(*a), fault(a[1])))
    before = {*tmp_path.iterdir()}
    with pytest.raises(FedKSeedError, match=match):
        export(open_tuned(run), tmp_path / "hf")
    assert {*tmp_path.iterdir()} == before


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [0.02, 0.1, 0.5])
def test_a_model_of_16_bits_is_taken_and_the_base_in_its_place_is_not(seed: int, dtype: str, size: float) -> None:
    """Rounding may move logits by more than tuning did, and then the base model's are within its bound, too."""
    base = tiny_llama()
    tuned, generator = copy.deepcopy(base), torch.Generator().manual_seed(seed)
    for weight in tuned.parameters():
        weight += size * weight.std() * torch.randn(weight.shape, generator=generator)
    reference, kind = Reference(probe(base), probe(tuned)), getattr(torch, dtype)
    reference.compare(copy.deepcopy(tuned).to(kind), "bfloat16", "the file")
    with pytest.raises(FedKSeedError, match="the file does not compute as the tuned model"):
        reference.compare(copy.deepcopy(base).to(kind), "bfloat16", "the file")


def test_another_tokenizer_and_another_byte_of_a_gguf_file_are_errors(
    run_of: Runner, tiny_model: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    run = run_of(tiny_model("plain"))
    before = {*tmp_path.iterdir()}
    written = GGUFWriter.write_tensor_data
    with monkeypatch.context() as patch:
        patch.setattr(GGUFWriter, "write_tensor_data", lambda *a: written(a[0], a[1] * np.float32(1.0001)))
        with pytest.raises(FedKSeedError, match=r"token_embd\.weight differs; check the disk"):
            export(open_tuned(run), tmp_path / "gguf", "gguf", kind="f32")
    other = load_tokenizer(str(tiny_model("plain")))
    other.add_tokens(["cafés"])
    monkeypatch.setattr("fedkseed.tuned.export.save_tokenizer", lambda _, folder: other.save_pretrained(folder))
    with pytest.raises(FedKSeedError, match="tokenizer"):
        export(open_tuned(run), tmp_path / "hf")
    assert {*tmp_path.iterdir()} == before


def test_rounding_that_hides_the_tuning_is_said_or_refused(run_of: Runner, tiny_model: Any, tmp_path: Path) -> None:
    run = run_of(tiny_model("plain"), lr="lr = 1e-5")
    weak = run_of(tiny_model("plain"), "separable", lr="lr = 1e-6")
    before = {*tmp_path.iterdir()}
    with pytest.raises(FedKSeedError, match=r"would lose what was learned.*Export with --dtype float32"):
        export(open_tuned(weak), tmp_path / "f16", dtype="float16")
    assert {*tmp_path.iterdir()} == before
    (note,) = export(open_tuned(run), tmp_path / "bf16", dtype="bfloat16")[1:]
    assert note.startswith("Rounding to bfloat16 moves its logits by ")
    assert export(open_tuned(run), tmp_path / "f32")[1:] == []


@pytest.mark.parametrize(("format_", "options"), [("hf", {"dtype": "float16"}), ("gguf", {"kind": "f16"})])
def test_a_number_that_float16_can_t_hold_is_named_and_nothing_is_left(
    copied: Callable[..., Path], tmp_path: Path, format_: str, options: dict[str, str]
) -> None:
    large = torch.zeros(128, 64)
    large[0, 0] = 1e5
    model = copied({"model.layers.0.mlp.up_proj.weight": large})
    with pytest.raises(FedKSeedError, match=r"(up_proj|ffn_up)\S* has numbers that float16 can't hold"):
        export(open_tuned(model), tmp_path / "out", format_, **options)
    assert not (tmp_path / "out").exists()


def test_settings_that_transformers_refuses_to_save_and_odd_paths_are_no_hindrance(
    copied: Callable[..., Path], run_of: Runner, tmp_path: Path
) -> None:
    folder = copied()
    settings = {"do_sample": False, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    (tmp_path / "Größe und Maß").symlink_to(folder)
    export(open_tuned(run_of(tmp_path / "Größe und Maß")), tmp_path / "Ausgabe é")
    written = json.loads((tmp_path / "Ausgabe é" / "generation_config.json").read_text())
    assert "temperature" not in written
    assert written["repetition_penalty"] == 1.2


def test_a_gguf_file_has_as_many_tokens_as_rows(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    name = str(tiny_model("pad_beyond"))
    write_gguf(tmp_path / "m.gguf", load_model(name), load_tokenizer(name), "f16")
    reader = GGUFReader(tmp_path / "m.gguf")
    rows = next(int(tensor.shape[1]) for tensor in reader.tensors if tensor.name == "token_embd.weight")
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == rows == 801
