"""`hvt.fit`: a folder of images in, a classifier of them out."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from ..checkpoint.save_load import load, save
from ..data.images import FileImages
from ..data.sources import Data, open_data
from ..device import find_device
from ..errors import HVTError
from ..model import HVT
from ..terminal import print_line
from ..training.run_lock import found_run, unused_folder
from ..zoo import DEFAULT
from .embeddings import Embedded, EmbeddingCache, embed
from .head import Head, fit_head, label_errors, temperature
from .report import (
    FitReport,
    calibration_error,
    find_duplicates,
    flag,
    misclassified,
    wilson,
)

FEW = 10
"""Training images of a class below which its figures are pointed out as uncertain."""


@dataclass
class Fitted:
    """The result of a fit."""

    model: HVT
    path: Path
    folder: Path
    report: FitReport


@dataclass(frozen=True)
class Part:
    """Embedded images of the training or the validation part."""

    name: str
    paths: list[str]
    labels: Tensor  # (N,)
    embedded: Embedded


def fit(
    data: str | Path,
    output: str | Path | None = None,
    *,
    init: str | Path = DEFAULT,
    size: int | None = None,
    balance: bool = False,
    val_fraction: float = 0.2,
    skip_broken: bool = False,
    seed: int = 0,
    device: str = "auto",
    cache: str | Path | None = None,
    console: Console | None = None,
) -> Fitted:
    """Fit a classifier to a folder with one folder per class, or with `train` and `val`.

    `init` is the checkpoint whose blocks embed the images, at `size` pixels if given. Writes
    `model.safetensors`, `report.html`, `report.json` and `worst.png` to `output`.
    """
    began = time.monotonic()
    console = console or Console()

    def log(text: str) -> None:
        print_line(console, text)

    if output is not None and (found := found_run(Path(output))):
        raise HVTError(f"{output} has a {found} already: choose another --output")
    place = find_device(device)
    options = {} if size is None else {"img_size": size}
    model = load(init, place, **options).float().eval()
    source = _open(data, val_fraction, seed, model.config.in_chans)
    names = source.class_names
    log(
        f"{source.name}: {len(source.train)} training and {len(source.val)} validation images "
        + ("(drawn from the training images) " if source.held_out else "")
        + f"of {len(names)} classes"
    )
    store = EmbeddingCache(model, None if cache is None else Path(cache))
    parts = [
        _embed(name, images, Path(data), model, store, place, console)
        for name, images in (("train", source.train), ("val", source.val))
    ]
    train, val = parts
    broken = [reason for part in parts for reason in part.embedded.broken]
    if broken and not skip_broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise HVTError(f"{broken[0]}{more}: fix or remove it, or use --skip-broken")
    head = fit_head(train.embedded.features, train.labels, len(names), balance=balance, seed=seed)
    logits = head(val.embedded.features)
    scale = temperature(logits, val.labels)
    report = _report(source, init, head, train, val, logits, scale)
    report.warnings = _warnings(report, train, broken)
    _set_head(model, head.scaled(scale), names)
    folder = Path(output or unused_folder(Path(f"runs/fit-{Path(data).resolve().name}")))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save(model, path)
    report.seconds = time.monotonic() - began
    report.write(folder, Path(data))
    for text in report.warnings:
        log(f"warning: {text}")
    return Fitted(model, path, folder, report)


def _open(data: str | Path, val_fraction: float, seed: int, in_chans: int) -> Data:
    source = open_data(data, val_fraction=val_fraction, seed=seed, in_chans=in_chans)
    if not isinstance(source.train, FileImages) or not isinstance(source.val, FileImages):
        raise HVTError(f"{data} is not a folder of images: hvt fit takes a folder per class")
    return source


def _embed(
    name: str,
    images: Any,
    root: Path,
    model: HVT,
    store: EmbeddingCache,
    device: torch.device,
    console: Console,
) -> Part:
    def progress(items: Any, total: int) -> Any:
        return track(
            items, f"embedding {name}", total, console=console, transient=True,
            disable=not total or not console.is_terminal,
        )  # fmt: skip

    embedded = embed(model, images, store, device, progress)
    labels = torch.tensor([images.labels[i] for i in embedded.kept], dtype=torch.int64)
    paths = [os.path.relpath(images.path(i), root) for i in embedded.kept]
    return Part(name, paths, labels, embedded)


def _report(
    source: Data,
    init: str | Path,
    head: Head,
    train: Part,
    val: Part,
    logits: Tensor,
    scale: float,
) -> FitReport:
    names = source.class_names
    predicted = logits.argmax(dim=1)
    right = int((predicted == val.labels).sum())
    counts = torch.bincount(val.labels * len(names) + predicted, minlength=len(names) ** 2)
    files = [
        (path, part.name, names[int(label)], digest)
        for part in (train, val)
        for path, label, digest in zip(part.paths, part.labels, part.embedded.digests, strict=True)
    ]
    across, contradictions = find_duplicates(
        files, torch.cat((train.embedded.features, val.embedded.features))
    )
    errors = label_errors(head.held_out, train.labels)
    calibrated = logits / scale
    wrong = misclassified(calibrated, val.labels)
    return FitReport(
        data=source.name,
        init=str(init),
        method="linear head",
        class_names=names,
        train_images=len(train.labels),
        val_images=len(val.labels),
        val_drawn=source.held_out,
        top1=100 * right / max(1, len(val.labels)),
        interval=wilson(right, len(val.labels)),
        confusion=counts.reshape(len(names), len(names)).tolist(),
        temperature=scale,
        calibration_error=(
            calibration_error(logits, val.labels),
            calibration_error(calibrated, val.labels),
        ),
        worst=flag(val.paths, calibrated.softmax(dim=1), val.labels, names, wrong),
        label_errors=flag(train.paths, head.held_out, train.labels, names, errors),
        duplicates=across,
        contradictions=contradictions,
    )


def _warnings(report: FitReport, train: Part, broken: list[str]) -> list[str]:
    """What somebody should know before trusting the figures."""
    found = []
    counts = torch.bincount(train.labels, minlength=len(report.class_names)).tolist()
    few = [f"{n} ({c})" for n, c in zip(report.class_names, counts, strict=True) if c < FEW]
    if few:
        found.append(f"few training images: {', '.join(few)}; the figures are uncertain")
    if report.interval[1] - report.interval[0] > 20:
        found.append(
            "top-1 is uncertain by more than 20 points: add validation images to tell more"
        )
    if report.duplicates:
        found.append(
            f"{len(report.duplicates)} validation images are also in the training images, so "
            "top-1 is too high: remove them from one of the two"
        )
    if report.contradictions:
        first = report.contradictions[0]
        found.append(
            f"{len(report.contradictions)} images are in two classes, such as {first.paths[0]} "
            f"and {first.paths[1]}: keep each in one"
        )
    if broken:
        found.append(f"{len(broken)} images cannot be read and were skipped")
    return found


def _set_head(model: HVT, head: Head, names: tuple[str, ...]) -> None:
    """Give a model a fitted head and its class names."""
    model.reset_classifier(len(names))
    with torch.no_grad():
        assert isinstance(model.head, torch.nn.Linear)
        model.head.weight.copy_(head.weight)
        model.head.bias.copy_(head.bias)
    model.pretrained_cfg["label_names"] = names
    model.pretrained_cfg["num_classes"] = len(names)
