"""Adapters of the `peft` library, for tuning them instead of all weights. Only this file imports the library."""

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch  # sets an attribute, and puts it back whatever is raised

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..errors import FedKSeedError, needs_extra
from ..recipe.schema import PeftTable
from .checkpoint import adapter_config
from .tail import last_of

# Parameters in two places, of which a file has one: a Uni-LoRA's vector; the numbers of a prompt, by another name.
TWICE = re.compile(r"prompt_encoder|^prompt_embeddings$|\.unilora_theta_d\.")
PATTERNS = {
    "lora": ("*lora_*",), "uni-lora": ("*unilora_theta_d*",), "p-tuning": ("*prompt_encoder*",),
    "prompt": ("*prompt_encoder*",),
}  # fmt: skip


def attach(model: nn.Module, kind: str, adapters: PeftTable, seed: int, last: int | None = None) -> nn.Module:
    """Put adapters on a model, so that only they are tuned. The same seed gives the same adapters.

    Args:
        kind: `lora` (Hu et al., 2022), `uni-lora` (Li et al., 2025; each number of a LoRA is one of a single vector,
            which one is drawn from the seed), `p-tuning` (Liu et al., 2023; reparameterised by an MLP) or `prompt`
            (Lester et al., 2021).
        last: the number of last layers that get a `lora` or a `uni-lora`; None: all.

    Raises:
        FedKSeedError: peft is not installed, or does not know the architecture.
    """
    peft = _peft()
    tokens: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": adapters.virtual_tokens}
    transposed = any(isinstance(module, Conv1D) for module in model.modules())  # GPT-2
    lora: dict[str, Any] = {"task_type": "CAUSAL_LM", "r": adapters.rank, "fan_in_fan_out": transposed}
    lora["target_modules"] = adapters.targets
    if last is not None:
        place, numbers = last_of(model, last)
        lora |= {"layers_to_transform": [*numbers], "layers_pattern": place.rpartition(".")[2]}
    configs = {
        "lora": lambda: peft.LoraConfig(**lora, lora_alpha=adapters.alpha),
        "uni-lora": lambda: peft.UniLoraConfig(**lora, proj_seed=seed, theta_d_length=adapters.vector),
        "p-tuning": lambda: peft.PromptEncoderConfig(**tokens, encoder_reparameterization_type="MLP"),
        "prompt": lambda: peft.PromptTuningConfig(**tokens),
    }
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's, of transformers
        torch.manual_seed(seed)  # the library draws from the global generator, which is put back afterwards
        try:
            adapted = peft.get_peft_model(model, configs[kind]())
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FedKSeedError(f"the model can't have {kind} adapters: {error}; name [peft] targets") from error
    return adapted.requires_grad_(False).eval()


def load_adapters(model: nn.Module, folder: str) -> nn.Module:
    """Put the adapters of a folder on a model, beside its weights.

    Raises:
        FedKSeedError: peft is not installed, the adapters are of a kind that is not read, or their file has other
            tensors than the model has places for: peft leaves those out, and draws those that are missing.
    """
    adapter_config(Path(folder))
    if not (Path(folder) / "adapter_model.safetensors").is_file():  # else peft would read a pickle
        raise FedKSeedError(
            f"{folder} has no adapter_model.safetensors; adapters in pickles, which can run code when read, are not "
            "read: write them anew by peft's save_pretrained(FOLDER), which makes safetensors"
        )
    peft, results = _peft(), list[Any]()
    load = peft.PeftModel.load_adapter

    def kept(*args: Any, **options: Any) -> Any:
        results.append(load(*args, **options))
        return results[-1]

    with warnings.catch_warnings(), patch.object(peft.PeftModel, "load_adapter", kept):
        warnings.simplefilter("ignore")  # peft's: of transformers, and of keys that are refused here
        adapted = peft.PeftModel.from_pretrained(model, folder).requires_grad_(False).eval()
    for key_list, fault in (("unexpected_keys", "for which it has no place"), ("missing_keys", "which the file lacks")):
        if keys := [key for each in results for key in getattr(each, key_list) if not TWICE.search(key)]:
            base = getattr(getattr(model, "config", None), "name_or_path", "")
            raise FedKSeedError(
                f"the adapters in {folder} are not of the base model {base}: of {len(keys):,} tensors {fault} the "
                f"first is {keys[0][:100]}; name the model that they were tuned on, or get the folder again"
            )
    return adapted


def _peft() -> Any:
    with needs_extra("adapters need", "peft"):
        import peft
    return peft


def lora_size(shapes: Mapping[str, Sequence[int]]) -> int | None:
    """The number of weights of a LoRA of rank 8 in the matrices of queries and values, where peft puts most.

    Args:
        shapes: the shapes of a model's tensors, by name.

    Returns:
        None if no tensor has the name of such a matrix.
    """
    adapted = [shape for name, shape in shapes.items() if name.endswith((".q_proj.weight", ".v_proj.weight"))]
    return 8 * sum(map(sum, adapted)) or None
