"""How good a fitted classifier is: figures, and one self-contained HTML page."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from ..data.contact_sheet import draw_contact_sheet, thumbnail_url
from ..data.sources import Data
from ..evaluation import calibration_error, wilson
from ..files import atomic_write
from ..model import HVT
from ..terminal import print_line
from .embeddings import Embedded
from .head import label_errors, temperature

SHOWN = 24
"""Images of a kind that are shown at most."""
FEW = 10
"""Training images of a class below which its figures are pointed out as uncertain."""
NEAR = 0.99
"""Cosine similarity from which embeddings are of nearly the same image."""


@dataclass
class Tried:
    """The models that were fitted to a folder of images, by method."""

    data: Data
    train: Embedded
    val: Embedded
    held_out: Tensor
    """The linear head's cross-validated probabilities of the training images."""
    models: dict[str, HVT] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)
    """Of the validation images."""
    top1_of: dict[str, float] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, method: str, model: HVT, features: Tensor, console: Console) -> None:
        """A model, and the features that it has of the validation images."""
        logits = model.head(features).cpu()
        top1 = 100 * float((logits.argmax(dim=1) == self.val.labels).double().mean())
        self.models[method], self.logits[method], self.top1_of[method] = model, logits, top1
        print_line(console, f"{method}: top-1 {top1:.2f} %")


@dataclass(frozen=True)
class Flagged:
    """An image to look at; its path is relative to the folder of the data."""

    path: str
    label: str
    predicted: str
    probability: float
    """Of the predicted class."""

    @property
    def caption(self) -> str:
        return f"{self.label} → {self.predicted} ({self.probability:.0%})"


@dataclass(frozen=True)
class Duplicate:
    """Two files with the same image or, where not `exact`, nearly the same."""

    paths: tuple[str, str]
    labels: tuple[str, str]
    exact: bool


@dataclass
class FitReport:
    """The result of `hvt fit`; accuracies are in per cent."""

    data: str
    init: str
    method: str
    """`linear head`, `last MLP` or `fine-tuned`."""
    class_names: tuple[str, ...]
    train_images: int
    val_images: int
    val_drawn: bool
    """Whether the validation part was held out of the training images."""
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
            row = {"name": name, "images": total, "top1": top1}
            rows.append(row | {"interval": wilson(right, total)})
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
        sheet = [(root / one.path, (one.caption, one.path)) for one in self.worst[:SHOWN]]
        draw_contact_sheet(folder / "worst.png", sheet)


def find_duplicates(
    train: Embedded, val: Embedded, names: Sequence[str], root: Path
) -> tuple[list[Duplicate], list[Duplicate]]:
    """Images in both parts, exact or near, and exact copies in two classes."""
    paths, digests = train.paths + val.paths, train.digests + val.digests
    labels, first_val = torch.cat((train.labels, val.labels)).tolist(), len(train.paths)

    def pair(a: int, b: int, exact: bool) -> Duplicate:
        one, other = (os.path.relpath(paths[i], root) for i in (a, b))
        return Duplicate((one, other), (names[labels[a]], names[labels[b]]), exact)

    first: dict[str, int] = {}
    copies = [(a, b) for b, one in enumerate(digests) if (a := first.setdefault(one, b)) != b]
    across = [pair(a, b, True) for a, b in copies if a < first_val <= b]
    contradictions = [pair(a, b, True) for a, b in copies if labels[a] != labels[b]]
    unit, others = (F.normalize(part.features, dim=1) for part in (train, val))
    for number, vector in enumerate(others, start=first_val):
        similarity, nearest = (unit @ vector).max(dim=0)
        if similarity >= NEAR and digests[number] != digests[int(nearest)]:
            across.append(pair(int(nearest), number, False))
    return across, contradictions


def make_report(tried: Tried, init: str, began: float) -> FitReport:
    """What the best of the models is worth, with its probabilities calibrated."""
    train, val, names, labels = tried.train, tried.val, tried.data.class_names, tried.val.labels
    root = Path(os.path.commonpath([*train.paths, *val.paths]))
    method = max(tried.top1_of, key=tried.top1_of.__getitem__)
    logits = tried.logits[method]
    scale = temperature(logits, labels)
    calibrated = logits / scale
    predicted = logits.argmax(dim=1)
    counts = torch.bincount(labels * len(names) + predicted, minlength=len(names) ** 2)
    across, contradictions = find_duplicates(train, val, names, root)

    def flag(part: Embedded, scores: Tensor, chosen: Iterable[tuple[int, int]]) -> list[Flagged]:
        rows = [(part.paths[i], int(part.labels[i]), k, float(scores[i, k])) for i, k in chosen]
        return [Flagged(os.path.relpath(p, root), names[i], names[k], q) for p, i, k, q in rows]

    order = F.cross_entropy(calibrated, labels, reduction="none").argsort(descending=True).tolist()
    wrong = [(i, int(predicted[i])) for i in order if predicted[i] != labels[i]]
    errors = label_errors(tried.held_out, train.labels)
    report = FitReport(
        data=str(root),
        init=init,
        method=method,
        class_names=names,
        train_images=len(train.labels),
        val_images=len(labels),
        val_drawn=tried.data.held_out,
        top1=tried.top1_of[method],
        interval=wilson(len(labels) - len(wrong), len(labels)),
        confusion=counts.reshape(len(names), len(names)).tolist(),
        temperature=scale,
        calibration_error=(
            calibration_error(logits, labels),
            calibration_error(calibrated, labels),
        ),
        worst=flag(val, calibrated.softmax(dim=1), wrong),
        label_errors=flag(train, tried.held_out, errors),
        duplicates=across,
        contradictions=contradictions,
        top1_of=tried.top1_of,
        seconds=time.monotonic() - began,
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

    text = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    names = {"name": root.resolve().name, "init": Path(report.init).name}
    template = Environment(autoescape=True).from_string(text)
    return template.render(report=report, shown=SHOWN, root=root, url=thumbnail_url, **names)
