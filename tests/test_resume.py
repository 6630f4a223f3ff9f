"""A run that was stopped, however and whenever, ends as if it never had been."""

import io
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from training import (
    Impatient,
    assert_same_run,
    quiet,
    said,
    stop_after_an_epoch,
    tiny,
    write_recipe,
)

from hvt import HVTError
from hvt.cli import main
from hvt.training.engine import resume, train
from hvt.training.interrupt import Interrupted
from hvt.training.recipe import Recipe
from hvt.training.state import read_state, states

pytestmark = pytest.mark.skipif(os.name == "nt", reason="processes are killed as POSIX does it")

# A server that has imported everything forks processes to be killed, in no time.
PROCESSES = multiprocessing.get_context("forkserver") if os.name != "nt" else None


def lively(folder: Path, **values: Any) -> Recipe:
    """Two epochs of five steps, each step followed by a checkpoint.

    With this seed the best is behind it after the first epoch, so that it can be forgotten.
    """
    return tiny(folder, **{"seed": 6, "checkpoint_minutes": 0.0} | values)


def start(target: Callable[..., Any], *args: Any) -> BaseProcess:
    assert PROCESSES is not None
    PROCESSES.set_forkserver_preload(["hvt.training.engine", "sklearn.datasets"])
    process = PROCESSES.Process(target=target, args=args)
    process.start()
    return process


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never stopped."""
    result = train(lively(tmp_path_factory.mktemp("unstopped") / "run"), console=quiet())
    first, last = ((row["val_top1"], row["ema_top1"]) for row in result.rows)
    assert result.best == max(first) > max(last)
    return result.folder


def stale_temp_files(folder: Path) -> list[Path]:
    return list(folder.rglob(".*.part"))


# ── killed at chosen moments ────────────────────────────────────────────────────────────────────


def train_until(recipe: Recipe, event: str, part: str, count: int, cut: bool) -> None:
    """Train, and be killed at the `count`th audit event `event` that concerns a file `part`.

    Python announces what it is about to do to a file, so the moment is exact. `cut` leaves half of
    the file, as a kill in the middle of writing it does.
    """
    seen = 0

    def watch(name: str, details: tuple[Any, ...]) -> None:
        nonlocal seen
        if name == event and details and part in str(details[0]):
            seen += 1
            if seen == count:
                if cut:
                    os.truncate(details[0], os.path.getsize(details[0]) // 2)  # noqa: PTH202
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    train(recipe, console=quiet())


# Of each write: an empty file has been made, it is whole and about to be synced (or half of it is
# lost), it is about to get its name; and an old state is about to be removed.
MOMENTS = {
    "before the first checkpoint": ("os.rename", ".state-", 1, False),
    "half a checkpoint": ("open", ".state-000000003", 2, True),  # the first open makes the file
    "a whole checkpoint without its name": ("os.rename", ".state-000000004", 1, False),
    "three checkpoints": ("os.remove", "/state-000000001", 1, False),
    "the best weights, without a checkpoint of the epoch": ("os.rename", ".best.", 1, False),
    "half the table": ("open", ".metrics.csv", 3, True),
    "the last checkpoint": ("os.rename", ".state-000000010", 2, False),
    "half the final weights": ("open", ".model.safetensors", 2, True),
    "half the curves": ("open", ".curves.png", 2, True),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_a_chosen_moment(unstopped: Path, tmp_path: Path, moment: str) -> None:
    folder = tmp_path / "run"
    process = start(train_until, lively(folder), *MOMENTS[moment])
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    event, part, *_ = MOMENTS[moment]
    if event != "os.remove":
        assert any(part in path.name for path in stale_temp_files(folder))
    resume(folder, console=quiet())
    assert_same_run(folder, unstopped)
    assert stale_temp_files(folder) == []


# ── asked to stop ───────────────────────────────────────────────────────────────────────────────


def command(argv: list[str], errors: Path) -> None:
    # A child of the server would ask the server for its reading processes, too.
    multiprocessing.set_start_method("fork", force=True)
    sys.stderr = errors.open("w")
    sys.stdout = io.StringIO()
    code = main(argv)
    sys.stderr.close()
    os._exit(code)  # the exit code of the command, whatever the interpreter thinks of it


def stop_by(number: int, recipe: Recipe, folder: Path, tmp_path: Path) -> tuple[int | None, str]:
    """Start `hvt train`, send a signal once there is a checkpoint; its exit code and its words."""
    errors = tmp_path / "errors.txt"
    argv = ["train", write_recipe(recipe, tmp_path / "tiny.toml")]
    process = start(command, argv, errors)
    while not states(folder / "checkpoints") and process.is_alive():
        process.join(0.005)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(120)
    return process.exitcode, errors.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop(unstopped: Path, tmp_path: Path, number: int) -> None:
    folder = tmp_path / "run"
    code, words = stop_by(number, lively(folder), folder, tmp_path)
    assert code == 130
    assert words.startswith("hvt: stopped after ")
    assert words.endswith(f"; resume with: hvt train --resume {folder}\n")
    assert not (folder / "model.safetensors").exists()
    assert main(["train", "--resume", str(folder)]) == 0
    assert_same_run(folder, unstopped)


def test_asked_to_stop_between_checkpoints(unstopped: Path, tmp_path: Path) -> None:
    """It saves itself at once, not when the next checkpoint would be due."""
    folder = tmp_path / "run"
    before = signal.getsignal(signal.SIGTERM)
    stop_after_an_epoch(lively(folder, checkpoint_minutes=60.0))
    assert signal.getsignal(signal.SIGTERM) == before
    assert [path.name for path in states(folder / "checkpoints")] == ["state-000000005.pt"]
    resume(folder, console=quiet())
    assert_same_run(folder, unstopped)


def test_dropout_resumes_as_it_would_have_continued(unstopped: Path, tmp_path: Path) -> None:
    values = {"accumulate": 2, "checkpoint_minutes": 60.0, "overrides": {"proj_drop_rate": 0.2}}
    whole = train(lively(tmp_path / "whole", **values), console=quiet()).folder
    folder = tmp_path / "run"
    stop_after_an_epoch(lively(folder, **values))
    resume(folder, console=quiet())
    assert_same_run(folder, whole)
    with pytest.raises(AssertionError):
        assert_same_run(folder, unstopped)


def test_a_second_ctrl_c_means_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Impatient, "numbers", (signal.SIGINT, signal.SIGINT))
    monkeypatch.setattr("sys.stdout", Impatient())
    recipe = write_recipe(lively(tmp_path / "run"), tmp_path / "tiny.toml")
    assert main(["train", recipe]) == 130
    assert capsys.readouterr().err == "hvt: stopped\n"


def test_reading_processes_do_not_get_in_the_way(tmp_path: Path) -> None:
    for label, colour in (("dark", 20), ("light", 220)):
        for index in range(40):
            path = tmp_path / "images" / label / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (12, 12), (colour, colour, index)).save(path)
    values = {"data": str(tmp_path / "images"), "holdout": 0.0, "batch_size": 12, "workers": 1}
    values |= {"rand_augment": "rand-m9-mstd0.5-inc1", "erase": 0.25}  # timm's, by key
    whole = train(lively(tmp_path / "whole", **values), console=quiet())
    folder = tmp_path / "run"
    code, _ = stop_by(signal.SIGINT, lively(folder, **values), folder, tmp_path)
    assert code == 130
    resume(folder, console=quiet())
    assert_same_run(folder, whole.folder)


# ── damaged checkpoints ─────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def killed(unstopped: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed as it removed an old checkpoint: the last is that of step 7."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    process = start(train_until, lively(folder), "os.remove", "/state-000000005", 1, False)
    process.join(120)
    assert [int(path.stem[6:]) for path in states(folder / "checkpoints")] == [5, 6, 7]
    return folder


@pytest.fixture
def stopped(killed: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be damaged."""
    return Path(shutil.copytree(killed, tmp_path / "run"))


