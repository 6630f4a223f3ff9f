"""Write the measured tables in docs/export.md from their results, or check that they are current.

    python benchmarks/export_tables.py [--check]

They come from `int8.json` and `growth.csv` in `benchmarks/results`, where these exist.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pages import fill, table, write

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/export.md"
INT8 = ROOT / "benchmarks/results/int8.json"
GROWTH = ROOT / "benchmarks/results/growth.csv"

Row = dict[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the measured tables of docs/export.md.")
    parser.add_argument("--check", action="store_true", help="only check; exit 1 if it is stale")
    args = parser.parse_args()
    text = filled(PAGE.read_text(encoding="utf-8"))
    return write(PAGE, text, args.check, "python benchmarks/export_tables.py")


def filled(page: str) -> str:
    """The page's text with the blocks between its marks made anew, where there are results."""
    if INT8.exists():
        report = json.loads(INT8.read_text(encoding="utf-8"))
        parts: dict[str, Callable[[dict[str, Any]], str]] = {
            "choices": choices,
            "speed": speed,
            "accuracy": accuracy,
        }
        for part, make in parts.items():
            if report.get(part):
                page = fill(page, f"int8-{part}", make(report[part]))
        page = fill(page, "int8-machine", by(report))
    if GROWTH.exists():
        with GROWTH.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        page = fill(page, "growth", growth(rows))
    return page


# ── int8 ────────────────────────────────────────────────────────────────────────────────────────


def choices(found: dict[str, Any]) -> str:
    headings = ["way", "images/s", "× float32", "relative error", "same top-1 (%)", "moved (%)"]
    tables = []
    for model, choice in found.items():
        rows = [
            [
                way["way"],
                f"{way['images_per_s']:.1f}",
                f"{way['over_float32']:.2f}",
                f"{way['relative_error']:.4f}" if way["relative_error"] else "",
                f"{way['agreement']:.1f}" if way["relative_error"] else "",
                f"{way['moved']:.1f}" if "moved" in way else "",
            ]
            for way in choice["ways"]
        ]
        images = choice["ways"][0]["images"]
        tables.append(f"`{model}` on {images} training images:\n\n{table(headings, rows)}")
    return "\n\n".join(tables)


def speed(found: dict[str, Any]) -> str:
    headings = ["model", "PyTorch", "ONNX", "int8", "int8 × ONNX", "ONNX (MB)", "int8 (MB)"]
    rows = [
        [
            f"`{model}`",
            *(f"{row[f'{form}_images_per_s']:.1f}" for form in ("torch", "onnx", "int8")),
            f"{row['int8_over_onnx']:.2f}",
            *(f"{row[f'{form}_mb']:.1f}" for form in ("onnx", "int8")),
        ]
        for model, row in found.items()
    ]
    return "Images/s at batch 16, and the files' size:\n\n" + table(headings, rows)


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


# ── growth ──────────────────────────────────────────────────────────────────────────────────────


def growth(rows: list[Row]) -> str:
    """Two tables, speed and memory: a row for each size, a column for each model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    sizes = sorted({(-int(row["patch"]), int(row["pixels"])) for row in rows})
    cells = {(-int(r["patch"]), int(r["pixels"]), r["model"]): r for r in rows}
    first = rows[0]
    headings = ["pixels", "patch", "tokens", *(f"`{model}`" for model in models)]
    parts = [
        f"Images/s at batch {first['batch']}; in brackets how many times those of `{models[0]}`, "
        "measured / by multiply-adds:",
        table(headings, [_growth_row(cells, size, models, _speed) for size in sizes]),
    ]
    if all(row["train_peak_memory_mb"] for row in rows):
        parts += [
            f"Peak memory of a training step at batch {first['batch']} in MB, measured / by the "
            "closed form:",
            table(headings, [_growth_row(cells, size, models, _memory) for size in sizes]),
        ]
    if GROWTH.with_suffix(".png").exists():
        parts.append("![The same as curves.](../benchmarks/results/growth.png)")
    parts.append(
        f"{first['cpu'] if first['device'] == 'cpu' else first['device']}, {first['threads']} "
        f"threads, {first['dtype']}, torch {first['torch']}, {first['date']}, by "
        f"`{first['command']}`."
    )
    return "\n\n".join(parts)


def _growth_row(
    cells: dict[tuple[int, int, str], Row],
    size: tuple[int, int],
    models: list[str],
    cell: Callable[[Row], str],
) -> list[str]:
    patch, pixels = size
    results = [cells.get((patch, pixels, model)) for model in models]
    tokens = next(row["tokens"] for row in results if row)
    return [str(pixels), str(-patch), tokens, *(cell(row) if row else "" for row in results)]


def _speed(row: Row) -> str:
    rate = f"{float(row['images_per_s']):.1f}"
    measured, closed = float(row["speed_over_first"]), float(row["closed_form_over_first"])
    return rate if closed == 1 else f"{rate} ({measured:.2f} / {closed:.2f})"


def _memory(row: Row) -> str:
    return f"{float(row['train_peak_memory_mb']):.0f} / {float(row['closed_form_memory_mb']):.0f}"


if __name__ == "__main__":
    raise SystemExit(main())
