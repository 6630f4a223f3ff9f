"""matplotlib, an optional dependency: its figures, or an error that names what to install."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import HVTError
from .files import atomic_write, check_writable


def new_figure(figsize: tuple[float, float] | None = None) -> Any:
    """A matplotlib `Figure` of some inches, which needs no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HVTError("drawing needs matplotlib: pip install 'hvt[plot]'") from error
    return Figure(figsize, layout="constrained")


def figure_path(path: str | Path) -> Path:
    """A PNG or SVG file to draw into, checked before the work."""
    new_figure()  # raises an error where matplotlib is missing
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg"):
        raise HVTError(f"the figure {path} should end in .png or .svg")
    check_writable(path)
    return path


def save(figure: Any, path: str | Path, dpi: int = 110) -> None:
    """Write a figure atomically, as PNG or SVG by the path's suffix."""
    form = Path(path).suffix.lower().removeprefix(".")
    undated = {"Date": None} if form == "svg" else None  # or the same figures would differ
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format=form, dpi=dpi, metadata=undated)
