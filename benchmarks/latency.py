"""How near the latency that `hvt plan` predicts is to what is measured.

    python benchmarks/latency.py --modes eager,onnx,int8 --threads 2

draws random configs from the space of a plan and times them in turns with the models of the table
of block timings, so that a busy moment falls on all alike. Each is predicted by the sum over its
layers. Writes `results/latency.csv`, where rows of other modes are kept, and prints how many are
within 15 per cent.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
import time
from pathlib import Path

import torch
from record import portable_command, write_csv

from hvt.bench.measure import describe
from hvt.config import HVTConfig
from hvt.costs import cost
from hvt.device import find_device
from hvt.errors import HVTError
from hvt.planning.space import Space, lengths, space_of
from hvt.planning.timings import cases_of, solve, time_models

HERE = Path(__file__).parent
WITHIN = 0.15
DRAWS = 1000
"""Configs to draw for one that is timed, at most: the plan's space ends somewhere."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare the latency that hvt plan predicts with what is measured.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--modes", default="eager", help="of eager, onnx and int8")
    add("--device", default="auto", help="auto, cpu, cuda …")
    add("--threads", type=int, help="CPU threads; torch's own choice by default")
    add("--batch", type=int, default=1, help="images of a batch")
    add("--count", type=int, default=24, help="configs")
    add("--gflops", type=float, nargs=2, default=(0.05, 5.0), help="range of their cost")
    add("--seed", type=int, default=0, help="of the configs")
    add("--rounds", type=int, default=7, help="turns of each config; more where a machine is noisy")
    add("--out", type=Path, default=HERE / "results/latency.csv", help="the results' CSV file")
    args = parser.parse_args()
    if not 0 < args.gflops[0] < args.gflops[1]:
        parser.error("--gflops must be two numbers above 0, the smaller first")
    device = find_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    configs = draw(args.count, tuple(args.gflops), args.seed)
    rows: list[dict[str, object]] = []
    for mode in args.modes.split(","):
        began = time.perf_counter()
        cases = {("random", n): config for n, config in enumerate(configs)} | cases_of(mode)
        calls = time_models(
            cases, mode, device, args.batch, args.rounds,
            note=lambda text, mode=mode: note(f"{mode}: {text}"),  # type: ignore[misc]
        )  # fmt: skip
        latency = solve(calls, cases, describe(device) | {"mode": mode, "batch": args.batch})
        note(f"{mode}: {time.perf_counter() - began:.0f} s")
        rows += [
            row(config, mode, args.batch, latency.seconds(config), min(calls["random", n]))
            for n, config in enumerate(configs)
        ]
    described = describe(device) | {"command": portable_command(sys.argv)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    others = kept(args.out, args.modes.split(","))
    write_csv([*others, *(one | described for one in rows)], args.out)
    for mode in args.modes.split(","):
        errors = [abs(float(str(one["error"]))) for one in rows if one["mode"] == mode]
        near = sum(error <= WITHIN for error in errors)
        print(
            f"{mode}: {near} of {len(errors)} configs within {WITHIN:.0%}; median "
            f"{statistics.median(errors):.1%}, worst {max(errors):.1%}"
        )


def kept(path: Path, modes: list[str]) -> list[dict[str, object]]:
    """The rows of a file for other modes than these."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [dict(row) for row in csv.DictReader(file) if row["mode"] not in modes]


def draw(count: int, gflops: tuple[float, ...], seed: int) -> list[HVTConfig]:
    """Random configs of the space, evenly over the logarithm of their cost."""
    space, chance = space_of({}), random.Random(seed)
    results: list[HVTConfig] = []
    ratio = gflops[1] / gflops[0]
    for _ in range(DRAWS * count):
        if len(results) == count:
            break
        step = len(results) / count
        low, high = gflops[0] * ratio**step, gflops[0] * ratio ** (step + 1 / count)
        config = one(space, chance)
        if config is not None and low <= cost(config).gflops <= high:
            results.append(config)
    if len(results) < count:
        sys.exit(f"too few configs of the plan's space have {gflops[0]:g} to {gflops[1]:g} GFLOPs")
    chance.shuffle(results)
    return results


def one(space: Space, chance: random.Random) -> HVTConfig | None:
    depth, image = chance.choice(space.depths[:14]), chance.choice(space.images)
    pooling, after = chance.choice(space.poolings), chance.choice(space.places(depth))
    if len(lengths(image.grid, pooling, len(after))) <= len(after):
        return None
    try:
        return space.config(chance.choice(space.widths), depth, image, pooling, after)
    except HVTError:
        return None


def row(
    config: HVTConfig, mode: str, batch: int, predicted: float, measured: float
) -> dict[str, object]:
    price = cost(config)
    return {
        "mode": mode, "batch": batch, "gflops": price.gflops, "img_size": config.image[0],
        "patch_size": config.patch_size, "width": config.width, "depth": config.depth,
        "pool_after": " ".join(map(str, config.pool_blocks)), "pool_dims": config.pool_dims,
        "tokens": " ".join(map(str, config.tokens)), "predicted_ms": 1e3 * predicted,
        "measured_ms": 1e3 * measured, "error": predicted / measured - 1,
    }  # fmt: skip


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
