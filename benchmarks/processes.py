"""One process with all threads beside two processes with half of them: speed, and the same result.

    python benchmarks/processes.py --root DATA    # about seven minutes on two idle CPU cores
    python benchmarks/processes.py --table        # docs/training.md from the file (--check)

Every training is an `hvt train` of its own, one process and two in turns, from the same seed. Speed
is that of the training with its evaluations, as the run tells it; time is that of the whole
command, with the start of the processes. Writes `results/processes.json`.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pages import fill, table, write

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs/training.md", ROOT / "benchmarks/results/processes.json"
PROCESSES = 2

SMALL = ["--holdout", "0.02"]
CASES = {
    "digits, 8 pixels": ["digits", "--epochs", "20"],
    "cifar100-cpu, 32 pixels": ["cifar100-cpu", "--epochs", "0.2", *SMALL],
    "hvt_ti_4, 224 pixels": [
        "cifar100", "--model", "hvt_ti_4", "--batch-size", "32", "--epochs", "1",
        "--train-fraction", "0.015", "--holdout", "0.01",
    ],
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", help="folder that has CIFAR-100 in it; without it, digits alone")
    parser.add_argument("--rounds", type=int, default=2, help="trainings of each (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only write the table in docs")
    parser.add_argument("--check", action="store_true", help="only check that the table is current")
    args = parser.parse_args()
    if not (args.table or args.check):
        measure(args)
    if args.out != RESULTS:
        return 0
    text = fill(PAGE.read_text(encoding="utf-8"), "processes", measured())
    return write(PAGE, text, args.check, "python benchmarks/processes.py --table")


# ── measuring ───────────────────────────────────────────────────────────────────────────────────


def measure(args: argparse.Namespace) -> None:
    """Every case, in turns, to the file."""
    import torch

    from hvt.bench.measure import describe, portable_command
    from hvt.files import atomic_write

    report: dict[str, Any] = {"command": portable_command(sys.argv), "rows": []}
    for name, words in CASES.items():
        if words[0] != "digits":
            if not args.root:
                print(f"{name}: left out, as --root names no folder")
                continue
            words = [*words, "--root", args.root]
        runs: dict[int, list[dict[str, Any]]] = {1: [], PROCESSES: []}
        for turn in range(args.rounds):
            for processes in (1, PROCESSES) if turn % 2 == 0 else (PROCESSES, 1):
                runs[processes].append(one_run(words, processes))
                reported = runs[processes][-1]
                print(
                    f"{name}, {processes} process(es): {reported['images_per_second']} images/s, "
                    f"{reported['seconds']} s",
                    flush=True,
                )
        report["rows"].append(row(name, CASES[name], runs))
    report |= describe(torch.device("cpu"))
    with atomic_write(args.out) as temporary:
        temporary.write_text(json.dumps(report, indent=2) + "\n")


def one_run(words: list[str], processes: int) -> dict[str, Any]:
    """One training by the command line, as a user has it."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "hvt", "train", *words, "--no-tensorboard"]
        command += ["--processes", str(processes), "--output", str(run)]
        began = time.perf_counter()
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        seconds = time.perf_counter() - began
        speed = re.search(r"([\d.]+) images/s; weights", ended.stdout)
        if speed is None:
            raise SystemExit(f"the training did not tell its speed: {ended.stdout[-500:]}")
        with (run / "metrics.csv").open(newline="") as file:
            epochs = list(csv.DictReader(file))
    return {
        "seconds": round(seconds, 1),
        "images_per_second": float(speed[1]),
        "loss": [float(epoch["train_loss"]) for epoch in epochs],
        "top1": float(epochs[-1]["val_top1"]),
    }


def row(name: str, words: list[str], runs: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """A case: medians of both ways, and how far their losses are apart."""
    pairs = zip(runs[1][0]["loss"], runs[PROCESSES][0]["loss"], strict=True)
    apart = max(abs(one - two) / one for one, two in pairs)
    return {
        "case": name,
        "train": " ".join(words),
        "ways": {
            str(processes): {
                "images_per_second": statistics.median(one["images_per_second"] for one in each),
                "seconds": statistics.median(one["seconds"] for one in each),
                "top1": each[0]["top1"],
                "runs": each,
            }
            for processes, each in runs.items()
        },
        "largest_relative_loss_difference": apart,
    }


# ── the table ───────────────────────────────────────────────────────────────────────────────────


def measured() -> str:
    if not RESULTS.exists():
        return "Not measured yet: `python benchmarks/processes.py --root DATA`."
    report = json.loads(RESULTS.read_text(encoding="utf-8"))
    headings = ["training", "images/s, 1 process", f"{PROCESSES} processes", "gain"]
    headings += ["whole command, 1 process", f"{PROCESSES} processes", "top-1", "losses apart by"]
    rows = []
    for one in report["rows"]:
        alone, both = one["ways"]["1"], one["ways"][str(PROCESSES)]
        cells = [
            one["case"],
            f"{alone['images_per_second']:.0f}",
            f"{both['images_per_second']:.0f}",
        ]
        cells += [f"{both['images_per_second'] / alone['images_per_second']:.2f} ×"]
        cells += [f"{alone['seconds']:.0f} s", f"{both['seconds']:.0f} s"]
        cells += [f"{alone['top1']:.2f} % and {both['top1']:.2f} %"]
        cells += [f"{100 * one['largest_relative_loss_difference']:.2g} %"]
        rows.append(cells)
    source = (
        f"By `{report['command']}` on {report['cpu']} ({report['cores']} cores), torch "
        f"{report['torch']}, {report['date']}. The last column is the largest difference of an "
        "epoch's training loss, in per cent of it."
    )
    return f"{table(headings, rows)}\n\n{source}"


if __name__ == "__main__":
    raise SystemExit(main())
