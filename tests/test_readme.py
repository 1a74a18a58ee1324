"""The README's Python examples work as they stand."""

import re
import subprocess
import sys

import pytest

import fedkseed as fk

from .conftest import recipe_text


@pytest.mark.parametrize("number", [0, 1])
def test_a_python_example_runs(number, request, tmp_path, monkeypatch, model_folder, data_file, capsys):
    readme = (request.config.rootpath / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(examples) == 2
    small = recipe_text(model_folder, data_file, rounds="rounds = 4")
    (tmp_path / "dolly.toml").write_text(small)
    monkeypatch.chdir(tmp_path)
    exec(compile(examples[number], "README.md", "exec"), {})  # noqa: S102 - the point of the test
    assert fk.Adapter.load(tmp_path / "adapter.safetensors").provenance["rounds"] == [15, 4][number]
    assert len([line for line in examples[number].splitlines() if line]) <= 15
    if number == 0:
        first, last = re.findall(r"\d\.\d+", capsys.readouterr().out)[-2:]  # the last line is the example's own
        assert float(last) < float(first)


def test_every_public_name_is_there_and_kernels_and_codecs_need_no_import_of_their_own():
    for name in fk.__all__:
        assert getattr(fk, name) is not None
    code = "import fedkseed as fk; print(fk.directions.project, fk.wire.encode)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = fk.nothing
