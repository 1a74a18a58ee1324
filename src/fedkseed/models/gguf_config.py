"""The configuration of a GGUF file's model: transformers', and what it leaves out though llama.cpp computes by it."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import dequantize
from numpy.typing import NDArray
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import FedKSeedError

BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_gate.bias"}  # setting -> end of the tensors' names
LARGEST = {"gemma2": 46, "gemma3_text": 62}  # layers of the 27B models, whose scores have a scale of their own
OWN_WIDTHS = ("llama", "mistral", "qwen3", "qwen3_moe")  # types whose heads have a width of their own
FACTORS = "rope_freqs.weight"  # of the wavelengths of rotary positions, one by one
FULL = "full_attention"  # a kind of layers
UNREAD = {"attention.causal": True, "ssm.dt_b_c_rms": False}  # fields that are not read -> what is computed
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")  # settings, and fields, of Gemma's logits
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of every Llama since 3.1


def gguf_config(path: Path) -> Any:
    """The configuration of a file's model, with biases and scaled positions as its tensors and fields have them.

    Raises:
        FedKSeedError: positions are scaled in a way that is not known here.
    """
    config: Any = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    reader = gguf.GGUFReader(str(path))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for setting, end in BIASES.items():
        if getattr(config, setting, None) is False:
            setattr(config, setting, any(name.endswith(end) for name in tensors))
    begin = f"{architecture_of(reader)}."
    fields = {n.removeprefix(begin): field.contents() for n, field in reader.fields.items() if n.startswith(begin)}
    if "attention.key_length" in fields and config.model_type in OWN_WIDTHS:
        config.head_dim = fields["attention.key_length"]
    if config.model_type in LARGEST:  # scores are divided by the root of this; a file has no field for it
        is_largest = config.num_hidden_layers == LARGEST[config.model_type]
        config.query_pre_attn_scalar = (
            config.hidden_size // config.num_attention_heads if is_largest else config.head_dim
        )
    for name, here in UNREAD.items():
        if fields.get(name, here) != here:
            raise FedKSeedError(f"its field {begin}{name} is {fields[name]!r}, and here {here!r} is computed")
    for name in CAPS:
        if name in fields and hasattr(config, name):
            setattr(config, name, fields[name] or None)
    _set_positions(config, fields, tensors)
    return config


def _set_positions(config: Any, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Give a configuration the rotary positions that a file's fields and factors say.

    Where kinds of layers have positions of their own, as Gemma 3's, a file has those of full attention.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    by_layers = any(isinstance(table, dict) for table in rope.values())
    table = dict(rope.get(FULL, {}) if by_layers else rope)
    if "rope_theta" not in table:
        return
    table["rope_theta"] = fields.get("rope.freq_base", table["rope_theta"])
    if table.get("rope_type", "default") == "default":
        scaling = "rope.scaling."
        older = {"factor": fields["rope.scale_linear"]} if "rope.scale_linear" in fields else {}
        scaled = _by_fields(older | {n.removeprefix(scaling): v for n, v in fields.items() if n.startswith(scaling)})
        if FACTORS in tensors:
            factors = dequantize(tensors[FACTORS].data, tensors[FACTORS].tensor_type)
            scaled = _by_factors(factors.astype(np.float64), table["rope_theta"])
        table |= scaled
    heads, turned = config.num_attention_heads, fields.get("rope.dimension_count")
    width = getattr(config, "head_dim", None) or (config.hidden_size // heads if isinstance(heads, int) else None)
    parts_unlike = turned is not None and width and turned != int(width * table.get("partial_rotary_factor", 1.0))
    if width and parts_unlike and not hasattr(config, "qk_rope_head_dim"):
        if "partial_rotary_factor" not in table:
            raise FedKSeedError(
                f"its positions turn {turned} of a head's {width} numbers, here a {config.model_type}'s all"
            )
        table["partial_rotary_factor"] = turned / width
    config.rope_parameters = {**rope, FULL: table} if by_layers else table


def _by_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Scaled positions by the fields of a file, without the beginning of their names; none are not scaled."""
    kind, factor = fields.get("type", "linear"), fields.get("factor", 1.0)
    if kind == "none" or factor in (0, 1):
        return {}
    if unknown := sorted({*fields} - {"type", "factor", "original_context_length", "finetuned"}):
        raise FedKSeedError(f"its positions are scaled by rope.scaling.{unknown[0]}, which is not known here")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn" or "original_context_length" not in fields:
        raise FedKSeedError(f"its positions are scaled by {kind!r}; linear is known here, and yarn of a given length")
    original = fields["original_context_length"]
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


def _by_factors(factors: NDArray[np.float64], theta: float) -> dict[str, Any]:
    """Scaled positions by the factors of their wavelengths: all the same one, or those of Llama 3."""
    factor = float(f"{factors.max():.6g}")  # they were computed in float32
    if np.allclose(factors, factor, rtol=1e-4):
        return {"rope_type": "linear", "factor": factor} if factor != 1 else {}
    between = np.flatnonzero((factors > 1.001) & (factors < factor * 0.999))
    if len(between):  # one of them says the length from which on positions are scaled
        at, (low, high) = between[0], BANDS.values()
        smooth = (1 / factors[at] - 1 / factor) / (1 - 1 / factor)
        length = 2 * math.pi * theta ** (at / len(factors)) * (smooth * (high - low) + low)
        scaled = {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": round(length), **BANDS}
        config = LlamaConfig(head_dim=2 * len(factors), rope_parameters={"rope_theta": theta, **scaled})
        frequencies = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0].double().numpy()
        if np.allclose(factors, theta ** (-np.arange(len(factors)) / len(factors)) / frequencies, rtol=1e-4):
            return scaled
    raise FedKSeedError(f"its positions are scaled by {FACTORS}, which are not Llama 3's")


def architecture_of(reader: gguf.GGUFReader) -> str:
    """llama.cpp's name of a file's architecture."""
    return str(reader.fields["general.architecture"].contents())
