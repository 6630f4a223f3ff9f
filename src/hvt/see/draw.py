"""The figures: what `maps`, `sources` and `cost` find, drawn as PNG files.

Lengths are points, 72 to the inch. Images are resized here and drawn pixel by pixel, so that a
patch stays a square with sharp edges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import plot
from ..costs import Cost
from ..files import atomic_write
from .maps import FeatureMap, strongest
from .sources import TokenSources

DPI = 110
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

    Each channel has its own colours, from dark (its least) to light (its most).
    """
    cell, gap, heading = (_pixels(points, dpi) for points in (138, 12, 40))
    rows = [
        [_resized(v.image, cell), *(_mosaic(m.values, channels, cell) for m in v.maps)]
        for v in views
    ]
    heights = [max(image.shape[0] for image in row) for row in rows]
    columns = max(len(row) for row in rows)
    width = gap + columns * (cell + gap)
    figure = new_figure(width, sum(heights) + len(rows) * (heading + gap), dpi)
    top = 0
    for view, row, height in zip(views, rows, heights, strict=True):
        _write(figure, gap, top + round(0.45 * heading), view.title)
        labels = ["image", *(f"{_short(m.name, 20)} · {m.size}" for m in view.maps)]
        for column, (image, label) in enumerate(zip(row, labels, strict=True)):
            _place(figure, gap + column * (cell + gap), top + heading, image, label)
        top += heading + height + gap
    _save(figure, path)


def draw_tokens(
    path: str | Path,
    title: str,
    image: Tensor,
    sources: Sequence[TokenSources],
    dpi: int = DPI,
) -> None:
    """The image `(H, W, 3)`, then after each step what is left of its patches.

    Where values are taken, the colour is a patch's share over an even share: at 1 it gave as much
    as if all gave equally. Where tokens are averaged, the patches of one token have their average
    colour and a line around them.
    """
    mixed = sources[0].origins is None
    cell, gap, heading = (_pixels(points, dpi) for points in (160, 12, 44))
    scale = 0 if mixed else _pixels(64, dpi)
    seen = _resized(image, cell)
    height, patches = seen.shape[0], sources[0].shares.numel()
    columns = 1 + len(sources)
    figure = new_figure(gap + columns * (cell + gap) + scale, height + heading + gap, dpi)
    _write(figure, gap, round(0.45 * heading), title)
    rows, cols = sources[0].shares.shape
    _place(figure, gap, heading, seen, f"image, {rows} × {cols} patches")
    most = max(1.0, max(float(stage.shares.max()) for stage in sources) * patches)
    for column, stage in enumerate(sources, 1):
        shown = _grouped(seen, stage) if mixed else _shaded(seen, stage, most)
        tokens = {0: "class token alone", 1: "1 token"}.get(stage.tokens, f"{stage.tokens} tokens")
        label = f"after block {stage.block}: {tokens}"
        _place(figure, gap + column * (cell + gap), heading, shown, label)
    if not mixed:
        _scale(figure, gap + columns * (cell + gap), heading, height, most)
    _save(figure, path)


def draw_costs(path: str | Path, costs: Sequence[tuple[str, Cost]], dpi: int = DPI) -> None:
    """A column for each model: tokens above, multiply-adds below, a bar for each block."""
    width = _pixels(max(320, 45 + 220 * len(costs)), dpi)
    figure = new_figure(width, _pixels(330, dpi), dpi, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08)  # inches
    axes = figure.subplots(
        2, len(costs), sharex="col", sharey="row", squeeze=False, height_ratios=(1, 1.6)
    )
    shown: dict[str, Any] = {}
    for (name, cost), (tokens, macs) in zip(costs, axes.T, strict=True):
        counts = [count for count, _ in cost.blocks()]
        tokens.bar(range(len(counts)), counts, width=0.78, color=_GREY)
        _label_runs(tokens, counts)
        below = [0.0] * len(counts)
        for part, (label, colour) in _PARTS.items():
            heights = _part(cost, part)
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
    axes[1, 0].set_ylabel("multiply-adds (M)", **_LABEL)
    figure.align_ylabels()
    place = {"loc": "outside lower center", "ncols": len(shown), "frameon": False}
    figure.legend(shown.values(), shown.keys(), fontsize=8.5, labelcolor=_SOFT, **place)
    _save(figure, path)


