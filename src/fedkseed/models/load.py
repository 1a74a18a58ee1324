"""Loading of causal language models and tokenizers: from a folder, a GGUF file, a package's file, a hub name."""

import ctypes
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from functools import cache
from io import StringIO
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch  # sets an attribute, and puts it back whatever is raised

import gguf
import torch
import transformers
from safetensors import safe_open
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER
from transformers.utils.hub import cached_file

from ..errors import FedKSeedError, first_line, require_choice
from ..files import read_table
from . import gguf_tokenizer, sentencepiece
from .checkpoint import require_decoder, require_dense, require_used, settle_ties, weight_files
from .gguf_config import gguf_config
from .gguf_header import read_once, require_sane
from .place import ModelSource, find, require_there
from .quantised import QUANTISABLE, empty_model, load_gguf, names_in_file, quantise

MOST_LAYERS = 10_000  # the deepest language models have some 130
MOST_MISSING = 2  # times a file's numbers a model may have; with fewer, loading names what is missing
MOST_BUFFERS = 1 << 28  # bytes of tables that a model computes, beyond the size of its files: GPT-2's have 12 MB
MMAP_THRESHOLD, LARGE = -3, 1 << 18  # glibc's number of the setting, and bytes: an activation of 128 tokens has more
STORAGES = ("dense", "as stored", *QUANTISABLE)
# How far other last tokens may move the logits before them, as a share of the logits' spread: those of untrained BERTs
# of 2 and 6 layers move by 0.02 and 0.8, of eight causal families by exactly 0, in float32 and bfloat16.
MOST_MOVED = 0.005
SAMPLED = ("temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")  # an answer
PROBE = " ".join(str(number**5) for number in range(2, 60)) + " Internationalisation of uncharacteristic words"
# White space, signs, forms of letters and scripts, for which tokenizers have rules of their own.
RULED = (
    " two  spaces,\r\n\n\ta 12345 × 0.5; It's ﬁne, we'LL don't x_1 Ａ１ naïve “so” 这是。 これは 시험 هذا 👩\u200d🔬"
)
IF_THERE = {"_raise_exceptions_for_missing_entries": False}  # of a file that a model's folder may lack: None
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@read_once()
def load_model(model: str, dtype: str = "float32", storage: str = "dense", device: str = "cpu") -> nn.Module:
    """Load a model in evaluation mode, its weights in one type, with nothing trainable.

    Args:
        model: see `find`.
        dtype: the type that weights have when they are used.
        storage: the form in which weights are kept: `dense`, in that type; `as stored`, the blocks of a GGUF file,
            memory-mapped; or one of Q8_0, Q4_0 and Q4_1, quantised while the model is loaded. A dense
            model on a CPU is memory-mapped, too, where its file is safetensors in the same type.
        device: as PyTorch names it, or `auto`: a GPU if there is one.

    Raises:
        FedKSeedError: the model can't be found or read, or the type or storage is unknown.
    """
    require_choice("type of weights", dtype, [*DTYPES])
    require_choice("storage of weights", storage, STORAGES)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # by its build
        raise FedKSeedError(f"the device {device!r} can't be used: {first_line(error)}") from error
    if storage != "dense":  # to save memory, which freed activations would take again
        return_large_blocks()
    source = find(model)
    if storage == "as stored" and source.gguf_path is None:
        raise FedKSeedError(f"only a .gguf file can be kept as stored; {model} is none: choose Q8_0, Q4_0 or Q4_1")
    options, config = source.options, _config(source, model)
    require_decoder(config, model)
    with _readable(f"the model {model} can't be loaded", source):
        _require_fits(config, source)
        if storage == "as stored" and source.gguf_path is not None:
            return load_gguf(source.gguf_path, DTYPES[dtype], device, config).requires_grad_(False).eval()
    if source.gguf_path is None:
        require_dense(config, model)
    elif (packing := getattr(transformers, "GgufConfig", None)) is not None:
        # Releases that know it would keep matrices packed where they have a kernel for it, and warn in bfloat16.
        options["quantization_config"] = packing(dequantize=True)
    # What is hidden is a progress bar, which would disturb the caller's own output. Weights in pickles, which can run
    # code when they are read, and code that comes with a model are refused.
    with _readable(f"the model {model} can't be loaded", source), redirect_stderr(StringIO()):
        model_and_report: Any = AutoModelForCausalLM.from_pretrained(
            source.name,
            config=config,
            dtype=DTYPES[dtype],
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused by `require_used`, with their shapes
            trust_remote_code=False,
            use_safetensors=True,
            **options,
        )
    loaded, report = model_and_report
    require_used(loaded, config, report, model)
    # transformers' report has not what these architectures' files have in excess
    if source.gguf_path is not None and not getattr(loaded.__dict__.get("hf_quantizer"), "supported", False):
        names_in_file(loaded, gguf.GGUFReader(str(source.gguf_path)), model)
    settle_ties(loaded)
    if source.gguf_path is not None:  # dequantised on the way in: an ordinary model from here on
        loaded.config.__dict__.pop("quantization_config", None)
        loaded.__dict__.pop("hf_quantizer", None)
        loaded.__dict__["is_quantized"] = False
    # RWKV halves weights in its first pass, and activations with them, against overflow in float16. The logits are the
    # same without; with it the weights would no longer be the file's, and no other party could apply the adapter.
    if getattr(loaded.config, "rescale_every", 0):
        loaded.config.rescale_every = 0
    for parameter in loaded.parameters():  # a GGUF file's transposed matrices come as strided views
        parameter.data = parameter.data.contiguous()
    loaded.requires_grad_(False).eval()
    return loaded.to(device) if storage == "dense" else quantise(loaded, storage, device)


