"""Tokenizer and model are compared where they are loaded."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from fedkseed.data.layouts import Example
from fedkseed.data.tokenizer_digest import TEXTS
from fedkseed.data.wording import Wording, encode_each
from fedkseed.errors import FedKSeedError
from fedkseed.models.load import _begin, load_tokenizer, positions, save_tokenizer

from .tiny import CHATML, llama, save, tokenizer


def test_a_word_that_the_model_has_no_row_for_is_refused(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(FedKSeedError, match=r"the tokenizer has 802 tokens, the model 801 rows, .*'Kreditnehmer'"):
        load_tokenizer(str(tiny_model("word_beyond")))


def test_the_end_of_text_pads_where_the_model_has_no_row_for_the_padding(tiny_model: Callable[[str], Path]) -> None:
    loaded = load_tokenizer(str(tiny_model("pad_beyond")))
    assert loaded.pad_token_id == loaded.eos_token_id == 800


@pytest.mark.parametrize(
    ("words", "template", "is_refused"),
    [(["<image>"], None, False), (["<image>"], "{{ '<image>' }}", True), ([], None, False)],
)
def test_a_special_token_beyond_is_refused_where_the_template_has_it(
    words: list[str], template: str | None, is_refused: bool, tmp_path: Path
) -> None:
    """Gemma 3's smallest has a token for images, and no row for it."""
    of = tokenizer(template=template)
    model = llama(len(of))
    of.add_tokens(words, special_tokens=True)
    save(tmp_path, of, model)
    if is_refused:
        with pytest.raises(FedKSeedError, match="802 tokens, the model 801 rows"):
            load_tokenizer(str(tmp_path))
    else:
        assert load_tokenizer(str(tmp_path)).encode("a") == of.encode("a")


