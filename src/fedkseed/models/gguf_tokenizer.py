"""Tokenizers as fields of a GGUF file, for llama.cpp's two kinds of byte-pair encoding, and as read from them.

`gpt2` is encoding of bytes, with merges in their order; llama.cpp has the regular expressions that cut a text before it
in its own code, each under a name. `llama` is SentencePiece's, where the token of the highest score is merged first: a
token's score is the negative rank of its merge.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from warnings import warn

import gguf
from gguf import GGUFWriter, TokenType
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from ..errors import FedKSeedError
from . import sentencepiece

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS, LETTERS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|", r"[^\r\n\p{L}\p{N}]?"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = CONTRACTIONS + WORDS + r"\p{N}{1,3}" + REST
SMALL, LARGE = r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
SMALL_WORD, LARGE_WORD = f"{LETTERS}[{LARGE}]*[{SMALL}]+", f"{LETTERS}[{LARGE}]+[{SMALL}]*"
REST_OF_PATHS = REST.replace(r"[\r\n]*", r"[\r\n/]*")
SIGNS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
NO_PUNCTUATION = r" ?[^(\s|.,!?…。，、।۔،)]+"


class Cuts(NamedTuple):
    """The steps before byte-pair encoding.

    Attributes:
        expressions: the places where a text, and then each part, is cut: around what matches.
        whole: whether a part that is a token is taken without merges.
        begins: whether a token begins a text, where the file does not say it.
        alike: further names of the same steps.
    """

    expressions: Sequence[str]
    whole: bool = False
    begins: bool = False
    alike: str = ""


# By llama.cpp's name (src/llama-vocab.cpp there); where llama.cpp has an expression of the model's own tokenizer in
# another form, it is the model's own. Of equal ones the first is written.
CUTS = {
    "gpt-2": Cuts([GPT_2], alike="phi-2 mpt olmo jais trillion gigachat a.x-4.0 mellum exaone4 granite-docling"),
    "smollm": Cuts([r"\p{N}", GPT_2], alike="starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    "llama-bpe": Cuts(
        [LLAMA_3], whole=True, begins=True, alike="llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
    ),
    "dbrx": Cuts([LLAMA_3], alike="smaug-bpe glm4 chatglm-bpe"),
    "qwen2": Cuts(
        [CONTRACTIONS + WORDS + r"\p{N}" + REST],
        alike="deepseek-r1-qwen stablelm2 hunyuan megrez kormo f2llmv2 solar-open grok-2",
    ),
    "qwen35": Cuts(
        [CONTRACTIONS + f"|{LETTERS}" + r"[\p{L}\p{M}]+|\p{N}" + REST.replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")]
    ),
    "tekken": Cuts([rf"{SMALL_WORD}|{LARGE_WORD}|\p{{N}}{REST_OF_PATHS}"], whole=True, begins=True),
    "gpt-4o": Cuts(
        [rf"{SMALL_WORD}{CONTRACTIONS}?|{LARGE_WORD}{CONTRACTIONS}?|\p{{N}}{{1,3}}{REST_OF_PATHS}"],
        alike="llama4 kanana2 talkie minimax-m2",
    ),
    "deepseek-v3": Cuts(
        [
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            SIGNS + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        alike="hunyuan-dense joyai-llm hy_v4",
    ),
    "deepseek-coder": Cuts([r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"]),
    "falcon": Cuts([r"[\p{P}$+<=>^~|`]+", GPT_2, "[0-9][0-9][0-9]"]),
    "bloom": Cuts([NO_PUNCTUATION], alike="poro-chat gpt3-finnish"),
    "viking": Cuts([NO_PUNCTUATION, r"\p{N}"]),
    "default": Cuts([r"[\p{P}$+<=>^~|]+", GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"]),  # of files without a name
}
BY_NAME = {name: cuts for first, cuts in CUTS.items() for name in (first, *cuts.alike.split())}
ENDS = {"unk": "unknown", "bos": "bos", "eos": "eos", "pad": "padding"}  # special tokens, and their names in GGUF
BYTES = "bytes"  # a step that writes bytes as letters
BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}


def load(path: Path) -> Any | None:
    """The tokenizer of a file, as llama.cpp cuts texts; None: it is neither of bytes with merges nor of scored pieces.

    transformers cuts texts as GPT-2 does where it does not know the name, and cuts special tokens of other letters than
    the alphabet of bytes, as DeepSeek's.

    Raises:
        FedKSeedError: the name of how texts are cut is not known here, two tokens are alike, or a merge is of none.
    """
    fields = gguf.GGUFReader(str(path)).fields

    def field(name: str, default: Any, begin: str = "tokenizer.ggml.") -> Any:
        return fields[begin + name].contents() if begin + name in fields else default

    way, texts = field("model", ""), [text or f"[EMPTY_{n}]" for n, text in enumerate(field("tokens", []))]
    if len({*texts}) < len(texts):
        raise FedKSeedError(f"two tokens of its vocabulary are {Counter(texts).most_common(1)[0][0]!r}")
    kinds = field("token_type", None) or [TokenType.NORMAL] * len(texts)
    numbers = {f"{name}_token": field(f"{long}_token_id", None) for name, long in ENDS.items()}
    special = {name: texts[n] for name, n in numbers.items() if n is not None and 0 <= n < len(texts)}
    if way == "llama" and (scores := field("scores", None)) is not None:
        prefix, begins = bool(field("add_space_prefix", True)), True
        backend = sentencepiece.of_gguf(texts, kinds, scores, special.get("unk_token"), prefix)
    elif way == "gpt2" and (merges := field("merges", None)) is not None:
        if (cuts := BY_NAME.get(name := field("pre", "") or "default")) is None:
            raise FedKSeedError(
                f"its tokenizer cuts texts as llama.cpp's {name!r} (tokenizer.ggml.pre), which is not known here; take "
                f"the model's folder of safetensors. Known are {', '.join(BY_NAME)}"
            )
        if not field("pre", ""):
            warn(
                f"{path} does not say how its tokenizer cuts texts (tokenizer.ggml.pre): they are cut as llama.cpp "
                "does then, perhaps unlike in the model's training; a file made by a newer llama.cpp says it",
                stacklevel=2,
            )
        backend, begins = _of_bytes(texts, merges, cuts), cuts.begins
    else:
        return None
    is_phi = any(name in field("name", "", "general.").lower() for name in ("phi-3", "phi3"))  # so says llama.cpp
    sentencepiece.add_whole(backend, texts, kinds, strips=is_phi)
    sentencepiece.add_ends(backend, special, field("add_bos_token", begins), field("add_eos_token", False))
    templates = {"chat_template": field("chat_template", None, "tokenizer.")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special, **templates)


def _of_bytes(texts: Sequence[str], merges: Sequence[str], cuts: Cuts) -> Tokenizer:
    """Byte-level encoding by a file's merges, each of two tokens with a space between them, which make a third."""
    vocabulary = {text: n for n, text in enumerate(texts)}
    pairs = [(merge[:at], merge[at + 1 :]) for merge in merges for at in [merge.find(" ", 1)]]
    for first, second in pairs:  # the library would end in a panic
        if not {first, second, first + second} <= vocabulary.keys():
            raise FedKSeedError(
                f"its merge {first!r}, {second!r} is not of tokens of its vocabulary; get the file again"
            )
    backend = Tokenizer(BPE(vocabulary, pairs, ignore_merges=cuts.whole))
    split = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in cuts.expressions]
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence([*split, of_bytes]), decoders.ByteLevel()
    return backend


