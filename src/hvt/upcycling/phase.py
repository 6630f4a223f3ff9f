"""The phases of a distillation, each a run as of `hvt train`: the tail from a cache, then all."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..data.loader import TrainBatches
from ..data.sources import Data
from ..distributed import DistributedContext
from ..errors import HVTError
from ..evaluation import Score
from ..files import atomic_write
from ..model import HVT
from ..training.engine import Trainer
from ..training.interrupt import Interrupted
from ..training.learner import Learner
from ..training.recipe import Recipe
from ..training.recipe import from_dict as recipe_from_dict
from ..training.state import states, weights_digest
from ..training.watch import Row, clock
from .cache import CHUNK, Cache, CachedRows, Layout, as_row
from .distil import Distiller, HoldoutAgreement, Weights, merit
from .photos import Crops, Photos, Size
from .settings import Settings
from .student import Target

TAIL_SHARE, CACHE_SHARE = 0.3, 0.6
"""Under `minutes`: the share of the tail with its cache, and of that the share of the cache."""
MIN_CHUNKS = 4
"""Chunks of a cache below which the tail would overfit."""


def resume_command(folder: Path) -> str:
    """How to resume an upcycling."""
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
    holdout: HoldoutAgreement
    workers: int
    processes: DistributedContext
    device: torch.device
    console: Console
    log: Callable[[str], None]

    def crops(self) -> Crops:
        interpolation = self.target.source.pretrained_cfg["interpolation"]
        return Crops(self.sizes, self.settings.scale, interpolation)


class Phase(Trainer):
    """A run whose labels are the source's outputs, and whose measure is agreement with it."""

    file = "phase.json"
    measure = "agreement"

    def __init__(
        self,
        work: Work,
        model: HVT,
        recipe: Recipe,
        folder: Path,
        *,
        rows: CachedRows | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.work, self.model, self.rows, self.layout = work, model, rows, layout
        super().__init__(recipe, folder, work.processes, work.device, work.console)

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
            workers=0 if cached else work.workers,
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
            mixup=settings.mixup,
        )

    def _evaluate(self, model: HVT) -> Score:
        return self.work.holdout.measure(model)

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


