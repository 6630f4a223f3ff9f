"""Fit the regression by which `hvt plan` orders configs, and say how good it is.

    python benchmarks/fit_quality.py
    python benchmarks/fit_quality.py --study benchmarks/results/search/trials.csv

reads the trainings of `hvt paper run` and the trials of `hvt search`, and writes
`src/hvt/planning/quality.json`. `--check` only tells whether the file is that of these trainings.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from hvt.config import HVTConfig
from hvt.planning.quality import FILE, Run, fit, save_quality

HERE = Path(__file__).parent
PAPER = HERE / "results/paper/cpu"
STUDIES = HERE / "results/search"


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the regression behind hvt plan's order.")
    parser.add_argument("--paper", type=Path, default=PAPER, help="folder of hvt paper run")
    parser.add_argument(
        "--study",
        type=Path,
        action="append",
        help="trials.csv of hvt search (default: those in results/search)",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it is stale")
    args = parser.parse_args()
    paper = list(paper_runs(args.paper))
    if not paper:
        sys.exit(f"{args.paper} has no results of hvt paper run: name their folder by --paper")
    studies = args.study or sorted(STUDIES.glob("*.csv"))
    runs = [*paper, *(run for path in studies for run in study_runs(path))]
    about = "CIFAR-100, 24 to 56 pixels, mostly one epoch"
    quality = fit(runs, about)
    print(quality.sentence(), file=sys.stderr)
    print(f"error {quality.error:.2f} points, penalty {quality.penalty:g}", file=sys.stderr)
    if args.check:
        stored, fresh = json.loads(FILE.read_text()), json.loads(json.dumps(asdict(quality)))
        if stored["runs"] != fresh["runs"]:
            sys.exit(f"{FILE} was fitted to other trainings: python {sys.argv[0]}")
        return
    save_quality(quality)


def paper_runs(folder: Path) -> Iterable[Run]:
    """Trainings of the paper's rows, the seeds of one together; on the test images."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    by_key: dict[str, list[dict[str, object]]] = {}
    for one in files:
        if one["config"].get("retention") is None and not one["key"].startswith("power"):
            by_key.setdefault(one["key"], []).append(one)
    for key, ones in by_key.items():
        first: dict[str, object] = ones[0]
        top1 = statistics.fmean(float(str(one["top1"])) for one in ones)
        values = first["config"]
        assert isinstance(values, dict)
        yield Run(
            HVTConfig.from_dict(values), float(str(first["epochs"])), top1, key, seeds=len(ones)
        )


def study_runs(path: Path) -> Iterable[Run]:
    """Trials of a study that were trained to the end; on images held out.

    Those that were stopped say less: with them, left out, the order of the others is worse.
    """
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["finished"] == "True":
                config = HVTConfig.from_dict(json.loads(row["config"]))
                name = f"{path.stem} trial {row['trial']}"
                yield Run(config, float(row["epochs"]), float(row["top1"]), name, search=True)


if __name__ == "__main__":
    main()
