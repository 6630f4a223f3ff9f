"""One elastic model against a model for each of its settings, on CIFAR-100.

    python benchmarks/elastic.py --root DATA --runs runs/elastic

In each step of the elastic training the largest setting, the smallest and one of the others have
their turn, so a setting in between sees a part of the images. The single models see as many images
as their setting did; with --all-images as many as the largest. Resumes what was begun.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from record import portable_command

import hvt
from hvt.bench.measure import describe
from hvt.elastic import configs_of, label, plain
from hvt.files import atomic_write

OUT = Path(__file__).parent / "results" / "elastic.json"
MODEL: dict[str, Any] = {
    "img_size": 32, "patch_size": 4, "num_heads": 2, "head_dim": 32, "depth": 12,
    "drop_path_rate": 0.0,
}  # fmt: skip


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    stages, between = args.stages, max(1, len(args.stages) - 2)
    common = MODEL | {
        "root": args.root, "seed": args.seed, "threads": args.threads, "workers": 0,
        "eval_every": 10**6, "tensorboard": False, "lr": args.lr,
    }  # fmt: skip
    elastic = trained(
        args.runs / "elastic",
        common
        | {"elastic": tuple(stages), "epochs": args.epochs, "distill_alpha": args.distill_alpha},
    )
    rows = []
    for place, config in enumerate(configs_of(elastic)):
        ends = place in (0, len(stages) - 1)
        epochs = args.epochs if ends or args.all_images else args.epochs / between
        values = common | {"stages": stages[place], "epochs": round(epochs, 4)}
        single = trained(args.runs / f"single-{stages[place]}", values)
        scores = [
            hvt.evaluate(model, "cifar100", root=args.root, device="cpu")
            for model in (plain(elastic, place), single)
        ]
        rows.append(
            {
                "setting": label(config), "stages": stages[place], "epochs": epochs,
                "elastic": scores[0].top1, "single": scores[1].top1,
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    report = {"command": portable_command(sys.argv), "machine": describe(torch.device("cpu"))}
    with atomic_write(args.out) as temporary:
        temporary.write_text(json.dumps(report | {"rows": rows}, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Elastic against single models on CIFAR-100.")
    add = parser.add_argument
    add("--root", required=True, help="folder that has CIFAR-100 in it")
    add("--runs", type=Path, default=Path("runs/elastic"), help="where the runs go (%(default)s)")
    add("--stages", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    add("--epochs", type=float, default=6.0)
    add("--lr", type=float, default=0.032, help="at a batch of 512")
    add("--distill-alpha", type=float, default=0.2, help="weight of the largest setting's logits")
    add("--all-images", action="store_true", help="every single model sees what the largest did")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1)
    add("--out", type=Path, default=OUT)
    return parser.parse_args()


def trained(folder: Path, values: dict[str, Any]) -> hvt.HVT:
    """The model of a run, which is begun, resumed or done."""
    if not (folder / "model.safetensors").exists():
        if (folder / "recipe.json").exists():
            hvt.train(resume=folder)
        else:
            hvt.train("cifar100-cpu", output=str(folder), **values)
    return hvt.load(folder / "model.safetensors")


if __name__ == "__main__":
    main()