class Phases:
    """The phases that the settings ask for, in their order."""

    def __init__(self, work: Work) -> None:
        self.work, self.settings, self.processes = work, work.settings, work.processes
        self.epochs = dict(zip(("tail", "all"), work.settings.passes(), strict=True))

    def names(self) -> list[str]:
        return [name for name, epochs in self.epochs.items() if epochs]

    def run(self, name: str, model: HVT) -> Path | None:
        """Train a copy unless that is done → its best weights; None where there are none."""
        folder = self.work.folder / name
        if not self.processes.broadcast((folder / "model.safetensors").exists()):
            if name == "tail":
                self._train_tail(model, folder)
            else:
                self._train_all(model, folder)
            self.processes.barrier()  # for the main process, which writes
        if name == "tail" and self.settings.cache is None and self.processes.is_main_process:
            shutil.rmtree(self.work.folder / "cache", ignore_errors=True)
        best = folder / "best.safetensors"
        return best if best.exists() else None

    def _train_tail(self, model: HVT, folder: Path) -> None:
        """What follows the first pooling, from a cache of what precedes it."""
        settings, work, began = self.settings, self.work, time.monotonic()
        cache = self._open_cache(model)
        chunks = self._chunks(cache)
        if not chunks:
            return
        cache.check_room(chunks)
        work.log(f"the cache: {chunks * cache.batches.batch_size} crops in {cache.folder}")
        try:
            cache.build(chunks, self._progress(cache.batches.batch_size))
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"stopped while building the cache; resume with: {resume_command(work.folder)}"
            ) from error
        rows = CachedRows(cache.paths(chunks))

        def make(epochs: float) -> Phase:
            recipe = self._recipe(folder, epochs, settings.tail_lr)
            return Phase(work, model, recipe, folder, rows=rows, layout=cache.layout)

        share = 60 * (settings.minutes or 0) * self._tail_share()
        left = max(share * (1 - CACHE_SHARE), share - (time.monotonic() - began))
        self._train(make, folder, self.epochs["tail"], left)

    def _train_all(self, model: HVT, folder: Path) -> None:
        settings = self.settings

        def make(epochs: float) -> Phase:
            recipe = self._recipe(
                folder, epochs, settings.lr, layer_decay=settings.layer_decay, ema=settings.ema
            )
            return Phase(self.work, model, recipe, folder)

        tail = (self.work.folder / "tail" / "phase.json").exists()
        left = 60 * (settings.minutes or 0) * (1 - (TAIL_SHARE if tail else 0.0))
        self._train(make, folder, self.epochs["all"], left)

    def _train(
        self, make: Callable[[float], Phase], folder: Path, epochs: float, seconds: float
    ) -> None:
        """Train for so many epochs or, under `minutes`, for so many seconds."""
        began = self.processes.broadcast((folder / "phase.json").exists())
        if self.settings.minutes is not None and not began:
            epochs = _epochs_for(make(1.0), seconds)
        phase = make(epochs)
        resumes = self.processes.broadcast(bool(states(folder / "checkpoints")))
        if phase.run(resume=resumes).stop_asked:
            raise Interrupted(f"stopped; resume with: {resume_command(self.work.folder)}")

    def _recipe(self, folder: Path, epochs: float, lr: float, **values: Any) -> Recipe:
        """A phase as a recipe, which a resumed run reads from its folder.

        The rate is that of its batch, not of 512.
        """
        written, settings = folder / "phase.json", self.settings
        if self.processes.broadcast(written.exists()):
            return recipe_from_dict(json.loads(written.read_text()), str(written))
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

    # ── the cache ───────────────────────────────────────────────────────────────────────────────

    def _open_cache(self, model: HVT) -> Cache:
        settings, work, source = self.settings, self.work, self.work.target.source
        train = work.photos.train
        size = max(2, min(CHUNK, len(train)) // 2 * 2)
        batches = TrainBatches(
            train,
            work.crops(),
            batch_size=size,
            seed=settings.seed,
            workers=work.workers,
            skip_broken=settings.skip_broken,
        )
        if settings.batch_size > size * batches.steps * settings.crops:
            raise HVTError(
                f"{settings.crops} crops of each of {len(train)} photos are too few for a batch of "
                f"{settings.batch_size}: use more --crops or a smaller --batch-size"
            )
        preprocessing = ("mean", "std", "interpolation")
        identity = {
            "source": weights_digest(source),
            "preprocessing": {name: source.pretrained_cfg[name] for name in preprocessing},
            "config": model.config.to_dict(),
            "photos": work.photos.digest,
            "held_out": len(work.photos.val),
            "sizes": work.sizes,
            "scale": settings.scale,
            "seed": settings.seed,
            "chunk": size,
        }
        folder = Path(settings.cache) if settings.cache else work.folder / "cache"
        cache = Cache(
            folder, batches, model, work.target, work.sizes, self.processes, work.device, identity,
            work.log,
        )  # fmt: skip
        if self.processes.is_main_process:
            cache.open()
        self.processes.barrier()
        return cache

    def _tail_share(self) -> float:
        return TAIL_SHARE if self.epochs["all"] else 1.0

    def _chunks(self, cache: Cache) -> int:
        """How many chunks to train the tail on: all or, under `minutes`, those that the cache's
        share of them can build, by the time of one; 0 where that is too few."""
        most, minutes = cache.batches.steps * self.settings.crops, self.settings.minutes
        if minutes is None:
            return most
        written = self.work.folder / "chunks.json"
        if self.processes.broadcast(written.exists()):
            return min(most, int(json.loads(written.read_text())))
        missing = cache.missing(most)
        chunks = most
        if missing:
            first = missing[0]
            cache.check_room(first + 1)
            began = time.monotonic()
            cache.build(first + 1)
            each = max(1e-3, time.monotonic() - began)
            budget = 60 * minutes * self._tail_share() * CACHE_SHARE
            chunks = min(most, first + int(budget / each) * self.processes.world_size)
        if chunks < min(most, MIN_CHUNKS):
            chunks = 0
            if not self.epochs["all"]:
                raise HVTError(
                    f"minutes={minutes:g} are too few for a cache, without which only all blocks "
                    "could train, and all_epochs is 0: begin in another --run-folder with more "
                    "minutes, or without all_epochs"
                )
            self.work.log("the minutes are too few for a cache: all blocks train from the start")
        chunks = self.processes.broadcast(chunks)
        if self.processes.is_main_process:
            with atomic_write(written) as temporary:
                temporary.write_text(json.dumps(chunks))
        self.processes.barrier()
        return chunks

    def _progress(self, each: int) -> Callable[[int, int], None]:
        """A line every 15 seconds while the cache is built."""
        began = printed = time.monotonic()
        first = 0

        def log(done: int, of: int) -> None:
            nonlocal printed, first
            first = first or done - 1
            now = time.monotonic()
            if now - printed > 15 or done == of:
                printed = now
                left = (now - began) / max(1, done - first) * (of - done)
                self.work.log(f"cached {done * each} of {of * each} crops, {clock(left)} left")

        return log


def _epochs_for(phase: Phase, seconds: float) -> float:
    """As many epochs as the seconds allow, by the time of a step, of reading and of evaluating."""
    began = time.monotonic()
    batches = phase.batches.epoch(0)
    next(batches)
    started = time.monotonic() - began  # the reading processes' start included
    began, count = time.monotonic(), 0
    for _ in batches:
        count += 1
        if count == 3:
            break
    reading = (time.monotonic() - began) / max(1, count)
    del batches
    step = phase.learner.seconds_per_step() + reading
    began = time.monotonic()
    phase._evaluate(phase.learner.model)
    evaluating = time.monotonic() - began
    per_epoch = phase.steps * step + evaluating + started
    epochs = max(1 / phase.steps, (seconds - evaluating) / per_epoch)
    return float(phase.processes.broadcast(round(epochs, 4)))
