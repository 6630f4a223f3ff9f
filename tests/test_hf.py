"""`hvt export --hf`: a folder that transformers, transformers.js and optimum open; bad input."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NAMES, Command
from data_paths import npm_package
from PIL import Image

import hvt
from hvt.data.evaluation import eval_transform
from hvt.deploy.hf import export_hf, hf_processor

Build = Callable[..., hvt.HVT]


@pytest.fixture(autouse=True)
def _brief_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvt.bench.run.TURN", 0.0)


@pytest.fixture
def checkpoint(build: Build, tmp_path: Path) -> Path:
    hvt.save(build("hvt_ti_1", depth=2), tmp_path / "model.safetensors", NAMES)
    return tmp_path / "model.safetensors"


def photo(path: Path, width: int = 96, height: int = 96) -> Path:
    values = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC).save(path)
    return path


def test_the_folder(command: Command, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "folder"
    out.mkdir()  # an empty one will do
    code, said, err = command("export", checkpoint, out, "--hf", "--json")
    assert (code, err) == (0, "")
    assert [file["form"] for file in json.loads(said)["files"]] == ["onnx"]
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert found == {"config.json", "preprocessor_config.json", "onnx/model.onnx"}
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("vit", ["ViTForImageClassification"])
    assert list(config["id2label"].values()) == NAMES
    assert config["transformers.js_config"] == {"dtype": "fp32"}
    path = photo(tmp_path / "photo.png")
    ours, theirs = (hvt.Predictor(p)(path) for p in (checkpoint, out / "onnx/model.onnx"))
    assert theirs.name == ours.name
    assert theirs.probability == pytest.approx(ours.probability, rel=1e-4)


def test_transformers_opens_it(checkpoint: Path, tmp_path: Path) -> None:
    """Its config and image processor, which prepares an image as we do, and the graph's names."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model = hvt.load(checkpoint).eval()
    export_hf(model, tmp_path / "folder")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "folder")
    assert config.id2label[3] == NAMES[3]
    processor = transformers.CLIPImageProcessor.from_pretrained(tmp_path / "folder")
    with Image.open(photo(tmp_path / "photo.png", 144, 90)) as image:
        prepared = np.asarray(processor(image.convert("RGB")).pixel_values[0], np.float32)
        want = eval_transform(model)(image.convert("RGB"))
    assert np.abs(prepared - want.numpy()).max() < 0.02  # a step of 1/255, normalised
    session = onnxruntime.InferenceSession(tmp_path / "folder/onnx/model.onnx")
    (logits,) = session.run(["logits"], {"pixel_values": prepared[None]})
    with torch.no_grad():
        assert np.abs(logits - model(want[None]).numpy()).max() < 0.05


def test_int8_comes_beside_float32(command: Command, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "folder"
    words = ("--hf", "--int8", "--data", "digits", "--max-error", "9")
    code, said, _ = command("export", checkpoint, out, *words)
    assert code == 0
    assert [line.split()[0] for line in said.splitlines()[1:4]] == ["PyTorch", "ONNX", "ONNX,"]
    assert sorted(path.name for path in (out / "onnx").iterdir()) == [
        "model.onnx", "model_quantized.onnx",
    ]  # fmt: skip
    assert "transformers.js_config" not in json.loads((out / "config.json").read_text())


def test_errors(command: Command, checkpoint: Path, build: Build, tmp_path: Path) -> None:
    hvt.save(build("hvt_ti_1", depth=1, num_classes=0), tmp_path / "features.safetensors")
    hvt.save(build("hvt_ti_1", depth=1, img_size=(32, 64)), tmp_path / "wide.safetensors")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    for words, message in (
        ((checkpoint, tmp_path / "full", "--hf"), "full is not empty: name a new folder"),
        ((checkpoint, checkpoint, "--hf"), "model.safetensors is a file: name a new folder"),
        ((checkpoint, tmp_path / "no" / "out", "--hf"), "no does not exist"),
        ((checkpoint, tmp_path / "out", "--hf", "--int8"), "name them with --data"),
        ((tmp_path / "features.safetensors", tmp_path / "out", "--hf"), "a model with a class"),
        ((tmp_path / "wide.safetensors", tmp_path / "out", "--hf"), "3 × 32 × 64 pixels"),
        ((checkpoint, tmp_path / "full", "--web"), "full is not empty: name a new folder"),
        ((checkpoint, tmp_path / "out", "--runtime", "."), "--runtime needs --web"),
        ((checkpoint, tmp_path / "out", "--web", "--runtime", tmp_path), "npm install onnxr"),
    ):
        code, out, err = command("export", *words)
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("mode", "size"), [("center", 73), ("squash", (73, 73))])
def test_resize_before_the_crop(build: Build, mode: str, size: Any) -> None:
    model = build("hvt_ti_1", depth=1)
    model.pretrained_cfg |= {"crop_mode": mode, "crop_pct": 0.875, "interpolation": "bilinear"}
    described = hf_processor(model)
    assert described["resample"] == 2
    names = ("shortest_edge",) if mode == "center" else ("height", "width")
    assert described["size"] == dict(zip(names, np.atleast_1d(size).tolist(), strict=True))


# ── with the packages of npm ─────────────────────────────────────────────────────────────────────

CLASSIFY = """
import { createRequire } from "node:module";
import { dirname, basename } from "node:path";
const [packages, folder, ...images] = process.argv.slice(1);
const { pipeline, env } = createRequire(packages + "/")("@huggingface/transformers");
Object.assign(env, { allowRemoteModels: false, localModelPath: dirname(folder) + "/" });
for (const dtype of ["fp32", "q8"]) {
  const classify = await pipeline("image-classification", basename(folder), { dtype });
  for (const image of images) console.log(JSON.stringify((await classify(image, { top_k: 1 }))[0]));
}
"""


@pytest.mark.npm
def test_transformers_js_classifies(build: Build, tmp_path: Path) -> None:
    """Real photographs that the model is sure of, so that another resize changes no class."""
    package = npm_package("@huggingface/transformers")
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not installed")
    samples = Path(hvt.__file__).parent / "serve/static"
    paths = [str(samples / f"sample-{name}.jpg") for name in ("daisy", "soccer-ball", "volcano")]
    folder = tmp_path / "folder"
    model = hvt.load("imagenet").eval()
    transform = eval_transform(model)
    images = torch.stack([transform(Image.open(path)) for path in paths]).repeat(11, 1, 1, 1)
    export_hf(model, folder, images, int8=True)
    ran = subprocess.run(
        [node, "--input-type=module", "-e", CLASSIFY, str(package.parents[1]), str(folder), *paths],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line)["label"] for line in ran.stdout.splitlines()]
    assert found == 2 * [p.name for p in hvt.Predictor(model)(paths)]
