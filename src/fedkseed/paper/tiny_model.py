"""A Llama-type model of 0.14 million weights, made without a download, to try experiments in minutes."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..data.sources import read
from ..files import folder as new_folder
from ..run.workers import computing_with

VOCABULARY, HIDDEN, CONTEXT = 1024, 64, 512
STEPS, BATCH, TOKENS, LR = 200, 16, 96, 3e-3  # its pretraining takes eight seconds on one core, loss 6.9 to 4.9


def make(folder: Path) -> Path:
    """Write the model as a Hugging Face folder, unless it exists; the same PyTorch makes the same bits.

    The model is pretrained on the passages of Dolly's sample, without the instructions. Then its logits are doubled,
    which makes it too confident: less confidence is learned first, and a few dozen forward-only steps can show that on
    any task.
    """
    if folder.is_dir():
        return folder
    words, network = tokenizer(), model()
    with computing_with(1):  # sums of several threads differ in their last bits
        pretrain(network, words)
    with new_folder(folder, 0o777) as part:
        words.save_pretrained(part)
        network.save_pretrained(part)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained on the sample of Dolly."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options: Any = {"special_tokens": ["<end>"], "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, **options)
    words.train_from_iterator([f"{e.instruction} {e.context} {e.response}" for e in read("dolly-sample")], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")  # noqa: S106 — a token, no password


def model() -> LlamaForCausalLM:
    """The model with random weights, drawn without a change of PyTorch's global generator."""
    sizes: Any = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN}
    layers: Any = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens: Any = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    config = LlamaConfig(**sizes, **layers, **tokens, max_position_embeddings=CONTEXT, tie_word_embeddings=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).requires_grad_(False).eval()


def pretrain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Train the model in place, by next-token prediction on running text."""
    texts = (e.context for e in read("dolly-sample") if e.context)
    tokens = torch.tensor([t for text in texts for t in (*tokenizer(text).input_ids, tokenizer.eos_token_id)])
    rng = np.random.default_rng(0)
    optimiser = torch.optim.AdamW(model.requires_grad_(True).parameters(), lr=LR)
    for _ in range(STEPS):
        begins = torch.from_numpy(rng.integers(0, len(tokens) - TOKENS, BATCH))
        batch = tokens[begins[:, None] + torch.arange(TOKENS)]  # (BATCH, TOKENS)
        loss = cross_entropy(model(input_ids=batch).logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.requires_grad_(False)
    model.model.norm.weight.data.mul_(2)
