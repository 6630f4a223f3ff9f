"""The paper's tables as data: every printed cost comes out, and the command that compares them."""

import json
import re
from pathlib import Path

import pytest
from conftest import Command

import hvt
from hvt.paper import tables
from hvt.paper.tables import get_table

ROOT = Path(__file__).parents[1]


def test_every_table_of_the_paper_is_there() -> None:
    read = tables.tables()
    assert [table.place for table in read.values()][:9] == [f"Table {n}" for n in range(1, 10)]
    assert sum(len(table.rows) for table in read.values()) == 38
    stages = get_table("pooling_stages")
    assert stages.row("M=4").top1 == {"imagenet": 75.23, "cifar100": 75.43}
    power = [row.name for row in get_table("main").rows if row.power]
    assert power == ["DeiT-Ti + PoWER", "DeiT-S + PoWER"]


def test_the_list(command: Command) -> None:
    code, out, _ = command("paper")
    lines = out.splitlines()[1:]
    assert code == 0
    assert [line.split()[0] for line in lines] == list(tables.tables())
    assert "Table 2" in lines[1]
    code, out, _ = command("paper", "--json")
    assert code == 0
    assert json.loads(out)[2]["rows"] == ["Conv", "Avg", "Max"]


def test_costs_prints_them_all(command: Command) -> None:
    code, out, _ = command("paper", "costs")
    assert code == 0
    assert "72 of 72 are equal to the printed digit" in out
    assert sum(line.split()[-1] == "equal" for line in out.splitlines()) == 72
    assert "UNEQUAL" not in out
    assert "with 100 classes it would be 0.6849" in out


def test_costs_of_one_table_as_json(command: Command) -> None:
    code, out, _ = command("paper", "costs", "resolution", "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["printed"] for row in rows if row["what"] == "GFLOPs"] == [0.69, 1.39, 3.0, 4.48]
    assert all(row["equal"] for row in rows)
    # What the footnote says: at its own 100 classes this row would not be.
    assert round(hvt.cost("hvt_s_4", img_size=160, num_classes=100).gflops, 4) == 0.6849


def test_a_cost_that_differs_is_reported(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "tables.csv"
    wrong.write_text(tables.FILE.read_text().replace("0.37,22.55", "0.38,22.55"))
    monkeypatch.setattr(tables, "FILE", wrong)
    tables.tables.cache_clear()
    try:
        code, out, _ = command("paper", "costs", "patch_size")
    finally:
        monkeypatch.undo()
        tables.tables.cache_clear()
    assert code == 1
    assert out.count("UNEQUAL") == 1
    assert "5 of 6 are equal" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["costs", "mian"], "the paper has no table 'mian': did you mean main?"),
        (["cost"], "unknown command 'cost': did you mean costs?"),
    ],
)
def test_bad_input_is_one_sentence(command: Command, words: list[str], says: str) -> None:
    code, _, err = command("paper", *words)
    assert code == 2
    assert says in err
    assert err.count("\n") == 1


def test_the_files_that_the_guide_names_exist() -> None:
    guide = ROOT / "docs" / "paper.md"
    if not guide.exists():
        pytest.skip("a source distribution has no docs/")
    named = set(re.findall(r"`([\w/]+(?:\.(?:py|toml|csv)|/))`", guide.read_text(encoding="utf-8")))
    assert {"costs.py", "training/recipe.py", "see/"} <= named
    places = (ROOT / "src" / "hvt", ROOT)
    assert not [name for name in named if not any((place / name).exists() for place in places)]
