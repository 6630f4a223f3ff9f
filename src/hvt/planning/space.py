"""The search space of a plan: widths, depths, images, poolings and where to pool."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config import FIELDS, Grid, HVTConfig, pooled_grid
from ..errors import HVTError, did_you_mean
from ..fields import check_some

WIDTHS = (
    32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 896, 1024, 1152,
    1280,
)  # fmt: skip
HEADS = (*range(1, 13), 14, 16, 20, 24)
"""Numbers of heads, where the width of one is fixed."""
DEPTHS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 24, 28, 32, 36, 40, 48, 56, 64)
SIZES = (96, 112, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512)
PATCHES = (2, 4, 8, 14, 16, 32)
ROWS = (4, 32)
"""Range of the rows of patches, where size and patch are not both fixed."""
WINDOWS = {1: ((3, 2), (2, 2), (3, 3), (5, 4)), 2: ((3, 2), (2, 2), (3, 3))}
"""Kernels and strides by `pool_dims`; the first is the paper's."""
MAX_STAGES = 4
MIN_TOKENS = 2
"""A pooling that would leave fewer is left out: attention needs two."""

SEARCHED = (
    "img_size", "patch_size", "num_heads", "head_dim", "embed_dim", "depth", "stages", "pool_after",
    "pool_kernel", "pool_stride", "pool_dims",
)  # fmt: skip
KEPT = (
    "in_chans", "num_classes", "pool", "class_token", "mlp_ratio", "drop_rate", "pos_drop_rate",
    "proj_drop_rate", "attn_drop_rate", "drop_path_rate",
)  # fmt: skip
"""Fields that can be fixed beside those that are searched."""

Pooling = tuple[int, int | Grid, int | Grid]
"""Dimensions, kernel and stride."""


@dataclass(frozen=True)
class ImageSpec:
    """An image size and its patches."""

    size: Grid
    patch: int

    @property
    def grid(self) -> Grid:
        return self.size[0] // self.patch, self.size[1] // self.patch


Choices = tuple[tuple[int, int], int, ImageSpec, Pooling, tuple[int, ...]]
"""Heads and the width of one, depth, image, pooling, and the blocks to pool after."""


