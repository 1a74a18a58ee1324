"""Tokenizers of Llama's kind in SentencePiece's file `tokenizer.model`, or of a GGUF file, without that package.

transformers 5 needs that package and a protobuf that fits it (0.2.3 refuses protobuf 6, which Flower takes), and leaves
out the file's normalisation, so that OpenLLaMA's texts get other tokens. The numbers of fields below are those of
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto.
"""

import json
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from ..data.parquet import varint
from ..errors import FedKSeedError
from ..files import read_table, read_whole

FILE, SETTINGS = "tokenizer.model", "tokenizer_config.json"
OTHERS = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
CLASSES = (None, "LlamaTokenizer", "LlamaTokenizerFast")  # whose tokens have the numbers of the file's pieces
MOST, LONGEST = 1 << 23, 256  # bytes, and letters of a piece; the file of 256,000 pieces has 4 MB, spaces have 16
NORMAL, CONTROL, USER, BYTE = 1, 3, 4, 6  # kinds of pieces
KEEPING = {"<unk>", "<s>", "<|endoftext|>"}  # of Phi-3's special tokens, those that leave white space behind them
BYTE_PAIRS = 2  # kind of a model


def load(folder: Path) -> Any | None:
    """The tokenizer of a folder, loaded by transformers from a `tokenizer.json` that is made; None: it is of others.

    Raises:
        FedKSeedError: the file is damaged, or has unigrams or pieces of a user's, which Llama's kind has not.
    """
    about = read_table(folder / SETTINGS, by_hand=True) if (folder / SETTINGS).is_file() else {}
    there = (folder / FILE).is_file() and not (folder / "tokenizer.json").exists()
    if not there or about.get("tokenizer_class") not in CLASSES:
        return None
    backend, special = _backend(read_whole(folder / FILE, MOST, str(folder / FILE)), about)
    with TemporaryDirectory() as place:
        for name in filter(lambda name: (folder / name).is_file(), OTHERS):
            shutil.copy(folder / name, place)
        backend.save(f"{place}/tokenizer.json")
        settings = {**special, **about, "tokenizer_class": "PreTrainedTokenizerFast"}
        (Path(place) / SETTINGS).write_text(json.dumps(settings))
        return PreTrainedTokenizerFast.from_pretrained(place)


