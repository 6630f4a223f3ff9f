"""README.md: its Python runs, its table is current, its paths exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.M | re.S)


def test_there_is_python_to_run() -> None:
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_python_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_paths_exist() -> None:
    text = README.read_text()
    if not (ROOT / "benchmarks").is_dir():
        pytest.skip("a source distribution has no benchmarks/ and docs/")
    linked = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    toured = re.findall(r"^\| `([^`]+)` \| ", text.split("## The files")[1], flags=re.M)
    assert linked
    assert toured
    assert [path for path in linked + toured if not (ROOT / path).exists()] == []
