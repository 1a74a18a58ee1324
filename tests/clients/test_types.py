"""The types in the comments of clients/browser, by TypeScript's own compiler where it is at hand."""

import shutil
import subprocess
from pathlib import Path

import pytest

from fedkseed.network.https.browser_page import folder

TSC = shutil.which("tsc")


@pytest.mark.skipif(TSC is None, reason="no tsc on PATH: npm install --global typescript")
def test_every_type_fits():
    done = subprocess.run([TSC or "tsc", "-p", folder()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_documentation_says_what_each_module_is():
    text = (Path(__file__).parents[2] / "docs" / "browser.md").read_text()
    for path in folder().glob("*.js"):
        assert f"`{path.name}`" in text, f"docs/browser.md does not say what {path.name} is"
