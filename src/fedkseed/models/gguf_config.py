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
OWN_WIDTHS = ("llama", "mistral", "qwen3", "qwen3_moe")  # types whose heads have a width of their own
FACTORS = "rope_freqs.weight"  # of the wavelengths of rotary positions, one by one
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
    width = reader.fields.get(f"{architecture_of(reader)}.attention.key_length")
    if width is not None and config.model_type in OWN_WIDTHS:
        config.head_dim = width.contents()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") == "default":
        begin = f"{architecture_of(reader)}.rope.scaling."
        fields = {n.removeprefix(begin): field.contents() for n, field in reader.fields.items() if n.startswith(begin)}
        scaled = _by_fields(fields)
        if FACTORS in tensors:
            factors = dequantize(tensors[FACTORS].data, tensors[FACTORS].tensor_type)
            scaled = _by_factors(factors.astype(np.float64), rope["rope_theta"])
        if scaled:
            config.rope_parameters = {**rope, **scaled}
    return config


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
