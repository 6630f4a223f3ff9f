"""The table of block timings of this machine: measured once, cached, and checked before reuse.

A few small models are timed in interleaved rounds, in the modes of `hvt bench`: blocks of several
lengths and widths, and what patches and poolings add. The fastest call of each counts, so that a
busy moment does not; how much the others vary is kept as the spread.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..bench.measure import describe, interleaved
from ..bench.models import bench_model, fitting
from ..config import HVTConfig
from ..device import find_device
from ..errors import HVTError
from ..files import atomic_write
from ..model import HVT
from .latency import LatencyTable, nonnegative_lstsq, patch_terms, provenance
from .space import head_dim_of

WIDTHS = (32, 64, 192, 384, 768)
ROWS = (2, 4, 7, 14, 20, 28)
"""Rows of patches: 4, 16, 49, 196, 400 and 784 tokens."""
DEPTH, DEEP = 3, 12
FEW, FEW_DEPTH = 49, 6
"""Blocks of few tokens wait for their weights, which a short model would keep in the cache."""
ROUNDS, ANCHOR_ROUNDS = 9, 3
SECONDS = 0.08
"""Of a model in a round."""
SLOW = 0.6
"""Seconds of a call above which no larger block is timed."""
DRIFT = 1.3
"""How many times faster or slower the anchor may be before the table is measured anew."""
BUSY = 0.25
"""The spread above which a machine is reported to be busy."""

Case = tuple[Any, ...]
"""The purpose of a timed model, and its size."""
Note = Callable[[str], None]


def latency_table(
    mode: str, device: str, threads: int | None, batch: int, *, remeasure: bool, note: Note
) -> LatencyTable:
    """The table of this machine: the cached one if it still fits, or else measured now."""
    where = find_device(device)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        machine = describe(where) | {"mode": mode, "batch": batch}
        path = cache_file(machine)
        stored = None if remeasure else _read(path, machine, note)
        if stored is not None and _still_fits(stored, where, note):
            return stored
        note(
            f"timing blocks in {mode} at batch {batch} (one to five minutes, best while the "
            "machine is idle)"
        )
        cases = cases_of(mode)
        table = solve(time_models(cases, mode, where, batch, ROUNDS, note), cases, machine)
        note(f"measured the {provenance(table.machine)}")
        if table.machine["spread"] > BUSY:
            note("the machine is busy: measure again with --remeasure when it is idle")
        _write(path, table, note)
        return table
    finally:
        torch.set_num_threads(before)


def _still_fits(stored: LatencyTable, device: torch.device, note: Note) -> bool:
    """Time the anchor model again: the table may be of a busy hour, or the machine changed."""
    mode, batch = stored.machine["mode"], stored.machine["batch"]
    case, config = anchor_of(mode)
    now = min(time_models({case: config}, mode, device, batch, ANCHOR_ROUNDS)[case])
    if max(now / stored.anchor, stored.anchor / now) <= DRIFT:
        note(f"using the {provenance(stored.machine)}")
        return True
    note(
        f"the {provenance(stored.machine)}, no longer fit: a model that took "
        f"{1e3 * stored.anchor:.2f} ms takes {1e3 * now:.2f} ms now; measuring again"
    )
    return False


# ── the cache ───────────────────────────────────────────────────────────────────────────────────


def cache_file(machine: dict[str, Any]) -> Path:
    """Where the timings of a machine, its versions, a mode and a batch size are cached."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    identity = {k: v for k, v in machine.items() if k not in ("date", "timm", "spread")}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    return Path(home) / "hvt" / f"latency-{machine['mode']}-{machine['batch']}-{digest}.json"


def _read(path: Path, machine: dict[str, Any], note: Note) -> LatencyTable | None:
    if not path.exists():
        return None
    try:
        stored = LatencyTable(**json.loads(path.read_text(encoding="utf-8")))
        if cache_file(stored.machine) != path or not stored.seconds(HVTConfig()) > 0:
            raise ValueError("it was measured on another machine")
    except (LookupError, OSError, TypeError, ValueError) as error:
        note(f"{path} cannot be used ({error}): measuring again")
        return None
    return stored


def _write(path: Path, table: LatencyTable, note: Note) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(asdict(table), indent=1) + "\n")
    except (HVTError, OSError) as error:
        note(f"the timings are not cached: {error}")


# ── the models that are timed ───────────────────────────────────────────────────────────────────


def anchor_of(mode: str) -> tuple[Case, HVTConfig]:
    """The model by which a table is checked: 12 narrow blocks of middle length."""
    return [(case, config) for case, config in cases_of(mode).items() if case[0] == "deep"][-1]


