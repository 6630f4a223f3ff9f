"""An upcycled model beside its rivals: top-1, MACs and images/s, on the same images.

    hvt upcycle SOURCE pooled.safetensors --gflops 0.7 --data PHOTOS --run-folder runs/pooled
    hvt upcycle SOURCE small.safetensors --img-size 160 --pool-after '()' --data PHOTOS \\
        --run-folder runs/160
    python benchmarks/upcycle.py SOURCE --labelled FOLDER --gflops 0.7 \\
        --run pooled=runs/pooled --run 160px=runs/160 --speed

Rows: the source; the source on smaller images; ToMe at several r; PoWER's extraction at the
budget; and each run, untrained and distilled. FOLDER contains one folder per class, in the order of
the logits. Predictions are cached in the work folder, a file per row, so that the script can be
resumed and rows can be added. Confidence intervals are of the paired difference to the source.
`--speed` times all rows in turns; the timings are kept until the next time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import fill, table, write
from record import portable_command

import hvt
from hvt.bench.measure import describe
from hvt.bench.models import open_bench_model
from hvt.bench.run import measure
from hvt.data.evaluation import eval_transform
from hvt.data.loader import EvalBatches
from hvt.data.sources import open_eval
from hvt.device import find_device
from hvt.files import atomic_write
from hvt.plot import new_figure, save
from hvt.power import retention_for
from hvt.upcycling.source import open_source
from hvt.upcycling.student import pooled, resized

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs/evidence/upcycling.md", ROOT / "benchmarks/results/upcycle/rivals"
SPEEDS = [(mode, batch) for mode in ("eager", "onnx") for batch in (1, 16)]
WORDS = {"eager": "PyTorch", "onnx": "ONNX"}


def main() -> int:
    args = parse()
    if args.table:
        return write(PAGE, page(args.out), args.check, "python benchmarks/upcycle.py --table")
    if args.source is None or args.labelled is None or args.gflops is None:
        raise SystemExit("name a source, --labelled and --gflops, or use --table")
    if args.threads:
        torch.set_num_threads(args.threads)
    device = find_device(args.device)
    args.work.mkdir(parents=True, exist_ok=True)
    models = rows_of(args)
    hits = {name: correct(name, model, args, device) for name, model in models.items()}
    speed = timings(models, args, device)
    rows = [row(name, model, hits, speed) for name, model in models.items()]
    machine, command = describe(device), portable_command(sys.argv)
    report: dict[str, Any] = {"command": command, "rows": rows, "machine": machine}
    for one in rows:
        print(
            f"{one['model']:24} {one['gflops']:.3f} G  top-1 {one['top1']:.2f} %  "
            f"{one['difference']:+.2f} [{one['low']:+.2f}, {one['high']:+.2f}]  "
            + "  ".join(f"{one[f'{m}_{b}']:.1f}" for m, b in SPEEDS if f"{m}_{b}" in one)
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(args.out.with_suffix(".json")) as temporary:
        temporary.write_text(json.dumps(report, indent=2) + "\n")
    draw(rows, report["machine"], args.out.with_suffix(".png"))
    return write(PAGE, page(args.out), False, "") if args.out == RESULTS else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="An upcycled model beside its rivals.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("source", nargs="?", help="what hvt upcycle takes")
    add("--labelled", help="one folder of images per class, in the logits' order")
    add("--gflops", type=float, help="the budget, for PoWER's extraction")
    add("--run", action="append", default=[], metavar="NAME=FOLDER", help="runs of hvt upcycle")
    add("--sizes", default="160,176,192", help="images of the untrained source, in pixels")
    add("--merge", default="8,12,16", help="ToMe's r")
    add("--speed", action="store_true", help="time all rows, in turns")
    add("--rounds", type=int, default=5, help="turns of each")
    add("--threads", type=int, help="CPU threads")
    add("--workers", type=int, default=1, help="processes that read")
    add("--device", default="auto", help="auto, cpu, cuda, …")
    add("--work", type=Path, default=Path("runs/upcycle-benchmark"), help="cached predictions")
    add("--out", type=Path, default=RESULTS, help="JSON and PNG")
    add("--table", action="store_true", help="only write the tables of docs/evidence/upcycling.md")
    add("--check", action="store_true", help="with --table: only check that they are current")
    return parser.parse_args()


def rows_of(args: argparse.Namespace) -> dict[str, hvt.HVT]:
    """Every model by the name of its row."""
    source = open_source(args.source)
    config = source.config
    models = {"source": source}
    for size in map(int, args.sizes.split(",")):
        models[f"{size} px"] = resized(source, (size, size))
    for merged in map(int, args.merge.split(",")):
        merging = config.replace(merge=merged, proportional_attention=True)
        models[f"ToMe r={merged}"] = pooled(source, merging)
    retained = config.replace(retention=retention_for(config, args.gflops))
    models["PoWER"] = pooled(source, retained)
    for text in args.run:
        name, sign, folder = text.partition("=")
        if not sign:
            raise SystemExit(f"--run {text} should be NAME=FOLDER")
        (result,) = json.loads((Path(folder) / "placement.json").read_text())
        placed = hvt.HVTConfig.from_dict(result["chosen"])
        if placed.pool_blocks:  # else it is the source on smaller images, a row already
            models[f"{name}, untrained"] = pooled(resized(source, placed.image), placed)
        path = Path(folder) / "distilled" / "best.safetensors"
        if path.exists():
            models[f"{name}, distilled"] = hvt.load(path).float()
    return models


@torch.inference_mode()
def correct(
    name: str, model: hvt.HVT, args: argparse.Namespace, device: torch.device
) -> np.ndarray:
    """Whether the top-1 class and any of the top five is right: `(images, 2)`."""
    path = args.work / f"{name.replace(' ', '_')}.npz"
    key = f"{args.labelled} {weights_digest(model)}"
    if path.exists():
        kept = np.load(path, allow_pickle=False)
        if str(kept["key"]) == key:
            return kept["hits"]
    print(f"measuring {name}", file=sys.stderr, flush=True)
    data = open_eval(args.labelled, num_classes=model.num_classes, match_by_order=True)
    model = model.to(device).eval()
    results = []
    for batch in EvalBatches(data.val, eval_transform(model), batch_size=25, workers=args.workers):
        best = model(batch.images.to(device)).float().topk(5, dim=1).indices.cpu()
        right = best.eq(batch.labels[:, None])
        results.append(torch.stack((right[:, 0], right.any(dim=1)), dim=1))
    hits = torch.cat(results).numpy()
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        np.savez(file, hits=hits, key=np.array(key))
    return hits


def weights_digest(model: hvt.HVT) -> str:
    """A number that another model, or the same after more training, would not have."""
    total = sum(p.detach().double().sum().item() for p in model.parameters())
    return f"{total:.6f} {model.config.tokens} {model.config.img_size}"


def timings(
    models: dict[str, hvt.HVT], args: argparse.Namespace, device: torch.device
) -> dict[str, dict[str, float]]:
    """Images/s by row; those of the same architecture are timed once."""
    path = args.work / "speed.json"
    if not args.speed:
        return json.loads(path.read_text()) if path.exists() else {}
    first: dict[Any, str] = {}
    for name, model in models.items():
        first.setdefault(model.config, name)
    speed: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        entries = []
        for place, name in enumerate(first.values()):
            file = Path(folder) / f"{place}.safetensors"
            hvt.save(models[name], file)
            for mode in WORDS:
                print(f"opening {name} ({WORDS[mode]})", file=sys.stderr, flush=True)
                entries.append(open_bench_model(str(file), mode, device, Path(folder)))
        note = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
        timed = measure(entries, (1, 16), device, rounds=args.rounds, note=note)
        configs = list(first)
        for one in timed:
            config = configs[int(Path(one.model).stem)]
            for name, model in models.items():
                if model.config == config:
                    speed.setdefault(name, {})[f"{one.mode}_{one.batch}"] = one.images_per_s
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(speed, indent=2) + "\n")
    return speed


def row(
    name: str, model: hvt.HVT, hits: dict[str, np.ndarray], speed: dict[str, dict[str, float]]
) -> dict[str, Any]:
    own, price = hits[name].astype(float), hvt.cost(model)
    paired = 100 * (own[:, 0] - hits["source"][:, 0])
    spread = 1.96 * paired.std(ddof=1) / math.sqrt(len(paired))
    return {
        "model": name,
        "img_size": model.config.image[0],
        "gflops": price.gflops,
        "params_m": price.params_m,
        "images": len(own),
        "top1": 100 * own[:, 0].mean(),
        "top5": 100 * own[:, 1].mean(),
        "difference": paired.mean(),
        "low": paired.mean() - spread,
        "high": paired.mean() + spread,
        **speed.get(name, {}),
    }


def draw(rows: list[dict[str, Any]], machine: dict[str, Any], path: Path) -> None:
    """Top-1 against MACs, and against images/s in each way of running that was timed."""
    panels = [("gflops", "GMACs per image")]
    panels += [
        (f"{mode}_{batch}", f"images/s, {WORDS[mode]}, batch {batch}")
        for mode, batch in SPEEDS
        if all(f"{mode}_{batch}" in row for row in rows)
    ]
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = new_figure(figsize=(4.4 * columns, 4.4 * lines))
    places = figure.subplots(lines, columns, squeeze=False, sharey=True).flat
    for (key, label), axes in zip(panels, places, strict=False):
        for one in rows:
            bars = [[one["difference"] - one["low"]], [one["high"] - one["difference"]]]
            plain = one["model"] == "source"
            trained = plain or one["model"].endswith(", distilled")
            axes.errorbar(
                one[key], one["top1"], None if plain else bars, fmt="o", ms=5, lw=0.6,
                color="C3" if trained else "0.45", mfc="C3" if trained else "white",
            )  # fmt: skip
            axes.annotate(
                one["model"], (one[key], one["top1"]), xytext=(4, 3), textcoords="offset points",
                fontsize=7, parse_math=False,
            )  # fmt: skip
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        axes.margins(0.25, 0.1)
    for axes in places:  # those left over
        axes.remove()
    figure.axes[0].set_ylabel("top-1 (%); bars: 95 % of the difference to the source")
    where = machine["cpu"] if machine["device"] == "cpu" else machine["device"]
    figure.suptitle(
        f"Filled: trained; hollow: not. {where}, {machine['threads']} threads, {machine['date']}",
        fontsize=9,
    )
    save(figure, path)


# ── the page ────────────────────────────────────────────────────────────────────────────────────


def page(out: Path) -> str:
    """The text of docs/evidence/upcycling.md with a new table."""
    report = json.loads(out.with_suffix(".json").read_text())
    return fill(PAGE.read_text(encoding="utf-8"), "upcycle", rivals(report))


def rivals(report: dict[str, Any]) -> str:
    rows, machine = report["rows"], report["machine"]
    timed = [(m, b) for m, b in SPEEDS if all(f"{m}_{b}" in one for one in rows)]
    headings = ["model", "GFLOPs", "top-1", "top-5", "to the source"]
    headings += [f"{WORDS[mode]}, batch {batch}" for mode, batch in timed]
    cells = [
        [
            one["model"],
            f"{one['gflops']:.3f}",
            f"{one['top1']:.1f} %",
            f"{one['top5']:.1f} %",
            "" if one is rows[0] else interval(one),
            *(f"{one[f'{mode}_{batch}']:.1f}" for mode, batch in timed),
        ]
        for one in rows
    ]
    return (
        f"{table(headings, cells)}\n\n"
        "![Top-1 against MACs and against images/s of all models in the table]"
        "(../../benchmarks/results/upcycle/rivals.png)\n\n"
        f"On {rows[0]['images']} labelled images. *To the source* is the paired difference in "
        "points with its 95 % interval; the last columns are images/s, timed in turns. By\n"
        f"`{report['command']}`\non {machine['cpu']}, {machine['threads']} threads, torch "
        f"{machine['torch']}, {machine['date']}."
    )


def interval(one: dict[str, Any]) -> str:
    return f"{one['difference']:+.1f} ({one['low']:+.1f} … {one['high']:+.1f})".replace("-", "−")


if __name__ == "__main__":
    raise SystemExit(main())
