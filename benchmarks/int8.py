"""What int8 gains in speed and loses in accuracy, beside the same graph in float32.

    python benchmarks/int8.py --cifar100 data --deit WEIGHTS --imagenet FOLDER --train FOLDER
    python benchmarks/int8.py --choose --deit WEIGHTS --train FOLDER

The first measures: images/s of two models in turns, and top-1 of two models on their test pictures.
The second compares ways to quantise, on training pictures alone. Whatever decides anything (which
layers stay in float32, which way is best) has seen training pictures only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hvt
from hvt.bench.measure import describe, in_turns, portable_command
from hvt.data.loader import EvalBatches
from hvt.data.sample import drawn_pictures, sample_pictures
from hvt.data.sources import open_eval
from hvt.evaluate import evaluate
from hvt.export import CHOOSING, to_onnx, write
from hvt.predict import built_in
from hvt.quantise import linear_nodes, quantise, sensitive
from hvt.runtime import INPUT, OUTPUT, OnnxModel
from hvt.train.pipeline import SMALL, as_files, eval_transform

HERE = Path(__file__).parent
SPEED = ("hvt_s_1", "hvt_s_4")
BATCH = 16
CPU = torch.device("cpu")


def main() -> None:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    report: dict[str, Any] = {"command": portable_command(sys.argv), "machine": describe(CPU)}
    if args.choose:
        report["choices"] = choose(args)
    else:
        report["speed"] = {name: speed(name, args) for name in args.models}
        report["accuracy"] = accuracies(args)
    out = args.out or HERE / f"results/{'int8_choice' if args.choose else 'int8'}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Speed and accuracy of int8 beside float32, in ONNX Runtime.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--choose", action="store_true", help="compare ways to quantise, on training pictures")
    add("--models", nargs="*", default=list(SPEED), help="models to time; none: leave it out")
    add("--cifar100", type=Path, help="folder that has CIFAR-100 in it, for the built-in model")
    add("--deit", type=Path, help="weights of an ImageNet model")
    add("--imagenet", type=Path, help="ImageNet's validation pictures, a folder per class")
    add("--train", type=Path, help="training pictures of ImageNet, some folders of its classes")
    add("--limit", type=int, help="test pictures, or with --choose training pictures, at most")
    add("--rounds", type=int, default=9, help="times that every model is timed")
    add("--threads", type=int, help="CPU threads; torch's own choice by default")
    add("--out", type=Path, help="the results' JSON file")
    return parser.parse_args()


# ── speed ───────────────────────────────────────────────────────────────────────────────────────


def speed(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Images/s of a named model in PyTorch, in ONNX and in int8, layers spared as with pictures."""
    model = hvt.create_model(name).eval()
    images = drawn_pictures(BATCH, 3, model.config.image)
    with tempfile.TemporaryDirectory() as folder:
        files = exported(model, images, Path(folder))
        runs: dict[str, Callable[[], object]] = {"torch": lambda: model(images)}
        for form, path in files.items():
            runs[form] = calling(OnnxModel(path, CPU, torch.get_num_threads()), images)
        times: dict[str, list[float]] = {}
        with torch.inference_mode():
            for turn in range(args.rounds):
                in_turns(runs, CPU, turn, 0.5, times)
        found: dict[str, float] = {
            f"{form}_images_per_s": BATCH / statistics.median(t) for form, t in times.items()
        }
        found["int8_over_onnx"] = found["int8_images_per_s"] / found["onnx_images_per_s"]
        found |= {f"{form}_mb": path.stat().st_size / 1e6 for form, path in files.items()}
    print(name, {key: round(value, 3) for key, value in found.items()}, flush=True)
    return found


def calling(model: OnnxModel, images: Tensor) -> Callable[[], object]:
    return lambda: model(images)


def exported(model: hvt.HVT, images: Tensor, folder: Path) -> dict[str, Path]:
    """The float32 and the int8 file of a model; the pictures decide which layers int8 spares."""
    files = {form: folder / f"{form}.onnx" for form in ("onnx", "int8")}
    write(model, files["onnx"], "onnx")
    write(model, files["int8"], "int8", sensitive(model, images[:CHOOSING]))
    return files


# ── accuracy ────────────────────────────────────────────────────────────────────────────────────


