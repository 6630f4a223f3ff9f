"""Trainings that check a study: what its best is worth, and whether the fit holds elsewhere.

    python benchmarks/scaling.py best --root DATA --config benchmarks/results/search/best.json
    python benchmarks/scaling.py check --root DATA

`best` trains a config by the protocols of `reproduction`, at one epoch and at ten, on all training
images, and measures it on the test images. `check` trains configs that the fit behind
`hvt plan` has not seen, at half and at twice the study's budget, on images held out: the plan's
first choice, the paper's four even stages as wide as the budget allows, and some at random. Each
training is a row of `results/scaling.csv`, and is not done again; `--shard 1/2` and `2/2` share
them.
`scaling_tables.py` makes the tables of docs/evidence/search.md of it.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import random
import shutil
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import portable_command

import hvt
from hvt.config import HVTConfig
from hvt.costs import cost
from hvt.device import cpu_name
from hvt.files import atomic_write
from hvt.planning.best import plan_space
from hvt.planning.budget import Budgets, tolerance
from hvt.planning.quality import flags_of, load_quality, measures_of
from hvt.planning.result import Estimator
from hvt.searching.suggest import SearchSpace, search_space
from hvt.training.recipe import load_recipe
from hvt.zoo import write_config

HERE = Path(__file__).parent
PAPER = HERE.parent / "reproduction"
RESULTS = HERE / "results/scaling.csv"
STUDIES = sorted((HERE / "results/search").glob("*.csv"))
BUDGET = 0.008
"""GFLOPs of the study: those of DeiT-Ti at 32 pixels."""
OTHERS = (0.004, 0.016)
RANDOM = 4
"""Configs at random that are trained for each of the other budgets."""
HOLDOUT = 0.1
EVEN = "four even stages within the budget"
RECIPES = {1: PAPER / "cpu.toml", 10: PAPER / "long.toml"}
"""The recipe of each length in epochs."""
COLUMNS = (
    "what", "name", "budget", "gflops", "params_m", "epochs", "seed", "images", "top1",
    "predicted", "seconds", "config", "command", "machine", "versions", "date",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the study's best and the fit's rule.")
    commands = parser.add_subparsers(dest="what", required=True)
    for name in ("best", "check"):
        command = commands.add_parser(name)
        command.add_argument("--root", required=True, help="folder that has CIFAR-100 in it")
        command.add_argument("--threads", type=int, default=1)
        command.add_argument("--shard", default="1/1", help="one part of the trainings, as 1/2")
        if name == "best":
            command.add_argument("--config", type=Path, required=True, help="a .json config")
            command.add_argument("--models", nargs="+", default=["best", "even"],
                                 choices=["best", "even"])  # fmt: skip
            command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
            command.add_argument("--epochs", type=int, nargs="+", default=[1, 10], choices=RECIPES)
    args = parser.parse_args()
    jobs = best_jobs(args) if args.what == "best" else check_jobs()
    part, count = map(int, args.shard.split("/"))
    for job in jobs[part - 1 :: count]:
        train(job, args.root, args.threads)
    return 0


# ── what is trained ─────────────────────────────────────────────────────────────────────────────


def best_jobs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The long ones first; beside the best, the paper's rule within the same budget."""
    config = hvt.get_config(str(args.config)).replace(num_classes=100)
    models = {"best": (best_name(config), config), "even": (EVEN, even_stages(BUDGET))}
    return [
        job("best", name, BUDGET, one, epochs, seed)
        for epochs in sorted(args.epochs, reverse=True)
        for seed in args.seeds
        for name, one in (models[model] for model in args.models)
    ]


def best_name(config: HVTConfig) -> str:
    """The study had a best after each of its lengths."""
    return f"found: {config.depth} blocks at {config.image[0]} pixels"


def check_jobs() -> list[dict[str, Any]]:
    """The expensive ones first."""
    jobs = []
    for budget in sorted(OTHERS, reverse=True):
        named = {"plan": planned(budget), "even stages": even_stages(budget)}
        drawn = {f"random {n}": one for n, one in enumerate(at_random(budget), 1)}
        jobs += [job("check", name, budget, one, 1, 0) for name, one in (named | drawn).items()]
    return jobs


def job(
    what: str, name: str, budget: float, config: HVTConfig, epochs: int, seed: int
) -> dict[str, Any]:
    return {
        "what": what, "name": name, "budget": budget, "config": config, "epochs": epochs,
        "seed": seed, "images": "test" if what == "best" else "held out",
    }  # fmt: skip


