"""Models as they are published: a file of SentencePiece's, and folders in the layout of open_llama_3b."""

import json
import struct
from pathlib import Path

import torch
from torch import Tensor

# Pieces; each letter of one is a piece, too, as in the files that SentencePiece writes.
WORDS = (
    "▁", "e", "a", "t", "o", "n", "s", "w", "g", "l", "h", "r", "▁t", "▁a", "at", "he", "▁the", "an", "▁an", "▁w",
    "▁wo", "eg", "▁leg", "▁l", "le", "leg", "legs", "▁legs", "as", "has", "▁h", "▁has", "es", "ow", "er", "▁▁",
)  # fmt: skip
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def field(number: int, content: int | bytes | float) -> bytes:
    """A field of a message of protobuf."""
    if isinstance(content, float):
        return variable(number << 3 | 5) + struct.pack("<f", content)
    if isinstance(content, int):
        return variable(number << 3) + variable(content % (1 << 64))
    return variable(number << 3 | 2) + variable(len(content)) + content


def variable(number: int) -> bytes:
    low, high = number & 127, number >> 7
    return bytes([low | 128]) + variable(high) if high else bytes([low])


def sentencepiece_file(kind: int = 2, prefix: bool = True, spare: bool = True, begin: int = 1, user: str = "") -> bytes:
    """A model of SentencePiece's with the pieces of WORDS, and a piece for each byte."""
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *((text, 0.0, 6) for text in BYTES)]
    pieces += [(text, -float(rank), 1) for rank, text in enumerate(sorted(WORDS, key=lambda text: -len(text)))]
    pieces += [(user, 0.0, 4)] * bool(user)
    rows = [field(1, field(1, t.encode()) + field(2, score) + field(3, number)) for t, score, number in pieces]
    trainer = field(3, kind) + field(35, 1) + field(40, 0) + field(41, begin) + field(42, 2) + field(43, -1)
    rules = field(1, b"identity") + field(3, int(prefix)) + field(4, int(spare)) + field(5, 1)
    return b"".join(rows) + field(2, trainer) + field(3, rules)


SIZE = 3 + len(BYTES) + len(WORDS)
SPECIAL = {"__type": "AddedToken", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
TOKENIZER = {
    "add_bos_token": True, "add_eos_token": False, "model_max_length": 2048, "pad_token": None, "sp_model_kwargs": {},
    "tokenizer_class": "LlamaTokenizer", "clean_up_tokenization_spaces": False,
    "bos_token": SPECIAL | {"content": "<s>"}, "eos_token": SPECIAL | {"content": "</s>"},
    "unk_token": SPECIAL | {"content": "<unk>"},
}  # fmt: skip
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 48, "max_position_embeddings": 2048,
    "model_type": "llama", "num_attention_heads": 2, "num_hidden_layers": 2, "pad_token_id": 0, "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.30.0.dev0", "use_cache": True,
    "vocab_size": SIZE,
}  # fmt: skip


def weights(tied: bool = False) -> dict[str, Tensor]:
    """The tensors of such a model in the order and the types of its file, with the tables that were stored then."""
    rng, width, inner = torch.Generator().manual_seed(1), 32, 48

    def drawn(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=rng) / width**0.5).half()

    made = {"model.embed_tokens.weight": drawn(SIZE, width)}
    for layer in range(2):
        begin = f"model.layers.{layer}."
        made |= {f"{begin}self_attn.{part}_proj.weight": drawn(width, width) for part in "qkvo"}
        made[f"{begin}self_attn.rotary_emb.inv_freq"] = 1e-4 ** (torch.arange(0, 16, 2) / 16)
        made |= {f"{begin}mlp.{part}_proj.weight": drawn(inner, width) for part in ("gate", "up")}
        made[f"{begin}mlp.down_proj.weight"] = drawn(width, inner)
        made |= {f"{begin}{part}_layernorm.weight": drawn(width) + 1 for part in ("input", "post_attention")}
    made["model.norm.weight"] = drawn(width) + 1
    made["lm_head.weight"] = made["model.embed_tokens.weight"] if tied else drawn(SIZE, width)
    return made


def publish(folder: Path, shards: int = 1, tied: bool = False) -> Path:
    """A folder as open_llama_3b's: pickles, `tokenizer.model`, no safetensors."""
    folder.mkdir()
    tensors = weights(tied)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": tied}))
    (folder / "generation_config.json").write_text('{"_from_model_config": true, "bos_token_id": 1, "eos_token_id": 2}')
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(sentencepiece_file())
    (folder / "README.md").write_text("# OpenLLaMA\n")
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    names, places = [*tensors], dict[str, str]()
    for k in range(shards):
        file = f"pytorch_model-{k + 1:05}-of-{shards:05}.bin"
        part = names[k * len(names) // shards : (k + 1) * len(names) // shards]
        torch.save({name: tensors[name] for name in part}, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder
