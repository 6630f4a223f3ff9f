"""`hvt plan`: from a budget to a model."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..config import FIELDS, HVTConfig
from ..costs import arrow
from ..errors import HVTError
from .flags import add_fields, converter, given_fields
from .output import new_console

if TYPE_CHECKING:
    from ..planning.answer import Choice, Plan

_FIXED = (
    "img_size", "patch_size", "in_chans", "num_classes", "num_heads", "head_dim", "embed_dim",
    "depth", "stages", "pool_after", "pool", "pool_kernel", "pool_stride", "pool_dims",
    "class_token", "mlp_ratio", "proportional_attention", "drop_path_rate",
)  # fmt: skip

_EXAMPLES = """\
examples:
  hvt plan --gflops 1.25                       what DeiT-Ti's budget buys
  hvt plan --gflops 4.6 --img-size 384 --save plan.json
  hvt train imagenet --model plan.json --root IMAGENET
  hvt plan --params 6 --memory 8000 --train-batch 256
  hvt plan --latency-ms 20 --mode onnx --threads 2   measures blocks here, once
  hvt plan --gflops 0.009 --img-size 32 --head-dim 12 --num-classes 100 --plot frontier.png
  hvt plan --gflops 0.7 --from deit.pth        placements for hvt upcycle
"""


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "plan",
        help="choose a model for a budget",
        description=(
            "The best models within a budget, beside the paper's ways to spend it and the DeiT\n"
            "that it buys. Every width, depth, image, patch and pooling is priced in closed\n"
            "form. Fields of the model that are named are fixed. docs/scaling.md says more."
        ),
        epilog=_EXAMPLES,
    )
    group = parser.add_argument_group("budgets, any of them together")
    for flag, text in {
        "--gflops": "multiply-adds of an image in 10⁹",
        "--params": "parameters in 10⁶",
        "--latency-ms": "milliseconds of a batch, by a table of block timings",
        "--memory": "MB of a training step: AdamW, float32",
    }.items():
        name = flag[2:].replace("-", "_")
        group.add_argument(flag, type=converter(name, float), metavar="X", help=text)
    group = parser.add_argument_group("where the latency is")
    group.add_argument("--mode", default="eager", help="eager, onnx or int8 (default: eager)")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda … (default: auto)")
    for flag, text, default in (
        ("--threads", "CPU threads (default: torch's)", None),
        ("--batch", "images of a batch (default: 1)", 1),
    ):
        group.add_argument(
            flag, type=converter(flag[2:], int, ge=1), default=default, metavar="N", help=text
        )
    group.add_argument(
        "--remeasure", action="store_true", help="take the table again instead of the kept one"
    )
    parser.add_argument(
        "--train-batch",
        type=converter("train_batch", int, ge=1),
        default=128,
        metavar="N",
        help="images of a training step, for --memory (default: 128)",
    )
    parser.add_argument(
        "--from", dest="source", metavar="CHECKPOINT", help="plan placements for hvt upcycle"
    )
    parser.add_argument(
        "--count",
        type=converter("count", int, ge=1),
        default=5,
        metavar="N",
        help="how many of the best to print (default: 5)",
    )
    parser.add_argument("--save", metavar="FILE.json", help="write the best as a config")
    parser.add_argument(
        "--choice",
        type=converter("choice", int, ge=1),
        metavar="N",
        help="which of the best --save writes (default: 1)",
    )
    parser.add_argument("--plot", metavar="PNG|SVG", help="draw the frontier")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    skipped = [name for name in FIELDS if name not in _FIXED]
    add_fields(parser.add_argument_group("fields to fix"), HVTConfig, skip=skipped)
    parser.synonyms = {
        "macs": "--gflops", "flops": "--gflops", "parameters": "--params", "time": "--latency-ms",
        "milliseconds": "--latency-ms", "ram": "--memory", "mb": "--memory",
    }  # fmt: skip
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> None:
    if args.choice is not None and not args.save:
        raise HVTError(
            "--choice says which of the best --save writes: use --save FILE.json, or leave it out"
        )
    for path in filter(None, (args.save, args.plot)):
        if not Path(path).parent.is_dir():
            raise HVTError(f"cannot write {path}: the folder {Path(path).parent} does not exist")

    from ..planning.run import plan

    if args.plot:
        from ..bench.plot import check_image

        check_image(args.plot)
    planned = plan(
        args.gflops,
        params=args.params,
        latency_ms=args.latency_ms,
        memory=args.memory,
        source=args.source,
        mode=args.mode,
        device=args.device,
        threads=args.threads,
        batch=args.batch,
        train_batch=args.train_batch,
        count=args.count,
        remeasure=args.remeasure,
        note=lambda text: print(text, file=sys.stderr, flush=True),
        **given_fields(args, HVTConfig),
    )
    if args.save:
        planned.save(args.save, args.choice or 1)
    if args.plot:
        planned.draw(args.plot)
    if args.json:
        print(json.dumps(planned.to_dict(), indent=2))
        return
    _print(planned)
    if args.save:
        command = f"hvt train RECIPE --model {shlex.quote(args.save)}"
        print(f"{args.save} has choice {args.choice or 1}: {command}")


def _print(planned: Plan) -> None:
    from ..planning.latency import provenance

    console = new_console()
    console.print(
        f"{planned.within:,} of {planned.configurations:,} configs are within the budget",
        highlight=False,
    )
    table = Table(box=None, header_style="bold")
    headings = ["", "px", "patch", "width", "heads", "blocks", "pool after", "window", "tokens"]
    right = ["GFLOPs", "params (M)"]
    if "latency_ms" in planned.budgets:
        right.append("ms")
    if "memory" in planned.budgets:
        right.append("MB")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right")
    table.add_column("spends its multiply-adds on")
    rivals = [planned.deit] if planned.deit else []
    for group in (planned.best, planned.ways, rivals):
        for choice in group:
            table.add_row(*_row(choice, right))
        if group is not rivals and group:
            table.add_section()
    console.print(table)
    console.print(planned.order, highlight=False, markup=False)
    if planned.machine:
        console.print(f"Latency: {provenance(planned.machine)}.", highlight=False, markup=False)
    outside = sorted({name for choice in planned.best for name in choice.outside})
    if planned.source is None and outside:
        console.print(
            f"Outside of what was trained: {', '.join(outside)} of some of these.", highlight=False
        )
    if planned.source is not None and planned.best:
        console.print(_upcycle(planned), highlight=False, markup=False, soft_wrap=True)


def _row(choice: Choice, right: list[str]) -> list[str]:
    config = choice.config
    height, width = config.image
    after = ",".join(map(str, config.pool_blocks))
    if config.stages and config.stages == len(config.pool_blocks):
        after = f"{config.stages} stages"
    kernel, stride = (
        "×".join(map(str, one)) if isinstance(one, tuple) else str(one)
        for one in (config.pool_kernel, config.pool_stride)
    )
    cells = [
        choice.name,
        str(height) if height == width else f"{height}×{width}",
        str(config.patch_size),
        str(config.width),
        str(config.num_heads),
        str(config.depth),
        after or "never",
        f"{config.pool_dims}D {kernel}/{stride}" if config.pool_blocks else "",
        arrow(list(config.tokens)),
    ]
    values = {
        "GFLOPs": _figure(choice.gflops),
        "params (M)": _figure(choice.params),
        "ms": "" if choice.latency_ms is None else f"{choice.latency_ms:.1f}",
        "MB": f"{choice.memory:.0f}",
    }
    spends = ", ".join(
        f"{share:.0%} {part}" for part, share in choice.spends.items() if share >= 0.005
    )
    return [*cells, *(values[heading] for heading in right), spends]


def _figure(value: float) -> str:
    """Two decimals as the paper prints, or three digits of what is small."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3g}"


def _upcycle(planned: Plan) -> str:
    """The command; its budget holds what is printed, which may be half a digit above the plan's.

    Upcycling knows no budget but GFLOPs. Where another one bounds the plan, the most GFLOPs of the
    choices stand for it: with the plan's own, what is measured would be dearer than what is listed.
    """
    from ..planning.answer import rounded_up

    whole = planned.source_gflops
    assert whole is not None
    most, alone = max(one.gflops for one in planned.best), set(planned.budgets) == {"gflops"}
    asked = planned.budgets["gflops"] if alone else 0.0
    most = max(asked, most) if asked < whole else most
    # upcycling takes no budget that the source itself is within
    budget = next(text for n in range(3, 17) if float(text := rounded_up(most, n)) < whole)
    words = ["hvt", "upcycle", str(planned.source), "OUT.safetensors", "--gflops", budget]
    for name, value in planned.fixed.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += [f"--{name.replace('_', '-')}", text]
    command = shlex.join([*words, "--data", "PHOTOS"])
    bound = "" if alone else "hvt upcycle bounds GFLOPs alone, here by the most of these. "
    return f"{bound}To measure which is best, and train it: {command}"