def new_figure(width: int, height: int, dpi: int = DPI, **kwargs: Any) -> Any:
    """An empty figure of so many pixels, which needs no display."""
    # Half a pixel more, because matplotlib rounds down.
    size = ((width + 0.5) / dpi, (height + 0.5) / dpi)
    return plot.new_figure(figsize=size, dpi=dpi, facecolor="white", **kwargs)


def _save(figure: Any, path: str | Path) -> None:
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=figure.dpi, pil_kwargs={"optimize": True})


# ── images, all (H, W, 3) from 0 to 1 ─────────────────────────────────────────────────────────


def _pixels(points: float, dpi: int) -> int:
    return round(points * dpi / 72)


def _resized(image: Tensor, side: int) -> Tensor:
    """An image as wide as a cell, or narrower where it is much higher than wide."""
    rows, cols = image.shape[:2]
    scale = min(side / cols, 2 * side / rows)
    size = (max(1, round(rows * scale)), max(1, round(cols * scale)))
    if scale > 2:  # small images show their pixels
        return _enlarged(image, *size)
    planes = image.permute(2, 0, 1)[None].float()
    smooth = F.interpolate(planes, size, mode="bicubic", antialias=True)
    return smooth[0].clamp(0, 1).permute(1, 2, 0)


def _enlarged(image: Tensor, rows: int, cols: int) -> Tensor:
    """`(H, W, C)` → `(rows, cols, C)` with sharp edges, or the average where it must shrink."""
    planes = image.permute(2, 0, 1)[None].float()
    mode = "area" if image.shape[0] > rows else "nearest-exact"
    return F.interpolate(planes, (rows, cols), mode=mode)[0].permute(1, 2, 0)


def _shaded(image: Tensor, stage: TokenSources, most: float) -> Tensor:
    """The image in grey under the share of each patch, in colours up to `most` even shares."""
    even = stage.shares[..., None] * stage.shares.numel()
    colours = _coloured(_enlarged(even, *image.shape[:2])[..., 0] / most, "inferno")
    return 0.3 * image.mean(dim=2, keepdim=True) + 0.7 * colours


def _grouped(image: Tensor, stage: TokenSources) -> Tensor:
    """The patches of each token in their average colour, with lines between tokens."""
    rows, cols = stage.shares.shape
    small = F.interpolate(image.permute(2, 0, 1)[None], (rows, cols), mode="area")
    colours = stage.weights.float() @ small[0].flatten(1).T  # (tokens, 3)
    owners = _owners(stage)
    filled = torch.where(owners[:, None] < 0, torch.zeros(3), colours[owners])
    size = image.shape[:2]
    mixed = 0.25 * image + 0.75 * _enlarged(filled.view(rows, cols, 3), *size)
    numbers = owners.double().view(1, 1, rows, cols)
    group = F.interpolate(numbers, size, mode="nearest-exact")[0, 0]
    line = torch.zeros(size, dtype=torch.bool)
    line[1:] |= group[1:] != group[:-1]
    line[:, 1:] |= group[:, 1:] != group[:, :-1]
    return torch.where(line[..., None], torch.ones(3), mixed)


def _owners(stage: TokenSources) -> Tensor:
    """For each patch the token that has most of it, or -1 where none has any: `(patches,)`."""
    tokens, patches = stage.weights.indices().flip(1).numpy()
    order = stage.weights.values().flip(0).numpy().argsort(kind="stable")
    owners = torch.full((stage.weights.shape[1],), -1)
    # Of several values for one place numpy keeps the last: the largest part, of equals the first.
    owners.numpy()[patches[order]] = tokens[order]
    return owners


