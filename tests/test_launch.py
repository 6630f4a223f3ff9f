"""Local processes that `hvt train --processes` starts: same results, quiet ends, plain errors."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_distributed import assert_like, stop_after_an_epoch
from training import quiet, small_disk, tiny, write_recipe

import hvt
from hvt import HVTError
from hvt.cli import main
from hvt.training import launch
from hvt.training.engine import resume, train
from hvt.training.state import states
from hvt.training.trainer import Result

Captured = pytest.CaptureFixture[str]

pytestmark = pytest.mark.skipif(
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


def test_ctrl_c_and_one_process_that_resumes(
    single: Result, tmp_path: Path, capfd: Captured
) -> None:
    others, before = children(), {*os.environ, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    folder = tmp_path / "run"
    recipe = write_recipe(tiny(folder, checkpoint_minutes=0.0), tmp_path / "tiny.toml")
    with Later(lambda: states(folder / "checkpoints"), lambda: os.kill(os.getpid(), signal.SIGINT)):
        assert main(["train", recipe, "--processes", "2"]) == 130
    assert children() <= others
    assert os.environ.keys() - before == set()
    out, err = capfd.readouterr()
    assert out.count("batch 240 = 2 process(es) × 1 × 120") == 1
    assert err.startswith("hvt: stopped after ")
    assert err.endswith(f"resume with: hvt train --resume {folder}\n")
    assert err.count("\n") == 1
    assert json.loads((folder / "recipe.json").read_text())["processes"] == 2
    resume(folder, console=quiet())
    assert_like(single, folder)


@pytest.mark.slow
def test_two_processes_resume_a_run_of_one(single: Result, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stop_after_an_epoch(folder)
    result = hvt.train(resume=folder, processes=2, quiet=True)
    assert_like(single, folder)
    assert (result.folder, result.rows[0]) == (folder, single.rows[0])
    assert not result.model.training


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("device", "gpu", "the device 'gpu' is not available"),  # before it has joined
        ("data", "nowhere", "nowhere"),
    ],
)
def test_an_error_of_another_process_is_one_sentence(
    tmp_path: Path,
    capfd: Captured,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    value: str,
    words: str,
) -> None:
    other = f"job['recipe']['{field}'] = '{value}'; join(job)"
    monkeypatch.setattr(launch, "_START", launch._START.replace("join(job)", other))
    recipe = write_recipe(tiny(tmp_path / "run"), tmp_path / "tiny.toml")
    others = children()
    assert main(["train", recipe, "--processes", "2"]) == 2
    err = capfd.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert children() <= others
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_process_that_is_killed_is_named(tmp_path: Path, capfd: Captured) -> None:
    others = children()
    folder = tmp_path / "run"
    recipe = write_recipe(tiny(folder, checkpoint_minutes=0.0), tmp_path / "tiny.toml")
    with Later(
        lambda: states(folder / "checkpoints"),
        lambda: os.kill(max(children() - others), signal.SIGKILL),
    ):
        assert main(["train", recipe, "--processes", "2"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("hvt: process 1 was ended by SIGKILL")
    assert err.endswith(f"resume with: hvt train --resume {folder}\n")
    assert err.count("\n") == 1
    assert children() <= others


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    endless = tiny(folder, checkpoint_minutes=0.0, epochs=100_000)
    recipe = write_recipe(endless, tmp_path / "tiny.toml")
    command = [sys.executable, "-m", "hvt", "train", recipe, "--processes", "2"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE)
    while not states(folder / "checkpoints") and started.poll() is None:
        time.sleep(0.01)  # there is nothing to wait on
    listed = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    started.kill()
    started.wait()
    while any(Path(f"/proc/{pid}/cmdline").exists() for pid in listed):
        time.sleep(0.01)
    resume_at = states(folder / "checkpoints")[-1]
    assert torch.load(resume_at, weights_only=True)["progress"]["bad_steps"] == 0


@pytest.mark.slow
def test_a_full_disk_names_the_command_that_resumes(tmp_path: Path, capfd: Captured) -> None:
    with small_disk(tmp_path / "disk", "700k") as disk:
        recipe = tiny(disk / "run", checkpoint_minutes=0.0)
        words = ["train", write_recipe(recipe, tmp_path / "tiny.toml"), "--processes", "2"]
        assert main(words) == 2
        err = capfd.readouterr().err
        assert err.startswith("hvt: cannot write ")
        assert err.endswith(f"resume with: hvt train --resume {disk / 'run'}\n")
        assert err.count("\n") == 1


def test_no_module_of_the_working_folder_is_run(tmp_path: Path) -> None:
    for name in ("json", "signal", "linecache"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the working folder')")
    package = tmp_path / "lib" / "hvt"
    (package / "training").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "_openmp.py").write_text("def wait_briefly(): pass")
    (package / "training" / "__init__.py").touch()
    (package / "training" / "launch.py").write_text("def join(job): print(job['name'])")
    job = json.dumps({"path": [str(tmp_path / "lib"), *sys.path], "name": "done"})
    done = subprocess.run(
        [sys.executable, launch._SAFE, "-c", launch._START],
        cwd=tmp_path, input=job, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_a_process_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_START", "import os; os.abort()")
    with pytest.raises(HVTError, match="process 1 was ended by SIGABRT"):
        launch.train(tiny(tmp_path / "run", processes=2))
    assert not (tmp_path / "run").exists()


def test_torchrun_says_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(HVTError, match="processes=2, but 1 were started"):
        launch.train(tiny(tmp_path / "run", processes=2))


def test_processes_are_for_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_device", lambda name: torch.device("cuda"))
    with pytest.raises(HVTError, match="processes=2 is for the CPU: start one for each GPU by"):
        launch.train(tiny(tmp_path / "run", processes=2))