@cache
def return_large_blocks() -> None:
    """Make glibc return each freed block of LARGE bytes or more to the system at once, for the rest of the process.

    It would keep them for later, in pieces that small blocks between them hold: 0.1 GB of a step of SmolLM2-135M
    (benchmarks/results/memory.md). Steps take longer, since the system clears the blocks that it gives anew. Other C
    libraries have no such setting.
    """
    with suppress(AttributeError, OSError, TypeError):  # no such function; no such library; Windows
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE)


@torch.inference_mode()
def require_causal(model: nn.Module, name: str) -> None:
    """Refuse a model whose logits for a token depend on later tokens: it would see the response that it predicts.

    Raises:
        FedKSeedError: changing the last 4 of 8 tokens moves the logits of the others by more than rounding can.
    """
    inner: Any = model
    size = int(inner.get_input_embeddings().weight.shape[0])
    tokens = torch.arange(1, 9).repeat(2, 1) % size
    tokens[1, 4:] = (tokens[0, 4:] + 17) % size
    tokens = tokens.to(next(model.parameters()).device)
    logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits[:, :4].float()
    moved, spread = float((logits[0] - logits[1]).abs().max()), float(logits.std())
    if moved > MOST_MOVED * spread:
        raise FedKSeedError(
            f"the model {name} is not causal: {type(model).__name__} sees the tokens that it should predict (other "
            f"last tokens move the logits before them by {moved:.2g}, of a spread of {spread:.2g}); take a model that "
            "predicts the next token, as Llama or GPT-2"
        )


