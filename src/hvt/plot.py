"""matplotlib, which is an extra: its figures, or the sentence that says what to install."""

from __future__ import annotations

from typing import Any

from .errors import HVTError


def new_figure(**kwargs: Any) -> Any:
    """A matplotlib `Figure`, which needs no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HVTError("drawing needs matplotlib: pip install 'hvt[plot]'") from error
    return Figure(**kwargs)
