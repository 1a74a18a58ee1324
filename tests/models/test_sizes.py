"""Sizes of a model by its files are those of the model that is loaded from them."""

from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from fedkseed import FedKSeedError
from fedkseed.models.load import load_tokenizer
from fedkseed.models.sizes import sizes_of
from fedkseed.tuned.gguf import write_gguf

from ..conftest import CONFIGS, tiny_llama


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_sizes_of_a_folder_are_those_of_its_model(config, tmp_path):
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    sizes, count = sizes_of(str(tmp_path)), sum(p.numel() for p in model.parameters())
    assert (sizes.weights, sizes.stored_as) == (count, "float32")
    assert 4 * count < sizes.stored < 4 * count + 16_384  # its header
    assert (sizes.hidden, sizes.layers, sizes.vocabulary) == (32, 2, model.config.vocab_size)
    if isinstance(model, LlamaForCausalLM):
        assert replace(sizes, counted=0).weights == count


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_sizes_of_a_gguf_file_are_those_of_its_folder(kind, tmp_path, model_folder):
    file = tmp_path / "m.gguf"
    write_gguf(file, tiny_llama(), load_tokenizer(str(model_folder)), kind)
    sizes, folder = sizes_of(str(file)), sizes_of(str(model_folder))
    assert replace(sizes, stored=0) == replace(folder, stored=0, stored_as="")
    assert sizes.stored == 4 * sizes.weights if kind == "f32" else sizes.stored < 2 * sizes.weights


def test_a_folder_without_a_configuration_has_no_sizes(tmp_path):
    with pytest.raises(FedKSeedError, match=r"the sizes of .* can't be read"):
        sizes_of(str(tmp_path))
