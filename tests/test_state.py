"""A training's state on disk: written whole, two kept, a damaged one passed over."""

import errno
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from training import quiet, said

from hvt import HVTError
from hvt.distributed import DistributedContext
from hvt.training.state import Progress, remove_stale_files, states, write_state
from hvt.training.state import newest_state as newest


def state(step: int) -> dict[str, Any]:
    rows = [{"epoch": 1, "val_top1": 12.5, "ema_top1": ""}]
    return {
        "weight": torch.full((500,), step / 3),
        "progress": vars(Progress(step=step, rows=rows)),
    }


def newest_state(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """The newest good state, and what is said of the others."""
    console = quiet()
    return newest(folder, DistributedContext(), console), said(console)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero_in_the_middle(path: Path) -> None:
    """What a crash of the machine can leave: the structure is whole, numbers are lost."""
    content = path.read_bytes()
    number = torch.tensor(2 / 3).numpy().tobytes() * 64
    assert content.count(number) > 1
    path.write_bytes(content.replace(number, bytes(len(number)), 1))


def test_two_are_kept_and_the_newest_is_read(tmp_path: Path) -> None:
    (tmp_path / "state-old.pt").write_text("a backup")
    for step in (9, 10, 11, 100):  # by number, not by text
        write_state(tmp_path, step, state(step))
    assert [path.name for path in states(tmp_path)] == ["state-000000011.pt", "state-000000100.pt"]
    assert (newest_state(tmp_path)[0] or {})["progress"]["step"] == 100


@pytest.mark.parametrize("damage", [truncate, empty, zero_in_the_middle])
def test_a_damaged_newest_falls_back(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    write_state(tmp_path, 1, state(1))
    last = write_state(tmp_path, 2, state(2))
    damage(last)
    read, words = newest_state(tmp_path)
    assert read is not None
    assert torch.equal(read["weight"], state(1)["weight"])
    assert f"{last} is damaged" in words
    truncate(tmp_path / "state-000000001.pt")
    assert newest_state(tmp_path)[0] is None
    # Damaged ones do not count among the newest two.
    assert {path.suffix for path in tmp_path.iterdir()} == {".bad"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
        (MemoryError(), "not enough memory"),
    ],
)
def test_what_cannot_be_read_now_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    for step in (1, 2):
        write_state(tmp_path, step, state(step))

    with monkeypatch.context() as failing:
        failing.setattr(zipfile, "ZipFile", Mock(side_effect=error))
        with pytest.raises(HVTError, match=rf"2\.pt cannot be read now: .*{reason}; try again"):
            newest_state(tmp_path)
    assert (newest_state(tmp_path)[0] or {})["progress"]["step"] == 2


def test_no_code_is_run_by_reading(tmp_path: Path) -> None:
    torch.save({"weight": Path("anything that is not plain data")}, tmp_path / "state-000000002.pt")
    with pytest.raises(HVTError, match=r"2\.pt cannot be read now: Weights only load failed"):
        newest_state(tmp_path)


def test_leftovers_of_a_kill_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "thesis").mkdir()
    stale_temp_files = [
        tmp_path / ".best.safetensors.abcd0123.hvt.part",
        tmp_path / "checkpoints" / ".state-000000001.pt.0f1e2d3c.hvt.part",
    ]
    others = [
        tmp_path / ".best.safetensors.abcd0123.part",  # a copy under way
        tmp_path / ".thesis.pdf.abcd0123.hvt.part",  # ours, but of no run
        tmp_path / "thesis" / ".best.safetensors.abcd0123.hvt.part",  # another run's
        tmp_path / "checkpoints" / "state-000000001.pt",
    ]
    for path in stale_temp_files + others:
        path.write_text("half")
    remove_stale_files(tmp_path)
    assert [path for path in stale_temp_files if path.exists()] == []
    assert [path for path in others if not path.exists()] == []
