"""Dense tasks: docs/dense.md's detector by torchvision, and examples/segmentation.py in small."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import SMALL
from PIL import Image
from torch import Tensor

import hvt
from hvt.features import FeatureMaps

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "dense.md"
EXAMPLE = ROOT / "examples" / "segmentation.py"
FIELDS = {"img_size": (32, 64), "pool_after": (1, 2), "pool_dims": 2}


def plain_nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Non-maximum suppression by its definition: the best box removes those that overlap it."""
    from torchvision.ops import box_iou

    overlaps = box_iou(boxes, boxes) > threshold
    order, kept = scores.argsort(descending=True, stable=True), []
    while len(order):
        kept.append(order[0])
        order = order[1:][~overlaps[order[0], order[1:]]]
    return torch.stack(kept) if kept else order


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torchvision's operators, or where its compiled ones do not load, the same in Python.

    There, `nms` is declared without a kernel (see `hvt._compat`) and gets the one above;
    `roi_align` is torchvision's own in Python, uncompiled, as compiling would take a minute.
    """
    import torchvision.extension
    import torchvision.ops

    if torchvision.extension._has_ops():
        yield
        return
    align = sys.modules["torchvision.ops.roi_align"]
    in_python = getattr(align._roi_align, "__wrapped__", None)
    if in_python is None:
        pytest.skip("torchvision has neither compiled operators nor a roi_align in Python")
    monkeypatch.setattr(align, "_roi_align", in_python)
    monkeypatch.setattr(torchvision.extension, "_has_ops", lambda: True)  # what nms asks
    library = torch.library.Library("torchvision", "IMPL")
    library.impl("nms", plain_nms, "CPU")
    yield
    library._destroy()


def test_the_pages_detector_trains_and_predicts(operators: None) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        exec(compile(block, PAGE.name, "exec"), names)
    detector = names["detector"].train()
    images = [torch.rand(3, 90, 120), torch.rand(3, 64, 64)]  # resized by the detector
    box = {"boxes": torch.tensor([[8.0, 8.0, 40.0, 56.0]]), "labels": torch.tensor([1])}
    optimizer = torch.optim.AdamW(detector.parameters(), lr=1e-4)
    losses = detector(images, [box, box])
    sum(losses.values()).backward()
    assert all(loss.isfinite() for loss in losses.values())
    patches = names["maps"].model.patch_embed.proj
    assert patches.weight.grad.abs().sum() > 0
    before = patches.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, patches.weight)

    detector.roi_heads.score_thresh = 0.0  # an untrained head is sure of nothing
    with torch.no_grad():
        answers = detector.eval()(images)
    for image, answer in zip(images, answers, strict=True):
        boxes, (height, width) = answer["boxes"], image.shape[1:]
        assert len(boxes) == len(answer["scores"]) == len(answer["labels"]) > 0
        assert boxes.min() >= 0
        assert (boxes[:, 2] <= width).all()
        assert (boxes[:, 3] <= height).all()


# ── examples/segmentation.py ────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("segmentation", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source() -> hvt.HVT:
    return hvt.create_model("deit_ti", **SMALL | {"depth": 4})


def test_1d_pooling_has_no_pyramid(example: ModuleType, source: hvt.HVT) -> None:
    with pytest.raises(hvt.HVTError, match=r"1D pooling leaves no grid.*use pool_dims=2"):
        example.backbone(source, **FIELDS | {"pool_dims": 1})


def test_both_backbones_have_the_same_weights(example: ModuleType, source: hvt.HVT) -> None:
    maps = example.backbone(source, **FIELDS)
    assert isinstance(maps, FeatureMaps)
    assert maps.feature_info.reduction() == [8, 16, 32]
    assert [tuple(y.shape[2:]) for y in maps(torch.rand(1, 3, 32, 64))] == [(4, 8), (2, 4), (1, 2)]
    plain = example.backbone(source, levels=(0, 1, 3), img_size=64)
    assert plain.feature_info.reduction() == [8, 8, 8]
    for name, weight in plain.model.named_parameters():
        if name != "pos_embed":  # of another image size
            assert torch.equal(weight, maps.model.get_parameter(name))


def test_equal_cost(example: ModuleType) -> None:
    costs = []
    for fields in example.BACKBONES.values():
        fields = {name: value for name, value in fields.items() if name != "levels"}
        costs.append(hvt.cost("deit_ti", num_classes=0, **fields).gflops)
    assert max(costs) < 1.02 * min(costs)


def test_ious(example: ModuleType) -> None:
    truth = torch.tensor([[[0, 0, 1, example.VOID]]])
    ious = example.class_ious(torch.tensor([[[0, 1, 1, 0]]]), truth)
    assert ious[:2].tolist() == [0.5, 0.5]
    assert ious[2:].isnan().all()


def test_example_overfits_and_is_scored(
    example: ModuleType,
    source: hvt.HVT,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Left is class 0 and black, right is class 3 and white."""
    weights = tmp_path / "source.safetensors"
    hvt.save(source, weights)
    mask = Image.new("L", (48, 24), 0)
    mask.paste(3, (20, 0, 48, 24))
    for part in ("train", "val"):
        for kind in ("images", "masks"):
            (tmp_path / part / kind).mkdir(parents=True)
        for index in range(2):
            mask.save(tmp_path / part / "masks" / f"{index}.png")
            image = mask.point(lambda label: 80 * label)
            image.convert("RGB").save(tmp_path / part / "images" / f"{index}.png")
    plain = {"img_size": (32, 64), "levels": (0, 3)}
    monkeypatch.setattr(example, "BACKBONES", {"pooled": FIELDS, "plain": plain})
    figure = tmp_path / "masks.png"
    words = ("--data", tmp_path, "--weights", weights, "--figure", figure, "--steps", 30)
    example.main([str(word) for word in words])
    printed = capsys.readouterr().out
    for name in ("pooled", "plain"):
        score = re.search(rf"{name}: .* GFLOPs, .* images/s\nmean IoU ([\d.]+)%", printed)
        assert score is not None
        assert float(score[1]) > 80
    with Image.open(figure) as drawn:
        assert drawn.size == (3 * 48, 24)  # truth and two predictions of the first scene
