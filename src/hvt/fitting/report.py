"""How good a fitted classifier is: figures, and one self-contained HTML page."""

from __future__ import annotations

import base64
import io
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.contact_sheet import draw_contact_sheet, thumbnail
from ..data.sources import Data
from ..files import atomic_write
from .embeddings import Embedded
from .head import label_errors

SHOWN = 24
"""Images of a kind that are shown at most."""
FEW = 10
"""Training images of a class below which its figures are pointed out as uncertain."""
NEAR = 0.99
"""Cosine similarity from which embeddings are of nearly the same image."""


@dataclass(frozen=True)
class Flagged:
    """An image to look at; its path is relative to the folder of the data."""

    path: str
    label: str
    predicted: str
    probability: float
    """Of the predicted class."""

    @property
    def images(self) -> list[tuple[str, str]]:
        """Path and caption."""
        return [(self.path, f"{self.label} → {self.predicted} ({self.probability:.0%})")]


@dataclass(frozen=True)
class Duplicate:
    """Two files with the same image or, where not `exact`, nearly the same."""

    paths: tuple[str, str]
    labels: tuple[str, str]
    exact: bool

    @property
    def images(self) -> list[tuple[str, str]]:
        """Path and caption of both."""
        how = "the same file" if self.exact else "nearly the same"
        captions = [f"{label}, {how} as its neighbour" for label in self.labels]
        return list(zip(self.paths, captions, strict=True))


@dataclass
class FitReport:
    """The result of `hvt fit`; accuracies are in per cent."""

    data: str
    init: str
    method: str
    """`linear head` or `fine-tuned`."""
    class_names: tuple[str, ...]
    train_images: int
    val_images: int
    val_drawn: bool
    """Whether the validation part was drawn from the training images."""
    top1: float
    interval: tuple[float, float]
    """95 %, by Wilson."""
    confusion: list[list[int]]
    """Rows are true classes, columns predicted ones."""
    temperature: float
    calibration_error: tuple[float, float]
    """Expected calibration error before and after the temperature."""
    worst: list[Flagged]
    """Misclassified validation images, the highest loss first."""
    label_errors: list[Flagged]
    """Training images whose label is probably wrong, by cross-validated probabilities."""
    duplicates: list[Duplicate]
    """Across training and validation images."""
    contradictions: list[Duplicate]
    """The same image in two classes."""
    top1_of: dict[str, float] = field(default_factory=dict)
    """By method, where several were tried."""
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def per_class(self) -> list[dict[str, Any]]:
        """Top-1 of each class with its interval; None where the class has no image."""
        rows = []
        for label, (name, counts) in enumerate(zip(self.class_names, self.confusion, strict=True)):
            total, right = sum(counts), counts[label]
            top1 = 100 * right / total if total else None
            interval = wilson(right, total)
            rows.append({"name": name, "images": total, "top1": top1, "interval": interval})
        return rows

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"per_class": self.per_class}

    def write(self, folder: Path) -> None:
        """Write `report.json`, `report.html` and the contact sheet `worst.png`."""
        root = Path(self.data)
        for name, text in (
            ("report.json", json.dumps(self.to_dict(), indent=2) + "\n"),
            ("report.html", _page(self, root)),
        ):
            with atomic_write(folder / name) as temporary:
                temporary.write_text(text, encoding="utf-8")
        shown = [one.images[0] for one in self.worst[:SHOWN]]
        sheet = [(root / path, (caption, path)) for path, caption in shown]
        draw_contact_sheet(folder / "worst.png", sheet)


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


def flag(
    part: Embedded,
    probabilities: Tensor,
    names: Sequence[str],
    chosen: Iterable[tuple[int, int]],
    root: Path,
) -> list[Flagged]:
    """Images by their place and the class that is predicted for each."""
    found, labels = [], part.labels.tolist()
    for i, guess in chosen:
        path, label = os.path.relpath(part.paths[i], root), names[labels[i]]
        found.append(Flagged(path, label, names[guess], float(probabilities[i, guess])))
    return found


def misclassified(logits: Tensor, labels: Tensor) -> list[tuple[int, int]]:
    """The places of wrong predictions and what was predicted, the highest loss first."""
    loss, predicted = F.cross_entropy(logits, labels, reduction="none"), logits.argmax(dim=1)
    order = loss.argsort(descending=True).tolist()
    return [(i, int(predicted[i])) for i in order if predicted[i] != labels[i]]


