"""A folder that transformers.js and optimum open: a ViT's config, its image processor's, ONNX."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from PIL.Image import Resampling
from torch import Tensor

from ..errors import HVTError
from ..files import atomic_folder
from ..model import HVT
from .export import MAX_ERROR, Comparison, export

FILES = {"onnx": "onnx/model.onnx", "int8": "onnx/model_quantized.onnx"}
"""Where these runtimes look for a model in float32 and in int8."""


def export_hf(
    model: HVT,
    out: str | Path,
    images: Tensor | None = None,
    int8: bool = False,
    max_error: float = MAX_ERROR,
) -> list[Comparison]:
    """Write a model's folder, which must be new or empty, and compare its files with the model.

    `images` and `max_error` are those of `export`. Nothing is written where a file does not agree.
    """
    described = {
        "config.json": hf_config(model, int8),
        "preprocessor_config.json": hf_processor(model),
    }
    with atomic_folder(out) as folder:
        for name, values in described.items():
            text = json.dumps(values, indent=2, ensure_ascii=False)
            (folder / name).write_text(text + "\n", encoding="utf-8")
        (folder / "onnx").mkdir()
        forms = ("onnx", "int8") if int8 else ("onnx",)
        return [export(model, folder / FILES[form], form, images, max_error) for form in forms]


def hf_config(model: HVT, int8: bool = False) -> dict[str, Any]:
    """`config.json`: a ViT that classifies. What pools inside of it is the graph's own affair."""
    config = model.config
    names = model.class_names or tuple(str(label) for label in range(model.num_classes))
    described = {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "image_size": config.image[0],
        "patch_size": config.patch_size,
        "num_channels": config.in_chans,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_width,
        "id2label": {str(label): name for label, name in enumerate(names)},
        "label2id": {name: label for label, name in enumerate(names)},
    }
    # In browsers transformers.js asks for int8 unless it is told what there is.
    return described if int8 else described | {"transformers.js_config": {"dtype": "fp32"}}


def hf_processor(model: HVT) -> dict[str, Any]:
    """`preprocessor_config.json`: resize, centre crop and normalise as `hvt predict` does."""
    cfg, config = model.pretrained_cfg, model.config
    height, width = config.image
    mode, interpolation = cfg["crop_mode"], str(cfg["interpolation"]).upper()
    if config.in_chans != 3 or mode == "border" or (mode == "center" and height != width):
        raise HVTError(
            f"a Hugging Face image processor cannot prepare {config.in_chans} × {height} × {width} "
            f"pixels with crop_mode={mode}: it takes colour images, and centre-crops to squares; "
            "export to OUT.onnx instead"
        )
    tall, wide = (math.floor(side / cfg["crop_pct"]) for side in (height, width))  # as timm does
    # ViTImageProcessor has no crop; CLIP's has each of these steps.
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": tall} if mode == "center" else {"height": tall, "width": wide},
        "resample": Resampling[interpolation].value,
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(cfg["mean"]),
        "image_std": list(cfg["std"]),
    }
