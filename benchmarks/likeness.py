"""How far models agree with the source they were made from, on photos held out of training.

    python benchmarks/likeness.py SOURCE.safetensors PHOTOS MODEL.safetensors … [--holdout 400]
        [--within ALL_PHOTOS --within-holdout 500]

The photos are those that `hvt upcycle --data PHOTOS --holdout N` holds out. With `--within`, of
those only the ones that it holds out of another folder too, where they have the same names: what
neither of two trainings has seen.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import hvt
from hvt.upcycling.distil import compare
from hvt.upcycling.photos import Normalise, open_photos, read_views
from hvt.upcycling.source import open_source


@torch.inference_mode()
def main() -> None:
    args = parse()
    source = open_source(args.source).eval()
    held = open_photos(args.photos, 2, args.holdout).val
    if args.within:
        others = open_photos(args.within, 2, args.within_holdout).val.paths
        known = {path.relative_to(args.within) for path in others}
        names = [path.relative_to(args.photos) for path in held.paths]
        held = held.subset([i for i, name in enumerate(names) if name in known])
    normalise = Normalise(source, torch.device("cpu"))
    print(f"{len(held)} photos")
    models = {path: hvt.load(path).float().eval() for path in args.models}
    truth = None
    for path, model in models.items():
        theirs, ours = read_views(held, [source, model], 0, False)
        if truth is None:
            truth = torch.cat([source(normalise(batch)) for batch in theirs.split(25)])
        logits = torch.cat([model(normalise(batch)) for batch in ours.split(25)])
        same, kl = compare(logits, truth, True).mean(dim=0).tolist()
        gflops = hvt.cost(model).gflops
        print(f"{path}: {gflops:.3f} GFLOPs, agreement {100 * same:.1f} %, KL {kl:.4f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("photos", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--holdout", type=int, default=500)
    parser.add_argument("--within", type=Path)
    parser.add_argument("--within-holdout", type=int, default=500)
    return parser.parse_args()


if __name__ == "__main__":
    main()
