"""ONNX files are looked at before ONNX Runtime gets them."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from bounds import bounded
from onnx import TensorProto, helper, numpy_helper

from hvt import HVT, CheckpointError, HVTConfig
from hvt.checkpoint.description import describe
from hvt.deploy import graph
from hvt.deploy.runtime import OnnxModel

CONFIG = HVTConfig(img_size=8, patch_size=4, num_heads=1, head_dim=8, depth=1, num_classes=3)
Change = Callable[[Any, dict[str, Any]], None]


def written(path: Path, change: Change | None = None) -> Path:
    """A graph with the inputs, outputs and description of ours: the channels' means, weighted."""
    described = json.loads(describe(HVT(CONFIG)))
    weight = numpy_helper.from_array(np.ones((3, 3), np.float32), "weight")
    made = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["images", "axes"], ["means"], keepdims=0),
            helper.make_node("MatMul", ["means", "weight"], ["logits"]),
        ],
        "g",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["b", 3, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", 3])],
        [weight, numpy_helper.from_array(np.array([2, 3]), "axes")],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    if change is not None:
        change(model, described)
    helper.set_model_props(model, {"hvt": json.dumps(described)})
    path.write_bytes(model.SerializeToString())
    return path


def test_the_unchanged_graph_runs(tmp_path: Path) -> None:
    images = torch.randn(2, 3, 8, 8)
    logits = OnnxModel(written(tmp_path / "m.onnx"), "cpu")(images)
    torch.testing.assert_close(logits, images.mean((2, 3)).sum(1, keepdim=True).expand(2, 3))


def config(**fields: Any) -> Change:
    return lambda model, described: described["config"].update(fields)


def preprocessing(**fields: Any) -> Change:
    return lambda model, described: described["preprocessing"].update(fields)


def weight(value: float) -> Change:
    tensor = numpy_helper.from_array(np.full((3, 3), value, np.float32), "weight")
    return lambda model, described: model.graph.initializer[0].CopyFrom(tensor)


def external(model: Any, described: dict[str, Any]) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")


def looped(model: Any, described: dict[str, Any]) -> None:
    """The logits handed on 2⁶² times."""
    kinds = {"count": TensorProto.INT64, "keep": TensorProto.BOOL, "again": TensorProto.BOOL}
    count, keep, again = (helper.make_tensor_value_info(n, kind, []) for n, kind in kinds.items())
    old, new = (helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("old", "new"))
    steps = [
        helper.make_node("Identity", ["keep"], ["again"]),
        helper.make_node("Identity", ["old"], ["new"]),
    ]
    body = helper.make_graph(steps, "body", [count, keep, old], [again, new])
    model.graph.initializer.append(numpy_helper.from_array(np.array(2**62), "rounds"))
    model.graph.node[1].output[0] = "single"
    model.graph.node.append(
        helper.make_node("Loop", ["rounds", "", "single"], ["logits"], body=body)
    )


def function(model: Any, described: dict[str, Any]) -> None:
    identity = helper.make_node("Identity", ["x"], ["y"])
    opset = [helper.make_opsetid("", 20)]
    model.functions.append(helper.make_function("own", "F", ["x"], ["y"], [identity], opset))


def many_nodes(model: Any, described: dict[str, Any]) -> None:
    names = ["images", *(f"{n:x}" for n in range(graph.MAX_NODES))]
    model.graph.node.extend(
        onnx.NodeProto(op_type="Identity", input=[one], output=[other])
        for one, other in itertools.pairwise(names)
    )


def short(model: Any, described: dict[str, Any]) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("dims")
    tensor.dims.extend((10**6, 10**6))


def double(model: Any, described: dict[str, Any]) -> None:
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    model.graph.node[1].output[0] = "single"
    cast = helper.make_node("Cast", ["single"], ["logits"], to=TensorProto.DOUBLE)
    model.graph.node.append(cast)


CHANGES: dict[str, tuple[Change, str]] = {
    "depth in vain": (config(depth=10**9 + 7, stages=3), "depth=1000000007 must be at most"),
    "depth": (config(depth=10**7), "depth=10000000 must be at most"),
    "image": (config(img_size=400_000), "is above 1 GB"),
    "crop": (preprocessing(crop_pct=0.001), "crop_pct=0.001 must be a number from 0.1 to 2"),
    "std": (preprocessing(std=[0, 1, 1]), "std=[0, 1, 1] must be numbers from"),
    "NaN": (weight(float("nan")), "weight is NaN or infinite"),
    "infinite": (weight(float("inf")), "weight is NaN or infinite"),
    "another file": (external, "weight is in another file"),
    "loop": (looped, "a Loop with a graph of its own"),
    "function": (function, "it has functions"),
    "many nodes": (many_nodes, "more nodes or weights than any model"),
    "short weight": (short, "is damaged"),
    "double": (double, "not what it says of itself"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_hostile_graph_is_refused_at_little_cost(tmp_path: Path, case: str) -> None:
    change, words = CHANGES[case]
    path = written(tmp_path / "m.onnx", change)
    with bounded(), pytest.raises(CheckpointError) as caught:
        OnnxModel(path, "cpu")
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_graph_of_empty_parts_is_refused(tmp_path: Path) -> None:
    """An empty attribute is 2 bytes in a file and some 150 in memory."""

    def field(tag: bytes, content: bytes) -> bytes:
        size, varint = len(content), b""
        for _ in range(5):  # seven bits to a byte, all but the last with the eighth set
            varint += bytes([size & 127 | 128])
            size >>= 7
        return tag + varint[:-1] + bytes([varint[-1] & 127]) + content

    path = written(tmp_path / "m.onnx")
    node = field(b"\x0a", b"\x2a\x00" * (graph.MAX_STRUCTURE // 2 + 50_000))
    with path.open("ab") as file:  # a second graph, which protobuf joins to the first
        file.write(field(b"\x3a", node))
    with bounded(), pytest.raises(CheckpointError, match="its graph takes 4 MB, more than any"):
        OnnxModel(path, "cpu")


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (("Log", ["neither"], ["logits"]), "with NaN"),
        (("Concat", ["single", "single"], ["logits"], {"axis": 0}), "logits of shape (4, 3)"),
    ],
)
def test_an_answer_that_is_none_is_refused(tmp_path: Path, operation: Any, words: str) -> None:
    def change(model: Any, described: dict[str, Any]) -> None:
        kind, inputs, outputs, *more = operation
        model.graph.node[1].output[0] = "single"
        model.graph.node.append(helper.make_node("Neg", ["square"], ["neither"]))
        model.graph.node.insert(2, helper.make_node("Mul", ["single", "single"], ["square"]))
        model.graph.node.append(helper.make_node(kind, inputs, outputs, **dict(*more)))

    model = OnnxModel(written(tmp_path / "m.onnx", change), "cpu")
    with pytest.raises(CheckpointError) as caught:
        model(torch.randn(2, 3, 8, 8))
    assert words in str(caught.value)


def test_damaged_protobuf_is_one_sentence(tmp_path: Path) -> None:
    content = written(tmp_path / "m.onnx").read_bytes()
    for damaged in (content[:100], b"\xff" * 30, b"\x3a\xff\xff\xff\xff\x0f", content[::-1], b""):
        (tmp_path / "m.onnx").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"m\.onnx .*(damaged|not written by hvt)"):
            OnnxModel(tmp_path / "m.onnx", "cpu")
