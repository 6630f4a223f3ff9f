"""Two processes under torchrun are one: same steps, same evaluation, same way of resuming."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torchrun_checks import spoiled
from training import quiet, said, stop_after_an_epoch, tiny, trainer_of, weights, write_recipe

import hvt
from hvt import HVTError
from hvt.distributed import DistributedContext, init_process_group
from hvt.training.engine import resume
from hvt.training.state import states
from hvt.training.trainer import Result

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not torch.distributed.is_gloo_available(),
    reason="torchrun with gloo, and /proc to find its workers",
)


class Torchrun:
    """A torchrun with two processes, its words in a file, and none of it left behind."""

    def __init__(self, log: Path, *arguments: str, restarts: int = 0) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "--max-restarts", str(restarts), *arguments]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        }
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)

    def __enter__(self) -> "Torchrun":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for pid in (*self.workers(), self.process.pid):
                os.kill(pid, signal.SIGKILL)
            self.process.wait()

    def workers(self) -> list[int]:
        pid = self.process.pid
        listed = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return [child for child in listed if Path(f"/proc/{child}/cmdline").read_bytes()]

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 120
        while not condition() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)  # there is nothing to wait on

    def wait(self) -> int:
        return self.process.wait(timeout=120)

    def words(self) -> str:
        return self.log.read_text()


def assert_like(single: Result, folder: Path) -> None:
    """Loss curves, figures and weights as one process has them, within float tolerance."""
    rows = states(folder / "checkpoints")[-1]
    result = torch.load(rows, weights_only=True)["progress"]["rows"]
    assert len(result) == len(single.rows)
    for ours, theirs in zip(single.rows, result, strict=True):
        for key in ("lr", "train_loss", "val_loss", "ema_loss"):
            assert theirs[key] == pytest.approx(ours[key], rel=1e-5), key
        for key in ("val_top1", "ema_top1"):  # of 145 images one may be on the edge
            assert theirs[key] == pytest.approx(ours[key], abs=100 / 145 + 1e-6), key
    ours, theirs = single.model.state_dict(), weights(folder / "model.safetensors")
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], atol=5e-5), name


def assert_counted_once(folder: Path) -> None:
    """The last figures are those of one process that looks at each of the 145 images once."""
    trainer = trainer_of(tiny(folder))
    state = torch.load(states(folder / "checkpoints")[-1], weights_only=True)
    row = state["progress"]["rows"][-1]
    for kind, prefix in (("model", "val"), ("ema", "ema")):
        model = hvt.load(folder / "model.safetensors")
        model.load_state_dict(state[kind])
        metrics = trainer.evaluate(model)
        assert metrics["top1"] == row[f"{prefix}_top1"]
        assert metrics["top5"] == row[f"{prefix}_top5"]
        assert metrics["loss"] == pytest.approx(row[f"{prefix}_loss"], rel=1e-6)


@pytest.mark.slow
def test_a_worker_that_dies_is_started_again(single: Result, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = write_recipe(tiny(folder, checkpoint_minutes=0.0), tmp_path / "tiny.toml")
    with Torchrun(tmp_path / "log", "-m", "hvt", "train", recipe, restarts=1) as torchrun:
        torchrun.wait_for(lambda: states(folder / "checkpoints"))
        os.kill(torchrun.workers()[-1], signal.SIGKILL)
        assert torchrun.wait() == 0, torchrun.words()
    # The second time it resumed from a checkpoint, and said so.
    to_go = [line.split("per epoch, ")[1].split(" left")[0] for line in
             torchrun.words().splitlines() if "per epoch, " in line]  # fmt: skip
    assert len(to_go) == 2, torchrun.words()
    assert int(to_go[0]) == 10 > int(to_go[1])
    assert "batch 240 = 2 process(es) × 1 × 120" in torchrun.words()
    assert_like(single, folder)
    assert_counted_once(folder)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which two processes did what `torchrun_checks.py` says, and their words."""
    folder = tmp_path_factory.mktemp("together")
    stop_after_an_epoch(tiny(folder / "run"))
    script = str(Path(__file__).parent / "torchrun_checks.py")
    with Torchrun(folder / "log", script, str(folder), str(folder / "run")) as torchrun:
        assert torchrun.wait() == 0, torchrun.words()
    return folder, torchrun.words()


def test_two_processes_resume_a_run_of_one(single: Result, together: tuple[Path, str]) -> None:
    folder, words = together[0] / "run", together[1]
    assert "5 steps per epoch, 5 left" in words
    assert_like(single, folder)
    assert_counted_once(folder)
    # And one process can resume what two have done.
    console = quiet()
    assert resume(folder, console=console).rows[0] == single.rows[0]
    assert "0 left" in said(console)


def test_processes_agree(together: tuple[Path, str]) -> None:
    folder = together[0]
    results = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for key in ("weights", "score", "any", "shared"):
        assert results[0][key] == results[1][key], key
    assert results[0]["any"] is True
    assert results[0]["shared"] == "from 0"
    # A step is one transfer from the device and one all-reduce.
    assert [(each["transfers"], each["all_reduces"]) for each in results] == [(3, 3), (3, 3)]
    # Both leave out the step that was bad for one of them, and both count its broken images.
    for steps in (process["steps"] for process in results):
        assert [step["taken"] for step in steps] == [True, False, True]
        assert [step["broken"] for step in steps] == [0, 2, 0]
    # One process that gets the same bad batch does the same.
    trainer = trainer_of(tiny(folder))
    learner, batches = trainer.learner, spoiled(trainer.batches.epoch(0), 1)
    steps = [learner.step(batches, update) for update in range(3)]
    assert [step.taken for step in steps] == [True, False, True]
    for alone, together in zip(steps, results[0]["steps"], strict=True):
        if alone.taken:
            assert together["loss"] == pytest.approx(alone.loss, rel=1e-5)
        else:
            assert not math.isfinite(together["loss"])
    for name, parameter in learner.model.named_parameters():
        total = parameter.double().sum().item()
        assert results[0]["weights"][name] == pytest.approx(total, abs=1e-3), name
    loss = trainer.evaluate(learner.model)["loss"]
    assert results[0]["score"]["loss"] == pytest.approx(loss, rel=1e-5)


def test_alone_there_is_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert init_process_group("cpu") == (DistributedContext(), CPU)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"WORLD_SIZE": "2"}, "start several processes with torchrun, or unset WORLD_SIZE: .*RANK"),
        ({"WORLD_SIZE": "two"}, "start several processes with torchrun, .*'two'"),
    ],
    ids=str,
)
def test_half_of_what_torchrun_sets(
    words: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HVTError, match=message):
        init_process_group("cpu")
