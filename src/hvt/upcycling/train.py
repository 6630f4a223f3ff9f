"""The distillation as a run of `hvt train`'s, with the source's outputs in place of labels."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..data.loader import TrainBatches
from ..distributed import DistributedContext
from ..model import HVT
from ..training.interrupt import Interrupted
from ..training.learner import Learner
from ..training.optimize import seed_all
from ..training.recipe import Recipe
from ..training.recipe import from_dict as recipe_from_dict
from ..training.state import newest_state
from ..training.trainer import Trainer
from .photos import Crops, Photos, Size
from .settings import EPOCHS, Settings

RECIPE = "recipe.json"


def resume_command(folder: Path) -> str:
    """How to resume an upcycling."""
    return shlex.join(["hvt", "upcycle", "--resume", str(folder)])


def started_by() -> str:
    """The command that started this, paths without their folders."""
    program, *words = map(_without_folder, sys.argv)
    return shlex.join(["hvt" if program == "__main__.py" else program, *words])


def _without_folder(word: str) -> str:
    """A path's last part, also of `--flag=PATH`."""
    flag, sign, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return flag + sign + (Path(value).name if "/" in value else value)


@dataclass(frozen=True)
class Work:
    """What a distillation needs."""

    settings: Settings
    folder: Path
    """The whole run's; the training has its own inside."""
    photos: Photos
    interpolation: str
    sizes: tuple[Size, ...]
    """Of the crops: the source's and the student's; one where they are the same."""
    learner: Callable[..., Learner]
    """Takes recipe, model, batches, processes and device."""
    evaluate: Callable[[HVT], dict[str, float]]
    measure: str
    """Which of the figures of `evaluate` the best weights are chosen by: the least."""
    workers: int
    processes: DistributedContext
    device: torch.device
    console: Console


def distil(work: Work, model: HVT) -> Path | None:
    """Train a model unless that is done → its best weights; None where none are finite."""
    folder, settings, processes = work.folder / "distilled", work.settings, work.processes
    if not processes.broadcast((folder / "model.safetensors").exists()):
        written = folder / RECIPE
        began = processes.broadcast(written.exists())
        epochs = EPOCHS if settings.epochs is None else settings.epochs
        if began:
            recipe = recipe_from_dict(json.loads(written.read_text()), str(written))
        elif settings.minutes is not None:
            trial = _trainer(work, model, _recipe(settings, 1.0), folder)
            recipe = _recipe(settings, _epochs_for(trial, 60 * settings.minutes))
        else:
            recipe = _recipe(settings, epochs)
        state = newest_state(folder / "checkpoints", processes, work.console)
        if _trainer(work, model, recipe, folder).run(state).stop_asked:
            raise Interrupted(f"stopped; resume with: {resume_command(work.folder)}")
        processes.barrier()  # for the main process, which writes
    best = folder / "best.safetensors"
    return best if best.exists() else None


def _trainer(work: Work, model: HVT, recipe: Recipe, folder: Path) -> Trainer:
    """A run whose labels are the source's outputs, and whose measure is the distance to them."""
    settings, processes, device = work.settings, work.processes, work.device
    batches = TrainBatches(
        work.photos.train,
        Crops(work.sizes, settings.scale, work.interpolation),
        batch_size=recipe.batch_size,
        seed=recipe.seed + 1,  # published weights were trained on these crops
        shard_of=(processes.rank, 1, processes.world_size),
        workers=work.workers,
        skip_broken=recipe.skip_broken,
        pin_memory=device.type == "cuda",
    )
    seed_all(recipe.seed, -1, device)
    return Trainer(
        work.learner(recipe, model, batches, processes, device),
        folder,
        work.console,
        evaluate=work.evaluate,
        measure=work.measure,
        direction="min",
        identity={"photos": work.photos.digest},
        about=f"distilling on {len(work.photos.train)} photos",
        resume_with=resume_command(work.folder),
        recipe_file=RECIPE,
        allow_nonfinite=True,
    )


def _recipe(settings: Settings, epochs: float) -> Recipe:
    """The settings as a recipe; the rate is that of its batch, not of 512."""
    lr = settings.lr
    return Recipe(
        epochs=epochs,
        batch_size=settings.batch_size,
        lr=lr * 512 / settings.batch_size,
        warmup_lr=lr / 100,
        min_lr=lr / 100,
        warmup_epochs=min(1.0, epochs / 10),
        layer_decay=settings.layer_decay,
        weight_decay=settings.weight_decay,
        ema=settings.ema,
        smoothing=0.0, mixup=0.0, cutmix=0.0, rand_augment="", color_jitter=0.0, erase=0.0,
        repeats=1,
        clip_grad=1.0,
        device=settings.device,
        amp=settings.amp,
        workers=settings.workers,
        threads=settings.threads,
        seed=settings.seed,
        skip_broken=settings.skip_broken,
        checkpoint_minutes=settings.checkpoint_minutes,
    )  # fmt: skip


def _epochs_for(trainer: Trainer, seconds: float) -> float:
    """As many epochs as the seconds allow, by the time of a step, of reading and of evaluating."""
    batches = trainer.batches.epoch(0)
    started = _seconds(next, batches)  # the reading processes' start included
    few = itertools.islice(batches, 3)
    reading = _seconds(list, few) / 3
    del batches, few
    step = trainer.learner.seconds_per_step() + reading
    evaluating = _seconds(trainer.evaluate, trainer.learner.model)
    per_epoch = trainer.steps * step + evaluating + started
    epochs = max(1 / trainer.steps, (seconds - evaluating) / per_epoch)
    return float(trainer.processes.broadcast(round(epochs, 4)))


def _seconds(call: Callable[[Any], object], argument: Any) -> float:
    began = time.monotonic()
    call(argument)
    return time.monotonic() - began
