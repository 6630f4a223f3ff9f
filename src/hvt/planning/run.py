"""`hvt.plan`: the best configs within a budget, beside the paper's own scaling and a DeiT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import HVTError, did_you_mean
from ..fields import MAX_THREADS, check_whole
from .best import plan_space
from .budget import Budgets
from .latency import LatencyTable, check_timed
from .quality import load_quality
from .result import Estimator, Plan
from .space import space_of

MODES = ("eager", "onnx", "int8")


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

    `gflops` are MACs per image in 10⁹, `params` parameters in 10⁶, `latency_ms` the time of a
    batch of `batch` images on `device` in `mode` (eager, onnx or int8), and `memory` the MB of a
    training step at `train_batch` images. `fixed` are fields of `HVTConfig` that are not searched.
    With `source`, a checkpoint, the plan is of placements that `hvt upcycle` could give it: its
    width and depth are kept. `note` is called with progress messages.
    """
    budgets = Budgets(gflops=gflops, params=params, latency_ms=latency_ms, memory=memory)
    check_whole(batch=batch, train_batch=train_batch, count=count)
    if threads is not None:
        check_whole(le=MAX_THREADS, threads=threads)
    if mode not in MODES:
        raise HVTError(f"unknown mode {mode!r}: {did_you_mean(str(mode), MODES)}")
    measured = (mode, device, threads, batch, remeasure)
    if latency_ms is None and measured != ("eager", "auto", None, 1, False):
        raise HVTError(
            "mode, device, threads, batch and remeasure say how latency is measured: give "
            "latency_ms, or leave them out"
        )
    if latency_ms is not None and fixed.get("pool") == "conv":
        raise HVTError(
            "pool='conv' has no latency, for only max pooling is timed, which stands for avg too: "
            "fix one of these, or leave latency_ms out"
        )
    space = space_of(fixed) if source is None else None
    latency: LatencyTable | None = None
    if latency_ms is not None:
        for _, dim in space.widths if space else ():
            check_timed(dim)

        from .timings import latency_table

        latency = latency_table(mode, device, threads, batch, remeasure=remeasure, note=note)
    estimator = Estimator(load_quality(), latency, train_batch)
    if space is not None:
        return plan_space(space, budgets, estimator, count)

    from .placements import plan_source

    return plan_source(str(source), budgets, fixed, estimator, count)
