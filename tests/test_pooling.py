"""Pooling on `(B, N, D)` is torch's own pooling, without transposing copies."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvt.config import POOLINGS, Grid, HVTConfig, padding
from hvt.pooling import Pool, as_image, as_tokens, max_sources, to_grid


@dataclass
class Case:
    """A layer and tokens for it."""

    pool: Pool
    x: Tensor
    dims: int


def layer(
    kind: str, grid: Grid, width: int, kernel: int, stride: int, dims: int, prefix: int
) -> Pool:
    config = HVTConfig(
        img_size=grid, patch_size=1, num_heads=1, head_dim=width, depth=1, stages=1,
        pool=kind, pool_kernel=kernel, pool_stride=stride, pool_dims=dims, reg_tokens=prefix,
    )  # fmt: skip
    return Pool(config, 0)


@st.composite
def cases(draw: st.DrawFn, kind: str = "", dims: int = 0, most_prefix: int = 2) -> Case:
    kind, dims = kind or draw(st.sampled_from(POOLINGS)), dims or draw(st.sampled_from([1, 2]))
    kernel, stride = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    least = kernel - 2 * padding(dims, kernel)  # shorter sides leave no token
    rows = draw(st.integers(max(1, least), 9)) if dims == 2 else 1
    cols = draw(st.integers(max(1, least), 9 if dims == 2 else 40))
    width, prefix = draw(st.integers(1, 8)), draw(st.integers(0, most_prefix))
    torch.manual_seed(draw(st.integers(0, 99)))
    pool = layer(kind, (rows, cols), width, kernel, stride, dims, prefix)
    return Case(pool, torch.randn(draw(st.integers(1, 3)), prefix + rows * cols, width), dims)


def torch_pool(case: Case, x: Tensor) -> Tensor:
    """What torch gives on the transposed sequence, or the grid, as the documentation has it."""
    pool, (rows, cols) = case.pool, case.pool.grid
    kernel, stride, pad = pool.kernel[1], pool.stride[1], pool.pad[1]
    prefix, x = x[:, : pool.prefix], x[:, pool.prefix :].transpose(1, 2).contiguous()
    if case.dims == 1:
        if pool.kind == "max":
            y = F.max_pool1d(x, kernel, stride)
        elif pool.kind == "avg":
            y = F.avg_pool1d(x, kernel, stride)
        else:
            y = F.conv1d(x, pool.conv.weight.squeeze(2), pool.conv.bias, stride)
    else:
        x = x.reshape(*x.shape[:2], rows, cols)
        if pool.kind == "max":
            y = F.max_pool2d(x, kernel, stride, pad)
        elif pool.kind == "avg":
            y = F.avg_pool2d(x, kernel, stride, pad, count_include_pad=False)
        else:
            y = F.conv2d(x, pool.conv.weight, pool.conv.bias, stride, pad)
        y = y.flatten(2)
    return torch.cat((prefix, y.transpose(1, 2)), dim=1)


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("kind", POOLINGS)
@settings(max_examples=40)
@given(data=st.data())
def test_equals_torch_forward_and_backward(kind: str, dims: int, data: st.DataObject) -> None:
    case = data.draw(cases(kind, dims))
    ours, theirs = case.x.clone().requires_grad_(), case.x.clone().requires_grad_()
    got, want = case.pool(ours), torch_pool(case, theirs)
    assert got.is_contiguous()
    torch.testing.assert_close(got, want)

    weight = torch.randn_like(want)
    parameters = list(case.pool.parameters())
    assert len(parameters) == (2 if case.pool.kind == "conv" else 0)
    torch.testing.assert_close(
        torch.autograd.grad(got, [ours, *parameters], weight),
        torch.autograd.grad(want, [theirs, *parameters], weight),
    )


# ── memory ──────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.integers(1, 8))
def test_an_image_is_a_view(batch: int, rows: int, cols: int, width: int) -> None:
    x = torch.randn(batch, rows * cols, width)
    image = as_image(x, (rows, cols))
    assert image.shape == (batch, width, rows, cols)
    assert image.data_ptr() == x.data_ptr()
    assert image.is_contiguous(memory_format=torch.channels_last)
    back = as_tokens(image)
    assert torch.equal(back, x)
    assert back.data_ptr() == x.data_ptr()


# ── where tokens come from and go back to ───────────────────────────────────────────────────────


@given(cases("max", most_prefix=0))
def test_max_sources_are_the_tokens_that_won(case: Case) -> None:
    pool = case.pool
    sources = max_sources(case.x, pool.grid, pool.kernel, pool.stride, pool.pad)
    assert torch.equal(case.x.gather(1, sources), pool(case.x))


@given(st.integers(1, 3), st.integers(1, 60), st.integers(1, 8), st.integers(1, 8))
def test_to_grid_has_the_grids_shape_and_keeps_constants(
    batch: int, length: int, rows: int, cols: int
) -> None:
    constant = torch.randn(batch, 1, 5)
    image = to_grid(constant.expand(-1, length, -1), (rows, cols))
    assert image.shape == (batch, 5, rows, cols)
    torch.testing.assert_close(
        image, constant.transpose(1, 2).unsqueeze(3).expand(-1, -1, rows, cols)
    )


def test_to_grid_keeps_the_order_of_the_sequence() -> None:
    rising = torch.arange(11.0).view(1, 11, 1)
    stretched = to_grid(rising, (14, 14)).flatten()
    assert (stretched.diff() >= 0).all()
    assert (stretched[0], stretched[-1]) == (0, 10)
