"""Latency and throughput of several models, timed in turns, as rows for a table or a file."""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..data.sample import drawn_images
from ..deploy.export import BATCH, open_exported
from ..errors import HVTError, first_line
from ..model import HVT
from .measure import interleaved, matmul_peak, matmuls
from .models import BenchModel, fitting

TURN = 0.25  # seconds that one turn of a model fills at least
BUSY = 1.5
"""The ratio of p90 to p50 from which on a machine counts as busy; idle ones are below 1.2."""


@dataclass(frozen=True)
class BenchRow:
    """One model in one mode at one batch size."""

    model: str
    library: str
    mode: str
    batch: int
    pixels: str
    gflops: float
    """MACs per image, in 10⁹."""
    params_m: float
    images_per_s: float
    """From the median call."""
    p50_ms: float
    p90_ms: float
    p99_ms: float
    calls: int
    gflop_per_s: float
    matmul_peak_gflop_per_s: float
    share_of_peak: float
    """Of the fastest float32 matrix product; int8 may pass 1."""
    peak_memory_mb: float | None


def measure(
    models: Sequence[BenchModel],
    batches: Sequence[int],
    device: torch.device,
    *,
    rounds: int = 5,
    least: float = TURN,
    memory: Mapping[tuple[str, str, int], int] = {},
    note: Callable[[str], None] = lambda text: None,
) -> list[BenchRow]:
    """Time every model at every batch size, round after round, each a little at a time.

    `memory` has the peak bytes by name, mode and batch, where they are known.
    """
    cases = list(itertools.product(batches, range(len(models))))
    runs = {(batch, place): models[place].call(batch, device) for batch, place in cases}
    note("warming up")
    for (batch, place), run in runs.items():
        with fitting(batch):
            _warm_up(models[place], run)
    products = matmuls(device)
    product_times: dict[int, list[float]] = {}
    times: dict[tuple[int, int], list[float]] = {}
    for turn in range(rounds):
        note(f"round {turn + 1} of {rounds}")
        interleaved(products, device, turn, least / 5, product_times)
        interleaved(runs, device, turn, least, times)
    peak = matmul_peak(product_times)
    rows = []
    for batch, place in cases:
        model = models[place]
        held = memory.get((model.name, model.mode, batch))
        rows.append(_row(model, batch, times[batch, place], peak, held))
    return rows


def _warm_up(model: BenchModel, run: Callable[[], object]) -> None:
    try:
        run()
    except Exception as error:
        if model.mode != "compiled":
            raise
        raise HVTError(
            f"{model.name} cannot be compiled here ({first_line(error)}): leave compiled out"
        ) from error


def _row(
    model: BenchModel, batch: int, seconds: list[float], peak: float, held: int | None
) -> BenchRow:
    median, p90, p99 = np.percentile(seconds, (50, 90, 99)).tolist()
    achieved = 2 * model.gflops * batch / median
    _, height, width = model.input_size
    return BenchRow(
        model=model.name,
        library=model.library,
        mode=model.mode,
        batch=batch,
        pixels=str(height) if height == width else f"{height}x{width}",
        gflops=model.gflops,
        params_m=model.params_m,
        images_per_s=batch / median,
        p50_ms=1e3 * median,
        p90_ms=1e3 * p90,
        p99_ms=1e3 * p99,
        calls=len(seconds),
        gflop_per_s=achieved,
        matmul_peak_gflop_per_s=peak,
        share_of_peak=achieved / peak,
        peak_memory_mb=None if held is None else held / 1e6,
    )


def busy(rows: Sequence[BenchRow]) -> str | None:
    """A warning if calls took so unequally long that something else must have run as well."""
    worst = max(rows, key=lambda row: row.p90_ms / row.p50_ms)
    ratio = worst.p90_ms / worst.p50_ms
    if ratio < BUSY:
        return None
    return (
        f"the machine was busy: p90 is {ratio:.1f} times p50 for {worst.model} at batch "
        f"{worst.batch}, so measure again when nothing else runs"
    )


@torch.inference_mode()
def compare_speed(model: HVT, path: Path, form: str, rounds: int = 3) -> dict[str, float]:
    """Images/s on the CPU in turns: of the file that `export` has just written, and in PyTorch."""
    model = copy.deepcopy(model).cpu().float().eval()
    exported = open_exported(path, form)
    batch = drawn_images(BATCH, model.config.in_chans, model.config.image)
    calls = {
        "torch_images_per_second": lambda: model(batch),
        "images_per_second": lambda: exported(batch),
    }
    times: dict[str, list[float]] = {}
    for turn in range(rounds):
        interleaved(calls, torch.device("cpu"), turn, TURN, times)
    return {name: BATCH / statistics.median(seconds) for name, seconds in times.items()}