@read_once()
def load_tokenizer(model: str) -> Any:
    """Load the model's tokenizer; the end-of-text token replaces a padding token that the model lacks.

    Its `model_max_length` is the number of positions that the model's configuration gives, see `positions`.

    A BPE dropout that its file has is left out: the same text is the same tokens each time.

    Raises:
        FedKSeedError: the tokenizer can't be found or read, has no end-of-text token, draws tokens by chance, or has
            tokens that the model has no row for.
    """
    source = require_there(model)
    with _readable(f"the tokenizer of {model} can't be loaded", source):
        gguf_path = source.gguf_path
        tokenizer: Any = gguf_tokenizer.load(gguf_path) if gguf_path else sentencepiece.load(Path(source.name))
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(source.name, trust_remote_code=False, **source.options)
            _cut_as_its_file(tokenizer, cached_file(source.name, "tokenizer.json", **IF_THERE, **source.options))
        words: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        if getattr(words, "dropout", None) is not None:
            words.dropout = None
        cuts = {*map(tuple, tokenizer([PROBE] * 4, add_special_tokens=False, verbose=False).input_ids)}
    config = _config(source, model)
    if tokenizer.eos_token_id is None:
        raise FedKSeedError(f"the tokenizer of {model} has no end-of-text token; responses could not end")
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if tokenizer.pad_token_id is None or (rows is not None and tokenizer.pad_token_id >= rows):
        tokenizer.pad_token = tokenizer.eos_token
    if len(cuts) > 1:
        raise FedKSeedError(
            f"the tokenizer of {model} cuts the same text into other tokens each time; training and answers need the "
            "same ones: set enable_sampling to false in its tokenizer_config.json"
        )
    if rows is not None:
        _require_rows(tokenizer, rows, model)
    tokenizer.rows = rows  # of the embedding: a text may hold a spare token, see `encode_each`
    tokenizer.model_max_length = positions(config) or VERY_LARGE_INTEGER
    # Texts of more tokens are cut or left out by a recipe's rule; transformers would warn of the first one.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _cut_as_its_file(tokenizer: Any, file: str | None) -> None:
    """Let a tokenizer cut texts by the rules in its own `tokenizer.json`, as other programs do.

    transformers 5 takes rules of the class that tokenizer_config.json names: GPT-2's, which keep numbers whole, for
    SmolLM2, whose file cuts them into digits (transformers #45920).

    Args:
        file: None: the tokenizer has no such file.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if file is None or backend is None:
        return
    by_file, beside = Tokenizer.from_file(file), Path(file).with_name("tokenizer_config.json")
    settings = read_table(beside, by_hand=True) if beside.is_file() else {}
    begins = settings.get("add_prefix_space")
    if settings.get("fix_mistral_regex") or (isinstance(begins, bool) and not _begin(by_file, begins)):
        return  # the class obeys settings that change the file's rules
    marks = filter(None, (tokenizer.bos_token, tokenizer.eos_token))
    texts = [RULED, PROBE, *(f"a{mark} b" for mark in marks)]
    ours, theirs = (each.encode_batch(texts, add_special_tokens=False) for each in (backend, by_file))
    if [text.ids for text in ours] != [text.ids for text in theirs]:
        for part in ("normalizer", "pre_tokenizer", "model"):
            setattr(backend, part, getattr(by_file, part))
        backend.decoder = by_file.decoder or backend.decoder
        if not {"add_bos_token", "add_eos_token"} & settings.keys():
            backend.post_processor = by_file.post_processor


def _begin(tokenizer: Tokenizer, begins: bool) -> bool:
    """Let byte-level rules put a space before a text, or none; other rules that do otherwise are as they are.

    Returns:
        Whether all rules do so now.
    """
    state = json.loads(tokenizer.pre_tokenizer.__getstate__()) if tokenizer.pre_tokenizer else {}
    before = json.loads(tokenizer.normalizer.__getstate__()) if tokenizer.normalizer else {}
    parts = [*state.get("pretokenizers", [state]), *before.get("normalizers", [before])]
    # Behind other rules it would begin each of their pieces, as each digit, and not the text alone.
    if (first := parts[0]).get("add_prefix_space", begins) != begins:
        first["add_prefix_space"] = begins
        empty = json.loads(Tokenizer(models.BPE()).to_str())
        tokenizer.pre_tokenizer = Tokenizer.from_str(json.dumps(empty | {"pre_tokenizer": state})).pre_tokenizer
    puts = [part.get("prepend_scheme", "never") != "never" or part.get("type") == "Prepend" for part in parts]
    are_of_words = any("prepend_scheme" in part or part.get("type") == "Prepend" for part in parts)
    return not are_of_words or any(puts) == begins


def _config(source: ModelSource, model: str) -> Any:
    """A model's configuration; that of a GGUF file as its tensors complete it."""
    with _readable(f"the configuration of {model} can't be read", source):
        if source.gguf_path is not None:
            return gguf_config(source.gguf_path)
        file = Path(source.name) / "config.json"
        about = read_table(file, by_hand=True) if file.is_file() else {}
        for table in (about, *(part for part in about.values() if isinstance(part, dict))):
            for key, number in table.items():  # libraries make a list of as many before they look at a weight
                if "layer" in key and isinstance(number, int) and number > MOST_LAYERS:
                    raise FedKSeedError(f"{file}: {key} is {number:,}, at most {MOST_LAYERS:,} go; get the model again")
        return AutoConfig.from_pretrained(source.name, trust_remote_code=False)


