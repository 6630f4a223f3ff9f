"""The tables of docs/evidence/search.md: the study, its best, the rule and how it holds.

    python benchmarks/scaling_tables.py

reads `results/search`, `results/scaling.csv`, the results of `reproduction` and the fit behind
`hvt plan`. `--check` exits 1 if the page is stale.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pages
from scaling import (
    BUDGET,
    HERE,
    OTHERS,
    RECIPES,
    RandomTrial,
    choices,
    predicted,
    read_rows,
    trials,
)
from scipy.stats import spearmanr

from hvt.config import HVTConfig
from hvt.costs import arrow, cost

PAGE = HERE.parent / "docs/evidence/search.md"
PROTOCOLS = {1: "cpu", 10: "long"}
"""Of `reproduction`, by epochs."""
ROWS = {"deit_w36_l6_m0_n65": "DeiT-Ti", "hvt_w72_l6_m4_n64": "Scale HVT-Ti-4"}
"""Names by the beginning of a training's key."""
BEST_SHOWN = {1: 6, 3: 6, 10: 3}
"""How many of the best are shown, by epochs."""
RULE = tuple(0.002 * 2**n for n in range(5))
"""Budgets that the rule is derived from: 2 to 32 M MACs."""
DRAWS, TOP = 1000, 20
"""Configs drawn for each of them, and those with the best scores, which the rule is the mean of."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the tables of docs/evidence/search.md.")
    parser.add_argument("--check", action="store_true", help="exit 1 if the page is stale")
    args = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    for mark, content in tables(read_rows(), rule=not args.check).items():
        text = pages.fill(text, mark, content)
    return pages.write(PAGE, text, args.check, "python benchmarks/scaling_tables.py")


def mega(gflops: Any) -> str:
    return f"{1e3 * float(gflops):.2f}"


def tables(rows: Sequence[dict[str, Any]], rule: bool = True) -> dict[str, str]:
    """The generated parts of docs/evidence/search.md; the rule takes half a minute."""
    made = {
        "study": study_table(),
        "best": best_table([row for row in rows if row["what"] == "best"]),
        "check": check_table([row for row in rows if row["what"] == "check"]),
    }
    return made | ({"rule": rule_table()} if rule else {})


def study_table() -> str:
    """The trials in numbers, and the best of each length."""
    done = trials()
    whole = [row for row in done if row["finished"] == "True"]
    whole.sort(key=lambda row: -float(row["top1"]))
    hours = sum(float(row["seconds"]) for row in done if row["seconds"]) / 3600
    parts = [
        f"{len(done)} trials, {len(whole)} of them trained to the end, in {hours:.1f} hours of one "
        "core. The best by top-1 on images held out:"
    ]
    for epochs, count in BEST_SHOWN.items():
        some = [row for row in whole if float(row["epochs"]) == epochs]
        once = list({row["config"]: row for row in reversed(some)}.values())[::-1][:count]
        lines = [
            [
                f"{row['study']} {row['trial']}",
                f"{float(row['top1']):.2f}",
                mega(row["gflops"]),
                *shape(HVTConfig.from_dict(json.loads(row["config"]))),
            ]
            for row in once
        ]
        heading = f"{epochs} epoch{'s' * (epochs > 1)}: trial"
        parts.append(pages.table([heading, "top-1", "M MACs", *SHAPE], lines, SHAPE))
    return "\n\n".join(parts)


SHAPE = ("image", "width", "blocks", "pool after", "window", "tokens")


def shape(config: HVTConfig) -> list[str]:
    window = f"{config.pool_dims}D {config.pool_kernel}/{config.pool_stride}"
    return [
        f"{config.image[0]} px, patch {config.patch_size}", str(config.width), str(config.depth),
        ", ".join(map(str, config.pool_blocks)) or "never", window if config.pool_blocks else "",
        arrow(list(config.tokens)),
    ]  # fmt: skip


def best_table(rows: Sequence[dict[str, Any]]) -> str:
    """The study's best and the paper's rule beside rows of the paper's table, by like protocols."""
    models: dict[str, tuple[float, dict[int, list[float]]]] = {}
    measured = [(row["name"], row["gflops"], row["epochs"], row["top1"]) for row in rows]
    for name, gflops, epochs, top1 in [*measured, *paper_rows()]:
        figures = models.setdefault(name, (float(gflops), {}))[1]
        figures.setdefault(int(epochs), []).append(float(top1))
    lines = [
        [name, mega(gflops), *(mean(figures.get(epochs, [])) for epochs in RECIPES)]
        for name, (gflops, figures) in models.items()
    ]
    return pages.table(["model", "M MACs", "1 epoch", "10 epochs"], lines)


