"""What mkdocs adds to the pages: references from the code, and links that leave `docs`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

import hvt
from hvt.cli import COMMANDS, build_parser
from hvt.config import HVTConfig
from hvt.costs import cost
from hvt.fields import hints_of
from hvt.training.recipe import Recipe
from hvt.zoo import get_config, list_models

ROOT = Path(__file__).parents[2]
_OUTSIDE = re.compile(r"(!?)\[([^]]*)]\((\.\./[^)#\s]*)(?:#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made from the code."""
    pages = {
        "reference/cli.md": _commands(),
        "reference/fields.md": _fields(),
        "reference/models.md": _models(),
        "reference/python.md": _python(),
        "reference/changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        "reference/contributing.md": (ROOT / "CONTRIBUTING.md").read_text(),
    }
    for path in sorted((ROOT / "docs/tutorials").glob("*.ipynb")):
        pages[f"tutorials/{path.stem}.md"] = _notebook(path)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Name files of the repository, which the site does not have, instead of linking to them."""
    folder = posixpath.dirname(page.file.src_uri)
    at_root = folder == "reference" and page.file.name in ("changelog", "contributing")

    def resolve(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, match[3]))
        return match[0] if target.startswith("docs/") else f"{match[2]} (`{target}`)"

    markdown = _OUTSIDE.sub(resolve, markdown)
    if at_root:  # written for the repository's root
        markdown = re.sub(r"]\(docs/", "](../", markdown)
        markdown = re.sub(r"\[([^]]*)]\((?!\.\./|#|https?:)([^)]*)\)", r"\1 (`\2`)", markdown)
    return markdown


def _notebook(path: Path) -> str:
    """A notebook as Markdown: text, code and what the code printed."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join("".join(output.get("text", ())) for output in cell["outputs"])
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _commands() -> str:
    """Every command with its help, as the terminal shows it."""
    parts = ["# Command line", "Generated from the parsers; `hvt COMMAND --help` prints the same."]
    for name in COMMANDS:
        parser = build_parser([name])
        for words, sub in _subparsers(parser, ("hvt",)):
            if len(words) > 1 and words[1] == name:
                usage = sub.format_help().replace("```", "'''")
                parts.append(f"## {' '.join(words)}\n\n```text\n{usage.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _subparsers(
    parser: argparse.ArgumentParser, words: tuple[str, ...]
) -> list[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    found = [(words, parser)]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                found += _subparsers(sub, (*words, name))
    return found


def _fields() -> str:
    parts = ["# Recipe and config fields", "Every field is a flag of `hvt train` and a keyword."]
    for cls, title in ((Recipe, "Recipe"), (HVTConfig, "HVTConfig")):
        rows = [
            f"## {title}",
            "",
            "| field | type | default | meaning |",
            "| --- | --- | --- | --- |",
        ]
        hints = hints_of(cls)
        for field in dataclasses.fields(cls):
            default = "" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
            kind = getattr(hints[field.name], "__name__", None)
            shown = kind if kind and "[" not in str(hints[field.name]) else str(hints[field.name])
            text = field.metadata.get("help", "")
            cells = (f"`{field.name}`", f"`{shown}`", default, text)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _models() -> str:
    rows = ["# Models", "", "Costs at 224 pixels and 1,000 classes, from `hvt models`.", ""]
    rows += ["| model | tokens | GFLOPs | parameters (M) |", "| --- | --- | --: | --: |"]
    for name in list_models():
        price = cost(get_config(name))
        tokens = " → ".join(str(n) for n in dict.fromkeys(price.tokens))
        rows.append(f"| `{name}` | {tokens} | {price.gflops:.2f} | {price.params_m:.2f} |")
    return "\n".join(rows) + "\n"


def _python() -> str:
    names = [name for name in sorted(hvt._HOMES) if not name.startswith("_")]
    parts = ["# Python", "What `import hvt` offers."]
    for name in names:
        value = getattr(hvt, name)
        home = getattr(value, "__module__", None)
        if home and hasattr(value, "__qualname__"):
            parts.append(f"::: {home}.{value.__qualname__}")
    return "\n\n".join(parts) + "\n"
