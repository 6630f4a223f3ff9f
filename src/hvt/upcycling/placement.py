"""Where to pool: all placements and image sizes within a budget, ranked before any training."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..config import HVTConfig
from ..costs import cost
from ..data.sources import Images
from ..errors import HVTError
from ..model import HVT
from .distil import compare
from .photos import Normalise, read_views
from .settings import PLACEMENT
from .student import pooled, resized, split_of, tail

NEAR = 0.85
"""The smallest share of the budget that a placement spends, if any placement spends as much."""
ROUNDS = (16, 64)
"""Photos of the first rounds; the last has as many as are asked for."""
KEPT = (24, 12)
"""Placements that stay after each of these rounds; their variants enter after the first."""
SHOWN = 12
"""Rows of the printed ranking."""
STRIDES: tuple[tuple[int, int] | int, ...] = ((2, 2), (2, 1), (1, 2), 2)
"""Rows and columns of the grid, or a stride of the sequence."""


@dataclass(frozen=True)
class Ranked:
    """A placement and how like the source it is, untrained."""

    config: HVTConfig
    gflops: float
    agreement: float
    """Per cent of the photos with the same top-1 class; cosine similarity without a head."""
    kl: float
    photos: int
    """Those it was measured on; the worse ones left early."""

    def to_dict(self) -> dict[str, Any]:
        described = {name: getattr(self.config, name) for name in PLACEMENT}
        described["pool_after"] = self.config.pool_blocks
        return described | {
            "gflops": self.gflops, "agreement": self.agreement, "kl": self.kl,
            "photos": self.photos,
        }  # fmt: skip


def describe(config: HVTConfig) -> str:
    """A placement in a few words."""
    height, width = config.image
    size = f"{height}" if height == width else f"{height}×{width}"
    if not config.pool_blocks:
        only = ", class token only at the end" if config.retention else ""
        return f"{size} px, unpooled{only}"
    stride = config.pool_stride
    if config.pool_dims == 1:
        shape = f"1D {stride}"
    else:
        rows, cols = stride if isinstance(stride, tuple) else (stride, stride)
        shape = f"2D {rows}×{cols}"
    after = " and ".join(map(str, config.pool_blocks))
    weighed = ", log(size)" if config.proportional_attention else ""
    return f"{size} px, {shape} {config.pool} after {after}{weighed}"


# ── what there is ───────────────────────────────────────────────────────────────────────────────


def candidates(source: HVTConfig, gflops: float | None, fixed: dict[str, Any]) -> list[HVTConfig]:
    """Architectures that cost the budget or a little less; without one `fixed` must name its own.

    Pooled ones for each size, stride and place, by averages and log(size) unless `fixed` has
    others, for which see `variants`. Last the whole source on the largest images within the budget.
    """
    base = source.replace(drop_path_rate=0.0)
    if gflops is None:
        if "img_size" not in fixed or "pool_after" not in fixed:
            raise HVTError("no budget is given: use --gflops, or fix --img-size and --pool-after")
        return [drop_unread_patches(placements(base, fixed)[0])]
    whole = cost(base).gflops
    if gflops >= whole:
        raise HVTError(
            f"gflops={gflops:g} is not below the source's {whole:.3g} GFLOPs: use a smaller budget"
        )
    configs = map(drop_unread_patches, placements(base, fixed))
    prices = {config: cost(config).gflops for config in configs}
    highest = max((price for price in prices.values() if price <= gflops), default=None)
    if highest is None:
        raise HVTError(
            f"no placement costs {gflops:g} GFLOPs or less: they cost from "
            f"{min(prices.values()):.3g} to {max(prices.values()):.3g}"
        )
    lowest = min(highest, NEAR * gflops)
    near = [config for config, price in prices.items() if lowest <= price <= gflops]
    unpooled = [drop_unread_patches(base.replace(img_size=size)) for size in _sizes(base, fixed)]
    largest = [config for config in unpooled if cost(config).gflops <= gflops][-1:]
    return list(dict.fromkeys([*near, *largest]))


def placements(base: HVTConfig, fixed: dict[str, Any]) -> list[HVTConfig]:
    """A config for each image size, stride and place to pool after; one at least is possible."""
    configs: list[HVTConfig] = []
    impossible: HVTError | None = None
    options = itertools.product(_sizes(base, fixed), _strides(fixed), _places(base, fixed))
    for size, stride, after in options:
        try:
            configs.append(_config(base, fixed, size, stride, after))
        except HVTError as error:
            impossible = error
    if not configs and impossible is not None:
        raise impossible
    return list(dict.fromkeys(configs))


def variants(config: HVTConfig, fixed: dict[str, Any]) -> list[HVTConfig]:
    """A placement by average and maximum, with and without log(size), as far as it is free."""
    kinds = [fixed["pool"]] if "pool" in fixed else ["avg", "max"]
    weighed = "proportional_attention"
    ways = [fixed[weighed]] if weighed in fixed else [True, False]
    return [
        config.replace(pool=kind, proportional_attention=way)
        for kind, way in itertools.product(kinds, ways)
    ]


def _sizes(base: HVTConfig, fixed: dict[str, Any]) -> list[tuple[int, int]]:
    """Multiples of the patch from half the source's size to a quarter above it."""
    if "img_size" in fixed:
        return [base.replace(img_size=fixed["img_size"]).image]
    rows, cols, patch = *base.grid, base.patch_size
    wanted = range(max(1, (rows + 1) // 2), rows * 5 // 4 + 1)
    return [(n * patch, max(1, round(n * cols / rows)) * patch) for n in wanted]


def _strides(fixed: dict[str, Any]) -> list[tuple[int, int] | int]:
    dims, stride = fixed.get("pool_dims"), fixed.get("pool_stride")
    if isinstance(stride, tuple):
        return [stride]
    options = STRIDES if stride is None else ((stride, stride), stride)
    return [s for s in options if dims is None or isinstance(s, tuple) == (dims == 2)]


def _places(base: HVTConfig, fixed: dict[str, Any]) -> list[tuple[int, ...]]:
    """One or two blocks, but not the last: nothing would be left to save."""
    if "pool_after" in fixed:
        return [tuple(fixed["pool_after"])]
    blocks = range(base.depth - 1)
    return [*((block,) for block in blocks), *itertools.combinations(blocks, 2)]


def _config(
    base: HVTConfig,
    fixed: dict[str, Any],
    size: tuple[int, int],
    stride: tuple[int, int] | int,
    after: tuple[int, ...],
) -> HVTConfig:
    """The architecture of a placement, or an error where there is none."""
    if not after:
        return base.replace(img_size=size)
    values: dict[str, Any] = {
        "img_size": size,
        "pool_after": after,
        "pool": fixed.get("pool", "avg"),
        "pool_dims": fixed.get("pool_dims", 2 if isinstance(stride, tuple) else 1),
        "pool_stride": stride,
        "proportional_attention": fixed.get("proportional_attention", True),
    }
    values["pool_kernel"] = fixed.get("pool_kernel", _kernel(base, size, stride, len(after)))
    config = base.replace(**values)
    if math.prod(config.grids[-1]) < 2:
        raise HVTError("this placement leaves too few tokens: pool later, or less often")
    return config


def _kernel(
    base: HVTConfig, size: tuple[int, int], stride: tuple[int, int] | int, stages: int
) -> tuple[int, int] | int:
    """Windows that share no token where 2 divides the grid; elsewhere the paper's, of 3.

    A window of 2 would leave out the last row of an odd grid. Windows of 2s - 1 around each s-th
    row leave none out; narrower ones do for strides s above 2, as they begin before the grid.
    """
    if isinstance(stride, int):
        return stride + 1
    grid = (size[0] // base.patch_size, size[1] // base.patch_size)
    rows, cols = (
        s if s < 3 and n % s**stages == 0 else 2 * s - 1 for n, s in zip(grid, stride, strict=True)
    )
    return rows, cols


def drop_unread_patches(config: HVTConfig) -> HVTConfig:
    """A model without pooling, without what no head reads.

    Where the head reads only the class token, the patches may go after the last block's attention:
    its MLP is then for one token, and the outputs are the same.
    """
    if config.pool_blocks or config.head_pool != "token" or config.num_prefix_tokens > 1:
        return config
    return config.replace(retention=(config.tokens[0],) * (config.depth - 1) + (1,))


# ── which is best ───────────────────────────────────────────────────────────────────────────────


class Evaluator:
    """Measures placements on photos, cheaply.

    For each image size the source's blocks run once and every block's output is kept, so that a
    placement costs only its tail.
    """

    def __init__(
        self, source: HVT, photos: Images, device: torch.device, workers: int, skip: bool
    ) -> None:
        self.source, self.photos = source.to(device), photos
        self.device, self.workers, self.skip = device, workers, skip
        self.normalise = Normalise(source, device)
        self.head = source.num_classes > 0
        # Of each placement: same top-1, KL, photos read, photos asked for.
        self.sums: dict[HVTConfig, Tensor] = defaultdict(lambda: torch.zeros(4).double())
        self._targets: dict[tuple[int, int], Tensor] = {}

    def measure(self, configs: Sequence[HVTConfig], photos: int) -> None:
        """Bring some placements to so many photos."""
        photos = min(photos, len(self.photos))
        groups = defaultdict(list)
        for config in configs:
            groups[int(self.sums[config][3]), config.image].append(config)
        for (start, image), group in sorted(groups.items()):
            if start < photos:
                self._run(group, image, start, photos)

    def ranked(self, configs: Iterable[HVTConfig]) -> list[Ranked]:
        """Those that were measured, best first; by the more photos, the more they are worth."""
        rows = []
        for config in configs:
            same, kl, count, _ = self.sums[config].tolist()
            rows.append(
                Ranked(config, cost(config).gflops, 100 * same / count, kl / count, int(count))
            )
        return sorted(rows, key=lambda row: (-row.photos, row.kl))

    @torch.inference_mode()
    def _run(
        self, configs: Sequence[HVTConfig], image: tuple[int, int], start: int, stop: int
    ) -> None:
        model = resized(self.source, image)
        students = {config: pooled(model, config) for config in configs}
        part = self.photos.subset(range(start, stop))
        views = read_views(part, [model], self.workers, self.skip)[0]
        truth = self._truth(part, start, stop, views if model is self.source else None)
        deepest = max(split_of(config) for config in configs)
        for first in range(0, len(views), 16):
            x = model._embed(self.normalise(views[first : first + 16]))
            outputs = []
            for block in model.blocks[: deepest + 1]:
                x = block(x)
                outputs.append(x)
            target = truth[first : first + 16]
            for config, student in students.items():
                logits = tail(student, outputs[split_of(config)])
                rows = compare(logits, target, self.head).double().sum(dim=0).cpu()
                sums = torch.cat((rows, rows.new_tensor([len(target), 0])))
                self.sums[config] += sums
        for config in configs:
            self.sums[config][3] = stop

    def _truth(self, part: Images, start: int, stop: int, views: Tensor | None) -> Tensor:
        """The source's outputs at its own size."""
        if (start, stop) not in self._targets:
            if views is None:
                views = read_views(part, [self.source], self.workers, self.skip)[0]
            pieces = [self.source(self.normalise(piece)) for piece in views.split(16)]
            self._targets[start, stop] = torch.cat(pieces)
        return self._targets[start, stop]


def rank(
    evaluator: Evaluator,
    configs: Sequence[HVTConfig],
    fixed: dict[str, Any],
    photos: int,
    note: Callable[[str], None] = lambda text: None,
) -> list[Ranked]:
    """All candidates, best first, by successive halving: the better ones see more photos.

    First each place by one kind of pooling; then the best of them by all kinds; then the best of
    those on all photos. Unpooled ones see all photos.
    """
    entered = [config for config in configs if not config.pool_blocks]
    current = [config for config in configs if config.pool_blocks]
    for turn, (count, kept) in enumerate(zip(ROUNDS, KEPT, strict=True)):
        note(f"{len(current)} placements on {min(count, photos)} photos")
        evaluator.measure(current, min(count, photos))
        entered += current
        current = [row.config for row in evaluator.ranked(current)[:kept]]
        if turn == 0:
            current = [one for config in current for one in variants(config, fixed)]
    final = [*current, *(config for config in entered if not config.pool_blocks)]
    note(f"{len(final)} candidates on {photos} photos")
    evaluator.measure(final, photos)
    return evaluator.ranked(dict.fromkeys([*entered, *current]))


def ranking_table(ranked: Sequence[Ranked]) -> Table:
    """The best candidates, and the unpooled ones wherever they stand."""
    table = Table("candidate, untrained", box=None, header_style="bold")
    for heading in ("GFLOPs", "agreement", "KL", "photos"):
        table.add_column(heading, justify="right")
    for place, row in enumerate(ranked):
        if place < SHOWN or not row.config.pool_blocks:
            table.add_row(
                describe(row.config), f"{row.gflops:.3f}", f"{row.agreement:.1f} %",
                f"{row.kl:.4f}", str(row.photos),
            )  # fmt: skip
    return table
