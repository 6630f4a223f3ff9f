"""Muon: matrices move by their orthogonal momentum, everything else as AdamW moves it."""

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training import tiny, trainer_of

from hvt.training.muon import Muon, orthogonal
from hvt.training.trainer import Trainer


@pytest.mark.parametrize("shape", [(1, 24, 24), (3, 16, 48), (3, 48, 16), (2, 5, 3)])
def test_singular_values_come_close_to_one(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    near = orthogonal(x)
    assert near.shape == x.shape
    values = (u.mT @ near @ v.mT).diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.1  # the smallest of a square one has a long way to go
    assert values.median() > 0.65
    assert values.max() < 1.25


def weights() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = {"matrix": (8, 12), "other": (8, 12), "patches": (6, 3, 2, 2), "bias": (12,),
              "positions": (1, 5, 12)}  # fmt: skip
    return {k: torch.randn(shape, generator=draw).requires_grad_() for k, shape in shapes.items()}


def stepped(decay: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after one step of Muon and one of AdamW, from equal gradients."""
    ours, theirs = weights(), weights()
    adamw = torch.optim.AdamW(theirs.values(), lr=0.1, weight_decay=decay)
    muon = Muon(torch.optim.AdamW(ours.values(), lr=0.1, weight_decay=decay).param_groups)
    for name in ours:
        ours[name].grad = torch.cos(ours[name].detach() * 3)
        theirs[name].grad = ours[name].grad.clone()
    adamw.step()
    muon.step()
    return ours, theirs


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_matrix_moves_by_its_orthogonal_gradient(decay: float) -> None:
    ours, theirs = stepped(decay)
    for name, before in weights().items():
        if name in ("bias", "positions"):  # what is not a matrix moves as AdamW moves it
            assert torch.equal(ours[name], theirs[name])
            continue
        flat = before.detach().flatten(1)
        wanted = orthogonal(torch.cos(flat * 3)[None])[0] * 0.2 * math.sqrt(max(flat.shape))
        moved = ours[name].detach().flatten(1) - flat * (1 - 0.1 * decay)
        assert torch.allclose(moved, -0.1 * wanted, atol=1e-6), name


def test_its_state_is_all_there_is_to_know(tmp_path: Path) -> None:
    """Steps after a restore are those that would have come without."""

    def trainer(name: str) -> Trainer:
        recipe = tiny(tmp_path / name, optimizer="muon")
        return trainer_of(recipe)

    first, second = trainer("first"), trainer("second")
    batches = first.batches.epoch(0)
    first.learner.step(batches, 0)
    second.learner.restore(copy.deepcopy(first.learner.state()))
    first.learner.step(batches, 1)
    second.learner.step(second.batches.epoch(0, 1), 1)
    left, right = (t.learner.model.state_dict() for t in (first, second))
    assert all(torch.equal(left[name], right[name]) for name in left)
