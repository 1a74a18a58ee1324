"""What is no argument of a run must not change its result: settings beside the weights, the user, the environment."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fedkseed import FedKSeedError
from fedkseed.models.load import load_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog, and again and again. " * 20
PADS = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
SAVED = {
    "truncation": {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0},
    "padding": {**PADS, "pad_token": "!"},
    "dropout": 0.5,
}


@pytest.mark.parametrize("name", SAVED)
def test_what_a_tokenizer_s_file_says_of_training_is_left_out(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    right = load_tokenizer(str(tiny_model("plain")))([TEXT, "Hi"]).input_ids
    file = shutil.copytree(tiny_model("plain"), tmp_path / "copy") / "tokenizer.json"
    table = json.loads(file.read_text())
    (table["model"] if name == "dropout" else table)[name] = SAVED[name]
    file.write_text(json.dumps(table))
    tokenizer = load_tokenizer(str(file.parent))
    assert tokenizer([TEXT, "Hi"]).input_ids == right
    tokenizer.save_pretrained(tmp_path / "exported")
    assert AutoTokenizer.from_pretrained(tmp_path / "exported")([TEXT, "Hi"]).input_ids == right


def test_a_tokenizer_that_samples_is_refused(tiny_model: Callable[[str], Path], monkeypatch: Any) -> None:
    class Sampling:
        eos_token_id = pad_token_id = 0

        def __call__(self, texts: list[str], **_: Any) -> Any:
            return type("Batch", (), {"input_ids": [[i] for i in range(len(texts))]})

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: Sampling())
    with pytest.raises(FedKSeedError, match="other tokens each time"):
        load_tokenizer(str(tiny_model("plain")))
