"""Places of models: what is no model is refused by its name, before anything is loaded."""

import shutil

import pytest

from fedkseed import Adapter, FedKSeedError
from fedkseed.data.file_formats import open_rows
from fedkseed.models.place import find
from fedkseed.tuned.load import open_tuned

POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:"
    "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "tokenizer.json",
        "config.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "added_tokens.json",
        "m.gguf",
    ],
)
def test_a_pointer_in_the_place_of_a_models_file_is_called_so(model_folder, tmp_path, name):
    """A clone that was made without Git LFS has them for every large file; they are read as broken models."""
    shutil.copytree(model_folder, tmp_path / "model")
    (tmp_path / "model" / name).write_text(POINTER)
    place = tmp_path / "model" / name if name == "m.gguf" else tmp_path / "model"
    with pytest.raises(FedKSeedError, match=rf"{name} is a pointer of Git LFS, and not the file: `git lfs pull`"):
        find(str(place))


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "scores.json", "more.safetensors"])
def test_a_pointer_in_the_place_of_a_file_that_nobody_reads_is_let_be(model_folder, tmp_path, name):
    shutil.copytree(model_folder, tmp_path / "model")
    (tmp_path / "model" / name).write_text(POINTER)
    assert find(str(tmp_path / "model")).name == str(tmp_path / "model")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.json.gz", "a.xlsx", "a.safetensors", "adapters"])
def test_a_pointer_in_the_place_of_any_other_file_is_called_so(tmp_path, name):
    path, opens = tmp_path / name, {"a.safetensors": Adapter.load, "adapters": open_tuned}.get(name, open_rows)
    if name == "adapters":
        path.mkdir()
        (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors" if path.is_dir() else path).write_text(POINTER)
    with pytest.raises(FedKSeedError, match="is a pointer of Git LFS, and not the file"):
        opens(path if opens != open_rows else str(path))
