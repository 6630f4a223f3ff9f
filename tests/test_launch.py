"""Local processes that `hvt train --processes` starts: same results, quiet ends, plain errors."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_distributed import assert_like, stop_after_an_epoch
from training import assert_same_run, quiet, said, tiny, write_recipe

import hvt
from hvt import HVTError
from hvt.cli import main
from hvt.training import launch
from hvt.training.engine import Result, resume, train
from hvt.training.interrupt import Interrupted
from hvt.training.recipe import Recipe
from hvt.training.state import states

Captured = pytest.CaptureFixture[str]

needs_gloo = pytest.mark.skipif(
    sys.platform != "linux" or not torch.distributed.is_gloo_available(),
    reason="local processes with gloo",
)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The lively run by one process."""
    return train(tiny(tmp_path_factory.mktemp("single") / "run"), console=quiet())


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


@needs_gloo
def test_ctrl_c_and_one_process_that_resumes(
    single: Result, tmp_path: Path, capfd: Captured
) -> None:
    others = children()
    folder = tmp_path / "run"
    recipe = write_recipe(tiny(folder, checkpoint_minutes=0.0), tmp_path / "tiny.toml")
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Later(lambda: states(folder / "checkpoints"), lambda: os.kill(os.getpid(), signal.SIGINT)):
        assert main(["train", recipe, "--processes", "2"]) == 130
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert children() <= others
    out, err = capfd.readouterr()
    assert out.count("batch 240 = 2 process(es) × 1 × 120") == 1
    assert err.startswith("hvt: stopped after ")
    assert err.endswith(f"resume with: hvt train --resume {folder}\n")
    assert err.count("\n") == 1
    assert json.loads((folder / "recipe.json").read_text())["processes"] == 2
    resume(folder, console=quiet())
    assert_like(single, folder)


