"""How long a pooled sequence is: arithmetic alone, so that a config needs no torch."""

from __future__ import annotations

KINDS = ("max", "avg", "conv")

Grid = tuple[int, int]
"""Rows and columns of tokens; a sequence is one row."""


def pooled_length(n: int, kernel: int, stride: int, pad: int = 0) -> int:
    """Length after pooling, `floor((n + 2·pad - kernel) / stride) + 1`; below 1 means no token."""
    return (n + 2 * pad - kernel) // stride + 1


def padding(dims: int, kernel: int) -> int:
    """1D pooling has no padding; 2D pooling pads as CNNs do, so that stride 2 halves the grid."""
    return (kernel - 1) // 2 if dims == 2 else 0


def window(dims: int, size: int | Grid) -> Grid:
    """Rows and columns of a kernel or stride given as one number; of a sequence, one row."""
    if isinstance(size, tuple):
        return size
    return (size, size) if dims == 2 else (1, size)
