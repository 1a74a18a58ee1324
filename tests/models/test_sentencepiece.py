"""Tokenizers in `tokenizer.model` alone: the tokens are SentencePiece's, whatever the file's settings are."""

import json
import random
from itertools import product

import pytest
from transformers import AutoTokenizer

from fedkseed import FedKSeedError
from fedkseed.models.load import load_tokenizer, save_tokenizer

from .published import CONFIG, SIZE, TOKENIZER, WORDS, sentencepiece_file

TEXTS = ["the ant has legs", "  the  ant \n has\t legs ", "", " ", "▁the", "é 東 legs", "a  b"]
# By the package sentencepiece 0.2.3.
EXPECTED = {
    (True, True): [
        [260, 264, 286, 263, 259], [260, 264, 286, 283, 13, 263, 12, 259], [], [], [283, 260],
        [283, 198, 172, 283, 233, 160, 180, 259], [269, 283, 101],
    ],
    (True, False): [
        [260, 264, 286, 263, 259], [282, 260, 283, 264, 286, 283, 13, 263, 12, 259, 283], [], [282], [283, 260],
        [283, 198, 172, 283, 233, 160, 180, 259], [269, 282, 101],
    ],
    (False, False): [
        [286, 271, 264, 286, 263, 259], [283, 260, 283, 264, 286, 283, 13, 263, 12, 259, 283], [], [283], [260],
        [198, 172, 283, 233, 160, 180, 259], [285, 282, 101],
    ],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file())
    return tmp_path


def tokens(tokenizer, texts):
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


@pytest.mark.parametrize(("prefix", "spare"), EXPECTED)
def test_texts_have_the_tokens_of_sentencepiece_also_once_they_are_saved(folder, tmp_path, prefix, spare):
    (folder / "tokenizer.model").write_bytes(sentencepiece_file(prefix=prefix, spare=spare))
    loaded = load_tokenizer(str(folder))
    assert tokens(loaded, TEXTS) == EXPECTED[prefix, spare]
    assert loaded.decode(loaded("the ant has legs").input_ids, skip_special_tokens=True) == "the ant has legs"
    save_tokenizer(loaded, tmp_path / "saved")
    assert tokens(AutoTokenizer.from_pretrained(tmp_path / "saved"), TEXTS) == EXPECTED[prefix, spare]


def test_any_text_has_the_tokens_of_sentencepiece(folder):
    processor = pytest.importorskip(
        "sentencepiece", reason="pip install --no-deps sentencepiece"
    ).SentencePieceProcessor
    rng = random.Random(1)
    parts = [word.replace("▁", " ") for word in (*WORDS, " ", "  ", "\n", "é", "x")]
    texts = ["".join(rng.choices(parts, k=rng.randint(1, 20))) for _ in range(300)]
    for prefix, spare in product([True, False], repeat=2):
        data = sentencepiece_file(prefix=prefix, spare=spare)
        (folder / "tokenizer.model").write_bytes(data)
        assert tokens(load_tokenizer(str(folder)), texts) == processor(model_proto=data).encode(texts)


def test_settings_beside_the_file_count(folder):
    assert load_tokenizer(str(folder))("the").input_ids == [1, 260]
    changes = {"add_bos_token": False, "add_eos_token": True, "legacy": False, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER | changes))
    loaded = load_tokenizer(str(folder))
    assert loaded("the").input_ids == [260, 2]
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == ("<s>", "</s>", "</s>")
    assert loaded.chat_template == "{{ messages }}"
    assert loaded.model_max_length == 2048
    assert loaded("the<s>the", add_special_tokens=False).input_ids == [260, 1, 286, 271], (
        "no space behind a special token"
    )
    (folder / "tokenizer_config.json").unlink()
    loaded = load_tokenizer(str(folder))
    assert loaded("the<s>the").input_ids == [1, 260, 1, 260]
    assert len(loaded) == SIZE
    (folder / "tokenizer.model").write_bytes(sentencepiece_file(begin=-1))
    assert load_tokenizer(str(folder))("the").input_ids == [260]


@pytest.mark.parametrize("of_others", [{"kind": 1}, {"user": "<sep>"}])
def test_files_of_other_kinds_are_refused(folder, of_others):
    (folder / "tokenizer.model").write_bytes(sentencepiece_file(**of_others))
    with pytest.raises(FedKSeedError, match=r"tokenizer.model is not of Llama's kind .* add a tokenizer.json"):
        load_tokenizer(str(folder))


def test_damaged_files_are_refused_wherever_they_end(folder):
    data = sentencepiece_file()
    for size in random.Random(2).sample(range(len(data)), 40):
        (folder / "tokenizer.model").write_bytes(data[:size])
        with pytest.raises(FedKSeedError, match=r"the tokenizer of .* can't be loaded"):
            load_tokenizer(str(folder))
