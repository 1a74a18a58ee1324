"""LoRA folders: the peft library makes the tuned model's logits of the base model and the folder."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fedkseed import FedKSeedError, Pool, hold
from fedkseed.directions.factors import Basis, Factor, Matrix
from fedkseed.models.peft_adapters import attach
from fedkseed.models.quantised import quantise
from fedkseed.recipe.schema import PeftTable
from fedkseed.tuned.lora import Lora, as_lora, nearest_lora
from fedkseed.weights.layout import Layout
from fedkseed.weights.lazy import densify

from ..conftest import SMALL

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),  # peft uses what transformers renames
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set:UserWarning"),  # GPT-2 has layers of both kinds
]
FAMILIES = "separable", "informed", "mixed"
LLAMA = LlamaConfig(**SMALL, intermediate_size=48, num_key_value_heads=1, tie_word_embeddings=False)
TIED = LlamaConfig(**SMALL, intermediate_size=48, num_key_value_heads=1, tie_word_embeddings=True)
MODELS = {
    "llama": LLAMA,
    "llama, tied": TIED,
    "llama, biases": LlamaConfig(**SMALL, intermediate_size=48, attention_bias=True, mlp_bias=True),
    "gpt-2": GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0),
    "opt": OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32),  # positions are looked up by a mask
    "qwen2, tied": Qwen2Config(**SMALL, intermediate_size=48, num_key_value_heads=1, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, intermediate_size=48, num_key_value_heads=1, head_dim=16),  # small norms in heads
}
TOKENS = torch.arange(48).view(2, 24)


def model_of(config) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()


def basis_of(model: nn.Module, names=None) -> Basis:
    """A random basis of all tensors, or of some, with ranks from 1 to 5."""
    rng, factors, first = np.random.default_rng(1), dict[str, Factor](), 0
    for name, shape in Layout(model).shapes.items():
        if names is None or name in names:
            matrix, (u, v) = Matrix.of(shape), rng.integers(1, 6, 2)
            sides = [rng.integers(-127, 128, (n, r), np.int8) for n, r in ((matrix.rows, u), (matrix.columns, v))]
            scales = [rng.uniform(0.005, 0.01, r).astype(np.float32) for r in (u, v)]
            factors[name] = Factor(matrix.rows, matrix.columns, first, *sides, *scales)
            first = factors[name].directions.stop
    return Basis(factors)


def tuned(base: nn.Module, family: str, patterns=("*",), basis: Basis | None = None) -> tuple[nn.Module, Lora]:
    """A copy of the model, moved, and its LoRA."""
    return moved(copy.deepcopy(base), family, patterns, basis)


def moved(model: nn.Module, family: str, patterns=("*",), basis: Basis | None = None) -> tuple[nn.Module, Lora]:
    """The model, moved as `Adapter.apply` does, and its LoRA."""
    if family == "separable":
        pool = Pool(5, 256, family)
    else:
        basis = basis or basis_of(model)
        size = basis.size if family == "informed" else 1 << (basis.size - 1).bit_length()
        pool = Pool(5, size, family, basis.digest())
    c = np.random.default_rng(2).standard_normal(pool.size).astype(np.float32) / 40 / np.sqrt(pool.size)
    if family == "informed":  # each direction moves one matrix alone
        c *= np.float32(np.sqrt(pool.size))
    weights = hold(model, pool, patterns, "streamed", basis)
    weights.load(c)
    weights.keep()
    return model, as_lora(model, patterns, pool, c, basis)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS).logits.float()


def loaded(base: nn.Module, lora: Lora, folder: Path) -> PeftModel:
    folder.mkdir(exist_ok=True)
    lora.write(folder, "a/base")
    return PeftModel.from_pretrained(copy.deepcopy(base), folder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", MODELS)
def test_peft_makes_the_tuned_models_logits(kind, family, tmp_path):
    base = model_of(MODELS[kind])
    model, lora = tuned(base, family)
    expected = logits(model)
    assert (expected - logits(base)).abs().max() > 0.05
    # logits are below 4, float32 has 24 bits, and some hundred sums of activations are rounded otherwise
    assert (logits(loaded(base, lora, tmp_path)) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_an_untied_model_can_be_merged_by_peft(family, tmp_path):
    base = model_of(LLAMA)
    model, lora = tuned(base, family)
    merged = loaded(base, lora, tmp_path).merge_and_unload().state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-6)


def test_ranks_are_the_smaller_ones_and_every_scaling_is_one(tmp_path):
    base = model_of(LLAMA)
    basis = basis_of(base)
    _, lora = tuned(base, "informed", basis=basis)
    model = loaded(base, lora, tmp_path)
    layers = {name.removeprefix("base_model.model."): m for name, m in model.named_modules() if hasattr(m, "scaling")}
    adapted = {name for name, m in base.named_modules() if isinstance(m, (nn.Linear, nn.Embedding))}
    assert {name for name, m in layers.items() if getattr(m, "r", None)} == adapted
    for name in adapted:
        assert layers[name].r["default"] == min(basis.factors[f"{name}.weight"].ranks)
        assert layers[name].scaling["default"] == 1
    assert len({*lora.ranks.values()}) > 2


def test_separable_ranks_are_at_most_the_root_of_k():
    narrow = LlamaConfig(**SMALL | {"hidden_size": 8}, intermediate_size=48, tie_word_embeddings=False)
    assert {*tuned(model_of(narrow), "separable")[1].ranks.values()} == {8}
    assert {*tuned(model_of(LLAMA), "separable")[1].ranks.values()} == {16}


def test_only_tensors_that_moved_are_in_the_folder(tmp_path):
    base, names = model_of(TIED), {"model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"}
    model, lora = tuned(base, "informed", ("*layers.1*",), basis_of(base, names))
    expected = logits(model)
    assert torch.equal(logits(loaded(base, lora, tmp_path)).argmax(-1), expected.argmax(-1))
    path = "model.layers.1.mlp.up_proj"
    assert {*load_file(tmp_path / "adapter_model.safetensors")} == {
        f"base_model.model.{path}.lora_A.weight",
        f"base_model.model.{path}.lora_B.weight",
    }
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["target_modules"], config["modules_to_save"], config["bias"]) == ([path], None, "none")


def test_a_bias_moves_whether_or_not_its_matrix_does(tmp_path):
    base = model_of(MODELS["llama, biases"])
    model, lora = tuned(base, "separable", ("*v_proj*", "*o_proj.bias", "*up_proj.weight"))
    path = "base_model.model.model.layers.0.self_attn"
    assert {f"{path}.v_proj.base_layer.bias", f"{path}.o_proj.bias"} <= {*lora.tensors}
    assert lora.saved == ()
    assert (logits(loaded(base, lora, tmp_path)) - logits(model)).abs().max() < 1e-5
    del lora.tensors[f"{path}.o_proj.bias"]
    assert (logits(loaded(base, lora, tmp_path)) - logits(model)).abs().max() > 1e-4


def test_both_uses_of_a_tied_matrix_move_together(tmp_path):
    base = model_of(TIED)
    model, lora = tuned(base, "informed", basis=basis_of(base, {"lm_head.weight"}))
    assert {*lora.ranks} == {"lm_head", "model.embed_tokens"}
    again = loaded(base, lora, tmp_path)
    assert (logits(again) - logits(model)).abs().max() < 1e-5
    embedded = [m.get_input_embeddings()(TOKENS) for m in (again.get_base_model(), model, base)]
    torch.testing.assert_close(embedded[0], embedded[1], rtol=0, atol=1e-6)
    assert (embedded[1] - embedded[2]).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bfloat16_base_differs_by_its_rounding_alone(family, tmp_path):
    base = model_of(LLAMA).to(torch.bfloat16)
    model, lora = tuned(base, family)
    exact = copy.deepcopy(base).float()
    change, error = logits(model) - logits(exact), logits(loaded(base, lora, tmp_path)) - logits(model)
    assert error.norm() < 0.1 * change.norm()  # bfloat16 has 8 bits
    assert lora.tensors["base_model.model.model.norm.weight"].dtype == torch.bfloat16


def test_a_quantised_base_is_the_same_base_dequantised(tmp_path):
    base, model = (quantise(model_of(TIED), "Q8_0") for _ in range(2))
    model, lora = moved(model, "separable")
    densify(base)
    assert (logits(model) - logits(base)).abs().max() > 0.05
    assert (logits(loaded(base, lora, tmp_path)) - logits(model)).abs().max() < 1e-5


def test_modules_whose_name_ends_like_a_saved_ones_are_stored_too(tmp_path):
    base = model_of(LLAMA)
    base.norm = LlamaRMSNorm(4).requires_grad_(False)  # peft takes it for all of the model's norms
    model, lora = tuned(base, "separable", ("norm.weight", "*q_proj*"))
    assert len(lora.saved) == 6
    assert (logits(loaded(base, lora, tmp_path)) - logits(model)).abs().max() < 1e-5


def test_full_ranks_are_refused():
    model = model_of(LLAMA)
    with pytest.raises(FedKSeedError, match=r"hadamard directions change .* at full rank.*--rank.*--format hf"):
        as_lora(model, ("*",), Pool(1, 16), np.ones(16, np.float32))


def test_a_moved_tensor_that_is_no_matrix_is_refused_and_named():
    base = model_of(LLAMA)
    base.model.conv = nn.Conv1d(4, 4, 3).requires_grad_(False)
    with pytest.raises(FedKSeedError, match=r"model.conv.weight of shape \(4, 4, 3\) was tuned.*Conv1d.*--format hf"):
        tuned(base, "separable")
    assert "model.layers.0.self_attn.q_proj" in tuned(base, "separable", ("*proj*",))[1].ranks


@pytest.mark.parametrize("patterns", [("*",), ("*norm*",)])
def test_nothing_to_hold_is_refused(patterns):
    model = model_of(LLAMA)
    c = np.zeros(16, np.float32) if patterns == ("*",) else np.ones(16, np.float32)
    with pytest.raises(FedKSeedError, match=r"no matrix was changed"):
        as_lora(model, patterns, Pool(1, 16, "separable"), c)


def changed(base: nn.Module) -> nn.Module:
    """A copy of a model whose matrices have changed at full rank, by singular values that fall like 1 / k."""
    model, rng = copy.deepcopy(base), np.random.default_rng(4)
    for _, parameter in sorted(model.named_parameters()):
        noise = torch.from_numpy(rng.standard_normal(parameter.shape).astype(np.float32))
        if parameter.ndim == 2:
            left, values, right = torch.linalg.svd(noise, full_matrices=False)
            noise = left @ torch.diag(1 / (1 + torch.arange(len(values)))) @ right
        parameter += noise / 10
    return model


@pytest.mark.parametrize("kind", ["llama", "gpt-2", "qwen2, tied"])
def test_the_nearest_lora_leaves_out_what_its_errors_say_and_peft_agrees(kind, tmp_path):
    base = model_of(MODELS[kind])
    model, rank = changed(base), 6
    found = nearest_lora(model, base, rank)
    before, after = base.state_dict(), model.state_dict()
    tails = {}
    for name in found.errors:
        values = np.linalg.svd((after[name] - before[name]).double().numpy(), compute_uv=False)
        tails[name] = np.linalg.norm(values[rank:]), np.linalg.norm(values)
        # a change is known to the rounding of the weights around it, 1e-7 of 1
        assert found.errors[name] == pytest.approx(tails[name][0] / tails[name][1], rel=1e-4)
    left, whole = np.array([*tails.values()]).T
    assert found.error == pytest.approx(np.linalg.norm(left) / np.linalg.norm(whole), rel=1e-4)
    assert {*found.errors} == {f"{path}.weight" for path in found.lora.ranks} & {*Layout(base).shapes}
    again = loaded(base, found.lora, tmp_path)
    exact = loaded(base, nearest_lora(model, base, 64).lora, tmp_path / "exact")
    error, gain = (float((logits(one) - logits(model)).abs().max()) for one in (again, exact))
    assert gain < 1e-4 < 1e-3 < error < float((logits(base) - logits(model)).abs().max())


def test_an_untied_models_nearest_lora_is_as_far_away_as_it_says(tmp_path):
    base = model_of(LLAMA)
    model = changed(base)
    found = nearest_lora(model, base, 4)
    merged = loaded(base, found.lora, tmp_path).merge_and_unload().state_dict()
    after, before = model.state_dict(), base.state_dict()
    gaps, moves = ([float((a[n] - b[n]).norm()) for n in found.errors] for a, b in ((merged, after), (before, after)))
    assert np.linalg.norm(gaps) / np.linalg.norm(moves) == pytest.approx(found.error, rel=1e-4)


def test_a_lora_that_peft_wrote_is_read_with_its_scaling(tmp_path):
    base = model_of(LLAMA)
    made = attach(copy.deepcopy(base), "lora", PeftTable(rank=3, alpha=12, targets=["q_proj", "down_proj"]), 1)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            parameter += 0.1
    made.save_pretrained(tmp_path / "peft")
    lora = Lora.read(tmp_path / "peft")
    assert {*lora.ranks.values()} == {3}
    assert (logits(loaded(base, lora, tmp_path)) - logits(made)).abs().max() < 1e-5
    assert (logits(base) - logits(made)).abs().max() > 0.05


def test_adapters_that_are_no_matrices_are_not_read_as_a_lora(tmp_path):
    attach(model_of(LLAMA), "prompt", PeftTable(virtual_tokens=4), 1).save_pretrained(tmp_path)
    with pytest.raises(FedKSeedError, match=r"adapters of the kind 'PROMPT_TUNING'.*--format peft"):
        Lora.read(tmp_path)


def test_nothing_changed_has_no_nearest_lora():
    base = model_of(LLAMA)
    with pytest.raises(FedKSeedError, match="no matrix was changed"):
        nearest_lora(copy.deepcopy(base), base, 4)
