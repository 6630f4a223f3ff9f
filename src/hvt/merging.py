"""How ToMe merges tokens: bipartite soft matching, as plain functions and one layer on `(B, N, D)`.

From *Token Merging: Your ViT But Faster* (Bolya et al., 2023). Every other patch looks for the most
similar of the rest by the keys of its attention; the closest pairs become one token, the average of
the patches that they stand for. Prefix tokens are not merged. All shapes follow from those of the
inputs, so the functions can be exported.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .extraction import best


def match(keys: Tensor, merged: int) -> tuple[Tensor, Tensor]:
    """Which patches are merged into which: `(B, N, D)` → `(B, N_a - r)`, `(B, N_a, N_b)`.

    The even patches, a, are matched with the odd ones, b. Returned are the places of those of a
    that stay, in their order, and for each of a a row that is one at its partner in b, or zero
    where it stays.
    """
    keys = F.normalize(keys.detach().float(), dim=2)
    likeness = keys[:, 0::2] @ keys[:, 1::2].transpose(1, 2)  # (B, N_a, N_b)
    score, partner = likeness.max(dim=2)
    stays = best(-score, likeness.shape[1] - merged)
    places = torch.arange(likeness.shape[1], device=keys.device)
    leaves = (places.unsqueeze(1) != stays.unsqueeze(1)).all(dim=2)  # (B, N_a)
    partners = torch.arange(likeness.shape[2], device=keys.device) == partner.unsqueeze(2)
    return stays, partners & leaves.unsqueeze(2)


def merge_tokens(x: Tensor, size: Tensor, stays: Tensor, joins: Tensor) -> tuple[Tensor, Tensor]:
    """The average of merged tokens by the patches they stand for: `(B, N, D)` → `(B, N - r, D)`.

    `size` is `(B, N)` and comes back as `(B, N - r)`.
    """
    into = joins.to(x.dtype).transpose(1, 2)  # (B, N_b, N_a)
    weighted = x * size.unsqueeze(2)
    total = size[:, 1::2] + (into @ size[:, 0::2].unsqueeze(2)).squeeze(2)
    joined = (weighted[:, 1::2] + into @ weighted[:, 0::2]) / total.unsqueeze(2)
    kept = x[:, 0::2].gather(1, stays.unsqueeze(2).expand(-1, -1, x.shape[2]))
    return torch.cat((kept, joined), dim=1), torch.cat((size[:, 0::2].gather(1, stays), total), 1)


class Merge(nn.Module):
    """Merge `merged` patches of a sequence, never its prefix tokens."""

    def __init__(self, merged: int, prefix: int) -> None:
        super().__init__()
        self.merged, self.prefix = merged, prefix

    def forward(self, x: Tensor, keys: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """`(B, N, D)`, its attention's keys `(B, N, head_dim)` and its tokens' sizes `(B, N)`."""
        prefix = self.prefix
        stays, joins = match(keys[:, prefix:], self.merged)
        tokens, sizes = merge_tokens(x[:, prefix:], size[:, prefix:], stays, joins)
        if not prefix:
            return tokens, sizes
        return torch.cat((x[:, :prefix], tokens), 1), torch.cat((size[:, :prefix], sizes), 1)

    def extra_repr(self) -> str:
        return f"{self.merged}"
