"""This version beside an earlier one, in turns: is anything slower than it was?

    python benchmarks/versions.py 31d5904

The earlier commit is checked out into a temporary folder, and both run under this interpreter, one
case after the other, round after round. A case is a process of its own that tells how long its
work took, after one uncounted run of the same, so that neither's start counts but where the start
is what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hvt.bench.measure import describe, portable_command

HERE = Path(__file__).parent
PROJECT = HERE.parent

# Each prints the seconds of one unit of its work, and uses only what both versions have.
REPEAT = """
import statistics, time
def report(work, rounds=5):
    work()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    print(statistics.median(times))
"""
INFERENCE = """
import torch, hvt
torch.set_num_threads({threads})
model = hvt.create_model("{model}").eval()
images = torch.randn({batch}, 3, 224, 224)
with torch.inference_mode():
    report(lambda: model(images))
"""
STEP = """
import torch, hvt
torch.set_num_threads({threads})
model = hvt.create_model("{model}", num_classes=10).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
images, labels = torch.randn({batch}, 3, 224, 224), torch.zeros({batch}, dtype=torch.long)
def step():
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
report(step, 3)
"""
PREDICT = """
import io
import numpy as np
from PIL import Image
import torch, hvt
torch.set_num_threads({threads})
predictor = hvt.Predictor("{checkpoint}")
noise = np.random.default_rng(0)
images = [Image.fromarray(noise.integers(0, 255, (96, 96, 3), dtype=np.uint8)) for _ in range(64)]
report(lambda: list(predictor(images)))
"""
TRAIN = """
import contextlib, io, re, sys, tempfile
from hvt.cli import main
def train(epochs):
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        began = time.perf_counter()
        main(["train", "digits", "--epochs", str(epochs), "--output", folder + "/run"])
        return time.perf_counter() - began
train(1)
print(train(21) - train(1))
"""


def cases(threads: int, checkpoint: Path) -> dict[str, str]:
    """Programs by their names; both versions predict with the same checkpoint."""
    programs = {
        "inference, hvt_s_4, batch 16": INFERENCE.format(
            model="hvt_s_4", batch=16, threads=threads
        ),
        "inference, hvt_s_4, batch 1": INFERENCE.format(model="hvt_s_4", batch=1, threads=threads),
        "inference, deit_s, batch 16": INFERENCE.format(model="deit_s", batch=16, threads=threads),
        "training step, hvt_s_4": STEP.format(model="hvt_s_4", batch=16, threads=threads),
        "hvt train digits, 20 epochs": TRAIN,
        "Predictor, 64 images": PREDICT.format(checkpoint=checkpoint, threads=threads),
    }
    return {name: REPEAT + program for name, program in programs.items()}


STARTS = {"hvt --version": ["--version"], "hvt cost hvt_s_4": ["cost", "hvt_s_4"]}


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        archive = subprocess.run(
            ["git", "archive", args.before, "src"], cwd=PROJECT, check=True, stdout=subprocess.PIPE
        )
        before.mkdir()
        subprocess.run(["tar", "-x", "-C", before], input=archive.stdout, check=True)
        sources = {"before": before / "src", "after": PROJECT / "src"}
        rows = kept(args) | measure(args, sources)
    result = {
        "command": portable_command(sys.argv),
        "before": args.before,
        "machine": describe(torch.device("cpu")) | {"threads": args.threads},
        "rounds": args.rounds,
        "seconds": rows,
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{args.out} written")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", help="the earlier commit")
    parser.add_argument("--rounds", type=int, default=5, help="turns of both (default: 5)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads")
    parser.add_argument("--only", nargs="+", help="cases that have one of these words; others stay")
    parser.add_argument("--out", type=Path, default=HERE / "results/versions.json")
    return parser.parse_args()


def kept(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """With `--only`, the other cases as they were measured against the same commit."""
    if not args.only or not args.out.exists():
        return {}
    result = json.loads(args.out.read_text())
    if result["before"] != args.before:
        return {}
    names = (*cases(args.threads, Path()), *STARTS)
    return {name: row for name, row in result["seconds"].items() if name in names}


def measure(args: argparse.Namespace, sources: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """For each case the median seconds of both versions, and their ratio."""
    rows: dict[str, dict[str, Any]] = {}
    (checkpoint, *_) = sorted(sources["before"].glob("hvt/assets/*.safetensors"))
    programs = cases(args.threads, checkpoint)
    for name in (*programs, *STARTS):
        if args.only and not any(word in name for word in args.only):
            continue
        times: dict[str, list[float]] = {version: [] for version in sources}
        for turn in range(args.rounds):
            order = list(sources) if turn % 2 == 0 else list(reversed(sources))
            for version in order:
                if name in STARTS:
                    times[version].append(start(STARTS[name], sources[version]))
                else:
                    times[version].append(run(programs[name], sources[version]))
        medians = {version: statistics.median(values) for version, values in times.items()}
        ratio = medians["after"] / medians["before"]
        rows[name] = medians | {"after_over_before": ratio, "all": times}
        print(
            f"{name:32} before {medians['before']:.3f} s   after {medians['after']:.3f} s   "
            f"{ratio:.2f}",
            flush=True,
        )
    return rows


def environment(source: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(source)}


def run(program: str, source: Path) -> float:
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(source),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(ended.stdout.split()[-1])


def start(arguments: list[str], source: Path) -> float:
    """Seconds of a whole command."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "hvt", *arguments],
        env=environment(source),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
