"""Tokenizers in GGUF files: llama.cpp cuts texts into the tokens into which our tokenizer cuts them."""

import json

import pytest
import torch
from gguf import GGUFReader
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fedkseed import FedKSeedError
from fedkseed.data.sources import read
from fedkseed.models.gguf_tokenizer import BYTE_TOKENS, CONTRACTIONS, REST, WORDS
from fedkseed.models.load import load_tokenizer
from fedkseed.tuned.gguf import write_gguf

from .llama_cpp import LlamaCpp

TEXTS = [
    "How many legs has an ant? It's 6, they'LL say; we'd 12345 67.",
    "  two  spaces\n\n\nlines\t\ttabs \n  end ",
    "naïve café — “quotes” … 東京 Ελλάδα привет 👩‍🚀 e\u0301",
    "x=[1,2];\r\nprint('a'*10)//ok",
    "",
    " ",
]
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
CUT = pre_tokenizers.ByteLevel(add_prefix_space=False)
WAYS = {
    "gpt-2": CUT,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), CUT]),
    "llama-bpe": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(CONTRACTIONS + WORDS + r"\p{N}{1,3}" + REST), "isolated"), BYTES]
    ),
    "qwen2": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(CONTRACTIONS + WORDS + r"\p{N}" + REST), "isolated"), BYTES]
    ),
}


def texts() -> list[str]:
    return [f"{e.instruction} {e.response}" for e in read("dolly-sample")[:300]]


def of_bytes(way: pre_tokenizers.PreTokenizer, ignore_merges: bool = False) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    made.pre_tokenizer, made.decoder = way, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<begin>", "<end>"],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    made.train_from_iterator(texts(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<begin>", eos_token="<end>")


def of_pieces(prepends: bool) -> PreTrainedTokenizerFast:
    """A tokenizer as those of Llama 2 are: pieces of text with their merges, and a token for each byte."""
    steps = [normalizers.Prepend("▁")] * prepends + [normalizers.Replace(" ", "▁")]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence(steps)
    trained.train_from_iterator(
        texts(), trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    words = ["<unk>", "<s>", "</s>", *sorted(BYTE_TOKENS)]
    words += [word for word, _ in sorted(model["vocab"].items(), key=lambda pair: pair[1]) if word not in words]
    made = Tokenizer(
        models.BPE(
            {word: number for number, word in enumerate(words)},
            [tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    made.normalizer = normalizers.Sequence(steps)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def model_for(tokenizer) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 3,  # some models have rows for words that there are not
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).requires_grad_(False).eval()


@pytest.mark.parametrize("name", WAYS)
def test_bytes_are_cut_and_merged_as_here(name, tmp_path):
    tokenizer = of_bytes(WAYS[name], name == "llama-bpe")
    write_gguf(tmp_path / "a.gguf", model_for(tokenizer), tokenizer, "f16")
    assert GGUFReader(tmp_path / "a.gguf").fields["tokenizer.ggml.pre"].contents() == name
    there = LlamaCpp(tmp_path / "a.gguf")
    for text in [*TEXTS, *texts()[:40]]:
        assert there.tokens(text) == tokenizer(text).input_ids, text


@pytest.mark.parametrize("prepends", [True, False])
def test_pieces_are_merged_as_here_and_the_beginning_is_added(prepends, tmp_path):
    tokenizer = of_pieces(prepends)
    write_gguf(tmp_path / "a.gguf", model_for(tokenizer), tokenizer, "f16")
    there = LlamaCpp(tmp_path / "a.gguf")
    for text in [*TEXTS[:-2], *texts()[:40]]:
        assert there.tokens(text) == tokenizer(text).input_ids, text


@pytest.mark.parametrize("prepends", [True, False])
def test_pieces_of_a_file_cut_texts_as_llama_cpp_does_behind_special_tokens_too(prepends, tmp_path):
    """The files of Llama 2, TinyLlama and Vicuna."""
    tokenizer = of_pieces(prepends)
    write_gguf(tmp_path / "a.gguf", model_for(tokenizer), tokenizer, "f16")
    there, here = LlamaCpp(tmp_path / "a.gguf"), load_tokenizer(str(tmp_path / "a.gguf"))
    assert (here.bos_token, here.eos_token, here.unk_token) == ("<s>", "</s>", "<unk>")
    for text in [*TEXTS, *texts()[:40], "one</s>two", "</s><s> three </s>\nfour", "5</s></s> 6"]:
        assert here(text).input_ids == there.tokens(text), text
        words = here(text, add_special_tokens=False).input_ids
        assert here.decode(words).strip(" ") == text.strip(" ") or "</s>" in text


def test_what_llama_cpp_would_cut_otherwise_is_refused(tmp_path):
    for way, match in (
        (pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), BYTES]), r'"Whitespace".* gpt-2, smollm, llama-bpe'),
        (WAYS["llama-bpe"], "Split"),  # without ignore_merges
    ):
        tokenizer = of_bytes(way)
        with pytest.raises(FedKSeedError, match=match):
            write_gguf(tmp_path / "a.gguf", model_for(tokenizer), tokenizer, "f16")
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("</s>", 0.0)], 0))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=unigram, eos_token="</s>", bos_token="</s>")
    with pytest.raises(FedKSeedError, match="type Unigram can't be written"):
        write_gguf(tmp_path / "a.gguf", model_for(tokenizer), tokenizer, "f16")
