"""How a sequence is shortened: plain functions and one layer on `(B, N, D)`.

Tokens lie with their channels last in memory, which is what torch's pooling and convolution
kernels call `channels_last`. So a sequence is shown to them as a `(B, D, 1, N)` image, and a grid
as `(B, D, H, W)`, by a view: no kernel needs a transposing copy, and the result is contiguous.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Grid, HVTConfig, padding, window


def as_image(x: Tensor, grid: Grid) -> Tensor:
    """`(B, H·W, D)` → `(B, D, H, W)`, a channels-last view."""
    # Split, then permute: in the opposite order, a batch of one loses its channels-last strides.
    return x.unflatten(1, grid).permute(0, 3, 1, 2)


def as_tokens(image: Tensor) -> Tensor:
    """`(B, D, H, W)` → `(B, H·W, D)`, a contiguous view of a channels-last image."""
    return image.flatten(2).transpose(1, 2)


def pool_tokens(x: Tensor, grid: Grid, kind: str, kernel: Grid, stride: Grid, pad: Grid) -> Tensor:
    """Max or average over windows of the grid: `(B, H·W, D)` → `(B, H'·W', D)`."""
    image = as_image(x, grid)
    if kind == "max":
        return as_tokens(F.max_pool2d(image, kernel, stride, pad))
    return as_tokens(F.avg_pool2d(image, kernel, stride, pad, count_include_pad=False))


def max_sources(x: Tensor, grid: Grid, kernel: Grid, stride: Grid, pad: Grid) -> Tensor:
    """Which token each pooled maximum came from: `(B, H·W, D)` → indices `(B, H'·W', D)`."""
    _, indices = F.max_pool2d(as_image(x, grid), kernel, stride, pad, return_indices=True)
    return as_tokens(indices)


def to_grid(x: Tensor, grid: Grid) -> Tensor:
    """A pooled sequence stretched back to the patch grid: `(B, N', D)` → `(B, D, H, W)`.

    The paper's Figure 3 does this: interpolate to the first length, then reshape.
    """
    stretched = F.interpolate(x.transpose(1, 2), size=grid[0] * grid[1], mode="linear")
    return stretched.unflatten(2, grid)


class Pool(nn.Module):
    """Pool the tokens of a grid (2D) or of their sequence (1D), except prefix tokens.

    The convolution's weights are those of a full `Conv1d(D, D, k, s)`, or `Conv2d`.
    """

    def __init__(self, config: HVTConfig, stage: int) -> None:
        super().__init__()
        dims, width = config.pool_dims, config.width
        self.kind, self.prefix = config.pool, config.num_prefix_tokens
        self.kernel = window(dims, config.pool_kernel)
        self.stride = window(dims, config.pool_stride)
        self.pad: Grid = (padding(dims, self.kernel[0]), padding(dims, self.kernel[1]))
        self.conv = None
        if self.kind == "conv":
            self.conv = nn.Conv2d(width, width, self.kernel, self.stride, self.pad)
        self.set_grid(config, stage)

    def set_grid(self, config: HVTConfig, stage: int) -> None:
        """Take the tokens of a stage: their grid, or their sequence as one row."""
        rows, cols = config.grids[stage]
        self.grid: Grid = (rows, cols) if config.pool_dims == 2 else (1, rows * cols)

    def forward(self, x: Tensor) -> Tensor:  # (B, prefix + N, D) → (B, prefix + N', D)
        if self.prefix:
            return torch.cat((x[:, : self.prefix], self._pool(x[:, self.prefix :])), dim=1)
        return self._pool(x)

    def _pool(self, x: Tensor) -> Tensor:
        if self.conv is not None:
            return as_tokens(self.conv(as_image(x, self.grid)))
        return pool_tokens(x, self.grid, self.kind, self.kernel, self.stride, self.pad)

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.grid}"
