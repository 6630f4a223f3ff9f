"""A recipe's model beside the same model without pooling, at equal wall-clock.

    python benchmarks/wall_clock.py --root DATA

First the speed of both is measured, in turns; then each trains for as many images as its speed
allows in the minutes asked for, with the whole schedule, one after the other, from the same seed.
Each is evaluated on the test images once, at its end. Writes a JSON and the curves beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import portable_command
from rich.console import Console

from hvt import cost, distributed
from hvt.bench.measure import describe
from hvt.files import atomic_write
from hvt.training.engine import open_trainer, train
from hvt.training.recipe import Recipe, load_recipe
from hvt.training.watch import draw_curves

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    args = parse()
    base = load_recipe(args.recipe).replace(
        root=args.root, seed=args.seed, holdout=args.holdout, eval_every=10**6, tensorboard=False
    )
    recipes = {"pooled": base, "unpooled": base.replace({"stages": 0})}
    speeds = measure(recipes, args.rounds)
    rows: list[dict[str, Any]] = []
    curves: dict[str, Any] = {}
    for name, recipe in recipes.items():
        epochs = round(60 * args.minutes * speeds[name] / speeds["images"], 3)
        print(f"{name}: {speeds[name]:.0f} images/s, so {epochs} epochs in {args.minutes} minutes")
        rows.append(one_run(name, recipe.replace(epochs=epochs), curves))
    described: dict[str, Any] = {"recipe": args.recipe, "minutes": args.minutes, "rows": rows}
    described |= {"seed": args.seed, "command": portable_command(sys.argv)}
    described |= describe(distributed.init_process_group(base.device)[1])
    with atomic_write(args.out) as temporary:
        temporary.write_text(json.dumps(described, indent=2) + "\n")
    draw_curves(args.out.with_suffix(".png"), curves)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with and without pooling for equal time.")
    parser.add_argument("--recipe", default="cifar100-cpu", help="what to train (%(default)s)")
    parser.add_argument("--root", help="folder that has the recipe's data set in it")
    parser.add_argument("--minutes", type=float, default=7.0, help="training time of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--holdout", type=float, default=0.0, help="measure on held-out images")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each model's speed")
    parser.add_argument("--out", type=Path, default=RESULTS / "wall_clock.json")
    return parser.parse_args()


def measure(recipes: dict[str, Recipe], rounds: int, steps: int = 10) -> dict[str, float]:
    """Images per second of each recipe's training, fed as in a run; and the training images."""
    trainers, times = {}, {name: [0.0] * 0 for name in recipes}
    with tempfile.TemporaryDirectory() as folder:
        for name, recipe in recipes.items():
            processes, device = distributed.init_process_group(recipe.device)
            trainers[name] = open_trainer(recipe, Path(folder), processes, device)
    for turn, (name, trainer) in itertools.product(range(rounds), trainers.items()):
        batches = trainer.batches.epoch(turn)
        for step in range(2 + steps):
            if step == 2:
                began = time.perf_counter()
            trainer.learner.step(batches, step)
        times[name].append((time.perf_counter() - began) / steps)
    batch = next(iter(recipes.values())).batch_size
    speeds = {name: batch / statistics.median(each) for name, each in times.items()}
    return speeds | {"images": trainer.steps * batch}


def one_run(name: str, recipe: Recipe, curves: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = train(recipe.replace(output=folder), name, Console(soft_wrap=True))
    config, last = result.model.config, result.rows[-1]
    curves[f"{name}, {last['val_top1']:.1f} %"] = result.rows
    return {
        "model": name,
        "epochs": recipe.epochs,
        "top1": last["val_top1"],
        "top5": last["val_top5"],
        "test": "held-out training images" if recipe.holdout else "test images",
        "seconds": round(result.seconds, 1),
        "images_per_second": round(result.images_per_second, 1),
        "tokens": list(config.tokens),
        "mmacs": round(cost(config).macs / 1e6, 2),
        "mparams": round(cost(config).params / 1e6, 3),
        "curve": [{k: row[k] for k in ("epoch", "train_loss", "val_top1")} for row in result.rows],
    }


if __name__ == "__main__":
    main()
