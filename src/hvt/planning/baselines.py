"""What else a budget buys: the paper's own ways to scale up its model, and a DeiT."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..config import HVTConfig
from ..errors import HVTError
from ..zoo import get_config
from .space import PATCHES, Space

Fits = Callable[[HVTConfig], bool]

FAMILY = ("hvt_b_4", "hvt_s_4", "hvt_ti_4")
"""The paper scales up models of four stages; the largest within the budget is the start."""
MAX_HEADS, MAX_DEPTH, MAX_IMAGE = 64, 512, 2048


def scaled_up(space: Space, fits: Fits) -> dict[str, HVTConfig]:
    """The paper's four ways: more heads, more blocks, smaller patches, larger images.

    One field grows until the budget is spent; with patches half as large the images are as large
    as the budget allows. Fixed fields do not grow.
    """
    fixed = set(space.fixed) | ({"num_heads"} if "embed_dim" in space.fixed else set())
    base = next(filter(None, (_within(name, space, fits) for name in FAMILY)), None)
    if base is None or {"stages", "pool_after", "class_token"} & fixed:
        return {}
    stages, patch, half = base.stages or 1, base.patch_size, max(1, base.patch_size // 2)
    depths = range(base.depth + stages, MAX_DEPTH + 1, stages)
    sizes = range(base.image[0] + patch, MAX_IMAGE + 1, patch)
    ways: dict[str, list[dict[str, Any]]] = {
        "{0.num_heads} heads": [{"num_heads": n} for n in range(base.num_heads + 1, MAX_HEADS + 1)],
        "{0.depth} blocks": [{"depth": depth} for depth in depths],
        "patch {0.patch_size}, {0.img_size} px": [
            {"patch_size": half, "img_size": size} for size in range(half, MAX_IMAGE + 1, half)
        ],
        "{0.img_size} px": [{"img_size": size} for size in sizes],
    }
    scaled: dict[str, HVTConfig] = {}
    for label, growing in ways.items():
        free = [overrides for overrides in growing if not fixed & overrides.keys()]
        config = _largest(base, free, fits)
        if config and (config.patch_size == patch or config.tokens[0] > base.tokens[0]):
            scaled[label.format(config)] = config
    return scaled


def deit(space: Space, fits: Fits) -> HVTConfig | None:
    """The widest DeiT within the budget: 12 blocks at 224 pixels unless fixed.

    Where a single head is too much, it has fewer blocks.
    """
    fixed = {k: v for k, v in space.fixed.items() if not k.startswith("pool") and k != "stages"}
    fixed.pop("embed_dim", None)
    size = fixed.get("img_size", 224)
    kept = {"class_token": True, "img_size": size, "patch_size": _patch(size)} | fixed
    widths = list(space.widths)
    if not {"num_heads", "embed_dim"} & set(space.fixed):
        widths = [(heads, fixed.get("head_dim", 64)) for heads in range(1, MAX_HEADS + 1)]
    for depth in (fixed["depth"],) if "depth" in fixed else (12, 8, 6, 4, 2):
        options = (
            kept | {"depth": depth, "num_heads": heads, "head_dim": dim}
            for heads, dim in sorted(widths, key=lambda pair: pair[0] * pair[1])
        )
        if widest := _largest(HVTConfig(), options, fits):
            return widest
    return None


def _within(name: str, space: Space, fits: Fits) -> HVTConfig | None:
    """A named model with the fixed fields, if it is within the budget."""
    fixed = dict(space.fixed)
    if "img_size" in fixed and "patch_size" not in fixed:
        fixed["patch_size"] = _patch(fixed["img_size"])
    if width := fixed.pop("embed_dim", None):
        fixed |= {"num_heads": space.widths[0][0], "head_dim": width // space.widths[0][0]}
    return _largest(get_config(name), [fixed], fits)


def _patch(size: Any) -> int:
    """The paper's 16 pixels, or less where an image would have fewer than 8 rows of them."""
    rows, cols = HVTConfig(img_size=size, patch_size=1).image
    fitting = [p for p in PATCHES if p <= 16 and rows % p == cols % p == 0 and rows // p >= 8]
    return max(fitting, default=1)


def _largest(base: HVTConfig, growing: Iterable[dict[str, Any]], fits: Fits) -> HVTConfig | None:
    """The last config within the budget, of overrides that grow; impossible ones are skipped."""
    largest = None
    for overrides in growing:
        try:
            config = base.replace(**overrides)
        except HVTError:  # such as too few tokens for its poolings
            continue
        if not fits(config):
            break
        largest = config
    return largest
