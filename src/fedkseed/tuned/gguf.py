"""A model as a GGUF file, which llama.cpp, Ollama and LM Studio load; and a LoRA as one, to load beside a base model.

Names and the order of rows are those that transformers undoes when it reads such files. Of a base model that is a GGUF
file itself, all fields are copied: description, tokenizer and chat template.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys, LlamaFileType
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

from ..data.chat_template import request
from ..data.layouts import USER, Example
from ..data.wording import Wording, beginning
from ..errors import FedKSeedError
from ..files import border
from ..models.gguf_tokenizer import add_tokenizer
from ..models.quantised import empty_model, processor_of, row_order
from .formats import KINDS
from .lora import PREFIX, Lora
from .read_back import exact, require_finite

# By the name on the command line: the type of matrices, and the number that stands in the file for it.
MATRIX_TYPES = {
    name: (Type[name.upper()], LlamaFileType[f"{'ALL' if name == 'f32' else 'MOSTLY'}_{name.upper()}"])
    for name in KINDS
}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # config's -> llama.cpp's
VOCABULARY = ("token_embd.weight", "output.weight")  # matrices that are kept at 8 bits where others get 4
SKIPPED = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")  # written anew
BLOCK = 32  # weights of a row that share a scale


@dataclass(frozen=True, slots=True)
class Names:
    """The tensors of a model by their names in a GGUF file."""

    architecture: str  # llama.cpp's name of it
    names: dict[str, str]  # a file's name -> the model's
    processor: Any

    @classmethod
    def of(cls, config: Any) -> "Names":
        """The names for a model of a configuration; one that can't be written is refused."""
        architecture = ARCHITECTURES.get(config.model_type)
        if architecture is None:
            raise FedKSeedError(
                f"a model of the type {config.model_type!r} can't be written as GGUF, only {', '.join(ARCHITECTURES)}; "
                "export with --format hf, and convert the folder with llama.cpp's own program"
            )
        if config.hidden_act != "silu":
            raise FedKSeedError(
                f"llama.cpp has the activation silu in models of the type {config.model_type!r}, this one has "
                f"{config.hidden_act!r}; export with --format hf"
            )
        if config.model_type == "qwen3" and config.attention_bias:
            raise FedKSeedError("llama.cpp reads no biases of attention in a qwen3; export with --format hf")
        processor, empty = processor_of(architecture, config), empty_model(config)
        names = get_gguf_hf_weights_map(empty, processor, model_type=architecture)
        if config.tie_word_embeddings:  # llama.cpp takes the embeddings where there is no matrix for logits
            names.pop("output.weight", None)
        if absent := {name for name, _ in empty.named_parameters()} - {*names.values()}:
            raise FedKSeedError(f"GGUF has no name for {min(absent)} in a model of the type {config.model_type!r}")
        return cls(architecture, names, processor)

    def rows(self, name: str, count: int) -> NDArray[np.int64]:
        """The model's row for each of a tensor's `count` rows in the file."""
        order = row_order(self.processor, name, count)
        if order is None:
            raise FedKSeedError(f"the order of {name}'s rows in a GGUF file is not known")
        return np.argsort(order)


# A tensor's shape, its type in a file, and what makes its bytes when it is its turn to be written
FileTensor: TypeAlias = tuple[Sequence[int], Type, Callable[[], NDArray[Any]]]


def _write_file(path: Path, writer: GGUFWriter, tensors: Mapping[str, FileTensor]) -> None:
    """Write a file: first all fields and descriptions of tensors, then their values in turn; and read it back.

    Raises:
        FedKSeedError: it can't be written, or has other tensors than those that were written.
    """
    digests = dict[str, bytes]()
    for name, (shape, kind, _) in tensors.items():
        size = gguf.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor_info(name, size, np.dtype(np.uint8), int(np.prod(size)), raw_dtype=kind)
    with border(f"can't write {path}"):
        try:
            writer.write_header_to_file(path)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, (_, _, make) in tensors.items():
                content = make()
                digests[name] = sha256(np.ascontiguousarray(content).data).digest()
                writer.write_tensor_data(content)
        finally:
            writer.close()
    stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for name in (*tensors, *stored):
        if {*tensors} != {*stored} or sha256(np.ascontiguousarray(stored[name].data).data).digest() != digests[name]:
            raise FedKSeedError(f"{path} was not written as it should: {name} differs; check the disk, and try again")


