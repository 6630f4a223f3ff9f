"""`hvt paper run long`: parts, their trainings, and what the command refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvt.cli import main
from hvt.errors import HVTError
from hvt.paper import long
from hvt.paper.protocol import Protocol, load_protocol, plan
from hvt.paper.tables import get_row, get_table

Captured = pytest.CaptureFixture[str]

TINY = """\
model = "deit_ti"
data = "digits"
epochs = 2
batch_size = 240
warmup_epochs = 0.1
mixup = 0.0
cutmix = 0.0
rand_augment = ""
erase = 0.0
repeats = 1
ema = 0.0
color_jitter = 0.0
[overrides]
img_size = 8
patch_size = 2
head_dim = 4
depth = 4
"""


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    return load_protocol("long")


def test_every_row_of_every_part_is_a_row_of_the_paper(protocol: Protocol) -> None:
    for part in long.PARTS.values():
        assert [row.name for row in long.rows_of(part)] == [name for _, name in part.rows]
        for row in long.rows_of(part):
            training = long.training(protocol, part, row)
            assert training.recipe.epochs == part.epochs
            assert training.recipe.train_fraction == part.train_fraction


def test_the_models_are_those_of_the_cpu_protocol(protocol: Protocol) -> None:
    cpu = load_protocol("cpu")
    for part in long.PARTS.values():
        for row in long.rows_of(part):
            short = plan(cpu, row, "epochs", "cifar100").training
            assert long.training(protocol, part, row).config == short.config


def test_a_part_of_the_images_is_a_smaller_epoch(protocol: Protocol) -> None:
    row = get_row(get_table("pooling_stages"), "M=2")
    few = long.training(protocol, long.PARTS["C"], row)
    all_of_them = long.training(protocol, long.PARTS["B"], row)
    assert few.images == 5_000 // 128 * 128
    assert all_of_them.images == 50_000 // 128 * 128


def test_no_two_trainings_share_a_name(protocol: Protocol) -> None:
    planned = long.jobs(protocol, long.PARTS.values())
    assert len({job.name for job in planned}) == len(planned)
    assert len(planned) == 4 * 2 + 4 + 3 + 6 + 2


def test_power_starts_from_part_a_s_own_deit(protocol: Protocol) -> None:
    (power,) = long.jobs(protocol, [long.PARTS["P"]], seeds=[1])
    names = {job.name for job in long.jobs(protocol, [long.PARTS["A"]])}
    assert power.base.name in names


def test_a_part_runs_and_is_passed_over_when_done(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text(TINY)
    argv = [
        "paper", "run", "long", "--part", "A10", "--row", "HVT-Ti-1", "--protocol-file", str(file),
        "--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs"),
        "--device", "cpu", "--threads", "1", "--workers", "0",
    ]  # fmt: skip
    assert main(argv) == 0
    (path,) = (tmp_path / "results" / "long").glob("*.json")
    result = json.loads(path.read_text())
    assert result["protocol"] == "long"
    assert len(result["curve"]) == 10
    assert "--part A10 --row HVT-Ti-1" in result["command"]
    before = path.stat().st_mtime_ns
    capsys.readouterr()
    assert main(argv) == 0
    assert "1 of 1 trainings are done" in capsys.readouterr().out
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["long", "--part", "D"], "the long protocol has no part 'D'"),
        (["long", "main"], "long has parts of its own"),
        (["main", "--part", "A"], "--part belongs to the long protocol"),
        (["long", "--budget", "compute"], "--budget is for tables"),
        (["long", "--part", "A", "--row", "M=0"], "there is no row 'M=0'"),
    ],
)
def test_bad_input_is_one_sentence(argv: list[str], says: str, capsys: Captured) -> None:
    assert main(["paper", "run", *argv]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("value", [0.0, -0.1, 1.5])
def test_a_train_fraction_out_of_range_is_refused(value: float) -> None:
    from hvt.data.sources import open_data

    with pytest.raises(HVTError, match="train_fraction"):
        open_data("digits", train_fraction=value)


def test_a_train_fraction_keeps_every_class_and_the_validation_part() -> None:
    from hvt.data.sources import open_data

    whole, part = open_data("digits"), open_data("digits", train_fraction=0.1)
    assert len(part.val) == len(whole.val)
    assert len(part.train) == pytest.approx(0.1 * len(whole.train), abs=10)
    assert set(part.train.labels.tolist()) == set(range(10))
