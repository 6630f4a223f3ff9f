"""What int8 gains in speed and loses in accuracy, beside the same graph in float32.

    python benchmarks/int8.py --cifar100 data --deit WEIGHTS --imagenet FOLDER --train FOLDER

Three parts: `choices` compares ways to quantise on training images, `speed` times two models in
turns, and `accuracy` is the top-1 of two models on their test images. Every decision (which layers
stay in float32, which way is best) is made on training images. What is not measured keeps its
earlier results.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from record import portable_command
from torch import Tensor

import hvt
from hvt.bench.measure import describe, interleaved
from hvt.data.evaluation import SMALL, as_files, eval_transform
from hvt.data.loader import EvalBatches
from hvt.data.sample import drawn_images, sample_images
from hvt.data.sources import open_eval
from hvt.deploy.calibrate import CHOOSING, calibrate, smoothquant
from hvt.deploy.export import to_onnx, write_onnx
from hvt.deploy.quantise import linear_nodes, quantise
from hvt.deploy.runtime import INPUT, OUTPUT, OnnxModel
from hvt.evaluation import evaluate
from hvt.files import atomic_write

HERE = Path(__file__).parent
PARTS = ("choices", "speed", "accuracy")
MODELS = ("hvt_s_1", "hvt_s_4")
BATCH = 16
CALIBRATED = 64  # training images that int8 is calibrated on, as `hvt export` does
COMPARED = 256  # other training images that the choices are compared on
LEAST = 0.5  # seconds that one timing fills at least
CPU = torch.device("cpu")


def main() -> None:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    logging.disable(logging.WARNING)  # the quantiser's advice to prepare graphs, as ours are
    report = json.loads(args.out.read_text()) if args.out.exists() else {}
    report |= {"command": portable_command(sys.argv), "machine": describe(CPU)}
    parts = {"choices": choices, "speed": speeds, "accuracy": accuracies}
    for part in args.only:
        report[part] = report.get(part, {}) | parts[part](args)
        print(json.dumps(report[part], indent=2), flush=True)
        with atomic_write(args.out) as temporary:
            temporary.write_text(json.dumps(report, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Speed and accuracy of int8 beside float32, in ONNX Runtime.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--only", nargs="+", default=list(PARTS), choices=PARTS, help="parts to measure")
    add("--cifar100", type=Path, help="folder that has CIFAR-100 in it, for the built-in model")
    add("--deit", type=Path, help="weights of an ImageNet model")
    add("--imagenet", type=Path, help="ImageNet's validation images, a folder per class")
    add("--train", type=Path, help="training images of ImageNet, some folders of its classes")
    add("--rounds", type=int, default=7, help="times that every model is timed")
    add("--threads", type=int, help="CPU threads; torch's own choice by default")
    add("--out", type=Path, default=HERE / "results/int8.json", help="the results' JSON file")
    return parser.parse_args()


def images_per_second(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Of batches, in turns."""
    times: dict[str, list[float]] = {}
    with torch.inference_mode():
        for turn in range(rounds):
            interleaved(runs, CPU, turn, LEAST, times)
    return {name: BATCH / statistics.median(seconds) for name, seconds in times.items()}


def calling(model: Callable[[Tensor], object], images: Tensor) -> Callable[[], object]:
    return lambda: model(images)


def exported(model: hvt.HVT, images: Tensor, folder: Path) -> dict[str, Path]:
    """The float32 and the int8 file of a model, calibrated on the images."""
    files = {form: folder / f"{form}.onnx" for form in ("onnx", "int8")}
    write_onnx(model, files["onnx"])
    write_onnx(model, files["int8"], calibrate(model, images))
    return files


# ── speed ───────────────────────────────────────────────────────────────────────────────────────


def speeds(args: argparse.Namespace) -> dict[str, Any]:
    return {name: speed(hvt.create_model(name).eval(), args.rounds) for name in MODELS}


def speed(model: hvt.HVT, rounds: int) -> dict[str, Any]:
    """Images/s in float32 and int8 ONNX, and file sizes."""
    images = drawn_images(BATCH, 3, model.config.image)
    with tempfile.TemporaryDirectory() as folder:
        files = exported(model, images, Path(folder))
        runs = {}
        for form, path in files.items():
            runs[form] = calling(OnnxModel(path, CPU, torch.get_num_threads()), images)
        rates = images_per_second(runs, rounds)
        sizes = {f"{form}_mb": path.stat().st_size / 1e6 for form, path in files.items()}
    return {
        **{f"{form}_images_per_s": rate for form, rate in rates.items()},
        "int8_over_onnx": rates["int8"] / rates["onnx"],
        **sizes,
    }


# ── accuracy ────────────────────────────────────────────────────────────────────────────────────


