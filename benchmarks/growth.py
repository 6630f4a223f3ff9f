"""How cost grows with the picture: images/s and memory, measured beside the closed form.

    python benchmarks/growth.py

At each size all models take turns, so that a busy moment of the machine falls on all alike. Memory
is the peak of a training step, of a process of its own for each model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch

import hvt
from hvt.bench import contenders
from hvt.bench.measure import describe, in_turns, matmul_peak, matmuls, portable_command
from hvt.bench.peak import peak_memory
from hvt.bench.run import write_csv
from hvt.runtime import find_device

HERE = Path(__file__).parent
BASELINE = "deit_s"
MODELS = (BASELINE, "hvt_s_1", "hvt_s_2", "hvt_s_3", "hvt_s_4")
SIZES = {16: (160, 224, 288, 384, 448, 512), 8: (160, 224, 320)}  # by patch size
LEAST = 0.5  # seconds that one timing fills at least
BYTES = 16  # per parameter in training: weight, gradient and AdamW's two moments, in float32


def main() -> None:
    args = parse()
    device = find_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    described = describe(device) | {"command": portable_command(sys.argv)}
    rows = []
    for patch in args.patch:
        for size in args.sizes or SIZES[patch]:
            found = measure(args, size, patch, device)
            show(found)
            rows += [row | described for row in found]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_csv(rows, args.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Speed and memory against the size of the picture.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--models", nargs="+", default=list(MODELS), help="hvt's models; the first is the measure")
    add("--sizes", type=int, nargs="+", help="pixels; 160 to 512, to 320 for patches of 8")
    add("--patch", type=int, nargs="+", default=[16, 8], choices=list(SIZES), help="patch sizes")
    add("--batch", type=int, default=4, help="pictures at a time")
    add("--rounds", type=int, default=5, help="times that every model is timed")
    add("--device", default="auto", help="auto, cpu, cuda, …")
    add("--threads", type=int, help="CPU threads; torch's own choice by default")
    add("--no-memory", action="store_true", help="leave out the peak memory")
    add("--out", type=Path, default=HERE / "results/growth.csv", help="the results' CSV file")
    return parser.parse_args()


def measure(
    args: argparse.Namespace, size: int, patch: int, device: torch.device
) -> list[dict[str, object]]:
    shape = {"img_size": size, "patch_size": patch}
    images = torch.randn(args.batch, 3, size, size, device=device)
    runs = {
        name: contenders.inference(contenders.build(name, device, **shape), images)
        for name in args.models
    }
    for run in runs.values():
        run()
    products = matmuls(device)
    times: dict[str, list[float]] = {}
    product_times: dict[int, list[float]] = {}
    for turn in range(args.rounds):
        in_turns(products, device, turn, LEAST / 5, product_times)
        in_turns(runs, device, turn, LEAST, times)
    peak = matmul_peak(product_times)
    del runs
    first = args.models[0]
    rows: list[dict[str, object]] = []
    for name in args.models:
        seconds, price = statistics.median(times[name]), hvt.cost(name, **shape)
        base, base_price = statistics.median(times[first]), hvt.cost(first, **shape)
        held: object = ""
        if not args.no_memory:
            held = peak_memory(name, "train", [args.batch], device, **shape)[args.batch] / 1e6
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
                f"speed_over_{BASELINE}": base / seconds,
                f"closed_form_over_{BASELINE}": base_price.macs / price.macs,
                "train_peak_memory_mb": held,
                "closed_form_memory_mb": args.batch * price.activation_mb + BYTES * price.params_m,
            }
        )
    return rows


def show(rows: list[dict[str, object]]) -> None:
    for row in rows:
        cells = [f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()]
        print("  ".join(f"{cell:>8}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
