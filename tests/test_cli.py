"""The commands that list and price models; bad input is one sentence and exit code 2."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hvt
from hvt.cli import main
from hvt.cli.output import Columns, emit
from hvt.training.recipe import list_recipes, load_recipe
from hvt.zoo import BUILT_IN, NOTES, WEIGHT_URLS

Captured = pytest.CaptureFixture[str]


def run(capsys: Captured, *argv: str) -> str:
    """What a command that succeeds prints; rich is left no reason to say anything elsewhere."""
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def run_json(capsys: Captured, *argv: str) -> Any:
    return json.loads(run(capsys, *argv, "--json"))


def refused(capsys: Captured, *argv: str) -> str:
    """The one line that a command which fails leaves on stderr."""
    try:
        code = main(argv)
    except SystemExit as stop:  # how argparse leaves
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def help_of(capsys: Captured, *command: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


# ── rows ────────────────────────────────────────────────────────────────────────────────────────


ROWS = [
    {"name": "[red]a,\r", "size": 2.5, "parts": [1, 2]},
    {"name": "b", "size": None, "parts": []},
]
COLUMNS: Columns = {
    "name": "{name}",
    "MB": "{size:.2f}",
    "parts": lambda row: str(len(row["parts"])),
}


def test_rows_as_a_table_as_json_and_as_csv(capsys: Captured) -> None:
    emit(ROWS, COLUMNS, title="sizes")
    title, heading, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert (title, heading) == (["sizes"], ["name", "MB", "parts"])
    assert lines == [["[red]a,\\r", "2.50", "2"], ["b", "0"]]  # None is an empty cell
    emit(ROWS, COLUMNS, json=True)
    assert json.loads(capsys.readouterr().out) == ROWS
    emit(iter(ROWS), COLUMNS, csv=True)
    assert capsys.readouterr().out == 'name,size,parts\n"[red]a,\r",2.5,1 2\nb,,\n'


# ── hvt models ──────────────────────────────────────────────────────────────────────────────────


def test_models_lists_every_model_on_a_line_of_its_own(capsys: Captured) -> None:
    table, *built_in, note = run(capsys, "models").split("\n\n")
    assert built_in[-1] == "cifar100 is built in, with CIFAR-100's classes"
    assert [text.split()[0] for text in built_in] == list(BUILT_IN)
    lines = [line for line in table.splitlines() if "GFLOPs" not in line and "params" not in line]
    names = [line.split()[0] for line in lines if line[1] != " "]
    assert names == [*hvt.list_models(), *BUILT_IN]
    assert note.startswith("deit_ti_power, deit_s_power: the paper prints")
    assert "hvt.power.retention_for" in note
    (row,) = [line for line in lines if line.split()[0] == "hvt_s_4"]
    assert " ".join(row.split()) == "hvt_s_4 196 → 97 → 48 → 23 → 11 1.39 22.12 3.28×"


def test_models_as_json(capsys: Captured) -> None:
    *rows, _, built_in = run_json(capsys, "models")
    assert (built_in["name"], built_in["weights"]) == ("cifar100", "built-in")
    assert built_in["params_m"] == hvt.cost(hvt.load("cifar100")).params_m
    assert [row["name"] for row in rows] == hvt.list_models()
    for row in rows:
        priced = hvt.cost(row["name"])
        assert (row["tokens"], row["gflops"]) == (priced.tokens, priced.gflops)
        assert row["cheaper_by"] == (priced.ratio if priced.ratio > 1 else None)
        assert row["weights"] == ("published" if row["name"] in WEIGHT_URLS else None)
        assert row["note"] == NOTES.get(row["name"])


def test_models_takes_a_pattern(capsys: Captured) -> None:
    names = [f"hvt_s_{stages}" for stages in range(5)]
    assert [row["name"] for row in run_json(capsys, "models", "hvt_s_?")] == names
    lines = run(capsys, "models", "hvt_s_?", "--csv").splitlines()
    assert [line.split(",")[0] for line in lines] == ["name", *names]


# ── hvt cost ────────────────────────────────────────────────────────────────────────────────────


def test_cost_prints_totals_and_a_bar_per_block(capsys: Captured) -> None:
    out = run(capsys, "cost", "hvt_s_4")
    assert "196 → 97 → 48 → 23 → 11 tokens" in out
    assert "1.39 GFLOPs (MACs), 22.12 M parameters" in out
    assert f"{hvt.cost('hvt_s_4').activation_mb:.1f} MB" in out
    assert "3.28× cheaper than without pooling" in out
    assert "pooling after block 3: 97 → 48 tokens, 2.06× cheaper blocks (Eq. 8: α = 2.04)" in out
    bars = [line for line in out.splitlines() if "█" in line]
    assert [int(line.split()[0]) for line in bars] == list(range(12))
    assert [int(line.split()[1]) for line in bars] == [196, *[97] * 3, *[48] * 3, *[23] * 3, 11, 11]
    lengths = [line.count("█") for line in bars]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 2 * lengths[1] - 2 > lengths[-1] > 0


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("line", ["models", "cost deit_s_power", "cost hvt_s_4"])
def test_a_terminal_shows_whole_names_and_no_longer_lines(
    line: str, width: int, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", run(capsys, *line.split()))  # without colours
    assert max(map(len, plain.splitlines())) <= width
    assert not re.search(r"[\w█]…", plain)
    if line == "models":
        assert all(f" {name} " in plain for name in hvt.list_models())


def test_a_model_that_drops_tokens_shows_them_before_and_after(capsys: Captured) -> None:
    out = run(capsys, "cost", "deit_s_power")
    assert "2.70 GFLOPs" in out
    assert "1.70× cheaper than with all tokens kept" in out
    rows = [line.split()[:3] for line in out.splitlines() if "█" in line]
    kept = hvt.get_config("deit_s_power").retention
    assert [int(row[2]) for row in rows] == list(kept)
    assert [int(row[1]) for row in rows] == [197, *kept[:-1]]


def test_cost_as_json(capsys: Captured) -> None:
    report, priced = run_json(capsys, "cost", "hvt_s_4"), hvt.cost("hvt_s_4")
    assert report.pop("name") == "hvt_s_4"
    assert hvt.HVTConfig.from_dict(report.pop("config")) == hvt.get_config("hvt_s_4")
    assert report == priced.to_dict()


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        (["--depth", "24"], {"depth": 24}),
        (["--num-classes", "100"], {"num_classes": 100}),
        (["--img-size", "192x256"], {"img_size": (192, 256)}),
        (["--pool-after", "0,6"], {"pool_after": (0, 6)}),
        (["--pool_after=[0, 6]"], {"pool_after": (0, 6)}),
        (["--pool-after="], {"pool_after": ()}),
        (["--stages", "none"], {"stages": None}),
        (["--class-token"], {"class_token": True}),
        (["--no-class-token"], {"class_token": False}),
        (["--mlp-ratio", "2.5"], {"mlp_ratio": 2.5}),
        (["--global-pool", ""], {"global_pool": ""}),
    ],
)  # fmt: skip
def test_fields_as_flags(capsys: Captured, words: list[str], overrides: dict[str, Any]) -> None:
    report = run_json(capsys, "cost", "hvt_s_4", *words)
    config = hvt.get_config("hvt_s_4", **overrides)
    assert hvt.HVTConfig.from_dict(report["config"]) == config
    assert report["gflops"] == hvt.cost(config).gflops


def test_every_field_has_a_flag_with_help(capsys: Captured) -> None:
    text = " ".join(help_of(capsys, "cost").split())
    for name, field in hvt.HVTConfig.__dataclass_fields__.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.metadata["help"] in text
    assert "--num_classes" not in text  # works, but one spelling is enough to read


# ── bad input ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("cst", "unknown command 'cst': did you mean cost?"),
        ("models --jsn", "unknown flag '--jsn': did you mean --json"),
        ("models a b", "'b' is one argument too many"),
        ("models 'hvt_x_*'", "no model matches 'hvt_x_*'"),
        ("cost", "required: NAME ("),
        ("cost hvt_s1", "unknown model 'hvt_s1': did you mean hvt_s_1"),
        ("cost hvt_s_1 --depht 24", "hvt cost: unknown flag '--depht': did you mean --depth?"),
        ("cost hvt_s_1 --num_clases=3", "unknown flag '--num-clases': did you mean --num-classes"),
        ("cost hvt_s_1 --depth", "--depth: expected one argument"),
        ("cost hvt_s_1 --depth many", ": depth='many' must be a whole number ("),
        ("cost hvt_s_1 --img-size 1x2x3", "img_size='1x2x3' must be a whole number or a pair"),
        ("cost hvt_s_1 --pool-after 0,x", "must be whole numbers such as 3,6 or none"),
        ("cost hvt_s_1 --depth -3", "depth=-3 must be a whole number from 1 to 10000"),
    ],
)
def test_bad_input_is_one_line(capsys: Captured, line: str, words: str) -> None:
    assert words in refused(capsys, *shlex.split(line))


# ── help ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("command", [(), ("models",), ("cost",)])
def test_examples_in_the_help_run(capsys: Captured, command: tuple[str, ...]) -> None:
    lines = help_of(capsys, *command).splitlines()
    examples = lines[lines.index("examples:") + 1 :]
    written = [line.split("   ")[0] for line in (e.strip() for e in examples) if line]
    assert all(line.startswith("hvt ") for line in written)
    # The other commands' examples need images or weights.
    priced = [line for line in written if line.split()[1] in ("models", "cost")]
    assert len(priced) >= 2
    for line in priced:
        assert run(capsys, *shlex.split(line)[1:]) != ""


# ── names, recipes, completion ──────────────────────────────────────────────────────────────────


def test_recipes_lists_each_with_its_command(capsys: Captured) -> None:
    rows = run_json(capsys, "recipes")
    assert [row["name"] for row in rows] == list_recipes()
    for row in rows:
        assert row["command"].startswith(f"hvt train {row['name']}")
        assert row["about"]
    assert run(capsys, "recipes").count("\n") == 1 + len(rows)


def test_a_printed_recipe_is_the_recipe(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(run(capsys, "recipes", "digits"))
    assert load_recipe(tmp_path / "mine.toml") == load_recipe("digits")


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh", "fish"])
def test_completion_knows_commands_flags_and_names(shell: str, capsys: Captured) -> None:
    script = run(capsys, "completion", shell)
    for word in ("predict", "batch-size", "hvt_s_2_2d", "cifar100-built-in", "retrain"):
        assert word in script


def test_a_full_disk_is_an_error() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("only Linux has a disk that is always full")
    with full.open("w") as out:
        words = [sys.executable, "-m", "hvt", "models"]
        done = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    expected = "hvt: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, expected)
