"""Local processes that `hvt train --processes` starts: same results, quiet ends, plain errors."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_distributed import assert_like
from training import quiet, stop_after_an_epoch, tiny, write_recipe

import hvt
from hvt import HVTError
from hvt.cli import main
from hvt.training import launch as launcher
from hvt.training.engine import resume
from hvt.training.state import states
from hvt.training.trainer import Result

Captured = pytest.CaptureFixture[str]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not torch.distributed.is_gloo_available(),
    reason="local processes with gloo",
)


class Later:
    """Does something as soon as a condition holds, while the main thread trains."""

    def __init__(self, condition: Callable[[], object], action: Callable[[], object]) -> None:
        self.condition, self.action, self.over = condition, action, threading.Event()

    def __enter__(self) -> None:
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.over.wait(0.002):  # there is nothing to wait on
            if self.condition():
                self.action()
                return


def children() -> set[int]:
    """The processes that this one has started and that still run."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in listed if Path(f"/proc/{pid}/cmdline").read_bytes()}


def test_ctrl_c_and_one_process_that_resumes(
    single: Result, tmp_path: Path, capfd: Captured
) -> None:
    others, handler = children(), signal.getsignal(signal.SIGINT)
    folder = tmp_path / "run"
    recipe = write_recipe(tiny(folder, checkpoint_minutes=0.0), tmp_path / "tiny.toml")
    with Later(lambda: states(folder / "checkpoints"), lambda: os.kill(os.getpid(), signal.SIGINT)):
        assert main(["train", recipe, "--processes", "2"]) == 130
    assert children() <= others
    assert signal.getsignal(signal.SIGINT) is handler
    out, err = capfd.readouterr()
    assert out.count("batch 240 = 2 process(es) × 1 × 120") == 1
    assert err.startswith("hvt: stopped after ")
    assert err.endswith(f"resume with: hvt train --resume {folder}\n")
    assert err.count("\n") == 1
    assert json.loads((folder / "recipe.json").read_text())["processes"] == 2
    resume(folder, console=quiet())
    assert_like(single, folder)


@pytest.mark.slow
def test_an_error_is_a_line(tmp_path: Path, capfd: Captured) -> None:
    """Of one process, or of each: the first that fails ends the others."""
    recipe = write_recipe(tiny(tmp_path / "run", data="nowhere"), tmp_path / "tiny.toml")
    assert main(["train", recipe, "--processes", "2"]) == 2
    lines = {line.replace("hvt (1): ", "hvt: ") for line in capfd.readouterr().err.splitlines()}
    assert len(lines) == 1
    assert "nowhere" in lines.pop()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_other(tmp_path: Path, capfd: Captured) -> None:
    others = children()
    folder = tmp_path / "run"
    recipe = write_recipe(tiny(folder, checkpoint_minutes=0.0), tmp_path / "tiny.toml")
    with Later(
        lambda: states(folder / "checkpoints"),
        lambda: os.kill(max(children() - others), signal.SIGKILL),
    ):
        assert main(["train", recipe, "--processes", "2"]) == 2
    (resumes,) = capfd.readouterr().err.splitlines()
    assert resumes.startswith("hvt: another process of the training has ended")
    assert resumes.endswith(f"resume with: hvt train --resume {folder}")
    assert children() <= others


def test_a_python_program_is_started_by_torchrun(tmp_path: Path) -> None:
    with pytest.raises(HVTError, match="processes=2, but 1 were started: start them"):
        hvt.train(tiny(tmp_path / "run", processes=2))
    stop_after_an_epoch(tiny(tmp_path / "run"))
    with pytest.raises(HVTError, match="processes=2, but 1 were started"):
        hvt.train(resume=tmp_path / "run", processes=2)


def test_processes_are_for_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find_device", lambda name: torch.device("cuda"))
    with pytest.raises(HVTError, match="is for the CPU: start one per GPU with torchrun"):
        launcher.launch(tiny(tmp_path / "run", processes=2), ["train"])
