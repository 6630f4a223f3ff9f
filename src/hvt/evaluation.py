"""How good a model is: top-1, top-5, loss, per class and confusion, each image once."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data.classes import ClassMatch
from .data.loader import Batch
from .distributed import DistributedContext, collective_device
from .errors import HVTError

MOST_SHOWN = 24
"""Misclassified images that a score lists."""


@dataclass(frozen=True)
class Mistake:
    """A misclassified image, by its place in the data set."""

    loss: float
    place: int
    label: int
    predicted: int


@dataclass(frozen=True)
class Score:
    """The result of an evaluation; accuracies are in per cent."""

    top1: float
    top5: float
    loss: float
    images: int
    skipped: int
    seconds: float
    num_classes: int
    confusion: Counter[tuple[int, int]]
    """Images by label and predicted class; a dense table would grow with classes²."""
    worst: tuple[Mistake, ...] = ()
    """Misclassified images, the highest loss first."""
    class_names: tuple[str, ...] = ()
    """The names of the classes, where they are known."""
    match: ClassMatch | None = None
    """How the data's classes were matched with the model's, where they were."""
    device: str = "cpu"
    validation_part: bool = True
    """Whether the data has one. If not, all its images were taken, and a model that was trained
    on the same data has seen most of them."""

    @property
    def per_class(self) -> list[float | None]:
        """Top-1 of each class, None where it has no image."""
        images = enumerate(self.class_images)
        return [100 * self.confusion[label, label] / n if n else None for label, n in images]

    @property
    def class_images(self) -> list[int]:
        """How many images of each class there were."""
        counts = [0] * self.num_classes
        for (label, _), count in self.confusion.items():
            counts[label] += count
        return counts

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values; classes without images are omitted, and two may have the same name."""
        class_names = self.class_names or [*map(str, range(self.num_classes))]
        rows = enumerate(zip(class_names, self.per_class, self.class_images, strict=True))
        return {
            "top1": self.top1,
            "top5": self.top5,
            "loss": self.loss,
            "images": self.images,
            "skipped": self.skipped,
            "images_per_second": self.images_per_second,
            "per_class": [
                {"label": label, "name": name, "top1": top1, "images": images}
                for label, (name, top1, images) in rows
                if images
            ],
        }


@torch.inference_mode()
def evaluate(
    model: Callable[[Tensor], Tensor],
    batches: Iterable[Batch],
    num_classes: int,
    device: torch.device | str = "cpu",
    processes: DistributedContext | None = None,
    amp: torch.dtype | None = None,
) -> Score:
    """Evaluate a model; with several processes, each brings its images and gets the whole sum."""
    device, processes = torch.device(device), processes or DistributedContext()
    training = isinstance(model, nn.Module) and model.training
    if isinstance(model, nn.Module):
        model.eval()
    # right, right among five, loss, images, skipped: float64 sums are exact counts
    sums = torch.zeros(5, dtype=torch.float64)
    weights = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    dtype = torch.float32 if weights is None else weights.dtype  # of one in half precision too
    confusion: Counter[tuple[int, int]] = Counter()
    worst: list[Mistake] = []
    place, start = 0, time.perf_counter()
    for batch in batches:
        sums[4] += batch.broken
        first, place = place, place + len(batch.labels) + batch.broken
        if not len(batch.labels):
            continue
        for label in (int(batch.labels.min()), int(batch.labels.max())):
            if not 0 <= label < num_classes:
                raise HVTError(f"the data has the label {label}, the model {num_classes} classes")
        images, labels = batch.images.to(device, dtype), batch.labels.to(device)
        with torch.autocast(device.type, amp, enabled=amp is not None):
            logits = model(images)
        logits = logits.float()
        losses = F.cross_entropy(logits, labels, reduction="none")
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices.cpu()
        hits = top.eq(batch.labels[:, None])
        confusion.update(zip(batch.labels.tolist(), top[:, 0].tolist(), strict=True))
        counted = [hits[:, 0].sum().item(), hits.sum().item(), losses.sum().item(), len(labels)]
        sums[:4] += torch.tensor(counted, dtype=torch.float64)
        if not batch.broken:  # or it is not known which of them were skipped
            places = torch.arange(first, place) * processes.world_size + processes.rank
            wrong = ~hits[:, 0]
            columns = (losses.cpu(), places, batch.labels, top[:, 0])
            rows = zip(*(column[wrong].tolist() for column in columns), strict=True)
            worst = _highest([*worst, *itertools.starmap(Mistake, rows)])
    if isinstance(model, nn.Module):
        model.train(training)
    seconds = time.perf_counter() - start
    if processes.world_size > 1:
        sums = processes.all_reduce(sums.to(collective_device(device))).cpu()
        confusion = sum(processes.all_gather(confusion), Counter())
        worst = _highest(itertools.chain(*processes.all_gather(worst)))
    right, among_five, loss_sum, count, skipped = sums.tolist()
    if not count:
        raise HVTError("there is no readable image to evaluate on")
    return Score(
        top1=100 * right / count,
        top5=100 * among_five / count,
        loss=loss_sum / count,
        images=int(count),
        skipped=int(skipped),
        seconds=seconds,
        num_classes=num_classes,
        confusion=confusion,
        worst=tuple(worst),
    )


def _highest(mistakes: Iterable[Mistake]) -> list[Mistake]:
    return heapq.nlargest(MOST_SHOWN, mistakes, key=lambda mistake: mistake.loss)


def wilson(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share, in per cent."""
    if not total:
        return 0.0, 100.0
    share, spread = right / total, z * z / total
    centre = (share + spread / 2) / (1 + spread)
    half = z * ((share * (1 - share) + spread / 4) / total) ** 0.5 / (1 + spread)
    return 100 * max(0.0, centre - half), 100 * min(1.0, centre + half)


def calibration_error(logits: Tensor, labels: Tensor, bins: int = 10) -> float:
    """The expected calibration error, in per cent."""
    confidence, predicted = logits.softmax(dim=1).max(dim=1)
    surplus = (predicted == labels).float() - confidence
    place = (confidence * bins).long().clamp(max=bins - 1)
    sums = torch.zeros(bins).index_add(0, place, surplus)
    return float(100 * sums.abs().sum() / max(1, len(labels)))
