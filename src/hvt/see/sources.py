"""Which patches a model keeps: every pooled value traced back to the patch it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import HVTError
from ..model import HVT
from ..pooling import Pool, max_sources
from ..power import survivors
from .maps import looking, replica


@dataclass(frozen=True)
class Pick:
    """One step of a model at which tokens become fewer."""

    block: int
    indices: Tensor
    """`(N', D)`: which of the tokens before the step each value after it was, prefix aside."""


@dataclass(frozen=True)
class TokenSources:
    """What is left of the patches after one step."""

    block: int
    origins: Tensor
    """`(N', D)`: the patch, counted row by row, that each channel of each token came from."""
    shares: Tensor
    """`(rows, cols)` of patches: the part of all those channels that came from a patch; sums to 1,
    or to 0 where the class token alone is left."""

    @property
    def tokens(self) -> int:
        """Tokens that are left, without the class token."""
        return self.origins.shape[0]


def token_sources(model: nn.Module, image: Tensor) -> list[TokenSources]:
    """Where the tokens come from, each time they become fewer, of a prepared picture `(C, H, W)`.

    Max pooling takes its maximum channel by channel, so a token's channels come from several of
    the tokens in its window, and through several stages from many patches. The trace follows
    places: what a block moves between tokens by attention is not in it.
    """
    if not isinstance(model, HVT):
        what = type(model).__name__
        raise HVTError(f"{what} is not a model of this family, so its tokens cannot be traced")
    picks = token_picks(model, image)
    rows, cols = model.config.grid
    patches = rows * cols
    origins = torch.arange(patches)[:, None].expand(-1, picks[0].indices.shape[1])
    sources = []
    for pick in picks:
        origins = origins.gather(0, pick.indices)
        counts = torch.bincount(origins.flatten(), minlength=patches)
        shares = counts.double() / max(1, origins.numel())
        sources.append(TokenSources(pick.block, origins, shares.view(rows, cols)))
    return sources


def token_picks(model: HVT, image: Tensor) -> list[Pick]:
    """Every step at which a model takes some of its tokens, in order.

    The one place that knows how models of this family lose tokens. Other threads may use the model
    meanwhile.
    """
    config = model.config
    if config.retention is not None:
        return _kept(model, image)
    if not config.pool_blocks:
        raise HVTError(
            f"the model has no pooling, so it keeps all its {config.tokens[0]} tokens: "
            "look at one with stages, such as hvt_s_4"
        )
    if config.pool != "max":
        mixes = {"avg": "averages", "conv": "convolves"}[config.pool]
        raise HVTError(
            f"the model {mixes} its tokens (pool={config.pool}), so none comes from one patch: "
            "look at one with max pooling, such as hvt_s_4"
        )
    model = replica(model)
    picks: list[Pick] = []

    def watch(index: int) -> Any:
        def hook(pool: Pool, args: tuple[Tensor]) -> None:
            tokens = args[0][:, pool.prefix :]
            indices = max_sources(tokens, pool.grid, pool.kernel, pool.stride, pool.pad)
            picks.append(Pick(index, indices[0].cpu()))

        return hook

    for index in config.pool_blocks:
        model.blocks[index].pool.register_forward_pre_hook(watch(index))  # type: ignore[union-attr]
    with looking(model):
        model.forward_features(image[None])
    return picks


def _kept(model: HVT, image: Tensor) -> list[Pick]:
    """PoWER keeps whole tokens, so all channels of one come from the same patch."""
    before = torch.arange(model.config.tokens[0] - 1)
    picks = []
    model = replica(model)
    with looking(model):
        kept = survivors(model, image[None])
    for block, (patches,) in enumerate(kept):
        if len(patches) < len(before):
            indices = torch.searchsorted(before, patches.cpu())  # both are in order
            picks.append(Pick(block, indices[:, None].expand(-1, model.config.width)))
            before = patches.cpu()
    return picks
