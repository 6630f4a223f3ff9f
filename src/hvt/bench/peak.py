"""Peak memory of a model, measured in a process of its own, for a process never forgets its peak.

It is the most the process held, above what it held before the model was made. So weights and
activations count, and Python and torch do not. On CUDA it is what torch's allocator held.
"""

from __future__ import annotations

import multiprocessing
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..deploy.runtime import OnnxModel
from ..errors import HVTError
from .models import BenchModel, fitting, open_bench_model

Result = TypeVar("Result")


def peak_memory(
    model: BenchModel, batches: Sequence[int], device: torch.device, **overrides: Any
) -> dict[int, int]:
    """Bytes by batch size, from a new process; `overrides` are those the model was opened with."""
    name = model.name
    if isinstance(model.model, OnnxModel):
        if device.type == "cuda":
            return {}  # ONNX Runtime's memory there is not torch's to count
        name, overrides = str(model.model.path), {}
    return in_new_process(_inference_peaks, name, model.mode, batches, device, overrides)


def in_new_process(function: Callable[..., Result], *args: Any) -> Result:
    """What a function returns in a process of its own, with as many threads as this one."""
    spawn, threads = multiprocessing.get_context("spawn"), torch.get_num_threads()
    try:
        with ProcessPoolExecutor(1, spawn, torch.set_num_threads, (threads,)) as pool:
            return pool.submit(function, *args).result()
    except BrokenProcessPool as error:
        raise HVTError(
            "the peak memory could not be measured, as the process was killed: use a smaller "
            "batch, or leave memory out"
        ) from error


def _inference_peaks(
    name: str, mode: str, batches: Sequence[int], device: torch.device, overrides: dict[str, Any]
) -> dict[int, int]:
    before = memory_held(device)
    model = open_bench_model(name, mode, device, Path(), **overrides)
    peaks: dict[int, int] = {}
    for batch in sorted(batches):  # from small to large, for a peak never falls
        with fitting(batch):
            model.call(batch, device)()
        peaks[batch] = memory_peak(device) - before
    return peaks


def memory_held(device: torch.device) -> int:
    """Bytes held now: of torch's allocator on CUDA, of the whole process elsewhere."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _resident("VmRSS")


def memory_peak(device: torch.device) -> int:
    """The most bytes held so far, counted as in `memory_held`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")


def _resident(field: str) -> int:
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux its maximum is inherited from the process that started this one.
        words = status.read_text().split()  # VmRSS: 8192 kB
        return int(words[words.index(f"{field}:") + 1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024
