"""Makes the description of the package from README.md: its relative links become absolute.

A package index shows the README outside the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# The target of a link or, with "!" in front, of a picture; one within the page stays as it is.
_RELATIVE = re.compile(r"(!?)(\[[^\]]*\]\()(?!\w+:|#)")


def absolute(text: str, repository: str, version: str) -> str:
    """Make the relative links of a README lead to the files of this version."""

    def link(match: re.Match[str]) -> str:
        return f"{match[0]}{repository}/{'raw' if match[1] else 'blob'}/v{version}/"

    return _RELATIVE.sub(link, text)


class Readme(MetadataHookInterface):
    """Sets ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling for every build and every editable installation."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = absolute(text, metadata["urls"]["Repository"], metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