def _backend(content: bytes, about: dict[str, Any]) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer that a file describes, and the texts of its special tokens."""
    whole = _message(content)
    pieces = [_message(piece) for piece in whole[1]]
    trainer, rules = (_message(b"".join(whole.get(number, ()))) for number in (2, 3))
    texts, kinds = [piece[1][-1].decode() for piece in pieces], [_last(piece, 3, NORMAL) for piece in pieces]
    if _last(trainer, 3, 1) != BYTE_PAIRS or USER in kinds:
        raise FedKSeedError(f"{FILE} is not of Llama's kind (byte pairs, no pieces of a user's); add a tokenizer.json")
    scores = [struct.unpack("<f", piece[2][-1])[0] for piece in pieces]
    fields = {"unk_token": (40, 0), "bos_token": (41, 1), "eos_token": (42, 2)}  # −1, as unsigned: none
    special = {name: texts[n] for name, field in fields.items() if (n := _last(trainer, *field)) < len(texts)}
    backend = _pairs(texts, kinds, scores, special.get("unk_token"), bool(_last(trainer, 35, 0)))
    add_whole(backend, texts, kinds)
    steps: list[Any] = [normalizers.Precompiled(letters) for letters in rules.get(2, ()) if letters]
    if _last(rules, 4, 1):  # spare spaces go; other white space stays
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    prefix, everywhere = bool(_last(rules, 3, 1)), about.get("legacy") is not False  # or not behind special tokens
    _write_spaces(backend, steps, prefix, everywhere)
    add_ends(backend, special, about.get("add_bos_token", True), about.get("add_eos_token", False))
    return backend, special


def of_gguf(
    texts: Sequence[str], kinds: Sequence[int], scores: Sequence[float], unknown: str | None, prefix: bool
) -> Tokenizer:
    """The tokenizer of a GGUF file's pieces, as llama.cpp cuts texts; `prefix`: with a space before a text.

    transformers takes no notice of `add_space_prefix`, and puts no space behind special tokens, as llama.cpp does.
    """
    backend = _pairs(texts, kinds, scores, unknown, BYTE in kinds)
    _write_spaces(backend, [], prefix, everywhere=True)
    return backend


def _pairs(
    texts: Sequence[str], kinds: Sequence[int], scores: Sequence[float], unknown: str | None, falls_back: bool
) -> Tokenizer:
    """Byte pairs of pieces, of which the one with the highest score is merged first.

    Raises:
        FedKSeedError: a piece is longer than LONGEST letters.
    """
    if (longest := max(map(len, texts))) > LONGEST:
        raise FedKSeedError(f"a piece of its tokenizer has {longest:,} letters, at most {LONGEST} go")
    ranks = {text: -score for text, kind, score in zip(texts, kinds, scores, strict=True) if kind == NORMAL}
    cuts = ((rank, text[:k], text[k:]) for text, rank in ranks.items() for k in range(1, len(text)))
    merges = [cut[1:] for cut in sorted(cut for cut in cuts if cut[1] in ranks and cut[2] in ranks)]
    vocabulary = {text: n for n, text in enumerate(texts)}
    return Tokenizer(BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=falls_back))


def add_whole(backend: Tokenizer, texts: Sequence[str], kinds: Sequence[int], strips: bool = False) -> None:
    """Make tokens that texts hold as they are, the special ones and a user's, added tokens.

    Args:
        strips: whether white space behind them is left out, but for KEEPING.
    """
    for add, kind in ((backend.add_special_tokens, CONTROL), (backend.add_tokens, USER)):
        whole = [text for text, k in zip(texts, kinds, strict=True) if k == kind]
        add([AddedToken(text, normalized=False, rstrip=strips and text not in KEEPING) for text in whole])


def _write_spaces(backend: Tokenizer, steps: Sequence[Any], prefix: bool, everywhere: bool) -> None:
    """Write spaces as ▁, with one before a text; `everywhere`: before what follows a special token, too."""
    before = [normalizers.Prepend("▁")] * (prefix and everywhere)
    backend.normalizer = normalizers.Sequence([*steps, *before, normalizers.Replace(" ", "▁")])
    if prefix and not everywhere:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts + [decoders.Strip(" ", 1, 0)] * prefix)


def add_ends(backend: Tokenizer, special: Mapping[str, str], begins: bool, ends: bool) -> None:
    """Put the token that begins a text before it, and the one that ends it behind, where there are such."""
    adds = {"bos_token": begins, "eos_token": ends}
    # llama.cpp's converter knows the pieces by the tokens' texts; a template of the library can't have some of them
    names = {name: text if name in special and not {":", "$"} & {*(text := special[name])} else name for name in adds}
    begin, end = ([names[name]] if wanted and name in special else [] for name, wanted in adds.items())
    tokens = [(names[name], special[name]) for name in adds if names[name] in (*begin, *end)]
    pieces: Any = [{"id": name, "ids": [backend.token_to_id(text)], "tokens": [text]} for name, text in tokens]
    backend.post_processor = processors.TemplateProcessing([*begin, "$A", *end], special_tokens=pieces)


def _last(message: dict[int, list[Any]], field: int, default: int) -> int:
    return message.get(field, [default])[-1]


def _message(content: bytes) -> dict[int, list[Any]]:
    """The fields of a message of protobuf: numbers of variable length as they are, others as bytes."""
    fields, at = dict[int, list[Any]](), 0
    while at < len(content):
        key, at = varint(content, at)
        if (kind := key & 7) == 0:
            read, at = varint(content, at)
        else:
            size, at = varint(content, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            read, at = content[at : at + size], at + size
        fields.setdefault(key >> 3, []).append(read)
    if at > len(content):
        raise FedKSeedError("it ends in the middle of a field; get it again")
    return fields
