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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit_quality.py", "--paper", "nowhere"], "nowhere has no results of the paper"),
        (["latency.py", "--gflops", "1e-9", "2e-9"], "too few configs of the plan's space"),
        (["latency.py", "--gflops", "5", "0.05"], 2),
    ],
    ids=["no runs", "no configs", "no bounds"],
)
def test_nothing_is_made_of_nonsense(
    words: list[str], message: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = BENCHMARKS / words[0]
    if not script.exists():
        pytest.skip("a source distribution has no benchmarks/")
    monkeypatch.setattr(sys, "argv", [str(script), *words[1:], *_FEW.get(words[0], [])])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert str(message) in str(ended.value.code)


_FEW = {"latency.py": ["--count", "1", "--device", "cpu"]}
