"""Tables of an upcycling: the ranking, and cost, speed and agreement before and after."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ..bench.measure import describe
from ..bench.models import open_bench_model
from ..bench.run import measure
from ..checkpoint.save_load import save
from ..config import HVTConfig
from ..costs import cost
from ..data.evaluation import eval_batches
from ..data.sources import EvalData, open_eval
from ..errors import HVTError
from ..evaluation import evaluate
from ..model import HVT
from .distil import Agreement
from .placement import Ranked
from .placement import describe as describe_placement
from .settings import Settings

BATCHES = (1, 16)
MODES = {"eager": "PyTorch", "onnx": "ONNX", "int8": "int8"}
Log = Callable[[str], None]
SHOWN = 12
"""Rows of the printed ranking."""


@dataclass
class Row:
    """One model of the table."""

    name: str
    gflops: float
    params_m: float
    agreement: float
    kl: float
    top1: float | None = None
    top5: float | None = None
    speed: dict[str, dict[int, float]] = field(default_factory=dict)
    """Images/s by mode and batch size."""


def measure_rows(
    source: HVT,
    models: dict[str, HVT],
    scores: dict[str, Agreement],
    best: str,
    labelled: EvalData | None,
    settings: Settings,
    device: torch.device,
    log: Log,
) -> list[Row]:
    """A row for the source and for each model; top-1 and speed as far as the settings ask."""
    rows = []
    for name, model in {"source": source, **models}.items():
        price = cost(model)
        agreement, kl, _ = scores.get(name, Agreement(100.0, 0.0, 0))  # the source is like itself
        row = Row(name, price.gflops, price.params_m, agreement, kl)
        if labelled is not None:
            log(f"evaluating {name} on {settings.eval}")
            batches = eval_batches(
                model,
                labelled.val,
                workers=max(0, settings.workers),
                skip_broken=settings.skip_broken,
            )
            score = evaluate(model, batches, model.num_classes, device)
            row.top1, row.top5 = score.top1, score.top5
        rows.append(row)
    if settings.speed and not settings.elastic:  # whose settings `hvt bench` compares
        speed = measure_speed({"source": source, "upcycled": models[best]}, device, log)
        for row in rows:
            row.speed = speed["source" if row.name == "source" else "upcycled"]
    return rows


def ranking_table(ranked: Sequence[Ranked], unpooled: Sequence[HVTConfig]) -> Table:
    """The best candidates, and the unpooled ones wherever they stand."""
    table = Table("candidate, untrained", box=None, header_style="bold")
    for heading in ("GFLOPs", "agreement", "KL", "photos"):
        table.add_column(heading, justify="right")
    for place, row in enumerate(ranked):
        if place < SHOWN or row.config in unpooled:
            table.add_row(
                describe_placement(row.config), f"{row.gflops:.3f}", f"{row.agreement:.1f} %",
                f"{row.kl:.4f}", str(row.photos),
            )  # fmt: skip
    return table


def open_labelled(settings: Settings, source: HVT) -> EvalData | None:
    """The data of `--eval`, its classes found among the source's."""
    if settings.eval is None:
        return None
    if not source.num_classes:
        raise HVTError(
            f"the source has no classifier, so top-1 on {settings.eval} cannot be measured"
        )
    return open_eval(
        settings.eval,
        root=settings.root,
        class_names=source.class_names,
        num_classes=source.num_classes,
        match_by_order=settings.match_by_order,
        in_chans=source.config.in_chans,
    )


def measure_speed(models: dict[str, HVT], device: torch.device, log: Log) -> dict[str, Any]:
    """Images/s of each model by mode and batch, in turns; without a head only PyTorch's."""
    exported = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
    heads = all(model.num_classes for model in models.values())
    modes = list(MODES) if exported and heads and device.type == "cpu" else ["eager"]
    with tempfile.TemporaryDirectory() as folder:
        entries = []
        for name, model in models.items():
            path = Path(folder) / f"{name}.safetensors"
            save(model, path)
            for mode in modes:
                log(f"opening {name} ({MODES[mode]})")
                entries.append((name, open_bench_model(str(path), mode, device, Path(folder))))
        rows = measure([model for _, model in entries], BATCHES, device, note=log)
    speed: dict[str, Any] = {name: {mode: {} for mode in modes} for name in models}
    for row in rows:
        speed[Path(row.model).stem][row.mode][row.batch] = row.images_per_s
    return speed


def as_table(rows: list[Row], head: bool) -> Table:
    """A column for each model, for there are more measures than a terminal has room for."""
    table = Table("", box=None, header_style="bold")
    for row in rows:
        table.add_column(row.name, justify="right")

    def add(name: str, form: str, values: list[float | None]) -> None:
        if any(value is not None for value in values):
            table.add_row(name, *("" if v is None else form.format(v) for v in values))

    add("GFLOPs", "{:.3f}", [row.gflops for row in rows])
    add("parameters (M)", "{:.2f}", [row.params_m for row in rows])
    add("agreement" if head else "cosine similarity", "{:.1f} %", [row.agreement for row in rows])
    add("KL" if head else "1 - cosine", "{:.4f}", [row.kl for row in rows])
    add("top-1", "{:.1f} %", [row.top1 for row in rows])
    add("top-5", "{:.1f} %", [row.top5 for row in rows])
    for mode, words in MODES.items():
        for batch in BATCHES:
            speeds = [row.speed.get(mode, {}).get(batch) for row in rows]
            add(f"images/s, {words}, batch {batch}", "{:.1f}", speeds)
    return table


def to_dict(rows: list[Row], device: torch.device) -> dict[str, Any]:
    return {"rows": [asdict(row) for row in rows], "machine": describe(device)}
