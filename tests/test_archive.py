"""`.pt2` archives: weights and description are read, nothing is unpickled."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hvt
from hvt import HVT, CheckpointError, HVTConfig
from hvt.checkpoint.description import describe

CONFIG = HVTConfig(img_size=8, patch_size=4, num_heads=1, head_dim=8, depth=1, num_classes=3)
Parts = dict[str, bytes]
Index = dict[str, Any]


def written(
    path: Path,
    change: Callable[[Index, Parts], None] = lambda index, parts: None,
    method: int = zipfile.ZIP_STORED,
) -> HVT:
    """The parts of an exported program that are read: the weights, their index, the description."""
    model = HVT(CONFIG).eval()
    index: Index = {}
    parts: Parts = {"archive_format": b"pt2", "extra/hvt.json": describe(model).encode()}
    for number, (name, tensor) in enumerate(model.state_dict().items()):
        sizes, strides = (
            [{"as_int": n} for n in numbers] for numbers in (tensor.shape, tensor.stride())
        )
        index[name] = {
            "path_name": f"weight_{number}",
            "use_pickle": False,
            "tensor_meta": {"sizes": sizes, "strides": strides},
        }
        parts[f"data/weights/weight_{number}"] = tensor.contiguous().numpy().tobytes()
    change(index, parts)
    parts["data/weights/model_weights_config.json"] = json.dumps({"config": index}).encode()
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, part in parts.items():
            archive.writestr(f"model/{name}", part)
    return model


def test_the_unchanged_archive_loads(tmp_path: Path) -> None:
    model, images = written(tmp_path / "m.pt2"), torch.randn(2, 3, 8, 8)
    assert torch.equal(hvt.load(tmp_path / "m.pt2")(images), model(images))


def pickled(index: Index, parts: Parts) -> None:
    index["norm.weight"]["use_pickle"] = True


def short(index: Index, parts: Parts) -> None:
    index["norm.weight"]["tensor_meta"]["sizes"] = [{"as_int": 10**10}]


def unnamed(index: Index, parts: Parts) -> None:
    del index["norm.weight"]["path_name"]


def described(**values: Any) -> Callable[[Index, Parts], None]:
    def change(index: Index, parts: Parts) -> None:
        content = json.loads(parts["extra/hvt.json"])
        content["preprocessing"] |= values
        parts["extra/hvt.json"] = json.dumps(content).encode()

    return change


def not_a_number(index: Index, parts: Parts) -> None:
    entry = f"data/weights/{index['norm.weight']['path_name']}"
    parts[entry] = parts[entry][:-4] + b"\x00\x00\xc0\x7f"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (pickled, "not stored as plain float32"),
        (short, "is damaged or cut short"),
        (unnamed, "is damaged or cut short"),
        (described(crop_pct=0.001), "crop_pct=0.001 must be"),
        (described(mean="grey"), "mean='grey' must be"),
        (not_a_number, "norm.weight with NaN"),
    ],
)
def test_an_archive_that_is_not_ours_is_named(
    tmp_path: Path, change: Callable[[Index, Parts], None], words: str
) -> None:
    written(tmp_path / "m.pt2", change)
    with pytest.raises(CheckpointError) as caught:
        hvt.load(tmp_path / "m.pt2")
    assert words in str(caught.value)
    assert "m.pt2" in str(caught.value)


def test_a_compressed_archive_is_not_opened(tmp_path: Path) -> None:
    written(tmp_path / "m.pt2", method=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"m\.pt2 is not opened: its entries are compressed"):
        hvt.load(tmp_path / "m.pt2")
