"""The training itself: plain PyTorch with timm's parts, exact in stopping and going on.

Nothing random has a state: every step seeds itself from (seed, step), every picture from its key.
So the state of a run is its weights, averages, optimizer, counters and table, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from timm.data import Mixup
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import HVTError
from ..evaluate import Score, evaluate
from ..files import whole_file
from ..model import HVT
from ..weights import save
from . import distributed
from .losses import Teacher, find_teacher, label_loss
from .pipeline import Pipeline, build_model, open_pipeline
from .recipe import Recipe, from_dict
from .state import read_state, states, write_state
from .watch import Row, Watcher, clock, draw_curves, write_metrics


class Interrupted(Exception):
    """The run was asked to stop and has saved itself; the message says how to go on."""


@dataclass
class Result:
    """What a finished training gives."""

    folder: Path
    model: HVT
    top1: float
    """Validation top-1 of the better of the last weights and the averaged ones, at the end."""
    best_top1: float
    rows: list[Row]
    seconds: float
    images_per_second: float


@dataclass
class Progress:
    """What must be known, beside the tensors, to go on as if nothing had happened."""

    epoch: int = 0
    step: int = 0
    """Steps done in this epoch."""
    loss_sum: float = 0.0
    loss_steps: int = 0
    bad_steps: int = 0
    """Losses that were not finite, in all."""
    bad_in_a_row: int = 0
    broken: int = 0
    best_top1: float = -1.0
    rows: list[Row] = field(default_factory=list)


def train(recipe: Recipe, name: str = "run", console: Console | None = None) -> Result:
    """Train from the beginning in a new folder."""
    team, device = distributed.join(recipe.device)
    try:
        model_name = recipe.model or Path(recipe.init or "model").stem
        folder = Path(recipe.output or f"runs/{name}-{model_name}")
        existing = team.share(bool(states(folder / "checkpoints")))
        resume = existing and distributed.restarted()
        if existing and not resume:
            raise HVTError(
                f"{folder} already holds a run: go on with hvt train --resume {folder}, "
                "or choose another --output"
            )
        return Trainer(recipe, folder, team, device, console).run(resume)
    finally:
        distributed.leave()


def resume(folder: str | Path, console: Console | None = None) -> Result:
    """Go on with a run where its newest good checkpoint left it."""
    folder = Path(folder)
    described = folder / "recipe.json"
    try:
        recipe = from_dict(json.loads(described.read_text()), str(described))
    except (OSError, ValueError) as error:
        if isinstance(error, HVTError):
            raise
        raise HVTError(
            f"{folder} is not the folder of a run: it has no readable recipe.json"
        ) from error
    team, device = distributed.join(recipe.device)
    try:
        return Trainer(recipe, folder, team, device, console).run(resume=True)
    finally:
        distributed.leave()


class Trainer:
    """One process's part in a training."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        team: distributed.Team,
        device: torch.device,
        console: Console | None,
    ) -> None:
        self.recipe, self.folder, self.team, self.device = recipe, folder, team, device
        self.console = console or Console()
        if recipe.threads:
            torch.set_num_threads(recipe.threads)
        seed_all(recipe.seed, -1)
        self.model, self.data = build_model(recipe)
        self.pipeline: Pipeline = open_pipeline(recipe, self.model, self.data, team, device)
        self.model.to(device)
        self.model.set_grad_checkpointing(recipe.grad_checkpointing)
        self.ema = ModelEmaV3(self.model, decay=recipe.ema) if recipe.ema else None
        self.optimizer = create_optimizer_v2(
            self.model,
            opt="adamw",
            lr=recipe.scaled_lr,
            weight_decay=recipe.weight_decay,
            layer_decay=recipe.layer_decay,
            betas=(0.9, 0.999),
            eps=1e-8,
            fused=device.type in ("cpu", "cuda"),
        )
        self.steps = self.pipeline.train.steps
        total = self.steps * recipe.epochs
        warmup = min(int(recipe.warmup_epochs * self.steps), total - 1)
        self.schedule = CosineLRScheduler(
            self.optimizer,
            t_initial=total - warmup,
            lr_min=min(recipe.min_lr, recipe.scaled_lr),
            warmup_t=warmup,
            warmup_lr_init=min(recipe.warmup_lr, recipe.scaled_lr),
            warmup_prefix=True,
            t_in_epochs=False,
        )
        self.mixup = None
        if recipe.mixup or recipe.cutmix:
            self.mixup = Mixup(
                recipe.mixup,
                recipe.cutmix,
                prob=recipe.mixup_prob,
                switch_prob=recipe.mixup_switch,
                label_smoothing=recipe.smoothing,
                num_classes=self.model.num_classes,
            )
        self.teacher: Teacher | None = None
        if recipe.teacher:
            self.teacher = find_teacher(
                recipe.teacher, self.model.num_classes, recipe.distill, recipe.distill_tau
            ).to(device)
        self.amp = _amp(recipe.amp, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.amp is torch.float16)
        self.progress = Progress()
        self.network: nn.Module = self.model
        if recipe.compile:
            self.network = torch.compile(self.network)  # type: ignore[assignment]
        if team.size > 1:
            ids = [device.index] if device.type == "cuda" else None
            self.network = DistributedDataParallel(self.network, device_ids=ids)
        self.stop = False

    # ── the run ─────────────────────────────────────────────────────────────────────────────────

    def run(self, resume: bool) -> Result:
        """Train until the last epoch, or until asked to stop."""
        if resume:
            self._restore()
        elif self.team.leads:
            self._open_folder()
        self.team.wait()
        watcher = Watcher(
            self.console, self.folder, self.recipe.tensorboard, quiet=not self.team.leads
        )
        self._announce(watcher)
        started, pictures = time.perf_counter(), 0
        self.saved = time.monotonic()
        try:
            with self._signals():
                for epoch in range(self.progress.epoch, self.recipe.epochs):
                    began, first = time.perf_counter(), self.progress.step
                    self._epoch(epoch, watcher)
                    done = (self.steps - first) * self.recipe.batch_size
                    pictures += done
                    speed = done / (time.perf_counter() - began)
                    self._close_epoch(epoch, watcher, speed, started)
        finally:
            watcher.close()
        seconds = time.perf_counter() - started
        return self._finish(seconds, pictures / seconds if seconds else 0.0)

    def _epoch(self, epoch: int, watcher: Watcher) -> None:
        progress, recipe = self.progress, self.recipe
        self.network.train()
        watcher.begin(epoch, recipe.epochs, progress.step, self.steps)
        batches = self.pipeline.train.epoch(epoch, progress.step)
        began, first = time.perf_counter(), progress.step
        while progress.step < self.steps:
            loss = self._step(epoch, batches)
            progress.step += 1
            elapsed = time.perf_counter() - began
            watcher.step(
                progress.step,
                self.steps,
                loss,
                (progress.step - first) * recipe.batch_size / elapsed,
            )
            stop, due = self.team.any(self.device, self.stop, self._due())
            if stop or due:
                self._save()
            if stop:
                raise Interrupted(
                    f"stopped after step {progress.step} of epoch {epoch + 1}; "
                    f"go on with: hvt train --resume {self.folder}"
                )

    def _step(self, epoch: int, batches: Iterator[Any]) -> float:
        """One optimizer step on one global batch; returns its mean loss over all processes."""
        recipe, progress = self.recipe, self.progress
        update = epoch * self.steps + progress.step
        self.schedule.step_update(update + 1)
        pieces = recipe.accumulate
        total = torch.zeros((), dtype=torch.float64)
        for piece in range(pieces):
            batch = next(batches)
            progress.broken += batch.broken
            images = batch.images.to(self.device, non_blocking=True)
            labels = batch.labels.to(self.device, non_blocking=True)
            # All processes and pieces draw alike, for the whole batch, and each uses its part.
            seed_all(recipe.seed, update)
            target = labels
            if self.mixup:
                images, target = self.mixup(images, labels)
            self.model.set_batch_rows(*self.pipeline.rows(piece))
            last = piece == pieces - 1
            with (
                self._sync(last),
                torch.autocast(self.device.type, self.amp, enabled=self.amp is not None),
            ):
                logits = self.network(images)
                loss = label_loss(logits, target, recipe.smoothing)
                if self.teacher:
                    alpha = recipe.distill_alpha
                    loss = (1 - alpha) * loss + alpha * self.teacher.loss(logits, images)
                self.scaler.scale(loss / pieces).backward()
            total += loss.detach().double().cpu() / pieces
        mean = (self.team.sum(total.to(self._wire())) / self.team.size).item()
        if math.isfinite(mean):
            self._update()
            progress.loss_sum += mean
            progress.loss_steps += 1
            progress.bad_in_a_row = 0
        else:
            progress.bad_steps += 1
            progress.bad_in_a_row += 1
            if progress.bad_in_a_row >= recipe.max_bad_steps:
                raise HVTError(
                    f"the loss was not finite {progress.bad_in_a_row} times in a row (epoch "
                    f"{epoch + 1}, step {progress.step + 1}): lower --lr or set --clip-grad; "
                    f"the checkpoints in {self.folder} are as they were"
                )
        self.optimizer.zero_grad(set_to_none=True)
        return mean

    def _update(self) -> None:
        if self.recipe.clip_grad:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema:
            self.ema.update(self.model)

    def _close_epoch(self, epoch: int, watcher: Watcher, speed: float, started: float) -> None:
        progress, recipe = self.progress, self.recipe
        row: Row = {
            "epoch": epoch + 1,
            "lr": self.optimizer.param_groups[-1]["lr"],
            "train_loss": progress.loss_sum / max(1, progress.loss_steps),
            "val_loss": "", "val_top1": "", "val_top5": "",
            "ema_loss": "", "ema_top1": "", "ema_top5": "",
            "bad_steps": progress.bad_steps,
            "broken": progress.broken,
        }  # fmt: skip
        if (epoch + 1) % recipe.eval_every == 0 or epoch + 1 == recipe.epochs:
            for prefix, model in self._candidates():
                score = self._evaluate(model)
                row[f"{prefix}_loss"], row[f"{prefix}_top1"] = score.loss, score.top1
                row[f"{prefix}_top5"] = score.top5
                if score.top1 > progress.best_top1:
                    progress.best_top1 = score.top1
                    if self.team.leads:
                        save(model, self.folder / "best.safetensors")
        progress.rows.append(row)
        progress.epoch, progress.step = epoch + 1, 0
        progress.loss_sum, progress.loss_steps = 0.0, 0
        per_epoch = (time.perf_counter() - started) / (epoch + 1 - self.first_epoch)
        watcher.epoch(
            row, progress.step, recipe.epochs, speed, per_epoch * (recipe.epochs - epoch - 1)
        )
        if self.team.leads:
            write_metrics(self.folder / "metrics.csv", progress.rows)
        self._save()

    def _finish(self, seconds: float, speed: float) -> Result:
        rows = self.progress.rows
        last = rows[-1]
        averaged = self.ema is not None and last["ema_top1"] > last["val_top1"]
        model = self._candidates()[-1][1] if averaged else self.model
        top1 = last["ema_top1"] if averaged else last["val_top1"]
        if self.team.leads:
            save(model, self.folder / "model.safetensors")
            write_metrics(self.folder / "metrics.csv", rows)
            draw_curves(self.folder / "curves.png", {self.recipe.model or "model": rows})
            what = " (averaged weights)" if averaged else ""
            self.console.print(
                f"{self.folder}: top-1 {top1:.2f} %{what}, best {self.progress.best_top1:.2f} %, "
                f"{clock(seconds)}, {speed:.0f} images/s; weights in model.safetensors",
                highlight=False,
                soft_wrap=True,
            )
        return Result(
            self.folder, model.eval(), top1, self.progress.best_top1, rows, seconds, speed
        )

    # ── its parts ───────────────────────────────────────────────────────────────────────────────

    def _candidates(self) -> list[tuple[str, HVT]]:
        models = [("val", self.model)]
        if self.ema:
            averaged: HVT = self.ema.module
            models.append(("ema", averaged))
        return models

    def _evaluate(self, model: HVT) -> Score:
        return evaluate(
            model, self.pipeline.val, model.num_classes, self.device, self.team, self.amp
        )

    def _sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        if isinstance(self.network, DistributedDataParallel) and not last:
            return self.network.no_sync()
        return contextlib.nullcontext()

    def _wire(self) -> torch.device:
        """Where tensors must lie to travel between processes."""
        return self.device if self.device.type == "cuda" else torch.device("cpu")

    def _announce(self, watcher: Watcher) -> None:
        recipe, shares = self.recipe, self.pipeline.train.share_of[2]
        self.first_epoch = self.progress.epoch
        config = self.model.config
        watcher.say(
            f"{recipe.model or recipe.init}: {config.image[0]}×{config.image[1]}, tokens "
            f"{' → '.join(map(str, config.tokens))}; {self.data.name}: {len(self.data.train)} "
            f"training and {len(self.data.val)} validation pictures, "
            f"{len(self.data.class_names)} classes"
            + (" (held out of the training data)" if self.data.held_out else "")
        )
        left = self.steps * (recipe.epochs - self.progress.epoch) - self.progress.step
        each = self._time_step()
        watcher.say(
            f"batch {recipe.batch_size} = {self.team.size} process(es) × {recipe.accumulate} × "
            f"{recipe.batch_size // shares}; learning rate {recipe.scaled_lr:.2e}; "
            f"{self.steps} steps an epoch, {left} to go; about {clock(each * left)} "
            f"({recipe.batch_size / each:.0f} images/s) on {self.device}, without evaluation"
        )

    def _time_step(self) -> float:
        """Seconds of a step without its update: one to warm up, one measured; changes nothing."""
        pieces = self.recipe.accumulate
        size = self.recipe.batch_size // self.pipeline.train.share_of[2]
        images = torch.zeros(size, self.model.config.in_chans, *self.model.config.image)
        images = images.to(self.device)
        self.model.train()
        self.model.set_batch_rows(None)
        seconds = 0.0
        for _ in range(2):
            began = time.perf_counter()
            with torch.autocast(self.device.type, self.amp, enabled=self.amp is not None):
                self.model(images).float().logsumexp(1).mean().backward()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
        self.optimizer.zero_grad(set_to_none=True)
        return seconds * pieces

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and a scheduler's SIGTERM let the step end, save, and say how to go on."""

        def ask(number: int, _: Any) -> None:
            if self.stop and number == signal.SIGINT:
                raise KeyboardInterrupt  # a second Ctrl-C means now
            self.stop = True

        try:
            before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread: signals are somebody else's
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # ── state ───────────────────────────────────────────────────────────────────────────────────

    def _open_folder(self) -> None:
        try:
            (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HVTError(f"cannot write {self.folder}: {error.strerror}") from error
        described = self.recipe.replace(output=str(self.folder)).to_dict()
        described = {k: v for k, v in described.items() if v is not None}
        with whole_file(self.folder / "recipe.json") as temporary:
            temporary.write_text(json.dumps(described, indent=2) + "\n")
        with whole_file(self.folder / "config.json") as temporary:
            temporary.write_text(json.dumps(self.model.config.to_dict(), indent=2) + "\n")

    def _due(self) -> bool:
        """Whether it is time for a checkpoint by the leader's clock."""
        minutes = (time.monotonic() - self.saved) / 60
        return self.team.leads and minutes >= self.recipe.checkpoint_minutes

    def _save(self) -> None:
        self.saved = time.monotonic()
        progress = self.progress
        if not self.team.leads:
            return
        write_state(
            self.folder / "checkpoints",
            progress.epoch * self.steps + progress.step,
            {
                "model": self.model.state_dict(),
                "ema": self.ema.module.state_dict() if self.ema else None,
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "progress": vars(progress),
            },
        )

    def _restore(self) -> None:
        state, passed = read_state(self.folder / "checkpoints")
        for sentence in passed:
            if self.team.leads:
                self.console.print(sentence, highlight=False, soft_wrap=True)
        if state is None:
            if self.team.leads:
                self._open_folder()
            return  # stopped before its first checkpoint: from the beginning, it is the same
        self.model.load_state_dict(state["model"])
        if self.ema:
            self.ema.module.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.progress = Progress(**state["progress"])


def seed_all(seed: int, update: int) -> None:
    """Seed what mixup (numpy) and stochastic depth (torch) draw from, for one step."""
    mixed = (seed * 0x9E3779B97F4A7C15 + (update + 2) * 0xBF58476D1CE4E5B9) % 2**63
    torch.manual_seed(mixed)
    np.random.seed(mixed % 2**32)


def _amp(name: str, device: torch.device) -> torch.dtype | None:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else None
    return {"off": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
