"""Tiny models, each with a property of some public model that was reported as a trap; random, 2 layers of width 64."""

import gzip
import json
import warnings
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AddedToken, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

RECIPE = """
seed = 1
[model]
name = {model}
[data]
source = {data}
held_out = 0.2
max_tokens = 256
[clients]
split = "even"
count = 2
cohort = 2
min_examples = 1
[directions]
size = 64
[training]
algorithm = "fedkseed-backprop"
rounds = 2
steps = 3
batch_size = 4
[derivatives]
lr = 1e-3
[evaluation]
examples = "all"
"""

# Templates of our own with the structure of the families named.
# A turn ends with another token than the end of text: Gemma's way.
TURN = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}</turn>\n{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
MESSAGES = (
    "{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
# Today's date is in the prompt: the way of Llama 3.2 and Mistral Small.
DATED = "{{ bos_token }}<turn>system\nToday is {{ strftime_now('%d %b %Y') }}.{{ eos_token }}" + MESSAGES
# Conversations that don't alternate are refused: the way of Gemma and Mistral.
ALTERNATE = "{{ bos_token }}" + MESSAGES.replace(
    "<turn>{{ m",
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<turn>{{ m",
    1,
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A long text of the system is added to each conversation.
LONG_SYSTEM = (
    "<|im_start|>system\n"
    + "You are the assistant of the Example company and follow its rules. " * 8
    + "<|im_end|>\n"
    + CHATML
)


def tokenizer(
    more: Sequence[str] = (),
    *,
    begin: str | None = None,
    end: str = "<|endoftext|>",
    pad: str | None = None,
    adds_begin: bool = False,
    adds_end: bool = False,
    template: str | None = None,
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 800 tokens and some special ones.

    Args:
        adds_begin: whether it puts `begin` before each text by itself; `adds_end` likewise.
    """
    with gzip.open(str(files("fedkseed.data") / "dolly-sample.jsonl.gz")) as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(600), strict=False)]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator((f"{row['instruction']} {row['context']} {row['response']}" for row in rows), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template)
    special = dict.fromkeys(text for text in (begin, end, pad, *more) if text)
    fast.add_tokens([AddedToken(text, special=True, normalized=False) for text in special], special_tokens=True)
    for name, text in (("eos_token", end), ("bos_token", begin), ("pad_token", pad)):
        if text:
            setattr(fast, name, text)
    if adds_begin or adds_end:
        around = (f"{begin} " if adds_begin else "") + "$A" + (f" {end}" if adds_end else "")
        numbers = [(text, fast.convert_tokens_to_ids(text)) for text in (begin, end) if text]
        post = processors.TemplateProcessing(single=around, pair=around + " $B", special_tokens=numbers)
        fast.backend_tokenizer.post_processor = post
    return fast


def llama(rows: int, **changes: Any) -> LlamaForCausalLM:
    """A random Llama with `rows` tokens."""
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=rows, **settings | changes)).requires_grad_(False)


def save(folder: Path, of: PreTrainedTokenizerFast, model: LlamaForCausalLM | None = None) -> None:
    (llama(len(of)) if model is None else model).save_pretrained(folder)
    of.save_pretrained(folder)


def with_template(template: str | None, *more: str, **special: Any) -> Callable[[Path], None]:
    """Whatever writes a model whose tokenizer has a chat template."""
    return lambda folder: save(folder, tokenizer(more, template=template, **special))


def pad_beyond(folder: Path) -> None:
    """A tokenizer that got a padding token, and a model that was never resized."""
    of = tokenizer()
    model = llama(len(of))
    of.add_special_tokens({"pad_token": "[PAD]"})
    save(folder, of, model)


def word_beyond(folder: Path) -> None:
    """A tokenizer that got a word, and a model that was never resized."""
    of = tokenizer()
    model = llama(len(of))
    of.add_tokens(["Kreditnehmer"])
    save(folder, of, model)


def overflow(folder: Path) -> None:
    """Activations that are too large for float16."""
    of = tokenizer()
    model = llama(len(of))
    layer: Any = model.model.layers[0].mlp
    for projection, factor in ((layer.up_proj, 2000), (layer.gate_proj, 2000), (layer.down_proj, 1000)):
        projection.weight.mul_(factor)
    save(folder, of, model)


def tied_but_head(folder: Path) -> None:
    """A configuration that says the embeddings are tied, and two different matrices."""
    save(folder, tokenizer())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))


def biased(folder: Path) -> None:
    """A Llama with biases of the attention."""
    of = tokenizer()
    model = llama(len(of), attention_bias=True)
    for name, parameter in model.named_parameters():
        if "bias" in name:
            parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    save(folder, of, model)


def lora(folder: Path) -> None:
    """A folder of `peft`, with its base model in FOLDER-base."""
    from peft import LoraConfig, get_peft_model

    of = tokenizer()
    model, base = llama(len(of)), folder.with_name(folder.name + "-base")
    save(base, of, model)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    model.name_or_path = str(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's, of transformers
        adapted = get_peft_model(model, config).requires_grad_(False)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    adapted.save_pretrained(str(folder))
    of.save_pretrained(folder)


def penalty(folder: Path) -> None:
    """Settings of generation that change a greedy answer."""
    of = tokenizer()
    save(folder, of)
    sampled = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.3}
    (folder / "generation_config.json").write_text(json.dumps(sampled | {"eos_token_id": of.eos_token_id}))


MODELS: dict[str, Callable[[Path], None]] = {
    "plain": with_template(None),
    "chatml": with_template(CHATML, "<|im_start|>", end="<|im_end|>"),
    "longsys": with_template(LONG_SYSTEM, "<|im_start|>", end="<|im_end|>"),
    "turn": with_template(TURN, "<turn>", "</turn>", begin="<bos>", end="<eos>", pad="<pad>", adds_begin=True),
    "dated": with_template(DATED, "<turn>", begin="<s>", end="</s>", adds_begin=True),
    "not begun": with_template(MESSAGES, "<turn>", begin="<s>", end="</s>", adds_begin=True),
    "alternate": with_template(ALTERNATE, "<turn>", begin="<s>", end="</s>", adds_begin=True),
    **{made.__name__: made for made in (pad_beyond, word_beyond, overflow, tied_but_head, biased, lora, penalty)},
}
