"""How PoWER drops tokens: rank patches by the attention they receive, keep the best in order.

From PoWER-BERT (Goyal et al., 2020). The class token is the first of a sequence; it is neither
ranked nor dropped. All shapes follow from those of the inputs, so the functions can be exported.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def significance(attention: Tensor, share: Tensor | None = None) -> Tensor:
    """The attention each patch receives, over heads and queries: `(B, heads, N, N)` → `(B, N-1)`.

    What a token pays to itself does not count, and no gradient passes. With `share`, `(B, N)`, a
    query counts by its share, and a patch whose share is 0 comes after all others.
    """
    weights = attention.detach()
    exact = torch.promote_types(weights.dtype, torch.float32)  # half precision would make ties
    if share is not None:
        weights = weights.to(exact) * share.detach().to(exact)[:, None, :, None]
    received = weights.sum(dim=(1, 2), dtype=exact)
    own = weights.diagonal(dim1=2, dim2=3).sum(dim=1, dtype=exact)
    scores = (received - own)[:, 1:]
    return scores if share is None else scores.masked_fill(share[:, 1:] == 0, -torch.inf)


def ranks(scores: Tensor) -> Tensor:
    """The place of each score, the highest first: `(B, N)` → `(B, N)`. Of equals the earlier leads.

    By counting, because torch's `topk` breaks ties as it likes and ONNX has no stable sort.
    """
    mine, theirs = scores.unsqueeze(2), scores.unsqueeze(1)
    index = torch.arange(scores.shape[1], device=scores.device)
    ahead = (theirs > mine) | ((theirs == mine) & (index < index.unsqueeze(1)))
    return ahead.sum(dim=2)


def best(scores: Tensor, keep: int) -> Tensor:
    """Where the `keep` highest scores are, in their own order: `(B, N)` → `(B, keep)`."""
    n = scores.shape[1]
    index = torch.arange(n, device=scores.device)
    # The losers' places are moved behind all others, so that the lowest are the winners', sorted.
    return torch.where(ranks(scores) < keep, index, index + n).topk(keep, largest=False).values


def shared_softmax(logits: Tensor, share: Tensor) -> Tensor:
    """Softmax over keys that count by their share: `(B, heads, N, N)`, `(B, N)` → same as logits.

    That is `softmax(logits + log(share))`, written without the logarithm so that a share of 0 has a
    finite gradient, by which it can rise again. One key of each row, the class token, has more.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    logits, share = logits.to(exact), share.to(exact)[:, None, None, :]
    # The largest logit of those that count; a larger one of the others must not overflow.
    top = logits.detach().masked_fill(share == 0, -torch.inf).amax(dim=3, keepdim=True)
    weights = (logits - top).clamp(max=0).exp() * share
    return weights / weights.sum(dim=3, keepdim=True)


class Extract(nn.Module):
    """Keep the class token and the most significant patches, in their order."""

    def __init__(self, keep: int) -> None:
        super().__init__()
        self.keep = keep

    def forward(self, x: Tensor, attention: Tensor) -> Tensor:  # (B, N, D) → (B, keep, D)
        if self.keep == 1:
            return x[:, :1].clone()  # a view would hold on to the other tokens in training
        patches = best(significance(attention), self.keep - 1) + 1
        index = torch.cat((torch.zeros_like(patches[:, :1]), patches), dim=1)
        return x.gather(1, index.unsqueeze(2).expand(-1, -1, x.shape[2]))

    def extra_repr(self) -> str:
        return f"{self.keep}"
