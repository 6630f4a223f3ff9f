"""What the site generates: references from the code, and links that leave `docs`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

import hvt
from hvt.cli import COMMANDS, build_parser
from hvt.config import HVTConfig
from hvt.costs import arrow, cost
from hvt.fields import expected, hints_of
from hvt.serve.settings import Settings
from hvt.training.recipe import Recipe
from hvt.zoo import NOTES, WEIGHT_URLS, get_config, list_models

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from readme_table import PAPER, SPEED, accuracy, fastest, machine_line, read, speed_of  # noqa: E402

_OUTSIDE = re.compile(r"(!?)\[([^]]*)]\((\.\./[^)#\s]*)(?:#[^)]*)?\)")
_AT_ROOT = re.compile(r"\[([^]]*)]\((?!\.\./|#|https?:)([^)]*)\)")
_CODE_MAP = ("<!-- house:", "<!-- step:", "<!-- request:", "## The files")
"""One of these is in each section of CONTRIBUTING.md that belongs to the code map."""
_PADDLEVIT = {
    "hvt_ti_1": 69.45, "hvt_s_0": 80.30, "hvt_s_2": 77.41, "hvt_s_3": 76.30, "hvt_s_4": 75.21,
}  # fmt: skip
"""PaddleViT's evaluation of the HVT authors' weights."""


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, and images of results that pages show."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    pages = {
        "reference/cli.md": _commands(),
        "reference/fields.md": _fields(),
        "reference/models.md": _models(),
        "reference/python.md": _python(),
        "reference/changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "reference/contributing.md": _sections(contributing, code_map=False),
        "reference/code.md": "# Code map\n\n" + _sections(contributing, code_map=True),
    }
    for path in sorted((ROOT / "docs/tutorials").glob("*.ipynb")):
        pages[f"tutorials/{path.stem}.md"] = _notebook(path)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for image in sorted((ROOT / "benchmarks/results").rglob("*.png")):
        name = image.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(image)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Link to images of results where the site has them; name other files of the repository."""
    folder = posixpath.dirname(page.file.src_uri)
    if page.file.src_uri in ("index.md", "install.md"):
        page.meta["hide"] = ["navigation"]  # of a tab with one page

    def resolve(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, match[3]))
        if target.startswith("docs/"):
            return match[0]
        if match[1]:
            return f"![{match[2]}]({posixpath.relpath(target, folder or '.')})"
        return f"{match[2]} (`{target}`)"

    markdown = _OUTSIDE.sub(resolve, markdown)
    if page.file.src_uri in (f"reference/{n}.md" for n in ("changelog", "contributing", "code")):
        markdown = re.sub(r"]\(docs/", "](../", markdown)  # written for the repository's root
        markdown = _AT_ROOT.sub(r"\1 (`\2`)", markdown)
    return markdown


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Mark short code in sentences, which stays on one line."""
    return re.sub(r"(?<!</span>)<code>(?=[^<]{1,30}</code>)", '<code class="short">', html)


def _sections(text: str, code_map: bool) -> str:
    """Those sections of CONTRIBUTING.md that are the code map, or the others."""
    first, *sections = re.split(r"(?m)^(?=## )", text)
    chosen = [each for each in sections if any(mark in each for mark in _CODE_MAP) == code_map]
    return "".join(chosen if code_map else [first, *chosen])


def _notebook(path: Path) -> str:
    """A notebook as Markdown: text, code and its printed output."""
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
                parts.append(
                    f"{'#' * len(words)} {' '.join(words)}\n\n```text\n{usage.rstrip()}\n```"
                )
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


_GROUPS: tuple[tuple[type, str, str], ...] = (
    (
        Recipe,
        "Recipe",
        "Keys of a recipe's `.toml` file, flags of `hvt train` (with dashes, as `--batch-size`) "
        "and keywords of `hvt.train`.",
    ),
    (
        HVTConfig,
        "HVTConfig",
        "Keys under `[overrides]` of a recipe, flags of `hvt train`, `hvt cost` and `hvt plan`, "
        "keywords of `hvt.create_model` and `hvt.load`.",
    ),
    (
        Settings,
        "Service",
        "Flags of `hvt serve` and keywords of `hvt.serve.settings.Settings`.",
    ),
)


def _fields() -> str:
    parts = ["# Recipe and config fields", "Generated from the dataclasses."]
    for kind, title, about in _GROUPS:
        rows = ["| field | values | default | meaning |", "| --- | --- | --- | --- |"]
        for field in dataclasses.fields(kind):
            limits = {k: v for k, v in field.metadata.items() if k != "help"}
            values = expected(hints_of(kind)[field.name], **limits)
            default = "" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
            cells = (f"`{field.name}`", values, default, field.metadata.get("help", ""))
            rows.append(_row(*cells))
        parts += [f"## {title}", about, "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _models() -> str:
    """A table of all models and a card for each."""
    paper, speed = read(PAPER), read(SPEED)
    timed = {row["model"]: speed_of(row) for row in fastest(speed, "inference")}
    rows = [
        "| model | tokens | GFLOPs | params (M) | ImageNet top-1 (paper) | images/s | weights |",
        "| --- | --- | --: | --: | --: | --: | --- |",
    ]
    cards = []
    for name in list_models():
        price = cost(get_config(name))
        # The paper's PoWER models have other retentions than ours.
        top1 = "" if name in NOTES else accuracy(paper, name, "imagenet_top1")
        figures = (arrow(price.tokens), f"{price.gflops:.2f}", f"{price.params_m:.2f}", top1)
        weights = "published" if _weights(name) else "none"
        rows.append(_row(f"[`{name}`](#{name})", *figures, timed.get(name, ""), weights))
        cards.append(_card(name, top1))
    about = (
        "Costs at 224 pixels and 1,000 classes, by `hvt.cost`. `hvt.create_model(NAME)` builds a "
        "model with random weights, `pretrained=True` fetches the published ones. We have not "
        "evaluated the HVT authors' weights; the cards cite PaddleViT's evaluation. Two "
        "models are built in, with weights: [`imagenet` and `cifar100`](../built-in.md)."
    )
    measured = machine_line(speed).partition(" “×")[0]  # the ratio is a column of the README only
    parts = ["# Models", about, "\n".join(rows), measured, "## Cards", *cards]
    return "\n\n".join(parts) + "\n"


def _card(name: str, top1: str) -> str:
    config, price, weights = get_config(name), cost(get_config(name)), _weights(name)
    head = "class token" if config.class_token else "average of the tokens"
    facts = {
        "Input": f"{config.image[0]} × {config.image[1]} pixels, patches of {config.patch_size}",
        "Blocks": f"{config.depth} of width {config.width} with {config.num_heads} heads",
        "Head": head,
        "Pooling": _pooling(config),
        "Tokens": arrow(price.tokens),
        "Cost": f"{price.gflops:.2f} GFLOPs, {price.params_m:.2f} M parameters",
        "ImageNet top-1": f"{top1} % (paper)" if top1 else "not published",
        "Weights": f"<{weights}>" if weights else "none published: train it",
    }
    if name in _PADDLEVIT:
        facts["ImageNet top-1"] += f"; {_PADDLEVIT[name]:.2f} % (PaddleViT's evaluation)"
    if name in NOTES:
        facts["Note"] = NOTES[name]
    lines = ["| | |", "| --- | --- |", *(_row(key, value) for key, value in facts.items())]
    return f"### {name}\n\n" + "\n".join(lines)


def _weights(name: str) -> str | None:
    """Where published weights of a model are; several names may stand for one architecture."""
    alike = (one for one in list_models() if get_config(one) == get_config(name))
    return next((WEIGHT_URLS[one] for one in (name, *alike) if one in WEIGHT_URLS), None)


def _pooling(config: HVTConfig) -> str:
    if config.retention:
        return "PoWER drops tokens in every block"
    if not config.pool_blocks:
        return "none"
    window = f"kernel {config.pool_kernel}, stride {config.pool_stride}"
    blocks = ", ".join(map(str, config.pool_blocks))
    return f"{config.pool_dims}D {config.pool}, {window}, after blocks {blocks}"


_PYTHON = {
    "Models and costs": "create_model list_models get_config cost Cost HVTConfig HVT",
    "Checkpoints": "load save from_pretrained",
    "Training": "fit train Recipe Result upcycle plan search",
    "Using a model": "Predictor Embedder evaluate Score export",
    "Errors": "HVTError CheckpointError",
}


def _python() -> str:
    """The public names by subject; those of no subject come last."""
    others = sorted(set(hvt._HOMES) - set(" ".join(_PYTHON.values()).split()))
    parts = ["# Python", "The public names of `import hvt`."]
    for title, names in {**_PYTHON, "Others": " ".join(others)}.items():
        known = [getattr(hvt, name) for name in names.split()]
        shown = [each for each in known if hasattr(each, "__qualname__")]
        parts += [f"## {title}"] if shown else []
        parts += [f"::: {each.__module__}.{each.__qualname__}" for each in shown]
    return "\n\n".join(parts) + "\n"
