"""`hvt.fit`: a folder of images in, a classifier of them out."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from .. import distributed
from ..checkpoint.save_load import load, save
from ..data.images import FileImages
from ..data.sources import Data
from ..deploy.embed import Embedder
from ..device import find_device
from ..errors import HVTError
from ..model import HVT
from ..terminal import print_line
from ..training import engine
from ..training.interrupt import Interrupted
from ..training.pipeline import build_model
from ..training.recipe import Recipe
from ..training.run import check_arguments
from ..training.run_lock import found_run, unused_folder
from ..training.trainer import RESUMABLE_FIELDS
from .embeddings import Embedded, EmbeddingCache, cache_folder, embed
from .head import Head, fit_head, temperature
from .report import FitReport, make_report

ASKED = "fit.json"
"""What a fit with minutes was asked for, so that only the same one resumes it."""


@dataclass
class Fitted:
    """The result of a fit."""

    model: HVT
    path: Path
    folder: Path
    report: FitReport


@dataclass(frozen=True)
class Linear:
    """A model with a fitted head, and what it was fitted to."""

    model: HVT
    data: Data
    train: Embedded
    val: Embedded
    head: Head


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

    Fits a linear head to the embeddings of a trained model; with `minutes`, all blocks are then
    fine-tuned with the recipe `finetune`, and the better model is kept. `values` replace fields of
    the recipe (`init`, `balance`, `val_fraction`, `skip_broken`, `seed`, `lr` …). `size` is
    the image size in pixels. Writes `model.safetensors`, `report.html`, `report.json` and
    `worst.png` to `output`. The same call resumes an interrupted fine-tuning.
    """
    began = time.monotonic()
    recipe = _recipe(values | {"data": data, "minutes": minutes}, size)
    with distributed.process_group(recipe.device) as (processes, device):
        screen = processes.console(console)
        main = processes.is_main_process
        if main and output is not None:
            _check_output(Path(output), recipe)
        if not main:
            processes.barrier()  # until the main process has embedded, and kept, the images
        linear = _fit_linear(recipe, device, cache, screen)
        if main:
            processes.barrier()
        folder = processes.broadcast(_make_folder(output, data) if main else None)
        if minutes is not None:
            if main:
                save(linear.model, folder / "linear.safetensors")
                (folder / ASKED).write_text(_asked(recipe), encoding="utf-8")
            last = _seconds_of_report(linear, device) if main else 0.0
            left = processes.broadcast(60 * minutes - (time.monotonic() - began) - last)
            recipe = recipe.replace(minutes=max(0.1, left) / 60, output=str(folder))
    labels = linear.val.labels
    found = {"linear head": (linear.model, linear.head(linear.val.features))}
    print_line(screen, f"linear head: top-1 {_top1(found['linear head'][1], labels):.2f} %")
    if minutes is not None:
        _finetune(recipe, folder, console)
        tuned = load(folder / "best.safetensors", device).float().eval()
        found["fine-tuned"] = tuned, _val_logits(tuned, linear, device)
    top1_of = {name: _top1(logits, labels) for name, (_, logits) in found.items()}
    method = max(top1_of, key=top1_of.__getitem__)
    model, logits = found[method]
    scale = temperature(logits, labels)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.div_(scale)
    report = make_report(
        linear.data, linear.train, linear.val, linear.head.held_out, logits, scale,
        init=str(recipe.init or recipe.model), method=method, top1_of=top1_of,
        seconds=time.monotonic() - began,
    )  # fmt: skip
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
    return recipe.replace(amp="bfloat16") if on_cpu and _fast_bfloat16() else recipe


def _fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself, twice as fast as float32."""
    asked = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # torch has no public name
    return any(getattr(torch.cpu, name, bool)() for name in asked)


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
    try:
        Path(output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HVTError(f"cannot write {output}: {error.strerror}") from error
    return Path(output)


def _fit_linear(
    recipe: Recipe, device: torch.device, cache: str | Path | None, console: Console
) -> Linear:
    built = build_model(recipe)
    model, data = built.model.to(device).float().eval(), built.data
    if not isinstance(data.train, FileImages) or not isinstance(data.val, FileImages):
        raise HVTError(f"{data.name} is not a folder of images: hvt fit takes a folder per class")
    print_line(
        console,
        f"{data.name}: {len(data.train)} training and {len(data.val)} validation images "
        + ("(drawn from the training images) " if data.held_out else "")
        + f"of {len(data.class_names)} classes",
    )
    model.reset_classifier(0)  # a new one is random, and embeddings are kept by the weights
    model.pretrained_cfg.update(label_names=None, num_classes=0)
    embedder = Embedder(model, device, batch_size=32)

    def progress(items: Any, total: int) -> Any:
        quiet = not total or not console.is_terminal
        return track(items, "embedding", total, console=console, transient=True, disable=quiet)

    half = recipe.amp == "bfloat16"
    key = embedder.digest + (" bfloat16" if half else "")
    store = EmbeddingCache(key, cache_folder() if cache is None else Path(cache))
    with torch.autocast(device.type, torch.bfloat16, enabled=half):
        train, val = (embed(embedder, part, store, progress) for part in (data.train, data.val))
    broken = train.broken + val.broken
    if broken and not recipe.skip_broken:
        more = f" ({len(broken) - 1} more: see hvt check)" if len(broken) > 1 else ""
        raise HVTError(f"{broken[0]}{more}; fix or remove it, or use --skip-broken")
    classes = len(data.class_names)
    x, balance = train.features, recipe.balance
    head = fit_head(x, train.labels, classes, balance=balance, seed=recipe.seed)
    model.reset_classifier(classes)
    with torch.no_grad():
        assert isinstance(model.head, torch.nn.Linear)
        model.head.weight.copy_(head.weight)
        model.head.bias.copy_(head.bias)
    model.to(device).pretrained_cfg.update(label_names=data.class_names, num_classes=classes)
    return Linear(model, data, train, val, head)


@torch.inference_mode()
def _seconds_of_report(linear: Linear, device: torch.device) -> float:
    """What another pass over the validation images will take."""
    config, began = linear.model.config, time.perf_counter()
    linear.model(torch.zeros(8, config.in_chans, *config.image, device=device)).sum().item()
    return len(linear.val.labels) * (0.005 + (time.perf_counter() - began) / 8)


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


def _top1(logits: Tensor, labels: Tensor) -> float:
    return 100 * float((logits.argmax(dim=1) == labels).double().mean())


def _val_logits(model: HVT, linear: Linear, device: torch.device) -> Tensor:
    """Of the validation images that could be read before."""
    features = torch.from_numpy(Embedder(model, device, 32)(linear.val.paths))
    with torch.no_grad():
        return model.head(features.to(device)).cpu()
