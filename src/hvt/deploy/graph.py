"""ONNX files before ONNX Runtime gets them: bounded in size, self-contained, straight-line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.container import UnsafeCheckpointError, file_size
from ..checkpoint.description import shown
from ..errors import CheckpointError

MAX_BYTES = 2**31 - 1  # protobuf's own
MAX_STRUCTURE = 4 * 2**20
"""Bytes beside weights and description, of which a parser makes 75 times as many; and 1 % of the
file, as int8 has some scales among them. The graph of 12 blocks takes 0.1 MB."""
MAX_NODES = 50_000
"""ONNX Runtime's record of a node is a few kB; a block of ours has some 50 nodes."""

# Numbers of protobuf fields: a model's graph and metadata, a graph's nodes and weights, the bytes
# of a weight.
_GRAPH, _METADATA = 7, 14
_NODE, _INITIALIZER = 1, 5
_RAW_DATA = 9


def read_graph(path: Path, onnx: Any) -> tuple[bytes, dict[str, str]]:
    """The content of an ONNX file and its metadata, after a look at what it asks for.

    What a graph computes is not bounded by this: sizes can follow from its inputs.
    """
    if file_size(path) > MAX_BYTES:
        raise CheckpointError(f"{path} is above 2 GB, more than one ONNX file can hold")
    try:
        content = path.read_bytes()
        _check_structure(memoryview(content))
        model = onnx.load_model_from_string(content)
        _check(model, onnx)
        return content, {entry.key: entry.value for entry in model.metadata_props}
    except UnsafeCheckpointError as error:
        raise CheckpointError(f"{path} is not opened: {shown(error)}") from error
    except Exception as error:  # protobuf's, and whatever ONNX makes of damaged weights
        raise not_onnx(path, error) from error


def not_onnx(path: Path, error: Exception) -> CheckpointError:
    """What to raise where ONNX's libraries fail."""
    return CheckpointError(
        f"{path} is not an ONNX model, or is damaged, and cannot be run ({shown(error)})"
    )


def _check(model: Any, onnx: Any) -> None:
    graph, kinds = model.graph, onnx.AttributeProto
    if not graph.node:
        raise ValueError("it has no graph")
    if model.functions or model.training_info or graph.sparse_initializer:
        raise UnsafeCheckpointError(
            "it has functions, training or sparse weights, which hvt export never writes"
        )
    tensors = list(graph.initializer)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type in (kinds.GRAPH, kinds.GRAPHS) or attribute.graphs:
                raise UnsafeCheckpointError(
                    f"it has a {node.op_type} with a graph of its own, which may never end"
                )
            tensors += [attribute.t] if attribute.HasField("t") else attribute.tensors
    for tensor in tensors:
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            raise UnsafeCheckpointError(f"its weight {tensor.name} is in another file")
        values = onnx.numpy_helper.to_array(tensor)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise UnsafeCheckpointError(f"its weight {tensor.name} is NaN or infinite")


def _check_structure(content: memoryview) -> None:
    """Refuse a file that is far larger once it is parsed: 2 bytes make a whole empty node."""
    most = MAX_STRUCTURE + len(content) // 100
    structure, fields, nodes = len(content), 0, 0
    for number, message in _messages(content):
        structure -= len(message) if number == _METADATA else 0
        for kind, part in _messages(message) if number == _GRAPH else ():
            fields, nodes = fields + 1, nodes + (kind == _NODE)
            if kind == _INITIALIZER:
                structure -= sum(len(raw) for n, raw in _messages(part) if n == _RAW_DATA)
            if nodes > MAX_NODES or 2 * fields > most:
                raise UnsafeCheckpointError(
                    "its graph has more nodes or weights than any model of hvt"
                )
    if structure > most:
        raise UnsafeCheckpointError(
            f"its graph takes {structure / 2**20:.0f} MB, more than any model of hvt"
        )


def _messages(content: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The numbers and bytes of a protobuf message's fields, but for plain numbers."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        match key & 7:
            case 0:
                _, at = _varint(content, at)
            case 1:
                at += 8
            case 5:
                at += 4
            case 2:
                length, at = _varint(content, at)
                if at + length > len(content):
                    raise ValueError("cut short")
                yield key >> 3, content[at : at + length]
                at += length
            case _:
                raise ValueError("not protobuf")


def _varint(content: memoryview, at: int) -> tuple[int, int]:
    """A protobuf number and the place after it."""
    value = 0
    for place in range(10):
        byte = content[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise ValueError("not protobuf")
