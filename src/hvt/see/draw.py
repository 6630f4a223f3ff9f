"""The figures: what `maps`, `sources` and `cost` find, drawn as PNG files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..costs import Cost
from ..plot import new_figure, save
from .maps import FeatureMap, strongest
from .sources import TokenSources

DPI = 110
CELL = 2.1  # inches of one panel
_TEXT, _SOFT, _GREY = "#1f2328", "#59636e", "#8c959f"
_HEADING = {"fontsize": 11, "fontweight": "bold", "color": _TEXT, "parse_math": False}
_LABEL = {"fontsize": 8.5, "color": _SOFT, "parse_math": False}
_PARTS = {
    "attn": ("attention", "#0969da"),
    "mlp": ("MLP", "#9ec5f4"),
    "pool": ("pooling", "#d4843e"),
}


@dataclass(frozen=True)
class FeatureView:
    """One row of the figure: a model, the image as it sees it, `(H, W, 3)`, and its maps."""

    title: str
    image: Tensor
    maps: Sequence[FeatureMap]


def draw_features(
    path: str | Path, views: Sequence[FeatureView], channels: int = 9, dpi: int = DPI
) -> None:
    """A row for each model: the image, then at each place the channels that vary most.

    Each channel has its own colours, from dark (its minimum) to light (its maximum).
    """
    columns = 1 + max(len(view.maps) for view in views)
    heights = [_height(view.image) for view in views]
    figure = new_figure(figsize=(columns * CELL, sum(heights)))
    rows = figure.subfigures(len(views), 1, squeeze=False, height_ratios=heights)[:, 0]
    for view, row in zip(views, rows, strict=True):
        _title(row, view.title, columns)
        panels = row.subplots(1, columns, squeeze=False)[0]
        _show(panels[0], "image", view.image)
        for axes, level in zip(panels[1:], view.maps, strict=False):
            mosaic = _mosaic(level.values, channels)
            _show(axes, f"{_short(level.name, 20)} · {level.size}", mosaic)
        for axes in panels[1 + len(view.maps) :]:
            axes.set_axis_off()
    save(figure, path, dpi)


def draw_tokens(
    path: str | Path,
    title: str,
    image: Tensor,
    sources: Sequence[TokenSources],
    dpi: int = DPI,
) -> None:
    """The image `(H, W, 3)`, then after each step what is left of its patches.

    For max pooling, the colour is a patch's share divided by an even share. For averaged tokens,
    the patches of one token have their average colour and an outline.
    """
    averaged = sources[0].origins is None
    columns, (rows, cols) = 1 + len(sources), sources[0].shares.shape
    bar_width = 0 if averaged else 0.8
    figure = new_figure(figsize=(columns * CELL + bar_width, _height(image)))
    _title(figure, title, columns)
    panels = figure.subplots(1, columns, squeeze=False)[0]
    _show(panels[0], f"image, {rows} × {cols} patches", image)
    most = max(1.0, max(float(stage.shares.max()) for stage in sources) * rows * cols)
    over: dict[str, Any] = {"extent": (0, cols, rows, 0)}  # in patches, so that they lie on pixels
    for axes, stage in zip(panels[1:], sources, strict=True):
        tokens = {0: "class token only", 1: "1 token"}.get(stage.tokens, f"{stage.tokens} tokens")
        label = f"after block {stage.block}: {tokens}"
        if averaged:
            _show(axes, label, image, **over)
            owners = _owners(stage).view(rows, cols)
            _show(axes, label, _token_colours(image, stage, owners), alpha=0.75, **over)
            _outline(axes, owners)
        else:
            _show(axes, label, image.mean(dim=2), cmap="gray", vmin=0, vmax=1, **over)
            even = stage.shares * rows * cols
            over_image = {"cmap": "inferno", "vmin": 0, "vmax": most, "alpha": 0.7}
            shown = _show(axes, label, even, **over_image, **over)
    if not averaged:
        bar = figure.colorbar(shown, ax=panels.tolist(), pad=0.01)
        bar.ax.tick_params(labelsize=8, colors=_SOFT, length=2)
        bar.set_label("share of what is kept, 1 = even", **_LABEL)
    save(figure, path, dpi)


def draw_costs(path: str | Path, costs: Sequence[tuple[str, Cost]], dpi: int = DPI) -> None:
    """A column for each model: tokens above, MACs below, a bar for each block."""
    figure = new_figure(figsize=(max(4.5, 0.6 + 3 * len(costs)), 4.6))
    axes = figure.subplots(
        2, len(costs), sharex="col", sharey="row", squeeze=False, height_ratios=(1, 1.6)
    )
    shown: dict[str, Any] = {}
    for (name, cost), (tokens, macs) in zip(costs, axes.T, strict=True):
        counts = [count for count, _ in cost.blocks()]
        bars = tokens.bar(range(len(counts)), counts, width=0.78, color=_GREY)
        # The number once, over the first of the blocks with equally many.
        labels = [str(n) if counts.index(n) == i else "" for i, n in enumerate(counts)]
        tokens.bar_label(bars, labels, padding=1, fontsize=8, color=_TEXT)
        below = [0.0] * len(counts)
        millions = {layer.name: layer.macs / 1e6 for layer in cost.layers}
        for part, (label, colour) in _PARTS.items():
            heights = [millions.get(f"blocks.{i}.{part}", 0.0) for i in range(len(counts))]
            if any(heights):
                shown[label] = macs.bar(range(len(counts)), heights, 0.78, below, color=colour)
            below = [b + h for b, h in zip(below, heights, strict=True)]
        tokens.set_title(f"{_short(name, 32)}\n", **_HEADING)
        tokens.text(0.5, 1.07, _price(cost), transform=tokens.transAxes, ha="center", **_LABEL)
        macs.set_xlabel("block", **_LABEL)
        macs.xaxis.get_major_locator().set_params(integer=True)
    for panel in axes.flat:
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.spines["bottom"].set_color(_SOFT)
        panel.tick_params(labelsize=8, colors=_SOFT, length=0)
        panel.grid(axis="y", alpha=0.25)
        panel.set_axisbelow(True)
    axes[0, 0].set_ylim(0, 1.15 * max(count for _, cost in costs for count, _ in cost.blocks()))
    axes[0, 0].set_ylabel("tokens", **_LABEL)
    axes[1, 0].set_ylabel("MACs (M)", **_LABEL)
    figure.align_ylabels()
    place = {"loc": "outside lower center", "ncols": len(shown), "frameon": False}
    figure.legend(shown.values(), shown.keys(), fontsize=8.5, labelcolor=_SOFT, **place)
    save(figure, path, dpi)


# ── panels ──────────────────────────────────────────────────────────────────────────────────────


def _height(image: Tensor) -> float:
    """Inches of a row: an image as wide as its panel, at most twice as high, and two titles."""
    rows, cols = image.shape[:2]
    return CELL * min(rows / cols, 2) + 0.6


def _title(figure: Any, text: str, columns: int) -> None:
    letters = int(columns * CELL * 10)  # of bold text at 11 points
    figure.suptitle(_short(text, letters), x=0.01, ha="left", **_HEADING)


def _show(axes: Any, label: str, image: Tensor, **options: Any) -> Any:
    axes.set_axis_off()
    axes.set_title(label, pad=4, **_LABEL)
    return axes.imshow(image.numpy(), interpolation="nearest", **options)


def _outline(axes: Any, owners: Tensor) -> None:
    """White lines between patches of different tokens; `owners` is `(rows, cols)`."""
    style = {"colors": "white", "linewidth": 0.8}
    y, x = (owners[:, 1:] != owners[:, :-1]).nonzero().T.numpy()
    axes.vlines(x + 1, y, y + 1, **style)
    y, x = (owners[1:] != owners[:-1]).nonzero().T.numpy()
    axes.hlines(y + 1, x, x + 1, **style)


# ── colours, words and numbers ──────────────────────────────────────────────────────────────────


def _mosaic(values: Tensor, channels: int) -> Tensor:
    """The channels of `(D, H, W)` that vary most, in colour on a white grid: `(H', W', 3)`."""
    from matplotlib import colormaps
    from torchvision.utils import make_grid

    chosen = _stretched(strongest(values, channels))
    scale = math.ceil(64 / max(chosen.shape[1:]))  # so that a grid line is thinner than a patch
    large = chosen.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    colours = torch.from_numpy(colormaps["viridis"](large.numpy())[..., :3])
    across = math.ceil(math.sqrt(len(chosen)))
    return make_grid(colours.permute(0, 3, 1, 2), across, pad_value=1).permute(1, 2, 0)


def _stretched(values: Tensor) -> Tensor:
    """Each channel from 0 to 1, the outermost hundredths cut off; one without contrast is 0."""
    flat = values.flatten(1).float()
    low, high = (flat.quantile(q, dim=1)[:, None, None] for q in (0.01, 0.99))
    span = (high - low).clamp_min(torch.finfo(torch.float32).tiny)
    return ((values.float() - low) / span).clamp(0, 1)


def _token_colours(image: Tensor, stage: TokenSources, owners: Tensor) -> Tensor:
    """Each patch in the average colour of its token's patches: `(rows, cols, 3)`."""
    small = F.interpolate(image.permute(2, 0, 1)[None].float(), tuple(owners.shape), mode="area")
    colours = stage.weights @ small[0].flatten(1).T  # (tokens, 3)
    return torch.where(owners[..., None] < 0, torch.zeros(3), colours[owners])


def _owners(stage: TokenSources) -> Tensor:
    """For each patch the token that has most of it, or -1 where none has any: `(patches,)`."""
    parts, owners = stage.weights.max(dim=0)  # of equals the first
    return owners.masked_fill(parts == 0, -1)


def _price(cost: Cost) -> str:
    macs = f"{cost.gflops:.2f} G" if cost.gflops >= 0.1 else f"{1e3 * cost.gflops:.1f} M"
    return f"{macs} MACs, {cost.params_m:.2f} M parameters"


def _short(name: str, most: int) -> str:
    """A long name without its middle."""
    if len(name) <= most:
        return name
    half = (most - 1) // 2
    return f"{name[:half]}…{name[-half:]}"
