"""README.md and docs/: Python runs, commands are understood, paths exist."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hvt.cli import build_parser
from hvt.cli.flags import keywords_of
from hvt.config import HVTConfig
from hvt.training.recipe import Recipe, list_recipes, load_recipe
from hvt.zoo import get_config, write_config

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [page.read_text() for page in PAGES if page.name in ("README.md", "power.md")]
BLOCKS = re.findall(r"^```python\n(.*?)^```", "".join(RUN), flags=re.M | re.S)


@pytest.mark.parametrize("block", BLOCKS)
def test_python_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HVT_CACHE", str(tmp_path / "cache"))
    draw = np.random.default_rng(0)
    for name in ("cat", *(f"IMAGES/{kind}/{n}" for kind in "ab" for n in range(6))):
        path = tmp_path / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(path)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every `hvt` command in a block of code has flags and recipes that there are."""
    monkeypatch.chdir(tmp_path)
    write_config(get_config("hvt_ti_1"), "plan.json")
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True) if re.match(r"(\S+ -m )?hvt \w", line) else []
        if not words:
            continue
        args = build_parser().parse_args(words[words.index("hvt") + 1 :])
        if getattr(args, "recipe", None) in list_recipes():
            values, overrides = keywords_of(Recipe, args), keywords_of(HVTConfig, args)
            load_recipe(args.recipe).replace(overrides, **values)


def test_paths_exist() -> None:
    text = README.read_text()
    if not (ROOT / "benchmarks").is_dir():
        pytest.skip("a source distribution has no benchmarks/ and docs/")
    linked = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    tour = (ROOT / "CONTRIBUTING.md").read_text().split("## The files")[1]
    toured = re.findall(r"^\| `([^`]+)` \| ", tour, flags=re.M)
    assert linked
    assert toured
    assert [path for path in linked + toured if not (ROOT / path).exists()] == []
