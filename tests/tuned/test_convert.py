"""Published pickles as safetensors: the same bits, loaded as any model; faults are found before the folder is there."""

import json
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from fedkseed import FedKSeedError
from fedkseed.cli import app
from fedkseed.models import place
from fedkseed.models.load import load_model, load_tokenizer
from fedkseed.run.start_and_resume import start
from fedkseed.tuned import convert as module
from fedkseed.tuned.convert import convert

from ..conftest import recipe_text
from ..models.published import publish, weights


def written(folder: Path) -> dict[str, torch.Tensor]:
    tensors = dict[str, torch.Tensor]()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    return tensors


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_as_open_llama_3bs_is_refused_converted_and_tuned(tmp_path, monkeypatch, data_file, shards):
    published, output = publish(tmp_path / "published", shards), tmp_path / "model"
    with pytest.raises(FedKSeedError, match=f"its weights in pickles, .* fedkseed convert {published} NEW"):
        load_model(str(published))
    monkeypatch.setattr(module, "SHARD", 20_000)
    done = CliRunner().invoke(app, ["convert", str(published), str(output)])
    assert done.exit_code == 0, done.output
    expected = weights()
    size = sum(tensor.nbytes for tensor in expected.values())
    assert f"{len(expected)} tensors of {size:,} bytes, equal to those of" in " ".join(done.output.split())
    assert len([*output.glob("model-*-of-*.safetensors")]) > 1
    found = written(output)
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == expected[name].dtype and found[name].equal(expected[name]) for name in expected)
    assert not [*output.glob("*.bin*")]
    assert (output / "tokenizer.json").is_file()
    assert (output / "README.md").read_text() == "# OpenLLaMA\n"
    assert load_tokenizer(str(output))("the ant").input_ids == [1, 260, 264, 286]
    loaded = dict(load_model(str(output), "float16").named_parameters())
    assert all(loaded[name].equal(expected[name]) for name in loaded)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe_text(output, data_file, max_tokens="max_tokens = 400", rounds="rounds = 1"))
    start(recipe, tmp_path / "run")


def test_a_matrix_that_is_two_by_name_stays_one_if_the_configuration_ties_it(tmp_path):
    convert(publish(tmp_path / "published", tied=True), tmp_path / "model")
    loaded = load_model(str(tmp_path / "model"), "float16")
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    convert(publish(tmp_path / "apart"), tmp_path / "own")
    loaded = load_model(str(tmp_path / "own"), "float16")
    assert loaded.get_output_embeddings().weight is not loaded.get_input_embeddings().weight


class Calls:
    def __reduce__(self):
        return (print, ("code of a stranger's",))


class Claims:
    """Numbers of which a file has one for each of many."""

    def __new__(cls, *shape):
        return torch.zeros(1).half().expand(*shape)


def changed(folder: Path, **tensors: object) -> None:
    torch.save(
        weights() | {name.replace("__", "."): tensor for name, tensor in tensors.items()}, folder / "pytorch_model.bin"
    )


def repeated() -> torch.Tensor:
    return torch.ones(30_000).half()


def without(folder: Path, name: str) -> None:
    torch.save({key: tensor for key, tensor in weights().items() if key != name}, folder / "pytorch_model.bin")


def cut(folder: Path) -> None:
    file = min(folder.glob("pytorch_model*.bin"))
    file.write_bytes(file.read_bytes()[:-100])


def flipped(folder: Path) -> None:
    file = folder / "pytorch_model.bin"
    data = bytearray(file.read_bytes())
    data[data.index(weights()["lm_head.weight"].numpy().tobytes()) + 100] ^= 1
    file.write_bytes(data)


def packed(folder: Path) -> None:
    with zipfile.ZipFile(folder / "pytorch_model.bin") as old:
        contents = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in contents.items():
            new.writestr(name, content)


def indexed(folder: Path, **changes: str | None) -> None:
    index = folder / "pytorch_model.bin.index.json"
    table = json.loads(index.read_text())["weight_map"] | {k.replace("__", "."): v for k, v in changes.items()}
    index.write_text(json.dumps({"weight_map": {name: file for name, file in table.items() if file}}))


