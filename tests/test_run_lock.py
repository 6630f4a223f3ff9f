"""A run's folder is one training's at a time."""

from pathlib import Path

import pytest
from training import quiet, tiny

from hvt import HVTError
from hvt.distributed import DistributedContext
from hvt.training.engine import resume, train
from hvt.training.run_lock import locked, newest_folder, unused_folder


def test_each_that_begins_gets_a_name_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "runs/digits"
    names = [unused_folder(folder).name for _ in range(3)]  # nobody has written anything yet
    assert names == ["digits", "digits-2", "digits-3"]


def test_a_restart_finds_the_newest(tmp_path: Path) -> None:
    for name in ("digits", "digits-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "best.safetensors").touch()
    assert newest_folder(tmp_path / "digits") == tmp_path / "digits-2"
    assert newest_folder(tmp_path / "other") == tmp_path / "other"


def test_two_trainings_do_not_share_a_folder(tmp_path: Path) -> None:
    folder, alone = tmp_path / "run", DistributedContext()
    recipe = tiny(folder, epochs=1)
    with locked(folder, alone):
        with pytest.raises(HVTError, match=r"run is being trained by another process: wait"):
            train(recipe, console=quiet())
        assert [path.name for path in folder.iterdir()] == [".lock"]
    assert not folder.exists()
    train(recipe, console=quiet())
    with locked(folder, alone), pytest.raises(HVTError, match="is being trained by another"):
        resume(folder, console=quiet())
    assert not (folder / ".lock").exists()