LIMITS: list[tuple[str, dict[str, Any], int | None]] = [
    ("LlamaConfig", {"max_position_embeddings": 300}, 300),
    ("GPT2Config", {"n_positions": 300}, 300),
    ("GPTJConfig", {"n_positions": 300}, 300),
    ("OPTConfig", {"max_position_embeddings": 300}, 300),
    ("DbrxConfig", {"max_seq_len": 300}, 300),
    ("Gemma3Config", {"text_config": {"max_position_embeddings": 300}}, 300),
    ("FalconConfig", {"max_position_embeddings": 300}, 300),
    ("FalconConfig", {"max_position_embeddings": 300, "alibi": True}, None),
    ("BloomConfig", {}, None),
    ("MptConfig", {}, None),
    ("RwkvConfig", {}, None),
    ("XLNetConfig", {}, None),  # its number of positions is −1
    ("MambaConfig", {}, None),
]
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
SCALED = [  # of 256 positions, of which 128 were there before scaling
    (LLAMA3 | {"original_max_position_embeddings": 128}, 256),
    ({"rope_type": "linear", "factor": 2.0}, 256),
    ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 256),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
    # scaled by the longest text of a batch, where that is longer than the original length
    ({"rope_type": "dynamic", "factor": 4.0}, 256),
    ({"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 128}, 128),
    (LONG | {"original_max_position_embeddings": 128}, 128),
]


@pytest.mark.parametrize(("kind", "settings", "limit"), LIMITS)
def test_positions_are_those_of_the_configuration(kind: str, settings: dict[str, Any], limit: int | None) -> None:
    assert positions(getattr(transformers, kind)(**settings)) == limit


@pytest.mark.parametrize(("rope", "limit"), SCALED)
def test_scaled_positions_are_counted_once(rope: dict[str, Any], limit: int) -> None:
    scaled = rope | {"rope_theta": 10000.0}
    assert positions(transformers.LlamaConfig(max_position_embeddings=256, rope_parameters=scaled)) == limit


def test_a_tokenizer_has_the_models_limit_without_a_warning_and_is_saved_with_its_own(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    of = AutoTokenizer.from_pretrained(tiny_model("plain"))
    of.model_max_length = 77
    save(tmp_path, of)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.model_max_length == 512
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING, "transformers"):
        assert len(loaded.encode("a " * 600)) > 512
    assert not caplog.records
    save_tokenizer(loaded, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())["model_max_length"] == 77
    assert loaded.model_max_length == 512
    config = json.loads((tmp_path / "config.json").read_text())
    del config["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "bloom"}))
    assert load_tokenizer(str(tmp_path)).model_max_length == VERY_LARGE_INTEGER


@pytest.mark.parametrize("wording", ["paper", "chat"])
def test_a_row_with_a_token_that_the_model_has_no_row_for_is_refused(tmp_path: Path, wording: str) -> None:
    of = tokenizer(template=CHATML, more=["<|im_start|>", "<|im_end|>"])
    model = llama(len(of))
    of.add_tokens(["<image>"], special_tokens=True)
    save(tmp_path, of, model)
    spare = load_tokenizer(str(tmp_path))
    good, bad = encode_each([Example("Hi", "Yes."), Example("Hi <image>", "No.")], spare, Wording(wording))
    assert not isinstance(good, FedKSeedError)
    assert "holds '<image>', a token for which the model has no row" in str(bad)


DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
GROUPS = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(r"(?i:'s|'t|'re)|\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
RULES = {"SmolLM2's digits": (None, DIGITS), "Llama 3's groups": (None, GROUPS), "NFKC": (normalizers.NFKC(), DIGITS)}


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("rules", RULES)
def test_texts_are_cut_by_the_tokenizers_own_file_whatever_class_its_folder_names(
    kind: str, rules: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """The way of SmolLM2: transformers 5 would give it the rules of GPT-2 (its issue 45920)."""
    folder = shutil.copytree(tiny_model("plain"), tmp_path / "model")
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.normalizer, own.pre_tokenizer = RULES[rules]
    own.save(str(folder / "tokenizer.json"))
    table = json.loads((folder / "tokenizer_config.json").read_text())
    table |= {"tokenizer_class": kind, "add_prefix_space": False}  # as SmolLM2's
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    for place in (folder, tmp_path / "saved"):
        loaded = load_tokenizer(str(place))
        for text in (*TEXTS, f"In 2021{loaded.eos_token} 1998", " 12345"):
            expected = own.encode(text, add_special_tokens=False).ids
            assert loaded(text, add_special_tokens=False).input_ids == expected
            assert loaded.decode(expected) == own.decode(expected, skip_special_tokens=False)
        if place is folder:
            save_tokenizer(loaded, tmp_path / "saved")
            shutil.copy(folder / "config.json", tmp_path / "saved")
    assert Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json")).encode("1998").ids == own.encode("1998").ids


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("rules", [pre_tokenizers.ByteLevel(False), DIGITS])
@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_a_space_before_a_text_is_as_the_folder_says_and_all_else_as_the_file(
    kind: str, rules: Any, begins: bool, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model("plain"), tmp_path / "model")
    by_file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    by_file.pre_tokenizer = rules
    by_file.save(str(folder / "tokenizer.json"))
    table = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": kind}
    (folder / "tokenizer_config.json").write_text(json.dumps(table | {"add_prefix_space": begins}))
    is_first = rules is not DIGITS  # behind others it would begin each digit
    expected = by_file.encode(" the 1998" if begins and is_first else "the 1998", add_special_tokens=False).ids
    assert load_tokenizer(str(folder))("the 1998", add_special_tokens=False).input_ids == expected


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize(
    ("rules", "puts"),
    [
        ((None, pre_tokenizers.Metaspace(prepend_scheme="never")), False),
        ((None, pre_tokenizers.Metaspace(prepend_scheme="first")), True),
        ((normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None), True),
        ((None, None), None),
        ((None, DIGITS), None),
    ],
)
def test_rules_of_words_that_begin_otherwise_than_the_folder_says_are_left_to_its_class(
    rules: Any, puts: bool | None, begins: bool
) -> None:
    by_file = Tokenizer(models.BPE())
    by_file.normalizer, by_file.pre_tokenizer = rules
    assert _begin(by_file, begins) == (puts in (None, begins))
