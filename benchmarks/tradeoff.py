"""Draw docs/tradeoff.svg: accuracy against measured images per second.

    python benchmarks/tradeoff.py

Speeds are those of README's table, `results/throughput.csv`; accuracies the paper's and timm's. The
curves are the built-in model and its source on smaller images, `results/elastic_sizes.csv`, whose
speeds are scaled to the table's machine by that of DeiT-Ti, which both have.
"""

from __future__ import annotations

import matplotlib as mpl
from readme_table import PAPER, ROOT, SPEED, TIMM, accuracy, fastest, read

import hvt

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "hvt"
import matplotlib.pyplot as plt  # noqa: E402 - after the backend is chosen


def main() -> None:
    paper, known = read(PAPER), set(hvt.list_models())
    series: dict[str, list[tuple[float, float, str]]] = {"HVT": [], "DeiT": [], "timm": []}
    for row in fastest(read(SPEED), "inference"):
        name = row["model"]
        text = accuracy(paper, name, "imagenet_top1") if name in known else TIMM.get(name)
        if text and name not in ("scale_hvt_ti_4", "deit_small_patch16_224"):
            kind = "timm" if name not in known else "DeiT" if name.startswith("deit") else "HVT"
            series[kind].append((float(row["images_per_s"]), float(text), name))
    figure, axes = plt.subplots(figsize=(7, 4))
    for (kind, points), marker in zip(series.items(), "osD", strict=True):
        axes.plot(*zip(*((x, y) for x, y, _ in points), strict=True), marker, label=kind)
        for x, y, name in points:
            axes.annotate(name, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7)
    sizes = read(ROOT / "benchmarks/results/elastic_sizes.csv")
    source = next(row for row in sizes if (row["model"], row["image"]) == ("source", "224"))
    table = next(x for x, _, name in series["DeiT"] if name == "deit_ti")
    scale = table / float(source["images_per_s"])
    for kind, name in {"elastic": "built-in", "source": "DeiT-Ti, smaller images"}.items():
        rows = [row for row in sizes if row["model"] == kind]
        curve = [(scale * float(row["images_per_s"]), float(row["top1"])) for row in rows]
        axes.plot(*zip(*curve, strict=True), ".-" if kind == "elastic" else ".--", label=name)
    axes.set(xscale="log", xlabel="images/s, two CPU cores, batch 16", ylabel="ImageNet top-1 (%)")
    axes.set_title("Published accuracy, and measured (curves), against measured speed", fontsize=10)
    axes.legend()
    axes.margins(x=0.15)
    axes.set_ylim(bottom=57)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "tradeoff.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
