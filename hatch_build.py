"""The README of a wheel: its links, relative in the repository, are made absolute from the address in pyproject."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = r"\]\((?![a-z]+:|#)([^)\s]+)\)"


class AbsoluteLinks(MetadataHookInterface):
    """Hatchling's metadata hook `custom`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme; `[project.urls] Source` is the one place of the repository's address."""
        address = metadata["urls"]["Source"].rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = re.sub(r"(!\[[^\]]*)" + RELATIVE, rf"\1]({address}/raw/HEAD/\2)", text)
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": re.sub(RELATIVE, rf"]({address}/blob/HEAD/\1)", text),
        }
