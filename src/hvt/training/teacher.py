"""Distillation: a frozen teacher whose logits a student follows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from ..checkpoint.save_load import load
from ..data.evaluation import per_channel
from ..errors import HVTError, did_you_mean
from ..model import HVT
from ..zoo import BUILT_IN

Normal = tuple[Sequence[float], Sequence[float]]


class Teacher(nn.Module):
    """A frozen model whose logits a student follows; DeiT's soft and hard distillation.

    There is no distillation token: the student's own head, on its averaged tokens, is taught.
    `size` is that of the teacher's images. `normal` and `student_normal` are the mean and
    standard deviation, channel by channel, that teacher and student want images normalised by.
    `order` says which of the teacher's classes each of the student's is, where they differ.
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
        order: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.order = order
        self.model = model.float().eval().requires_grad_(False)
        self.kind, self.tau, self.size = kind, tau, size
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in normal)
        own_mean, own_std = (torch.tensor(values).view(-1, 1, 1) for values in student_normal)
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
        return logits if self.order is None else logits[:, self.order]

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
    if name in BUILT_IN or os.path.exists(name):  # noqa: PTH110 - False for a name that cannot be
        model: nn.Module = load(name).float()
    elif name.startswith(("hf-hub:", "local-dir:")) or timm.is_model(name):
        try:
            model = timm.create_model(name, pretrained=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise HVTError(f"cannot get the weights of teacher {name}: {error}") from error
    else:
        raise HVTError(
            f"teacher {name!r} is neither a file nor a timm model: "
            f"{did_you_mean(name, timm.list_models())}"
        )
    outputs = getattr(model, "num_classes", student.num_classes)
    if outputs != student.num_classes:
        raise HVTError(
            f"teacher {name} knows {outputs} classes, the data has {student.num_classes}"
        )
    order = _order(name, model, outputs, student.class_names)
    wants = resolve_model_data_config(model)
    _, *size = wants["input_size"]
    channels = _channels(model)
    if channels not in (3, student.config.in_chans):
        raise HVTError(
            f"teacher {name} takes {channels} channels, the student {student.config.in_chans}"
        )
    normal = _normal(wants, channels)
    student_normal = _normal(student.pretrained_cfg, student.config.in_chans)
    return Teacher(model, kind, tau, tuple(size), normal, student_normal, order)


def _normal(cfg: Mapping[str, Any], channels: int) -> Normal:
    return per_channel(cfg["mean"], channels), per_channel(cfg["std"], channels)


def _channels(model: nn.Module) -> int:
    """The channels that its first convolution takes: timm describes a grey model as of 3, too."""
    return next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)


def _class_names(model: nn.Module, outputs: int) -> tuple[str, ...]:
    """The names of a teacher's classes, where it has them; timm's are in its description."""
    names = getattr(model, "pretrained_cfg", {}).get("label_names") or ()
    return tuple(map(str, names)) if len(names) == outputs else ()


def _order(
    teacher: str, model: nn.Module, outputs: int, names: Sequence[str] | None
) -> list[int] | None:
    """Where the data's classes are among a teacher's; one that names none has them in order.

    So has one of timm's whose names are all of another kind, such as words for ImageNet's numbers.
    """
    theirs = _class_names(model, outputs)
    if not theirs or not names or theirs == tuple(names):
        return None
    if not isinstance(model, HVT) and not {*theirs} & {*names}:
        return None
    unknown = [name for name in names if name not in theirs]
    if unknown or len({*theirs}) < len(theirs):
        how = "save it with the data's names, hvt.save(hvt.load(TEACHER), FILE, class_names=NAMES)"
        if not isinstance(model, HVT):
            how = "put the data's names into label_names of its config.json"
        raise HVTError(
            f"teacher {teacher} calls its classes otherwise than the data, {theirs[0]!r} … and "
            f"{names[0]!r} …: if they are the same in the same order, {how}"
        )
    return [theirs.index(name) for name in names]
