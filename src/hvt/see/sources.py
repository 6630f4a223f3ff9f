"""Which patches a model's tokens come from: every step at which they become fewer, traced back."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..elastic import replica
from ..errors import HVTError
from ..extraction import Extract, best, significance
from ..merging import Merge, match, merge_tokens
from ..model import HVT
from ..pooling import Pool, max_sources, pool_tokens

Reduction = Pool | Merge | Extract
"""A layer that leaves fewer tokens."""


@dataclass(frozen=True)
class TokenSources:
    """What is left of the patches after one step."""

    block: int
    weights: Tensor
    """`(N', patches)`: the part of each token that came from each patch; a row sums to 1."""
    shares: Tensor
    """`(rows, cols)` of patches: the part of all tokens that came from a patch; sums to 1, or to 0
    where only the class token is left."""
    origins: Tensor | None
    """`(N', D)`: the patch, counted row by row, that each channel of each token came from; None
    where tokens are averaged, and no value is that of one patch."""

    @property
    def tokens(self) -> int:
        """Tokens that are left, without the class token."""
        return self.weights.shape[0]


@torch.inference_mode()
def token_sources(model: nn.Module, image: Tensor) -> list[TokenSources]:
    """Where the tokens come from, each time they become fewer, of a prepared image `(C, H, W)`.

    Max pooling takes its maximum channel by channel, so a token's channels come from several of
    the tokens in its window, and through several stages from many patches. Average pooling and
    ToMe take parts of whole tokens. The trace follows places: what a block moves between tokens by
    attention is not in it.
    """
    if not isinstance(model, HVT):
        what = type(model).__name__
        raise HVTError(f"{what} is not a model of this family, so its tokens cannot be traced")
    config = model.config
    if len(config.tokens) == 1:
        raise HVTError(
            f"the model has no pooling, so it keeps all its {config.tokens[0]} tokens: "
            "use one with stages, such as hvt_s_4"
        )
    if config.pool_blocks and config.pool == "conv":
        raise HVTError(
            "the model pools by convolution (pool=conv), so its tokens cannot be traced: "
            "use one with max or average pooling, such as hvt_s_4"
        )
    averaged = config.merge is not None or (config.pool == "avg" and bool(config.pool_blocks))
    grid, patches = config.grid, math.prod(config.grid)
    weights = torch.eye(patches)
    origins = torch.arange(patches)[:, None].expand(-1, config.width)
    sources: list[TokenSources] = []

    def trace(block: int, layer: Reduction, inputs: tuple[Tensor, ...]) -> None:
        nonlocal weights, origins
        if averaged:
            weights = _averaged(layer, inputs, weights)
        else:
            origins = origins.gather(0, _taken(layer, inputs))
            even = torch.full(origins.shape, 1 / config.width)
            weights = torch.zeros(len(origins), patches).scatter_add_(1, origins, even)
        shares = weights.sum(dim=0).view(grid) / max(1, len(weights))
        sources.append(TokenSources(block, weights, shares, None if averaged else origins))

    watched = replica(model)
    for index, block in enumerate(watched.blocks):
        for layer in (block.pool, block.merge, block.extract):
            if layer is not None:
                layer.register_forward_pre_hook(functools.partial(trace, index))
    watched.forward_features(image[None])
    return sources


def _taken(layer: Reduction, inputs: tuple[Tensor, ...]) -> Tensor:
    """Which token each channel is taken from, `(N', D)`; PoWER keeps whole tokens."""
    if isinstance(layer, Extract):
        tokens, attention = inputs
        patches = best(significance(attention), layer.keep - 1)[0].cpu()
        return patches[:, None].expand(-1, tokens.shape[2])
    assert isinstance(layer, Pool)
    tokens = inputs[0][:, layer.prefix :]
    return max_sources(tokens, layer.grid, layer.kernel, layer.stride, layer.pad)[0].cpu()


def _averaged(layer: Reduction, inputs: tuple[Tensor, ...], weights: Tensor) -> Tensor:
    """The layer on the weights in place of the tokens: `(N, patches)` → `(N', patches)`."""
    if isinstance(layer, Pool):
        window = (layer.kernel, layer.stride, layer.pad)
        return pool_tokens(weights[None], layer.grid, layer.kind, *window)[0]
    assert isinstance(layer, Merge)
    _, keys, size = (values[:, layer.prefix :].cpu() for values in inputs)
    return merge_tokens(weights[None], size.float(), *match(keys, layer.merged))[0][0]
