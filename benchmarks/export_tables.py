"""Write the tables of int8 in docs/evidence/int8.md from `results/int8.json`, or check them.

python benchmarks/export_tables.py [--check]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pages import fill, table, write

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/evidence/int8.md"
INT8 = ROOT / "benchmarks/results/int8.json"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the tables of docs/evidence/int8.md.")
    parser.add_argument("--check", action="store_true", help="only check; exit 1 if it is stale")
    args = parser.parse_args()
    text = filled(PAGE.read_text(encoding="utf-8"))
    return write(PAGE, text, args.check, "python benchmarks/export_tables.py")


def filled(page: str) -> str:
    """The page's text with the blocks between its marks made anew."""
    report = json.loads(INT8.read_text(encoding="utf-8"))
    for part, make in {"choices": choices, "speed": speed, "accuracy": accuracy}.items():
        page = fill(page, f"int8-{part}", make(report[part]))
    return fill(page, "int8-machine", by(report))


def choices(found: dict[str, Any]) -> str:
    headings = ["way", "images/s", "× float32", "relative error", "same top-1 (%)"]
    tables = []
    for model, choice in found.items():
        rows = [
            [
                way["way"],
                f"{way['images_per_s']:.1f}",
                f"{way['over_float32']:.2f}",
                f"{way['relative_error']:.4f}" if way["relative_error"] else "",
                f"{way['agreement']:.1f}" if way["relative_error"] else "",
            ]
            for way in choice["ways"]
        ]
        images = choice["ways"][0]["images"]
        tables.append(f"`{model}` on {images} training images:\n\n{table(headings, rows)}")
    return "\n\n".join(tables)


def speed(found: dict[str, Any]) -> str:
    headings = ["model", "ONNX", "int8", "int8 × ONNX", "ONNX (MB)", "int8 (MB)"]
    rows = [
        [
            f"`{model}`",
            *(f"{row[f'{form}_images_per_s']:.1f}" for form in ("onnx", "int8")),
            f"{row['int8_over_onnx']:.2f}",
            *(f"{row[f'{form}_mb']:.1f}" for form in ("onnx", "int8")),
        ]
        for model, row in found.items()
    ]
    return "Images/s in ONNX Runtime at batch 16, and file sizes:\n\n" + table(headings, rows)


def accuracy(found: dict[str, Any]) -> str:
    headings = ["model", "test images", "float32 top-1", "int8 top-1", "lost (points)"]
    rows = [
        [model, f"{row['images']:,}", *(f"{row[k]:.2f}" for k in ("onnx", "int8", "lost"))]
        for model, row in found.items()
    ]
    return table(headings, rows)


def by(report: dict[str, Any]) -> str:
    machine = report["machine"]
    return (
        f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, onnxruntime "
        f"{machine['onnxruntime']}, {machine['date']}, by `{report['command']}`."
    )


if __name__ == "__main__":
    raise SystemExit(main())
