"""`hvt.plan`: the best configs within a budget, beside the paper's own scaling and a DeiT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import HVTError, did_you_mean
from ..fields import check_whole
from .best import plan_space
from .budget import Budgets
from .latency import LatencyTable
from .result import Estimator, Plan
from .space import Space, space_of

MODES = ("eager", "onnx", "int8")
MIN_HEAD_DIM = 16


def plan(
    gflops: float | None = None,
    *,
    params: float | None = None,
    latency_ms: float | None = None,
    memory: float | None = None,
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
    `note` is called with progress messages.
    """
    budgets = Budgets(gflops=gflops, params=params, latency_ms=latency_ms, memory=memory)
    check_whole(batch=batch, train_batch=train_batch, count=count)
    if mode not in MODES:
        raise HVTError(f"unknown mode {mode!r}: {did_you_mean(str(mode), MODES)}")
    measured = (mode, device, threads, batch, remeasure)
    if latency_ms is None and measured != ("eager", "auto", None, 1, False):
        raise HVTError(
            "mode, device, threads, batch and remeasure need latency_ms: give it, or leave them out"
        )
    space = space_of(fixed)
    latency: LatencyTable | None = None
    if latency_ms is not None:
        _check_timed(space)

        from .timings import latency_table

        latency = latency_table(mode, device, threads, batch, remeasure=remeasure, note=note)
    return plan_space(space, budgets, Estimator(latency, train_batch), count)


def _check_timed(space: Space) -> None:
    """Raise an error for what the timed blocks, of max pooling and wide heads, do not represent."""
    if space.base.pool == "conv":
        raise HVTError(
            "latency cannot be predicted for pool='conv', only for max and avg: fix one of these, "
            "or leave latency_ms out"
        )
    narrowest = min(dim for _, dim in space.widths)
    if narrowest < MIN_HEAD_DIM:  # the softmax of many narrow heads takes much longer
        raise HVTError(
            f"latency cannot be predicted for head_dim={narrowest}, only from {MIN_HEAD_DIM}: fix "
            "a larger one, or leave latency_ms out"
        )
