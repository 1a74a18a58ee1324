"""A tuned model as a LoRA folder, which the `peft` library loads onto the base model.

With a factored family a matrix's change is ΔW = L C Rᵀ with a core C (a × b), so its rank is at most min(a, b):
`lora_B` and `lora_A` are L and C Rᵀ if a ≤ b, else L C and Rᵀ. Any other change is cut to a rank r by its singular
vectors: U and Uᵀ ΔW for the r leading ones U. alpha is the rank, which makes LoRA's scaling 1. Vectors have no low
rank: biases of layers, and modules like norms, are stored with their tuned values. The folder is two files, which are
written without the library: it would need a wrapped copy of the model to write them.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..directions import Pool
from ..directions.factors import Basis, Factor
from ..directions.reference import separable_signs
from ..errors import FedKSeedError
from ..models.checkpoint import ADAPTERS, adapter_config
from ..weights.layout import Layout
from .formats import require_low_rank
from .read_back import exact

WEIGHTS = "adapter_model.safetensors"  # beside ADAPTERS
PREFIX = "base_model.model."  # peft's name of the model that it wraps
Floats = NDArray[np.float32]
Pair: TypeAlias = tuple[Floats, Floats]  # (rows × r) and (r × columns)


@dataclass(frozen=True, slots=True)
class Lora:
    """The content of a LoRA folder."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # by peft's names
    ranks: dict[str, int] = field(default_factory=dict)  # of each adapted module, by its path
    saved: tuple[str, ...] = ()  # paths of modules that are stored whole
    biases: bool = False  # whether biases of the base model are among the tensors
    transposed: bool = False  # whether a module holds its matrix as inputs × outputs, as GPT-2's do
    tied: bool = False  # whether several adapted modules share one matrix

    def write(self, folder: Path, base: str) -> None:
        """Write both files of the folder, which exists, for a base model's folder or name."""
        save_file(self.tensors, folder / WEIGHTS, metadata={"format": "pt"})
        rank = Counter(self.ranks.values()).most_common(1)[0][0]
        exceptions = {path: r for path, r in self.ranks.items() if r != rank}
        about = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
            "r": rank, "lora_alpha": rank, "rank_pattern": exceptions, "alpha_pattern": exceptions,
            "target_modules": sorted(self.ranks), "modules_to_save": list(self.saved) or None,
            "bias": "all" if self.biases else "none", "fan_in_fan_out": self.transposed, "lora_dropout": 0.0,
            **({"ensure_weight_tying": True} if self.tied else {}),
        }  # fmt: skip
        (folder / ADAPTERS).write_text(json.dumps(about, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "Lora":
        """The LoRA of a folder that peft wrote, with its scaling in its matrices; other adapters are refused."""
        about = adapter_config(folder)
        if about.get("peft_type") != "LORA" or about.get("use_dora") or about.get("lora_bias"):
            raise FedKSeedError(
                f"{folder} holds adapters of the kind {about.get('peft_type')!r}, which are no change of matrices "
                "alone; export with --format peft"
            )
        tensors, ranks = load_file(folder / WEIGHTS), dict[str, int]()
        alphas = about.get("alpha_pattern", {})  # by what a path ends with, the first that fits
        for name in [name for name in tensors if name.endswith((".lora_B.weight", ".lora_embedding_B"))]:
            path = name.removeprefix(PREFIX).rpartition(".lora_")[0]
            rank = ranks[path] = tensors[name].shape[1]
            alpha = next((a for key, a in alphas.items() if re.match(rf"(.*\.)?({key})$", path)), about["lora_alpha"])
            tensors[name] = tensors[name] * (alpha / (math.sqrt(rank) if about.get("use_rslora") else rank))
        transposed, tied = bool(about.get("fan_in_fan_out")), bool(about.get("ensure_weight_tying"))
        saved, biases = tuple(about.get("modules_to_save") or ()), about.get("bias", "none") != "none"
        return cls(tensors, ranks, saved, biases, transposed, tied)


def as_lora(tuned: nn.Module, patterns: tuple[str, ...], pool: Pool, c: Floats, basis: Basis | None = None) -> Lora:
    """The LoRA of a tuned model.

    Args:
        tuned: the model with weights w(c), as left by `Adapter.apply`.
        patterns: shell patterns of the tuned tensors' names.
        pool: the directions, of a factored family.
        c: the coefficients, (K,).
        basis: the factors, for the families that need them.

    Raises:
        FedKSeedError: the family has a full rank, nothing moved, or a tensor moved that LoRA can't hold.
    """
    require_low_rank(pool)
    layout = Layout(tuned, patterns)
    pool = pool.fitted(layout.shapes, basis)
    table, pairs = pool.record.core(c), dict[int, Pair]()
    for entry in layout.tuned:
        left, core, right = _factors(pool, entry.number, table)
        if core.any():
            is_wide = core.shape[0] <= core.shape[1]
            pairs[entry.number] = (left, core @ right.T) if is_wide else (left @ core, right.T)
    return _from_pairs(tuned, layout, pairs)


class NearestLora(NamedTuple):
    """A LoRA whose change is the nearest of its rank to a tuned model's, and the distance that is left."""

    lora: Lora
    errors: dict[str, float]  # matrix -> the Frobenius norm of what is left of its change, over that of the change
    error: float  # the same of all matrices together


def nearest_lora(tuned: nn.Module, base: nn.Module, rank: int) -> NearestLora:
    """The LoRA of a rank that is nearest to the change from a base model to a tuned one.

    Raises:
        FedKSeedError: no matrix changed, or a tensor changed that LoRA can't hold.
    """
    layout, before = Layout(tuned), {entry.name: entry.tensor for entry in Layout(base).entries}
    pairs, missed, whole = dict[int, Pair](), dict[str, float](), dict[str, float]()
    for entry in layout.entries:
        change = (exact(entry.tensor).float() - exact(before[entry.name]).float()).numpy()
        if not change.any():
            continue
        if change.ndim != 2:
            pairs[entry.number] = change, change  # a place that holds no matrix keeps the tuned value
            continue
        # The leading singular vectors are the leading eigenvectors of ΔW ΔWᵀ, or ΔWᵀ ΔW, by the shorter side.
        is_wide = change.shape[0] <= change.shape[1]
        precise = (change if is_wide else change.T).astype(np.float64)
        vectors = np.linalg.eigh(precise @ precise.T)[1][:, : -rank - 1 : -1].astype(np.float32)
        rows, columns = (vectors, vectors.T @ change) if is_wide else (change @ vectors, vectors.T)
        pairs[entry.number] = rows, columns
        whole[entry.name] = float(np.linalg.norm(change.astype(np.float64)))
        missed[entry.name] = float(np.linalg.norm((change - rows @ columns).astype(np.float64)))
    lora = _from_pairs(tuned, layout, pairs)
    names = [name for name in missed if name.removesuffix(".weight") in lora.ranks]  # others are stored whole
    error = math.hypot(*(missed[name] for name in names)) / math.hypot(*(whole[name] for name in names))
    return NearestLora(lora, {name: missed[name] / whole[name] for name in names}, error)


def _from_pairs(tuned: nn.Module, layout: Layout, pairs: Mapping[int, Pair]) -> Lora:
    """The LoRA of a tuned model from the two factors of each moved tensor's change, by number."""
    paths = {id(module): path for path, module in tuned.named_modules()}
    tensors, ranks, whole, biases = dict[str, Tensor](), dict[str, int](), set[str](), dict[str, Tensor]()
    moved = [(entry, *place) for entry in layout.entries if entry.number in pairs for place in entry.places]
    for entry, module, name in moved:
        path = paths[id(module)]
        if name == "weight" and _adaptable(module):
            ranks[path] = pairs[entry.number][0].shape[1]
            tensors |= _matrices(PREFIX + path, module, *pairs[entry.number])
        elif name == "bias" and isinstance(module, (nn.Linear, Conv1D)):
            biases[path] = exact(getattr(module, name)).clone()
        elif entry.tensor.ndim <= 2 and not any(module.children()):
            whole.add(path)
        else:
            raise FedKSeedError(
                f"{entry.name} of shape {tuple(entry.tensor.shape)} was tuned, and LoRA can't hold it in a "
                f"{type(module).__name__}; export the whole model instead: --format hf"
            )
    if not ranks:  # peft refuses an adapter that adapts nothing
        raise FedKSeedError("no matrix was changed, so there is nothing that LoRA could hold; use the base model")
    # peft keeps every module whose path ends so, and asks for the tensors of all of them
    saved = {path: m for path, m in tuned.named_modules() if any(path.endswith(end) for end in whole)}
    for path, module in saved.items():
        tensors |= {f"{PREFIX}{path}.{name}": exact(getattr(module, name)).clone() for name in module.state_dict()}
    for path, value in biases.items():  # an adapted layer lies inside of peft's
        tensors[f"{PREFIX}{path}.{'base_layer.' if path in ranks else ''}bias"] = value
    transposed = any(isinstance(tuned.get_submodule(path), Conv1D) for path in ranks)
    tied = any(sum(paths[id(module)] in ranks for module, _ in entry.places) > 1 for entry in layout.tuned)
    return Lora(tensors, ranks, tuple(sorted(saved)), bool(biases), transposed, tied)


def _factors(pool: Pool, number: int, table: Floats) -> tuple[Floats, Floats, Floats]:
    """One tensor's L, C and R; a core without entries where no direction touches it."""
    matrix = pool.matrix(number)
    if matrix is None:
        nothing = np.empty((0, 0), np.float32)
        return nothing, nothing, nothing
    if isinstance(matrix, Factor):
        return matrix.left.astype(np.float32), matrix.core(table), matrix.right.astype(np.float32)
    rows, columns = (min(len(table), size) for size in (matrix.rows, matrix.columns))
    s_u, s_v = separable_signs(pool, number, range(matrix.rows), matrix)
    return _repeated(s_u, rows), table[:rows, :columns], _repeated(s_v, columns)


def _repeated(signs: Floats, width: int) -> Floats:
    """Identities (width × width) below one another, with each row's sign: row x has one entry, in x mod width."""
    rows, matrix = np.arange(len(signs)), np.zeros((len(signs), width), np.float32)
    matrix[rows, rows % width] = signs
    return matrix


def _matrices(path: str, module: nn.Module, rows: Floats, columns: Floats) -> Mapping[str, Tensor]:
    """A module's two matrices by peft's names, of ΔW = (rows × r) (r × columns)."""
    if isinstance(module, nn.Embedding):
        parts = {"lora_embedding_A": rows.T, "lora_embedding_B": columns.T}
    else:
        a, b = (rows.T, columns.T) if isinstance(module, Conv1D) else (columns, rows)
        parts = {"lora_A.weight": a, "lora_B.weight": b}
    return {f"{path}.{name}": torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}


def _adaptable(module: nn.Module) -> bool:
    """Whether peft adapts the module by its input alone. OPT's positions are an embedding of something else."""
    if isinstance(module, nn.Embedding):
        return type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")
    return isinstance(module, (nn.Linear, Conv1D))
