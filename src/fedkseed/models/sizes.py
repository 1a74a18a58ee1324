"""Sizes of a model by its configuration and the headers of its files; no weight is read."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ..errors import others_border
from ..recipe.schema import PeftTable
from .gguf_header import require_sane
from .place import find

TORCH_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # by safetensors' names


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes that decide the number of weights of a Llama-type model, and what its files hold."""

    hidden: int
    intermediate: int  # numbers of a token in the layer's MLP, of all experts that it goes through
    layers: int
    vocabulary: int
    attention: int  # number of query heads times their size
    shared: int  # number of key or value heads, which query heads may share, times their size
    tied: bool = False  # whether the embedding and the output layer are one matrix
    counted: int = 0  # numbers in the model's files; 0: they are not here
    stored: int = 0  # bytes of these files, or of their tensors
    stored_as: str = ""  # the type of all tensors of safetensors; empty: blocks, or several types

    @property
    def layer(self) -> int:
        """Number of weights of a layer."""
        h = self.hidden
        return 2 * h * self.attention + 2 * h * self.shared + 3 * h * self.intermediate + 2 * h

    @property
    def output(self) -> int:
        """Number of weights of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """Number of weights, d."""
        return self.counted or self.output * (1 if self.tied else 2) + self.layers * self.layer + self.hidden

    def tuned(self, kind: str, peft: PeftTable, last_layers: int | None = None) -> int:
        """Number of weights that are tuned, of all layers or of the last ones and the final norm.

        Args:
            kind: see `Algorithm.tuned`.
        """
        match kind:
            case "lora":  # on the queries' and the values' matrices
                return (last_layers or self.layers) * peft.rank * (2 * self.hidden + self.attention + self.shared)
            case "uni-lora":
                return peft.vector
            case "prompt":
                return peft.virtual_tokens * self.hidden
            case "p-tuning":  # an embedding, and an MLP of three square layers with biases
                return peft.virtual_tokens * self.hidden + 3 * (self.hidden**2 + self.hidden)
            case "output":
                return self.output
            case _:
                return self.weights if last_layers is None else last_layers * self.layer + self.hidden


def sizes_of(model: str) -> Architecture:
    """The sizes of a model without its weights; FedKSeedError where there is none, or no such sizes."""
    source = find(model)
    with others_border(f"the sizes of {model} can't be read"):
        return _of_config(source.name) if source.gguf_path is None else _of_gguf(source.gguf_path)


def _of_config(name: str) -> Architecture:
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config()
    heads, hidden = config.num_attention_heads, config.hidden_size
    size = getattr(config, "head_dim", None) or hidden // heads
    widths = ("moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner")
    wide = next((each for key in widths if (each := getattr(config, key, None))), 4 * hidden)
    experts = getattr(config, "num_experts_per_tok", None) or 1
    shared = getattr(config, "num_key_value_heads", None) or heads
    counted = stored = 0
    types = set[str]()
    for file in sorted(Path(name).glob("*.safetensors")):
        stored += file.stat().st_size
        with safe_open(file, "np") as opened:
            tensors = [opened.get_slice(name) for name in opened.keys()]  # noqa: SIM118 - no mapping
            counted += sum(prod(tensor.get_shape()) for tensor in tensors)
            types |= {TORCH_TYPES.get(tensor.get_dtype(), "") for tensor in tensors}
    return Architecture(
        hidden, wide * experts, config.num_hidden_layers, config.vocab_size, heads * size, shared * size,
        bool(config.tie_word_embeddings), counted, stored, types.pop() if len(types) == 1 else "",
    )  # fmt: skip


def _of_gguf(path: Path) -> Architecture:
    numbers, tensors = require_sane(path)
    by_end = {name.partition(".")[2]: int(number) for name, number in numbers.items()}
    (hidden, vocabulary), _ = tensors["token_embd.weight"]
    heads = by_end["attention.head_count"]
    size = by_end.get("attention.key_length", hidden // heads)
    wide = by_end.get("expert_feed_forward_length") or by_end["feed_forward_length"]
    return Architecture(
        hidden, wide * by_end.get("expert_used_count", 1), by_end["block_count"], vocabulary, heads * size,
        by_end.get("attention.head_count_kv", heads) * size, "output.weight" not in tensors,
        sum(prod(shape) for shape, _ in tensors.values()), sum(size for _, size in tensors.values()),
    )  # fmt: skip
