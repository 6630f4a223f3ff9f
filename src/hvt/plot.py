"""matplotlib, an optional dependency: its figures, or an error that names what to install."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import HVTError
from .files import check_writable


def new_figure(**kwargs: Any) -> Any:
    """A matplotlib `Figure`, which needs no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HVTError("drawing needs matplotlib: pip install 'hvt[plot]'") from error
    return Figure(**kwargs)


def png_path(path: str | Path) -> Path:
    """A PNG file to draw into, checked before the work."""
    new_figure()  # raises an error where matplotlib is missing
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise HVTError(f"{path} cannot be written: only PNG is, so name it {path.stem}.png")
    check_writable(path)
    return path
