"""An ONNX graph in 8 bits: weights per output channel, activations as they come.

ONNX Runtime quantises. What is decided here is which matrix products: those of the blocks' linear
layers. Attention's own products stay in float32, as do the patch embedding and the head, which are
cheap, and the layers that cost the most accuracy for what they save (see `sensitive`). The copies
around attention cost as much as its products, so `fuse` makes it one operator of ONNX Runtime's.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import HVTError
from ..model import HVT, Block
from .runtime import import_extra

# Without VNNI, x86 adds pairs of u8 × s8 products in 16 bits; 7-bit weights cannot overflow them.
LEVELS = 64
RUNTIMES_OWN = "com.microsoft"  # the domain of operators that ONNX Runtime adds to ONNX's
FLOAT_SHARE = 0.1
"""The share of the blocks' work and weights that may stay in float32 for accuracy's sake."""


def quantise(graph: Any, keep: Collection[str] = (), heads: int | None = None) -> Any:
    """The same ONNX graph with its blocks' linear layers in int8, but for those in `keep`.

    With `heads` their attention is fused, where nothing else needs its weights.
    """
    quantisation = import_extra("onnxruntime.quantization")
    onnx = import_extra("onnx")
    nodes = [node for layer, node in linear_nodes(graph).items() if layer not in keep]
    if not nodes:
        raise HVTError("the exported graph has no linear layer of a block to quantise")
    shown = logging.root.manager.disable
    logging.disable(logging.WARNING)  # its advice is about preparing graphs, as ours are
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "int8.onnx"
            quantisation.quantize_dynamic(
                graph,
                str(path),
                nodes_to_quantize=nodes,
                weight_type=quantisation.QuantType.QInt8,
                per_channel=True,
                reduce_range=True,
            )
            quantised = onnx.load(str(path))
    finally:
        logging.disable(shown)
    if heads is not None:
        fuse(graph, quantised, heads)
    return quantised


def fuse(graph: Any, quantised: Any, heads: int) -> None:
    """Make attention a `QAttention` in each block that has `attn.qkv` in int8.

    It gives the same to the last bit. It puts queries, keys and values where attention reads them,
    which saves cutting them apart and turning them round.
    """
    helper = import_extra("onnx").helper
    before = {node.name: node for node in graph.graph.node}
    after = {node.name: node for node in quantised.graph.node}
    makers = {name: node for node in quantised.graph.node for name in node.output}
    layers = linear_nodes(graph)
    for layer, name in layers.items():
        product = after.get(f"{name}_quant")
        if product is None or not layer.endswith("attn.qkv"):
            continue
        x, weight, zero, weight_zero = product.input
        scales = after[f"{name}_quant_scales_mul"].input
        (bias,) = (n.input[1] for n in after.values() if n.input[:1] == before[name].output)
        result = before[layers[layer.replace("qkv", "proj")]].input[0]
        makers[result].CopyFrom(
            helper.make_node(
                "QAttention",
                [x, weight, bias, *scales, "", zero, weight_zero],
                [result],
                name=f"{layer}_fused",
                domain=RUNTIMES_OWN,
                num_heads=heads,
            )
        )
    _prune(quantised.graph)
    if RUNTIMES_OWN not in {known.domain for known in quantised.opset_import}:
        quantised.opset_import.append(helper.make_opsetid(RUNTIMES_OWN, 1))


def _prune(graph: Any) -> None:
    """Remove nodes and constants that no output depends on."""
    needed = {value.name for value in graph.output}
    kept = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    constants = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(reversed(kept))
    graph.initializer.extend(constants)


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


@torch.inference_mode()
def balanced(model: HVT, images: Tensor) -> HVT:
    """A copy that computes the same from activations that lose less when they are rounded.

    A few channels of a layer's input are far larger than the others, and all share one scale. What
    such a channel is divided by, the weights that meet it are multiplied by, as they have scales
    to spare: the square root of how much larger the channel is than those weights (SmoothQuant).
    The LayerNorm before it divides, or for the projection after attention the values' weights.
    """
    model = copy.deepcopy(model)
    largest: dict[str, Tensor] = {}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "blocks" in n}
    hooks = [
        layer.register_forward_pre_hook(_measuring(name, largest)) for name, layer in layers.items()
    ]
    model(images)
    for hook in hooks:
        hook.remove()
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        attention, width = block.attn, block.attn.proj.in_features
        values = attention.qkv.weight[2 * width :], attention.qkv.bias[2 * width :]
        for name, layer, before in (
            ("attn.qkv", attention.qkv, (block.norm1.weight, block.norm1.bias)),
            ("attn.proj", attention.proj, values),
            ("mlp.fc1", block.mlp.fc1, (block.norm2.weight, block.norm2.bias)),
        ):
            meets = layer.weight.abs().amax(dim=0).clamp(min=1e-8)
            factor = (largest[f"blocks.{index}.{name}"].clamp(min=1e-8) / meets).sqrt()
            layer.weight.mul_(factor)
            for part in before:
                part.div_(factor if part.ndim == 1 else factor[:, None])
    return model


@dataclass(frozen=True)
class Sensitivity:
    """What one layer in int8 does to the logits, and what it saves."""

    layer: str
    error: float
    """Squared error of the logits, over the squared logits."""
    share: float
    """Of the blocks' linear layers: of their multiply-adds or of their weights, which is more."""


