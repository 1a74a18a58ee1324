"""A Hugging Face tokenizer as fields of a GGUF file, for llama.cpp's two kinds of byte-pair encoding.

`gpt2` is encoding of bytes, with merges in their order; llama.cpp has the regular expressions that cut a text before it
in its own code, each under a name. `llama` is SentencePiece's, where the token of the highest score is merged first: a
token's score is the negative rank of its merge.
"""

import json
from collections.abc import Mapping
from typing import Any

from gguf import GGUFWriter, TokenType

from ..errors import FedKSeedError

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The steps before byte-pair encoding, and whether a text that is a token is taken without merges, by llama.cpp's name
# (src/llama-vocab.cpp there).
STEPS = {
    "gpt-2": (["bytes, cut"], False),
    "smollm": (["single digits", "bytes, cut"], False),
    "llama-bpe": ([CONTRACTIONS + WORDS + r"\p{N}{1,3}" + REST, "bytes"], True),
    "qwen2": ([CONTRACTIONS + WORDS + r"\p{N}" + REST, "bytes"], False),
}
BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}


def add_tokenizer(writer: GGUFWriter, tokenizer: Any, config: Any) -> None:
    """Write a tokenizer's fields: tokens, merges or scores, special tokens, chat template.

    Args:
        config: the model's; its vocabulary may be larger than the tokenizer's, and special tokens beyond are left out.

    Raises:
        FedKSeedError: llama.cpp has no such tokenizer.
    """
    described = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {"model": {}}
    model, added = described["model"], {token["id"]: token for token in described.get("added_tokens", ())}
    if model.get("type") != "BPE":
        raise FedKSeedError(
            f"a tokenizer of the type {model.get('type', type(tokenizer).__name__)} can't be written as GGUF, only "
            "byte-pair encoding; export with --format hf"
        )
    if model.get("byte_fallback"):
        prefix, unknown = _space_prefix(described), model.get("unk_token")
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(prefix)
    else:
        unknown = None
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_steps(described))
    texts = {number: text for text, number in model["vocab"].items()}
    texts |= {number: token["content"] for number, token in added.items()}
    size = config.vocab_size  # llama.cpp refuses a file with more tokens than rows
    writer.add_token_list([texts.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types([_type(texts.get(number), added.get(number), unknown) for number in range(size)])
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if model.get("byte_fallback"):
        ranks = {"".join(merge): rank for rank, merge in reversed([*enumerate(merges)])}
        writer.add_token_scores([-float(ranks.get(texts.get(number, ""), 0)) for number in range(size)])
    else:
        writer.add_token_merges([" ".join(merge) for merge in merges])
    _add_special(writer, tokenizer, config)


def _type(text: str | None, added: Mapping[str, Any] | None, unknown: str | None) -> TokenType:
    if text is None:
        return TokenType.UNUSED
    if unknown is not None and text == unknown:
        return TokenType.UNKNOWN
    if added is not None:
        return TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    return TokenType.BYTE if unknown is not None and text in BYTE_TOKENS else TokenType.NORMAL


def _steps(described: Mapping[str, Any]) -> str:
    """The name of what happens to a text before its bytes are merged."""
    first = described.get("pre_tokenizer") or {}
    parts = first.get("pretokenizers", [first])
    steps = [_step(part) for part in parts], bool(described["model"].get("ignore_merges"))
    if (name := next((name for name, written in STEPS.items() if written == steps), None)) is not None:
        return name
    raise FedKSeedError(
        f"a tokenizer that cuts texts by {json.dumps(parts)} can't be written as GGUF: llama.cpp's names that are "
        f"known here are {', '.join(STEPS)}; export with --format hf, and convert that with llama.cpp's own program"
    )


def _step(part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    if kind == "ByteLevel" and not part.get("add_prefix_space"):
        return "bytes, cut" if part.get("use_regex", True) else "bytes"
    if kind == "Digits" and part.get("individual_digits"):
        return "single digits"
    if kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        return part["pattern"].get("Regex", "")
    return str(kind)


def _space_prefix(described: Mapping[str, Any]) -> bool:
    """Whether SentencePiece's encoding puts a space before a text; other encodings are refused."""
    cut = described.get("pre_tokenizer") or {}
    steps = (described.get("normalizer") or {}).get("normalizers", [])
    if cut.get("type") == "Metaspace" and not steps and not cut.get("split", True):
        return cut.get("prepend_scheme") != "never"
    replaces = [step for step in steps if step == {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    prepends = [step for step in steps if step == {"type": "Prepend", "prepend": "▁"}]
    if not cut and len(replaces) == 1 and len(replaces) + len(prepends) == len(steps):
        return bool(prepends)
    raise FedKSeedError(
        f"a tokenizer with the steps {json.dumps([*steps, cut])} can't be written as GGUF: it is not as "
        "SentencePiece's; export with --format hf"
    )


def _add_special(writer: GGUFWriter, tokenizer: Any, config: Any) -> None:
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if begin is None:  # llama.cpp would take token 11; GPT-2's way is one token for both
        begin = config.bos_token_id if isinstance(config.bos_token_id, int) else end
    writer.add_bos_token_id(begin)
    writer.add_eos_token_id(end)
    if tokenizer.unk_token_id is not None:
        writer.add_unk_token_id(tokenizer.unk_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    tokens = tokenizer("a").input_ids
    writer.add_add_bos_token(tokens[0] == begin)
    writer.add_add_eos_token(len(tokens) > 1 and tokens[-1] == end)
    if isinstance(template := tokenizer.chat_template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)
