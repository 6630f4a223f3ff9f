"""One phase of the distillation as a run of `hvt train`'s: the tail from a cache, or all blocks."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .. import distributed
from ..data.loader import TrainBatches
from ..data.sources import Data
from ..evaluation import Score
from ..model import HVT
from ..training.engine import Trainer
from ..training.learner import Learner
from ..training.pipeline import reading_processes
from ..training.recipe import Recipe
from ..training.watch import Row
from .cache import CachedRows, Layout, as_row
from .distil import Distiller, HoldoutAgreement, Weights, merit
from .photos import Crops, Photos, Size
from .settings import Settings
from .student import Target


def resume_command(folder: Path) -> str:
    """How to go on with an upcycling."""
    return shlex.join(["hvt", "upcycle", "--resume", str(folder)])


@dataclass(frozen=True)
class Work:
    """What both phases share."""

    settings: Settings
    folder: Path
    """The whole run's."""
    photos: Photos
    target: Target
    sizes: tuple[Size, ...]
    """Of the source's images and the student's; one where they are the same."""
    held: HoldoutAgreement

    def crops(self) -> Crops:
        interpolation = self.target.source.pretrained_cfg["interpolation"]
        return Crops(self.sizes, self.settings.scale, interpolation)


def phase_recipe(settings: Settings, epochs: float, lr: float, **values: Any) -> Recipe:
    """A phase in the words of a recipe; the rate is that of its batch, not of 512."""
    return Recipe(
        epochs=epochs,
        batch_size=settings.batch_size,
        lr=lr * 512 / settings.batch_size,
        warmup_lr=lr / 100,
        min_lr=lr / 100,
        warmup_epochs=min(1.0, epochs / 10),
        weight_decay=settings.weight_decay,
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
        **({"ema": 0.0} | values),
    )  # fmt: skip


class Phase(Trainer):
    """A run whose labels are the source's answers, and whose measure is agreement with it."""

    file = "phase.json"
    measure = "agreement"

    def __init__(
        self,
        work: Work,
        model: HVT,
        recipe: Recipe,
        folder: Path,
        processes: distributed.DistributedContext,
        device: torch.device,
        console: Console | None,
        *,
        rows: CachedRows | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.work, self.model, self.rows, self.layout = work, model, rows, layout
        super().__init__(recipe, folder, processes, device, console)

    def _learner(self) -> Learner:
        recipe, processes, work = self.recipe, self.processes, self.work
        self.data = Data(
            name=work.photos.name,
            train=work.photos.train,
            val=work.photos.val,
            class_names=(),
            image_size=None,
            held_out=True,
        )
        cached = self.rows is not None
        batches = TrainBatches(
            self.rows if cached else work.photos.train,
            as_row if cached else work.crops(),
            batch_size=recipe.batch_size,
            # Crops that no cache has: its own begin with the seed's.
            seed=recipe.seed if cached else recipe.seed + 1,
            share_of=(processes.rank, 1, processes.world_size),
            workers=0 if cached else reading_processes(recipe.workers, processes, self.device),
            skip_broken=recipe.skip_broken,
            pin_memory=self.device.type == "cuda",
        )
        settings = work.settings
        return Distiller(
            recipe,
            self.model,
            batches,
            processes,
            self.device,
            target=work.target,
            sizes=work.sizes,
            weights=Weights(settings.kl, settings.feature, settings.tokens),
            layout=self.layout,
            gradual=settings.gradual if self.layout is None else 0.0,
            mixup=settings.mixup,
        )

    def _evaluate(self, model: HVT) -> Score:
        return self.work.held.measure(model)

    def _merit(self, row: Row, prefix: str) -> float:
        return merit(row[f"{prefix}_loss"])

    def _check_result(self, loss: float) -> None:
        """The best weights are what counts, or those before the phase."""

    def _best_words(self) -> str:
        best = self.progress.best_top1
        return f"least loss {-math.log(best / 100):.4f}" if best > 0 else "no loss is finite"

    def _resume_command(self) -> str:
        return resume_command(self.work.folder)

    def _announce(self) -> None:
        what = "the tail" if self.layout is not None else "all blocks"
        images = len(self.work.photos.train) if self.rows is None else len(self.rows)
        self._say(
            f"{what}: {images} {'photos' if self.rows is None else 'crops'}, {self.steps} steps "
            f"of {self.recipe.batch_size} an epoch, {self._estimate()}, without reading"
        )