def find_duplicates(
    train: Embedded, val: Embedded, names: Sequence[str], root: Path
) -> tuple[list[Duplicate], list[Duplicate]]:
    """Images in both parts, exact or near, and exact copies in two classes."""
    paths, digests = train.paths + val.paths, train.digests + val.digests
    labels, first_val = torch.cat((train.labels, val.labels)).tolist(), len(train.paths)

    def pair(a: int, b: int, exact: bool) -> Duplicate:
        one, other = (os.path.relpath(paths[i], root) for i in (a, b))
        return Duplicate((one, other), (names[labels[a]], names[labels[b]]), exact)

    groups: dict[str, list[int]] = defaultdict(list)
    for number, digest in enumerate(digests):
        groups[digest].append(number)
    copies = [(first, other) for first, *rest in groups.values() for other in rest]
    across = [pair(a, b, True) for a, b in copies if a < first_val <= b]
    contradictions = [pair(a, b, True) for a, b in copies if labels[a] != labels[b]]
    unit, others = (F.normalize(part.features, dim=1) for part in (train, val))
    for number, vector in enumerate(others, start=first_val):
        similarity, nearest = (unit @ vector).max(dim=0)
        if similarity >= NEAR and digests[number] != digests[int(nearest)]:
            across.append(pair(int(nearest), number, False))
    return across, contradictions


def make_report(
    data: Data,
    train: Embedded,
    val: Embedded,
    held_out: Tensor,
    logits: Tensor,
    scale: float,
    **about: Any,
) -> FitReport:
    """What the validation logits `(N, classes)` of the kept model are worth, at a temperature.

    `held_out` are the linear head's cross-validated probabilities of the training images.
    """
    names = data.class_names
    root = Path(os.path.commonpath([*train.paths, *val.paths]))
    predicted, calibrated = logits.argmax(dim=1), logits / scale
    counts = torch.bincount(val.labels * len(names) + predicted, minlength=len(names) ** 2)
    right = int((predicted == val.labels).sum())
    across, contradictions = find_duplicates(train, val, names, root)
    wrong, errors = misclassified(calibrated, val.labels), label_errors(held_out, train.labels)
    report = FitReport(
        data=str(root),
        class_names=names,
        train_images=len(train.labels),
        val_images=len(val.labels),
        val_drawn=data.held_out,
        top1=100 * right / max(1, len(val.labels)),
        interval=wilson(right, len(val.labels)),
        confusion=counts.reshape(len(names), len(names)).tolist(),
        temperature=scale,
        calibration_error=(
            calibration_error(logits, val.labels),
            calibration_error(calibrated, val.labels),
        ),
        worst=flag(val, calibrated.softmax(dim=1), names, wrong, root),
        label_errors=flag(train, held_out, names, errors, root),
        duplicates=across,
        contradictions=contradictions,
        **about,
    )
    report.warnings = _warnings(report, train.labels, len(train.broken) + len(val.broken))
    return report


def _warnings(report: FitReport, labels: Tensor, broken: int) -> list[str]:
    """What somebody should know before trusting the figures."""
    counts = torch.bincount(labels, minlength=len(report.class_names)).tolist()
    few = [f"{n} ({c})" for n, c in zip(report.class_names, counts, strict=True) if c < FEW]
    found = {
        f"few training images: {', '.join(few)}; the figures are uncertain": few,
        "the 95 % interval of top-1 is wider than 20 points: add validation images":
            report.interval[1] - report.interval[0] > 20,
        f"validation images also in the training images: {len(report.duplicates)}; top-1 is too "
        "high: remove them from one of the two": report.duplicates,
        f"images in two classes: {len(report.contradictions)}; keep each in one":
            report.contradictions,
        f"unreadable images skipped: {broken}": broken,
    }  # fmt: skip
    return [text for text, so in found.items() if so]


def _page(report: FitReport, root: Path) -> str:
    """One HTML document without outside resources."""
    from jinja2 import Environment

    def data_url(path: str) -> str:
        buffer = io.BytesIO()
        thumbnail(root / path).save(buffer, "JPEG", quality=80)
        return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"

    text = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    names = {"name": root.resolve().name, "init": Path(report.init).name}
    template = Environment(autoescape=True).from_string(text)
    return template.render(report=report, shown=SHOWN, data_url=data_url, **names)
