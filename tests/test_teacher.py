"""Distillation from a teacher: its loss by hand, its classes, sizes and channels."""

import math
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
from hvt.training.teacher import Teacher, find_teacher

Build = Callable[..., hvt.HVT]


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(6, 10)


def softmax(rows: Tensor) -> list[list[float]]:
    return [[math.exp(v) / sum(map(math.exp, row)) for v in row] for row in rows.tolist()]


def cross_entropy(logits: Tensor, targets: list[list[float]]) -> float:
    rows = zip(softmax(logits), targets, strict=True)
    losses = [-sum(t * math.log(p) for t, p in zip(ts, ps, strict=True)) for ps, ts in rows]
    return sum(losses) / len(losses)


@pytest.fixture
def student(build: Build) -> hvt.HVT:
    return build("hvt_ti_1")


@pytest.fixture
def checkpoint(build: Build, tmp_path: Path) -> Path:
    """A teacher of ours, of another size than the student."""
    torch.manual_seed(1)
    hvt.save(build("hvt_ti_2", img_size=32), tmp_path / "teacher.safetensors")
    return tmp_path / "teacher.safetensors"


def timm_folder(folder: Path, **kwargs: Any) -> str:
    """A small timm model with random weights, as timm saves it."""
    model = timm.create_model("test_vit", num_classes=10, **kwargs.get("model_args", {}))
    save_for_hf(model, folder, safe_serialization=True, **kwargs)
    return f"local-dir:{folder}"


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_soft_distillation(checkpoint: Path, student: hvt.HVT, images: Tensor, tau: float) -> None:
    teacher = find_teacher(str(checkpoint), student, "soft", tau)
    logits = student(images)
    ours, theirs = softmax(logits / tau), softmax(teacher(images) / tau)
    divergence = sum(
        t * (math.log(t) - math.log(s))
        for ts, ss in zip(theirs, ours, strict=True)
        for t, s in zip(ts, ss, strict=True)
    )
    expected = tau * tau * divergence / len(images)
    assert expected > 0.01
    assert teacher.loss(logits, images).item() == pytest.approx(expected, rel=1e-3)


def test_hard_distillation(checkpoint: Path, student: hvt.HVT, images: Tensor) -> None:
    teacher = find_teacher(str(checkpoint), student, "hard", 3.0)
    logits = student(images)
    answers = teacher(images).argmax(dim=1).tolist()
    expected = cross_entropy(logits, [[float(c == a) for c in range(10)] for a in answers])
    assert teacher.loss(logits, images).item() == pytest.approx(expected, rel=1e-5)


def test_a_teacher_of_our_own_sees_the_image_at_its_size(
    checkpoint: Path, student: hvt.HVT, images: Tensor
) -> None:
    teacher = find_teacher(str(checkpoint), student, "soft", 1.0)
    small = torch.nn.functional.interpolate(images, (32, 32), mode="bicubic", antialias=True)
    assert torch.equal(teacher(images), hvt.load(checkpoint)(small))


def test_a_timm_teacher_gets_its_own_normalisation(tmp_path: Path, student: hvt.HVT) -> None:
    name = timm_folder(tmp_path / "vit")
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


def test_a_teacher_of_colours_teaches_a_student_of_greys(
    checkpoint: Path, build: Build, images: Tensor
) -> None:
    student = build("hvt_ti_1", in_chans=1)
    student.pretrained_cfg.update(mean=(0.45,), std=(0.225,))
    grey = images[:, :1]
    assert find_teacher(str(checkpoint), student, "soft", 1.0)(grey).shape == (2, 10)


@pytest.mark.parametrize(
    ("classes", "chans", "match"),
    [(7, 3, "knows 7 classes, the data has 10"), (10, 1, "takes 1 channels, the student 3")],
)
def test_a_teacher_that_does_not_fit_is_refused(
    build: Build, student: hvt.HVT, tmp_path: Path, classes: int, chans: int, match: str
) -> None:
    other = tmp_path / "other.safetensors"
    hvt.save(build("hvt_ti_1", num_classes=classes, in_chans=chans), other)
    with pytest.raises(HVTError, match=match):
        find_teacher(str(other), student, "soft", 3.0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vit_small_patch16_18x2_224", "No pretrained weights exist"),
        ("test_vit.r160_in1k", "connection"),
    ],
)
def test_a_timm_teacher_without_weights_is_refused(
    student: hvt.HVT, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HVTError, match=rf"cannot get the weights of teacher {name}: .*{reason}"):
        find_teacher(name, student, "soft", 3.0)


