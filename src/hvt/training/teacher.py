"""Distillation: a frozen teacher whose logits a student follows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from ..data.evaluation import per_channel
from ..errors import HVTError
from ..model import HVT
from ..resolve import Source, build, resolve


class Teacher(nn.Module):
    """A frozen model whose logits a student follows; DeiT's soft and hard distillation.

    There is no distillation token: the student's own head, on its averaged tokens, is taught. It
    sees the student's images in its own size and normalisation.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, student: HVT, kind: str, tau: float) -> None:
        super().__init__()
        self.model = model.float().eval().requires_grad_(False)
        self.kind, self.tau = kind, tau
        wants = resolve_model_data_config(model)
        channels, *self.size = wants["input_size"]
        mean, std = _normalisation(wants, channels)
        own_mean, own_std = _normalisation(student.pretrained_cfg, student.config.in_chans)
        self.register_buffer("scale", own_std / std)
        self.register_buffer("shift", (own_mean - mean) / std)

    def train(self, mode: bool = True) -> Teacher:
        """Stay in evaluation mode, whatever is asked."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """The teacher's logits for images as the student sees them."""
        images = images * self.scale + self.shift
        if list(images.shape[-2:]) != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        logits: Tensor = self.model(images)
        return logits

    def loss(self, logits: Tensor, images: Tensor) -> Tensor:
        """How far the student's logits are from the teacher's logits for the same images."""
        teacher_logits = self(images).float()
        if self.kind == "hard":
            return F.cross_entropy(logits.float(), teacher_logits.argmax(dim=1))
        tau = self.tau
        return F.kl_div(
            F.log_softmax(logits.float() / tau, dim=1),
            F.log_softmax(teacher_logits / tau, dim=1),
            reduction="batchmean",
            log_target=True,
        ) * (tau * tau)


def find_teacher(name: str, student: HVT, kind: str, tau: float) -> Teacher:
    """A teacher from a checkpoint of ours or, by name, from timm with its published weights.

    timm's names may have its prefixes `hf-hub:` and `local-dir:`.
    """
    hub = name.startswith(("hf-hub:", "local-dir:"))
    model = build(Source("timm", name) if hub else resolve(name), pretrained=True)
    outputs = getattr(model, "num_classes", student.num_classes)
    if outputs != student.num_classes:
        raise HVTError(f"teacher {name} has {outputs} classes, the data {student.num_classes}")
    named = isinstance(model, HVT) and model.class_names and student.class_names
    if named and model.class_names != student.class_names:
        raise HVTError(
            f"teacher {name} has other classes than the data, or another order: if only their "
            "names differ, rename them by hvt.save(hvt.load(TEACHER), FILE, class_names=NAMES)"
        )
    channels = resolve_model_data_config(model)["input_size"][0]
    if channels not in (3, student.config.in_chans):
        raise HVTError(
            f"teacher {name} takes {channels} channels, the student {student.config.in_chans}"
        )
    return Teacher(model, student, kind, tau)


def _normalisation(cfg: dict[str, Any], channels: int) -> list[Tensor]:
    """Mean and standard deviation of images, each (C, 1, 1)."""
    values = (per_channel(cfg[name], channels) for name in ("mean", "std"))
    return [torch.tensor(each).view(-1, 1, 1) for each in values]
