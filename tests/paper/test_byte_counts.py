"""The paper's arithmetic gives the paper's numbers, and the sizes are those that PyTorch and PEFT count."""

from fnmatch import fnmatch

import pytest
from peft import LoraConfig, PromptEncoderConfig, PromptTuningConfig, UniLoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from fedkseed.models.tail import last_layers
from fedkseed.paper import byte_counts
from fedkseed.paper.byte_counts import DATAJUICER, LLAMA, SEEDS, TABLE_3, TITLES, Architecture
from fedkseed.recipe.algorithms import ALGORITHMS
from fedkseed.recipe.schema import PeftTable

CELLS = [
    (method, title, cells[number][0])
    for method, cells in TABLE_3.items()
    for number, title in enumerate(TITLES)
]  # fmt: skip


@pytest.mark.parametrize(("method", "title", "cell"), CELLS)
def test_every_cell_of_table_3_comes_out_as_printed(method, title, cell):
    found = byte_counts.communication(method, TITLES[title], SEEDS[title].get(method, 0))
    assert byte_counts.printed(found) == cell


def test_fedkseed_sends_what_the_appendix_adds_up():
    assert byte_counts.kseed(4096) == (16_388, 1_600)
    assert byte_counts.kseed(1024, importance=True) == (8_196, 1_600)
    assert byte_counts.kseed(2048, importance=True) == (16_388, 1_600)


def test_the_paper_s_models_have_as_many_weights_as_their_cards_say():
    assert (DATAJUICER.weights, LLAMA.weights) == (1_345_423_360, 3_426_473_600)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft on transformers 5
@pytest.mark.parametrize("tied", [False, True])
def test_sizes_are_those_that_pytorch_and_peft_count(tied):
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, tie_word_embeddings=tied,
    )  # fmt: skip
    sizes = Architecture(64, 96, 3, 128, attention=64, shared=32, tied=tied)
    options = {
        "fedit": LoraConfig(r=8, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]),
        "fedunilora": UniLoraConfig(theta_d_length=4096, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]),
        "fedprompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=20),
        "fedptuning": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=20, encoder_hidden_size=64),
    }
    assert LlamaForCausalLM(config).num_parameters() == sizes.tuned("all", PeftTable())
    for method, adapter in options.items():
        tuned = get_peft_model(LlamaForCausalLM(config), adapter)
        assert tuned.get_nb_trainable_parameters()[0] == sizes.tuned(ALGORITHMS[method].tuned, PeftTable())


@pytest.mark.parametrize("count", [1, 2])
def test_weights_of_the_last_layers_are_those_of_a_model(count):
    sizes = Architecture(hidden=8, intermediate=12, layers=3, vocabulary=16, attention=8, shared=4, tied=True)
    config = LlamaConfig(
        hidden_size=8, intermediate_size=12, num_hidden_layers=3, vocab_size=16, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    patterns = last_layers(model, count)
    tuned = [p.numel() for name, p in model.named_parameters() if any(fnmatch(name, each) for each in patterns)]
    assert sizes.tuned("all", PeftTable(), count) == sum(tuned)
    assert sizes.tuned("all", PeftTable()) == sum(p.numel() for p in model.parameters())