def accuracies(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if args.cifar100 is None:
        print("skipped: the built-in model on CIFAR-100 (needs --cifar100)")
    else:
        result["built-in model, CIFAR-100"] = accuracy(
            hvt.load("cifar100").float(), ("cifar100", args.cifar100), "cifar100", False
        )
    if None in (args.deit, args.imagenet, args.train):
        print("skipped: an ImageNet model (needs --deit, --imagenet and --train)")
    else:
        result[f"{args.deit.stem}, ImageNet"] = accuracy(
            hvt.load(args.deit).float(), (args.train, None), str(args.imagenet), True
        )
    return result


def accuracy(
    model: hvt.HVT, train: tuple[str | Path, Path | None], test_data: str, by_order: bool
) -> dict[str, Any]:
    """Top-1 in float32 and in int8 on the same test images.

    ImageNet's folders are in the order of its models' classes, whatever these are called.
    """
    name, root = train
    deciding = sample_images(name, eval_transform(model), CALIBRATED, root=root)
    test = open_eval(
        test_data,
        root=root,
        class_names=model.class_names,
        num_classes=model.num_classes,
        match_by_order=by_order,
    ).val
    height, width = model.config.image
    small = hasattr(test, "images") and height == width <= SMALL
    result: dict[str, Any] = {"images": len(test)}
    with tempfile.TemporaryDirectory() as folder:
        for form, path in exported(model, deciding, Path(folder)).items():
            batches = EvalBatches(
                test if small else as_files(test),
                eval_transform(model, arrays=small),
                batch_size=BATCH,
            )
            run = OnnxModel(path, CPU, torch.get_num_threads())
            result[form] = evaluate(run, batches, model.num_classes).top1
    result["lost"] = result["onnx"] - result["int8"]
    return result


# ── choosing ────────────────────────────────────────────────────────────────────────────────────


def choices(args: argparse.Namespace) -> dict[str, Any]:
    """Ways to quantise, by speed and by what they do to the logits of training images."""
    if args.deit is None or args.train is None:
        print("skipped: the ways to quantise (need --deit and --train)")
        return {}
    model = hvt.load(args.deit).float()
    images = sample_images(args.train, eval_transform(model), CALIBRATED + COMPARED)
    # The images for calibration are not those of the comparison.
    apart = torch.arange(len(images)) % max(2, len(images) // CALIBRATED) == 0
    deciding, images = images[apart][:CALIBRATED], images[~apart]
    graph = to_onnx(model)
    ways = {"float32": session_of(graph)}
    for name, make in variants(model, graph, deciding).items():
        ways[name] = session_of(make())
    batch = images[torch.arange(BATCH) % len(images)]
    rates = images_per_second({n: calling(run, batch) for n, run in ways.items()}, args.rounds)
    truth = in_batches(ways["float32"], images)
    rows = []
    for name, run in ways.items():
        logits = in_batches(run, images)
        same = logits.argmax(dim=1) == truth.argmax(dim=1)
        alone = torch.cat([run(image) for image in images.split(1)])
        moved = logits.argmax(dim=1) != alone.argmax(dim=1)
        rows.append(
            {
                "way": name,
                "images_per_s": rates[name],
                "over_float32": rates[name] / rates["float32"],
                "relative_error": ((logits - truth).norm() / truth.norm()).item(),
                "agreement": 100 * same.float().mean().item(),
                "moved": 100 * moved.float().mean().item(),
                "images": len(images),
            }
        )
    return {args.deit.stem: {"ways": rows}}


def variants(model: hvt.HVT, graph: Any, deciding: Tensor) -> dict[str, Callable[[], Any]]:
    from onnxruntime.quantization import QuantType

    even = smoothquant(model, deciding[:CHOOSING])

    def ours(share: float) -> Callable[[], Any]:
        def make() -> Any:
            result = calibrate(model, deciding, share)
            heads = model.config.num_heads
            return quantise(to_onnx(result.model), result.ranges, result.kept, heads)

        return make

    def dynamic(kind: Any, per_channel: bool, reduce_range: bool) -> Callable[[], Any]:
        return lambda: dynamically(
            graph, weight_type=kind, per_channel=per_channel, reduce_range=reduce_range
        )

    s8, u8 = QuantType.QInt8, QuantType.QUInt8
    return {
        "dynamic, s8 weights": dynamic(s8, False, False),
        "dynamic, s8 weights per channel": dynamic(s8, True, False),
        "dynamic, s8 weights in 7 bits": dynamic(s8, False, True),
        "dynamic, 7 bits per channel": dynamic(s8, True, True),
        "dynamic, u8 weights per channel": dynamic(u8, True, False),
        "static, 7 bits per channel": lambda: statically(graph, deciding),
        "dynamic, 7 bits per channel, balanced": lambda: dynamically(
            to_onnx(even), weight_type=s8, per_channel=True, reduce_range=True
        ),
        "static, 7 bits per channel, balanced": lambda: statically(to_onnx(even), deciding),
        "the same, fc2 by token, fused attention": ours(0.0),
        "the same, 5 % in float32": ours(0.05),
        "the same, 10 % in float32": ours(0.1),
        "the same, 20 % in float32": ours(0.2),
    }


def dynamically(graph: Any, **options: Any) -> Any:
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "int8.onnx"
        nodes = list(linear_nodes(graph).values())
        quantize_dynamic(graph, str(path), nodes_to_quantize=nodes, **options)
        return onnx.load(str(path))


def statically(graph: Any, images: Tensor) -> Any:
    """Activations in ranges seen on some images; the products' results stay in float32."""
    import onnx
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter(images.split(BATCH))

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


def session_of(graph: Any) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options)
    return lambda images: torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])


def in_batches(run: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    return torch.cat([run(batch) for batch in images.split(BATCH)])


if __name__ == "__main__":
    main()
