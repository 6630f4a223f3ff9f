"""An ONNX file is checked before ONNX Runtime gets it, and runs as its description says."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from hvt import HVT, CheckpointError, HVTConfig, HVTError, Predictor
from hvt.checkpoint.description import describe
from hvt.deploy.runtime import OnnxModel, sealed

CONFIG = HVTConfig(img_size=8, patch_size=4, num_heads=1, head_dim=8, depth=1, num_classes=3)
Change = Callable[[Any, dict[str, Any]], None]


def written(path: Path, change: Change | None = None) -> Path:
    """A graph with the inputs, outputs and description of ours: the channels' means, weighted."""
    described = json.loads(describe(HVT(CONFIG)))
    weight = numpy_helper.from_array(np.ones((3, 3), np.float32), "weight")
    made = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["pixel_values", "axes"], ["means"], keepdims=0),
            helper.make_node("MatMul", ["means", "weight"], ["logits"]),
        ],
        "g",
        [helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["b", 3, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", 3])],
        [weight, numpy_helper.from_array(np.array([2, 3]), "axes")],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    if change is not None:
        change(model, described)
    helper.set_model_props(model, {"hvt": json.dumps(described)} if described else {})
    path.write_bytes(sealed(model.SerializeToString()))
    return path


def test_an_unchanged_graph_runs(tmp_path: Path) -> None:
    images = torch.randn(2, 3, 8, 8)
    logits = OnnxModel(written(tmp_path / "m.onnx"), "cpu")(images)
    torch.testing.assert_close(logits, images.mean((2, 3)).sum(1, keepdim=True).expand(2, 3))


def test_a_predictor_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the path of its file and its options, from any working folder."""
    monkeypatch.chdir(tmp_path)
    predictor = Predictor(written(Path("m.onnx")), "cpu", top=2, threads=1)
    content = pickle.dumps(predictor)
    monkeypatch.chdir("/")
    image = np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8)
    again = pickle.loads(content)
    assert again(image) == predictor(image)
    assert isinstance(again.model, OnnxModel)
    assert again.model._options == ("cpu", 1)


# ── damaged and foreign files ───────────────────────────────────────────────────────────────────


def test_a_flipped_bit_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "m.onnx")
    content = path.read_bytes()
    for at in range(0, len(content) - len(sealed(b"")), 7):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"m\.onnx is (damaged|not an ONNX model)"):
            OnnxModel(path, "cpu")


def undescribed(model: Any, described: dict[str, Any]) -> None:
    described.clear()


def more_classes(model: Any, described: dict[str, Any]) -> None:
    described["config"]["num_classes"] = 7


def external(model: Any, described: dict[str, Any]) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")


def looped(model: Any, described: dict[str, Any]) -> None:
    body = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "body", [], [])
    model.graph.node.append(helper.make_node("Loop", ["logits"], ["again"], body=body))


def function(model: Any, described: dict[str, Any]) -> None:
    identity = helper.make_node("Identity", ["x"], ["y"])
    opset = [helper.make_opsetid("", 20)]
    model.functions.append(helper.make_function("own", "F", ["x"], ["y"], [identity], opset))


def short_weight(model: Any, described: dict[str, Any]) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("dims")
    tensor.dims.extend((10**6, 10**6))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (undescribed, "was not written by hvt export"),
        (more_classes, "where its description says"),
        (external, "has weights in another file"),
        (looped, "has loops, functions or sparse weights"),
        (function, "has loops, functions or sparse weights"),
        (short_weight, "is not an ONNX model, or is damaged"),
    ],
)
def test_a_graph_that_is_not_ours(tmp_path: Path, change: Change, words: str) -> None:
    path = written(tmp_path / "m.onnx", change)
    with pytest.raises(CheckpointError) as caught:
        OnnxModel(path, "cpu")
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    def change(model: Any, described: dict[str, Any]) -> None:
        model.graph.node[1].output[0] = "finite"
        model.graph.node.append(helper.make_node("Div", ["finite", "zero"], ["logits"]))
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.float32), "zero"))

    predictor = Predictor(written(tmp_path / "m.onnx", change), "cpu")
    with pytest.raises(HVTError, match="cannot be classified: the model's output is not finite"):
        predictor(np.zeros((8, 8, 3), np.uint8))
