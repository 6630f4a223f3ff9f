"""The model to look at: one of ours by name, a checkpoint, or any model of timm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.save_load import read
from ..costs import Cost, cost
from ..data.evaluation import eval_transform
from ..data.images import UnreadableImageError
from ..deploy.inputs import ImageInput, open_image, source_of
from ..errors import HVTError
from ..resolve import Source, build, resolve


@dataclass(frozen=True)
class Subject:
    """A model in evaluation mode and its own way to prepare an image."""

    title: str
    """The model's name, and where its weights are from if the name does not say."""
    model: Any
    transform: Any

    def prepare(self, source: ImageInput) -> Tensor:
        """An image as the model takes it, `(C, H, W)`."""
        image = open_image(source, self.model.pretrained_cfg["input_size"][0])
        try:
            return self.transform(image)
        except UnreadableImageError as error:  # the transform does not know its name
            raise UnreadableImageError.of(source_of(source) or error.path, error.reason) from error

    def shown(self, image: Tensor) -> Tensor:
        """A prepared image for the eye: `(C, H, W)` → `(H, W, 3)` from 0 to 1."""
        for step in self.transform.transforms:
            if hasattr(step, "mean") and hasattr(step, "std"):
                mean, std = (torch.as_tensor(v).view(-1, 1, 1) for v in (step.mean, step.std))
                image = image * std + mean
        return image.clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0)


def open_model(name: str | None = None, pretrained: bool = False, seed: int = 0) -> Subject:
    """The model of a name or a path, see `resolve`; None is the built-in model.

    A named model has random weights by `seed`, or the published ones with `pretrained`.
    """
    source = resolve(name)
    model = build(source, pretrained, seed).eval()
    title = _title(source)
    if source.kind != "checkpoint":
        weights = "published weights" if pretrained else f"random weights, seed {seed}"
        title += f" (timm, {weights})" if source.kind == "timm" else f" ({weights})"
    return Subject(title, model, eval_transform(model))


def open_price(name: str | None = None) -> tuple[str, Cost]:
    """A title and what the model costs, without building it; names as in `open_model`."""
    source = resolve(name)
    if source.kind == "timm":
        raise HVTError(
            f"{name} is a timm model: only hvt's models have costs per block, see hvt models"
        )
    own = source.kind == "checkpoint"
    return _title(source), cost(read(source.name).config if own else source.name)


def _title(source: Source) -> str:
    """A checkpoint's name says little without the folder it is in."""
    own = source.kind == "checkpoint"
    return "/".join(Path(source.name).parts[-2:]) if own else source.name
