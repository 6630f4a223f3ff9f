"""The image of `hvt bench`: images/s against multiply-adds, a mark for each model and mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import HVTError
from ..files import atomic_write, check_writable
from ..plot import new_figure

if TYPE_CHECKING:
    from .run import Row

MARKS = {"eager": "o", "compiled": "^", "onnx": "s", "int8": "D"}
COLOURS = {"hvt": "#0969da", "timm": "#9a6700"}
LINE = "#8c959f"


def check_image(path: str | Path) -> None:
    """Refuse what could not be drawn, before anything is measured."""
    if Path(path).suffix.lower() not in (".png", ".svg"):
        raise HVTError(f"the image {path} should end in .png or .svg")
    check_writable(path)
    new_figure()


def draw(rows: Sequence[Row], machine: dict[str, Any], path: str | Path) -> None:
    """Both axes logarithmic, a panel for each batch size, the modes of a model on one line.

    The dashed line is the speed of the first model at other costs, if speed were the multiply-adds'
    alone: what lies on it has turned every multiply-add that it saves into time.
    """
    batches = sorted({row.batch for row in rows})
    figure = new_figure(figsize=(1 + 5 * len(batches), 4.6), layout="constrained")
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
    save(figure, path)


def _panel(axes: Any, rows: Sequence[Row]) -> None:
    axes.set(xscale="log", yscale="log", xlabel="multiply-adds of an image (G)")
    first = rows[0]
    ends = [min(row.gflops for row in rows), max(row.gflops for row in rows)]
    even = [first.images_per_s * first.gflops / x for x in ends]
    axes.plot(ends, even, "--", color=LINE, lw=1, label=f"as {_short(first)} by multiply-adds")
    for mode, mark in MARKS.items():
        for library, colour in COLOURS.items():
            points = [row for row in rows if (row.mode, row.library) == (mode, library)]
            if points:
                axes.plot(
                    [row.gflops for row in points],
                    [row.images_per_s for row in points],
                    mark,
                    color=colour,
                    label=f"{library}, {mode}",
                )
    for model in dict.fromkeys(row.model for row in rows):
        modes = sorted((row for row in rows if row.model == model), key=lambda r: r.images_per_s)
        axes.plot(
            [r.gflops for r in modes], [r.images_per_s for r in modes], "-", color=LINE, lw=0.7,
            zorder=1,
        )  # fmt: skip
        axes.annotate(
            _short(modes[-1]),
            (modes[-1].gflops, modes[-1].images_per_s),
            xytext=(5, 4) if modes[0].library == "hvt" else (5, -10),  # seldom over each other
            textcoords="offset points",
            fontsize=8,
            parse_math=False,
        )
    axes.margins(0.2)
    axes.grid(alpha=0.3, which="both")
    plain_ticks(axes)
    for text in axes.legend(fontsize=7).get_texts():
        text.set_parse_math(False)  # a file's name may have a $


def plain_ticks(axes: Any) -> None:
    """Numbers as people write them, where a logarithmic axis would have powers of ten."""
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    axes.tick_params(which="both", labelsize=7)


def _short(row: Row) -> str:
    return Path(row.model).stem


def save(figure: Any, path: str | Path) -> None:
    """Whole or not at all, as PNG or SVG by the name's ending."""
    form = Path(path).suffix.lower().removeprefix(".")
    undated = {"Date": None} if form == "svg" else None  # or the same figures would differ
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format=form, dpi=120, metadata=undated)
