"""The table of block timings of this machine: kept in a file, or taken now."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..device import find_device
from ..errors import HVTError
from ..files import atomic_write, open_regular
from .latency import Latency, by_cost, machine_of, measure, needed, points_of


def get_latency(
    mode: str = "eager",
    device: str = "auto",
    threads: int | None = None,
    batch: int = 1,
    *,
    remeasure: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> Latency:
    """The table of this machine from the cache, or taken now, in some minutes."""
    where = find_device(device)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        machine = machine_of(where, mode, batch)
        path = cache_file(machine)
        stored = None if remeasure else _read(path, machine, note)
        if stored is not None:
            return stored
        note(
            f"timing blocks in {mode} at batch {batch}, once for this machine (one to five "
            "minutes, best while it is idle)"
        )
        widths, rows = points_of(mode)
        try:
            taken, _ = measure(mode, where, batch, widths=widths, rows=rows, note=note)
        except (MemoryError, RuntimeError) as error:  # torch's and ONNX Runtime's share no class
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            raise HVTError(f"batch={batch} does not fit into memory: use a smaller one") from error
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as temporary:
                temporary.write_text(json.dumps(asdict(taken), indent=1) + "\n")
        except (HVTError, OSError) as error:
            note(f"the timings are not kept: {error}")
        return taken
    finally:
        torch.set_num_threads(before)


# ── the cache ───────────────────────────────────────────────────────────────────────────────────


def cache_file(machine: dict[str, Any]) -> Path:
    """Where the timings of a machine, its versions, a mode and a batch are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    identity = json.dumps(_identity(machine), sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return Path(home) / "hvt" / f"latency-{machine['mode']}-{machine['batch']}-{digest}.json"


def _identity(machine: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in machine.items() if name not in ("date", "timm")}


def _read(path: Path, machine: dict[str, Any], note: Callable[[str], None]) -> Latency | None:
    """The stored table of a machine; None where there is none that can be used."""
    if not path.exists():
        return None
    try:
        with open_regular(path) as file:
            stored = json.loads(file.read(2**20))
        points = [(int(n), int(d), float(seconds)) for n, d, seconds in stored["points"]]
        patches = tuple(map(float, stored["patches"]))
        pools = {dims: tuple(map(float, stored["pools"][dims])) for dims in ("1", "2")}
        others = [float(stored["start"]), *patches, *itertools.chain(*pools.values())]
        sound = all(0 < t < math.inf for *_, t in points) and _whole_table(points, machine["mode"])
        sound = sound and all(0 <= number < math.inf for number in others)
        sound = sound and len(patches) == 2 and all(len(pair) == 2 for pair in pools.values())
        if not sound or _identity(dict(stored["machine"])) != _identity(machine):
            raise ValueError("its numbers are not timings")
    except (ArithmeticError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        note(f"{path} cannot be used ({error}): the timings are taken anew")
        return None
    return Latency(stored["machine"], points, float(stored["start"]), patches, pools)  # type: ignore[arg-type]


def _whole_table(points: list[tuple[int, int, float]], mode: str) -> bool:
    """Whether the points are those that are timed: all, or all but the dearest."""
    grid, always = by_cost(*points_of(mode)), needed(*points_of(mode))
    there = [point[:2] for point in points]
    if len(set(there)) < len(there) or not always <= set(there) <= set(grid):
        return False
    timed = [point in there for point in grid if point not in always]
    return timed == sorted(timed, reverse=True)
