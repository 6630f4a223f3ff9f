"""What each part of an upcycling gives: likeness to the source on photos held out, run by run.

    python benchmarks/upcycle_parts.py "all losses=runs/half" "without KL=runs/no-kl" …

Each run is a finished one of `hvt upcycle`, of the same source, placement and photos. No
labelled image is seen. Writes `benchmarks/results/upcycle/parts.csv` and its table in
docs/upcycle.md; rows of other names stay there as they are.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import upcycle
from pages import write

from hvt.files import atomic_write


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER")
    rows: dict[str, dict[str, Any]] = {}
    if upcycle.PARTS.exists():
        with upcycle.PARTS.open(newline="", encoding="utf-8") as file:
            rows = {row["run"]: row for row in csv.DictReader(file)}
    for text in parser.parse_args().runs:
        name, sign, folder = text.partition("=")
        if not sign:
            raise SystemExit(f"{text} should be NAME=FOLDER")
        rows |= {row["run"]: row for row in rows_of(name, Path(folder), untrained=not rows)}
    with atomic_write(upcycle.PARTS) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(next(iter(rows.values()))))
        writer.writeheader()
        writer.writerows(rows.values())
    return write(upcycle.PAGE, upcycle.page(upcycle.RESULTS), False, "")


def rows_of(name: str, folder: Path, untrained: bool) -> list[dict[str, Any]]:
    """The trained phases of a run and, for the first one, the model before any training."""
    asked = json.loads((folder / "upcycle.json").read_text())["settings"]
    passes = {phase: asked[f"{phase}_epochs"] for phase in ("tail", "all")}
    rows = []
    for score in json.loads((folder / "report.json").read_text())["rows"]:
        phase = score["name"]
        if phase == "source" or (phase == "untrained" and not untrained):
            continue
        done = {"tail": ["tail"], "all": ["tail", "all"]}.get(phase, [])
        rate = asked["tail_lr" if phase == "tail" else "lr"]
        rows.append(
            {
                "run": name if done else "untrained",
                "tail_epochs": passes["tail"] if "tail" in done else 0,
                "all_epochs": passes["all"] if "all" in done else 0,
                "batch_size": asked["batch_size"] if done else "",
                "lr": f"{rate:g}" if done else "",
                "agreement": f"{score['agreement']:.2f}",
                "kl": f"{score['kl']:.5f}",
            }
        )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
