"""`hvt.plan`: the best configs that a budget buys, beside the paper's ways and the DeiT of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import HVTError, did_you_mean
from ..fields import MAX_THREADS, check_type, check_whole
from .answer import Judge, Plan, check_timed
from .best import plan_space
from .quality import load_quality
from .space import space_of

if TYPE_CHECKING:
    from .latency import LatencyTable

MODES = ("eager", "onnx", "int8")
"""How a model is run, for its latency."""
LEAST, MOST = 1e-12, 1e15
"""Of a budget in any unit; no model is near, and steps between smaller numbers have none."""


def plan(
    gflops: float | None = None,
    *,
    params: float | None = None,
    latency_ms: float | None = None,
    memory: float | None = None,
    source: str | Path | None = None,
    mode: str = "eager",
    device: str = "auto",
    threads: int | None = None,
    batch: int = 1,
    train_batch: int = 128,
    count: int = 5,
    remeasure: bool = False,
    note: Callable[[str], None] = lambda text: None,
    **fixed: Any,
) -> Plan:
    """The best configs within some budgets: `hvt.plan(gflops=1.25, img_size=384)`.

    `gflops` are multiply-adds of an image in 10⁹, `params` 10⁶ parameters, `latency_ms` the time
    of a batch of `batch` images on `device` in `mode` (eager, onnx or int8), and `memory` the MB
    of a training step at `train_batch` images. `fixed` are fields of `HVTConfig` that are not
    up for choice. `source`, a checkpoint, asks for placements that `hvt upcycle` could give it:
    its width and depth are kept. `note` is told what takes time.
    """
    budgets = _budgets(gflops=gflops, params=params, latency_ms=latency_ms, memory=memory)
    check_whole(batch=batch, train_batch=train_batch, count=count)
    if threads is not None:
        check_whole(le=MAX_THREADS, threads=threads)
    check_type("mode", mode, str)
    if mode not in MODES:
        raise HVTError(f"unknown mode {mode!r}: {did_you_mean(mode, MODES)}")
    measured = (mode, device, threads, batch, remeasure)
    if latency_ms is None and measured != ("eager", "auto", None, 1, False):
        raise HVTError(
            "mode, device, threads, batch and remeasure say how a latency is measured: bound it by "
            "latency_ms, or leave them out"
        )
    if latency_ms is not None and fixed.get("pool") == "conv":
        raise HVTError(
            "pool='conv' has no latency, for the table has the timings of max, by which avg is "
            "taken too: fix one of these, or leave latency_ms out"
        )
    space = space_of(fixed) if source is None else None
    if latency_ms is not None and space is not None:
        for _, dim in space.widths:
            check_timed(dim)
    latency: LatencyTable | None = None
    if "latency_ms" in budgets:
        from .timings import latency_table

        latency = latency_table(mode, device, threads, batch, remeasure=remeasure, note=note)
    judge = Judge(load_quality(), latency, train_batch)
    if source is not None:
        from .placements import plan_source

        return plan_source(str(source), budgets, fixed, judge, count)
    assert space is not None
    return plan_space(space, budgets, judge, count)


def _budgets(**asked: float | None) -> dict[str, float]:
    budgets: dict[str, float] = {}
    for name, value in asked.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise HVTError(f"{name}={value!r} must be a number")
        if not 0 < value < math.inf:
            raise HVTError(f"{name}={value!r} must be a finite number above 0")
        if not LEAST <= value <= MOST:  # a whole number may have hundreds of digits
            shown = f"={value!r}" if value < LEAST or isinstance(value, float) else ""
            raise HVTError(f"{name}{shown} must be from {LEAST:g} to {MOST:g}")
        budgets[name] = float(value)
    if not budgets:
        raise HVTError("no budget is named: use gflops, params, latency_ms or memory")
    return budgets
