"""`hvt plan`: from a budget to a model."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..config import FIELDS, HVTConfig
from ..costs import arrow
from ..errors import HVTError
from ..files import check_writable
from ..planning.space import KEPT, SEARCHED
from .flags import add_fields, converter, given_fields
from .output import Row, add_output_flags, make_table, new_console, print_json

if TYPE_CHECKING:
    from ..planning.result import Choice, Plan

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
            "The best models within a budget, beside the paper's own ways to scale up and the\n"
            "DeiT of the same budget. Every width, depth, image, patch and pooling is priced in\n"
            "closed form. Fields of the model that are given are fixed. See docs/scaling.md."
        ),
        epilog=_EXAMPLES,
    )
    group = parser.add_argument_group("budgets, any of them together")
    for flag, text in {
        "--gflops": "MACs per image in 10⁹",
        "--params": "parameters in 10⁶",
        "--latency-ms": "milliseconds per batch, by a table of block timings",
        "--memory": "MB of a training step: AdamW, float32",
    }.items():
        name = flag[2:].replace("-", "_")
        group.add_argument(flag, type=converter(name, float), metavar="X", help=text)
    timed = parser.add_argument_group("how latency is measured")
    timed.add_argument("--mode", default="eager", help="eager, onnx or int8 (default: eager)")
    timed.add_argument("--device", default="auto", help="auto, cpu, cuda … (default: auto)")
    timed.add_argument("--remeasure", action="store_true", help="ignore the cached timings")
    for owner, flag, default, text in (
        (timed, "--threads", None, "CPU threads (default: torch's)"),
        (timed, "--batch", 1, "images per batch (default: 1)"),
        (parser, "--train-batch", 128, "images of a training step, for --memory (default: 128)"),
        (parser, "--count", 5, "how many of the best to print (default: 5)"),
        (parser, "--choice", None, "which of the best --save writes (default: 1)"),
    ):
        kind = converter(flag[2:].replace("-", "_"), int, ge=1)
        owner.add_argument(flag, type=kind, default=default, metavar="N", help=text)
    parser.add_argument("--save", metavar="FILE.json", help="write the best as a config")
    parser.add_argument("--plot", metavar="PNG|SVG", help="draw the frontier")
    parser.add_argument(
        "--from", dest="source", metavar="CHECKPOINT", help="plan placements for hvt upcycle"
    )
    add_output_flags(parser)
    fixable = (*SEARCHED, *KEPT, "proportional_attention")
    skipped = [name for name in FIELDS if name not in fixable]
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
        check_writable(path)

    from ..planning.run import plan

    if args.plot:
        from ..plot import figure_path

        figure_path(args.plot)
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
        print_json(planned.to_dict())
        return
    _print(planned)
    if args.save:
        command = f"hvt train RECIPE --model {shlex.quote(args.save)}"
        print(f"{args.save} has choice {args.choice or 1}: {command}")


def _print(planned: Plan) -> None:
    from ..planning.latency import provenance

    console = new_console()
    found = f"{planned.num_within:,} of {planned.num_configs:,} configs are within the budget"
    if planned.extrapolated:
        found += "; by cost, order extrapolated"
    console.print(found, highlight=False)
    columns: dict[str, str | Callable[[Row], str]] = {
        "": "{name:<}", "px": "{px:<}", "patch": "{patch_size:<}", "width": "{width:<}",
        "heads": "{num_heads:<}", "blocks": "{depth:<}", "pool after": "{after:<}",
        "window": "{window:<}", "tokens": "{tokens:<}", "GFLOPs": "{gflops:>}",
        "params (M)": "{params_m:>}",
    }  # fmt: skip
    if "latency_ms" in planned.budgets:
        columns["ms"] = "{latency_ms:.1f}"
    if "memory" in planned.budgets:
        columns["MB"] = "{training_memory_mb:.0f}"
    columns["share of MACs"] = "{shares}"
    table = make_table(map(_row, planned.choices), columns)
    for end in {len(planned.best) - 1, len(planned.best) + len(planned.scaled) - 1}:
        table.rows[end].end_section = True
    console.print(table)
    lines = [planned.order]
    if planned.machine:
        lines.append(f"Latency: {provenance(planned.machine)}.")
    if planned.source is not None:
        lines.append(_upcycle(planned))
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _row(choice: Choice) -> Row:
    """The cells of a choice, by the names of the columns' formats."""
    config = choice.config
    height, width = config.image
    after = ",".join(map(str, config.pool_blocks))
    if config.stages and config.stages == len(config.pool_blocks):
        after = f"{config.stages} stages"
    kernel, stride = (
        "×".join(map(str, one)) if isinstance(one, tuple) else str(one)
        for one in (config.pool_kernel, config.pool_stride)
    )
    shares = [f"{s:.0%} {part}" for part, s in choice.macs_share.items() if s >= 0.005]
    return config.to_dict() | {
        "name": choice.name,
        "px": str(height) if height == width else f"{height}×{width}",
        "width": config.width,
        "after": after or "never",
        "window": f"{config.pool_dims}D {kernel}/{stride}" if config.pool_blocks else "",
        "tokens": arrow(list(config.tokens)),
        "gflops": _figure(choice.gflops),
        "params_m": _figure(choice.params_m),
        "latency_ms": choice.latency_ms,
        "training_memory_mb": choice.training_memory_mb,
        "shares": ", ".join(shares),
    }


def _figure(value: float) -> str:
    """Two decimals as the paper prints, or three digits of what is small."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3g}"


def _upcycle(planned: Plan) -> str:
    """The command that measures which placement is best; its budget is the most that is listed."""
    from ..planning.budget import rounded_up

    gflops = max(choice.gflops for choice in planned.best)
    budget = rounded_up(gflops)
    if planned.source_gflops is not None and float(budget) >= planned.source_gflops:
        budget = repr(gflops)  # hvt upcycle takes no budget that the source itself is within
    words = ["hvt", "upcycle", str(planned.source), "OUT.safetensors", "--gflops", budget]
    for name, value in planned.fixed.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += [f"--{name.replace('_', '-')}", text]
    command = shlex.join([*words, "--data", "PHOTOS"])
    return f"To measure which is best, and train it: {command}"
