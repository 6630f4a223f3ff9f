"""A linear head by logistic regression, the MLP below it by AdamW, and calibration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..elastic import replica
from ..model import HVT

FOLDS = 5
EPOCHS, BATCH = 20, 64
STRENGTHS = tuple(10 ** (half / 2) for half in range(9))
"""Of the L2 penalty over the number of images, on features of unit variance."""


def fit_head(
    head: nn.Linear, x: Tensor, labels: Tensor, weights: Tensor | None = None, seed: int = 0
) -> tuple[Tensor, float]:
    """Fit a linear layer to features `(N, D)`, whose classes may have weights.

    Returns the probabilities of each image by a head that was fitted without it, `(N, classes)`,
    and the L2 penalty that cross-validation chose. Features are centred and scaled to unit variance
    by one number, which the head then contains.
    """
    x, weights = x.double(), None if weights is None else weights.double()
    mean = x.mean(dim=0)
    scale = (x - mean).square().mean().sqrt().clamp(min=1e-12)
    z = torch.cat(((x - mean) / scale, torch.ones(len(x), 1)), dim=1)
    folds, best = _folds(labels, seed), None
    zeros = torch.zeros(head.out_features, z.shape[1], dtype=torch.float64)
    starts = [zeros] * FOLDS
    for strength in reversed(STRENGTHS):  # the strongest first: each starts from the one before
        held_out = torch.zeros(len(labels), head.out_features, dtype=torch.float64)
        for fold in folds.unique().tolist():
            kept, left = folds != fold, folds == fold
            starts[fold] = _logistic(z[kept], labels[kept], weights, strength, starts[fold])
            held_out[left] = z[left] @ starts[fold].T
        loss = F.cross_entropy(held_out, labels, weights, reduction="sum").item()
        if best is None or loss < best[0]:
            best = loss, strength, held_out
    assert best is not None
    _, strength, held_out = best
    theta = _logistic(z, labels, weights, strength, zeros)
    weight = theta[:, :-1] / scale
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(theta[:, -1] - weight @ mean)
    return held_out.softmax(dim=1).float(), strength


def _logistic(
    z: Tensor, labels: Tensor, weights: Tensor | None, strength: float, start: Tensor
) -> Tensor:
    """Weights and bias `(classes, D + 1)` that minimise the penalised cross-entropy; convex."""

    def loss(theta: Tensor) -> Tensor:
        entropy = F.cross_entropy(z @ theta.T, labels, weights, reduction="sum")
        return (entropy + 0.5 * strength * theta[:, :-1].square().sum()) / len(labels)

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
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    order = order[labels[order].argsort(stable=True)]
    folds = torch.empty_like(order)
    folds[order] = torch.arange(len(labels)) % FOLDS
    return folds


def tail(model: HVT, x: Tensor) -> Tensor:
    """The last MLP and norm, applied to class tokens taken before them: `(N, D)` → `(N, D)`."""
    block: Any = model.blocks[-1]
    return model.forward_head(model.norm(block.feed_forward(x.unsqueeze(1))), pre_logits=True)


def can_cut(model: HVT) -> bool:
    """Whether the head sees only the class token, which the tail treats by itself."""
    block: Any = model.blocks[-1]
    return model.global_pool == "token" and model.head_dist is None and block.pool is None


def without_tail(model: HVT) -> HVT:
    """A model on the same weights whose features are the class tokens before the tail."""
    body = replica(model)
    body.blocks[-1].feed_forward = lambda x: x
    body.norm = body.fc_norm = nn.Identity()
    return body


def fit_tail(model: HVT, x: Tensor, labels: Tensor, weights: Tensor | None, seed: int) -> None:
    """Train the tail and the head from their present weights on class tokens before the tail.

    The hyperparameters were chosen on CIFAR-100's training images and on photos by their origin.
    """
    torch.manual_seed(seed)
    weights = None if weights is None else weights.to(x)
    block: Any = model.blocks[-1]
    trained = block.norm2, block.mlp, block.ls2, model.norm, model.fc_norm, model.head
    parameters = [parameter for module in trained for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.05)
    steps = EPOCHS * -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(EPOCHS):
        for i in torch.randperm(len(x), device=x.device).split(BATCH):
            logits = model.head(F.dropout(tail(model, x[i]), 0.5))
            loss = F.cross_entropy(logits, labels[i], weights, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


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
    own = probabilities.gather(1, labels[:, None])[:, 0]
    threshold = torch.full(probabilities.shape[1:], torch.inf)
    threshold.scatter_reduce_(0, labels, own, "mean", include_self=False)
    confident = torch.where(probabilities >= threshold, probabilities, 0.0)
    most, guess = confident.max(dim=1)
    places = ((most > 0) & (guess != labels)).nonzero()[:, 0]
    ranked = places[(most - own)[places].argsort(descending=True, stable=True)]
    return [(i, int(guess[i])) for i in ranked.tolist()]