def test_a_run_that_began_anew_keeps_its_new_checkpoints(unstopped: Path, stopped: Path) -> None:
    """Damaged ones of later steps are not the newest two for ever."""
    for path in states(stopped / "checkpoints"):
        path.write_bytes(bytes(path.stat().st_size))
    console = Console(file=Impatient(), width=200)
    with pytest.raises(Interrupted, match="stopped after epoch 1"):
        resume(stopped, console=console)
    assert said(console).count("is damaged") == 3
    assert "no usable checkpoint: starting from the beginning" in said(console)
    console = quiet()
    resume(stopped, console=console)
    assert "is damaged" not in said(console)
    assert "5 steps per epoch, 5 left" in said(console)
    assert_same_run(stopped, unstopped)


@pytest.mark.parametrize(
    ("part", "key", "value", "reason"),
    [
        ("model", "norm.weight", torch.ones(3), "does not fit its model: .*norm.weight"),
        ("ema", "x", torch.ones(3), "does not fit its model: .*Unexpected key"),
        (
            "run",
            "smoothing",
            "0.3",
            "smoothing changed from 0.3 to 0.1 since the run started; restore",
        ),
        ("run", "classes", '["cat"]', "classes changed since the run started; restore recipe.json"),
    ],
)
def test_a_state_of_another_run_is_an_error(
    stopped: Path, part: str, key: str, value: Any, reason: str
) -> None:
    newest = states(stopped / "checkpoints")[-1]
    state = read_state(newest)
    state[part][key] = value
    torch.save(state, newest)
    before = {path: path.read_bytes() for path in states(stopped / "checkpoints")}
    with pytest.raises(HVTError, match=f"(?s){reason}"):
        resume(stopped, console=quiet())
    assert {path: path.read_bytes() for path in states(stopped / "checkpoints")} == before


def test_a_run_may_be_moved(unstopped: Path, stopped: Path, tmp_path: Path) -> None:
    moved = stopped.rename(tmp_path / "moved")
    assert resume(moved, console=quiet()).folder == moved
    assert not stopped.exists()
    assert_same_run(moved, unstopped)
