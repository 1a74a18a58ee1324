"""Fields of a GGUF file that say how positions are turned: each is used, or refused by name."""

import gguf
import pytest

from fedkseed import FedKSeedError
from fedkseed.models.gguf_config import gguf_config


@pytest.fixture
def config_of(tmp_path):
    """The configuration of a file of an architecture with some fields beside the usual ones, and without tensors."""

    def made(architecture, layers=6, **fields):
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
        writer.add_context_length(512)
        writer.add_embedding_length(64)
        writer.add_block_count(layers)
        writer.add_feed_forward_length(128)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_vocab_size(100)
        for name, value in fields.items():
            kinds = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string, bool: writer.add_bool}
            add = kinds[type(value)]
            add(f"{architecture}.{name.replace('__', '.')}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return gguf_config(tmp_path / "model.gguf")

    return made


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "starcoder2", "stablelm", "nemotron"])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1_000_000.0])
def test_the_base_of_wavelengths_is_the_files(config_of, architecture, theta):
    assert config_of(architecture, rope__freq_base=theta).rope_parameters["rope_theta"] == theta


def test_scaled_positions_of_layers_of_two_kinds_are_those_of_full_attention(config_of):
    plain = config_of("gemma3", rope__freq_base=1e6).rope_parameters
    scaling = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    scaled = config_of("gemma3", rope__freq_base=1e6, **scaling).rope_parameters
    assert scaled["sliding_attention"] == plain["sliding_attention"]
    assert scaled["full_attention"] == {**plain["full_attention"], "rope_type": "linear", "factor": 8.0}


def test_a_part_of_a_head_is_turned_where_its_kind_knows_parts_and_refused_where_not(config_of):
    for part in (4, 8, 16):
        assert config_of("stablelm", rope__dimension_count=part).rope_parameters["partial_rotary_factor"] == part / 16
    assert "partial_rotary_factor" not in config_of("llama", rope__dimension_count=16).rope_parameters
    with pytest.raises(FedKSeedError, match="its positions turn 8 of a head's 16 numbers"):
        config_of("llama", rope__dimension_count=8, attention__key_length=16)


@pytest.mark.parametrize(("architecture", "largest"), [("gemma2", 46), ("gemma3", 62)])
def test_scores_of_gemma_are_scaled_by_a_heads_width_and_by_the_models_in_the_largest(config_of, architecture, largest):
    """As in llama.cpp, which looks at the number of layers."""
    for layers, width in ((26, 32), (largest, 64 // 4)):
        assert config_of(architecture, layers, attention__key_length=32).query_pre_attn_scalar == width


def test_fields_that_change_what_is_computed_are_used_or_refused(config_of):
    for field, usual in (("attention__causal", True), ("ssm__dt_b_c_rms", False)):
        config_of("llama", **{field: usual})
        with pytest.raises(FedKSeedError, match=f"its field llama.{field.replace('__', '.')} is {not usual}"):
            config_of("llama", **{field: not usual})
    assert config_of("llama", rope__scale_linear=4.0).rope_parameters["factor"] == 4.0
    caps = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
    config = config_of("gemma2", **caps)
    assert {name: getattr(config, name) for name in caps} == caps
    assert config_of("gemma3", final_logit_softcapping=10.0).final_logit_softcapping == 10.0
