"""What a fitted classifier is worth: figures, and one HTML page that can be mailed."""

from __future__ import annotations

import base64
import html
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.contact_sheet import draw_contact_sheet, thumbnail
from ..files import atomic_write

SHOWN = 24
"""Images of a kind that are shown at most."""
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


@dataclass(frozen=True)
class Duplicate:
    """Two files with the same image or, where not `exact`, nearly the same."""

    paths: tuple[str, str]
    labels: tuple[str, str]
    exact: bool


@dataclass
class FitReport:
    """The result of `hvt fit`, in per cent where it is a share."""

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

    def write(self, folder: Path, root: Path) -> None:
        """`report.json`, `report.html` and the contact sheet `worst.png`; images are in `root`."""
        for name, text in (
            ("report.json", json.dumps(self.to_dict(), indent=2) + "\n"),
            ("report.html", _page(self, root)),
        ):
            with atomic_write(folder / name) as temporary:
                temporary.write_text(text, encoding="utf-8")
        sheet = [(root / one.path, (_arrow(one), one.path)) for one in self.worst[:SHOWN]]
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
    paths: Sequence[str],
    probabilities: Tensor,
    labels: Tensor,
    names: Sequence[str],
    chosen: Iterable[tuple[int, int]],
) -> list[Flagged]:
    """Images by their place, with the class that is predicted for each."""
    return [
        Flagged(paths[i], names[int(labels[i])], names[guess], float(probabilities[i, guess]))
        for i, guess in chosen
    ]


def misclassified(logits: Tensor, labels: Tensor) -> list[tuple[int, int]]:
    """The places of wrong predictions and what was predicted, the highest loss first."""
    loss, predicted = F.cross_entropy(logits, labels, reduction="none"), logits.argmax(dim=1)
    order = loss.argsort(descending=True).tolist()
    return [(i, int(predicted[i])) for i in order if predicted[i] != labels[i]]


def find_duplicates(
    files: Sequence[tuple[str, str, str, str]], features: Tensor
) -> tuple[list[Duplicate], list[Duplicate]]:
    """Images in both parts, exact or near, and exact copies in two classes.

    `files` are path, part, class and content digest, `features` their embeddings `(N, D)`.
    """

    def pair(a: int, b: int, exact: bool) -> Duplicate:
        return Duplicate((files[a][0], files[b][0]), (files[a][2], files[b][2]), exact)

    groups: dict[str, list[int]] = defaultdict(list)
    for number, (_, _, _, digest) in enumerate(files):
        groups[digest].append(number)
    copies = [(first, other) for first, *rest in groups.values() for other in rest]
    across = [pair(a, b, True) for a, b in copies if files[a][1] != files[b][1]]
    contradictions = [pair(a, b, True) for a, b in copies if files[a][2] != files[b][2]]
    train = [n for n, file in enumerate(files) if file[1] == "train"]
    unit = F.normalize(features.float(), dim=1)
    for number in range(len(train), len(files)):  # validation images follow
        similarity, nearest = (unit[train] @ unit[number]).max(dim=0)
        if similarity >= NEAR and files[number][3] != files[int(nearest)][3]:
            across.append(pair(int(nearest), number, False))
    return across, contradictions


# ── the page ────────────────────────────────────────────────────────────────────────────────────


def _page(report: FitReport, root: Path) -> str:
    """One HTML document without outside resources."""
    low, high = report.interval
    drawn = "drawn from the training images" if report.val_drawn else "the val folder"
    before, after = report.calibration_error
    classes = [
        (row["name"], row["images"], "" if row["top1"] is None else f"{row['top1']:.1f} %",
         "{:.0f} to {:.0f} %".format(*row["interval"]))
        for row in report.per_class
    ]  # fmt: skip
    confusion = [
        (name, *row) for name, row in zip(report.class_names, report.confusion, strict=True)
    ]
    wrong = [(one.path, _arrow(one)) for one in report.worst]
    errors = [(one.path, _arrow(one)) for one in report.label_errors]
    galleries = [
        _gallery("Misclassified validation images, the highest loss first", wrong, root),
        _gallery("Training images that probably have a wrong label", errors, root),
        _gallery("Images in both parts", _pairs(report.duplicates), root),
        _gallery("Images in two classes", _pairs(report.contradictions), root),
    ]
    template = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=html.escape(f"hvt fit: {Path(report.data).name}"),
        top1=f"{report.top1:.1f}",
        summary=html.escape(
            f"95 % interval {low:.1f} to {high:.1f} %, on {report.val_images} validation images "
            f"({drawn}); {report.train_images} training images of {len(report.class_names)} "
            f"classes. {report.method} of {Path(report.init).name}, in {report.seconds:.0f} s."
        ),
        warnings="\n".join(f"<p class=warning>{html.escape(one)}</p>" for one in report.warnings),
        classes=_table(("class", "images", "top-1", "95 % interval"), classes),
        confusion=_table(("", *report.class_names), confusion),
        calibration=f"Expected calibration error {after:.1f} %; {before:.1f} % before the "
        f"temperature of {report.temperature:.2f}, which the checkpoint contains.",
        galleries="\n".join(galleries),
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    def line(tag: str, cells: Iterable[Any]) -> str:
        inner = "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells)
        return f"<tr>{inner}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<div class=wide><table>{line('th', headings)}{body}</table></div>"


def _arrow(one: Flagged) -> str:
    return f"{one.label} → {one.predicted} ({one.probability:.0%})"


def _pairs(pairs: Sequence[Duplicate]) -> list[tuple[str, str]]:
    return [
        (path, f"{label}, {'the same file' if pair.exact else 'nearly the same'} as its neighbour")
        for pair in pairs
        for path, label in zip(pair.paths, pair.labels, strict=True)
    ]


def _gallery(title: str, images: Sequence[tuple[str, str]], root: Path) -> str:
    if not images:
        return ""
    figures = []
    for path, caption in images[:SHOWN]:
        buffer = io.BytesIO()
        thumbnail(root / path).save(buffer, "JPEG", quality=80)
        data = base64.b64encode(buffer.getvalue()).decode()
        text = f"{html.escape(caption)}<br>{html.escape(path)}"
        figures.append(
            f'<figure><img src="data:image/jpeg;base64,{data}" alt="" width=160 height=160>'
            f"<figcaption>{text}</figcaption></figure>"
        )
    shown = f" ({SHOWN} of {len(images)})" if len(images) > SHOWN else f" ({len(images)})"
    return f"<h2>{title}{shown}</h2>\n<div class=images>{''.join(figures)}</div>"