@torch.inference_mode()
def sensitivities(model: HVT, images: Tensor) -> list[Sensitivity]:
    """Each linear layer of the blocks quantised alone, as `quantise` would, on some pictures."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "blocks" in n}
    macs: dict[str, int] = {}
    inputs: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(_counting(name, macs)) for name, layer in layers.items()
    ]
    hooks += [
        block.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
        for block in model.blocks
    ]
    truth = model(images)
    for hook in hooks:
        hook.remove()
    weights = sum(layer.weight.numel() for layer in layers.values())
    found = []
    for name, layer in layers.items():
        first = int(name.split(".")[1])
        weight = layer.weight.data
        hook = layer.register_forward_pre_hook(lambda _, given: (rounded_activations(given[0]),))
        layer.weight.data = rounded_weights(weight)
        try:
            x = inputs[first]  # the blocks before it are as they were
            for block in model.blocks[first:]:
                x = block(x)
            logits = model.forward_head(model.norm(x))
        finally:
            hook.remove()
            layer.weight.data = weight
        error = ((logits - truth).square().sum() / truth.square().sum()).item()
        # After pooling a layer has little work and as many weights as before.
        share = max(macs[name] / sum(macs.values()), weight.numel() / weights)
        found.append(Sensitivity(name, error, share))
    return found


def sensitive(model: HVT, images: Tensor, share: float = FLOAT_SHARE) -> tuple[str, ...]:
    """The layers to leave in float32: the greatest error for what they save, up to a share."""
    kept, left = [], share
    ranked = sorted(
        sensitivities(model, images), key=lambda one: one.error / one.share, reverse=True
    )
    for one in ranked:
        if one.share <= left:
            kept.append(one.layer)
            left -= one.share
    return tuple(kept)


def rounded_weights(weight: Tensor) -> Tensor:
    """Weights as int8 keeps them with a scale per output: `(out, in)` → the same."""
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / LEVELS
    return (weight / scale).round() * scale


def rounded_activations(x: Tensor) -> Tensor:
    """Activations as 8 bits keep them, from their smallest to their largest value and zero.

    Zero is one of the 256 values, as in ONNX's `DynamicQuantizeLinear`.
    """
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = ((high - low) / 255).clamp(min=1e-12)
    zero = (-low / scale).round()
    return (((x / scale).round() + zero).clamp(0, 255) - zero) * scale


def _measuring(name: str, into: dict[str, Tensor]) -> Any:
    def measure(layer: nn.Linear, given: tuple[Tensor, ...]) -> None:
        into[name] = given[0].flatten(0, -2).abs().amax(dim=0)

    return measure


def _counting(name: str, into: dict[str, int]) -> Any:
    def count(layer: nn.Linear, given: tuple[Tensor, ...]) -> None:
        into[name] = given[0].numel() * layer.out_features

    return count
