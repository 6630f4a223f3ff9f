"""ToMe's merging: pairs, averages, costs, export."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hvt
from hvt.merging import Merge, match, merge_tokens


def sizes(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[:2])


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 30), st.integers(0, 3), st.data())
def test_each_merged_token_is_the_mean_of_what_it_stands_for(
    n: int, prefix: int, data: st.DataObject
) -> None:
    merged = data.draw(st.integers(0, n // 2))
    torch.manual_seed(n)
    x = torch.randn(2, prefix + n, 8)
    y, size = Merge(merged, prefix)(x, torch.randn(2, prefix + n, 4), sizes(x))
    assert y.shape == (2, prefix + n - merged, 8)
    assert torch.equal(y[:, :prefix], x[:, :prefix])
    # Nothing is lost: the weighted sum over all tokens is unchanged, and so is their number.
    assert torch.allclose((y * size.unsqueeze(2)).sum(1), x.sum(1), atol=1e-4)
    assert torch.equal(size.sum(1), torch.full((2,), float(prefix + n)))


def test_the_most_similar_pair_goes_first() -> None:
    keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.1, 1.0]]])
    stays, joins = match(keys, 1)  # patch 2 is closest to patch 3; patch 0 to none
    assert stays.tolist() == [[0]]
    assert joins[0].int().tolist() == [[0, 0], [0, 1]]
    x = torch.arange(4.0).reshape(1, 4, 1)
    y, size = merge_tokens(x, sizes(x), stays, joins)
    assert y.flatten().tolist() == [0.0, 1.0, 2.5]
    assert size.flatten().tolist() == [1.0, 1.0, 2.0]


def small(**fields: object) -> hvt.HVTConfig:
    return hvt.HVTConfig(
        img_size=64, num_heads=2, head_dim=16, depth=4, num_classes=5, class_token=True, **fields
    )


@pytest.mark.parametrize("proportional", [False, True])
@pytest.mark.parametrize("merge", [3, (0, 4, 0, 2), 100])
def test_tokens_and_cost_are_those_of_the_model(merge: object, proportional: bool) -> None:
    config = small(merge=merge, proportional_attention=proportional)
    model = hvt.HVT(config).eval()
    seen: list[int] = []
    for block in model.blocks:
        block.mlp.register_forward_pre_hook(lambda _, x: seen.append(x[0].shape[1]))
    model(torch.randn(2, 3, 64, 64))
    assert seen == hvt.cost(config).mlp_tokens() == list(config.kept or ())


def test_no_merging_is_the_plain_model() -> None:
    plain, merging = hvt.HVT(small()).eval(), hvt.HVT(small(merge=0)).eval()
    merging.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 64, 64)
    assert torch.allclose(plain(images), merging(images), atol=1e-6)


def test_equal_tokens_merge_without_a_trace() -> None:
    """With proportional attention, merging copies of one token changes nothing."""
    torch.manual_seed(0)
    plain = hvt.HVT(small()).eval()
    merging = hvt.HVT(small(merge=4, proportional_attention=True)).eval()
    with torch.no_grad():
        plain.pos_embed[:, 1:] = 0
    merging.load_state_dict(plain.state_dict())
    images = torch.full((1, 3, 64, 64), 0.5)
    assert torch.allclose(plain(images), merging(images), atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"merge": -1}, "merge=-1 must be a whole number of at least 0"),
        ({"merge": (1, 2)}, "merge has 2 numbers for depth=4"),
        ({"merge": 2, "stages": 2}, "merge and pooling exclude each other"),
        ({"merge": 2, "retention": (17, 9, 9, 9)}, "merge and retention exclude each other"),
    ],
)
def test_errors(fields: dict[str, object], says: str) -> None:
    with pytest.raises(hvt.HVTError, match=says):
        small(**fields)


def test_it_can_be_trained() -> None:
    model = hvt.HVT(small(merge=3, proportional_attention=True))
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.set_grad_checkpointing()
    model(torch.randn(2, 3, 64, 64)).sum().backward()
