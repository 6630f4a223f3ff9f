"""What else a budget buys: the paper's own ways to scale a model up, and a DeiT."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..config import HVTConfig
from ..errors import HVTError
from ..zoo import get_config
from .space import PATCHES, Space

Fits = Callable[[HVTConfig], bool]

FAMILY = ("hvt_b_4", "hvt_s_4", "hvt_ti_4")
"""The paper scales up models of four stages; the largest that the budget holds is the start."""
MOST = {"num_heads": 64, "depth": 512, "img_size": 2048}


def paper_ways(space: Space, fits: Fits) -> dict[str, HVTConfig]:
    """Each of the paper's four: more heads, more blocks, smaller patches, larger images.

    One field of the model grows until the budget is spent; with patches half as large the images
    are as large as the budget allows. Fields that are fixed do not grow.
    """
    if {"stages", "pool_after", "class_token"} & set(space.fixed):
        return {}
    base = next(filter(None, (_within(name, space, fits) for name in FAMILY)), None)
    if base is None:
        return {}
    ways: dict[str, HVTConfig] = {}
    fixed = space.fixed
    if not {"num_heads", "embed_dim"} & set(fixed):
        heads = (_try(base, num_heads=n) for n in range(base.num_heads + 1, MOST["num_heads"] + 1))
        if wider := _last(heads, fits):
            ways[f"{wider.num_heads} heads"] = wider
    if "depth" not in fixed:
        step = base.stages or 1
        depths = range(base.depth + step, MOST["depth"] + 1, step)
        if deeper := _last((_try(base, depth=n) for n in depths), fits):
            ways[f"{deeper.depth} blocks"] = deeper
    half = base.patch_size // 2
    if "patch_size" not in fixed and base.patch_size % 2 == 0:
        sizes = [base.image[0]] if "img_size" in fixed else range(half, MOST["img_size"] + 1, half)
        finer = (_try(base, patch_size=half, img_size=_scaled(base, n)) for n in sizes)
        if (fine := _last(finer, fits)) and fine.tokens[0] > base.tokens[0]:
            ways[f"patch {half}, {_pixels(fine)} px"] = fine
    if "img_size" not in fixed:
        patch = base.patch_size
        sizes = range(base.image[0] + patch, MOST["img_size"] + 1, patch)
        if larger := _last((_try(base, img_size=n) for n in sizes), fits):
            ways[f"{_pixels(larger)} px"] = larger
    return ways


def deit(space: Space, fits: Fits) -> HVTConfig | None:
    """The DeiT of the budget: 12 blocks at 224 pixels unless fixed, as wide as it may be.

    Where not even one head is within, it has fewer blocks.
    """
    fixed = {k: v for k, v in space.fixed.items() if not k.startswith("pool") and k != "stages"}
    image = {"img_size": fixed.get("img_size", 224)}
    image["patch_size"] = fixed.get("patch_size", _patch(image["img_size"]))
    kept = {"class_token": True} | fixed | image
    for depth in (fixed["depth"],) if "depth" in fixed else (12, 8, 6, 4, 2):
        widths = sorted(_widths(space), key=lambda pair: pair[0] * pair[1])
        values = {k: v for k, v in kept.items() if k != "embed_dim"} | {"depth": depth}
        options = (
            _try(HVTConfig(), **values | {"num_heads": heads, "head_dim": dim})
            for heads, dim in widths
        )
        if best := _last(options, fits):
            return best
    return None


def _widths(space: Space) -> list[tuple[int, int]]:
    """Heads and their width: all numbers of heads where the width is free."""
    if {"num_heads", "embed_dim"} & set(space.fixed):
        return list(space.widths)
    dim = space.fixed.get("head_dim", 64)
    return [(heads, dim) for heads in range(1, MOST["num_heads"] + 1)]


def _within(name: str, space: Space, fits: Fits) -> HVTConfig | None:
    """A named model with the fixed fields, if it is within the budget."""
    fixed = dict(space.fixed)
    if "img_size" in fixed and "patch_size" not in fixed:
        fixed["patch_size"] = _patch(fixed["img_size"])
    if width := fixed.pop("embed_dim", None):
        fixed |= {"num_heads": space.widths[0][0], "head_dim": width // space.widths[0][0]}
    config = _try(get_config(name), **fixed)
    return config if config is not None and fits(config) else None


def _patch(size: Any) -> int:
    """The paper's 16 pixels, or less where an image would have fewer than 8 rows of them."""
    rows, cols = HVTConfig(img_size=size, patch_size=1).image
    fitting = [p for p in PATCHES if p <= 16 and rows % p == cols % p == 0 and rows // p >= 8]
    return max(fitting, default=1)


def _try(base: HVTConfig, **values: Any) -> HVTConfig | None:
    """A config, or None where it has too few tokens for its poolings, or such."""
    try:
        return base.replace(**values)
    except HVTError:
        return None


def _last(configs: Iterable[HVTConfig | None], fits: Fits) -> HVTConfig | None:
    """The last that fits of configs that grow; the first that no longer fits ends it."""
    best = None
    for config in configs:
        if config is None:
            continue
        if not fits(config):
            break
        best = config
    return best


def _scaled(base: HVTConfig, rows: int) -> tuple[int, int]:
    """An image of so many rows of pixels in the proportion of the base's."""
    height, width = base.image
    return rows, rows * width // height


def _pixels(config: HVTConfig) -> str:
    height, width = config.image
    return str(height) if height == width else f"{height}×{width}"
