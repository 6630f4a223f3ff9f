"""The confusion matrix of an evaluation, as an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..evaluation import Score
from ..plot import new_figure, save
from ..terminal import printable

NAMED = 40
"""Classes up to which rows and columns have names, and rows and cells numbers of images."""


def draw_confusion(path: Path, score: Score, class_names: Sequence[str]) -> None:
    """Draw numbers of images by true and predicted class, coloured by their share of the row.

    Only classes with images have rows; predictions of the others share the last column.
    """
    shown = [label for label, images in enumerate(score.class_images) if images]
    rows = {label: row for row, label in enumerate(shown)}
    counts = np.zeros((len(rows), len(rows) + (len(rows) < score.num_classes)))
    for (label, predicted), images in score.confusion.items():
        counts[rows[label], rows.get(predicted, len(rows))] += images
    shares = counts / counts.sum(axis=1, keepdims=True)

    inches = min(14.0, 3.5 + 0.3 * len(shown))
    figure = new_figure(figsize=(inches, inches))
    axes = figure.subplots()
    drawn = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(shown) <= NAMED:
        for row, column in np.argwhere(counts):
            color = "white" if shares[row, column] > 0.5 else "black"
            text = f"{counts[row, column]:.0f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=color)
    if len(shown) <= NAMED:
        names = [printable(class_names[label]) for label in shown]
        totals = [f"{name} ({score.class_images[i]})" for i, name in zip(shown, names, strict=True)]
        names += ["another class"] * (counts.shape[1] - len(rows))
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8, parse_math=False)
        axes.set_yticks(range(len(totals)), totals, fontsize=8, parse_math=False)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class (images)")
    axes.set_title(f"top-1 {score.top1:.1f} % of {score.images} images")
    figure.colorbar(drawn, ax=axes, shrink=0.7, format="{x:.0%}", label="of the true class")
    save(figure, path)
