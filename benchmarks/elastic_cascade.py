"""Confidence cascades of two settings of an elastic model against its plain settings.

    python benchmarks/elastic_cascade.py elastic.safetensors --data IMAGES

A small setting classifies every image; those it is least sure of go to a larger one, at the cost of
both. Each row compares a cascade with the plain settings at its mean cost, interpolated.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np
import torch

import hvt
from hvt.data.evaluation import eval_batches
from hvt.data.sources import open_eval
from hvt.elastic import configs_of, label, plain

SENT_ON = (0.2, 0.3, 0.4, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description="Confidence cascades of an elastic model.")
    parser.add_argument("model", help="an elastic checkpoint")
    parser.add_argument("--data", type=Path, required=True, help="a folder of class folders")
    args = parser.parse_args()
    model = hvt.load(args.model).float()
    data = open_eval(
        args.data, class_names=model.class_names, num_classes=model.num_classes,
        match_by_order=True,
    )  # fmt: skip
    configs = configs_of(model)
    costs = [hvt.cost(config).gflops for config in configs]
    found = [outputs(plain(model, place), data.val) for place in range(len(configs))]
    plains = [100 * right.mean() for _, right in found]
    for config, top1 in zip(configs, plains, strict=True):
        print(f"{label(config)}: {top1:.2f} %")
    for large, small in itertools.combinations(range(len(configs)), 2):
        for share in SENT_ON:
            sure, right = found[small]
            sent = np.argsort(sure)[: round(share * len(sure))]
            mixed = right.copy()
            mixed[sent] = found[large][1][sent]
            mean = costs[small] + share * costs[large]
            top1, rival = 100 * mixed.mean(), np.interp(mean, costs[::-1], plains[::-1])
            print(
                f"{label(configs[small])} → {label(configs[large])}, {share:.0%} sent on: "
                f"{mean:.3f} GFLOPs, {top1:.2f} %, plain {rival:.2f} %, {top1 - rival:+.2f}"
            )


@torch.inference_mode()
def outputs(model: hvt.HVT, images: object) -> tuple[np.ndarray, np.ndarray]:
    """The confidence in each image's top-1 class, and whether it is right."""
    sure, right = [], []
    for batch in eval_batches(model, images, workers=0):
        best = model(batch.images).softmax(dim=1).max(dim=1)
        sure.append(best.values.numpy())
        right.append(best.indices.eq(batch.labels).float().numpy())
    return np.concatenate(sure), np.concatenate(right)


if __name__ == "__main__":
    main()
