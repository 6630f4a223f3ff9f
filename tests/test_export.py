"""An exported file gives the model's logits, wherever a checkpoint is taken, and runs no code."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import SMALL, Command
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from training import PLAIN, run, small_disk

import hvt
from hvt.data.evaluation import eval_transform
from hvt.data.sample import drawn_images, evenly, sample_images
from hvt.data.sources import open_eval
from hvt.deploy.calibrate import (
    Calibration,
    calibrate,
    in_int8,
    input_ranges,
    layers_kept_fp32,
    linear_layers,
    sensitivities,
    smoothquant,
)
from hvt.deploy.export import MAX_ERROR, TOLERANCE, export, to_onnx, write_onnx
from hvt.deploy.quantise import linear_nodes, quantise
from hvt.deploy.runtime import OnnxModel
from hvt.errors import CheckpointError, HVTError
from hvt.extraction import best, significance

Build = Callable[..., hvt.HVT]
FORMS = {"onnx": "model.onnx", "int8": "int8.onnx", "torch": "model.pt2"}


@pytest.fixture(autouse=True)
def _brief_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One turn of one call: how fast it is here tells nothing."""
    monkeypatch.setattr("hvt.bench.run.TURN", 0.0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint that knows the digits fairly well, and its three exports."""
    folder = tmp_path_factory.mktemp("digits")
    run(folder / "run", epochs=12, **PLAIN, overrides={"depth": 2})
    shutil.copy(folder / "run/model.safetensors", folder / "model.safetensors")
    model = hvt.load(folder / "model.safetensors")
    images = sample_images("digits", eval_transform(model), 128)
    result = {form: export(model, folder / name, form, images) for form, name in FORMS.items()}
    (folder / "found.json").write_text(json.dumps({k: asdict(v) for k, v in result.items()}))
    return folder


@pytest.fixture
def digits(tmp_path: Path) -> list[str]:
    """Real digits as files."""
    val = open_eval("digits").val
    paths = [str(tmp_path / f"{number:02}.png") for number in range(12)]
    for number, path in enumerate(paths):
        val[number][0].save(path)  # type: ignore[index]
    return paths


def plainly(model: hvt.HVT, images: Tensor) -> Calibration:
    """Ranges alone: no channel is balanced and no layer spared."""
    return Calibration(model, input_ranges(model, images))


# The graph


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("hvt_ti_4", {"depth": 4}),
        ("hvt_ti_1", {"depth": 1, "pool": "avg", "in_chans": 1, "img_size": (64, 48)}),
        ("hvt_ti_1", {"depth": 1, "pool": "conv", "class_token": True, "global_pool": "avg"}),
        ("hvt_s_2_2d", {"depth": 2, "pool": "avg", "class_token": True}),
        *(
            pytest.param(name, {"depth": 2}, marks=pytest.mark.slow)
            for name in ("deit_ti", "deit_s_power", "hvt_ti_0", "hvt_s_2_2d")
        ),
    ],
    ids=str,
)
def test_logits_at_every_batch_size(
    tmp_path: Path, build: Build, name: str, overrides: dict[str, Any]
) -> None:
    model = build(name, **overrides)
    config = model.config
    write_onnx(model, tmp_path / "model.onnx")
    exported = OnnxModel(tmp_path / "model.onnx", "cpu", threads=1)
    assert exported.config == config
    for batch in (1, 2, 17):
        images = torch.randn(batch, config.in_chans, *config.image)
        with torch.inference_mode():
            expected = model(images)
        got = exported(images)
        assert got.shape == (batch, 10)
        assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_power_drops_tokens_in_every_form(tmp_path: Path, build: Build) -> None:
    """Which tokens are kept depends on the image: one graph must choose for each of a batch."""
    model = build("deit_ti_power", depth=2)
    assert model.config.retention is not None
    assert model.config.tokens[-1] < model.config.tokens[0]
    images = drawn_images(5, 3, (64, 64))
    with torch.inference_mode():
        expected = model(images)
        _, attention = model.blocks[0].attn.with_weights(  # type: ignore[union-attr]
            model.blocks[0].norm1(model._embed(images))  # type: ignore[union-attr]
        )
        kept = best(significance(attention), model.config.retention[0] - 1)
    assert len({tuple(row) for row in kept.tolist()}) > 1
    result = export(model, tmp_path / "model.pt2", "torch", images)
    assert result.difference <= TOLERANCE
    calibration = plainly(model, images)
    write_onnx(model, tmp_path / "model.onnx", calibration)
    exported = OnnxModel(tmp_path / "model.onnx", threads=1)
    got = exported(images)
    assert (got - expected).norm() < 0.2 * expected.norm()
    in_company = exported(torch.cat([images[:1], 9 * torch.randn(4, 3, 64, 64)]))
    assert torch.equal(in_company[0], got[0])
    assert len(sensitivities(model, images, calibration.ranges)) == 8


def test_one_file_that_tells_nothing_of_this_machine(trained: Path) -> None:
    for name in FORMS.values():
        assert (trained / name).is_file()
    for name in ("model.onnx", "int8.onnx"):
        graph = onnx.load(str(trained / name))
        onnx.checker.check_model(graph)
        assert not any(one.external_data for one in graph.graph.initializer)
        assert graph.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
        content = (trained / name).read_bytes()
        assert str(Path(hvt.__file__).parent).encode() not in content
        assert b"site-packages" not in content
    left = {path.name for path in trained.iterdir()}
    assert left == {*FORMS.values(), "run", "model.safetensors", "found.json"}


def test_the_comparison(trained: Path) -> None:
    result = json.loads((trained / "found.json").read_text())
    for form in ("onnx", "torch"):
        assert result[form]["difference"] <= TOLERANCE
        assert result[form]["agreement"] == 100
    assert TOLERANCE < result["int8"]["relative_error"] < MAX_ERROR
    assert result["int8"]["kept"]
    for form, name in FORMS.items():
        assert result[form]["bytes"] == (trained / name).stat().st_size
        # int8 is compared on those that it was not calibrated on.
        images = 64 if form == "int8" else 128
        assert (result[form]["real"], result[form]["images"]) == (True, images)


# Where a checkpoint is taken


def test_predictor(trained: Path, digits: list[str]) -> None:
    expected = hvt.Predictor(trained / "model.safetensors", "cpu", top=10)(digits)
    answers = hvt.Predictor(trained / "model.onnx", "cpu", top=10, batch_size=5)(digits)
    for answer, one in zip(answers, expected, strict=True):
        assert (answer.source, answer.name) == (one.source, one.name)
        got = {score.name: score.probability for score in answer.top}
        assert got == pytest.approx({score.name: score.probability for score in one.top}, abs=1e-4)
    (answer,) = hvt.Predictor(OnnxModel(trained / "model.onnx"))([Image.open(digits[0])])
    assert answer.name == expected[0].name


@pytest.mark.parametrize("form", ["onnx", "int8"])
def test_eval(command: Command, trained: Path, form: str) -> None:
    scores = {}
    for path in (trained / "model.safetensors", trained / FORMS[form]):
        code, out, err = command("eval", path, "--data", "digits", "--json", "--device", "cpu")
        assert (code, err) == (0, "")
        scores[path.name] = json.loads(out)
    expected, got = scores.values()
    if form == "int8":
        assert expected["top1"] > 60  # or there would be nothing to lose
        assert got["top1"] >= expected["top1"] - 2
    else:
        assert got["top1"] == expected["top1"]
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert got["per_class"] == expected["per_class"]


# int8


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("hvt_s_2_2d", {"depth": 2}),
        pytest.param("hvt_ti_2", {"depth": 2, "pool": "conv"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_linear_layer_is_found_in_the_graph(name: str, fields: dict[str, Any]) -> None:
    """In a new model biases are equal, and the exporter keeps one of them for all."""
    model = hvt.create_model(name, **SMALL | fields).eval()
    graph = to_onnx(model)
    constants = {one.name: onnx.numpy_helper.to_array(one) for one in graph.graph.initializer}
    products = {
        node.name: constants.get(node.input[1])
        for node in graph.graph.node
        if node.op_type == "MatMul"
    }
    result = linear_nodes(graph)
    assert len(result) == 4 * model.config.depth
    for layer, node in result.items():
        weight = model.get_submodule(layer).weight.detach().numpy()
        assert (products[node] == weight.T).all(), layer
    # Fusing attention changes nothing.
    config = model.config
    ranges = input_ranges(model, drawn_images(2, config.in_chans, config.image))
    spared = ("blocks.1.attn.qkv", "blocks.0.mlp.fc1")
    fused = quantise(graph, ranges, spared, config.num_heads)
    assert [n.op_type for n in fused.graph.node].count("QAttention") == config.depth - 1
    used = {name for node in fused.graph.node for name in node.input}
    assert {constant.name for constant in fused.graph.initializer} <= used
    images = {"pixel_values": torch.randn(3, config.in_chans, *config.image).numpy()}
    got, expected = (
        onnxruntime.InferenceSession(each.SerializeToString()).run(None, images)[0]
        for each in (fused, quantise(graph, ranges, spared))
    )
    assert (got == expected).all()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("hvt_ti_2", {"depth": 2}),
        ("hvt_s_2_2d", {"depth": 2}),
        ("deit_ti", {"depth": 2, "retention": (9, 5)}),
    ],
    ids=str,
)
def test_smoothquant_changes_only_rounding(build: Build, name: str, fields: dict[str, Any]) -> None:
    model = build(name, **fields)
    model.blocks[0].norm1.weight.data[3] *= 50  # a channel that leaves the others little precision
    images = drawn_images(6, 3, model.config.image)
    even = smoothquant(model, images)
    with torch.inference_mode():
        truth, same = model(images), even(images)
    torch.testing.assert_close(same, truth, rtol=1e-4, atol=1e-5)
    (before, _), (after, _) = (
        sensitivities(one, images, input_ranges(one, images))["blocks.0.attn.qkv"]
        for one in (model, even)
    )
    assert after < before / 2


def test_int8_of_layers_without_a_bias(tmp_path: Path, build: Build) -> None:
    model = build("deit_ti", depth=2, qkv_bias=False)
    images = drawn_images(4, 3, model.config.image)
    with torch.inference_mode():
        expected = model(images)
    write_onnx(model, tmp_path / "int8.onnx", plainly(model, images))
    got = OnnxModel(tmp_path / "int8.onnx", threads=1)(images)
    assert (got - expected).norm() <= MAX_ERROR * expected.norm()


def test_rounding_is_onnx_runtimes(tmp_path: Path, build: Build) -> None:
    """What decides on the layers to spare stands for what they will do."""
    model = build("hvt_ti_1", depth=1)
    images = drawn_images(4, 3, (64, 64))
    ranges = input_ranges(model, images)
    write_onnx(model, tmp_path / "int8.onnx", Calibration(model, ranges))
    images *= 1.5  # some values are outside of their ranges
    with torch.inference_mode():
        truth = model(images)
    got = OnnxModel(tmp_path / "int8.onnx", threads=1)(images)
    for name, layer in linear_layers(model).items():
        layer.register_forward_hook(in_int8(name, ranges))
    with torch.inference_mode():
        imitated = model(images)
    assert (got - truth).norm() > 1e-3 * truth.norm()
    assert (got - imitated).norm() < 0.1 * (got - truth).norm()


def test_the_layer_that_loses_most_is_spared(build: Build) -> None:
    model = build("hvt_ti_2", depth=2)
    images = drawn_images(4, 3, (64, 64))
    broken = model.blocks[1].attn.proj  # type: ignore[union-attr]
    before = model.state_dict()["blocks.1.attn.proj.weight"].clone()
    with torch.no_grad():
        broken.weight[:, 0] = 40 * broken.weight.abs().max()  # one value takes the whole range
    after = broken.weight.clone()
    ranges = input_ranges(model, images)
    assert "blocks.1.attn.proj" in layers_kept_fp32(model, images, ranges, share=0.1)
    torch.testing.assert_close(broken.weight, after)  # as it was
    assert not torch.equal(before, after)
    shares = {name: share for name, (_, share) in sensitivities(model, images, ranges).items()}
    for share in (0.0, 0.05, 0.3):
        assert (
            sum(shares[layer] for layer in layers_kept_fp32(model, images, ranges, share)) <= share
        )
    # The second block sees fewer tokens, and has as many weights: 4 of its 12 parts in two blocks.
    assert shares["blocks.0.mlp.fc1"] > shares["blocks.1.mlp.fc1"] == pytest.approx(4 / 24)


def test_int8_logits_do_not_depend_on_the_batch(tmp_path: Path, build: Build) -> None:
    model = build("hvt_ti_1", depth=1).requires_grad_(False)  # as `export` does
    images = drawn_images(16, 3, (64, 64))
    write_onnx(model, tmp_path / "int8.onnx", calibrate(model, images[:8]))
    exported = OnnxModel(tmp_path / "int8.onnx", threads=1)
    mine = images[8:]
    expected = exported(mine)
    noise = torch.randn(8, 3, 64, 64)
    extremes = [torch.full_like(noise, 3), torch.full_like(noise, -3), noise, 1000 * noise]
    for company in (*extremes, images[:8], mine.flip(0)):
        for place in (0, 3, 7):
            batch = company.clone()
            batch[place] = mine[5]
            assert torch.equal(exported(batch)[place], expected[5])
    # In a batch of another size ONNX Runtime may add the tokens of the average in another order.
    for size in (0, 1, 2, 12):
        batch = torch.cat([1000 * torch.randn(size, 3, 64, 64), mine[5:6]])
        torch.testing.assert_close(exported(batch)[-1], expected[5], rtol=1e-5, atol=1e-5)


def test_an_int8_file_above_the_ceiling_is_not_written(
    command: Command, build: Build, tmp_path: Path
) -> None:
    model = build("hvt_ti_1", depth=1, img_size=8, patch_size=1)
    with torch.no_grad():  # one value takes the whole range of each output
        for layer in linear_layers(model).values():
            layer.weight[:, 0] = 100 * layer.weight.abs().max()
    hvt.save(model, tmp_path / "m.safetensors")
    out = tmp_path / "m.onnx"
    out.write_text("an older file")
    words = ("export", tmp_path / "m.safetensors", "--int8", out, "--data", "digits")
    before = sorted(tmp_path.iterdir())
    code, said, err = command(*words)
    assert (code, said) == (2, "")
    measured = re.search(r"relative error of int8 is ([\d.]+), above the limit of 0.1, so", err)
    assert measured
    assert "m.onnx was not written" in err
    assert "--max-error" in err
    assert err.count("\n") == 1
    assert out.read_text() == "an older file"
    assert sorted(tmp_path.iterdir()) == before
    code, said, err = command(*words, "--json", "--max-error", float(measured[1]) + 0.01)
    assert (code, err) == (0, "")
    assert json.loads(said)["relative_error"] == pytest.approx(float(measured[1]), abs=1e-3)
    assert json.loads(said)["images_per_second"] > 0
    assert OnnxModel(out).int8


def test_int8_is_not_calibrated_on_what_is_not_there(tmp_path: Path, build: Build) -> None:
    model = build("hvt_ti_1", depth=1)
    images = drawn_images(32, 3, (64, 64))
    for calibration, message in (
        (None, r"at least 32 real images .* not 0"),
        (images[:31], "at least 32 real images .* not 31"),
        (images * torch.tensor(float("nan")), r"inputs of blocks\.0\.attn\.qkv are not finite"),
    ):
        with pytest.raises(HVTError, match=message):
            export(model, tmp_path / "m.onnx", "int8", calibration)
    assert list(tmp_path.iterdir()) == []


# The command


def test_errors_before_anything_is_written(
    command: Command, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, features = tmp_path / "model.safetensors", tmp_path / "features.safetensors"
    hvt.save(build("hvt_ti_1", depth=1), checkpoint)
    hvt.save(build("hvt_ti_1", depth=1, num_classes=0), features)
    (tmp_path / "folder.onnx").mkdir()
    before = sorted(tmp_path.iterdir())
    for words, message in (
        ((checkpoint, tmp_path / "model.bin"), "model.bin should end in .onnx, as model.onnx does"),
        ((checkpoint, tmp_path / "m.pt2", "--int8"), "--int8 needs ONNX"),
        ((checkpoint, tmp_path / "m.onnx", "--int8"), "images to calibrate on: name them with"),
        ((checkpoint, tmp_path / "m.onnx", "--max-error", "nan"), "must be a number above 0"),
        ((features, tmp_path / "m.onnx"), "only a model with a classifier"),
        ((checkpoint, "."), "cannot write .: it is a folder"),
        ((checkpoint, tmp_path / "none" / "m.onnx"), "none does not exist"),
        ((checkpoint, tmp_path / "folder.onnx"), "folder.onnx: it is a folder"),
        ((tmp_path / "no.safetensors", tmp_path / "m.onnx"), "no.safetensors: No such file"),
        ((checkpoint, tmp_path / "m.onnx", "--data", tmp_path / "none"), "none"),
    ):
        code, out, err = command("export", *words)
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    code, _, err = command("export", checkpoint, tmp_path / "m.onnx")
    assert code == 2
    assert err == "hvt: exported models need onnxscript: pip install 'hvt[export]'\n"
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk(tmp_path: Path, build: Build) -> None:
    model = build("hvt_ti_1", depth=1, head_dim=64)  # about 2 MB
    with small_disk(tmp_path / "disk", "1m") as disk:
        with pytest.raises(HVTError, match=r"cannot write .*model\.pt2: No space left on device"):
            export(model, disk / "model.pt2", "torch")
        assert list(disk.iterdir()) == []


class Restless(hvt.HVT):
    """A model that no graph can follow, as it never says the same twice."""

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        return logits + torch.rand_like(logits)


def test_a_file_that_does_not_agree_is_not_left_behind(
    small: dict[str, Any], tmp_path: Path
) -> None:
    """In any form: they are compared alike."""
    model = Restless(hvt.get_config("hvt_ti_1", **small | {"depth": 1}))
    path = tmp_path / "model.pt2"
    path.write_text("an older file")
    with pytest.raises(HVTError, match=r"logits differ by .* so .*model\.pt2 was not written"):
        export(model, path, "torch")
    assert path.read_text() == "an older file"
    assert list(tmp_path.iterdir()) == [path]


# Files that are not as they should be


def test_what_an_exported_file_is_not_for(trained: Path) -> None:
    with pytest.raises(CheckpointError, match="use the checkpoint it was exported from"):
        hvt.load(trained / "model.onnx")
    with pytest.raises(HVTError, match=r"images of shape \(2, 3, 9, 8\) do not fit: .* 3, 8, 8\)"):
        OnnxModel(trained / "model.onnx")(torch.zeros(2, 3, 9, 8))
    with pytest.raises(HVTError, match="do not run on 'mps'"):
        OnnxModel(trained / "model.onnx", "mps")


# Images to try a model on


@given(st.integers(1, 200), st.integers(1, 200))
def test_a_sample_is_spread_over_all_images(total: int, count: int) -> None:
    """A folder's images are in order of class."""
    places = evenly(total, count)
    assert len(set(places)) == len(places) == min(count, total)
    gaps = np.diff([-1 - places[0], *places, 2 * total - 1 - places[-1]])
    assert max(gaps) <= total / len(places) + 1


def test_a_broken_image_is_left_out_of_a_sample(build: Build, tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    for place in range(3):
        Image.new("RGB", (8, 8), (20 * place,) * 3).save(tmp_path / f"class/{place}.png")
    transform = eval_transform(build("hvt_ti_1", img_size=8, patch_size=1))
    whole = sample_images(tmp_path, transform, 3)
    (tmp_path / "class/1.png").write_bytes(b"no image")
    assert torch.equal(sample_images(tmp_path, transform, 3), whole[[0, 2]])
