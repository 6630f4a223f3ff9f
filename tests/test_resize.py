"""Positions and patch filters follow a change of image or patch size."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hvt import HVTConfig
from hvt.resize import resize_patches, resize_positions

SEQUENCE = HVTConfig(img_size=64, patch_size=8, num_heads=1, head_dim=4, stages=2)
GRID = SEQUENCE.replace(pool_dims=2)
DEIT = SEQUENCE.replace(stages=None, class_token=True)
POOLED_WITH_TOKEN = SEQUENCE.replace(class_token=True)


def positions(config: HVTConfig, stage: int) -> Tensor:
    return torch.randn(1, config.tokens[stage], config.width)


def ramps(rows: int, cols: int) -> Tensor:
    """An embedding of width 2 that holds each token's row and column: `(1, H·W, 2)`."""
    row, col = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    return torch.stack((row, col), dim=2).flatten(0, 1).unsqueeze(0).float()


@given(
    rows=st.integers(2, 12),
    cols=st.integers(2, 12),
    family=st.sampled_from([SEQUENCE, GRID, DEIT, POOLED_WITH_TOKEN]),
)
def test_any_size_has_the_right_length_and_keeps_constants(
    rows: int, cols: int, family: HVTConfig
) -> None:
    new = family.replace(img_size=(rows * 8, cols * 8), stages=min(1, family.stages or 0))
    old = family.replace(stages=new.stages)
    for stage in range(len(new.tokens)):
        constant = torch.randn(1, 1, 4)
        moved = resize_positions(constant.expand(-1, old.tokens[stage], -1), old, new, stage)
        want = constant.expand(-1, new.tokens[stage], -1)
        torch.testing.assert_close(moved, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("config", "stage"), [(SEQUENCE, 0), (GRID, 0), (GRID, 1), (GRID, 2)])
@pytest.mark.parametrize("factor", [0.5, 2, 3])
def test_grids_are_resized_in_2d(config: HVTConfig, stage: int, factor: float) -> None:
    """Stretching the width leaves each row's height alone, and the columns alike in all rows."""
    new = config.replace(img_size=(64, int(64 * factor)))
    (rows, before), (same, after) = config.grids[stage], new.grids[stage]
    assert (rows, same) == (8 >> stage,) * 2
    moved = resize_positions(ramps(rows, before), config, new, stage).view(rows, after, 2)
    torch.testing.assert_close(
        moved[:, :, 0], torch.arange(rows).float()[:, None].expand(-1, after)
    )
    torch.testing.assert_close(moved[:, :, 1], moved[:1, :, 1].expand(rows, -1))
    if after > 1:
        assert (moved[0, :, 1].diff() > 0).all()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("size", [32, 48, 96, 128, (64, 96), (96, 32)])
def test_sequences_are_resized_along_themselves(stage: int, size: int | tuple[int, int]) -> None:
    """Token j of n' lies where (j + ½)·n/n' - ½ lay among the n, ends held."""
    new = SEQUENCE.replace(img_size=size)
    before, after = SEQUENCE.grids[stage][1], new.grids[stage][1]
    rising = torch.arange(before).float().view(1, -1, 1)
    moved = resize_positions(rising, SEQUENCE, new, stage)
    place = (torch.arange(after) + 0.5) * before / after - 0.5
    torch.testing.assert_close(moved.flatten(), place.clamp(0, before - 1))


@pytest.mark.parametrize(
    ("config", "stage"), [(DEIT, 0), (POOLED_WITH_TOKEN, 1), (POOLED_WITH_TOKEN, 2)]
)
def test_the_class_token_keeps_its_position(config: HVTConfig, stage: int) -> None:
    embedding = positions(config, stage)
    new = config.replace(img_size=(96, 128))
    moved = resize_positions(embedding, config, new, stage)
    assert moved.shape == (1, new.tokens[stage], 4)
    assert torch.equal(moved[:, :1], embedding[:, :1])

    bare_old, bare_new = (c.replace(class_token=False) for c in (config, new))
    rest = resize_positions(embedding[:, 1:], bare_old, bare_new, stage)
    torch.testing.assert_close(moved[:, 1:], rest)


# ── patch filters ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [12, 16])
def test_larger_filters_answer_an_enlarged_patch_as_the_old_did_the_patch(size: int) -> None:
    """What FlexiViT's pseudo-inverse is for: ⟨w', enlarge(x)⟩ = ⟨w, x⟩ for every patch x."""
    weight, patches = torch.randn(4, 3, 8, 8), torch.randn(5, 3, 8, 8)
    enlarged = F.interpolate(patches, (size, size), mode="bicubic", antialias=True)
    torch.testing.assert_close(
        F.conv2d(enlarged, resize_patches(weight, size)),
        F.conv2d(patches, weight),
        rtol=1e-3,
        atol=1e-3,
    )
