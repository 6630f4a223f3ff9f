"""A run's folder is one training's at a time."""

from pathlib import Path

import pytest
from training import quiet, tiny

from hvt import HVTError
from hvt.distributed import DistributedContext
from hvt.training.engine import resume, train
from hvt.training.run_lock import locked


def test_two_trainings_do_not_share_a_folder(tmp_path: Path) -> None:
    folder, alone = tmp_path / "run", DistributedContext()
    recipe = tiny(folder, epochs=1)
    with locked(folder, alone):
        with pytest.raises(HVTError, match=r"run is in use by another process: wait"):
            train(recipe, console=quiet())
        assert [path.name for path in folder.iterdir()] == [".lock"]
    assert not folder.exists()
    train(recipe, console=quiet())
    with locked(folder, alone), pytest.raises(HVTError, match="is in use by another"):
        resume(folder, console=quiet())
    assert not (folder / ".lock").exists()
