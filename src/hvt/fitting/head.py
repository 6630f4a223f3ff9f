"""A linear head on fixed features: logistic regression, its regularisation by cross-validation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

FOLDS = 5
STRENGTHS = tuple(float(10**power) for power in np.arange(0.0, 4.5, 0.5))
"""Of the L2 penalty over the number of images, on features of unit variance."""


@dataclass(frozen=True)
class Head:
    """Logits are `x @ weight.T + bias`."""

    weight: Tensor  # (classes, D)
    bias: Tensor  # (classes,)
    strength: float
    """The L2 penalty that cross-validation chose."""
    held_out: Tensor  # (N, classes)
    """Probabilities of each training image by a head that was fitted without it."""

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


def fit_head(
    x: Tensor, labels: Tensor, classes: int, *, balance: bool = False, seed: int = 0
) -> Head:
    """Fit to features `(N, D)`; `balance` gives every class the same weight.

    Features are centred and scaled to unit variance by one number, which the head then contains.
    """
    x = x.double()
    mean = x.mean(dim=0)
    scale = (x - mean).square().mean().sqrt().clamp(min=1e-12)
    z = (x - mean) / scale
    counts = torch.bincount(labels, minlength=classes).double()
    weights = len(labels) / (classes * counts[labels]) if balance else torch.ones(len(labels))
    folds = _folds(labels, seed)
    best: tuple[float, float, Tensor] | None = None
    zeros = torch.zeros(classes, z.shape[1] + 1, dtype=torch.float64)
    starts = [zeros] * (int(folds.max()) + 1)
    for strength in reversed(STRENGTHS):  # the strongest first: each starts from the one before
        held_out = torch.zeros(len(labels), classes, dtype=torch.float64)
        for fold in range(len(starts)):
            kept, left = folds != fold, folds == fold
            theta = _logistic(z[kept], labels[kept], weights[kept], strength, starts[fold])
            starts[fold] = theta
            held_out[left] = _logits(theta, z[left])
        loss = F.cross_entropy(held_out, labels, reduction="none") @ weights.double() / len(labels)
        if best is None or loss.item() < best[0]:
            best = (loss.item(), strength, held_out)
    assert best is not None
    _, strength, held_out = best
    theta = _logistic(z, labels, weights, strength, zeros)
    weight = theta[:, :-1] / scale
    bias = theta[:, -1] - weight @ mean
    return Head(weight.float(), bias.float(), strength, held_out.softmax(dim=1).float())


def _logits(theta: Tensor, z: Tensor) -> Tensor:
    return z @ theta[:, :-1].T + theta[:, -1]


def _logistic(z: Tensor, labels: Tensor, weights: Tensor, strength: float, start: Tensor) -> Tensor:
    """Weights and bias `(classes, D + 1)` that minimise the penalised cross-entropy; convex."""

    def loss(theta: Tensor) -> Tensor:
        each = F.cross_entropy(_logits(theta, z), labels, reduction="none")
        penalty = 0.5 * strength * theta[:, :-1].square().sum()
        return (each @ weights.double() + penalty) / len(labels)

    return _minimise(loss, start)


def _minimise(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Where L-BFGS ends from a start."""
    x = start.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [x], max_iter=200, tolerance_grad=1e-5, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(x)
        value.backward()
        return value

    optimizer.step(closure)
    return x.detach()


def _folds(labels: Tensor, seed: int) -> Tensor:
    """A fold for each image, every class spread over all of them."""
    largest = int(torch.bincount(labels).max())
    if largest == 1:  # no fold can have a class that it is judged on
        return torch.arange(len(labels)) % FOLDS
    count = min(FOLDS, largest)
    folds = torch.zeros(len(labels), dtype=torch.int64)
    draw = torch.Generator().manual_seed(seed)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        order = members[torch.randperm(len(members), generator=draw)]
        folds[order] = torch.arange(len(order)) % count
    return folds


def temperature(logits: Tensor, labels: Tensor) -> float:
    """What to divide logits by for calibrated probabilities, by the likelihood of the labels."""

    def loss(log_t: Tensor) -> Tensor:
        # A weak prior at 1 keeps a few images, all of them right, from making it zero.
        return F.cross_entropy(logits.double() / log_t.exp(), labels) + log_t**2 / len(labels)

    return float(_minimise(loss, torch.zeros((), dtype=torch.float64)).exp())


def label_errors(probabilities: Tensor, labels: Tensor) -> list[tuple[int, int]]:
    """Images that probably have another label, and that label, the most certain first.

    Confident learning (Northcutt et al., 2021): a class is confident about an image if its held-out
    probability is at least the mean over the images with that label.
    """
    threshold = torch.full(probabilities.shape[1:], torch.inf)
    for label in labels.unique().tolist():
        threshold[label] = probabilities[labels == label, label].mean()
    confident = torch.where(probabilities >= threshold, probabilities, 0.0)
    most, guess = confident.max(dim=1)
    places = ((most > 0) & (guess != labels)).nonzero()[:, 0]
    margin = most - probabilities.gather(1, labels[:, None])[:, 0]
    ranked = places[margin[places].argsort(descending=True, stable=True)]
    return [(i, int(guess[i])) for i in ranked.tolist()]
