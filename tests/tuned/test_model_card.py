"""Model cards: facts that the run has kept, front matter that Hugging Face reads, and nothing of this machine."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard import metadata_load

from fedkseed import Adapter
from fedkseed.evaluation.statistics import Evaluation, estimate, paired_change
from fedkseed.run.store import Store
from fedkseed.tuned.export import export
from fedkseed.tuned.load import open_tuned
from fedkseed.tuned.model_card import licence, shortened

from ..conftest import rows

PRIVATE = """[privacy]
epsilon = 40.0
delta = 1e-3
norm = 0.1
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory, model_folder) -> Path:
    folder = tmp_path_factory.mktemp("bases") / "Tiny-Base"
    shutil.copytree(model_folder, folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A base\n")
    return folder


@pytest.fixture(scope="module")
def run(finished, base) -> Path:
    return finished(base, more=PRIVATE)


def card_of(run: Path, output: Path, *arguments, **options) -> str:
    export(open_tuned(run), output, *arguments, **options)
    return (output / "README.md").read_text()


def test_the_front_matter_is_that_of_hugging_face(run, tmp_path):
    card_of(run, tmp_path / "gguf", "gguf", kind="q8_0")
    data = ModelCard.load(tmp_path / "gguf" / "README.md").data.to_dict()
    assert data["license"] == "apache-2.0"
    assert data["base_model"] == "Tiny-Base"
    assert (data["library_name"], data["base_model_relation"]) == ("gguf", "quantized")
    assert {"fedkseed", "federated-learning", "gguf"} <= {*data["tags"]}
    assert data["fedkseed"] == {"template": "paper", "separator": "\n", "dtype": "float32"}


def test_the_facts_are_those_of_the_run(run, tmp_path):
    text, store, adapter = card_of(run, tmp_path / "hf"), Store(run), Adapter.load(run / "adapter.safetensors")
    assert adapter.base in text
    assert adapter.tuned in text
    assert store.head(3).hex() in text
    for row in (
        "| base model | Tiny-Base |",
        "| data | rows.jsonl |",
        "| rounds | 3 |",
        "| clients | 4, 2 a round at most |",
        f"| traffic of all rounds | {sum(r['bytes_total'] for r in store.reports()):,} bytes |",
        "| licence of the base model | apache-2.0 |",
    ):
        assert row in text
    promise = adapter.provenance["privacy"]
    assert 0 < promise["epsilon"] <= 40 * (1 + 1e-9)
    assert f"| differential privacy | epsilon {promise['epsilon']:.3g}, delta 0.001, for one client |" in text
    assert "    fedkseed export run hf --format hf\n" in text


def test_metrics_stand_there_before_and_after_with_their_errors(run, tmp_path):
    text, found = card_of(run, tmp_path / "hf"), Store(run).evaluations()
    before, after = (Evaluation.of(found[rounds]) for rounds in (0, 3))
    cells = [estimate(before.losses), estimate(after.losses), paired_change(before.losses, after.losses)]
    assert f"| held-out loss (8) | {' | '.join(map(str, cells))} |" in text
    assert "| Rouge-L (2) |" in text
    assert "of the model as the run had it, in float32." in text  # a folder may hold rounded weights


@pytest.mark.parametrize("format_", ["hf", "fedkseed"])
def test_neither_rows_nor_paths_are_in_a_card(format_, run, tmp_path):
    text = card_of(run, tmp_path / "out", format_)
    assert not re.search(r"/(tmp|home|root)\b", text)
    assert str(tmp_path.parent) not in text
    for row in rows():
        assert row["response"] not in text


def test_a_run_of_adapters_has_a_card_of_ours(finished, tmp_path):
    run = finished(algorithm='algorithm = "fedit"', lr="lr = 3e-3")
    text = card_of(run, tmp_path / "peft", "peft")
    assert "| algorithm | fedit |" in text
    assert "| differential privacy | none |" in text
    assert Store(run).recall("identity")["a base model of digest"] in text
    assert metadata_load(tmp_path / "peft" / "README.md")["library_name"] == "peft"


def test_an_adapter_file_alone_has_a_card_of_what_it_knows(run, tmp_path):
    shutil.copyfile(run / "adapter.safetensors", tmp_path / "a.safetensors")
    text = card_of(tmp_path / "a.safetensors", tmp_path / "hf")
    assert "| rounds | 3 |" in text
    assert "| data |" not in text
    assert "## Measured" not in text


FORGED = "\n\n# Audited by\n<b>x</b> | [y](z) `\x1b[2J\u202e```\n---\n## Measured " + "e" * 5000


@pytest.mark.parametrize("place", ["algorithm", "privacy", "rounds", "separator", "base", "licence", "file"])
def test_texts_of_a_strangers_files_are_no_markup_of_the_card(place, run, base, tmp_path):
    """Finding 13: an adapter wrote headings, "Audited by" and an epsilon of its own into the card."""
    adapter = Adapter.load(run / "adapter.safetensors")
    origin = {**adapter.provenance, "rounds": 3, "privacy": {"epsilon": 0.01, "delta": 1e-9, "unit": "client"}}
    shutil.copytree(base, tmp_path / "Base")
    if place == "privacy":
        origin["privacy"]["unit"] = FORGED
    elif place == "licence":
        (tmp_path / "Base" / "README.md").write_text(f"---\nlicense: {json.dumps(FORGED)}\n---\n")
    elif place != "base":
        origin[place] = FORGED
    file = tmp_path / ("a # <b> `c.safetensors" if place == "file" else "a.safetensors")
    replace(adapter, provenance=origin, tuned=FORGED if place == "base" else None).save(file)
    export(open_tuned(file, str(tmp_path / "Base")), tmp_path / "out", "fedkseed")
    text = (tmp_path / "out" / "README.md").read_text()
    front, body = text.removeprefix("---\n").split("\n---\n", 1)
    assert "\x1b" not in text
    assert "\u202e" not in body
    assert yaml.safe_load(front)["tags"][0] == "fedkseed"
    above, prompt = body.split("## Prompt")
    fence = re.search("\n(`{3,})text\n", prompt)[1]
    outside = above + prompt.split(fence)[0] + prompt.split(fence)[-1]
    assert re.findall("(?m)^#.*", outside) == ["# Base, tuned by federated learning", "## Made by"]
    words = re.sub(r"`adapter.safetensors`|(?m:^    .*)", "", outside)
    assert not re.search(r"(?<!\\)[<`\[]", words)
    assert len(body) < 8000
    assert "as the adapter's file says" in above


def test_a_run_that_can_not_be_read_is_exported_and_its_card_says_so(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "run.sqlite").write_bytes(b"damaged")
    text = card_of(tmp_path / "run", tmp_path / "hf")
    assert "| run | not read: an earlier release made it, or it is damaged" in text
    assert Adapter.load(run / "adapter.safetensors").tuned in text
    assert "## Measured" not in text


def test_a_model_that_was_not_tuned_is_not_said_to_be(base, tmp_path):
    text = card_of(base, tmp_path / "gguf", "gguf")
    assert "# Tiny-Base, in another format" in text
    assert "tuned with fedkseed" not in text
    assert "differential privacy" not in text
    data = metadata_load(tmp_path / "gguf" / "README.md")
    assert data["license"] == "apache-2.0"
    assert (data["base_model"], data["base_model_relation"]) == ("Tiny-Base", "quantized")


def test_a_licence_that_is_not_named_is_unknown(base, tmp_path):
    assert licence(str(base)) == "apache-2.0"
    assert licence(None) == licence(str(tmp_path / "nowhere")) == "unknown"
    (tmp_path / "README.md").write_text("# no front matter\n")
    assert licence(str(tmp_path)) == "unknown"
    (tmp_path / "README.md").write_text(f"---\nlicense: {json.dumps(['a', 'b'])}\n---\n")
    assert licence(str(tmp_path)) == "unknown"


def test_names_are_shortened_only_where_they_are_paths(tmp_path):
    assert shortened(str(tmp_path / "some" / "model.gguf")) == "model.gguf"
    assert shortened("owner/name") == "owner/name"
    assert shortened("package:words/model.gguf") == "package:words/model.gguf"
    assert shortened("./models/base") == "base"
