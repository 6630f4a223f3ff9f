"""The paper's Figures 1 and 4, with its points and ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import HVTError
from ..files import atomic_write
from ..plot import new_figure
from ..training.watch import draw_curves
from .claims import BUDGETS
from .filled import NAMES, READINGS, Filled, Known, fill, is_short
from .long_report import GAPS, gaps
from .long_results import LENGTHS, LongResults
from .protocol import Protocol
from .report import curves
from .tables import tables

# The first that a row's name has in it.
_COLOURS = {"HVT": "C3", "PoWER": "C2", "DeiT": "C0"}


def draw(
    folder: Path,
    protocol: Protocol,
    known: Known,
    data: str | None = None,
    long: LongResults | None = None,
) -> list[Path]:
    """Write `figure1.png`, `figure4.png` where both its rows have been run, and `gap.png`."""
    figure = new_figure(figsize=(10, 4.2), layout="constrained")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HVTError(f"cannot write {folder}: {error.strerror}") from error
    written = [folder / "figure1.png"]
    _figure1(figure, written[0], fill(protocol, tables()["main"], known, data))
    runs: dict[str, Any] = curves(protocol, known, data)
    if runs:
        written.append(folder / "figure4.png")
        draw_curves(written[1], runs)
    if long is not None:
        written.append(folder / "gap.png")
        _gap(written[-1], long)
    return written


def _figure1(figure: Any, path: Path, main: Filled) -> None:
    """Cost against top-1: the paper's on the left, ours on the right in both readings."""
    left, right = figure.subplots(1, 2)
    left.set_title("the paper: ImageNet, 224 pixels", fontsize=10)
    left.set_xlabel("GFLOPs (multiply-adds)")
    for row in main.table.rows:
        _point(left, row.gflops, row.top1["imagenet"], row.name, "o")
    right.set_title(f"here: {NAMES[main.data]}", fontsize=10)
    right.set_xlabel("M multiply-adds")
    for budget, marker in zip(BUDGETS, ("o", "^"), strict=True):
        for line in main.lines:
            figures = [one.top1 for one in line.results[budget]]
            if figures:
                mean = sum(figures) / len(figures)
                reach = [[mean - min(figures)], [max(figures) - mean]]
                colour = _colour(line.row.name)
                right.errorbar(line.macs / 1e6, mean, reach, color=colour, capsize=2, linewidth=0.8)
                short = is_short(line.plans[budget])
                _point(right, line.macs / 1e6, mean, line.row.name, marker, hollow=short)
        right.plot([], [], marker, color="grey", label=READINGS[budget])
    if any(line.results[budget] for line in main.lines for budget in BUDGETS):
        right.legend(fontsize=8, loc="upper right")
    else:
        right.text(0.5, 0.5, "not run", transform=right.transAxes, ha="center")
    for axes in (left, right):
        axes.set_ylabel("top-1, %")
        axes.grid(alpha=0.25)
        axes.margins(x=0.2, y=0.12)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110, metadata={"Software": None})


def _gap(path: Path, long: LongResults) -> None:
    """Points above DeiT-Ti against epochs; bars are standard errors."""
    figure = new_figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    lengths = list(LENGTHS.values())
    for index, name in enumerate(GAPS):
        measured = gaps(long, name)
        points = [gap.points for gap in measured.values()]
        errors = [gap.error or 0.0 for gap in measured.values()]
        axes.errorbar(
            list(measured), points, errors, marker="o", capsize=3, color=f"C{index}", label=name
        )
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    axes.set_xticks(lengths, [str(epochs) for epochs in lengths])
    axes.minorticks_off()
    axes.set_xlabel("epochs")
    axes.set_ylabel("top-1 above DeiT-Ti, points")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110, metadata={"Software": None})


def _colour(name: str) -> str:
    return next(colour for part, colour in _COLOURS.items() if part in name)


def _point(axes: Any, x: float, y: float, name: str, marker: str, *, hollow: bool = False) -> None:
    fill = "none" if hollow else "full"
    axes.plot([x], [y], marker, color=_colour(name), markersize=6, fillstyle=fill)
    # PoWER's points lie beside those of HVT-1: its names go below.
    shift = (5, -10) if "PoWER" in name else (5, 4)
    axes.annotate(name, (x, y), xytext=shift, textcoords="offset points", fontsize=7)
