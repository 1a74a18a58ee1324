"""A Llama-type model of 0.2 million weights that is made, not downloaded: for trying experiments out in minutes."""

import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..data.sources import read
from ..files import border

VOCABULARY, HIDDEN, CONTEXT = 1024, 64, 512


def make(folder: Path) -> Path:
    """Write the model as a Hugging Face folder, once; the same bits whenever one PyTorch makes it.

    Its weights are random, but for the end of text being known: there is nothing to learn from it about language.
    """
    if folder.is_dir():
        return folder
    part = folder.with_name(f".{folder.name}.part")
    with border(f"can't write {folder}"):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        tokenizer().save_pretrained(part)
        model().save_pretrained(part)
        part.rename(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on the sample of Dolly."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    made.train_from_iterator([f"{e.instruction} {e.context} {e.response}" for e in read("dolly-sample")], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")  # noqa: S106


def model() -> LlamaForCausalLM:
    """Random weights, drawn without touching PyTorch's own generator."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).requires_grad_(False).eval()
