"""Distillation: a frozen teacher whose logits a student follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from ..data.evaluation import per_channel
from ..errors import HVTError
from ..model import HVT
from ..resolve import Source, build, resolve

Normal = tuple[Sequence[float], Sequence[float]]


class Teacher(nn.Module):
    """A frozen model whose logits a student follows; DeiT's soft and hard distillation.

    There is no distillation token: the student's own head, on its averaged tokens, is taught.
    `normal` and `student_normal` are the mean and standard deviation, channel by channel, that
    teacher and student want images normalised by.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        model: nn.Module,
        kind: str,
        tau: float,
        size: tuple[int, int],
        normal: Normal,
        student_normal: Normal,
    ) -> None:
        super().__init__()
        self.model = model.float().eval().requires_grad_(False)
        self.kind, self.tau, self.size = kind, tau, size
        mean, std, own_mean, own_std = (
            torch.tensor(values).view(-1, 1, 1) for values in (*normal, *student_normal)
        )
        self.register_buffer("scale", own_std / std)
        self.register_buffer("shift", (own_mean - mean) / std)

    def train(self, mode: bool = True) -> Teacher:
        """Stay in evaluation mode, whatever is asked."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """The teacher's logits for images as the student sees them."""
        images = images * self.scale + self.shift
        if tuple(images.shape[-2:]) != self.size:
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
    wants = resolve_model_data_config(model)
    channels, *size = wants["input_size"]
    if channels not in (3, student.config.in_chans):
        raise HVTError(
            f"teacher {name} takes {channels} channels, the student {student.config.in_chans}"
        )
    normal = _normal(wants, channels)
    student_normal = _normal(student.pretrained_cfg, student.config.in_chans)
    return Teacher(model, kind, tau, tuple(size), normal, student_normal)


def _normal(cfg: Mapping[str, Any], channels: int) -> Normal:
    return per_channel(cfg["mean"], channels), per_channel(cfg["std"], channels)
