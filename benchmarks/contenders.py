"""The models that are compared, ours and timm's, built and run in the same way."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import hvt

# isort: split
import timm

BASELINE = "deit_small_patch16_224"
DEFAULT = (
    "deit_s",
    "hvt_s_1",
    "hvt_s_4",
    BASELINE,
    "hiera_tiny_224",
    "pvt_v2_b1",
    "swin_tiny_patch4_window7_224",
    "pit_s_224",
)
PIXELS = 224
CLASSES = 1000


def check(names: list[str]) -> None:
    """Refuse a name that neither hvt nor timm knows."""
    for name in names:
        if not timm.is_model(name):
            raise SystemExit(f"unknown model {name!r}: neither hvt nor timm has it")


def library(name: str) -> str:
    return "hvt" if name in hvt.list_models() else "timm"


def build(name: str, device: torch.device) -> nn.Module:
    """Random weights and the same stochastic depth for all, which DeiT's recipe trains with."""
    return timm.create_model(name, drop_path_rate=0.1).to(device)


def gflops(name: str) -> float:
    """Multiply-adds in 10⁹ for one picture: by `hvt.cost`, and by torch's counter for timm's."""
    if library(name) == "hvt":
        return hvt.cost(name).gflops
    # Frozen, for the counter follows whatever wants a gradient.
    model = timm.create_model(name).eval().requires_grad_(False)
    counter = FlopCounterMode(display=False)
    # The counter does not know every fused attention kernel; the plain one is matrix products.
    with sdpa_kernel(SDPBackend.MATH), counter:
        model(torch.zeros(1, 3, PIXELS, PIXELS))
    return counter.get_total_flops() / 2 / 1e9


def pictures(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random pictures `(B, 3, 224, 224)` and classes `(B,)`."""
    images = torch.randn(batch, 3, PIXELS, PIXELS, device=device)
    return images, torch.randint(CLASSES, (batch,), device=device)


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