def accuracies(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        weights = built_in()
    except hvt.HVTError:
        weights = None
    if weights is None or args.cifar100 is None:
        print("left out: the built-in model on CIFAR-100 (needs the model and --cifar100)")
    else:
        model = hvt.load(weights).float()
        train = sample_pictures("cifar100", eval_transform(model), CHOOSING, root=args.cifar100)
        found["built-in model, CIFAR-100"] = accuracy(
            model, train, "cifar100", args.cifar100, args.limit
        )
    if args.deit is None or args.imagenet is None or args.train is None:
        print("left out: an ImageNet model (needs --deit, --imagenet and --train)")
    else:
        model = hvt.load(args.deit).float()
        train = sample_pictures(args.train, eval_transform(model), CHOOSING)
        found[f"{args.deit.stem}, ImageNet"] = accuracy(
            model, train, str(args.imagenet), None, args.limit
        )
    return found


def accuracy(
    model: hvt.HVT, train: Tensor, data: str, root: Path | None, limit: int | None
) -> dict[str, Any]:
    """Top-1 in float32 and in int8 on the same test pictures."""
    test = open_eval(data, root=root, class_names=model.class_names).val
    if limit is not None and limit < len(test):
        test = test.subset(range(0, len(test), len(test) // limit))  # type: ignore[union-attr]
    height, width = model.config.image
    small = hasattr(test, "images") and height == width <= SMALL
    found: dict[str, Any] = {"pictures": len(test)}
    with tempfile.TemporaryDirectory() as folder:
        for form, path in exported(model, train, Path(folder)).items():
            batches = EvalBatches(
                test if small else as_files(test),
                eval_transform(model, arrays=small),
                batch_size=BATCH,
            )
            run = OnnxModel(path, CPU, torch.get_num_threads())
            found[form] = evaluate(run, batches, model.num_classes).top1
    found["lost"] = found["onnx"] - found["int8"]
    print({k: round(v, 3) for k, v in found.items()}, flush=True)
    return found


# ── choosing ────────────────────────────────────────────────────────────────────────────────────


def choose(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Ways to quantise, by what they do to the logits of training pictures."""
    if args.deit is None or args.train is None:
        raise SystemExit("--choose needs --deit and --train")
    model = hvt.load(args.deit).float()
    count = 2 * CHOOSING + (args.limit or 256)
    pictures = sample_pictures(args.train, eval_transform(model), count)
    # Those that decide which layers stay in float32 are not those that are compared on.
    apart = torch.arange(len(pictures)) % max(2, len(pictures) // CHOOSING) == 0
    deciding, pictures = pictures[apart][:CHOOSING], pictures[~apart]
    graph = to_onnx(model)
    truth = logits_of(graph, pictures)
    rows = []
    for name, make in variants(model, graph, deciding).items():
        logits = logits_of(make(), pictures)
        same = logits.argmax(dim=1) == truth.argmax(dim=1)
        row = {
            "variant": name,
            "relative_error": ((logits - truth).norm() / truth.norm()).item(),
            "agreement": 100 * same.float().mean().item(),
            "pictures": len(pictures),
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def variants(model: hvt.HVT, graph: Any, deciding: Tensor) -> dict[str, Callable[[], Any]]:
    from onnxruntime.quantization import QuantType

    def sparing(share: float) -> Callable[[], Any]:
        return lambda: quantise(graph, sensitive(model, deciding, share))

    def dynamic(kind: Any, per_channel: bool, reduce_range: bool) -> Callable[[], Any]:
        return lambda: dynamically(
            graph, weight_type=kind, per_channel=per_channel, reduce_range=reduce_range
        )

    s8, u8 = QuantType.QInt8, QuantType.QUInt8
    return {
        "dynamic, s8 weights": dynamic(s8, False, False),
        "dynamic, s8 weights per channel": dynamic(s8, True, False),
        "dynamic, s8 weights in 7 bits": dynamic(s8, False, True),
        "dynamic, s8 weights in 7 bits per channel": dynamic(s8, True, True),
        "dynamic, u8 weights per channel": dynamic(u8, True, False),
        "static, s8 weights in 7 bits per channel": lambda: statically(graph, deciding),
        "dynamic, 7 bits per channel, 5 % in float32": sparing(0.05),
        "dynamic, 7 bits per channel, 10 % in float32": sparing(0.10),
        "dynamic, 7 bits per channel, 20 % in float32": sparing(0.20),
    }


def dynamically(graph: Any, **options: Any) -> Any:
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "int8.onnx"
        nodes = list(linear_nodes(graph).values())
        quantize_dynamic(graph, str(path), nodes_to_quantize=nodes, **options)
        return onnx.load(str(path))


def statically(graph: Any, pictures: Tensor) -> Any:
    """Activations in ranges seen on some pictures; the products' results stay in float32."""
    import onnx
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter(pictures.split(BATCH))

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self.batches, None)
            return None if batch is None else {INPUT: batch.numpy()}

    with tempfile.TemporaryDirectory() as folder:
        source, path = Path(folder) / "float32.onnx", Path(folder) / "int8.onnx"
        source.write_bytes(graph.SerializeToString())
        quantize_static(
            str(source),
            str(path),
            Reader(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["MatMul"],
            nodes_to_quantize=list(linear_nodes(graph).values()),
            per_channel=True,
            reduce_range=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            extra_options={"OpTypesToExcludeOutputQuantization": ["MatMul"]},
        )
        return onnx.load(str(path))


def logits_of(graph: Any, pictures: Tensor) -> Tensor:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options)
    pieces = [session.run([OUTPUT], {INPUT: b.numpy()})[0] for b in pictures.split(BATCH)]
    return torch.cat([torch.from_numpy(piece) for piece in pieces])


if __name__ == "__main__":
    main()
