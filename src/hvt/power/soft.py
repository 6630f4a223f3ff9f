"""Soft extraction: every token stays, and counts by a learned number for its rank.

Each block has a vector r_j in [0, 1] with one number per rank. A penalty pulls them down, the
labels hold up those that matter, and what is left of their sum is the block's retention.

A token's share is the product of its r so far. PoWER-BERT multiplies after the norm, so the share
scales what the MLP and the next attentions read; before our norms it would be undone. The share is
also the token's weight as a key of the softmax and as a query in the significance of others. So
r = 0 drops a token as the hard model does and r = 1 keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import HVTConfig
from ..extraction import ranks, significance
from ..model import HVT, Block
from .retention import Retention, check_deit, searched_blocks


class SoftDeiT(HVT):
    """A DeiT with soft extraction in every block that a retention is searched for.

    Only its logits depend on r; harden it before anything else is asked of it.
    """

    def __init__(self, config: HVTConfig) -> None:
        super().__init__(config.replace(retention=None))
        patches, blocks = config.tokens[0] - 1, searched_blocks(config)
        self.r = nn.ParameterList(nn.Parameter(torch.ones(patches)) for _ in range(blocks))

    def forward(self, images: Tensor) -> Tensor:  # (B, C, H, W) → (B, classes)
        x = self._embed(images)
        share = x.new_ones(x.shape[:2])
        for index, block in enumerate(cast(Iterable[Block], self.blocks)):
            r = self.r[index] if index < len(self.r) else None
            if self.grad_checkpointing and torch.is_grad_enabled():
                x, share = checkpoint(soft_block, block, x, share, r, use_reentrant=False)
            else:
                x, share = soft_block(block, x, share, r)
        x = self.norm(x)
        if self.global_pool == "avg":
            left = share[:, 1:].unsqueeze(2).to(x.dtype)
            x = (x[:, 1:] * left).sum(dim=1) / left.sum(dim=1).clamp_min(1e-6)
        else:
            x = x[:, 0]
        return self.head(self.head_drop(self.fc_norm(x)))


def soft_block(
    block: Block, x: Tensor, share: Tensor, r: Tensor | None
) -> tuple[Tensor, Tensor]:  # (B, N, D), (B, N) → the same
    """A block with soft extraction between attention and MLP; without r all tokens stay."""
    branch, weights = block.attn.with_weights(_scaled(block.norm1(x), share), share)
    x = block.drop_path1(x, block.ls1(branch))
    if r is not None:
        kept = r[ranks(significance(weights, share))]  # (B, N-1)
        share = torch.cat((share[:, :1], share[:, 1:] * kept), dim=1)
    branch = block.mlp(_scaled(block.norm2(x), share))
    return block.drop_path2(x, block.ls2(branch)), share


def _scaled(x: Tensor, share: Tensor) -> Tensor:
    return x * share.unsqueeze(2).to(x.dtype)


def soften(model: HVT) -> SoftDeiT:
    """A copy of a DeiT with soft extraction and r = 1."""
    check_deit(model.config)
    soft = SoftDeiT(model.config)
    soft.pretrained_cfg.update(model.pretrained_cfg)
    soft.load_state_dict(model.state_dict() | {f"r.{i}": r for i, r in enumerate(soft.r)})
    return soft.to(model.pos_embed.device, model.pos_embed.dtype).train(model.training)


def harden(model: HVT, retention: Retention) -> HVT:
    """A DeiT with the weights of a softened one and hard extraction at this retention."""
    hard = HVT(model.config.replace(retention=retention))
    hard.pretrained_cfg.update(model.pretrained_cfg)
    own = hard.state_dict()
    hard.load_state_dict({k: v for k, v in model.state_dict().items() if k in own})
    return hard.to(model.pos_embed.device, model.pos_embed.dtype)


def penalty(model: SoftDeiT) -> Tensor:
    """Σ_j j · Σ_k |r_j[k]| with j from 1: the deeper the block, the more a token costs."""
    return torch.stack([block * r.abs().sum() for block, r in enumerate(model.r, start=1)]).sum()


def mass(model: SoftDeiT) -> list[float]:
    """How many patches each block would keep: the sum of its r, 0 in one that has none."""
    sums = torch.stack([r.detach().double().sum() for r in model.r]).tolist()  # one transfer
    return sums + [0.0] * (model.config.depth - len(sums))