def add_tokenizer(writer: GGUFWriter, tokenizer: Any, config: Any, text: str = "") -> None:
    """Write a tokenizer's fields: tokens, merges or scores, special tokens, chat template.

    Args:
        config: the model's; its vocabulary may be larger than the tokenizer's, and special tokens beyond are left out.
        text: one as the model will mostly be given, which may begin with a special token.

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
        prefix = _space_prefix(described, text.startswith(tuple(tokenizer.get_added_vocab())))
        unknown = model.get("unk_token")
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(prefix)
    else:
        unknown = None
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_name_of_cuts(described))
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


def _name_of_cuts(described: Mapping[str, Any]) -> str:
    """The name of what happens to a text before its bytes are merged.

    That llama.cpp does not compose letters, as Qwen's tokenizer does (NFC), is let be: its makers' files do the same.
    """
    letters = described.get("normalizer") or {"type": "Sequence", "normalizers": []}
    if others := {step["type"] for step in letters.get("normalizers", [letters])} - {"NFC"}:
        raise FedKSeedError(
            f"a tokenizer that changes letters ({min(others)}) can't be written as GGUF; export with --format hf"
        )
    first = described.get("pre_tokenizer") or {}
    parts = first.get("pretokenizers", [first])
    steps = [step for part in parts for step in _steps(part)]
    *expressions, last = steps or [""]
    whole = bool(described["model"].get("ignore_merges"))
    for name, cuts in CUTS.items():
        if last == BYTES and (expressions, whole) == (cuts.expressions, cuts.whole):
            return name
    raise FedKSeedError(
        f"a tokenizer that cuts texts by {json.dumps(parts)} can't be written as GGUF: llama.cpp's names that are "
        f"known here are {', '.join(CUTS)}; export with --format hf, and convert that with llama.cpp's own program"
    )


def _steps(part: Mapping[str, Any]) -> list[str]:
    """The expressions around whose matches a step cuts a text, and `BYTES` where it writes bytes."""
    kind = part.get("type")
    if kind == "ByteLevel" and not part.get("add_prefix_space"):
        return [*([GPT_2] if part.get("use_regex", True) else []), BYTES]
    if kind == "Digits" and part.get("individual_digits"):
        return [r"\p{N}"]
    if kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        return [part["pattern"].get("Regex", "").replace("\r", r"\r").replace("\n", r"\n")]
    return [str(kind)]


def _space_prefix(described: Mapping[str, Any], special_first: bool) -> bool:
    """Whether SentencePiece's encoding puts a space before a text; other encodings are refused.

    llama.cpp puts one behind each special token, too. An encoding that puts one before a text alone, and not behind
    special tokens, puts none into a text that begins with one.
    """
    cut = described.get("pre_tokenizer") or {}
    steps = (described.get("normalizer") or {}).get("normalizers", [])
    if cut.get("type") == "Metaspace" and not steps and not cut.get("split", True):
        scheme = cut.get("prepend_scheme", "always")
        return scheme == "always" or (scheme == "first" and not special_first)
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
