"""An ONNX graph in 8 bits: weights with a scale per output, activations in fixed steps or by token.

Only the matrix products of the blocks' linear layers are quantised. Attention's own products stay
in float32, as do the patch embedding and the head, which are cheap, and the layers that cost the
most accuracy for what they save (see `calibrate.layers_kept_fp32`). The copies around attention
cost as much as its products, so it becomes one operator of ONNX Runtime's.

No value shares a scale with another image's, so logits do not depend on who shares the batch.
That is why ONNX Runtime's dynamic quantisation is not used: its scales are those of a whole batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from .runtime import import_extra

# Without VNNI, x86 adds pairs of u8 × s8 products in 16 bits; 7-bit weights cannot overflow them.
LEVELS = 64
RUNTIMES_OWN = "com.microsoft"  # the domain of operators that ONNX Runtime adds to ONNX's

Range = tuple[float, float]
"""The smallest and the largest value that 8 bits stand for; what is outside is clipped to them."""

# What GELU gives is not bounded above as what LayerNorm gives is, and differs most from token to
# token, so each token has its own step: its largest value is 255, zero is ZERO, and no step is so
# small that GELU's least value would be below 0.
GELU_LEAST = -0.17
ZERO = 32


def quantise(
    graph: Any, ranges: Mapping[str, Range], keep: Collection[str] = (), heads: int | None = None
) -> Any:
    """The same ONNX graph with its blocks' linear layers in int8, but for those in `keep`.

    `ranges` are those of the layers' inputs; `mlp.fc2` has steps by token instead. With `heads`
    attention is fused, where nothing else needs its weights; that gives the same to the last bit.
    """
    onnx = import_extra("onnx")
    quantised = onnx.ModelProto()
    quantised.CopyFrom(graph)
    layers = linear_nodes(quantised)
    nodes = {node.name: node for node in quantised.graph.node}
    makers = {name: node for node in quantised.graph.node for name in node.output}
    additions = {n.input[0]: n for n in quantised.graph.node if n.op_type == "Add"}
    tensors = {tensor.name: tensor for tensor in quantised.graph.initializer}
    constants: dict[str, np.ndarray] = {}
    replaced: dict[str, list[Any]] = {}
    for layer, name in layers.items():
        if layer in keep:
            continue
        product = nodes[name]
        integers, scales = integer_weight(onnx.numpy_helper.to_array(tensors[product.input[1]]).T)
        constants[f"{layer}.weight"] = np.ascontiguousarray(integers.T)  # (in, out)
        constants[f"{layer}.weight_scale"] = scales[:, 0]
        if layer.endswith("mlp.fc2"):
            constants |= TOKEN_CONSTANTS
            replaced[name] = _by_token(layer, product.input[0], product.output[0])
            continue
        scale, zero = scale_and_zero(ranges[layer])
        constants[f"{layer}.scale"] = np.array(scale, np.float32)
        constants[f"{layer}.zero"] = np.array(zero, np.uint8)
        addition = additions.get(product.output[0])  # of the bias, which the operators add too
        last, bias = product, f"{layer}.no_bias"
        if addition is None:
            constants[bias] = np.zeros(len(scales), np.float32)
        else:
            last, bias = addition, addition.input[1]
        attention = heads is not None and layer.endswith("attn.qkv")
        if attention:
            last = makers[nodes[layers[layer.replace("qkv", "proj")]].input[0]]
        replaced[last.name] = _in_range(
            layer, product.input[0], bias, last.output[0], heads if attention else None
        )
    changed = [one for node in quantised.graph.node for one in replaced.get(node.name, [node])]
    del quantised.graph.node[:]
    quantised.graph.node.extend(changed)
    quantised.graph.initializer.extend(
        onnx.numpy_helper.from_array(value, name) for name, value in constants.items()
    )
    quantised.opset_import.append(onnx.helper.make_opsetid(RUNTIMES_OWN, 1))
    import_extra("onnxscript.optimizer").remove_unused_nodes(quantised)
    return quantised


def _in_range(layer: str, x: str, bias: str, result: str, heads: int | None) -> list[Any]:
    """Nodes of a linear layer, and with `heads` of the attention after it: `x` → `result`."""
    make = import_extra("onnx").helper.make_node
    codes, weight, weight_scale, scale, zero = (
        f"{layer}.{name}" for name in ("codes", "weight", "weight_scale", "scale", "zero")
    )
    nodes = [make("QuantizeLinear", [x, scale, zero], [codes], f"{layer}_codes")]
    if heads is None:
        inputs, operator, fields = [scale, weight_scale, zero, "", bias], "MatMulIntegerToFloat", {}
    else:
        inputs, operator = [bias, scale, weight_scale, "", zero], "QAttention"
        fields = {"num_heads": heads}
    inputs = [codes, weight, *inputs]
    nodes.append(make(operator, inputs, [result], layer, domain=RUNTIMES_OWN, **fields))
    return nodes


TOKEN_CONSTANTS = {
    "last_axis": np.array([-1]),
    "one": np.array(1, np.float32),
    "token_zero": np.array(ZERO, np.uint8),
    "token_share": np.array(1 / (255 - ZERO), np.float32),
    "least_step": np.array(-GELU_LEAST / ZERO, np.float32),
}


def _by_token(layer: str, x: str, result: str) -> list[Any]:
    """Nodes of a linear layer without its bias: `x`, which GELU gave, → `result`."""
    make = import_extra("onnx").helper.make_node
    largest, share, step, over, codes, product = (
        f"{layer}.{name}" for name in ("largest", "share", "step", "over", "codes", "product")
    )
    weight = [f"{layer}.weight", "one", f"{layer}.weight_scale", "token_zero"]
    return [
        make("ReduceMax", [x, "last_axis"], [largest], f"{layer}_largest"),  # (B, N, 1)
        make("Mul", [largest, "token_share"], [share], f"{layer}_share"),
        make("Max", [share, "least_step"], [step], f"{layer}_step"),
        make("Div", [x, step], [over], f"{layer}_over"),
        make("QuantizeLinear", [over, "one", "token_zero"], [codes], f"{layer}_codes"),
        make("MatMulIntegerToFloat", [codes, *weight], [product], layer, domain=RUNTIMES_OWN),
        make("Mul", [product, step], [result], f"{layer}_scaled"),
    ]


def integer_weight(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A weight `(out, in)` as integers, and the scale of each output, `(out, 1)`."""
    scale = np.abs(weight).max(axis=1, keepdims=True).clip(min=1e-12) / np.float32(LEVELS)
    return np.rint(weight / scale).astype(np.int8), scale.astype(np.float32)


def scale_and_zero(bounds: Range) -> tuple[float, int]:
    """The step between two of the 256 values of a range, and which of them is zero.

    Zero is always one of them, as ONNX asks.
    """
    low, high = min(bounds[0], 0.0), max(bounds[1], 0.0)
    scale = max((high - low) / 255, 1e-12)
    return scale, round(-low / scale)


LAYERS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
"""A block's linear layers, as it computes them."""


def linear_nodes(graph: Any) -> dict[str, str]:
    """The blocks' linear layers in a graph, by their name in the model: the matrix product's node.

    They are known by their place: products with a fixed matrix, four to a block, in the order they
    are computed. Names tell less: the exporter makes new ones for weights, and one of equal biases.
    """
    fixed = {tensor.name for tensor in graph.graph.initializer if len(tensor.dims) == 2}
    nodes = [n.name for n in graph.graph.node if n.op_type == "MatMul" and n.input[1] in fixed]
    nodes = nodes[len(nodes) % len(LAYERS) :]  # the patch embedding, where it is such a product
    layers = [f"blocks.{at // len(LAYERS)}.{LAYERS[at % len(LAYERS)]}" for at in range(len(nodes))]
    return dict(zip(layers, nodes, strict=True))
