"""Write the table of models in README.md from its sources, or check that it is up to date.

    python benchmarks/readme_table.py [--check]

Costs come from `hvt.cost`, accuracies from the paper's tables, speeds from
`benchmarks/results/throughput.csv` where it exists.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

from pages import fill, table, write

import hvt
from hvt.costs import arrow

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAPER = ROOT / "src/hvt/paper/tables.csv"
SPEED = ROOT / "benchmarks/results/throughput.csv"
BASELINE = "deit_small_patch16_224"
SHOWN = ("deit_ti", "deit_s", "hvt_ti_1", "hvt_ti_4", "hvt_s_0", "hvt_s_1", "hvt_s_4", "hvt_s_2_2d")
TIMM = {  # results/results-imagenet.csv of timm's repository, commit 0173a13
    "deit_small_patch16_224": 79.844,
    "pvt_v2_b1": 78.702,
    "swin_tiny_patch4_window7_224": 81.376,
    "pit_s_224": 81.092,
}

TEXTS = ("tokens", "from", "source", "weights")

Row = dict[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the table of models in README.md.")
    parser.add_argument("--check", action="store_true", help="only check; exit 1 if it is stale")
    args = parser.parse_args()
    text = filled(README.read_text(encoding="utf-8"))
    return write(README, text, args.check, "python benchmarks/readme_table.py")


def filled(readme: str) -> str:
    """README's text with the block between the two marks made anew."""
    speed = read(SPEED) if SPEED.exists() else []
    parts = [models_table(read(PAPER), speed)]
    if speed:
        parts += [machine_line(speed), beside_table(speed)]
    return fill(readme, "models", "\n\n".join(parts))


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# ── the parts ───────────────────────────────────────────────────────────────────────────────────


def models_table(paper: list[Row], speed: list[Row]) -> str:
    timed = {r["model"]: r for r in fastest(speed, "inference")}
    headings = ["model", "tokens", "GFLOPs", "params (M)", "ImageNet top-1", "source", "weights"]
    headings += ["images/s", "× DeiT-S"] if speed else []
    rows = []
    for name in SHOWN:
        priced, top1 = hvt.cost(name), accuracy(paper, name, "imagenet_top1")
        row = [
            f"`{name}`",
            arrow(priced.tokens),
            f"{priced.gflops:.2f}",
            f"{priced.params_m:.2f}",
            top1,
            "paper" if top1 else "",
            "published" if is_published(name) else "none",
        ]
        if speed:
            r = timed.get(name)
            row += [speed_of(r), times(r)] if r else ["", ""]
        rows.append(row)
    return table(headings, rows, TEXTS)


def is_published(name: str) -> bool:
    """Whether `create_model(name, pretrained=True)` finds weights."""
    import timm  # after hvt, which fixes torchvision where its compiled part does not load

    alike = [one for one in hvt.list_models() if hvt.get_config(one) == hvt.get_config(name)]
    found = [timm.get_pretrained_cfg(one) for one in alike]  # hvt_s_4's are scale_hvt_ti_4's
    return any(cfg is not None and cfg.has_weights for cfg in found)


def machine_line(speed: list[Row]) -> str:
    r = next(r for r in fastest(speed, "inference") if r["model"] == BASELINE)
    where = r["cpu"] if r["device"] == "cpu" else r["device"]
    return (
        f"Images/s are inference at batch {r['batch']} in {r['dtype']} on {where} "
        f"({r['cores']} cores, {r['threads']} threads), torch {r['torch']}, timm {r['timm']}, "
        f"{r['date']}, by `{r['command']}`. “× DeiT-S” is the ratio to timm's "
        f"`{BASELINE}` with {speed_of(r)} images/s."
    )


def beside_table(speed: list[Row]) -> str:
    train = fastest(speed, "train")
    inference = {r["model"]: r for r in fastest(speed, "inference")}
    headings = ["model", "from", "GFLOPs", "ImageNet top-1", "inference, × DeiT-S"]
    headings += ["training step, × DeiT-S", "training memory (MB)"]
    paper = read(PAPER)
    rows = [
        [
            f"`{r['model']}`",
            r["library"],
            f"{float(r['gflops']):.2f}",
            published(paper, r["model"]),
            times(inference[r["model"]]),
            times(r),
            r["train_peak_memory_mb"],
        ]
        for r in train
    ]
    beside = (
        f"Compared with timm's models at batch {train[0]['batch']}; accuracies are from the paper "
        "and timm's `results-imagenet.csv`:"
    )
    return f"{beside}\n\n{table(headings, rows, TEXTS)}"


# ── the cells ───────────────────────────────────────────────────────────────────────────────────


def published(paper: list[Row], name: str) -> str:
    if name in hvt.list_models():
        return accuracy(paper, name, "imagenet_top1")
    return f"{TIMM[name]:.2f}" if name in TIMM else ""


def accuracy(paper: list[Row], name: str, column: str) -> str:
    """The paper's figure for a model: that of every row whose overrides give the same model."""
    config = hvt.get_config(name)
    known = set(hvt.list_models())
    result = {
        float(r[column])
        for r in paper
        if r[column]
        and r["model"] in known
        and hvt.get_config(r["model"], **json.loads(r["overrides"])).replace(
            num_classes=config.num_classes
        )
        == config
    }
    if len(result) > 1:
        raise SystemExit(f"the paper's tables disagree on {column} of {name}: {sorted(result)}")
    return f"{result.pop():.2f}" if result else ""


def fastest(speed: list[Row], mode: str) -> list[Row]:
    """The rows of a mode at the largest batch, where a machine is at its fastest."""
    rows = [r for r in speed if r["mode"] == mode]
    largest = max((int(r["batch"]) for r in rows), default=0)
    return [r for r in rows if int(r["batch"]) == largest]


def speed_of(row: Row) -> str:
    return f"{float(row['images_per_s']):.1f}"


def times(row: Row) -> str:
    return f"{float(row['ratio_to_timm_deit_s']):.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
