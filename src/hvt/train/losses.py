"""What a training minimises: the labels, and a teacher's opinion where there is one."""

from __future__ import annotations

from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import HVTError, nearest
from ..weights import load


def label_loss(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Cross-entropy with class indices `(B,)` or, after mixup, with shares `(B, classes)`.

    Mixed targets are smoothed by mixup itself.
    """
    if target.ndim == 2:
        return F.cross_entropy(logits.float(), target)
    return F.cross_entropy(logits.float(), target, label_smoothing=smoothing)


class Teacher(nn.Module):
    """A frozen model whose logits a student follows; DeiT's soft and hard distillation.

    There is no distillation token: the student's own head, on its averaged tokens, is taught.
    """

    def __init__(self, model: nn.Module, size: tuple[int, int], kind: str, tau: float) -> None:
        super().__init__()
        self.model, self.size, self.kind, self.tau = (
            model.eval().requires_grad_(False),
            size,
            kind,
            tau,
        )

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-2:] != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        return self.model(images)

    def loss(self, logits: Tensor, images: Tensor) -> Tensor:
        opinion = self(images).float()
        if self.kind == "hard":
            return F.cross_entropy(logits.float(), opinion.argmax(dim=1))
        tau = self.tau
        return F.kl_div(
            F.log_softmax(logits.float() / tau, dim=1),
            F.log_softmax(opinion / tau, dim=1),
            reduction="batchmean",
            log_target=True,
        ) * (tau * tau)


def find_teacher(name: str, num_classes: int, kind: str, tau: float) -> Teacher:
    """A teacher from a checkpoint of ours or, by name, from timm with its published weights."""
    if Path(name).exists():
        loaded = load(name)
        model: nn.Module = loaded
        size = loaded.config.image
    elif timm.is_model(name):
        try:
            model = timm.create_model(name, pretrained=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise HVTError(f"the weights of teacher {name} cannot be fetched: {error}") from error
        size = timm.data.resolve_model_data_config(model)["input_size"][1:]
    else:
        raise HVTError(
            f"teacher {name!r} is neither a file nor a timm model: "
            f"{nearest(name, timm.list_models())[:200]}"
        )
    outputs = getattr(model, "num_classes", num_classes)
    if outputs != num_classes:
        raise HVTError(f"teacher {name} knows {outputs} classes, the data has {num_classes}")
    return Teacher(model, size, kind, tau)
