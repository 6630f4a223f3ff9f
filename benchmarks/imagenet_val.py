"""Top-1 and top-5 of a checkpoint on ImageNet's validation images, or a part of them.

    python benchmarks/imagenet_val.py WEIGHTS FOLDER --timm deit_tiny_patch16_224

FOLDER has one folder per class; sorted by name, they are the classes 0, 1, … of the logits. The
transform is the model's own: for DeiT and HVT resize to 256/224 of the input size by bicubic
interpolation, then crop the centre. With `--timm`, timm's model of that name gets the same weights
and the same images.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from record import portable_command
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hvt
from hvt.bench.measure import describe
from hvt.deploy.runtime import find_device

# isort: split
import timm
from timm.data import create_transform, resolve_model_data_config
from torchvision.datasets import ImageFolder


def main() -> None:
    args = parse()
    device = find_device(args.device)
    models: dict[str, nn.Module] = {"hvt": hvt.load(args.weights, device=device).float()}
    if args.timm:
        other = timm.create_model(args.timm, checkpoint_path=str(args.weights))
        models[f"timm {args.timm}"] = other.to(device).eval()

    settings = resolve_model_data_config(models["hvt"])
    folder = ImageFolder(str(args.folder), create_transform(**settings, is_training=False))
    classes = models["hvt"].num_classes
    if len(folder.classes) != classes:
        raise SystemExit(
            f"{args.folder} has {len(folder.classes)} class folders and the model {classes} "
            "classes: their numbers must agree, for a folder's place gives its class"
        )
    results, speed, difference = evaluate(models, DataLoader(folder, args.batch), device)
    report = {
        "command": portable_command(sys.argv),
        "images": len(folder),
        "transform": {
            key: settings[key] for key in ("input_size", "interpolation", "crop_pct", "crop_mode")
        },
        "models": results,
        **({"largest_logit_difference": difference} if args.timm else {}),
        "machine": describe(device),
    }
    for name, figures in results.items():
        print(
            f"{name}: top-1 {figures['top1']:.2f} %, top-5 {figures['top5']:.2f} %, "
            f"{speed[name]:.1f} images/s (model alone), {len(folder)} images"
        )
    if args.timm:
        print(f"largest difference of a logit: {difference:.1e}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Top-1 and top-5 of a checkpoint on a folder in ImageNet's layout.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("weights", type=Path, help="any checkpoint that hvt.load reads")
    add("folder", type=Path, help="one folder of images per class")
    add("--timm", metavar="NAME", help="compare with timm's model of this name, same weights")
    add("--batch", type=int, default=25, help="images at a time")
    add("--device", default="auto", help="auto, cpu, cuda, …")
    add("--out", type=Path, help="write the figures to this JSON file")
    return parser.parse_args()


def evaluate(
    models: dict[str, nn.Module],
    batches: DataLoader[tuple[Tensor, Tensor]],
    device: torch.device,
) -> tuple[dict[str, dict[str, float]], dict[str, float], float]:
    """Accuracy and images/s of each model, and how far any logit is from the first model's."""
    right = {name: torch.zeros(2, dtype=torch.long) for name in models}
    seconds, largest = dict.fromkeys(models, 0.0), dict.fromkeys(models, 0.0)
    seen, difference = 0, 0.0
    for images, classes in batches:
        images = images.to(device)
        seen += len(classes)
        logits: list[Tensor] = []
        for name, model in models.items():
            start = time.perf_counter()
            with torch.inference_mode():
                logits.append(model(images).float().cpu())
            seconds[name] += time.perf_counter() - start
            largest[name] = max(largest[name], logits[-1].abs().max().item())
            hits = logits[-1].topk(5).indices == classes[:, None]  # (B, 5)
            right[name] += torch.stack((hits[:, 0].sum(), hits.sum()))
        difference = max(difference, *((y - logits[0]).abs().max().item() for y in logits))
    figures = {
        name: {
            "top1": 100 * right[name][0].item() / seen,
            "top5": 100 * right[name][1].item() / seen,
            "largest_logit": largest[name],
        }
        for name in models
    }
    return figures, {name: seen / s for name, s in seconds.items()}, difference


if __name__ == "__main__":
    main()
