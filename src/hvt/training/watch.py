"""Watching a training: progress on the terminal, metrics.csv, TensorBoard, curves.png."""

from __future__ import annotations

import csv
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..files import atomic_write
from ..plot import new_figure, save
from ..terminal import print_line

Row = dict[str, Any]
"""Figures of an epoch: val_… of the last weights and ema_… of the averaged, if it was evaluated."""

PERCENT = {"top1": "top-1", "agreement": "agreement", "cosine": "cosine similarity"}
"""Measures in per cent, and how they are printed."""
LABELS = PERCENT | {"kl": "KL"}


def figure(measure: str, value: float | None) -> str:
    """A measure's name and value, as in `top-1 85.20 %` or `KL 0.0123`."""
    if value is None:
        text = "not finite"
    else:
        text = f"{value:.2f} %" if measure in PERCENT else f"{value:.4f}"
    return f"{LABELS.get(measure, measure)} {text}"


def write_metrics(path: Path, rows: list[Row]) -> None:
    """The table of all epochs so far; nothing in it depends on the clock."""
    with atomic_write(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


class Watcher:
    """Tells how a training goes: a bar on a terminal, a line per epoch elsewhere.

    `board` is the folder of TensorBoard's log.
    """

    def __init__(self, console: Console, board: Path | None = None, measure: str = "top1") -> None:
        self.console, self.measure = console, measure
        self.board: Any = None
        if board and find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(board))
        self.bar: Progress | None = None
        if console.is_terminal and not console.quiet:
            self.bar = Progress(
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total}{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )  # fmt: skip
            self.bar.start()
            self.task = self.bar.add_task("train", total=1, epoch=0, figures="")
        self.measured = ""
        self.last_line = time.monotonic()

    def begin(self, epoch: int, epochs: int, done: int, total: int) -> None:
        """An epoch begins, or is resumed at a step."""
        number = f"{epoch + 1}/{epochs}"
        if self.bar:
            self.bar.reset(self.task, completed=done, total=total, figures="", epoch=number)

    def step(self, step: int, steps: int, loss: float, speed: float) -> None:
        """A step is done."""
        if self.bar:
            # No accuracy before there is one.
            figures = f" loss {loss:.3f}{self.measured} {speed:.0f} images/s"
            self.bar.update(self.task, completed=step, figures=figures)
        elif time.monotonic() - self.last_line > 60:
            self.last_line = time.monotonic()
            print_line(
                self.console, f"  step {step}/{steps}  loss {loss:.4f}  {speed:.0f} images/s"
            )

    def epoch(self, row: Row, epochs: int, speed: float, seconds_left: float) -> None:
        """An epoch is done."""
        self.last_line = time.monotonic()
        if self.board:
            values = {k: v for k, v in row.items() if k != "epoch" and isinstance(v, int | float)}
            for name, number in (values | {"images_per_second": speed}).items():
                self.board.add_scalar(name, number, row["epoch"])
            self.board.flush()
        parts = [f"epoch {row['epoch']}/{epochs}", f"loss {row['train_loss']:.4f}"]
        if (value := row.get(f"val_{self.measure}")) is not None:
            parts.append(figure(self.measure, value))
            self.measured = f" {parts[-1]}"
        if (value := row.get(f"ema_{self.measure}")) is not None:
            parts.append(f"averaged {figure(self.measure, value)}")
        if row["bad_steps"]:
            parts.append(f"{row['bad_steps']} bad steps")
        if row["broken"]:
            parts.append(f"{row['broken']} broken images")
        parts += [f"{speed:.0f} images/s", f"{clock(seconds_left)} left"]
        print_line(self.console, "  ".join(parts))

    def close(self) -> None:
        if self.bar:
            self.bar.stop()
        if self.board:
            self.board.close()


def clock(seconds: float) -> str:
    """Seconds as a person would say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def draw_curves(path: Path, runs: dict[str, list[Row]], measure: str = "top1") -> bool:
    """Figure 4's form: training loss dashed, top-1 solid; False where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        return False
    label = LABELS.get(measure, measure)
    canvas = new_figure(figsize=(7, 4.2))
    left = canvas.subplots()
    right = left.twinx()
    lines = {
        "train_loss": (left, "--", "training loss"),
        f"val_{measure}": (right, "-", label),
        f"ema_{measure}": (right, ":", f"{label} of averaged weights"),
    }
    for index, (name, rows) in enumerate(runs.items()):
        for number, (key, (axes, style, what)) in enumerate(lines.items()):
            points = [(row["epoch"], row[key]) for row in rows if row.get(key) is not None]
            if points:
                x, y = zip(*points, strict=True)
                # A colour for each run, or for each line of the only one.
                colour = f"C{number if len(runs) == 1 else index}"
                marker = "o" if len(points) == 1 else None  # a line of one point is not seen
                shown = f"{name}, {what} {y[-1]:.4g}"
                axes.plot(x, y, style, color=colour, marker=marker, label=shown)
    left.set_xlabel("epoch")
    left.set_ylabel("training loss (dashed)")
    right.set_ylabel(f"validation {label}{', %' if measure in PERCENT else ''} (solid)")
    right.set_ylim(bottom=0)
    left.xaxis.get_major_locator().set_params(integer=True)
    # Below the axes, where it covers no line.
    canvas.legend(loc="outside lower center", ncols=2, fontsize=8)
    left.grid(alpha=0.25)
    save(canvas, path)
    return True
