"""`hvt.evaluate`: a checkpoint, an exported file or a model on the images of a data set."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from .. import distributed
from ..data.contact_sheet import draw_worst
from ..data.evaluation import eval_batches
from ..data.sources import open_eval
from ..errors import HVTError
from ..evaluation import Score
from ..evaluation import evaluate as evaluate_batches
from ..model import HVT
from ..resolve import resolve
from .runtime import OnnxModel, check_classifier, open_model


def evaluate(
    model: str | Path | HVT | OnnxModel,
    data: str | Path,
    *,
    root: str | Path | None = None,
    download: bool = False,
    match_by_order: bool = False,
    skip_broken: bool = False,
    device: str = "auto",
    batch_size: int = 64,
    workers: int = 1,
    worst: str | Path | None = None,
    gflops: float | None = None,
) -> Score:
    """Measure a model: `hvt.evaluate("best.safetensors", "path/to/images").top1`.

    `model` is a checkpoint's path, a built-in name, an exported file or a model. `data` is digits,
    cifar10, cifar100, imagenet or a folder; its validation split is used. Without one, all images
    are, including those that a model may have been trained on, and the score's
    `validation_part` is False. `root` is the folder of a named dataset. Classes are matched by
    name, or by order with `match_by_order`. An unreadable image is an `HVTError`, or skipped and
    counted with `skip_broken`. Under torchrun each process evaluates its share and returns the
    whole score. `worst` is a file to draw the misclassified images with the highest loss to.
    `gflops` selects the largest setting of an elastic model within that cost.
    """
    with distributed.process_group(device) as (processes, place):
        what = "the model" if isinstance(model, HVT | OnnxModel) else str(model)
        # "auto" is for ONNX Runtime to settle: it may know other devices than torch.
        on_onnx = isinstance(model, str | Path) and resolve(model).kind == "onnx"
        opened = open_model(model, device if on_onnx else place, gflops=gflops)
        check_classifier(opened, what)
        source = open_eval(
            data,
            root=root,
            download=download,
            class_names=opened.class_names,
            num_classes=opened.num_classes,
            match_by_order=match_by_order,
            in_chans=opened.config.in_chans,
        )
        batches = eval_batches(
            opened,
            source.val,
            batch_size=batch_size,
            rank=processes.rank,
            world_size=processes.world_size,
            workers=workers,
            skip_broken=skip_broken,
        )
        score = evaluate_batches(opened, batches, opened.num_classes, place, processes)
        if not math.isfinite(score.loss):
            raise HVTError(f"{what} has no score: its logits are not finite")
    names = source.class_names or tuple(map(str, range(opened.num_classes)))
    if worst is not None and processes.is_main_process:
        draw_worst(Path(worst), source.val, score.worst, names)
    return dataclasses.replace(
        score,
        class_names=names,
        match=source.match,
        device=str(place),
        validation_part=source.validation_part,
    )
