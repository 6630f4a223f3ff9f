"""`hvt.fit`: a folder of images in, a classifier of them out."""

from __future__ import annotations

import math
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
from ..errors import HVTError
from ..model import HVT
from ..terminal import print_line
from ..training import engine
from ..training.interrupt import Interrupted
from ..training.pipeline import build_model
from ..training.recipe import Recipe
from ..training.run import check_arguments
from ..training.run_lock import found_run, unused_folder
from .embeddings import Embedded, EmbeddingCache, cache_folder, embed
from .head import Head, fit_head, temperature
from .report import FitReport, make_report


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

    A linear head on the embeddings of a trained model; with `minutes` all blocks are fine-tuned
    from there by the recipe `finetune`, of which `values` replace fields (`init`, `balance`,
    `val_fraction`, `skip_broken`, `seed`, `lr` …), and the better of the two is kept. `size` is
    the image size in pixels. Writes `model.safetensors`, `report.html`, `report.json` and
    `worst.png` to `output`. The same call resumes a fine-tuning that was stopped.
    """
    began = time.monotonic()
    recipe = _recipe(values | {"data": data, "minutes": minutes}, size)
    with distributed.process_group(recipe.device) as (processes, device):
        screen = processes.console(console)
        main = processes.is_main_process
        folder = processes.broadcast(_folder(output, data) if main else None)
        if not main:
            processes.barrier()  # until the main process has embedded, and kept, the images
        linear = _fit_linear(recipe, device, cache, screen)
        if main:
            save(linear.model, folder / "linear.safetensors")
            processes.barrier()
        if minutes is not None:
            left = 60 * minutes - (time.monotonic() - began)
            recipe = processes.broadcast(_plan(recipe, linear, device, left, size is None))
            recipe = recipe.replace(output=str(folder))
    model, labels = linear.model, linear.val.labels
    logits = linear.head(linear.val.features)
    top1_of = {"linear head": 100 * float((logits.argmax(dim=1) == labels).double().mean())}
    print_line(screen, f"linear head: top-1 {top1_of['linear head']:.2f} %")
    method = "linear head"
    if minutes is not None:
        top1_of["fine-tuned"] = _finetune(recipe, folder, console)
        method = max(top1_of, key=top1_of.__getitem__)
    if method == "fine-tuned":
        model = load(folder / "best.safetensors", device).float().eval()
        logits = _val_logits(model, linear, device)
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
    return check_arguments("finetune", None, False, plain | shape)[1]


def _folder(output: str | Path | None, data: str | Path) -> Path:
    """A new folder, or that of a fine-tuning that was stopped."""
    if output is None:
        return unused_folder(Path(f"runs/fit-{Path(data).resolve().name}"))
    folder = Path(output)
    found = found_run(folder)
    if found and ((folder / "report.json").exists() or not (folder / "recipe.json").exists()):
        raise HVTError(f"{output} has a {found} already: choose another --output")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
    store = EmbeddingCache(embedder, cache_folder() if cache is None else Path(cache))

    def progress(items: Any, total: int) -> Any:
        quiet = not total or not console.is_terminal
        return track(items, "embedding", total, console=console, transient=True, disable=quiet)

    train, val = (embed(embedder, part, store, progress) for part in (data.train, data.val))
    broken = train.broken + val.broken
    if broken and not recipe.skip_broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise HVTError(f"{broken[0]}{more}: fix or remove it, or use --skip-broken")
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


def _plan(
    recipe: Recipe, linear: Linear, device: torch.device, seconds: float, enlarge: bool
) -> Recipe:
    """The recipe with the precision, image size and minutes that suit the time and the machine.

    Some CPUs multiply bfloat16 twice as fast as float32, others slower, and torch does not tell.
    Images a quarter larger have more to see, if there is time for 20 epochs of them.
    """
    model, batch = linear.model, 8
    height, width = model.config.image
    images = torch.zeros(batch, model.config.in_chans, height, width, device=device)
    taken: dict[str, float] = {}
    amps = ("off", "bfloat16") if recipe.amp == "auto" and device.type == "cpu" else (recipe.amp,)
    for amp in amps * 2:
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp == "bfloat16"):
            loss = model(images).float().logsumexp(1).mean()
        loss.backward()
        loss.item()  # waits for a GPU
        taken[amp] = min((time.perf_counter() - began) / batch, taken.get(amp, math.inf))
    model.zero_grad(set_to_none=True)
    amp = min(taken, key=taken.__getitem__)
    patch = model.config.patch_size
    larger = tuple(patch * round(1.25 * side / patch) for side in (height, width))
    ratio = 1.3 * larger[0] * larger[1] / (height * width)  # with what grows faster than the pixels
    shape = {}
    if enlarge and seconds > 20 * len(linear.train.labels) * taken[amp] * ratio:
        shape = {"img_size": larger}
    report = len(linear.val.labels) * (0.005 + max(taken.values()) / 3 * (ratio if shape else 1))
    return recipe.replace(shape, amp=amp, minutes=max(0.1, seconds - report) / 60)


def _finetune(recipe: Recipe, folder: Path, console: Console | None) -> float:
    """Train from the linear head, or resume that; the best validation top-1."""
    try:
        if (folder / "recipe.json").exists():
            result = engine.resume(folder, console)
        else:
            start = recipe.replace(init=str(folder / "linear.safetensors"), model=None)
            result = engine.train(start, "fit", console)
    except Interrupted as error:
        where, _, _ = str(error).partition(";")
        raise Interrupted(f"{where}; resume with the same command and --output {folder}") from None
    return result.best or 0.0


def _val_logits(model: HVT, linear: Linear, device: torch.device) -> Tensor:
    """Of the validation images that could be read before."""
    features = torch.from_numpy(Embedder(model, device, 32)(linear.val.paths))
    with torch.no_grad():
        return model.head(features.to(device)).cpu()
