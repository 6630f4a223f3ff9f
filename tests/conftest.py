"""Shared by the test files: fixed randomness, and models small enough to run by the hundred."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import start_chromium
from hypothesis import settings
from torch import Tensor

import hvt
from hvt.cli import main

Command = Callable[..., tuple[int, str, str]]

settings.register_profile("hvt", deadline=None, derandomize=True)
settings.load_profile("hvt")

# Tiny models gain nothing from threads, and lose much where the cores are busy. The variable is for
# ONNX Runtime and for what the tests start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts background jobs with Ctrl-C ignored; tests of it need the default.
signal.signal(signal.SIGINT, signal.default_int_handler)

SMALL = {"img_size": 64, "patch_size": 8, "num_heads": 3, "head_dim": 8, "num_classes": 10}


FEW = {"img_size": 32, "depth": 2, "num_heads": 2}
NAMES = [f"class {i}" for i in range(10)]

# Started first, or the last of them would keep one core busy while the others have nothing to do.
LONG = (
    "export", "engine", "page_browser", "reproduction", "resume", "upcycle", "search", "serve",
    "connection", "bench", "cli_eval_predict", "model", "distributed", "launch",
    "loader", "hub", "plan", "see", "sources", "timm_vit", "start", "page", "power", "foreign",
    "weights", "zoo", "predict", "compat", "names", "readme",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = [f"test_{name}" for name in LONG]
    items.sort(key=lambda item: names.index(item.path.stem) if item.path.stem in names else 99)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: some tests do little but wait for what they have started."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no collection needs to walk over them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of a lively training on the digits, by one process in whole batches."""
    from training import run

    return run(tmp_path_factory.mktemp("single") / "run")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def small() -> dict[str, Any]:
    """Overrides that shrink any model of the registry: 8×8 patches, tokens of width 24."""
    return dict(SMALL)


@pytest.fixture
def build() -> Callable[..., hvt.HVT]:
    """Build a small model in evaluation mode, its parameters stirred.

    Fresh weights are nearly silent (zero biases, unit norms, positions of 0.02); stirred, every
    parameter has a say in the logits, so that none can be lost unnoticed.
    """

    def make(name: str, **overrides: Any) -> hvt.HVT:
        return stir(hvt.create_model(name, **SMALL | overrides)).eval()

    return make


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command; gives the exit code and what it printed to either stream."""

    def called(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main([str(word) for word in words])
        except SystemExit as stop:  # how argparse leaves
            code = stop.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return called


def stir(model: hvt.HVT) -> hvt.HVT:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


@pytest.fixture
def images() -> Tensor:
    """Two images for a small model."""
    return torch.randn(2, 3, 64, 64)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to serve, with names for its classes; its export lies beside it."""
    from hvt.deploy.export import write_onnx

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("serve")
    model = stir(hvt.create_model("hvt_ti_1", **SMALL | FEW))
    hvt.save(model, folder / "small.safetensors", class_names=NAMES)
    write_onnx(hvt.load(folder / "small.safetensors").eval(), folder / "model.onnx")
    return folder / "small.safetensors"


@pytest.fixture(scope="session")
def onnx(checkpoint: Path) -> Path:
    return checkpoint.with_name("model.onnx")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A driver of a real Chromium; skips where there is none."""
    with start_chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver
