"""`hvt.fit`: a folder of images in, a classifier of them out."""

from __future__ import annotations

import contextlib
import copy
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .. import distributed
from ..checkpoint.save_load import load, save
from ..data.images import FileImages
from ..deploy.embed import Embedder
from ..device import fast_bfloat16, find_device
from ..errors import HVTError
from ..model import HVT
from ..terminal import print_line
from ..training import engine
from ..training.interrupt import Interrupted
from ..training.pipeline import build_model, class_weights, summary
from ..training.recipe import Recipe
from ..training.run import check_arguments
from ..training.run_lock import found_run, unused_folder
from ..training.trainer import RESUMABLE_FIELDS
from .embeddings import EmbeddingCache, cache_folder, embed
from .head import can_cut, fit_head, fit_tail, tail, without_tail
from .report import FitReport, Tried, make_report

ASKED = "fit.json"
"""What a fit with minutes was asked for, so that only the same one resumes it."""


@dataclass
class Fitted:
    """The result of a fit."""

    model: HVT
    path: Path
    folder: Path
    report: FitReport


def fit(
    data: str | Path,
    output: str | Path | None = None,
    *,
    minutes: float | None = None,
    size: int | None = None,
    cache: str | Path | None = None,
    console: Console | None = None,
    **values: Any,
) -> Fitted:
    """Fit a classifier to a folder with one folder per class, or with `train` and `val`.

    Fits a linear head to the embeddings of a trained model, then the last MLP and the head; with
    `minutes`, all blocks are then fine-tuned with the recipe `finetune`. The best model on the
    validation images is kept. `values` replace fields of the recipe (`init`, `balance`,
    `val_fraction`, `skip_broken`, `seed`, `lr` …). `size` is the image size in pixels. Writes
    `model.safetensors`, `report.html`, `report.json` and `worst.png` to `output`. The same call
    resumes an interrupted fine-tuning.
    """
    began = time.monotonic()
    recipe = _recipe(values | {"data": data, "minutes": minutes}, size)
    with distributed.process_group(recipe.device) as (processes, device):
        screen = processes.console(console)
        main = processes.is_main_process
        if main and output is not None:
            _check_output(Path(output), recipe)
        tried = _fit_heads(recipe, device, cache, screen) if main else None
        folder = processes.broadcast(_make_folder(output, data) if main else None)
        tried = tried or _fit_heads(recipe, device, cache, screen)  # on the cached embeddings
        if minutes is not None:
            start, last = tried.models["linear head"], 0.0
            if main:
                save(start, folder / "linear.safetensors")
                (folder / ASKED).write_text(_asked(recipe), encoding="utf-8")
                some, at = tried.val.paths[:32], time.monotonic()
                Embedder(start, device, 32)(some)  # as the last pass will, before the report
                last = 5 + len(tried.val.paths) / len(some) * (time.monotonic() - at)
            left = processes.broadcast(60 * minutes - (time.monotonic() - began) - last)
            recipe = recipe.replace(minutes=max(0.1, left) / 60, output=str(folder))
    if minutes is not None:
        _finetune(recipe, folder, console)
        tuned = load(folder / "best.safetensors", device).float().eval()
        features = torch.from_numpy(Embedder(tuned, device, 32)(tried.val.paths))
        tried.add("fine-tuned", tuned, features.to(device), screen)
    report = make_report(tried, str(recipe.init or recipe.model), began)
    model = tried.models[report.method]
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.div_(report.temperature)
    if main:
        save(model, folder / "model.safetensors")
        report.write(folder)
    for text in report.warnings:
        print_line(screen, f"warning: {text}")
    return Fitted(model, folder / "model.safetensors", folder, report)


def _recipe(values: dict[str, Any], size: int | None) -> Recipe:
    """`finetune` with other values, paths as text."""
    plain = {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
    shape = {} if size is None else {"img_size": size}
    recipe = check_arguments("finetune", None, False, plain | shape)[1]
    on_cpu = recipe.amp == "auto" and find_device(recipe.device).type == "cpu"
    return recipe.replace(amp="bfloat16") if on_cpu and fast_bfloat16() else recipe


def _check_output(folder: Path, recipe: Recipe) -> None:
    """Raise an error for a folder with results, unless the same fine-tuning was stopped there."""
    asked = folder / ASKED
    resumes = recipe.minutes and asked.exists() and not (folder / "report.json").exists()
    if resumes and asked.read_text(encoding="utf-8") != _asked(recipe):
        raise HVTError(
            f"{folder} was started by a different command: repeat it, or choose another --output"
        )
    if (found := found_run(folder)) and not resumes:
        raise HVTError(f"{folder} already contains a {found}: choose another --output")


def _asked(recipe: Recipe) -> str:
    """What a fit was asked for, but for where it runs and how long."""
    free = {"minutes", *RESUMABLE_FIELDS} - {"init", "epochs"}
    values = {name: value for name, value in recipe.to_dict().items() if name not in free}
    return json.dumps(values, indent=2) + "\n"


def _make_folder(output: str | Path | None, data: str | Path) -> Path:
    if output is None:
        return unused_folder(Path(f"runs/fit-{Path(data).resolve().name}"))
    with contextlib.suppress(OSError):  # the error of whoever writes there says more
        Path(output).mkdir(parents=True, exist_ok=True)
    return Path(output)


def _fit_heads(
    recipe: Recipe, device: torch.device, cache: str | Path | None, console: Console
) -> Tried:
    """Embed the images; fit a linear head and, where it sees only the class token, the last MLP."""
    built = build_model(recipe)
    model, data = built.model.to(device).float().eval(), built.data
    if not isinstance(data.train, FileImages) or not isinstance(data.val, FileImages):
        raise HVTError(f"{data.name} is not a folder of images: hvt fit takes a folder per class")
    print_line(console, summary(recipe, built))
    model.reset_classifier(0)  # a new one is random, and embeddings are kept by the weights
    model.pretrained_cfg.update(label_names=None, num_classes=0)
    has_tail, half = can_cut(model), recipe.amp == "bfloat16"
    embedder = Embedder(without_tail(model) if has_tail else model, device, batch_size=32)
    key = embedder.digest + " before the last MLP" * has_tail + " bfloat16" * half
    store = EmbeddingCache(key, cache_folder() if cache is None else Path(cache))
    with torch.autocast(device.type, torch.bfloat16, enabled=half):
        train, val = (embed(embedder, part, store, console) for part in (data.train, data.val))
    broken = train.broken + val.broken
    if broken and not recipe.skip_broken:
        more = f" ({len(broken) - 1} more: see hvt check)" if len(broken) > 1 else ""
        raise HVTError(f"{broken[0]}{more}; fix or remove it, or use --skip-broken")
    x, val_x = train.features.to(device), val.features.to(device)
    if has_tail:
        with torch.no_grad():
            train = replace(train, features=tail(model, x).cpu())
            val = replace(val, features=tail(model, val_x).cpu())
    labels, classes, weights = train.labels, len(data.class_names), class_weights(recipe, data)
    model.reset_classifier(classes)
    model.pretrained_cfg.update(label_names=data.class_names, num_classes=classes)
    assert isinstance(model.head, torch.nn.Linear)
    held_out, _ = fit_head(model.head, train.features, labels, weights, recipe.seed)
    tried = Tried(data, train, val, held_out)
    tried.add("linear head", model, val.features.to(device), console)
    if has_tail:
        model = copy.deepcopy(model)
        fit_tail(model, x, labels.to(device), weights, recipe.seed)
        with torch.no_grad():
            tried.add("last MLP", model, tail(model, val_x), console)
    return tried


def _finetune(recipe: Recipe, folder: Path, console: Console | None) -> None:
    """Train from the linear head, or resume that."""
    try:
        if (folder / "recipe.json").exists():  # `data` is checked to be that of the run
            engine.resume(folder, console, data=recipe.data, root=recipe.root)
        else:
            start = recipe.replace(init=str(folder / "linear.safetensors"), model=None)
            engine.train(start, "fit", console)
    except Interrupted as error:
        where, _, _ = str(error).partition(";")
        raise Interrupted(f"{where}; resume with the same command and --output {folder}") from None
