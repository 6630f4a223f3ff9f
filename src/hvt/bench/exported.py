"""An exported file's speed beside that of the model it came from."""

from __future__ import annotations

import copy
import statistics
from pathlib import Path

import torch

from ..data.sample import drawn_images
from ..deploy.export import BATCH, open_exported
from ..model import HVT
from .measure import interleaved

ROUNDS, LEAST = 3, 0.2  # turns, and seconds of each


@torch.inference_mode()
def compare_speed(model: HVT, path: Path, form: str) -> dict[str, float]:
    """Images/s on the CPU in turns: of the file that `export` has just written, and in PyTorch."""
    model = copy.deepcopy(model).cpu().float().eval()
    run = open_exported(path, form)
    batch = drawn_images(BATCH, model.config.in_chans, model.config.image)
    times: dict[str, list[float]] = {}
    runs = {"torch": lambda: model(batch), "exported": lambda: run(batch)}
    for turn in range(ROUNDS):
        interleaved(runs, torch.device("cpu"), turn, LEAST, times)
    speed = {name: BATCH / statistics.median(seconds) for name, seconds in times.items()}
    return {
        "images_per_second": speed["exported"],
        "torch_images_per_second": speed["torch"],
    }
