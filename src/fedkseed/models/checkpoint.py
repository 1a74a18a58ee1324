"""Checks of a model's files against what the model has a place for: the files count, not what a configuration says."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..errors import FedKSeedError, first_line
from ..files import read_table, require_fetched

SINGLE, INDEX, PICKLE_INDEX = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin.index.json"
CONVERT = "its weights in pickles, which can run code when read; make safetensors of them: fedkseed convert"
ADAPTERS = "adapter_config.json"  # of a folder of peft's
NUMBERS = ("F64", "F32", "F16", "BF16")  # safetensors' names of types that hold weights as they are
# Tensors that transformers once stored, and computes now: tables of positions, and what masks attention.
COMPUTED = re.compile(r"(^|\.)(inv_freq|masked_bias|position_ids|causal_mask)$")
# Parts of models of text and something else, of which the model of text is loaded alone.
TOWERS = re.compile(r"^(model\.)?(vision|visual|audio|image|multi_?modal|mm_|embed_vision|embed_audio|vq)")
ADAPTER_KEYS = re.compile(  # that are read; any other must be empty
    "task_type|base_model_name_or_path|revision|peft_version|auto_mapping|inference_mode|lora_alpha|lora_dropout|bias|"
    "fan_in_fan_out|use_rslora|use_dora|lora_bias|ensure_weight_tying|layers_to_transform|megatron_core|token_dim|"
    "qalora_group_size|num_transformer_submodules|num_attention_heads|num_layers|encoder_num_layers|"
    "prompt_tuning_init|encoder_reparameterization_type|encoder_hidden_size|encoder_dropout|"
    "proj_seed|unilora_dropout|init_theta_d_bound|init_weights"
)
ADAPTER_CHOICES = {
    "peft_type": ("LORA", "UNILORA", "PROMPT_TUNING", "P_TUNING"),
    "init_lora_weights": (True, "gaussian"),
}
PATTERNED = ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern", "modules_to_save")
PLAIN = re.compile(r"(\.\*)?[\w.|-]{1,200}", re.ASCII)  # as a regular expression of time linear in the name
MOST_PATTERNS = 2000  # of one key: peft matches each with the name of each module
# Ranks, and numbers of one vector: peft makes room for them before it reads a weight.
SIZES = {"r": 4096, "theta_d_length": 1 << 20, "num_virtual_tokens": 1 << 16}
MOST_UNI_RANK = 64  # 8 bytes of room for each number of a LoRA: 35 MB in SmolLM2-135M


def adapter_config(folder: Path) -> dict[str, Any]:
    """The description of adapters that peft wrote.

    Raises:
        FedKSeedError: its patterns have no bound in time or its sizes in memory, or peft would do more by it than add
            the adapters' weights.
    """
    require_fetched(*folder.glob("*.safetensors"))
    about = read_table(path := folder / ADAPTERS, by_hand=True)
    for key, entry in about.items():
        if key in PATTERNED:
            patterns = [*entry] if isinstance(entry, list | dict) else [entry]
            right = len(patterns) <= MOST_PATTERNS and all(isinstance(p, str) and PLAIN.fullmatch(p) for p in patterns)
            takes = f'which may take hours to match; write up to {MOST_PATTERNS:,} names, as ["q_proj"], or ".*q_proj"'
        elif key in SIZES:
            most = MOST_UNI_RANK if key == "r" and about.get("peft_type") == "UNILORA" else SIZES[key]
            right, takes = isinstance(entry, int) and 0 < entry <= most, f"which takes room; up to {most:,} is read"
        else:
            right = ADAPTER_KEYS.fullmatch(key) or entry in ADAPTER_CHOICES.get(key, ())
            takes = "by which peft would do more than add these weights; merge them into their base model with peft"
        if entry and not right:
            raise FedKSeedError(f"{path} has {key} = {str(entry)[:100]!r}, {takes}")
    return about


def require_no_adapters(folder: Path) -> None:
    """Refuse a folder of the `peft` library where a whole model is expected.

    transformers would put the adapters on their base model; neither their change nor the base's would be tuned.

    Raises:
        FedKSeedError: it has the description of adapters.
    """
    if (folder / ADAPTERS).is_file():
        base = adapter_config(folder).get("base_model_name_or_path")
        of_base = f" of the base model {base}" if base else ""
        raise FedKSeedError(
            f"{folder} has adapters{of_base} ({ADAPTERS}) and is no whole model: name the base model, or merge them "
            "into it (peft's merge_and_unload) and save that in a new folder; if its weights have them already, "
            f"remove {ADAPTERS}"
        )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that are loaded as a folder's model, of which one may be missing; others are not read.

    Raises:
        FedKSeedError: they are two models.
    """
    files = [folder / SINGLE]
    if (index := folder / INDEX).is_file():
        if not isinstance(places_of := read_table(index, by_hand=True).get("weight_map"), dict):
            raise FedKSeedError(f"{index} has no table weight_map; get the model again")
        shards = {*places_of.values()}
        if files[0].is_file() and shards != {SINGLE}:
            raise FedKSeedError(f"{folder} has two models, {SINGLE} and that of {INDEX}; remove one of them")
        files = [folder / name for name in sorted(shards)]
    return files