def write_gguf(
    path: Path, model: nn.Module, tokenizer: Any, kind: str, source: Path | None = None, words: Wording | None = None
) -> None:
    """Write a model as a GGUF file, one tensor in memory at a time.

    Matrices are of the kind that is asked for; vectors are float32, matrices whose rows are no whole blocks float16,
    and those of the vocabulary Q8_0 where the others have 4 bits.

    Args:
        kind: a name of MATRIX_TYPES.
        source: the base model's own GGUF file, if it is one. Tensors that were not tuned stay as they are in it, where
            it is of the same kind.
        words: the wording of tuning, which says what begins and ends turns; None: what the tokenizer says.

    Raises:
        FedKSeedError: the model or its tokenizer can't be written.
    """
    names, parameters = Names.of(model.config), dict(model.named_parameters(remove_duplicate=False))
    writer, (matrices, number) = GGUFWriter(None, names.architecture), MATRIX_TYPES[kind]
    tensors, turns = dict[str, FileTensor](), {} if words is None else _turns(tokenizer, words)

    def add(name: str, value: Tensor) -> None:
        """A tensor of the model, in the file's order and type."""
        kind = _type(name, value.shape, matrices)

        def content() -> NDArray[Any]:
            with np.errstate(over="ignore"):
                quantised = gguf.quantize(_in_order(names, name, value), kind)
            if kind == Type.F16:
                require_finite(np.isfinite(quantised), name, "float16")
            return quantised

        tensors[name] = value.shape, kind, content

    if source is None:
        for name, factors in describe(writer, model, names.architecture).items():
            add(name, factors)
        add_tokenizer(writer, tokenizer, model.config, _message(tokenizer, words))
        for name, parameter in names.names.items():
            add(name, parameters[parameter])
    else:
        reader, template = GGUFReader(source), getattr(tokenizer, "chat_template", None)
        skipped = (*SKIPPED, *turns, *([Keys.Tokenizer.CHAT_TEMPLATE] if isinstance(template, str) else []))
        for name, field in reader.fields.items():
            if not name.startswith(skipped) and (content := field.contents()) not in ([], ""):
                inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
                writer.add_key_value(name, content, field.types[0], inner)
        if isinstance(template, str):
            writer.add_chat_template(template)
        own_kind = reader.fields.get("general.file_type")
        is_same_kind = own_kind is not None and own_kind.contents() == number
        for stored in reader.tensors:
            value = parameters[names.names[stored.name]] if stored.name in names.names else None
            if value is None or (is_same_kind and _is_same(names, stored, value)):
                shape = tuple(map(int, reversed(stored.shape)))
                tensors[stored.name] = shape, stored.tensor_type, partial(np.asarray, stored.data)
            else:
                add(stored.name, value)
    for key, setting in turns.items():
        writer.kv_data[0].pop(key, None)  # the tokenizer's own
        (writer.add_bool if isinstance(setting, bool) else writer.add_uint32)(key, setting)
    written = {id(parameters[names.names[name]]) for name in tensors if name in names.names}
    if absent := [name for name, parameter in parameters.items() if id(parameter) not in written]:
        raise FedKSeedError(f"a GGUF file of this model would lack {absent[0]}; export with --format hf")
    writer.add_file_type(number)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _write_file(path, writer, tensors)


def _message(tokenizer: Any, words: Wording | None) -> str:
    """A message as the model is given it; empty where its wording has no chat template, but words of its own."""
    if not tokenizer.chat_template or (words is not None and words.template != "chat"):
        return ""
    return request(tokenizer, [{"role": USER, "content": "a"}], (words and words.date) or date.today())


def _turns(tokenizer: Any, words: Wording) -> dict[str, Any]:
    """The fields of a file by which llama.cpp begins and ends turns as the wording does.

    It puts the begin of text before what a chat template writes, if its tokenizer does so for any text.
    """
    further = [end for end in words.ends(tokenizer) if end != tokenizer.eos_token_id]
    fields: dict[str, Any] = {Keys.Tokenizer.EOT_ID: further[0]} if further else {}
    if words.template == "chat" and beginning(tokenizer):
        begins = words.prompt(Example("a", ""), tokenizer)[:1] == beginning(tokenizer)[:1]
        fields |= {} if begins else {Keys.Tokenizer.ADD_BOS: False}
    return fields


