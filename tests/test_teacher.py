"""Distillation from a teacher: its loss by hand, its classes, sizes and channels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import Tensor

import hvt
from hvt import HVTError
from hvt.training.teacher import find_teacher

Build = Callable[..., hvt.HVT]


@pytest.fixture
def student(build: Build) -> hvt.HVT:
    return build("hvt_ti_1")


@pytest.fixture
def checkpoint(build: Build, tmp_path: Path) -> Path:
    """A teacher of ours, of another size than the student."""
    torch.manual_seed(1)
    hvt.save(build("hvt_ti_2", img_size=32), tmp_path / "teacher.safetensors")
    return tmp_path / "teacher.safetensors"


@pytest.mark.parametrize(("kind", "tau"), [("soft", 1.0), ("soft", 3.0), ("hard", 1.0)])
def test_distillation(
    checkpoint: Path, student: hvt.HVT, images: Tensor, kind: str, tau: float
) -> None:
    teacher = find_teacher(str(checkpoint), student, kind, tau)
    logits = student(images)
    ours, theirs = ((x / tau).softmax(1) for x in (logits, teacher(images)))
    if kind == "soft":
        expected = tau * tau * (theirs * (theirs.log() - ours.log())).sum() / len(images)
    else:
        expected = -ours.gather(1, theirs.argmax(1, keepdim=True)).log().mean()
    assert expected > 0.01
    assert teacher.loss(logits, images).item() == pytest.approx(expected.item(), rel=1e-3)


def test_a_teacher_of_our_own_sees_the_image_at_its_size(
    checkpoint: Path, student: hvt.HVT, images: Tensor
) -> None:
    teacher = find_teacher(str(checkpoint), student, "soft", 1.0)
    small = torch.nn.functional.interpolate(images, (32, 32), mode="bicubic", antialias=True)
    assert torch.equal(teacher(images), hvt.load(checkpoint)(small))


def test_a_timm_teacher_gets_its_own_normalisation(tmp_path: Path, student: hvt.HVT) -> None:
    save_for_hf(timm.create_model("test_vit", num_classes=10), tmp_path, safe_serialization=True)
    name = f"local-dir:{tmp_path}"
    teacher = find_teacher(name, student, "soft", 1.0)
    own = timm.create_model(name, pretrained=True).eval()
    mean, std = own.pretrained_cfg["mean"], own.pretrained_cfg["std"]
    assert tuple(mean) != tuple(student.pretrained_cfg["mean"])
    pixels = torch.rand(2, 3, *own.pretrained_cfg["input_size"][1:])

    def normal(mean: Any, std: Any) -> Tensor:
        return (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)

    seen = normal(student.pretrained_cfg["mean"], student.pretrained_cfg["std"])
    assert torch.allclose(teacher(seen), own(normal(mean, std)), atol=1e-5)


def test_a_teacher_stays_as_it_is(checkpoint: Path, student: hvt.HVT, images: Tensor) -> None:
    teacher = find_teacher(str(checkpoint), student, "soft", 3.0)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    teacher.train()
    assert not any(module.training for module in teacher.modules())
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    teacher.loss(student(images), images).backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert any(parameter.grad is not None for parameter in student.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())


@pytest.mark.parametrize("in_chans", [1, 3])
def test_a_teacher_of_a_student_of_greys(
    build: Build, images: Tensor, tmp_path: Path, in_chans: int
) -> None:
    student, path = build("hvt_ti_1", in_chans=1), tmp_path / "teacher.safetensors"
    hvt.save(build("hvt_ti_2", img_size=32, in_chans=in_chans), path)
    assert find_teacher(str(path), student, "soft", 1.0)(images[:, :1]).shape == (2, 10)


@pytest.mark.parametrize(
    ("classes", "chans", "match"),
    [(7, 3, "has 7 classes, the data 10"), (10, 1, "takes 1 channels, the student 3")],
)
def test_a_teacher_that_does_not_fit_is_an_error(
    build: Build, student: hvt.HVT, tmp_path: Path, classes: int, chans: int, match: str
) -> None:
    other = tmp_path / "other.safetensors"
    hvt.save(build("hvt_ti_1", num_classes=classes, in_chans=chans), other)
    with pytest.raises(HVTError, match=match):
        find_teacher(str(other), student, "soft", 3.0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vit_small_patch16_18x2_224", "weights of .* could not be fetched .*No pretrained"),
        ("test_vit.r160_in1k", "weights of .* could not be fetched"),
        ("resnet5o", "neither a model nor a checkpoint: .*resnet50"),
        ("nowhere.pth", "cannot read nowhere.pth"),
    ],
)
def test_a_teacher_without_weights_is_an_error(
    student: hvt.HVT, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HVTError, match=reason):
        find_teacher(name, student, "soft", 3.0)


def test_a_teacher_of_other_classes_is_an_error(
    build: Build, student: hvt.HVT, tmp_path: Path
) -> None:
    path = tmp_path / "teacher.safetensors"
    hvt.save(build("hvt_ti_2"), path, class_names=list("jihgfedcba"))
    find_teacher(str(path), student, "soft", 1.0)  # the data has no names
    student.pretrained_cfg["label_names"] = tuple("abcdefghij")
    with pytest.raises(HVTError, match="has other classes than the data, or another order"):
        find_teacher(str(path), student, "soft", 1.0)
