"""Tables and fits that a script of benchmarks/ makes are those of the committed results."""

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(
    "words",
    [
        ["readme_table.py"],
        ["export_tables.py"],
        ["upcycle.py", "--table"],
        ["fit_quality.py"],
        ["scaling_tables.py"],
    ],
    ids=lambda words: words[0],
)
def test_what_a_script_makes_is_current(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = BENCHMARKS / words[0]
    if not script.exists():
        pytest.skip("a source distribution has no benchmarks/")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [str(script), *words[1:], "--check"])
    code: object = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    assert not code
