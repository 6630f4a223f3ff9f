"""Images per second of our models beside timm's, in inference and in the training step.

    python benchmarks/throughput.py

All models run in one process and take turns, round after round, so that other load on the machine
affects all of them equally. Every figure is a median over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import steps
import torch
from record import portable_command, write_csv
from torch import nn

import hvt
from hvt.bench import models as bench_models
from hvt.bench.measure import describe, interleaved, matmul_peak, matmuls
from hvt.device import find_device
from hvt.resolve import build, resolve

HERE = Path(__file__).parent
BASELINE = "deit_small_patch16_224"
DEFAULT = (
    "deit_s",
    "hvt_s_1",
    "hvt_s_4",
    BASELINE,
    "hiera_tiny_224",
    "pvt_v2_b1",
    "swin_tiny_patch4_window7_224",
    "pit_s_224",
)
LEAST = 0.25  # seconds that one timing fills at least
PASSES = {"inference": 1, "train": 3}  # a backward pass costs two forward passes


class Case(NamedTuple):
    model: str
    mode: str
    batch: int


Runs = dict[Case, Callable[[], object]]
Times = dict[Case, list[float]]


def main() -> None:
    args = parse()
    device = find_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    threads, cores = torch.get_num_threads(), os.cpu_count()
    note(f"{device}, {threads} threads on {cores} cores (--threads changes it)")
    began = time.perf_counter()
    rows = measure(args, device)
    described = describe(device) | {"command": portable_command(sys.argv)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_csv([row | described for row in rows], args.out)
    show(rows)
    minutes = (time.perf_counter() - began) / 60
    note(f"{args.out} written, {minutes:.1f} minutes")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time our models beside timm's, inference and training step.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--device", default="auto", help="auto, cpu, cuda, …")
    add("--threads", type=int, help="CPU threads; torch's own choice by default")
    add("--batch", type=int, nargs="+", default=[1, 16], help="batch sizes")
    add("--rounds", type=int, default=5, help="rounds: one training step and two inferences each")
    add(
        "--models",
        nargs="+",
        default=list(DEFAULT),
        help="models of hvt or timm; timm's DeiT-S, the baseline, always takes part",
    )
    add("--all-hvt", action="store_true", help="all hvt models too, inference at the largest batch")
    add("--no-memory", action="store_true", help="leave out the peak memory of a training step")
    add("--out", type=Path, default=HERE / "results/throughput.csv", help="the results' CSV file")
    args = parser.parse_args()
    args.models = list(dict.fromkeys([*args.models, BASELINE]))
    args.batch = sorted(set(args.batch))
    for name in args.models:
        resolve(name)
    if args.rounds < 1 or args.batch[0] < 1 or (args.threads is not None and args.threads < 1):
        parser.error("--rounds, --batch and --threads must be at least 1")
    return args


# ── measuring ───────────────────────────────────────────────────────────────────────────────────


def measure(args: argparse.Namespace, device: torch.device) -> list[dict[str, object]]:
    extra = [m for m in hvt.list_models() if m not in args.models] if args.all_hvt else []
    price = {
        name: bench_models.open_bench_model(name, "eager", torch.device("cpu"), HERE).gflops
        for name in [*args.models, *extra]
    }
    memory: dict[Case, int] = {}
    for name in [] if args.no_memory else args.models:
        note(f"peak memory of {name}")
        peaks = steps.train_peaks(name, args.batch, device, drop_path_rate=0.1)
        memory |= {Case(name, "train", batch): peak for batch, peak in peaks.items()}

    inference, train = prepare(args.models, extra, args.batch, device)
    compared = {case: run for case, run in inference.items() if case.model in args.models}
    warm_up(inference, train)
    times: Times = {}
    products = matmuls(device)
    product_times: dict[int, list[float]] = {}
    for turn in range(args.rounds):
        note(f"round {turn + 1} of {args.rounds}")
        # Inference is cheap beside training, so it gets two turns a round; extra models get one.
        for sweep, runs in enumerate((compared, train, inference)):
            interleaved(products, device, turn, LEAST / 5, product_times)
            interleaved(runs, device, 2 * turn + sweep // 2, LEAST, times)
    peak = matmul_peak(product_times)
    note(f"matrix products reach {peak:.0f} GFLOP/s")
    return [row(case, times, price[case.model], peak, memory.get(case)) for case in times]


def prepare(
    models: list[str], extra: list[str], batches: list[int], device: torch.device
) -> tuple[Runs, Runs]:
    """What is timed: every model at every batch, and the extra ones at the largest."""
    inference: Runs = {}
    train: Runs = {}
    # The same stochastic depth for all, which DeiT's recipe trains with.
    built: dict[str, nn.Module] = {
        name: build(resolve(name), drop_path_rate=0.1).to(device) for name in [*models, *extra]
    }
    data = {batch: steps.images(built[BASELINE], batch, device) for batch in batches}
    optimizers = {name: steps.adamw(built[name]) for name in models}
    for batch in batches:
        images, classes = data[batch]
        for name, model in built.items():
            if name in models or batch == batches[-1]:
                inference[Case(name, "inference", batch)] = steps.inference(model, images)
            if name in models:
                step = steps.train_step(model, optimizers[name], images, classes)
                train[Case(name, "train", batch)] = step
    return inference, train


def warm_up(inference: Runs, train: Runs) -> None:
    """One call of each; a training step at the smallest batch is enough to make all states."""
    note("warming up")
    smallest = min(case.batch for case in train)
    for run in inference.values():
        run()
    for case, run in train.items():
        if case.batch == smallest:
            run()


def library(name: str) -> str:
    return "timm" if resolve(name).kind == "timm" else "hvt"


# ── reporting ───────────────────────────────────────────────────────────────────────────────────


def row(
    case: Case, times: Times, gflops: float, peak: float, memory: int | None
) -> dict[str, object]:
    def speed(seconds: float) -> float:
        return case.batch / seconds

    samples = times[case]
    images_per_s = speed(statistics.median(samples))
    baseline = times[case._replace(model=BASELINE)]
    achieved = 2 * gflops * PASSES[case.mode] * images_per_s
    return {
        "model": case.model,
        "library": library(case.model),
        "mode": case.mode,
        "batch": case.batch,
        "images_per_s": f"{images_per_s:.3f}",
        # The slowest and the fastest timing, to show how quiet the machine was.
        "images_per_s_min": f"{speed(max(samples)):.3f}",
        "images_per_s_max": f"{speed(min(samples)):.3f}",
        "timings": len(samples),
        "ratio_to_timm_deit_s": f"{images_per_s / speed(statistics.median(baseline)):.3f}",
        "gflops": f"{gflops:.3f}",
        "gflop_per_s": f"{achieved:.1f}",
        "matmul_peak_gflop_per_s": f"{peak:.1f}",
        "share_of_peak": f"{achieved / peak:.3f}",
        "train_peak_memory_mb": "" if memory is None else f"{memory / 1e6:.0f}",
    }


def show(rows: list[dict[str, object]]) -> None:
    headings = ("images/s", "× DeiT-S", "of peak", "MB")
    columns = ("images_per_s", "ratio_to_timm_deit_s", "share_of_peak", "train_peak_memory_mb")
    print(f"{'mode':10}{'batch':>6}  {'model':30}" + "".join(f"{h:>10}" for h in headings))
    for r in rows:
        figures = "".join(f"{r[c]!s:>10}" for c in columns)
        print(f"{r['mode']:10}{r['batch']:>6}  {r['model']:30}{figures}")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