def write_gguf_lora(path: Path, lora: Lora, config: Any) -> None:
    """Write a LoRA as a GGUF file, for llama.cpp to load beside the base model's.

    Args:
        config: the base model's.

    Raises:
        FedKSeedError: the LoRA has vectors, or a matrix that is used twice: such a file can't hold them.
    """
    # A LoRA of an embedding has the base model's own matrix beside it.
    others = (name for name in lora.tensors if ".lora_" not in name and not name.endswith(".base_layer.weight"))
    if vectors := [*lora.saved, *others]:
        raise FedKSeedError(
            f"{vectors[0]} was tuned, and a LoRA for llama.cpp holds matrices alone: name matrices in [model] tuned, "
            "or export with --format gguf"
        )
    names = Names.of(config)
    paths = {model.removesuffix(".weight"): name for name, model in names.names.items()}
    if config.tie_word_embeddings and any(paths.get(module) in (None, *VOCABULARY) for module in lora.ranks):
        raise FedKSeedError(
            "the embeddings were tuned, which make the logits, too, and llama.cpp adapts only one of the two uses: "
            "leave them out by [model] tuned, or export with --format gguf"
        )
    writer, tensors = GGUFWriter(None, names.architecture), dict[str, FileTensor]()
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 0.0)  # llama.cpp scales by alpha over rank, and by 1 if it is 0
    for module in lora.ranks:
        name, kept = paths[module], f"{PREFIX}{module}.lora_"
        a, b = lora.tensors.get(f"{kept}A.weight"), lora.tensors.get(f"{kept}B.weight")
        if a is None or b is None:  # peft's of an embedding are the other way round: (r × words)
            a, b = lora.tensors[f"{kept}embedding_A"].T, lora.tensors[f"{kept}embedding_B"]
        a, b = a.float().numpy(), b.float().numpy()
        b = b if name in VOCABULARY else b[names.rows(name, len(b))]
        for part, value in (("a", a), ("b", b)):
            tensors[f"{name}.lora_{part}"] = value.shape, Type.F32, partial(np.ascontiguousarray, value)
    _write_file(path, writer, tensors)


def describe(writer: GGUFWriter, model: nn.Module, architecture: str) -> dict[str, Tensor]:
    """Write the fields that describe a model; returns a tensor of factors, if its rotary frequencies are scaled."""
    config: Any = model.config
    heads: int = config.num_attention_heads
    rotary: Any = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    frequencies = rotary.inv_freq.detach().cpu().double().numpy()
    theta, kind = config.rope_parameters["rope_theta"], config.rope_parameters.get("rope_type", "default")
    factors = (theta ** (-np.arange(len(frequencies)) / len(frequencies)) / frequencies).astype(np.float32)
    scaled = not np.allclose(factors, 1, rtol=1e-5, atol=0)  # both are computed in float32 elsewhere
    if kind not in ("default", "linear", "llama3") or (scaled and architecture != "llama"):
        raise FedKSeedError(
            f"rotary positions of the type {kind!r} can't be written as GGUF for a model of the type "
            f"{config.model_type!r}; export with --format hf, and convert the folder with llama.cpp's own program"
        )
    context, window = config.max_position_embeddings, getattr(config, "sliding_window", None)
    name = Path(str(config.name_or_path)).name or config.model_type
    writer.add_name(name.title() if name == "mistral" else name)  # by which transformers takes a Llama for another kind
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(min(context, window or context))  # llama.cpp's of these types has no window
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(2 * len(frequencies))
    writer.add_rope_freq_base(theta)
    return {"rope_freqs.weight": torch.from_numpy(factors)} if scaled else {}


def _type(name: str, shape: Sequence[int], kind: Type) -> Type:
    if len(shape) < 2:
        return Type.F32
    if gguf.GGML_QUANT_SIZES[kind][0] > 1 and shape[-1] % BLOCK:
        return Type.F16
    return Type.Q8_0 if name in VOCABULARY and kind in (Type.Q4_0, Type.Q4_1) else kind


def _in_order(names: Names, name: str, value: Tensor) -> NDArray[np.float32]:
    """A tensor's values in the order of the file."""
    rows = exact(value).float().numpy()
    return rows[names.rows(name, len(rows))] if name in names.names else rows


def _is_same(names: Names, stored: Any, value: Tensor) -> bool:
    """Whether a tensor is as it is stored in the base model's file."""
    there = torch.from_numpy(np.array(gguf.dequantize(stored.data, stored.tensor_type))).to(value.dtype).float().numpy()
    return np.array_equal(there, _in_order(names, stored.name, value))
