"""The command for GPUs, on the CPU at a small size: every section, one that raises, and one that takes too long."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fedkseed.directions import FAMILIES, vectors
from fedkseed.paper import tiny_model
from fedkseed.wire.records import MAX_SCALARS

from . import FOLDER, command

SMALL = (
    "--device=cpu --types=float32 --weights=16384 --size=64 --shapes=tiny --tokens=16 --probes=2 --steps=1 --repeats=1"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the tiny model without its pretraining, whose tokenizer makes few tokens of the sample of Dolly."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model.model().save_pretrained(folder)
    tiny_model.tokenizer().save_pretrained(folder)
    return str(folder)


def carry_out(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The status and the sections, by name, of the command; later arguments take the place of small ones."""
    whole = command("gpu.py", "--out", out, *SMALL.split(), "--repeats=1", *arguments)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parent / "src")}
    done = subprocess.run(whole, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert out.exists(), done.stderr
    sections = json.loads(out.with_suffix(".json").read_text())["sections"]
    return done.returncode, {section["name"]: section for section in sections}


@pytest.mark.slow(seconds=72, guards="a section of the command for GPUs that no longer runs")
def test_every_section_passes_on_a_cpu(tmp_path, model):
    status, sections = carry_out(tmp_path / "all.md", "--model", model)
    assert {name: section["trouble"] for name, section in sections.items()} == dict.fromkeys(sections, "")
    assert {section["outcome"] for section in sections.values()} == {"passed"}
    assert status == 0
    rows = {name: section["rows"] for name, section in sections.items()}

    published = vectors.load()
    everything = sum(len(published[kind]) for kind in vectors.SECTIONS)
    checked = {row["backend"]: (row["vectors"], row["passed"]) for row in rows["vectors"]}
    assert list(checked) == ["numba", "torch", "numpy"]
    assert checked["torch"] == checked["numpy"] == (everything, everything)
    assert checked["numba"] == (len(vectors.cases_of("numba")),) * 2

    compared = {(row["family"], row["tensors"]) for row in rows["digests"]}
    assert compared == {(family, tensors) for family in FAMILIES for tensors in ("odd", "large")}
    assert {row[dtype] for row in rows["digests"] for dtype in ("float32", "bfloat16", "float16")} == {"equal"}
    assert {row["storage"] for row in rows["step"]} == {row["storage"] for row in rows["memory"]} == {"dense", "Q4_1"}
    for row in rows["probes"]:  # the loss of a batch of one example, about 6 nats, in float32
        assert row["from the loss with weights made"] < 1e-4
    on_device, adapter, on_cpu = rows["run"]
    assert on_device["digest"] == adapter["digest"] == on_cpu["digest"]  # the device is the CPU
    alone, two = rows["two at once"]
    assert (alone["clients at once"], two["clients at once"]) == (1, 2)
    assert alone["digest"] == two["digest"] == on_device["digest"]

    text = (tmp_path / "all.md").read_text()
    assert all(f"\n## {name}\n" in text for name in sections)


@pytest.mark.slow(seconds=23, guards="a failed section that hides the others")
def test_a_section_that_raises_leaves_the_others_whole(tmp_path):
    status, sections = carry_out(tmp_path / "a.md", "--model", str(tmp_path / "no.gguf"), "--only", "step", "vectors")
    assert [section["outcome"] for section in sections.values()] == ["failed", "passed"]
    assert status == 1
    said, _, whole = sections["step"]["trouble"].partition("\n")
    assert said.startswith(f"FedKSeedError: no model at {tmp_path / 'no.gguf'}")
    assert "(place.py:" in said
    assert "Traceback" in whole
    assert said in (tmp_path / "a.md").read_text()
    assert all(row["vectors"] == row["passed"] > 0 for row in sections["vectors"]["rows"])


@pytest.mark.slow(seconds=28, guards="a section that hangs and takes the others with it")
def test_a_section_that_takes_too_long_is_stopped_and_what_does_not_fit_is_not_begun(tmp_path, model):
    endless = ("--model", model, "--steps", str(MAX_SCALARS), "--minutes", "0.4", "--only", "run", "vectors")
    _, sections = carry_out(tmp_path / "b.md", *endless)
    assert [section["outcome"] for section in sections.values()] == ["stopped", "not run"]
    assert "| vectors | not run |" in (tmp_path / "b.md").read_text()
