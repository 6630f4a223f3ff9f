"""Draw `docs/hierarchy.svg`: what each block of DeiT-S and of two HVT-S costs.

    python benchmarks/image.py [--out FILE.svg|FILE.png] [--dark]

The SVG carries both colour schemes, and the reader's browser chooses; `--dark` draws the dark one
alone, to look at it as PNG.
"""

from __future__ import annotations

import argparse
import io
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib

import hvt

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MODELS = ("deit_s", "hvt_s_1", "hvt_s_4")
LIGHT = {"back": "#fefefe", "text": "#1f2328", "soft": "#59636e", "bar": "#0969da"}
DARK = {"back": "#0d1117", "text": "#e6edf3", "soft": "#9198a1", "bar": "#4493f8"}


def main() -> None:
    default = Path(__file__).parents[1] / "docs/hierarchy.svg"
    parser = argparse.ArgumentParser(description="Draw what each block costs.")
    parser.add_argument("--out", type=Path, default=default, help="an .svg or .png file")
    parser.add_argument("--dark", action="store_true", help="the dark colours alone")
    args = parser.parse_args()
    figure = draw(DARK if args.dark else LIGHT)
    if args.out.suffix == ".svg":
        args.out.write_text(as_svg(figure, both=not args.dark))
    else:
        figure.savefig(args.out, dpi=130)


def draw(colours: dict[str, str]) -> Any:
    """One panel per model: a bar per block, as high as its multiply-adds."""
    figure, axes = plt.subplots(1, len(MODELS), figsize=(9, 2.9), sharey=True)
    figure.set_facecolor(colours["back"])
    whole = hvt.cost(MODELS[0]).gflops
    for axis, name in zip(axes, MODELS, strict=True):
        priced = hvt.cost(name)
        blocks = priced.blocks()
        axis.bar(
            range(len(blocks)),
            [macs / 1e6 for _, macs in blocks],
            width=0.75,
            color=colours["bar"],
        )
        axis.set_title(name, color=colours["text"], fontsize=12, fontweight="bold", pad=22)
        total = f"{priced.gflops:.2f} G multiply-adds"
        cheaper = "" if name == MODELS[0] else f", {whole / priced.gflops:.1f}× fewer"
        axis.text(
            *(0.5, 1.06, total + cheaper),
            transform=axis.transAxes,
            ha="center",
            color=colours["soft"],
            fontsize=9,
        )
        label_runs(axis, blocks, colours)
        axis.set_facecolor(colours["back"])
        axis.set_xticks(range(len(blocks)))
        axis.set_xlabel("block", color=colours["soft"], fontsize=9)
        axis.tick_params(colors=colours["soft"], labelsize=8, length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.spines["bottom"].set_color(colours["soft"])
        axis.set_ylim(0, 445)
    axes[0].set_ylabel("multiply-adds (M)", color=colours["soft"], fontsize=9)
    figure.tight_layout()
    return figure


def label_runs(axis: Any, blocks: list[tuple[int, int]], colours: dict[str, str]) -> None:
    """Write the number of tokens once over each run of blocks that see the same number."""
    numbered = list(enumerate(blocks))
    for tokens, run in groupby(numbered, key=lambda item: item[1][0]):
        places = list(run)
        middle = (places[0][0] + places[-1][0]) / 2
        height = max(macs for _, (_, macs) in places) / 1e6
        text = f"{tokens} tokens" if len(places) > 4 else str(tokens)
        axis.text(middle, height + 9, text, ha="center", color=colours["text"], fontsize=9)


def as_svg(figure: Any, both: bool) -> str:
    """The figure as SVG text, the same at every run, with the dark colours as a style beside it."""
    buffer = io.StringIO()
    with plt.rc_context({"svg.hashsalt": "hvt"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"
    if not both:
        return svg
    rules = "".join(
        f'[style*="{what}: {LIGHT[key]}"] {{ {what}: {DARK[key]} !important }}\n'
        for key in LIGHT
        for what in ("fill", "stroke")
    )
    style = f"<style>\n@media (prefers-color-scheme: dark) {{\n{rules}}}\n</style>\n"
    head, tag, rest = svg.partition(" <defs>")
    return head + style + tag + rest


if __name__ == "__main__":
    main()