def again(folder: Path) -> None:
    file = folder / "pytorch_model-00002-of-00002.bin"
    torch.save(torch.load(file) | {"model.embed_tokens.weight": weights()["model.embed_tokens.weight"]}, file)


OF_ONE = {
    "reading it would call .*print": lambda folder: changed(folder, lm_head__weight=Calls()),
    "is no table of tensors by name": lambda folder: changed(folder, epoch=3),
    "has too few numbers for lm_head.weight": lambda folder: changed(folder, lm_head__weight=Claims(99, 32)),
    "is damaged, not complete, or from a PyTorch before 1.6": cut,
    "has too few numbers for tensors of": lambda folder: changed(folder, **dict.fromkeys("abcdefghij", repeated())),
    "compressed, or a wrong checksum": flipped,
    "is damaged, not complete": lambda folder: (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00."),
    r"is damaged.*\(compressed, or a wrong checksum\)": packed,
    "no place for, 1 in all, the first is model.extra.weight": lambda folder: changed(
        folder, model__extra__weight=torch.ones(2)
    ),
    "lacks 1 of its weights, the first is model.norm.weight": lambda folder: without(folder, "model.norm.weight"),
    "lm_head.weight|size|shape": lambda folder: changed(folder, lm_head__weight=torch.ones(7, 32).half()),
    "the folder has no tokenizer.json": lambda folder: (folder / "tokenizer.model").unlink(),
    "has no pytorch_model": lambda folder: (folder / "pytorch_model.bin").unlink(),
}
OF_SEVERAL = {
    "has lm_head.weight in pytorch_model-00002-of-00002.bin, it is in none": lambda folder: (
        folder / "pytorch_model-00002-of-00002.bin"
    ).unlink(),
    "has lm_head.weight in no file, it is in pytorch_model-00002": lambda folder: indexed(folder, lm_head__weight=None),
    "has lm_head.weight in x.bin": lambda folder: indexed(folder, lm_head__weight="x.bin"),
    "has a.weight in pytorch_model-00001-of-00002.bin": lambda folder: indexed(
        folder, a__weight="pytorch_model-00001-of-00002.bin"
    ),
    "model.embed_tokens.weight is in pytorch_model-00001-of-00002.bin and in .*-00002-of-": again,
    "is damaged, not complete": cut,
    "index.json has lm_head.weight in no file": lambda folder: (folder / "pytorch_model.bin.index.json").write_text(
        "{}"
    ),
}
FAULTS = [(1, *pair) for pair in OF_ONE.items()] + [(2, *pair) for pair in OF_SEVERAL.items()]


@pytest.mark.parametrize(("shards", "says", "spoil"), FAULTS, ids=[says for _, says, _ in FAULTS])
def test_faults_are_named_and_nothing_is_written(tmp_path, capsys, shards, says, spoil):
    published = publish(tmp_path / "published", shards)
    spoil(published)
    with pytest.raises(FedKSeedError, match=says) as error:
        convert(published, tmp_path / "model")
    assert str(published) in str(error.value)
    assert ".part" not in str(error.value)
    assert "code of a stranger's" not in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["published"]


def test_an_output_that_exists_and_a_table_of_a_great_size_are_refused(tmp_path, monkeypatch):
    published = publish(tmp_path / "published")
    with pytest.raises(FedKSeedError, match="exists already; choose another folder"):
        convert(published, published)
    monkeypatch.setattr(module, "MOST_TABLE", 1000)
    with pytest.raises(FedKSeedError, match="bytes of instructions"):
        convert(published, tmp_path / "model")


def test_a_name_on_the_hub_with_pickles_alone_says_how_to_convert_it(monkeypatch):
    import huggingface_hub

    class Api:
        files = ("config.json", "pytorch_model.bin", "tokenizer.model")

        def model_info(self, model: str, timeout: float) -> object:
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.files])

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    with pytest.raises(FedKSeedError, match="fedkseed convert FOLDER NEW, after hf download a/b --local-dir FOLDER"):
        place.require_there("a/b")
    Api.files = (*Api.files, "model.safetensors")
    assert place.require_there("a/b").name == "a/b"
