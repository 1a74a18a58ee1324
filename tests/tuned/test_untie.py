"""A model with an output matrix of its own: the same predictions, two matrices, and errors that say what to do."""

import pytest
import torch
from typer.testing import CliRunner

from fedkseed import FedKSeedError
from fedkseed.cli import app
from fedkseed.models.load import load_model, load_tokenizer
from fedkseed.models.loss import output_layer, output_weights
from fedkseed.tuned.untie import untie


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_untied_model_predicts_the_same_and_its_matrices_change_apart(tmp_path, model_folder, dtype):
    found = CliRunner().invoke(app, ["untie", str(model_folder), str(tmp_path / "untied"), "--dtype", dtype])
    assert found.exit_code == 0, found.output
    before, after = (load_model(str(folder), dtype) for folder in (model_folder, tmp_path / "untied"))
    more = sum(p.numel() for p in after.parameters()) - sum(p.numel() for p in before.parameters())
    assert f"with {more:,} weights more" in " ".join(found.output.split())
    assert output_weights(after) == ["lm_head.weight"]
    tokens = torch.arange(1, 13).reshape(2, 6)
    with torch.inference_mode():
        logits = after(input_ids=tokens).logits
        assert torch.equal(logits, before(input_ids=tokens).logits)
        embedded = after.get_input_embeddings().weight.clone()
        output_layer(after).weight.mul_(2)
        assert torch.equal(after.get_input_embeddings().weight, embedded)
        assert torch.equal(after(input_ids=tokens).logits, 2 * logits)
    assert load_tokenizer(str(tmp_path / "untied")).encode("a cat") == load_tokenizer(str(model_folder)).encode("a cat")


def test_a_model_that_is_not_tied_and_a_folder_that_is_there_are_refused(tmp_path, model_folder):
    untie(str(model_folder), tmp_path / "untied")
    with pytest.raises(FedKSeedError, match="memory of its own already: use the model as it is"):
        untie(str(tmp_path / "untied"), tmp_path / "again")
    assert not (tmp_path / "again").exists()
    with pytest.raises(FedKSeedError, match="exists already; choose another folder"):
        untie(str(model_folder), tmp_path / "untied")
