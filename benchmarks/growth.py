"""How cost grows with the image: images/s and memory, measured beside the closed form.

    python benchmarks/growth.py

At each size all models take turns, so that a busy moment of the machine falls on all alike. Memory
is the peak of a training step, of a process of its own for each model. Each size is written when it
is done, and one that the results have is not measured again; `--again` measures all anew.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from pathlib import Path
from typing import Any

import steps
import torch

import hvt
from hvt.bench import models as bench_models
from hvt.bench.measure import describe, interleaved, matmul_peak, matmuls, portable_command
from hvt.bench.plot import plain_ticks, save
from hvt.bench.run import write_csv
from hvt.device import find_device
from hvt.plot import new_figure

HERE = Path(__file__).parent
BASELINE = "deit_s"
MODELS = (BASELINE, "hvt_s_1", "hvt_s_2", "hvt_s_3", "hvt_s_4")
SIZES = {16: (160, 224, 320, 416, 512), 8: (160, 224, 288)}  # by patch size
LEAST = 0.3  # seconds that one timing fills at least
BYTES = 16  # per parameter in training: weight, gradient and AdamW's two moments, in float32

Row = dict[str, Any]


def main() -> None:
    args = parse()
    device = find_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    described = describe(device) | {"command": portable_command(sys.argv)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [] if args.again else kept(args.out, described, args.batch)
    for patch in args.patch:
        for size in args.sizes or SIZES[patch]:
            old = [r for r in rows if (int(r["patch"]), int(r["pixels"])) != (patch, size)]
            done = {r["model"] for r in rows if r not in old}
            if done >= set(args.models):
                print(f"{size} px, patches of {patch}: measured before")
                continue
            result = measure(args, size, patch, device)
            show(result)
            rows = old + [row | described for row in result]
            write_csv(rows, args.out)
    draw(rows, args.out.with_suffix(".png"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Speed and memory against the size of the image.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--models", nargs="+", default=list(MODELS), help="hvt's models; the first is the measure")
    add("--sizes", type=int, nargs="+", help="pixels; 160 to 512, to 288 for patches of 8")
    add("--patch", type=int, nargs="+", default=[16, 8], choices=list(SIZES), help="patch sizes")
    add("--batch", type=int, default=4, help="images at a time")
    add("--rounds", type=int, default=3, help="times that every model is timed")
    add("--device", default="auto", help="auto, cpu, cuda, …")
    add("--threads", type=int, help="CPU threads; torch's own choice by default")
    add("--no-memory", action="store_true", help="leave out the peak memory")
    add("--again", action="store_true", help="measure what the results have already, too")
    add("--out", type=Path, default=HERE / "results/growth.csv", help="the CSV; a PNG is beside it")
    return parser.parse_args()


def kept(path: Path, described: Row, batch: int) -> list[Row]:
    """The rows of an earlier run on the same machine, with the same versions and batch."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows: list[Row] = list(csv.DictReader(file))
    same = {k: str(v) for k, v in described.items() if k not in ("date", "command")}
    return [r for r in rows if int(r["batch"]) == batch and same.items() <= r.items()]


def measure(args: argparse.Namespace, size: int, patch: int, device: torch.device) -> list[Row]:
    shape = {"img_size": size, "patch_size": patch}
    images = torch.randn(args.batch, 3, size, size, device=device)
    runs = {
        name: steps.inference(bench_models.build(name, device, **shape), images)
        for name in args.models
    }
    products = matmuls(device)
    times: dict[str, list[float]] = {}
    product_times: dict[int, list[float]] = {}
    for turn in range(args.rounds):
        interleaved(products, device, turn, LEAST / 5, product_times)
        interleaved(runs, device, turn, LEAST, times)
    peak = matmul_peak(product_times)
    del runs
    first = args.models[0]
    rows = []
    for name in args.models:
        seconds, price = statistics.median(times[name]), hvt.cost(name, **shape)
        base, base_price = statistics.median(times[first]), hvt.cost(first, **shape)
        held: Any = ""
        if not args.no_memory:
            held = steps.train_peaks(name, [args.batch], device, **shape)[args.batch] / 1e6
        rows.append(
            {
                "model": name,
                "pixels": size,
                "patch": patch,
                "tokens": price.tokens[0],
                "batch": args.batch,
                "images_per_s": args.batch / seconds,
                "gflops": price.gflops,
                "share_of_peak": 2 * price.gflops * args.batch / seconds / peak,
                "speed_over_first": base / seconds,
                "closed_form_over_first": base_price.macs / price.macs,
                "train_peak_memory_mb": held,
                "closed_form_memory_mb": args.batch * price.activation_mb + BYTES * price.params_m,
            }
        )
    return rows


def show(rows: list[Row]) -> None:
    for row in rows:
        cells = [f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()]
        print("  ".join(f"{cell:>8}" for cell in cells), flush=True)


def draw(rows: list[Row], path: Path) -> None:
    """Images/s and memory over the side of the image: marks are measured, lines the closed form.

    The lines of speed go through the first model at its largest image, where what is not
    multiply-add weighs least.
    """
    patches = sorted({int(r["patch"]) for r in rows}, reverse=True)
    with_memory = all(r["train_peak_memory_mb"] != "" for r in rows)
    figure = new_figure(
        figsize=(4.6 * len(patches), 7.2 if with_memory else 3.8), layout="constrained"
    )
    grid = figure.subplots(2 if with_memory else 1, len(patches), squeeze=False)
    for column, patch in enumerate(patches):
        own = sorted((r for r in rows if int(r["patch"]) == patch), key=lambda r: int(r["pixels"]))
        largest = [r for r in own if r["model"] == own[0]["model"]][-1]
        rate = float(largest["images_per_s"]) * float(largest["gflops"])
        for place, name in enumerate(dict.fromkeys(r["model"] for r in own)):
            mine = [r for r in own if r["model"] == name]
            sizes = [int(r["pixels"]) for r in mine]
            lines = [
                ("images_per_s", [rate / float(r["gflops"]) for r in mine]),
                ("train_peak_memory_mb", [float(r["closed_form_memory_mb"]) for r in mine]),
            ]
            for axes, (measured, closed) in zip(grid[:, column], lines, strict=False):
                marks = [float(r[measured]) for r in mine]
                axes.plot(sizes, marks, "o", color=f"C{place}", ms=5, label=name)
                axes.plot(sizes, closed, "-", color=f"C{place}", lw=1)
        grid[0, column].set_title(f"patches of {patch}", fontsize=10)
        for axes in grid[:, column]:
            axes.set(xscale="log", yscale="log")
            axes.grid(alpha=0.3, which="both")
            plain_ticks(axes)
            ticks = sorted({int(r["pixels"]) for r in own})
            axes.set_xticks(ticks, map(str, ticks))
            axes.set_xticks([], minor=True)
        grid[-1, column].set_xlabel("pixels")
    for axes, label in zip(
        grid[:, 0], ("images/s", "memory of a training step (MB)"), strict=False
    ):
        axes.set_ylabel(label)
    grid[0, 0].legend(fontsize=8)
    first = rows[0]
    where = first["cpu"] if first["device"] == "cpu" else first["device"]
    figure.suptitle(
        f"batch {first['batch']}, float32; marks measured, lines the closed form\n"
        f"{where}, {first['threads']} threads, torch {first['torch']}, {first['date']}",
        fontsize=9,
    )
    save(figure, path)


if __name__ == "__main__":
    main()