@dataclass(frozen=True)
class Space:
    """The choices that remain when some fields are fixed."""

    fixed: dict[str, Any]
    widths: tuple[tuple[int, int], ...]
    """Heads and the width of one."""
    depths: tuple[int, ...]
    images: tuple[ImageSpec, ...]
    poolings: tuple[Pooling, ...]
    base: HVTConfig
    """A valid config with the fields that are not searched."""

    def places(self, depth: int) -> list[tuple[int, ...]]:
        """The blocks to pool after: none, the paper's even stages, and steps of equal length.

        Deep models step by twelfths of their depth, so that they have no more places than others.
        """
        if "pool_after" in self.fixed:
            after = self.fixed["pool_after"]
            return [after] if all(block < depth for block in after) else []
        if "stages" in self.fixed:
            stages = self.fixed["stages"]
            return [] if stages and depth % stages else [even(depth, stages)]
        choices: dict[tuple[int, ...], None] = {(): None}
        for stages in range(1, MAX_STAGES + 1):
            if depth % stages == 0:
                choices[even(depth, stages)] = None
            unit = max(1, depth // 12)
            firsts = range(0, depth // 2 + 1, unit)
            gaps = range(unit, depth, unit) if stages > 1 else (depth,)
            for first, gap in itertools.product(firsts, gaps):
                last = first + (stages - 1) * gap
                if last <= depth - 2:  # after the last block there is nothing left to save
                    choices[tuple(first + m * gap for m in range(stages))] = None
        return list(choices)

    def config(
        self,
        heads: tuple[int, int],
        depth: int,
        image: ImageSpec,
        pooling: Pooling,
        after: Sequence[int],
    ) -> HVTConfig:
        """One choice as a config; even stages are given as `stages`."""
        values: dict[str, Any] = {
            "img_size": image.size, "patch_size": image.patch,
            "num_heads": heads[0], "head_dim": heads[1], "depth": depth,
        }  # fmt: skip
        stages = len(after)
        if not stages or (depth % stages == 0 and tuple(after) == even(depth, stages)):
            values["stages"] = stages
        else:
            values["pool_after"] = tuple(after)
        if stages:
            values |= {
                "pool_dims": pooling[0], "pool_kernel": pooling[1], "pool_stride": pooling[2],
            }  # fmt: skip
        return self.base.replace(**values)


def even(depth: int, stages: int) -> tuple[int, ...]:
    """The paper's rule: the first block of each stage, all stages equally long."""
    return tuple(m * (depth // stages) for m in range(stages))


def lengths(grid: Grid, pooling: Pooling, stages: int) -> list[int]:
    """Patches at first and after each pooling, while `MIN_TOKENS` are left."""
    counts = [math.prod(grid)]
    for _ in range(stages):
        grid = pooled_grid(grid, *pooling)
        if min(grid) < 1 or math.prod(grid) < MIN_TOKENS:
            break
        counts.append(math.prod(grid))
    return counts


# ── the space around fixed fields ───────────────────────────────────────────────────────────────


def space_of(fixed: dict[str, Any], sizes: Sequence[int] = SIZES) -> Space:
    """The space around fixed fields of `HVTConfig`."""
    for name in fixed:
        if name not in FIELDS:
            raise HVTError(f"unknown field {name!r}: {did_you_mean(name, [*SEARCHED, *KEPT])}")
        if name not in (*SEARCHED, *KEPT):
            raise HVTError(f"hvt plan does not support {name}: leave it out, or use hvt cost")
    fixed = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in fixed.items()
        if value is not None
    }
    check_some(HVTConfig, fixed)
    stages, after = fixed.get("stages"), fixed.get("pool_after")
    if stages is not None and after is not None and stages != len(after):
        raise HVTError("stages and pool_after disagree: fix one of them")
    space = Space(
        fixed=fixed,
        widths=_widths(fixed),
        depths=(fixed["depth"],) if "depth" in fixed else DEPTHS,
        images=_images(fixed, sizes),
        poolings=_poolings(fixed),
        base=HVTConfig(stages=0, **{name: fixed[name] for name in KEPT if name in fixed}),
    )
    if not any(space.places(depth) for depth in space.depths):
        what = f"stages={stages}" if after is None else f"pool_after={after}"
        depth = fixed.get("depth", "2 to 64")
        raise HVTError(f"{what} is not possible at depth {depth}: fix other blocks or a depth")
    return space


def _widths(fixed: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    heads, dim, width = (fixed.get(n) for n in ("num_heads", "head_dim", "embed_dim"))
    if width is not None:
        dim = dim or (width // heads if heads else head_dim_of(width))
        heads = heads or width // dim
        if heads * dim != width:
            raise HVTError(
                f"embed_dim={width} is not num_heads × head_dim: fix two of the three that agree"
            )
        return ((heads, dim),)
    if heads is not None:
        return ((heads, dim or 64),)
    if dim is not None:
        return tuple((count, dim) for count in HEADS)
    return tuple((width // head_dim_of(width), head_dim_of(width)) for width in WIDTHS)


def head_dim_of(width: int) -> int:
    """64 as in the paper from DeiT-Ti's width on, and less below, for several heads."""
    dims = (64, 32, 16, 8) if width >= 192 else (32, 16, 8)
    return next((dim for dim in dims if width % dim == 0), width)


def _images(fixed: dict[str, Any], sizes: Sequence[int]) -> tuple[ImageSpec, ...]:
    size, patch = fixed.get("img_size"), fixed.get("patch_size")
    asked = [HVTConfig(img_size=one, patch_size=1).image for one in ([size] if size else sizes)]
    images = [
        ImageSpec(one, p)
        for one in asked
        for p in ([patch] if patch else PATCHES)
        if one[0] % p == 0 and one[1] % p == 0
    ]
    if size and patch:
        HVTConfig(img_size=size, patch_size=patch)  # raises an error if it does not fit
        return tuple(images)
    within = [one for one in images if ROWS[0] <= min(one.grid) and max(one.grid) <= ROWS[1]]
    if not within and images:
        # All are too coarse or too fine: the closest to the paper's 14 rows.
        within = [min(images, key=lambda one: abs(max(one.grid) - 14))]
    if not within:
        what = f"img_size={size}" if size else f"patch_size={patch}"
        raise HVTError(f"{what} fits no {'patch' if size else 'image'} of the plan: fix both")
    return tuple(within)


def _poolings(fixed: dict[str, Any]) -> tuple[Pooling, ...]:
    dims, kernel, stride = (fixed.get(f"pool_{n}") for n in ("dims", "kernel", "stride"))
    if isinstance(kernel, tuple) or isinstance(stride, tuple):
        if dims == 1:
            raise HVTError("a window of rows and columns needs pool_dims=2: fix one number, or 2")
        dims = 2
    choices: dict[Pooling, None] = {}
    for d in (1, 2) if dims is None else (dims,):
        for k, s in WINDOWS[d]:
            choices[d, k if kernel is None else kernel, s if stride is None else stride] = None
    return tuple(choices)
