"""The documentation builds without a warning, and its notebooks run."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from hvt.serve.settings import Settings

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
if not (ROOT / "mkdocs.yml").exists():
    pytest.skip("the site is built in a clone", allow_module_level=True)


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "--minutes" in (tmp_path / "reference/cli.html").read_text(encoding="utf-8")
    assert "Embedder" in (tmp_path / "reference/python.html").read_text(encoding="utf-8")
    assert "pool_stride" in (tmp_path / "reference/fields.html").read_text(encoding="utf-8")
    code_map = (tmp_path / "reference/code.html").read_text(encoding="utf-8")
    assert all(name in code_map for name in ("cli", "trainer.py", "body.py", "src/hvt/zoo.py"))
    assert "hvt_ti_1.pth" in (tmp_path / "reference/models.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path: Path, tmp_path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    code = re.sub(r"\bepochs=\d+", "epochs=1", code)  # the notebook's own take minutes
    environment = {**os.environ, "HVT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_pages_are_short() -> None:
    """Except the record of the reproduction, whose tables are generated."""
    long = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / "docs").rglob("*.md")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 250
    }
    assert long.keys() <= {"docs/reproduction/results.md"}, long


def test_the_errors_of_the_reference_exist() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `(hvt\.[\w.]+)`", page, flags=re.M)
    assert len(named) > 5
    for name in named:
        module, _, error = name.rpartition(".")
        assert issubclass(getattr(import_module(module), error), Exception)


def test_the_limits_of_the_reference_are_the_defaults() -> None:
    page = (ROOT / "docs/reference/http.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `--([a-z-]+)` \| ([\d,]+) \|", page, flags=re.M)
    assert len(rows) > 10
    for flag, default in rows:
        assert getattr(Settings(), flag.replace("-", "_")) == int(default.replace(",", "")), flag
