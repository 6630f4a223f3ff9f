"""One step of inference or training, for models of hvt and timm alike, and its peak memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvt.bench.models import fitting
from hvt.bench.peak import in_new_process, memory_held, memory_peak
from hvt.resolve import build, resolve


def images(model: Any, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random images `(B, C, H, W)` and classes `(B,)` for a model."""
    images = torch.randn(batch, *model.pretrained_cfg["input_size"], device=device)
    return images, torch.randint(model.num_classes, (batch,), device=device)


def inference(model: nn.Module, images: Tensor) -> Callable[[], object]:
    """One forward pass in evaluation mode."""

    def run() -> object:
        model.eval()
        with torch.inference_mode():
            return model(images)

    return run


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """The same fused optimiser for all."""
    return torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.025, fused=True)


def train_step(
    model: nn.Module, optimizer: torch.optim.AdamW, images: Tensor, classes: Tensor
) -> Callable[[], object]:
    """Forward, cross-entropy, backward and one step of the optimiser."""

    def run() -> None:
        model.train()
        F.cross_entropy(model(images), classes).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def train_peaks(
    name: str, batches: Sequence[int], device: torch.device, **overrides: Any
) -> dict[int, int]:
    """Peak bytes of a training step by batch size, each model in a process of its own."""
    return in_new_process(_train_peaks, name, batches, device, overrides)


def _train_peaks(
    name: str, batches: Sequence[int], device: torch.device, overrides: dict[str, Any]
) -> dict[int, int]:
    # Kernels that are loaded at first use belong to torch, not to the model.
    small = nn.Linear(8, 8).to(device)
    small(torch.ones(2, 8, device=device)).sum().backward()
    before = memory_held(device)
    model = build(resolve(name), **overrides).to(device)
    optimizer = adamw(model)
    peaks: dict[int, int] = {}
    for batch in sorted(batches):
        with fitting(batch):
            step = train_step(model, optimizer, *images(model, batch, device))
            step()
            if not peaks:  # the first step makes the optimiser's state, which the second holds too
                step()
        peaks[batch] = memory_peak(device) - before
    return peaks