def mean(figures: Sequence[float]) -> str:
    if not figures:
        return "not run"
    spread = f" ± {statistics.stdev(figures):.2f}" if len(figures) > 1 else ""
    return f"{statistics.fmean(figures):.2f}{spread} (n = {len(figures)})"


def paper_rows() -> Iterator[tuple[str, float, int, float]]:
    """Two rows of the main table, by `reproduction`: name, GFLOPs, epochs, top-1."""
    for epochs, protocol in PROTOCOLS.items():
        for path in sorted((HERE / "results/paper" / protocol).glob("*.json")):
            one = json.loads(path.read_text())
            config, name = one["config"], ROWS.get(one["key"].partition("-")[0])
            if name and one["epochs"] == epochs and config["pool"] == "max":
                yield name, cost(HVTConfig.from_dict(config)).gflops, epochs, one["top1"]


def rule_table() -> str:
    """What the fit likes best at each budget, and powers of the budget through it."""
    lines, means = [], []
    for budget in RULE:
        space, chance = choices(budget), np.random.default_rng(0)
        drawn = dict.fromkeys(
            filter(None, (space.suggest(RandomTrial(chance)) for _ in range(DRAWS)))
        )
        top = sorted(drawn, key=predicted, reverse=True)[:TOP]
        logs = np.array([[math.log(n) for n in numbers(one)] for one in top])
        means.append(logs.mean(axis=0))
        early = statistics.fmean(one.pool_blocks[:1] == (0,) for one in top)
        lines.append(
            [f"{1e3 * budget:.1f}", *(f"{math.exp(n):.3g}" for n in means[-1]), f"{early:.0%}"]
        )
    at = np.log(np.array(RULE) / BUDGET)
    powers = [np.polyfit(at, np.array(means)[:, n], 1) for n in range(len(NUMBERS))]
    formula = "\n".join(
        f"{name:8} = {math.exp(start):.3g} · (budget / 8 M)^{power:.2f}"
        for name, (power, start) in zip(NUMBERS, powers, strict=True)
    )
    headings = ["budget (M)", *NUMBERS, "pool after the first block"]
    return f"{pages.table(headings, lines)}\n\n```\n{formula}\n```"


NUMBERS = ("width", "blocks", "patches", "poolings", "seen")


def numbers(config: HVTConfig) -> tuple[float, ...]:
    """What the rule speaks of; the last is the tokens that a block sees, their geometric mean."""
    seen = math.exp(statistics.fmean(math.log(n) for n, _ in cost(config).blocks()))
    return (config.width, config.depth, config.tokens[0], max(1, len(config.pool_blocks)), seen)


def check_table(rows: Sequence[dict[str, Any]]) -> str:
    parts = []
    for budget in OTHERS:
        some = [row for row in rows if float(row["budget"]) == budget]
        if not some:
            parts.append(f"{1e3 * budget:g} M MACs: not run.")
            continue
        some.sort(key=lambda row: -float(row["top1"]))
        configs = [HVTConfig.from_dict(json.loads(row["config"])) for row in some]
        expected = [predicted(config) for config in configs]  # by the fit as it is now
        lines = [
            [row["name"], f"{float(row['top1']):.2f}", f"{score:.1f}", mega(row["gflops"]),
             *shape(config)]
            for row, config, score in zip(some, configs, expected, strict=True)
        ]  # fmt: skip
        order = spearmanr(expected, [float(row["top1"]) for row in some]).statistic
        headings = ["config", "top-1", "predicted", "M MACs", *SHAPE]
        parts.append(
            f"{1e3 * budget:g} M MACs, rank correlation {order:.2f}:\n\n"
            + pages.table(headings, lines, SHAPE)
        )
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
