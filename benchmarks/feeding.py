"""Whether the data keeps up: a training recipe's images per second beside the model's own.

    python benchmarks/feeding.py --root DATA

Both are the same training step of one process. *Fed* takes its batches from the pipeline as a run
does: chosen, augmented and mixed. *Ready* gets one batch of tensors again and again. They take
turns, round after round, so that a busy moment of the machine falls on both alike; every figure is
a median over the rounds. Fed over ready is the fraction of the model's speed that a run reaches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hvt import distributed
from hvt.bench.measure import describe, portable_command
from hvt.data.loader import Batch
from hvt.training.engine import open_trainer
from hvt.training.recipe import load_recipe


def main() -> None:
    args = parse()
    result = measure(args)
    print(
        f"{args.recipe}: {result['fed']} images/s fed, {result['ready']} on ready tensors: "
        f"{100 * result['share']:.1f} % ({args.rounds} rounds of {args.steps} steps)"
    )
    if args.out:
        described = {"recipe": args.recipe, **result, "command": portable_command(sys.argv)}
        described |= describe(distributed.init_process_group("auto")[1])
        args.out.write_text(json.dumps(described, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time training steps with and without reading.")
    parser.add_argument("--recipe", default="cifar100-cpu", help="whose training (%(default)s)")
    parser.add_argument("--root", help="folder that has the recipe's dataset in it")
    parser.add_argument("--rounds", type=int, default=9, help="times that each is timed")
    parser.add_argument("--steps", type=int, default=20, help="steps of one timing")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> dict[str, float]:
    recipe = load_recipe(args.recipe).replace(root=args.root, tensorboard=False)
    processes, device = distributed.init_process_group(recipe.device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = open_trainer(recipe, Path(folder), processes, device)
    times: dict[str, list[float]] = {"fed": [], "ready": []}
    one = next(trainer.batches.epoch(0))
    for turn in range(args.rounds + 1):
        for kind in ("fed", "ready") if turn % 2 else ("ready", "fed"):
            batches: Iterator[Batch] = itertools.repeat(one)
            if kind == "fed":
                batches = trainer.batches.epoch(turn)
            # When the clock starts the pipeline is as many batches ahead as when it stops.
            for step in range(5):
                trainer.learner.step(batches, step)
            began = time.perf_counter()
            for step in range(args.steps):
                trainer.learner.step(batches, step)
            if turn:  # the first round warms up
                times[kind].append((time.perf_counter() - began) / args.steps)
            del batches  # and with it the thread that reads ahead
    speed = {k: recipe.batch_size / statistics.median(v) for k, v in times.items()}
    return {
        "fed": round(speed["fed"], 1),
        "ready": round(speed["ready"], 1),
        "share": round(speed["fed"] / speed["ready"], 4),
        "rounds": args.rounds,
        "steps": args.steps,
        "batch": recipe.batch_size,
    }


if __name__ == "__main__":
    main()
