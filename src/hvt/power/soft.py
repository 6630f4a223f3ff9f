"""Soft extraction: every token stays, multiplied by a learned number for its rank.

Each block has a vector r_j in [0, 1] with one number per rank. A penalty pulls them down, the
labels hold up those that matter, and what is left of their sum is the block's retention.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..extraction import ranks, significance
from ..model import HVT
from .retention import Retention, check_deit


class SoftExtract(nn.Module):
    """Multiply the patch of rank k by `r[k]`; the class token is left alone."""

    def __init__(self, patches: int) -> None:
        super().__init__()
        self.r = nn.Parameter(torch.ones(patches))

    def forward(self, x: Tensor, attention: Tensor) -> Tensor:  # (B, N, D) → (B, N, D)
        weight = self.r[ranks(significance(attention))].to(x.dtype)  # (B, N-1)
        return torch.cat((x[:, :1], x[:, 1:] * weight.unsqueeze(2)), dim=1)

    def extra_repr(self) -> str:
        return f"{len(self.r)} ranks"


def soften(model: HVT) -> HVT:
    """Put a soft extraction with r = 1 into every block of a DeiT, in place."""
    check_deit(model.config)
    device = model.pos_embed.device
    for block in model.blocks:
        block.extract = SoftExtract(model.config.tokens[0] - 1).to(device)
    model.config = model.config.replace(retention=None)
    return model


def harden(model: HVT, retention: Retention) -> HVT:
    """A DeiT with the weights of a softened one and hard extraction at this retention."""
    hard = HVT(model.config.replace(retention=retention))
    hard.pretrained_cfg.update(model.pretrained_cfg)
    own = hard.state_dict()
    hard.load_state_dict({k: v for k, v in model.state_dict().items() if k in own})
    return hard.to(model.pos_embed.device, model.pos_embed.dtype)


def vectors(model: HVT) -> list[nn.Parameter]:
    """r_1 … r_L of a softened model."""
    return [block.extract.r for block in model.blocks if isinstance(block.extract, SoftExtract)]


def penalty(model: HVT) -> Tensor:
    """Σ_j j · Σ_k |r_j[k]| with j from 1: the deeper the block, the dearer a token."""
    sums = [block * r.abs().sum() for block, r in enumerate(vectors(model), start=1)]
    return torch.stack(sums).sum()


@torch.no_grad()
def clip(model: HVT) -> None:
    """Bring all r back into [0, 1], after a step of the optimizer."""
    for r in vectors(model):
        r.clamp_(0, 1)


def mass(model: HVT) -> list[float]:
    """The sum of each r: how many patches its block would keep."""
    return torch.stack([r.detach().double().sum() for r in vectors(model)]).tolist()
