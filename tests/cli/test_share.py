"""The commands that hand models on: export and pin."""

import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fedkseed import Adapter, Pool
from fedkseed.models.load import load_model
from fedkseed.recipe.reading import own_recipe
from fedkseed.weights.layout import Layout

from ..commands import fedkseed, refused


def test_export_writes_a_folder_that_transformers_loads(finished, tmp_path):
    assert fedkseed("export", finished, tmp_path / "tuned").exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype=torch.float32)
    assert Layout(model).digest().hex() == Adapter.load(finished / "adapter.safetensors").tuned
    assert "exists already; choose another folder" in refused("export", finished, tmp_path / "tuned")


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # peft uses what transformers renames
def test_export_for_peft_writes_a_folder_that_gives_the_tuned_models_logits(tmp_path, model_folder):
    from peft import PeftModel

    c, tokens = np.random.default_rng(1).normal(0, 0.002, 256).astype(np.float32), torch.arange(32)[None]
    base, about = load_model(str(model_folder)), {"model": str(model_folder), "dtype": "float32"}
    adapter = Adapter(
        Pool(7, 256, "separable"), c, Layout(base).digest().hex(), None, ("*",),
        {**about, "template": "alpaca", "separator": "\n"},
    )  # fmt: skip
    adapter.save(tmp_path / "a.safetensors")
    printed = fedkseed("export", tmp_path / "a.safetensors", tmp_path / "lora", "--format", "peft").output
    assert "of rank 16 at most" in printed
    names = {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert {p.name for p in (tmp_path / "lora").iterdir()} == names
    with torch.inference_mode():
        before = base(tokens).logits
        again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), tmp_path / "lora")
        adapter.apply(base)
        after = base(tokens).logits
        assert (after - before).abs().max() > 0.05
        assert (again(tokens).logits - after).abs().max() < 1e-5  # float32's rounding


def test_export_refuses_what_it_can_not_write(finished, tmp_path):
    line = refused("export", finished, tmp_path / "lora", "--format", "peft")
    assert "hadamard directions change every matrix at full rank" in line
    assert "give --rank" in line
    assert "choose one of hf, peft, gguf" in refused("export", finished, tmp_path / "lora", "--format", "merged")
    assert not (tmp_path / "lora").exists()


def test_a_lora_of_a_given_rank_is_written_with_its_error(finished, tmp_path):
    printed = fedkseed("export", finished, tmp_path / "lora", "--format", "peft", "--rank", 8).output
    assert "the nearest change of rank 8" in printed
    assert "of the change are left out, by the Frobenius norm" in printed


def test_export_below_a_file_leaves_nothing(finished, tmp_path):
    (tmp_path / "file").write_text("")
    assert "can't write" in refused("export", finished, tmp_path / "file" / "tuned")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_pin_prints_what_it_has_written_and_the_run_checks_it(recipe_file, tmp_path):
    result = fedkseed("pin", recipe_file)
    assert result.exit_code == 0, result.output
    (digest,) = re.findall(r"^digest = '([0-9a-f]{64})'$", result.output, re.MULTILINE)
    assert f"written to {recipe_file}, [model]" in result.output
    assert own_recipe(recipe_file).model.digest == digest
    (of_tokenizer,) = re.findall(r"^tokenizer_digest = '([0-9a-f]{48})'$", result.output, re.MULTILINE)
    assert own_recipe(recipe_file).model.tokenizer_digest == of_tokenizer
    recipe_file.write_text(recipe_file.read_text().replace(digest, 64 * "0"))
    line = refused("run", recipe_file, "--output", tmp_path / "run")
    assert f"digest is {64 * '0'}" in line
    assert digest in line
    recipe_file.write_text(recipe_file.read_text().replace(64 * "0", digest).replace(of_tokenizer, 48 * "0"))
    line = refused("run", recipe_file, "--output", tmp_path / "run")
    assert f"([model] tokenizer_digest is '{48 * '0'}', this one has '{of_tokenizer}')" in line
