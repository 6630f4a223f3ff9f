"""A training's state on disk: written whole, two kept, a damaged one passed over."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training import small_disk

from hvt import HVTError
from hvt.training.state import (
    Progress,
    newest_state,
    read_state,
    remove_leftovers,
    states,
    write_state,
)


def state(step: int) -> dict[str, Any]:
    rows = [{"epoch": 1, "val_top1": 12.5, "ema_top1": ""}]
    return {
        "weight": torch.full((500,), step / 3),
        "progress": vars(Progress(step=step, rows=rows)),
    }


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def garbage(path: Path) -> None:
    path.write_bytes(b"\x80\x04not a state" + bytes(range(256)) * 8)


def zero_in_the_middle(path: Path) -> None:
    """What a crash of the machine can leave: the structure is whole, numbers are lost."""
    content = path.read_bytes()
    number = torch.tensor(2 / 3).numpy().tobytes() * 64
    assert content.count(number) > 1
    path.write_bytes(content.replace(number, bytes(len(number)), 1))


DAMAGES = [truncate, empty, zero, garbage, zero_in_the_middle]


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    path = write_state(tmp_path, 2, state(2))
    found, read, passed = newest_state(tmp_path)
    assert found == path
    assert passed == []
    assert torch.equal(read["weight"], state(2)["weight"])
    assert Progress(**read["progress"]) == Progress(**state(2)["progress"])


def test_two_are_kept_and_the_newest_is_read(tmp_path: Path) -> None:
    for step in (9, 10, 11, 100):  # by number, not by text
        write_state(tmp_path, step, state(step))
    assert [path.name for path in states(tmp_path)] == ["state-000000011.pt", "state-000000100.pt"]
    assert newest_state(tmp_path)[1]["progress"]["step"] == 100


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_falls_back_with_a_sentence(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    write_state(tmp_path, 1, state(1))
    newest = write_state(tmp_path, 2, state(2))
    damage(newest)
    path, read, passed = newest_state(tmp_path)
    assert path == tmp_path / "state-000000001.pt"
    assert torch.equal(read["weight"], state(1)["weight"])
    assert len(passed) == 1
    assert str(newest) in passed[0]
    assert "damaged" in passed[0]


@pytest.mark.parametrize("damage", DAMAGES)
def test_where_all_are_damaged_there_is_none(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    for step in (2, 2000):
        damage(write_state(tmp_path, step, state(2)))
    path, read, passed = newest_state(tmp_path)
    assert path is None
    assert read == {}
    assert len(passed) == 2


def test_no_code_is_run_by_reading(tmp_path: Path) -> None:
    write_state(tmp_path, 1, state(1))
    torch.save({"weight": Path("anything that is not plain data")}, tmp_path / "state-000000002.pt")
    path, _, passed = newest_state(tmp_path)
    assert path == tmp_path / "state-000000001.pt"
    assert "UnpicklingError" in passed[0]


def test_leftovers_of_a_kill_are_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    leftovers = [
        tmp_path / ".best.safetensors.abc.part",
        tmp_path / "checkpoints" / ".state-000000001.pt.xyz.part",
    ]
    others = [tmp_path / "notes.part", tmp_path / "checkpoints" / "state-000000001.pt"]
    for path in leftovers + others:
        path.write_text("half")
    remove_leftovers(tmp_path)
    assert [path.exists() for path in leftovers + others] == [False, False, True, True]


def test_a_full_disk_is_a_sentence_and_the_state_before_stays(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        folder = disk / "checkpoints"
        folder.mkdir()
        write_state(folder, 1, {"weight": torch.ones(150_000)})
        with pytest.raises(HVTError, match=rf"cannot write .*2\.pt.* --resume {disk}") as caught:
            write_state(folder, 2, {"weight": torch.ones(150_000)})
        assert "\n" not in str(caught.value)
        assert [path.name for path in folder.iterdir()] == ["state-000000001.pt"]
        assert torch.equal(read_state(states(folder)[0])["weight"], torch.ones(150_000))
