"""Accuracy and speed of an elastic model's settings beside its source on smaller images.

    python benchmarks/elastic_sizes.py imagenet deit_tiny_patch16_224.safetensors --data IMAGES

The source is evaluated at the settings' image sizes and at those in between, without training.
Speeds are forward passes at batch 16, all models in turns. Writes results/elastic_sizes.csv, which
docs/tradeoff.svg draws.
"""

from __future__ import annotations

import argparse
import csv
import functools
import statistics
from pathlib import Path
from typing import Any

import torch

import hvt
from hvt.bench.measure import describe, interleaved
from hvt.elastic import configs_of, plain

OUT = Path(__file__).parent / "results" / "elastic_sizes.csv"
BATCH, ROUNDS = 16, 5


def main() -> None:
    parser = argparse.ArgumentParser(description="Settings beside the source on smaller images.")
    parser.add_argument("model", help="an elastic checkpoint")
    parser.add_argument("source", help="the ViT that it was made from")
    parser.add_argument("--data", type=Path, required=True, help="a folder of class folders")
    args = parser.parse_args()
    elastic = hvt.load(args.model).float()
    settings = configs_of(elastic)
    models = {("elastic", c.image[0]): plain(elastic, i) for i, c in enumerate(settings)}
    low, high = settings[-1].image[0], settings[0].image[0]
    for size in range(high, low - 1, -settings[0].patch_size):
        models["source", size] = hvt.load(args.source, img_size=size).float()
    cpu, calls = torch.device("cpu"), {}
    taken: dict[tuple[str, int], list[float]] = {}
    for case, model in models.items():
        images = torch.randn(BATCH, 3, *model.config.image)
        calls[case] = torch.inference_mode()(functools.partial(model.eval(), images))
    for turn in range(ROUNDS):
        interleaved(calls, cpu, turn, 1.0, taken)
    rows: list[dict[str, Any]] = []
    for (kind, size), model in models.items():
        top1 = hvt.evaluate(model, args.data, match_by_order=True, device="cpu").top1
        speed = BATCH / statistics.median(taken[kind, size])
        gflops = round(hvt.cost(model).gflops, 3)
        row = {"model": kind, "image": size, "gflops": gflops, "top1": round(top1, 2)}
        rows.append(row | {"images_per_s": round(speed, 1)} | describe(cpu))
        print(kind, size, gflops, f"{top1:.1f} %", f"{speed:.1f} images/s", flush=True)
    with OUT.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
