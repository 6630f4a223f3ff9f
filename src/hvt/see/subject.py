"""The model to look at: one of ours by name, a checkpoint, or any model of timm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from ..checkpoint.save_load import read
from ..costs import Cost, cost
from ..data.evaluation import RefuseStrips, eval_transform
from ..data.images import UnreadableImageError
from ..deploy.inputs import ImageInput, open_image, source_of
from ..errors import HVTError
from ..model import HVT
from ..resolve import Source, build, resolve


@dataclass(frozen=True)
class Subject:
    """A model in evaluation mode and its own way to prepare an image."""

    title: str
    """The model's name, and where its weights are from if the name does not say."""
    model: nn.Module
    transform: Any
    in_chans: int

    def prepare(self, source: ImageInput) -> Tensor:
        """An image as the model takes it, `(C, H, W)`."""
        image = open_image(source, self.in_chans)
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
    model = build(source, pretrained, seed)
    model.eval()
    weights = "published weights" if pretrained else f"random weights, seed {seed}"
    if isinstance(model, HVT):
        own = source.kind == "checkpoint"
        title = _title(source) if own else f"{source.name} ({weights})"
        return Subject(title, model, eval_transform(model), model.config.in_chans)
    config = timm.data.resolve_model_data_config(model)
    transform = timm.data.create_transform(**config, is_training=False)
    if config["crop_mode"] == "center":
        side = math.ceil(max(config["input_size"][1:]) / config["crop_pct"])
        transform.transforms.insert(0, RefuseStrips(side))
    title = f"{source.name} (timm, {weights})"
    return Subject(title, model, transform, config["input_size"][0])


def open_price(name: str | None = None) -> tuple[str, Cost]:
    """A title and what the model costs, without building it; names as in `open_model`."""
    source = resolve(name)
    if source.kind == "checkpoint":
        return _title(source), cost(read(source.name).config)
    if source.kind == "timm":
        raise HVTError(
            f"{name} is a timm model: only hvt's models have costs per block, see hvt models"
        )
    return source.name, cost(source.name)


def _title(checkpoint: Source) -> str:
    """A file's name says little without the folder it is in."""
    return "/".join(Path(checkpoint.name).parts[-2:])
