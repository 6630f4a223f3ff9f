"""A part of the training data set aside, class by class and the same for everybody."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence

import torch

from ..errors import HVTError


def split_stratified(
    labels: Sequence[int] | torch.Tensor, fraction: float, seed: int
) -> tuple[list[int], list[int]]:
    """Indices of the training and the validation part, both ascending.

    `fraction` of each class goes to validation, but at least one image of a class and never all.
    Each class draws for itself, so what happens in one class changes nothing in another.
    """
    chosen = _draw(labels, fraction, seed, lone=False)
    if not chosen:
        raise HVTError("there are not enough images to split: some class needs two or more")
    train = [index for index in range(len(labels)) if index not in chosen]
    return train, sorted(chosen)


def subsample(labels: Sequence[int] | torch.Tensor, fraction: float, seed: int) -> list[int]:
    """Indices of `fraction` of each class, ascending, and of at least one image of each.

    They are `split_stratified`'s second part, and with them the only image of a class.
    """
    return sorted(_draw(labels, fraction, seed, lone=True))


def _draw(labels: Sequence[int] | torch.Tensor, fraction: float, seed: int, lone: bool) -> set[int]:
    """`fraction` of each class; `lone`: whether the only image of a class is taken."""
    if not 0 < fraction < 1:
        raise HVTError(f"the fraction {fraction} is out of range: give a number between 0 and 1")
    members: dict[int, list[int]] = defaultdict(list)
    for index, label in enumerate(torch.as_tensor(labels, dtype=torch.int64).tolist()):
        members[label].append(index)
    chosen: set[int] = set()
    for label, indices in members.items():
        # Python promises this generator's numbers for all versions, unlike numpy and torch.
        draw = random.Random(f"{seed}/{label}")
        place = {index: draw.random() for index in indices}
        order = sorted(indices, key=place.__getitem__)
        count = math.floor(len(indices) * fraction + 0.5)
        most = len(indices) - 1 or int(lone)
        chosen.update(order[: min(max(count, 1), most)])
    return chosen