@pytest.mark.slow
@needs_gloo
def test_two_processes_resume_a_run_of_one(single: Result, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stop_after_an_epoch(folder)
    result = hvt.train(resume=folder, processes=2, quiet=True)
    assert_like(single, folder)
    assert (result.folder, result.rows[0]) == (folder, single.rows[0])
    assert result.top1 == pytest.approx(single.top1, abs=100 / 145 + 1e-6)
    weights = hvt.load(folder / "model.safetensors").state_dict()
    for name, tensor in result.model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    assert not result.model.training


@pytest.mark.slow
@needs_gloo
def test_an_error_of_a_process_is_one_sentence(tmp_path: Path, capfd: Captured) -> None:
    others = children()
    recipe = write_recipe(tiny(tmp_path / "run", device="gpu"), tmp_path / "tiny.toml")
    assert main(["train", recipe, "--processes", "2"]) == 2
    out, err = capfd.readouterr()
    assert "the device 'gpu' is not available" in err
    assert err.count("\n") == 1
    assert out == ""
    assert children() <= others


@pytest.mark.slow
@needs_gloo
def test_a_process_that_is_killed_is_said_so(tmp_path: Path, capfd: Captured) -> None:
    others = children()
    folder = tmp_path / "run"
    recipe = write_recipe(tiny(folder, checkpoint_minutes=0.0), tmp_path / "tiny.toml")
    with Later(
        lambda: states(folder / "checkpoints"),
        lambda: os.kill(max(children() - others), signal.SIGKILL),
    ):
        assert main(["train", recipe, "--processes", "2"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("hvt: process ")
    assert "was ended by SIGKILL" in err
    assert err.endswith(f"resume with: hvt train --resume {folder}\n")
    assert err.count("\n") == 1
    assert children() <= others


@pytest.mark.slow
@needs_gloo
def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    endless = tiny(folder, checkpoint_minutes=0.0, epochs=100_000)
    recipe = write_recipe(endless, tmp_path / "tiny.toml")
    command = [sys.executable, "-m", "hvt", "train", recipe, "--processes", "2"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE)
    while not states(folder / "checkpoints") and started.poll() is None:
        time.sleep(0.01)  # there is nothing to wait on
    started.kill()
    assert started.stdout is not None
    started.stdout.read()  # which the processes share with it, so: until all have ended
    started.wait()
    resume_at = states(folder / "checkpoints")[-1]
    assert torch.load(resume_at, weights_only=True)["progress"]["bad_steps"] == 0


# ── auto ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As on two cores."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def plain(folder: Path, **values: Any) -> Recipe:
    return tiny(folder, threads=None, **values)


@needs_gloo
def test_auto_measures_what_may_gain(
    tmp_path: Path, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch.choose(plain(tmp_path)) is None  # it takes a second
    monkeypatch.setattr(launch, "LEAST_SECONDS", 0.0)
    choice = launch.choose(plain(tmp_path))
    assert choice is not None
    assert choice.processes == 2
    assert choice.steps >= 3
    assert choice.seconds > 0
    assert not list(tmp_path.iterdir())  # nothing is written
    assert launch.choose(plain(tmp_path), done=10**6) is None  # of which nothing is left
    assert launch.choose(tiny(tmp_path)) is None  # with threads of its own
    assert launch.choose(plain(tmp_path, batch_size=242)) is None  # which is no multiple of 4
    assert launch.choose(plain(tmp_path, compile=True)) is None
    assert launch.choose(plain(tmp_path, overrides={"drop_rate": 0.1})) is None
    torch.set_num_threads(1)
    assert launch.choose(plain(tmp_path)) is None


@pytest.mark.slow
@needs_gloo
@pytest.mark.parametrize("gain", [1e-9, 1e9])
def test_auto_takes_what_is_faster_and_changes_nothing(
    tmp_path: Path, two_threads: None, monkeypatch: pytest.MonkeyPatch, gain: float
) -> None:
    monkeypatch.setattr(launch, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(launch, "LEAST_GAIN", gain)
    console = quiet()
    result = launch.train(plain(tmp_path / "auto", processes="auto"), console=console)
    count = 2 if gain < 1 else 1
    assert json.loads((tmp_path / "auto" / "recipe.json").read_text())["processes"] == count
    assert ("in one process: a step takes" in said(console)) == (count == 1)
    same = launch.train(plain(tmp_path / "told", processes=count), console=console)
    assert result.rows == same.rows
    assert_same_run(tmp_path / "auto", tmp_path / "told")


# ── errors ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", [0, -1, 1025, 10**20, "two", True, 1.5])
def test_a_number_of_processes_that_is_none_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(HVTError, match="processes="):
        tiny(tmp_path, processes=value)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many processes a training would start, which it does not."""
    counts: list[int] = []

    def run(job: Any, processes: int, *_: Any) -> None:
        counts.append(processes)

    monkeypatch.setattr(launch, "_run", run)
    return counts


def test_a_batch_that_processes_cannot_share_is_refused_at_once(
    single: Result, tmp_path: Path, started: list[int]
) -> None:
    for batch, processes, unit in ((240, 1000, 2000), (240, 7, 14), (6, 2, 4)):
        words = rf"batch_size={batch} must be a multiple of {unit} \(2 × processes × accumulate\)$"
        with pytest.raises(HVTError, match=words):
            launch.train(tiny(tmp_path, batch_size=batch, processes=processes))
    with pytest.raises(
        HVTError, match=r"batch_size=240 of .* multiple of 14 .*: use --processes 1"
    ):
        launch.resume(single.folder, processes=7)
    assert started == []
    launch.resume(single.folder, processes=2)
    # One of more than the 1294 images is fitted to them.
    launch.train(tiny(tmp_path, batch_size=2000, processes=7))
    assert started == [2, 7]


def test_no_module_of_the_working_folder_is_run(tmp_path: Path) -> None:
    for name in ("json", "signal", "linecache"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the working folder')")
    worker = tmp_path / "lib" / "hvt" / "training" / "worker.py"
    worker.parent.mkdir(parents=True)
    for package in worker.parents[:2]:
        (package / "__init__.py").touch()
    worker.write_text("def main(job): print(job['name'])")
    job = {"path": [str(tmp_path / "lib"), *sys.path], "name": "done"}
    (tmp_path / "job").write_text(json.dumps(job))
    command = [sys.executable, launch._SAFE, "-c", launch._START, str(tmp_path / "job")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_a_folder_that_has_a_run_is_refused_at_once(single: Result) -> None:
    with pytest.raises(HVTError, match="already contains a run"):
        launch.train(tiny(single.folder, processes=2))


def test_torchrun_says_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(HVTError, match="processes=2, but 1 were started"):
        launch.train(tiny(tmp_path / "run", processes=2))


@pytest.mark.parametrize(
    ("outcomes", "ended", "error", "words"),
    [
        # A process that fails takes the other along, whose own error says nothing.
        (
            {0: ("failed", "Connection closed"), 1: ("refused", "no images")},
            launch._Ended(codes={1: 2, 0: 1}),
            HVTError,
            "no images",
        ),
        (
            {0: ("interrupted", "stopped after step 3"), 1: ("failed", "Connection closed")},
            launch._Ended(signal=signal.SIGINT),
            Interrupted,
            "stopped after step 3",
        ),
        ({}, launch._Ended(signal=signal.SIGINT), KeyboardInterrupt, ""),
        (
            {0: ("failed", "Connection closed")},
            launch._Ended(codes={1: -9}),
            HVTError,
            "process 1 of the training was ended by SIGKILL",
        ),
        (
            {0: ("failed", "Connection closed"), 1: ("failed", "KeyError: 'x'")},
            launch._Ended(codes={0: 1, 1: 1}),
            RuntimeError,
            "process 1 of the training failed:\nKeyError: 'x'",
        ),
    ],
)
def test_the_error_that_tells_best_why(
    tmp_path: Path,
    outcomes: dict[int, tuple[str, str]],
    ended: launch._Ended,
    error: type[BaseException],
    words: str,
) -> None:
    left = {
        rank: {"kind": kind, "words": text, "rank": rank, "time": 10.0 - rank}
        for rank, (kind, text) in outcomes.items()
    }
    with pytest.raises(error) as raised:
        launch._result(left, ended, tmp_path)
    assert words in str(raised.value)


def test_the_command_that_resumes_is_one_for_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "recipe.json").touch()
    with pytest.raises(HVTError) as raised:
        launch._result({}, launch._Ended(codes={0: -9}), folder)
    assert str(raised.value).endswith(f"; resume with: hvt train --resume '{folder}'")
