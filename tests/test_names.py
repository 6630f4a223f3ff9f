"""Names in place of checkpoints: built-in ones everywhere, models' where weights may be new."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open

import hvt
from hvt.cli import main
from hvt.cli.weights import open_weights
from hvt.zoo import BUILT_IN, DEFAULT, built_in, built_in_config

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def image(tmp_path: Path) -> str:
    Image.new("RGB", (40, 40), "red").save(tmp_path / "cat.png")
    return str(tmp_path / "cat.png")


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_name_is_a_checkpoint(name: str) -> None:
    assert built_in(name).is_file()
    model = hvt.load(name)
    assert model.config == built_in_config(name)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    names = model.class_names or ()
    assert len(names) == len(set(names)) == model.num_classes
    assert hvt.Predictor(name).class_names == names
    assert model.pretrained_cfg["origin"]["license"] == "Apache-2.0"
    assert built_in(name).stat().st_size <= 12e6  # everybody downloads it, in float16


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_released_file_has_the_format_that_the_page_describes(name: str) -> None:
    page = Path(__file__).parents[1] / "docs/formats.md"
    if not page.exists():
        pytest.skip("a source distribution has no docs/")
    with safe_open(built_in(name), framework="pt") as file:
        metadata = file.metadata()
    described = json.loads(metadata["hvt"])
    for key in (*metadata, *described):
        assert f"| `{key}` |" in page.read_text()
    assert described["format_version"] == 1


def test_predict_takes_a_built_in_name(image: str, capsys: Captured) -> None:
    assert main(["predict", image, "--json"]) == 0
    default = json.loads(capsys.readouterr().out)
    assert main(["predict", DEFAULT, image, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == default
    assert main(["predict", "cifar100", image, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) != default


def test_swapped_arguments_of_predict_are_recognised(image: str, capsys: Captured) -> None:
    for model in ("cifar100", "model.onnx"):
        assert main(["predict", image, model]) == 2
        line = f"{model} is a model, and the model comes first: use hvt predict {model} {image}"
        assert line in capsys.readouterr().err


def test_export_takes_a_model_s_name_and_says_that_its_weights_are_new(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hvt.zoo

    tiny = hvt.HVTConfig(img_size=32, depth=2, num_heads=1, stages=1, num_classes=4)
    monkeypatch.setitem(hvt.zoo.MODELS, "hvt_ti_1", tiny)
    assert main(["export", "hvt_ti_1", str(tmp_path / "out.pt2")]) == 0
    assert "hvt_ti_1: untrained weights" in capsys.readouterr().err
    written, again = torch.export.load(tmp_path / "out.pt2"), open_weights("hvt_ti_1", False)
    other = again.state_dict()
    assert all(torch.equal(tensor, other[key]) for key, tensor in written.state_dict.items())


@pytest.mark.parametrize(
    "words", [["export", "cifar100", "OUT.onnx"], ["export", "OUT.onnx"], ["serve"]]
)
def test_pretrained_is_for_names_without_weights(words: list[str], capsys: Captured) -> None:
    assert main([*words, "--pretrained"]) == 2
    name = "cifar100" if "cifar100" in words else DEFAULT
    assert f"{name} has its own weights: leave --pretrained out" in capsys.readouterr().err
