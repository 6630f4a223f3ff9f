"""`hvt export`: a checkpoint as ONNX, as ONNX in int8, or as a `torch.export` program."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import HVTError
from ..files import check_empty
from ..zoo import DEFAULT
from .flags import add_command, add_flag, add_shared
from .output import emit, print_json
from .weights import check_pretrained, open_weights

IMAGES = 64  # that the two are compared on; int8 is calibrated on as many others


def register(commands: Any) -> None:
    parser = add_command(
        commands, "export", run_export, "export a model to ONNX, int8 or torch.export",
        "hvt export imagenet.onnx                  the built-in model\n"
        "hvt export model.safetensors model.onnx --data IMAGES\n"
        "hvt export model.safetensors small.onnx --int8 --data cifar100 --root data\n"
        "hvt export model.safetensors model.pt2    a torch.export program\n"
        "hvt export elastic.safetensors small.onnx --gflops 0.7\n"
        "hvt export folder/ --hf                   for transformers.js and optimum\n"
        "hvt export page/ --web                    a page that runs the model in the browser",
    )  # fmt: skip
    parser.add_argument(
        "others",
        nargs="+",
        metavar="[MODEL] OUT",
        help="a checkpoint in any format that hvt.load reads, a built-in model or a model's name "
        f"(default: the built-in {DEFAULT}), then the output: OUT.onnx, OUT.pt2, or a new folder "
        "for --hf and --web",
    )
    add_flag(parser, "--hf", "write a folder for transformers.js and optimum", bool)
    add_flag(parser, "--web", "the same, and a page that runs the model in the browser", bool)
    text = "npm package onnxruntime-web to copy for --web (default: load it from cdn.jsdelivr.net)"
    add_flag(parser, "--runtime", text, Path, metavar="FOLDER")
    text = "quantise weights and activations to 8 bits (ONNX only; needs --data)"
    add_flag(parser, "--int8", text, bool)
    parser.add_argument(
        "--data",
        help=f"images to compare on, {IMAGES} of the training split: digits, cifar100, "
        "imagenet or a folder; int8 is calibrated on as many others",
    )
    text = "maximum relative error of int8 logits, above which nothing is written"
    add_flag(parser, "--max-error", text, float, 0.1, gt=0)
    add_shared(parser, "--gflops", "--pretrained", "--root", "--json")


def run_export(args: argparse.Namespace) -> None:
    """Export a checkpoint to ONNX, to ONNX in int8, or to a torch.export program.

    The file is compared with the PyTorch model: logits, top-1 class, size and images/s. A file
    whose logits differ is not written. hvt predict, eval and bench accept the file like a
    checkpoint.
    """
    if len(args.others) > 2:
        raise HVTError(f"{args.others[2]!r} is one argument too many: use hvt export MODEL OUT")
    source, name = args.others if len(args.others) == 2 else (DEFAULT, args.others[0])
    out = Path(name)
    form = _form(args, out)
    check_pretrained(source, args.pretrained)

    from ..bench.run import compare_speed
    from ..data.evaluation import eval_transform
    from ..data.sample import sample_images
    from ..deploy.export import check_name, export
    from ..deploy.hf import FILES, export_hf

    folder = args.hf or args.web
    check_empty(out) if folder else check_name(out, form)
    model = open_weights(source, args.pretrained)
    if args.gflops is not None:
        model = model.at(args.gflops)
    images = None
    if args.data:
        transform, channels = eval_transform(model), model.config.in_chans
        count = 2 * IMAGES if args.int8 else IMAGES
        images = sample_images(args.data, transform, count, root=args.root, in_chans=channels)
    if args.web:
        from ..serve.web import export_web

        label = Path(source).name
        comparisons = export_web(model, out, images, args.int8, args.max_error, label, args.runtime)
    elif args.hf:
        comparisons = export_hf(model, out, images, args.int8, args.max_error)
    else:
        comparisons = [export(model, out, form, images, args.max_error)]
    described = []
    for found in comparisons:
        path = out / FILES[found.form] if folder else out
        described.append(asdict(found) | compare_speed(model, path, found.form))
    if args.json and folder:
        print_json({"checkpoint": source, "out": name, "files": described})
    elif args.json:
        print_json({"checkpoint": source, "out": name, **described[0]})
    else:
        _print(described)


def _form(args: argparse.Namespace, out: Path) -> str:
    """The form to export to; raises an error for flags that do not go together."""
    if args.runtime and not args.web:
        raise HVTError("--runtime needs --web: leave it out, or write a page")
    form = "torch" if out.suffix.lower() == ".pt2" else "onnx"
    if not args.int8:
        return form
    if form == "torch":
        raise HVTError("--int8 needs ONNX: leave it out, or name a file that ends in .onnx")
    if not args.data:
        raise HVTError("--int8 needs images to calibrate on: name them with --data")
    return "int8"


def _print(files: list[dict[str, Any]]) -> None:
    from ..deploy.export import BATCH

    names = {"onnx": "ONNX", "int8": "ONNX, int8", "torch": "torch.export"}
    first, last = files[0], files[-1]
    torch = {"bytes": first["torch_bytes"], "speed": first["torch_images_per_second"]}
    columns = {
        "": "{name:<}",
        "MB": "{megabytes:.1f}",
        "images/s": "{speed:.1f}",
        "same top-1": "{agreement:.1f} %",
        "largest difference": "{difference:.1e}",
        "relative error": "{relative_error:.1e}",
    }
    exported = [f | {"name": names[f["form"]], "speed": f["images_per_second"]} for f in files]
    rows = [torch | {"name": "PyTorch"}, *exported]
    emit((row | {"megabytes": row["bytes"] / 1e6} for row in rows), columns)
    kind = "real" if last["real"] else "random"
    print(f"on {last['images']} {kind} images; images/s at batch {BATCH} on the CPU")
    if not last["real"]:
        print("random images say little about accuracy: name real ones with --data")
    if last["kept"]:
        print(f"layers kept in float32 for accuracy: {', '.join(last['kept'])}")