def cases_of(mode: str) -> dict[Case, HVTConfig]:
    """The models of a table: first those that it needs, then further blocks, the cheapest first."""
    # Fewer where each must be exported, which takes seconds.
    rows = ROWS if mode == "eager" else (ROWS[0], *ROWS[2:])
    narrow, wide = WIDTHS[0], WIDTHS[len(WIDTHS) // 2]
    few, middle = rows[0], rows[len(rows) // 2]
    cases: dict[Case, HVTConfig] = {}
    for n, width in ((few, narrow), (few, wide), (middle, narrow)):
        cases["block", n * n, width] = _config(n, width)
        cases["deep", n * n, width] = _config(n, width, depth=DEEP)
    for width in (narrow, wide):
        cases["block", middle * middle, width] = _config(middle, width)
        cases["patches", middle * middle, width] = _config(middle, width, patch=32)
        for dims in (1, 2):
            cases["pool", dims, width] = _config(middle, width, depth=DEPTH, dims=dims)
    points = sorted(itertools.product(rows, WIDTHS), key=lambda point: point[0] * point[1])
    return cases | {("block", n * n, width): _config(n, width) for n, width in points}


def _config(
    rows: int, width: int, *, patch: int = 4, depth: int | None = None, dims: int | None = None
) -> HVTConfig:
    """A model of the table; with `dims` it pools after every block, in steps of one token."""
    dim = head_dim_of(width)
    depth = depth or (FEW_DEPTH if rows * rows <= FEW else DEPTH)
    plain = HVTConfig(
        img_size=rows * patch, patch_size=patch, num_heads=width // dim, head_dim=dim, depth=depth,
        num_classes=10, drop_path_rate=0.0, stages=0,
    )  # fmt: skip
    if dims is None:
        return plain
    return plain.replace(
        stages=None, pool_after=tuple(range(depth)), pool_dims=dims, pool_kernel=min(3, rows),
        pool_stride=1,
    )  # fmt: skip


# ── measuring ───────────────────────────────────────────────────────────────────────────────────


def time_models(
    cases: Mapping[Case, HVTConfig], mode: str, device: torch.device, batch: int, rounds: int,
    note: Note = lambda text: None,
) -> dict[Case, list[float]]:  # fmt: skip
    """Seconds of every call, in interleaved rounds; blocks beyond a slow one are left out."""
    runs: dict[Case, Callable[[], object]] = {}
    taken: dict[Case, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, fitting(batch):
        for number, (case, config) in enumerate(cases.items(), 1):
            note(f"preparing model {number} of {len(cases)}")
            model = bench_model(str(number), HVT(config).eval(), mode, device, Path(folder))
            runs[case] = model.call(batch, device)
            runs[case]()
            first: dict[Case, list[float]] = {}
            interleaved({case: runs[case]}, device, 0, 0.0, first)
            needed = any((kind, *case[1:]) in cases for kind in ("deep", "patches"))
            if case[0] == "block" and not needed and first[case][0] > SLOW:
                break
        for turn in range(rounds):
            note(f"round {turn + 1} of {rounds}")
            interleaved(runs, device, turn, SECONDS, taken)
    return taken


def solve(
    calls: Mapping[Case, Sequence[float]], cases: Mapping[Case, HVTConfig], machine: dict[str, Any]
) -> LatencyTable:
    """From the seconds of models' calls to those of their layers."""
    times = {case: min(seconds) for case, seconds in calls.items()}
    spread = statistics.median(statistics.median(calls[case]) / times[case] - 1 for case in calls)
    machine = machine | {"spread": round(spread, 3)}
    anchor, _ = anchor_of(machine["mode"])
    blocks = {case: seconds for case, seconds in times.items() if case[0] == "block"}
    overheads = []
    for case, deep in times.items():
        if case[0] == "deep":  # what remains of the short model without its blocks
            twin = ("block", *case[1:])
            short, depth = times[twin], cases[twin].depth
            overheads.append(short - depth * (deep - short) / (DEEP - depth))
    overhead = max(0.0, statistics.median(overheads))
    rows, values = [], []
    for case in (case for case in cases if case[0] == "patches"):
        twin = ("block", *case[1:])  # the same blocks, of smaller patches
        rows.append(np.subtract(patch_terms(cases[case]), patch_terms(cases[twin])))
        values.append(max(times[case] - times[twin], 0.0))
    per_mac, per_value = nonnegative_lstsq(np.array(rows), np.array(values)).tolist()
    table = LatencyTable(machine, [], overhead, (per_mac, per_value), {}, times[anchor])
    for case, seconds in sorted(blocks.items()):
        config = cases[case]
        rest = max(seconds - overhead - table.patch_embedding(config), seconds / 4)
        table.points.append((case[1], case[2], rest / config.depth))
    widths = [case[2] for case in cases if case[0] == "patches"]
    for dims in (1, 2):
        rows, values = [], []
        for width in widths:
            config = cases["pool", dims, width]
            tokens = config.tokens[:DEPTH]
            without = overhead + table.patch_embedding(config)
            without += math.fsum(float(table.block(n, width)) for n in tokens)
            rows.append((float(DEPTH), float(sum(tokens) * width)))
            values.append(max(times["pool", dims, width] - without, 0.0))
        table.pools[str(dims)] = tuple(nonnegative_lstsq(np.array(rows), np.array(values)).tolist())
    return table
