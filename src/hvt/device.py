"""Where to compute: the device of a name, or the best there is, and what the CPU is called."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from .errors import HVTError


def find_device(name: str | torch.device, index: int = 0) -> torch.device:
    """The device of a name; `auto` is a GPU if there is one, and `index` chooses among several."""
    if name == "auto":
        name = "cpu"
        if torch.cuda.is_available():
            name = "cuda"
        elif torch.backends.mps.is_available():
            name = "mps"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", index)
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, NotImplementedError, TypeError) as error:
        raise HVTError(f"the device {str(name)!r} is not available: use auto or cpu") from error
    return device


def cpu_name() -> str:
    """The CPU's model name where the system reports it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself, twice as fast as float32."""
    asked = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # torch has no public name
    return any(getattr(torch.cpu, name, bool)() for name in asked)
