"""Small data sets that are in memory as a whole: the digits and both CIFARs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import datasets

from ..errors import HVTError
from .splits import split_stratified

CIFAR = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}
_DIGITS_SEED = 0  # of the one split that everybody shares


class ArrayImages(Dataset[tuple[Image.Image, int]]):
    """A data set that is in memory as a whole: `images` uint8 (N, H, W, C), `labels` int64 (N,)."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        pixels = self.images[index].numpy()  # (H, W, C)
        image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        return image, int(self.labels[index])

    def subset(self, indices: Sequence[int]) -> ArrayImages:
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return ArrayImages(self.images[chosen], self.labels[chosen])

    def relabel(self, mapping: Sequence[int]) -> ArrayImages:
        return ArrayImages(self.images, torch.as_tensor(mapping)[self.labels])


def open_digits(in_chans: int) -> tuple[ArrayImages, ArrayImages, tuple[str, ...]]:
    """scikit-learn's 1,797 handwritten digits of 8×8, a fifth of them for validation."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise HVTError("digits needs scikit-learn: pip install 'hvt[train]'") from error
    digits = load_digits()
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # (N, 8, 8), from 0…16
    images = torch.from_numpy(grey)[..., None].repeat(1, 1, 1, in_chans)
    every = ArrayImages(images, torch.from_numpy(digits.target).long())
    train, val = split_stratified(every.labels, 0.2, _DIGITS_SEED)
    names = tuple(str(name) for name in digits.target_names)
    return every.subset(train), every.subset(val), names


def open_cifar(
    name: str, root: Path, download: bool, in_chans: int, need_train: bool
) -> tuple[ArrayImages | None, ArrayImages, tuple[str, ...]]:
    """CIFAR-10 or CIFAR-100 in torchvision's layout: training part, test part, class names."""
    source = CIFAR[name]
    try:
        test = source(root, train=False, download=download)
        train = source(root, train=True) if need_train else None
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        if download:
            raise HVTError(f"cannot get {name}: {reason}") from error
        raise HVTError(
            f"{name} is not in {root}, or damaged: pass --download (download=True) to fetch it, or "
            f"--root with the folder that contains {source.base_folder} ({reason})"
        ) from error
    images = None if train is None else _from_torchvision(train, in_chans)
    return images, _from_torchvision(test, in_chans), tuple(test.classes)


def _from_torchvision(raw: Any, in_chans: int) -> ArrayImages:
    pixels = np.ascontiguousarray(raw.data)  # (N, 32, 32, 3)
    if in_chans == 1:
        pixels = np.stack([np.asarray(Image.fromarray(one).convert("L")) for one in pixels])
        pixels = pixels[..., None]  # (N, 32, 32, 1)
    return ArrayImages(torch.from_numpy(pixels), torch.tensor(raw.targets))
