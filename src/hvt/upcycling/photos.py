"""Photos without labels: which are held out, and crops that a source and a student both see."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data.transforms import str_to_pil_interp
from torch import Tensor
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.functional import pil_to_tensor

from ..data.evaluation import eval_transform, per_channel
from ..data.images import FileImages
from ..data.loader import EvalBatches
from ..data.sources import Data
from ..deploy.inputs import find_images
from ..errors import HVTError
from ..files import expanded
from ..model import HVT

Size = tuple[int, int]


def open_photos(folder: str | Path, batch_size: int, holdout: int, in_chans: int = 3) -> Data:
    """The images below a folder, some of them held out by a hash of their names.

    So a photo stays in its part, whatever the seed and the order on the disk, and nearly always
    when others are added: runs can be compared, and averaged, on photos that none was trained on.
    """
    paths = sorted(find_images([str(folder)]))
    base = expanded(folder)
    if not base.is_dir():
        raise HVTError(f"{folder} is not a folder: name the folder of the photos")

    def rank(path: str) -> str:
        inner = Path(path).relative_to(base)
        return hashlib.blake2b(f"0/{inner.as_posix()}".encode(errors="surrogateescape")).hexdigest()

    held = set(sorted(paths, key=rank)[: min(holdout, len(paths) // 5)])
    train, val = (
        FileImages(chosen, [0] * len(chosen), in_chans)
        for chosen in ([p for p in paths if p not in held], [p for p in paths if p in held])
    )
    if not len(val) or len(train) < batch_size:
        raise HVTError(
            f"{folder} has {len(paths)} images, {len(train)} to train on and {len(val)} held out: "
            f"too few for a batch of {batch_size}, so add some or lower --batch-size"
        )
    return Data(name=str(folder), train=train, val=val, class_names=(), held_out=True)


# ── the same image at several sizes ───────────────────────────────────────────────────────────


class Crops:
    """The same random crop of a photo, perhaps flipped, at each of some sizes, as flat bytes."""

    def __init__(self, sizes: Sequence[Size], scale: float, interpolation: str) -> None:
        self.sizes, self.scale = tuple(sizes), (scale, 1.0)
        self.resample = str_to_pil_interp(interpolation if interpolation != "random" else "bicubic")

    def __call__(self, image: Image.Image) -> Tensor:  # → uint8 (bytes,)
        top, left, height, width = RandomResizedCrop.get_params(image, self.scale, (3 / 4, 4 / 3))
        flip = bool(torch.rand(()) < 0.5)
        box = (left, top, left + width, top + height)
        parts = []
        for rows, cols in self.sizes:
            cut = image.resize((cols, rows), self.resample, box=box)
            if flip:
                cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            parts.append(pil_to_tensor(cut).flatten())
        return torch.cat(parts)


def unpack(flat: Tensor, channels: int, sizes: Sequence[Size]) -> list[Tensor]:
    """Flat bytes as images: `(B, bytes)` → `(B, C, H, W)` for each size."""
    counts = [channels * rows * cols for rows, cols in sizes]
    parts = flat.split(counts, dim=1)
    return [part.reshape(-1, channels, *size) for part, size in zip(parts, sizes, strict=True)]


def read_views(photos: Any, models: Sequence[HVT], workers: int, skip_broken: bool) -> list[Tensor]:
    """All of some photos as each model sees them when it is evaluated: uint8 `(B, C, H, W)`."""
    transforms = [eval_transform(model, normalize=False) for model in models]
    views = functools.partial(_views, transforms)
    batches = EvalBatches(photos, views, batch_size=64, workers=workers, skip_broken=skip_broken)
    flat = [batch.images for batch in batches if len(batch.labels)]
    if not flat:
        raise HVTError("none of the photos can be read")
    sizes = [model.config.image for model in models]
    return unpack(torch.cat(flat), models[0].config.in_chans, sizes)


def _views(transforms: Sequence[Any], image: Image.Image) -> Tensor:  # → uint8 (bytes,)
    return torch.cat([transform(image).flatten() for transform in transforms])


class Normalise:
    """Bytes to what a model takes: uint8 `(B, C, H, W)` → float32."""

    def __init__(self, model: HVT, device: torch.device) -> None:
        cfg, channels = model.pretrained_cfg, model.config.in_chans
        self.mean, self.std = (
            torch.tensor(per_channel(cfg[name], channels), device=device).view(-1, 1, 1)
            for name in ("mean", "std")
        )

    def __call__(self, images: Tensor) -> Tensor:
        return (images.to(self.mean.device, non_blocking=True) / 255 - self.mean) / self.std