def _mosaic(values: Tensor, channels: int, side: int) -> Tensor:
    """The channels of `(D, H, W)` that vary most side by side, white between them."""
    chosen = _stretched(strongest(values, channels))
    across = math.ceil(math.sqrt(len(chosen)))
    down = math.ceil(len(chosen) / across)
    gap = max(1, side // 70)
    rows, cols = chosen.shape[1:]
    wide = max(1, (side - gap * (across - 1)) // across)
    high = min(max(1, round(wide * rows / cols)), 2 * wide)
    mosaic = torch.ones(down * (high + gap) - gap, across * (wide + gap) - gap, 3)
    for index, channel in enumerate(chosen):
        top, left = index // across * (high + gap), index % across * (wide + gap)
        tile = _coloured(_enlarged(channel[..., None], high, wide)[..., 0], "viridis")
        mosaic[top : top + high, left : left + wide] = tile
    return mosaic


def _stretched(values: Tensor) -> Tensor:
    """Each channel from 0 to 1, the outermost hundredths cut off; one without contrast is 0."""
    flat = values.flatten(1).float()
    low, high = (flat.quantile(q, dim=1)[:, None, None] for q in (0.01, 0.99))
    span = (high - low).clamp_min(torch.finfo(torch.float32).tiny)
    return ((values.float() - low) / span).clamp(0, 1)


def _coloured(values: Tensor, colours: str) -> Tensor:
    """`(H, W)` from 0 to 1 → `(H, W, 3)` by one of matplotlib's colour maps."""
    from matplotlib import colormaps

    return torch.from_numpy(colormaps[colours](values.numpy())[..., :3]).float()


# ── on the figure, in pixels from its upper left ────────────────────────────────────────────────


def _axes(figure: Any, left: int, top: int, width: int, height: int) -> Any:
    across, down = int(figure.bbox.width), int(figure.bbox.height)
    bottom = down - top - height
    return figure.add_axes((left / across, bottom / down, width / across, height / down))


def _place(figure: Any, left: int, top: int, image: Tensor, label: str) -> None:
    axes = _axes(figure, left, top, image.shape[1], image.shape[0])
    # 64 steps of each colour look the same, and make the file a third smaller.
    steps = (image * 63).round() / 63
    axes.imshow(steps.numpy(), interpolation="nearest", aspect="auto")
    axes.set_axis_off()
    axes.set_title(label, pad=4, **_LABEL)


def _write(figure: Any, left: int, base: int, text: str) -> None:
    width, height = figure.bbox.width, figure.bbox.height
    letters = int((width - left) * 72 / figure.dpi / 7)  # bold at 11 points, about 7 wide
    figure.text(left / width, 1 - base / height, _short(text, letters), **_HEADING)


def _scale(figure: Any, left: int, top: int, height: int, most: float) -> None:
    """The bar that says which colour is how many times an even share."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    axes = _axes(figure, left, top, _pixels(8, figure.dpi), height)
    figure.colorbar(ScalarMappable(Normalize(0, most), "inferno"), cax=axes)
    axes.tick_params(labelsize=8, colors=_SOFT, length=2)
    axes.set_ylabel("share of what is kept, 1 = even", labelpad=3, **_LABEL)


def _label_runs(axes: Any, tokens: Sequence[int]) -> None:
    """The number of tokens once over each run of blocks that see equally many."""
    for count, run in groupby(enumerate(tokens), key=lambda item: item[1]):
        places = [place for place, _ in run]
        where = {"xy": ((places[0] + places[-1]) / 2, count), "xytext": (0, 2)}
        style = {"textcoords": "offset points", "ha": "center", "fontsize": 8, "color": _TEXT}
        axes.annotate(str(count), **where, **style)


# ── words and numbers ───────────────────────────────────────────────────────────────────────────


def _part(cost: Cost, part: str) -> list[float]:
    """Millions of multiply-adds that one part of each block takes."""
    macs = {layer.name: layer.macs / 1e6 for layer in cost.layers}
    return [macs.get(f"blocks.{i}.{part}", 0.0) for i in range(len(cost.blocks()))]


def _price(cost: Cost) -> str:
    macs = f"{cost.gflops:.2f} G" if cost.gflops >= 0.1 else f"{1e3 * cost.gflops:.1f} M"
    return f"{macs} multiply-adds, {cost.params_m:.2f} M parameters"


def _short(name: str, most: int) -> str:
    """A long name without its middle."""
    if len(name) <= most:
        return name
    half = (most - 1) // 2
    return f"{name[:half]}…{name[-half:]}"
