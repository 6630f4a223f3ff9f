"""The settings of an elastic model side by side: accuracy, cost and time of each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .. import plot
from ..costs import cost
from ..data.sample import drawn_images
from ..elastic import configs_of, label, plain
from ..errors import HVTError
from ..model import HVT
from .evaluate import evaluate
from .runtime import open_model

TIMED, WARM_UP = 7, 2
"""Timed runs of a setting, and those before them."""


def settings_of(source: str | Path | HVT, device: str | torch.device) -> Iterator[tuple[str, HVT]]:
    """The settings of a checkpoint by name, largest first, as plain models on a device."""
    model = open_model(source, device)
    if not isinstance(model, HVT) or model.settings is None:
        raise HVTError(f"{source} is not elastic: it has one setting, so leave the choice out")
    for place, config in enumerate(configs_of(model)):
        yield label(config), plain(model, place)


def evaluate_settings(source: str | Path | HVT, data: str | Path, **keywords: Any) -> list[Any]:
    """A row for each setting, largest first: its cost, accuracy and images/s; see `evaluate`."""
    rows = []
    for name, model in settings_of(source, "cpu"):
        score, config = evaluate(model, data, **keywords), model.config
        rows.append(
            {
                "setting": name, "image": list(config.image), "tokens": list(config.tokens),
                "gflops": cost(config).gflops, "top1": score.top1, "top5": score.top5,
                "images": score.images, "images_per_second": score.images_per_second,
                "device": score.device,
            }
        )  # fmt: skip
    return rows


def draw_curve(path: Path, rows: list[Any]) -> None:
    """Top-1 over the cost of each setting."""
    figure = plot.new_figure(figsize=(6, 4))
    axes = figure.subplots()
    axes.plot([row["gflops"] for row in rows], [row["top1"] for row in rows], marker="o")
    for row in rows:
        axes.annotate(row["setting"], (row["gflops"], row["top1"]), (4, -10),
                      textcoords="offset points")  # fmt: skip
    axes.set(xlabel="GFLOPs (MACs per image)", ylabel="top-1 (%)")
    plot.save(figure, path)


def within_ms(source: str | Path | HVT, limit: float, device: str) -> tuple[str, HVT, float]:
    """The largest setting that takes at most so many milliseconds an image on this machine.

    Its name, the plain model, and its time: the median of a few runs on one image.
    """
    name, took = "", 0.0
    for name, model in settings_of(source, device):
        took = milliseconds(model)
        if took <= limit:
            return name, model, took
    raise HVTError(
        f"no setting takes {limit:g} ms or less: the smallest, {name}, takes {took:.1f} ms here"
    )


@torch.inference_mode()
def milliseconds(model: HVT) -> float:
    """What one image takes."""
    config, parameter = model.config, model.pos_embed
    image = drawn_images(1, config.in_chans, config.image).to(parameter)
    times = []
    for _ in range(WARM_UP + TIMED):
        began = time.perf_counter()
        model(image).cpu()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[WARM_UP:])
