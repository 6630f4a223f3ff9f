"""Shared by the tests of training: a run of a second on the digits, and what it leaves."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hvt.distributed import DistributedContext
from hvt.training.engine import open_trainer, train
from hvt.training.interrupt import Interrupted
from hvt.training.recipe import Recipe
from hvt.training.trainer import Result, Trainer

TINY = {"img_size": 8, "patch_size": 2, "num_heads": 1, "head_dim": 16, "depth": 4}

# Everything random and everything averaged, so that nothing can be lost unnoticed; but not timm's
# augmentation, which takes longer than the rest.
LIVELY: dict[str, Any] = {
    "mixup": 0.8, "cutmix": 1.0, "rand_augment": "", "color_jitter": 0.0, "erase": 0.0, "flip": 0.5,
    "repeats": 3, "padding": 1, "ema": 0.8, "clip_grad": 1.0, "layer_decay": 0.8,
}  # fmt: skip
PLAIN: dict[str, Any] = {
    "mixup": 0.0, "cutmix": 0.0, "rand_augment": "", "color_jitter": 0.0, "erase": 0.0, "flip": 0.0,
    "repeats": 1, "padding": 0, "ema": 0.0,
}  # fmt: skip


def tiny(folder: Path, **values: Any) -> Recipe:
    """Ten steps of a tiny model in two epochs, lively by default."""
    overrides = TINY | {"drop_path_rate": 0.3} | values.pop("overrides", {})
    base: dict[str, Any] = {
        "model": "hvt_ti_2", "data": "digits", "output": str(folder), "epochs": 2,
        "batch_size": 240, "lr": 0.02, "warmup_lr": 1e-3, "warmup_epochs": 1, "holdout": 0.1,
        "device": "cpu", "threads": 1, "tensorboard": False, "workers": 0,
    }  # fmt: skip
    return Recipe(**base | LIVELY | values, overrides=overrides)


def write_recipe(recipe: Recipe, path: Path) -> str:
    """A recipe as the file that `hvt train` reads."""
    values = {k: v for k, v in vars(recipe).items() if v is not None and k != "overrides"}
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    lines += ["[overrides]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in recipe.overrides.items()]
    path.write_text("\n".join(lines))
    return str(path)


def quiet() -> Console:
    """A console whose words are kept: `quiet().file.getvalue()`."""
    return Console(file=io.StringIO(), width=200)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class Impatient(io.StringIO):
    """A screen that asks the run to stop by signals once it reads of the first epoch."""

    numbers = (signal.SIGTERM,)

    def write(self, text: str) -> int:
        for number in self.numbers if text.startswith("epoch 1/2") else ():
            os.kill(os.getpid(), number)
        return super().write(text)


class Interrupting(io.StringIO):
    """A terminal at which somebody presses Ctrl-C when some words appear."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words

    def write(self, text: str) -> int:
        if self.words in text:
            self.words = "\0"
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def stop_after_an_epoch(recipe: Recipe) -> None:
    with pytest.raises(Interrupted, match=rf"stopped after epoch 1; .* --resume {recipe.output}"):
        train(recipe, console=Console(file=Impatient(), width=200))


def run(folder: Path, **values: Any) -> Result:
    return train(tiny(folder, **values), console=quiet())


def trainer_of(recipe: Recipe, console: Console | None = None) -> Trainer:
    """What would train by this recipe, in one process on the CPU."""
    folder, cpu = Path(recipe.output or "."), torch.device("cpu")
    return open_trainer(recipe, folder, DistributedContext(), cpu, console or quiet())


def weights(path: Path) -> dict[str, Tensor]:
    return load_file(path)


def assert_same_run(left: Path, right: Path) -> None:
    """Two runs ended alike to the bit: both weights files and the table."""
    for name in ("model.safetensors", "best.safetensors"):
        ours, theirs = weights(left / name), weights(right / name)
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            assert torch.equal(tensor, theirs[key]), f"{key} of {name}"
    for name in ("model.safetensors", "best.safetensors", "metrics.csv"):
        assert (left / name).read_bytes() == (right / name).read_bytes(), name


class Waits(TorchFunctionMode):
    """Counts in `transfers` the calls that make the host wait for the device, wherever that is."""

    CALLS = (Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.__bool__,
             Tensor.__float__, Tensor.__int__)  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.transfers = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.transfers += func in self.CALLS
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A disk of its own that is soon full; skips where one cannot be mounted."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs Linux and root")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
