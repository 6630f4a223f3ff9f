"""What learns: a model with its average, optimizer and teacher, one global batch at a time.

With several processes the model is wrapped in DistributedDataParallel (DDP).

Nothing random has a state: every step seeds itself from (seed, step), every image from its key,
and dropout from (seed, step, shard of the batch).
So what `Learner.state` gives, and the number of steps done, is all there is to know.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..data.loader import Batch, TrainBatches
from ..distributed import DistributedContext, collective_device
from ..errors import HVTError
from ..model import HVT
from .optimize import (
    choose_precision,
    make_mixup,
    make_optimizer,
    make_schedule,
    seed_all,
    seed_dropout,
)
from .recipe import Recipe
from .teacher import Teacher, find_teacher

Flags = Callable[[], Sequence[float]]


@dataclass(frozen=True)
class Step:
    """What came of one global batch, over all processes."""

    loss: float
    taken: bool
    """False where the loss or a gradient was not finite: nothing has changed then."""
    broken: int
    """Unreadable images that were replaced by others."""
    flags: tuple[float, ...] = ()
    """Each flag, summed over all processes."""


class Learner:
    """One process's part in learning."""

    def __init__(
        self,
        recipe: Recipe,
        model: HVT,
        batches: TrainBatches,
        processes: DistributedContext,
        device: torch.device,
        class_weights: Tensor | None = None,
    ) -> None:
        self.recipe, self.batches = recipe, batches
        self.processes, self.device = processes, device
        self.model = model.to(device)
        self.class_weights = None if class_weights is None else class_weights.to(device)
        freeze(model, recipe.freeze)
        self.model.set_grad_checkpointing(recipe.grad_checkpointing)
        self.ema: ModelEmaV3 | None = None
        if recipe.ema:  # a model's buffers are constants
            self.ema = ModelEmaV3(self.model, decay=recipe.ema, exclude_buffers=True)
        self.optimizer = self._optimizer()
        self.schedule = make_schedule(self.optimizer, recipe, batches.steps)
        self.mixup = make_mixup(recipe, model.num_classes)
        self.teacher: Teacher | None = None
        if recipe.teacher:
            kind, tau = recipe.distill, recipe.distill_tau
            self.teacher = find_teacher(recipe.teacher, self.model, kind, tau).to(device)
        self.amp = choose_precision(recipe.amp, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.amp is torch.float16)
        self.network: nn.Module = self._network()
        if recipe.compile:
            self.network = torch.compile(self.network)  # type: ignore[assignment]
        if processes.world_size > 1:
            ids = [device.index] if device.type == "cuda" else None
            self.network = DistributedDataParallel(self.network, device_ids=ids)

    def _optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model, self.recipe, self.device)

    def _network(self) -> nn.Module:
        """What runs on a batch: the model, unless more than its logits is needed."""
        return self.model

    def step(
        self,
        batches: Iterator[Batch],
        update: int,
        flags: Flags = tuple,
        position: int | None = None,
    ) -> Step:
        """Learn from the next global batch, after `update` steps before it.

        `position` is where the schedule of the learning rate is, if not at `update`.
        `flags` are asked for once the gradients are there. They, the loss and the counts are one
        all-reduce and one transfer from the device: each makes the host wait.
        """
        if not self.model.training:  # only after an evaluation: it takes a millisecond
            self.network.train()
        self.schedule.step_update(update if position is None else position)
        microbatches = self.recipe.accumulate
        losses, broken = [], 0
        for number in range(microbatches):
            batch = next(batches)
            broken += batch.broken
            with self._sync(last=number == microbatches - 1):
                loss = self._loss(batch, update) / microbatches
                self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        self.model.draw_drop_path(None)
        device = collective_device(self.device)
        measured = torch.stack([*losses, self._gradient_norm()]).to(device)
        # float64, so that whole numbers stay whole
        mean = measured[:-1].double().sum() / self.processes.world_size
        bad = measured.isfinite().all().logical_not().double()
        counts = torch.tensor([broken, *flags()], dtype=torch.float64).to(device)
        sums = self.processes.all_reduce(torch.cat((torch.stack((mean, bad)), counts)))
        mean_loss, skipped, unreadable, *raised = sums.tolist()
        if not skipped:
            self.scaler.step(self.optimizer)
            if self.ema:
                self.ema.update(self.model)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return Step(mean_loss, not skipped, int(unreadable), tuple(raised))

    def _loss(self, batch: Batch, update: int) -> Tensor:
        images, target = self._prepare(batch, update)
        with self._autocast():
            return self._objective(self.network(images), images, target)

    def _prepare(self, batch: Batch, update: int) -> tuple[Tensor, Tensor]:
        """Images and targets on the device, mixed; drop path is drawn and dropout is seeded."""
        recipe = self.recipe
        images = batch.images.to(self.device, non_blocking=True)
        target = batch.labels.to(self.device, non_blocking=True)
        # Mixup and stochastic depth: all processes and microbatches draw the same numbers, for the
        # whole batch, and use their rows. Dropout has too many numbers for that.
        seed_all(recipe.seed, update, self.device)
        rows = None if batch.rows is None else batch.rows.to(self.device)
        for model in self._models():
            model.draw_drop_path(recipe.batch_size, rows)
        if self.mixup:
            images, target = self.mixup(images, target)
        seed_dropout(recipe.seed, update, batch.shard, self.device)
        return images, target

    def _models(self) -> list[HVT]:
        """The models that a step runs, which share their weights."""
        return [self.model]

    def _objective(self, logits: Tensor, images: Tensor, target: Tensor) -> Tensor:
        """The loss of some logits by labels and teacher."""
        loss = self._label_loss(logits, target)
        if self.teacher:
            alpha = self.recipe.distill_alpha
            loss = (1 - alpha) * loss + alpha * self.teacher.loss(logits, images)
        return loss

    def _label_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        # Targets of shape (B, classes) are mixed, and smoothed by mixup itself.
        smoothing = self.recipe.smoothing if target.ndim == 1 else 0.0
        return F.cross_entropy(
            logits.float(), target, self.class_weights, label_smoothing=smoothing
        )

    def _gradient_norm(self) -> Tensor:
        """The norm of all gradients, which are then clipped where the recipe says so."""
        self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = get_total_norm(gradients)
        if self.recipe.clip_grad:
            clip_grads_with_norm_(self.model.parameters(), self.recipe.clip_grad, norm)
        # The scaler finds gradients that are not finite itself, and lowers its scale.
        return torch.zeros_like(norm) if self.scaler.is_enabled() else norm

    def warm_up(self) -> None:
        """Take two steps without their update, which changes nothing.

        Under DDP the first settles how gradients are bundled, so that a resumed run adds them up
        in the same order.
        """
        self.network.train()
        for _ in range(2):
            with self._autocast():
                loss = self._trial(self.recipe.batch_size // self.batches.shard_of[2])
            loss.backward()
        self.optimizer.zero_grad(set_to_none=True)

    def _trial(self, size: int) -> Tensor:
        """A loss of black images that depends on all weights."""
        config = self.model.config
        images = torch.zeros(size, config.in_chans, *config.image, device=self.device)
        return self.network(images).float().logsumexp(1).mean()

    def candidates(self) -> dict[str, HVT]:
        """The last weights as `val` and, where they are kept, the averaged ones as `ema`."""
        return {"val": self.model} | ({"ema": self.ema.module} if self.ema else {})

    def state(self) -> dict[str, Any]:
        """All that is learned, and what the model is."""
        return {
            "config": self.model.config.to_dict(),
            "pretrained_cfg": dict(self.model.pretrained_cfg),
            "model": self.model.state_dict(),
            "ema": self.ema.module.state_dict() if self.ema else None,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        if self.ema:
            self.ema.module.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.amp, enabled=self.amp is not None)

    def _sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Processes reduce their gradients once a step, with the last microbatch."""
        if isinstance(self.network, DistributedDataParallel) and not last:
            return self.network.no_sync()
        return contextlib.nullcontext()


def freeze(model: HVT, blocks: int) -> None:
    """Exclude the embedding and the first blocks from learning, if any."""
    if blocks > model.config.depth:
        raise HVTError(f"freeze={blocks} is more than the {model.config.depth} blocks of the model")
    stem = re.compile(model.group_matcher()["stem"])
    for name, parameter in model.named_parameters() if blocks else ():
        block = re.search(r"blocks\.(\d+)\.", name)
        if int(block[1]) < blocks if block else stem.match(name):
            parameter.requires_grad_(False)