def _require_fits(config: Any, source: ModelSource) -> None:
    """Refuse a description of a model that is larger than its files: memory would be taken before a weight is missed.

    Models on the hub are not looked at: their files are not here yet.
    """
    files = [source.gguf_path] if source.gguf_path is not None else weight_files(Path(source.name))
    files = [file for file in files if file.is_file()]
    shapes = list[Sequence[int]]()
    for file in files:
        if source.gguf_path is not None:
            shapes += [tensor.shape.tolist() for tensor in gguf.GGUFReader(str(file)).tensors]
        else:
            with safe_open(file, "np") as tensors:
                shapes += [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118 - no mapping
    text, held, size = config.get_text_config(), sum(map(prod, shapes)), sum(file.stat().st_size for file in files)
    if not files:
        return
    layers = getattr(text, "num_hidden_layers", None) or 0
    if not 0 <= layers <= len(shapes):
        raise FedKSeedError(f"its description has {layers:,} layers, its files {len(shapes):,} tensors")
    empty = empty_model(config, include_buffers=True)
    weights, buffers = sum(p.numel() for p in empty.parameters()), sum(b.nbytes for b in empty.buffers())
    if weights > MOST_MISSING * held or buffers > max(MOST_BUFFERS, size):
        raise FedKSeedError(
            f"its description has {weights:,} weights and {buffers:,} bytes of tables, its files hold {held:,} numbers "
            f"in {size:,} bytes; get the whole model"
        )


def skeleton(model: str) -> Any:
    """A model by its configuration alone, without memory for its weights; see `load_model`."""
    return empty_model(_config(find(model), model))


def save_model(model: Any, folder: Path) -> None:
    """Write a model, or its adapters of `peft`, with its configuration and its settings of generation.

    Settings that a greedy answer does not use are left out: transformers refuses to save them beside it.
    """
    settings = getattr(model, "generation_config", None)
    for name in SAMPLED if settings is not None and settings.do_sample is not True else ():
        if hasattr(settings, name):
            setattr(settings, name, None)
    model.save_pretrained(folder)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the files of a tokenizer from `load_tokenizer`, with the limit of tokens that its own files gave."""
    limit = tokenizer.init_kwargs.get("model_max_length", VERY_LARGE_INTEGER)
    with patch.object(tokenizer, "model_max_length", limit):
        tokenizer.save_pretrained(folder)


def positions(config: Any) -> int | None:
    """The number of tokens that a model of a configuration takes at most.

    None: it has no limit of its own, as those with ALiBi or a recurrent state.
    """
    text = config.get_text_config()
    # n_positions, max_seq_len and their like are transformers' other names of it; XLNet's is −1
    count, rope = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None) or {}
    if text.model_type == "rwkv" or getattr(text, "alibi", False) or (count is not None and count < 1):
        return None
    if count is not None and rope.get("rope_type") in ("dynamic", "longrope"):
        # Beyond the original length these scale by the longest text of a batch: a loss depended on the rows beside.
        return min(count, rope.get("original_max_position_embeddings") or count)
    if count is not None and rope.get("rope_type") == "yarn":  # `count` may be that without scaling
        return max(count, int(rope.get("factor", 1) * rope.get("original_max_position_embeddings", count)))
    return count


def _require_rows(tokenizer: Any, rows: int, model: str) -> None:
    """Refuse tokens beyond a model's embedding, but special ones that no text of ours has, as those of images."""
    template = str(tokenizer.chat_template or "")
    used = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    spare = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special} - used
    beyond = {number: text for text, number in tokenizer.get_vocab().items() if number >= rows}
    if needed := sorted(number for number, text in beyond.items() if text not in spare or text in template):
        raise FedKSeedError(
            f"{model}: the tokenizer has {max(beyond) + 1:,} tokens, the model {rows:,} rows, and none for "
            f"{beyond[needed[0]]!r}; resize the model's embeddings and tune them, or take the model's own tokenizer"
        )


@contextmanager
def _readable(what: str, source: ModelSource) -> Iterator[None]:
    """Turn an error of the libraries that read models into a FedKSeedError whose text begins with `what`.

    For damaged files they raise nearly every kind of exception, OverflowError and AssertionError among them.
    """
    try:
        if source.gguf_path is not None:
            require_sane(source.gguf_path)
        yield
    except Exception as error:
        raise FedKSeedError(f"{what}: {first_line(error)}") from error
