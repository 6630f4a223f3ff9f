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

from ..costs import cost
from ..data.sample import drawn_images
from ..deploy.calibrate import Calibration, input_ranges
from ..deploy.export import write_onnx
from ..deploy.runtime import OnnxModel
from ..errors import HVTError, first_line
from ..model import HVT
from ..resolve import build, resolve

EXPORTED = ("onnx", "int8")


@dataclass(frozen=True)
class BenchModel:
    """A model that is ready to run in one of the modes."""

    name: str
    mode: str
    model: nn.Module | OnnxModel
    run: Callable[[Tensor], object]
    """The model, compiled where the mode says so."""

    @property
    def library(self) -> str:
        """hvt or timm."""
        return "hvt" if isinstance(self.model, HVT | OnnxModel) else "timm"

    @property
    def input_size(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return tuple(self.model.pretrained_cfg["input_size"])  # type: ignore

    @functools.cached_property
    def gflops(self) -> float:
        """MACs per image, in 10⁹: by `hvt.cost`, and by torch's counter for timm's models."""
        if isinstance(self.model, HVT | OnnxModel):
            return cost(self.model.config).gflops
        where = next(self.model.parameters()).device
        counter = FlopCounterMode(display=False)
        # The counter does not know every fused attention kernel; the plain one is matrix products.
        try:
            with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
                self.model(torch.zeros(1, *self.input_size, device=where))
        except Exception as error:  # of any kind: it is the model's own code that runs
            raise HVTError(
                f"the MACs of {self.name} cannot be counted ({first_line(error)}): leave it out"
            ) from error
        return counter.get_total_flops() / 2 / 1e9

    @property
    def params_m(self) -> float:
        """Parameters, in millions."""
        if isinstance(self.model, HVT | OnnxModel):
            return cost(self.model.config).params_m
        return sum(p.numel() for p in self.model.parameters()) / 1e6

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
    `overrides` are fields of `HVTConfig`, for our models, configs and checkpoints.
    """
    source = resolve(name)
    if overrides and source.kind in ("onnx", "timm"):
        raise HVTError(f"--img-size is not for {name}, which has one size: leave one of them out")
    if source.kind == "onnx":
        session = OnnxModel(source.name, device)
        return BenchModel(name, "int8" if session.int8 else "onnx", session, session)
    return bench_model(name, build(source, **overrides), mode, device, folder)


def bench_model(
    name: str, model: nn.Module, mode: str, device: torch.device, folder: Path
) -> BenchModel:
    """A model, ready to run in a mode."""
    model.eval().requires_grad_(False)  # or its graph would have the random drops of training
    if mode not in EXPORTED:
        model.to(device)
        run = torch.compile(model, dynamic=False) if mode == "compiled" else model
        return BenchModel(name, mode, model, run)
    if not isinstance(model, HVT):
        raise HVTError(f"{name} is a timm model: only hvt's can be timed as {mode}")
    calibration = None
    if mode == "int8":
        images = drawn_images(2, model.config.in_chans, model.config.image)
        calibration = Calibration(model, input_ranges(model, images))
    path = Path(tempfile.mkdtemp(dir=folder)) / f"{mode}.onnx"  # names may be alike
    write_onnx(model, path, calibration)
    session = OnnxModel(path, device)
    return BenchModel(name, mode, session, session)


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
            f"{name} is a timm model, which cannot be timed as {' and '.join(modes)}: add eager "
            "to the modes"
        )
    return remaining