def require_readable(folder: Path) -> None:
    """Refuse a folder whose safetensors files are not one whole model in plain numbers; weights are not read.

    Raises:
        FedKSeedError: a file is damaged or missing, a tensor is there twice, or packed in a type for few bits.
    """
    files = weight_files(folder)
    if files != [folder / SINGLE]:
        if absent := [file.name for file in files if not file.is_file()]:
            raise FedKSeedError(f"{folder} lacks {absent[0]}, which its {INDEX} names; get the whole model")
    elif not files[0].is_file():  # without weights at all it is refused where they are loaded
        if any(folder.glob("pytorch_model*.bin")):
            raise FedKSeedError(f"{folder} has {CONVERT} {folder} NEW")
        return
    places = dict[str, Path]()
    require_fetched(*files)
    for file in files:
        try:
            with safe_open(file, "np") as tensors:  # "pt" would load PyTorch
                kinds = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118 - it is no mapping
        except SafetensorError as error:
            raise FedKSeedError(f"{file} is damaged or not complete: {first_line(error)}; get it again") from error
        for name, kind in kinds.items():
            if (other := places.setdefault(name, file)) != file:
                raise FedKSeedError(f"{name} is in {other} and in {file.name}; get the model again, in an empty folder")
            if kind not in (*NUMBERS, "I64") and not (
                name.endswith(".bias") or COMPUTED.search(name)
            ):  # masks are others
                raise FedKSeedError(f"{file} has {name} as {kind}; take the model in one of {', '.join(NUMBERS)}")


def require_dense(config: Any, model: str) -> None:
    """Refuse a model whose weights are packed in another way than GGUF's, as by GPTQ, AWQ, bitsandbytes or in FP8."""
    packed = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if packed:
        method = packed.get("quant_method") if isinstance(packed, dict) else packed.quant_method
        raise FedKSeedError(
            f"the weights of {model} are packed by {getattr(method, 'value', method)!r} and can't be tuned; take the "
            "model in float32, bfloat16 or float16, which [model] storage keeps in 4 or 8 bits, or as a GGUF file"
        )


def require_decoder(config: Any, model: str) -> None:
    """Refuse a model that reads a text in one part and answers in another, as T5 and BART."""
    if getattr(config, "is_encoder_decoder", False):
        raise FedKSeedError(
            f"the model {model} is an encoder-decoder ({config.model_type}), which reads a prompt in one part and "
            "answers in another; take a model that predicts the next token of one text, as Llama or GPT-2"
        )


def require_used(loaded: Any, config: Any, report: Mapping[str, Any], model: str) -> None:
    """Refuse a model that lacks weights of its own description, or whose files have weights that it does not use.

    Args:
        config: that of the folder, which may be of more than text.
        report: transformers' of the loading, which leaves out what the model's class says that it ignores.
    """
    if unlike := sorted(report["mismatched_keys"]):
        name, stored, described = unlike[0]
        raise FedKSeedError(
            f"the model {model} has {name} of the shape {tuple(stored)}, its description says {tuple(described)}; mend "
            "its config.json (vocab_size, where its embeddings were resized), or get the whole model"
        )
    if absent := [*report["missing_keys"]]:
        kind, kinds = type(loaded).__name__, getattr(config, "architectures", None) or []
        kinds = [] if getattr(config, "sub_configs", None) else kinds  # text is a part of these
        raise FedKSeedError(
            f"the model {model} lacks {len(absent)} of its weights, the first is {min(map(str, absent))}; "
            "they would be random, and differ from party to party; get the whole model"
            + (f", or another: this one is a {kinds[0]}, and no {kind}" if kinds and kind not in kinds else "")
        )
    buffers = {name for name, _ in loaded.named_buffers()}
    has_towers = any(name != "text_config" for name in getattr(config, "sub_configs", ()))
    require_none_unused(
        [
            name
            for name in report["unexpected_keys"]
            if name not in buffers and not COMPUTED.search(name) and not (has_towers and TOWERS.search(name))
        ],
        model,
    )


def require_none_unused(names: Sequence[str], model: str) -> None:
    """Refuse a model's file with tensors, of the given names, that the loaded model has no place for."""
    if names:
        raise FedKSeedError(
            f"the model {model} has tensors that its description has no place for, {len(names)} in all, the first is "
            f"{min(names)}; they would be lost: mend the description, or take the tensors out if they are of no use"
        )


def settle_ties(model: Any) -> None:
    """Say in a model's configuration that its embeddings are not tied, where its weights are two matrices.

    transformers loads two different matrices as such, whatever the configuration says, but others would tie them.
    """
    head = getattr(model.get_output_embeddings(), "weight", None)
    if head is not None and head is not model.get_input_embeddings().weight:
        for config in (model.config, model.config.get_text_config()):
            if getattr(config, "tie_word_embeddings", False):
                config.tie_word_embeddings = False
