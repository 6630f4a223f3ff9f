"""The service's page without a service: a folder whose page runs the model in the browser."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..costs import cost
from ..deploy.export import MAX_ERROR, Comparison
from ..deploy.hf import FILES, export_hf
from ..deploy.runtime import import_extra
from ..errors import HVTError
from ..files import atomic_folder
from ..model import HVT
from .hierarchy import hierarchy

STATIC, BROWSER = (Path(__file__).parent / name for name in ("static", "browser"))
RUNTIME = "https://cdn.jsdelivr.net/npm/onnxruntime-web@1.30.0/dist/"
# WebAssembly, and WebGPU.
INTEGRITY = {
    "ort.wasm.bundle.min.mjs":
        "sha384-PLWz+nHEVHpjwBsO0YVdvQj6n5814Iv8E3b8FG0Rp/uIAtjFMCKOpP66iPzedrIG",
    "ort-wasm-simd-threaded.wasm":
        "sha384-vjBJ1z7qrhkTyYsNqKeF6c7N+nOJSU94czEo+tvZcu8G75JparGq9kB+kTnEUNVM",
    "ort.webgpu.bundle.min.mjs":
        "sha384-1ntMeyj+z5diX6vBR5h+zlJBPc4iNvhCxE6nlammh8daBYcLBZkzrwDkuJjhwI+f",
    "ort-wasm-simd-threaded.asyncify.wasm":
        "sha384-EPVDLTxuO663dkZO/pcKJF6vOyyfq/5z9FY1oksN0UWFX2ABH4wDDZQHeNoUleWR",
}  # fmt: skip
# What the graph has a node of for each step at which tokens become fewer, depending on the image.
STEPS = {"max": "MaxPool", "drop": "TopK"}
MERGED = "which tokens are merged depends on the image, and this page does not trace them"


def export_web(
    model: HVT,
    out: str | Path,
    images: Tensor | None = None,
    int8: bool = False,
    max_error: float = MAX_ERROR,
    name: str = "hvt",
    runtime: str | Path | None = None,
) -> list[Comparison]:
    """Write what `export_hf` does, and a page that runs it; a file server is enough to show it.

    `runtime` is the npm package onnxruntime-web, whose files are copied; without it the page
    fetches a pinned version of them by their checksums. `name` is what the page calls the model.
    """
    package = None if runtime is None else _distribution(Path(runtime))
    with atomic_folder(out) as folder:
        comparisons = export_hf(model, folder, images, int8, max_error)
        shutil.copytree(STATIC, folder / "static")
        (folder / "static/page.html").replace(folder / "index.html")
        shutil.copyfile(BROWSER / "engine.js", folder / "static/engine.js")
        page = _described(model, name, int8)
        if page["tokens"]:
            for found in comparisons:
                path = folder / FILES[found.form]
                tokens = token_outputs(path.read_bytes(), page["hierarchy"]["reduction"])
                path.with_suffix(".tokens").write_bytes(tokens)
        if package is not None:
            (folder / "ort").mkdir()
            for file in INTEGRITY:
                shutil.copyfile(package / file, folder / "ort" / file)
            page["runtime"] = {"base": "ort/", "integrity": None}
        (folder / "page.json").write_text(json.dumps(page), encoding="utf-8")
    return comparisons


def _distribution(package: Path) -> Path:
    for file in INTEGRITY:
        if not (package / "dist" / file).is_file():
            raise HVTError(
                f"{package} is not the npm package onnxruntime-web, as it has no dist/{file}: "
                "npm install onnxruntime-web, and name node_modules/onnxruntime-web"
            )
    return package / "dist"


def _described(model: HVT, name: str, int8: bool) -> dict[str, Any]:
    """`page.json`: what the page says of the model and draws of any image."""
    config = model.config
    grey = torch.zeros(config.in_chans, *config.image)
    found = hierarchy(config, model, grey, seen={})  # the page knows what is seen of an image
    if found["reduction"] == "merge":
        found["untraced"] = MERGED
    traced = found["untraced"] is None and found["reduction"] in STEPS
    if traced or found["untraced"]:
        for stage in found["stages"][0 if found["untraced"] else 1 :]:
            stage["shares"] = stage["kept"] = None
    precision = "float32 and int8" if int8 else "float32"
    described = {"name": name, "precision": precision, "params_m": cost(config).params / 1e6}
    return {
        "model": described,
        "hierarchy": found,
        "int8": int8,
        "tokens": traced,
        "runtime": {"base": RUNTIME, "integrity": INTEGRITY},
    }


def token_outputs(content: bytes, reduction: str) -> bytes:
    """What an ONNX file needs appended to output also which tokens each step takes.

    Protobuf joins the two parts. The outputs are int32: `tokens_1`, … of `STEPS`.
    """
    onnx = import_extra("onnx")
    graph, more = onnx.load_model_from_string(content).graph, onnx.GraphProto()
    for step, node in enumerate((n for n in graph.node if n.op_type == STEPS[reduction]), 1):
        taken = node.output[0]
        if reduction == "max":
            taken = f"taken_{step}"
            twin = more.node.add()
            twin.CopyFrom(node)
            twin.name, twin.output[:] = taken, [f"pooled_{step}", taken]
        cast = onnx.helper.make_node("Cast", [taken], [f"tokens_{step}"], to=onnx.TensorProto.INT32)
        more.node.append(cast)
        value = onnx.helper.make_tensor_value_info(cast.output[0], onnx.TensorProto.INT32, None)
        more.output.append(value)
    return onnx.ModelProto(graph=more).SerializeToString()
