"""Calibration of int8 on images: activation ranges, SmoothQuant, layers kept in float32."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.sample import evenly
from ..errors import HVTError
from ..model import HVT, Block
from .quantise import GELU_LEAST, ZERO, Range, integer_weight, scale_and_zero

CHOOSING = 16  # images for SmoothQuant and for which layers stay in float32
BATCH = 16  # images at a time
FLOAT_SHARE = 0.05
"""The share of the blocks' MACs and weights that may stay in float32 for accuracy."""


@dataclass(frozen=True)
class Calibration:
    """A model to be quantised, and how."""

    model: HVT
    """It computes the same as the original, with channels scaled by `smoothquant`."""
    ranges: Mapping[str, Range]
    """Of the inputs of the blocks' linear layers."""
    kept: tuple[str, ...] = ()
    """The layers to leave in float32."""


def calibrate(model: HVT, images: Tensor, share: float = FLOAT_SHARE) -> Calibration:
    """Scale a model's channels, and find its ranges and the layers to keep in float32."""
    few = images[evenly(len(images), CHOOSING)]  # their order may be that of the classes
    model = smoothquant(model, few)
    ranges = input_ranges(model, images)
    return Calibration(model, ranges, layers_kept_fp32(model, few, ranges, share))


@torch.inference_mode()
def input_ranges(model: HVT, images: Tensor) -> dict[str, Range]:
    """The smallest and the largest input of each linear layer of the blocks, on some images."""
    ranges: dict[str, Range] = {}

    def widen(name: str, x: Tensor) -> None:
        low, high = ranges.get(name, (0.0, 0.0))
        ranges[name] = min(low, x.min().item()), max(high, x.max().item())
        if not x.isfinite().all():
            raise HVTError(f"the inputs of {name} are not finite: the model cannot be quantised")

    with _watching(linear_layers(model), widen):
        for batch in images.split(BATCH):
            model(batch)
    return ranges


@torch.inference_mode()
def smoothquant(model: HVT, images: Tensor) -> HVT:
    """A copy that computes the same from activations that lose less when they are rounded.

    A few channels of a layer's input are far larger than the others, and all share one scale. What
    such a channel is divided by, the weights that meet it are multiplied by, as they have scales
    to spare: the square root of how much larger the channel is than those weights (SmoothQuant).
    The LayerNorm before it divides, or for the projection after attention the values' weights.
    """
    model = copy.deepcopy(model)
    largest: dict[str, Tensor] = {}

    def measure(name: str, x: Tensor) -> None:
        largest[name] = x.flatten(0, -2).abs().amax(dim=0)

    with _watching(linear_layers(model), measure):
        model(images)
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        attention, width = block.attn, block.attn.proj.in_features
        values = [attention.qkv.weight[2 * width :]]
        if attention.qkv.bias is not None:
            values.append(attention.qkv.bias[2 * width :])
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


@torch.inference_mode()
def sensitivities(
    model: HVT, images: Tensor, ranges: Mapping[str, Range]
) -> dict[str, tuple[float, float]]:
    """What each linear layer of the blocks does to the logits in int8, and what that saves.

    The squared error over the squared logits if only that layer is quantised, on some images; and
    its share of the blocks' MACs or of their weights, whichever is more.
    """
    layers = linear_layers(model)
    macs: dict[str, int] = {}
    inputs: list[Tensor] = []

    def count(name: str, x: Tensor) -> None:
        macs[name] = x.numel() * layers[name].out_features

    blocks = {str(index): block for index, block in enumerate(model.blocks)}
    with _watching(layers, count), _watching(blocks, lambda _, x: inputs.append(x)):
        truth = model(images)
    weights = sum(layer.weight.numel() for layer in layers.values())
    measured = {}
    for name, layer in layers.items():
        first = int(name.split(".")[1])
        x = inputs[first]  # the blocks before it are unchanged
        with layer.register_forward_hook(in_int8(name, ranges)):
            for block in model.blocks[first:]:
                x = block(x)
        logits = model.forward_head(model.norm(x))
        error = ((logits - truth).square().sum() / truth.square().sum()).item()
        # After pooling a layer has little work and as many weights as before.
        share = max(macs[name] / sum(macs.values()), layer.weight.numel() / weights)
        measured[name] = error, share
    return measured


def layers_kept_fp32(
    model: HVT, images: Tensor, ranges: Mapping[str, Range], share: float = FLOAT_SHARE
) -> tuple[str, ...]:
    """The layers to leave in float32: the greatest error for what they save, up to a share."""
    kept, left = [], share
    measured = sensitivities(model, images, ranges)
    for layer in sorted(measured, key=lambda name: -measured[name][0] / measured[name][1]):
        if measured[layer][1] <= left:
            kept.append(layer)
            left -= measured[layer][1]
    return tuple(kept)


def linear_layers(model: HVT) -> dict[str, nn.Linear]:
    """The blocks' linear layers, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.startswith("blocks")
    }


def in_int8(name: str, ranges: Mapping[str, Range]) -> Any:
    """A hook that gives a linear layer's output as int8 would."""

    def hook(layer: nn.Linear, args: tuple[Tensor], output: Tensor) -> Tensor:
        step: Tensor | float
        x, (step, zero) = args[0], scale_and_zero(ranges[name])
        if name.endswith("mlp.fc2"):
            largest = x.amax(dim=-1, keepdim=True) / (255 - ZERO)
            step, zero = largest.clamp(min=-GELU_LEAST / ZERO), ZERO
        rounded = (((x / step).round() + zero).clamp(0, 255) - zero) * step
        integers, scale = integer_weight(layer.weight.detach().numpy())
        return F.linear(rounded, torch.from_numpy(integers * scale), layer.bias)

    return hook


@contextlib.contextmanager
def _watching(
    modules: Mapping[str, nn.Module], watch: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call `watch` with the name and the input of each module that runs."""
    with contextlib.ExitStack() as hooks:
        for name, module in modules.items():
            hook = module.register_forward_pre_hook(lambda _, args, n=name: watch(n, args[0]))
            hooks.enter_context(hook)
        yield