def test_a_mistyped_teacher_is_answered_with_the_nearest(student: hvt.HVT) -> None:
    with pytest.raises(HVTError, match=r"neither a file nor a timm model: .*resnet50"):
        find_teacher("resnet5o", student, "soft", 3.0)


def test_a_file_that_is_no_model_is_no_teacher(student: hvt.HVT, tmp_path: Path) -> None:
    (tmp_path / "teacher.pth").write_text("no")
    with pytest.raises(HVTError, match=r"teacher\.pth is neither a safetensors nor"):
        find_teacher(str(tmp_path / "teacher.pth"), student, "soft", 3.0)


def test_classes_in_another_order_are_found_by_name(
    build: Build, student: hvt.HVT, images: Tensor, tmp_path: Path
) -> None:
    model, path = build("hvt_ti_2"), tmp_path / "teacher.safetensors"
    hvt.save(model, path, class_names=list("jihgfedcba"))
    student.pretrained_cfg["label_names"] = tuple("abcdefghij")
    assert torch.equal(find_teacher(str(path), student, "soft", 1.0)(images), model(images).flip(1))
    student.pretrained_cfg["label_names"] = tuple("abcdefghix")
    with pytest.raises(HVTError, match=r"calls its classes otherwise than the data, 'j' … and 'a'"):
        find_teacher(str(path), student, "soft", 1.0)


def test_timms_names_are_matched_too(tmp_path: Path, student: hvt.HVT) -> None:
    name = timm_folder(tmp_path / "vit", model_config={"label_names": list("jihgfedcba")})
    pixels = torch.rand(2, 3, 64, 64)
    plain = find_teacher(name, student, "soft", 1.0)
    assert plain.order is None  # the data has no names
    student.pretrained_cfg["label_names"] = tuple("abcdefghij")
    teacher = find_teacher(name, student, "soft", 1.0)
    assert torch.equal(teacher(pixels), plain(pixels).flip(1))
    student.pretrained_cfg["label_names"] = tuple("abcdefghix")
    with pytest.raises(HVTError, match=r"otherwise than the data, .* label_names of its config"):
        find_teacher(name, student, "soft", 1.0)
    student.pretrained_cfg["label_names"] = tuple(f"n{i}" for i in range(10))
    assert find_teacher(name, student, "soft", 1.0).order is None  # names of another kind


def test_a_teacher_of_greys_described_by_colours(tmp_path: Path, build: Build) -> None:
    student = build("hvt_ti_1", in_chans=1)
    hvt.save(build("hvt_ti_2", in_chans=1), tmp_path / "grey.safetensors")
    grey = timm_folder(tmp_path / "vit", model_args={"in_chans": 1})
    for name in (grey, str(tmp_path / "grey.safetensors")):
        assert find_teacher(name, student, "soft", 1.0)(torch.rand(2, 1, 64, 64)).shape == (2, 10)
    with pytest.raises(HVTError, match="takes 1 channels, the student 3"):
        find_teacher(grey, build("hvt_ti_1"), "soft", 1.0)


def test_a_built_in_model_may_teach(build: Build) -> None:
    student = build("hvt_ti_1", num_classes=100)
    assert find_teacher("cifar100", student, "soft", 1.0)(torch.rand(1, 3, 64, 64)).shape == (
        1,
        100,
    )


def test_a_teacher_says_what_it_is() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4))
    normal = ((0.5,) * 3, (0.5,) * 3)
    teacher = Teacher(model, "soft", 2.0, (2, 2), normal, normal)
    images = torch.randn(5, 3, 2, 2)
    assert torch.equal(teacher(images), model(images))
