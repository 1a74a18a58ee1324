"""The model that is made: small, whole, and the same each time."""

import torch

from fedkseed.models.load import load_model, load_tokenizer
from fedkseed.paper import tiny_model
from fedkseed.paper.byte_counts import architecture


def test_the_model_is_made_once_and_can_be_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_model, "STEPS", 2)
    before = torch.random.get_rng_state()
    first, second = tiny_model.make(tmp_path / "a"), tiny_model.make(tmp_path / "b")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    monkeypatch.setattr(tiny_model, "pretrain", lambda *_: 1 / 0)
    assert tiny_model.make(first) == first
    assert sum(p.numel() for p in load_model(str(first)).parameters()) == architecture(str(first)).weights == 139_584
    tokenizer = load_tokenizer(str(first))
    text = "Größe: 12 µm?\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
