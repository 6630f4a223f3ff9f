"""The figure of `hvt bench`: images/s against MACs per image, a marker for each model and mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plot import new_figure, save

if TYPE_CHECKING:
    from .run import BenchRow

MARKERS = {"eager": "o", "compiled": "^", "onnx": "s", "int8": "D"}
COLOURS = {"hvt": "#0969da", "timm": "#9a6700"}
LINE = "#8c959f"


def draw(rows: Sequence[BenchRow], machine: dict[str, Any], path: str | Path) -> None:
    """Both axes logarithmic, a panel for each batch size, the modes of a model on one line.

    The dashed line is the speed of the first model at other costs, if speed followed the MACs only.
    """
    batches = sorted({row.batch for row in rows})
    figure = new_figure(figsize=(1 + 5 * len(batches), 4.6))
    panels = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    for axes, batch in zip(panels, batches, strict=True):
        _panel(axes, [row for row in rows if row.batch == batch])
        axes.set_title(f"batch {batch}", fontsize=10)
    panels[0].set_ylabel("images/s")
    where = machine["cpu"] if machine["device"] == "cpu" else machine["device"]
    figure.suptitle(
        f"{where}, {machine['threads']} threads, torch {machine['torch']}, {machine['date']}",
        fontsize=9,
    )
    save(figure, path, dpi=120)


def _panel(axes: Any, rows: Sequence[BenchRow]) -> None:
    axes.set(xscale="log", yscale="log", xlabel="MACs per image (G)")
    first, costs = rows[0], [row.gflops for row in rows]
    ends = [min(costs), max(costs)]
    even = [first.images_per_s * first.gflops / x for x in ends]
    axes.plot(ends, even, "--", color=LINE, lw=1, label=f"as {_short(first)} by MACs")
    for library, mode in dict.fromkeys((row.library, row.mode) for row in rows):
        alike = [row for row in rows if (row.library, row.mode) == (library, mode)]
        points = [(row.gflops, row.images_per_s) for row in alike]
        style = {"color": COLOURS[library], "label": f"{library}, {mode}"}
        axes.plot(*zip(*points, strict=True), MARKERS[mode], **style)
    for model in dict.fromkeys(row.model for row in rows):
        modes = sorted((row for row in rows if row.model == model), key=lambda r: r.images_per_s)
        points = [(row.gflops, row.images_per_s) for row in modes]
        axes.plot(*zip(*points, strict=True), "-", color=LINE, lw=0.7, zorder=1)
        offset = (5, 4) if modes[0].library == "hvt" else (5, -10)  # seldom over each other
        axes.annotate(
            _short(modes[-1]), points[-1], offset, textcoords="offset points", fontsize=8,
            parse_math=False,
        )  # fmt: skip
    axes.margins(0.2)
    axes.grid(alpha=0.3, which="both")
    for axis in (axes.xaxis, axes.yaxis):  # plain numbers, not powers of ten
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    axes.tick_params(which="both", labelsize=7)
    for text in axes.legend(fontsize=7).get_texts():
        text.set_parse_math(False)  # a file's name may have a $


def _short(row: BenchRow) -> str:
    return Path(row.model).stem
