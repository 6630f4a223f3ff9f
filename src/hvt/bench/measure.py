"""How speed is measured: which machine this is, and time taken in turns."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import date
from importlib import metadata
from typing import TypeVar

import timm
import torch

from .. import __version__
from ..device import cpu_name

Case = TypeVar("Case", bound=Hashable)

MATMUL_SIZES = (1024, 1536, 2048)
SETTLE = 0.1
"""Seconds of a turn that are not counted: ONNX Runtime's threads spin for up to 0.05 s after a
session's last call, and take the cores from the model that is next."""


def describe(device: torch.device) -> dict[str, str | int]:
    """The machine, the versions and the day, as columns of a results file."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "cpu": cpu_name(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "dtype": "float32",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "onnxruntime": next((d.version for d in metadata.distributions(name="onnxruntime")), ""),
        "hvt": __version__,
        "date": date.today().isoformat(),
    }


# ── time ────────────────────────────────────────────────────────────────────────────────────────


def interleaved(
    runs: Mapping[Case, Callable[[], object]],
    device: torch.device,
    turn: int,
    least: float,
    into: dict[Case, list[float]],
) -> None:
    """Time the calls of every case, one case after the other, one further along at every turn.

    A disturbance of the machine then falls on all cases alike, and none always follows the same
    neighbour. A case is called for `least` seconds, at least once. Calls for as long before, and
    for at most `SETTLE`, are not counted: they find the caches, the allocator and the cores as
    another model left them, which is not part of a steady throughput.
    """
    cases = list(runs)
    start = turn % len(cases)
    for case in cases[start:] + cases[:start]:
        _calls(runs[case], device, min(least, SETTLE))
        into.setdefault(case, []).extend(_calls(runs[case], device, least))


def _calls(run: Callable[[], object], device: torch.device, least: float) -> list[float]:
    calls: list[float] = []
    start = before = time.perf_counter()
    while before - start < least or not calls:
        run()
        if device.type != "cpu":  # an accelerator returns before it is done
            torch.accelerator.synchronize(device)
        now = time.perf_counter()
        calls.append(now - before)
        before = now
    return calls


def matmuls(device: torch.device) -> dict[int, Callable[[], object]]:
    """Square float32 matrix products by size: the fastest is the machine's peak."""

    def product(n: int) -> Callable[[], object]:
        a, b, out = (torch.randn(n, n, device=device) for _ in range(3))
        return lambda: torch.mm(a, b, out=out)

    return {n: product(n) for n in MATMUL_SIZES}


def matmul_peak(times: Mapping[int, Sequence[float]]) -> float:
    """GFLOP/s of the fastest size, by its median time; a MAC is two operations."""
    return max(2 * n**3 / statistics.median(s) / 1e9 for n, s in times.items())
