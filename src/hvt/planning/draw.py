"""The plot of a plan: the best score at each cost, and the choices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..plot import figure_path, new_figure, save

if TYPE_CHECKING:
    from .result import Choice, Plan

COLOURS = {"plan": "#0969da", "the paper's scaling": "#bf8700", "DeiT": "#8250df"}
LINE = "#8c959f"


def draw(plan: Plan, path: str | Path) -> None:
    """Score against GFLOPs, over the whole space and for the choices."""
    figure_path(path)
    figure = new_figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", xlabel="GMACs per image", ylabel="score of the regression")
    axes.step(
        plan.frontier["gflops"], plan.frontier["scores"], where="pre", color=LINE, lw=1.2,
        label="best of the space",
    )  # fmt: skip
    groups: dict[str, list[Choice]] = {
        "plan": plan.best,
        "the paper's scaling": plan.scaled,
        "DeiT": [plan.baseline] if plan.baseline else [],
    }
    for name, choices in groups.items():
        points = [(choice.gflops, choice.score) for choice in choices]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=COLOURS[name], label=name)
        for choice, point in zip(choices, points, strict=True):
            axes.annotate(
                choice.name, point, xytext=(-5, 4), ha="right", textcoords="offset points",
                fontsize=7,
            )  # fmt: skip
    if "gflops" in plan.budgets:
        axes.axvline(plan.budgets["gflops"], color=LINE, ls="--", lw=0.8)
    budgets = ", ".join(f"{name} {value:g}" for name, value in plan.budgets.items())
    axes.set_title(f"{budgets}: {plan.num_within:,} of {plan.num_configs:,} configs", fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.margins(0.1)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(fontsize=8, loc="lower center")
    save(figure, path, dpi=120)
