"""What the README shows works as it stands."""

import re

from fedkseed import Adapter

from .conftest import recipe_text


def test_the_python_example_runs(request, tmp_path, monkeypatch, model_folder, data_file):
    readme = (request.config.rootpath / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "recipes").mkdir()
    small = recipe_text(model_folder, data_file, rounds="rounds = 4")
    (tmp_path / "recipes" / "quickstart.toml").write_text(small)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102 - the point of the test
    assert Adapter.load(tmp_path / "adapter.safetensors").provenance["rounds"] == 4
    assert len(code.strip().splitlines()) <= 20
