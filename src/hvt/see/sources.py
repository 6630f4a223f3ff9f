"""Which patches a model's tokens come from: every step at which they become fewer, traced back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import Grid
from ..errors import HVTError
from ..extraction import Extract, best, significance
from ..merging import Merge, match
from ..model import HVT
from ..pooling import Pool, max_sources
from .maps import replica

Step = tuple[int, Tensor]
"""A block after which tokens become fewer, and how.

Where values are taken, `(N', D)`: which of the tokens before each value was. Where tokens are
averaged, sparse `(N', N)`: the part of each token after in each one before. Prefix tokens aside.
"""


@dataclass(frozen=True)
class TokenSources:
    """What is left of the patches after one step."""

    block: int
    weights: Tensor
    """Sparse `(N', patches)`: the part of each token that came from each patch; a row sums to 1."""
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
    (rows, cols), weights = config.grid, own_patches(config.grid)
    origins = None if averaged else torch.arange(rows * cols)[:, None].expand(-1, config.width)
    sources = []
    for block, step in _steps(model, image, _averaged if averaged else _taken):
        if origins is None:
            with warnings.catch_warnings():  # that sparse matrices are in beta
                warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
                weights = (step @ weights).coalesce()
        else:
            origins = origins.gather(0, step)
            weights = _counted(origins, rows * cols)
        shares = torch.sparse.sum(weights, dim=0).to_dense() / max(1, len(weights))
        sources.append(TokenSources(block, weights, shares.view(rows, cols), origins))
    return sources


def own_patches(grid: Grid) -> Tensor:
    """The weights of tokens that are a patch each, as a model's first ones are."""
    each = torch.arange(grid[0] * grid[1])
    return _sparse(each, each, torch.ones(len(each), dtype=torch.float64), (len(each), len(each)))


def _sparse(rows: Tensor, cols: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A sparse matrix in which entries of one place are added."""
    # Checked: a wrong index here would be read as memory.
    indices = torch.stack((rows, cols))
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True).coalesce()


def _counted(origins: Tensor, patches: int) -> Tensor:
    """The part of each token from each patch, by the patches of its channels, `(N', D)`."""
    tokens, channels = origins.shape
    places = torch.arange(tokens)[:, None].expand(-1, channels)
    even = torch.full((origins.numel(),), 1 / channels, dtype=torch.float64)
    return _sparse(places.flatten(), origins.flatten(), even, (tokens, patches))


@torch.inference_mode()
def _steps(
    model: HVT, image: Tensor, step: Callable[[Any, tuple[Tensor, ...]], Tensor]
) -> list[Step]:
    """What `step(layer, inputs)` makes of each layer that leaves fewer tokens of an image."""
    model = replica(model)
    steps: list[Step] = []

    def watch(index: int) -> Any:
        return lambda layer, args: steps.append((index, step(layer, args)))

    for index, block in enumerate(model.blocks):
        for layer in (block.pool, block.merge, block.extract):
            if isinstance(layer, Pool | Merge | Extract):
                layer.register_forward_pre_hook(watch(index))
    model.forward_features(image[None])
    return steps


def _taken(layer: Pool | Extract, args: tuple[Tensor, ...]) -> Tensor:
    """Which token each channel is taken from; PoWER keeps whole tokens."""
    if isinstance(layer, Extract):
        tokens, attention = args
        patches = best(significance(attention), layer.keep - 1)[0].cpu()
        return patches[:, None].expand(-1, tokens.shape[2])
    tokens = args[0][:, layer.prefix :]
    return max_sources(tokens, layer.grid, layer.kernel, layer.stride, layer.pad)[0].cpu()


def _averaged(layer: Pool | Merge, args: tuple[Tensor, ...]) -> Tensor:
    if isinstance(layer, Pool):
        return _pooled(layer)
    _, keys, size = (value[:, layer.prefix :] for value in args)
    return _merged(keys, size[0].double().cpu(), layer.merged)


def _pooled(pool: Pool) -> Tensor:
    """The weights of average pooling: even over a window, what it has of the border left out."""
    rows, cols = pool.grid
    tokens = rows * cols
    # Numbers from 1: what `unfold` pads with is 0. Exact in float64, as unfold takes no integers.
    numbers = torch.arange(1, tokens + 1, dtype=torch.float64).view(1, 1, rows, cols)
    windows = F.unfold(numbers, pool.kernel, padding=pool.pad, stride=pool.stride)[0].T.long()
    places, column = windows.nonzero(as_tuple=True)  # windows is (N', k)
    values = 1 / (windows > 0).sum(dim=1).double()[places]
    return _sparse(places, windows[places, column] - 1, values, (len(windows), tokens))


def _merged(keys: Tensor, size: Tensor, merged: int) -> Tensor:
    """The weights of one merging: by the patches that the tokens stood for, `(N,)`."""
    stays, joins = (found[0].cpu() for found in match(keys, merged))
    kept, others = len(stays), joins.shape[1]
    source, partner = joins.nonzero(as_tuple=True)  # of a, into b
    after = torch.cat((torch.arange(kept), kept + torch.arange(others), kept + partner))
    before = torch.cat((2 * stays, 2 * torch.arange(others) + 1, 2 * source))
    total = torch.zeros(kept + others, dtype=torch.float64).index_add_(0, after, size[before])
    values = size[before] / total[after]
    return _sparse(after, before, values, (kept + others, len(size)))