class RandomTrial:
    """Stands in for `optuna.Trial`: random parameters that spend the whole budget."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random

    def suggest_int(self, _: str, low: int, high: int) -> int:
        return int(self.random.integers(low, high + 1))

    def suggest_float(self, name: str, low: float, high: float) -> float:
        return high if name == "spent" else float(self.random.uniform(low, high))

    def suggest_categorical(self, _: str, choices: list[str]) -> str:
        return choices[self.random.integers(len(choices))]


def choices(budget: float) -> SearchSpace:
    """The space of the study at some budget."""
    recipe = load_recipe(RECIPES[1])
    base = hvt.get_config(recipe.model or "", **recipe.overrides, num_classes=100)
    return search_space(base, budget, {})


def planned(budget: float) -> HVTConfig:
    """The first choice of `hvt plan` in the study's space that no trial of the study was."""
    estimator, seen = Estimator(None, 128), known_configs()
    best = plan_space(choices(budget).space, Budgets(gflops=budget), estimator, 20).best
    return next(one.config for one in best if one.config not in seen)


def even_stages(budget: float) -> HVTConfig:
    """The paper's four stages on the CPU protocol's six blocks, as wide as the budget allows."""
    recipe = load_recipe(RECIPES[1])
    values = recipe.overrides | {"pool_after": (0, 1, 3, 4), "num_classes": 100}
    widths = [hvt.get_config("hvt_s_4", **values, num_heads=heads) for heads in range(1, 25)]
    return max((one for one in widths if cost(one).gflops <= tolerance(budget)), key=_width)


def at_random(budget: float) -> list[HVTConfig]:
    """Configs that spend the budget and are as good as the fit can tell, or not, in equal parts.

    Of many at random, ordered by the fit's score, some at equal distances from the top: the upper
    half, for below it there are models that nobody would want.
    """
    space, chance = choices(budget), np.random.default_rng(round(budget * 1e6))
    drawn = dict.fromkeys(space.suggest(RandomTrial(chance)) for _ in range(300))  # in this order
    wanted = [one for one in drawn if one is not None and cost(one).gflops >= 0.8 * budget]
    seen = known_configs()
    wanted = sorted((one for one in wanted if one not in seen), key=predicted, reverse=True)
    picker = random.Random(round(budget * 1e6))
    upper = len(wanted) // 2
    cuts = [n * upper // RANDOM for n in range(RANDOM + 1)]
    return [wanted[picker.randrange(low, high)] for low, high in itertools.pairwise(cuts)]


def known_configs() -> set[HVTConfig]:
    """Those of the study."""
    return {HVTConfig.from_dict(json.loads(row["config"])) for row in trials()}


def trials() -> list[dict[str, Any]]:
    """All trials of the study's rounds."""
    rows = []
    for path in STUDIES:
        with path.open(newline="") as file:
            rows += [row | {"study": path.stem} for row in csv.DictReader(file)]
    return rows


def predicted(config: HVTConfig) -> float:
    return float(load_quality().score(measures_of(config), flags_of(config)))


def _width(config: HVTConfig) -> int:
    return config.width


# ── training ────────────────────────────────────────────────────────────────────────────────────


def train(job: dict[str, Any], root: str, threads: int) -> None:
    """One training, unless its row is there."""
    config: HVTConfig = job["config"]
    key = (job["what"], json.dumps(config.to_dict()), str(job["epochs"]), str(job["seed"]))
    if key in {(row["what"], row["config"], row["epochs"], row["seed"]) for row in read_rows()}:
        return
    holdout = HOLDOUT if job["images"] == "held out" else 0.0
    with tempfile.TemporaryDirectory() as folder:
        write_config(config, Path(folder) / "config.json")
        run = hvt.train(
            str(RECIPES[job["epochs"]]), model=str(Path(folder) / "config.json"), root=root,
            epochs=job["epochs"], seed=job["seed"], holdout=holdout, threads=threads, processes=1,
            output=str(Path(folder) / "run"), tensorboard=False, eval_every=10**6,
            num_classes=100,
        )  # fmt: skip
        shutil.rmtree(run.folder)
    price = cost(config)
    row = job | {
        "gflops": price.gflops, "params_m": price.params_m, "top1": run.rows[-1]["val_top1"],
        "predicted": predicted(config) if job["what"] == "check" else "",
        "seconds": round(run.seconds, 1), "config": key[1],
        "command": portable_command(sys.argv), "machine": cpu_name(),
        "versions": f"torch {torch.__version__}", "date": date.today().isoformat(),
    }  # fmt: skip
    rows = [*read_rows(), row]  # which another process may have added to meanwhile
    with atomic_write(RESULTS) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_rows() -> list[dict[str, Any]]:
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    sys.exit(main())
