"""How the weights move: groups with and without decay, the schedule, precision, randomness."""

from __future__ import annotations

import numpy as np
import torch
from timm.data import Mixup
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn

from .muon import Muon
from .recipe import Recipe


def make_optimizer(model: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    """AdamW or Muon; timm leaves biases, norms and what the model names without decay."""
    optimizer: torch.optim.Optimizer = create_optimizer_v2(
        model,
        opt="adamw",
        lr=recipe.scaled_lr,
        weight_decay=recipe.weight_decay,
        layer_decay=recipe.layer_decay,
        fused=device.type in ("cpu", "cuda"),
    )
    if recipe.optimizer == "muon":
        return Muon(optimizer.param_groups)
    return optimizer


def make_schedule(
    optimizer: torch.optim.Optimizer, recipe: Recipe, steps: int
) -> CosineLRScheduler:
    """Linear warm-up and a cosine, by the number of steps done before.

    The first step has `warmup_lr`, the last `min_lr`. The cosine keeps two steps at least, however
    long the warm-up: timm warns of a shorter one.
    """
    total = recipe.total_steps(steps)
    warmup = max(0, min(round(recipe.warmup_epochs * steps), total - 3))
    return CosineLRScheduler(
        optimizer,
        t_initial=max(2, total - 1 - warmup),
        lr_min=min(recipe.min_lr, recipe.scaled_lr),
        warmup_t=warmup,
        warmup_lr_init=min(recipe.warmup_lr, recipe.scaled_lr),
        warmup_prefix=True,
        t_in_epochs=False,
    )


def make_mixup(recipe: Recipe, num_classes: int) -> Mixup | None:
    """Mixup and CutMix, where the recipe has either."""
    if not (recipe.mixup or recipe.cutmix):
        return None
    return Mixup(
        recipe.mixup,
        recipe.cutmix,
        prob=recipe.mixup_prob,
        switch_prob=recipe.mixup_switch,
        label_smoothing=recipe.smoothing,
        num_classes=num_classes,
    )


def choose_precision(name: str, device: torch.device) -> torch.dtype | None:
    """The type that autocast uses; None where it is off."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else None
    return {"off": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def seed_all(seed: int, update: int, device: torch.device) -> None:
    """Seed what mixup (numpy) and stochastic depth (torch) draw from, for one step."""
    mixed = _mixed(seed, update)
    _manual_seed(mixed, device)
    np.random.seed(mixed % 2**32)


def seed_dropout(seed: int, update: int, shard: int, device: torch.device) -> None:
    """Seed what dropout (torch) draws from, for one shard of a step's batch."""
    mixed = _mixed(seed, update) + (shard + 1) * 0x94D049BB133111EB
    _manual_seed(mixed % 2**63, device)


def _manual_seed(seed: int, device: torch.device) -> None:
    """`torch.manual_seed`, but that it takes a millisecond to seed devices that are not there."""
    seeded = torch.default_generator if device.type == "cpu" else torch
    seeded.manual_seed(seed)


def _mixed(seed: int, update: int) -> int:
    return (seed * 0x9E3779B97F4A7C15 + (update + 2) * 0xBF58476D1CE4E5B9) % 2**63
