"""Losses, options and answers of rows in a batch are those that a plain forward pass gives each row alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from fedkseed.data.batches import Encoded
from fedkseed.data.layouts import Example
from fedkseed.evaluation.evaluate import respond
from fedkseed.models.loss import example_losses, ignores_padding, option_losses

END, PAD, ANSWER, LENGTH = 2, 1, (40, 41, 42), 8
PROMPTS = [(*range(5, 15),), (*range(5, 13), 20, 21, 22, 23, 24), (30, 31, 32)]  # two begin alike
OPTIONS = [(40, 41), (43, 44, 45), (46,)]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 2}
DECODER = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 48}
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2}
IS_DECODER = {"is_decoder": True, "is_encoder_decoder": False}
# Configuration -> its sizes, and whether padding before a text changes nothing, so that answers are written in batches.
FAMILIES: dict[str, tuple[dict[str, Any], bool]] = {
    "Llama": (SMALL, True),
    "GPT2": (OLD, True),
    "GPTBigCode": (OLD, True),
    "CTRL": ({**OLD, "dff": 48}, True),
    "OPT": ({**LAYERS, "num_attention_heads": 2, "ffn_dim": 48, "word_embed_proj_dim": 32}, True),
    "BioGpt": (SMALL, True),
    "XGLM": ({"d_model": 32, "num_layers": 2, "attention_heads": 2, "ffn_dim": 48}, True),
    "Bert": ({**SMALL, "is_decoder": True}, True),
    # distances and no positions; padding changes nothing, and nothing says so
    "Bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 2}, False),
    "Mpt": ({"d_model": 32, "n_layers": 2, "n_heads": 2}, False),
    # positions are counted from the padding token's number on
    **dict.fromkeys(
        ("Roberta", "XLMRoberta", "Camembert"), ({**SMALL, "is_decoder": True, "pad_token_id": PAD}, False)
    ),
    # no positions to give, so that padding takes some
    **dict.fromkeys(("Bart", "Pegasus"), ({**DECODER, **IS_DECODER}, False)),
    "TrOCR": (DECODER, False),
    # a window of local layers that counts padding
    "GPTNeo": (
        {**LAYERS, "num_heads": 2, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
        False,
    ),
    # a state that padding changes
    "Rwkv": ({**LAYERS, "attention_hidden_size": 32, "intermediate_size": 48}, False),
    "Mamba": ({**LAYERS, "state_size": 8}, False),
    "Mamba2": ({**LAYERS, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1}, False),
    "RecurrentGemma": ({**SMALL, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16}, False),
    "Lfm2": ({**SMALL, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}, False),
}
TOKENIZER: Any = SimpleNamespace(
    pad_token_id=PAD,
    eos_token_id=END,
    added_tokens_decoder={},
    batch_decode=lambda rows: [[token for token in row if token > END] for row in rows],
)


def made(name: str) -> Any:
    config = getattr(transformers, f"{name}Config")(vocab_size=90, **FAMILIES[name][0])
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.3)
    return model


def logits(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    return model(input_ids=torch.tensor([tokens])).logits[0].double()


def nats(model: Any, prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
    found = logits(model, (*prompt, *answer))[len(prompt) - 1 : -1]
    return float(cross_entropy(found, torch.tensor(answer), reduction="sum"))


def likeliest(model: Any, prompt: tuple[int, ...]) -> list[int]:
    said: list[int] = []
    while len(said) < LENGTH and END not in said:
        said.append(int(logits(model, (*prompt, *said))[-1].argmax()))
    return [token for token in said if token > END]


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_a_batch_have_the_losses_options_and_answers_that_each_has_alone(name):
    model = made(name)
    assert ignores_padding(model) == FAMILIES[name][1]
    encoded = [Encoded((*prompt, *ANSWER), len(prompt), Example("", "")) for prompt in PROMPTS]
    expected = [nats(model, prompt, ANSWER) / len(ANSWER) for prompt in PROMPTS]
    assert example_losses(model, encoded, PAD) == pytest.approx(expected, rel=1e-4)
    assert example_losses(model, encoded[:2], PAD) == pytest.approx(expected[:2], rel=1e-4)  # which begin alike
    groups = [PROMPTS] if ignores_padding(model) else [[prompt] for prompt in PROMPTS]
    for group in groups:
        for prompt, found in zip(group, option_losses(model, group, [OPTIONS] * len(group), PAD), strict=True):
            assert found == pytest.approx([nats(model, prompt, option) for option in OPTIONS], rel=1e-4)
    assert respond(model, TOKENIZER, PROMPTS, LENGTH) == [likeliest(model, prompt) for prompt in PROMPTS]
