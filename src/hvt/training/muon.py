"""Muon: momentum made orthogonal, for the matrices of a transformer.

Where images are few and steps are expensive it learns far more per step than AdamW does. torch and
timm have it too, but orthogonalise in bfloat16 whatever the device, which takes a CPU with
AVX2 more than twenty times as long as float32.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Keller Jordan's quintic: five rounds take any singular value to between about 0.7 and 1.2.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices, roughly, of a stack (…, m, n), by Newton-Schulz rounds."""
    dtype = torch.bfloat16 if matrices.is_cuda else torch.float32
    x = matrices.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = _QUINTIC
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.AdamW):
    """AdamW, but every weight of two or more dimensions moves by its orthogonal momentum.

    It takes the groups of an AdamW. An update's entries are as large as AdamW's tend to be, so
    rates and decays mean the same. A convolution's weight counts as a matrix of one row per output.
    Positions, (1, N, D), and what has one dimension stay with AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]], momentum: float = 0.95) -> None:
        # Not fused: a fused step hides gradients that are not finite from the GradScaler.
        super().__init__([group | {"fused": False} for group in groups])
        self.momentum = momentum

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            alike: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None and p.dim() >= 2 and p.shape[0] > 1:
                    alike[p.shape[0], p.numel() // p.shape[0]].append(p)
            for shape, weights in alike.items():
                self._move(weights, shape, group["lr"], group["weight_decay"])
        return super().step(closure)

    def _move(self, weights: list[Tensor], shape: tuple[int, int], lr: float, decay: float) -> None:
        """One step of the matrices of one shape; AdamW then finds no gradient on them."""
        updates = []
        for p in weights:
            gradient, p.grad = p.grad, None
            assert gradient is not None
            if not self.state[p]:  # under AdamW's names, which it expects to find when restored
                self.state[p] |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p)}
            average = self.state[p]["exp_avg"]
            average.lerp_(gradient, 1 - self.momentum)
            updates.append(gradient.lerp(average, self.momentum).view(shape))
        size = 0.2 * math.sqrt(max(shape))
        for p, update in zip(weights, orthogonal(torch.stack(updates)), strict=True):
            p.mul_(1 - lr * decay).sub_(update.view_as(p), alpha=lr * size)
