"""`hvt fit` beside a plain fine-tuning loop and frozen features of timm's DeiT-Tiny.

python benchmarks/fit.py IMAGES --weights deit_tiny_patch16_224.safetensors --seeds 0 1 2

IMAGES has train and val. a is hvt fit, b is hvt fit --minutes 10, c is the loop below for as many
minutes, d is scikit-learn on features of timm's model. Each run is a line of results/fit.csv.
"""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hvt.model  # first: timm needs what it does for torchvision

# isort: split
import numpy as np
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegressionCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from timm.data import create_transform
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from hvt.device import cpu_name

RESULTS = Path(__file__).parent / "results" / "fit.csv"


def hvt_fit(args: argparse.Namespace, seed: int) -> float:
    with tempfile.TemporaryDirectory() as folder:  # of the cache, too: nothing is embedded before
        run = Path(folder) / "run"
        fitted = hvt.fit(args.images, run, seed=seed, cache=folder, minutes=args.limit)
        return fitted.report.top1


def deit_tiny(weights: Path, classes: int) -> torch.nn.Module:
    model = timm.create_model("deit_tiny_patch16_224", num_classes=classes)
    state = {k: v.float() for k, v in load_file(weights).items() if not k.startswith("head")}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert all(name.startswith("head") for name in missing)
    assert not unexpected
    return model


def batches(args: argparse.Namespace, part: str, training: bool) -> Any:
    size = (3, 224, 224)
    if training:
        transform = create_transform(size, is_training=True, auto_augment=None, color_jitter=0.3)
    else:
        transform = create_transform(size, interpolation="bicubic", crop_pct=0.875)
    images = ImageFolder(str(args.images / part), transform)
    return DataLoader(images, 32, shuffle=training, drop_last=training, num_workers=1)


@torch.inference_mode()
def logits_of(model: torch.nn.Module, loader: Any) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = [(model(images), labels) for images, labels in loader]
    return torch.cat([one for one, _ in outputs]), torch.cat([one for _, one in outputs])


def plain_loop(args: argparse.Namespace, seed: int) -> float:
    """AdamW at 1e-4 with crops, flips and colours; the rate falls to zero as the minutes end."""
    began = time.perf_counter()
    torch.manual_seed(seed)
    train, val = batches(args, "train", True), batches(args, "val", False)
    model = deit_tiny(args.weights, len(train.dataset.classes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05)
    end = 60 * args.minutes - 0.03 * len(val.dataset)  # the last evaluation is within them
    while (share := (time.perf_counter() - began) / end) < 1:
        for images, labels in train:
            share = (time.perf_counter() - began) / end
            if share >= 1:
                break
            rate = 1e-4 * min(1, 20 * share) * (1 + math.cos(math.pi * share)) / 2
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    outputs, labels = logits_of(model.eval(), val)
    return 100 * float((outputs.argmax(1) == labels).double().mean())


def frozen_features(args: argparse.Namespace, seed: int) -> float:
    model = deit_tiny(args.weights, 0).eval()
    (x, y), (val_x, val_y) = (logits_of(model, batches(args, p, False)) for p in ("train", "val"))
    strengths = np.logspace(-4, 1, 6).tolist()
    head = LogisticRegressionCV(Cs=strengths, max_iter=2000, random_state=seed)
    classifier = make_pipeline(StandardScaler(), head).fit(x.numpy(), y.numpy())
    return 100 * classifier.score(val_x.numpy(), val_y.numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", default=["a", "b", "c", "d"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=10)
    args = parser.parse_args()
    ways: dict[str, Callable[[argparse.Namespace, int], float]]
    ways = {"a": hvt_fit, "b": hvt_fit, "c": plain_loop, "d": frozen_features}
    for seed in args.seeds:
        for way in args.ways:
            args.limit = args.minutes if way == "b" else None
            began, used = time.perf_counter(), time.process_time()
            top1 = ways[way](args, seed)
            row = [args.images.name, way, seed, f"{top1:.2f}", f"{time.perf_counter() - began:.0f}",
                   f"{time.process_time() - used:.0f}", cpu_name(), torch.get_num_threads(),
                   torch.__version__]  # fmt: skip
            with RESULTS.open("a", newline="") as file:
                csv.writer(file).writerow(row)
            print(*row, flush=True)


if __name__ == "__main__":
    main()
