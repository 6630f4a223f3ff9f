"""The README as a package index shows it: links that lead somewhere from there too.

An index shows the README without the repository around it. With HVT_URL, the address under which
the repository's files are, such as https://example.org/hvt/blob/v0.1.0, relative links become
absolute; without it they become plain text, and images their description.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        readme = for_index(text, os.environ.get("HVT_URL", ""))
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


def for_index(text: str, url: str) -> str:
    """A README with its relative links made absolute, or taken out where there is no address."""

    def link(match: re.Match[str]) -> str:
        image, label, path = match.groups()
        if not url:
            return f"*{label}*" if image else label
        raw = "?raw=true" if image else ""
        return f"{image}[{label}]({url.rstrip('/')}/{path}{raw})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)]+)\)", link, text)
