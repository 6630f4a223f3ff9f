"""The models to compare, ours and timm's, built and run in the same way."""

from __future__ import annotations

import contextlib
import functools
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..config import HVTConfig
from ..costs import cost
from ..data.sample import drawn_images
from ..deploy.calibrate import Calibration, input_ranges
from ..deploy.export import write
from ..deploy.runtime import OnnxModel
from ..errors import HVTError
from ..model import HVT
from ..resolve import build as build_source
from ..resolve import resolve

EXPORTED = ("onnx", "int8")


@dataclass(frozen=True)
class BenchModel:
    """A model that is ready to run in one of the modes."""

    name: str
    library: str
    """hvt or timm."""
    mode: str
    input_size: tuple[int, int, int]
    """Channels, height and width."""
    count_gflops: Callable[[], float]
    """For a timm model this builds another copy, which must not count in its memory."""
    params_m: float
    run: Callable[[Tensor], object]

    @functools.cached_property
    def gflops(self) -> float:
        """MACs per image, in 10⁹."""
        return self.count_gflops()

    def call(self, batch: int, device: torch.device) -> Callable[[], object]:
        """One forward pass on a batch of noise, to be timed."""
        with fitting(batch):
            images = torch.randn(batch, *self.input_size, device=device)

        def forward() -> object:
            with torch.inference_mode():
                return self.run(images)

        return forward


@contextlib.contextmanager
def fitting(batch: int) -> Iterator[None]:
    """Raise one clear error for a batch that does not fit into memory."""
    try:
        yield
    except (MemoryError, RuntimeError, TypeError, HVTError) as error:
        # torch's and ONNX Runtime's share no class; sizes that have no number overflow.
        words = "out of memory|allocat|overflow"
        if not isinstance(error, MemoryError) and not re.search(words, str(error), re.I):
            raise
        raise HVTError(f"batch={batch} does not fit into memory: use a smaller one") from error


def open_bench_model(
    name: str, mode: str, device: torch.device, folder: Path, **overrides: Any
) -> BenchModel:
    """What `resolve` finds under a name, ready to run in a mode.

    An ONNX file runs as it is. Others are exported to `folder` where the mode asks for it, int8
    with all layers quantised and calibrated on drawn images, which are as fast as real ones.
    `overrides` are fields of `HVTConfig`, for our models and configs.
    """
    source = resolve(name)
    if source.kind == "onnx":
        session = OnnxModel(source.name, device, torch.get_num_threads())
        return _of_config(name, "int8" if session.int8 else "onnx", session.config, session)
    model = build(name, **overrides).eval()
    if isinstance(model, HVT):
        return bench_model(name, model, mode, device, folder)
    if mode in EXPORTED:
        raise not_ours(name, mode)
    params = sum(p.numel() for p in model.parameters()) / 1e6
    run = _compiled(model.to(device), mode)
    count = functools.partial(gflops, name)
    return BenchModel(name, "timm", mode, input_size(model), count, params, run)


def bench_model(name: str, model: HVT, mode: str, device: torch.device, folder: Path) -> BenchModel:
    """A model of ours in evaluation mode, ready to run in a mode."""
    if mode not in EXPORTED:
        return _of_config(name, mode, model.config, _compiled(model.to(device), mode))
    session = OnnxModel(export_for_bench(model, mode, folder), device, torch.get_num_threads())
    return _of_config(name, mode, model.config, session)


def export_for_bench(model: HVT, mode: str, folder: Path) -> Path:
    """The file of a model in an exported mode, in a folder of its own below `folder`."""
    model.eval()  # or the graph would be that of training, with its random drops
    calibration = None
    if mode == "int8":
        images = drawn_images(2, model.config.in_chans, model.config.image)
        calibration = Calibration(model, input_ranges(model, images))
    path = Path(tempfile.mkdtemp(dir=folder)) / f"{mode}.onnx"  # names may be alike
    write(model, path, mode, calibration)
    return path


def not_ours(name: str, mode: str) -> HVTError:
    return HVTError(f"{name} is timm's, and only hvt's models are timed as {mode}")


def _compiled(model: nn.Module, mode: str) -> Callable[[Tensor], object]:
    return torch.compile(model, dynamic=False) if mode == "compiled" else model


def _of_config(
    name: str, mode: str, config: HVTConfig, run: Callable[[Tensor], object]
) -> BenchModel:
    own = cost(config)
    size = (config.in_chans, *config.image)
    return BenchModel(name, "hvt", mode, size, lambda: own.gflops, own.params_m, run)


def build(name: str, device: torch.device | str = "cpu", **overrides: Any) -> nn.Module:
    """The model of a name or a path; weights are new unless they are a checkpoint's."""
    return build_source(resolve(name), **overrides).to(device)


def modes_of(name: str, modes: Sequence[str]) -> list[str]:
    """Those of some modes that a model can be timed in; an ONNX file has only its own."""
    kind = resolve(name).kind
    if kind == "onnx":
        return list(modes[:1])
    if kind != "timm":
        return list(modes)
    remaining = [mode for mode in modes if mode not in EXPORTED]
    if not remaining:
        raise HVTError(
            f"{name} is not a model of hvt, and only those are timed as {' and '.join(modes)}: "
            "add eager to the modes"
        )
    return remaining


def library(name: str) -> str:
    """hvt or timm."""
    return "timm" if resolve(name).kind == "timm" else "hvt"


def input_size(model: nn.Module) -> tuple[int, int, int]:
    """The channels, height and width that a model of either library takes."""
    cfg: Any = model.pretrained_cfg
    return tuple(cfg["input_size"])


def gflops(name: str) -> float:
    """MACs per image in 10⁹: by `hvt.cost`, and by torch's counter for timm's models."""
    source = resolve(name)
    if source.kind != "timm":
        return cost(source.name).gflops
    # Frozen, for the counter follows whatever wants a gradient.
    model = build_source(source).eval().requires_grad_(False)
    counter = FlopCounterMode(display=False)
    # The counter does not know every fused attention kernel; the plain one is matrix products.
    try:
        with sdpa_kernel(SDPBackend.MATH), counter:
            model(torch.zeros(1, *input_size(model)))
    except Exception as error:  # of any kind: it is the model's own code that runs
        raise HVTError(
            f"the MACs of {name} cannot be counted ({first_line(error)}): leave it out"
        ) from error
    return counter.get_total_flops() / 2 / 1e9


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
