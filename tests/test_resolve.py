"""One rule for what a word names, wherever a command or a function takes a model."""

from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch

import hvt
from hvt.errors import HVTError
from hvt.resolve import Source, is_checkpoint, resolve
from hvt.resolve import build as open_source
from hvt.zoo import write_config

Build = Callable[..., hvt.HVT]


@pytest.mark.parametrize(
    ("word", "kind", "name"),
    [
        (None, "checkpoint", "imagenet"),
        ("cifar100", "checkpoint", "cifar100"),
        (Path("cifar100"), "checkpoint", "./cifar100"),
        ("hvt_s_4", "model", "hvt_s_4"),
        ("timm:hvt_s_4", "model", "hvt_s_4"),
        ("resnet50", "timm", "resnet50"),
        ("timm:resnet50", "timm", "resnet50"),
        ("vit_base_patch16_224.augreg_in21k", "timm", "vit_base_patch16_224.augreg_in21k"),
        ("resnet50.pth", "checkpoint", "resnet50.pth"),  # an ending, not a tag
        ("plan.json", "config", "plan.json"),
        ("model.ONNX", "onnx", "model.ONNX"),
        ("runs/none", "checkpoint", "runs/none"),
        (Path("none"), "checkpoint", "./none"),
    ],
)
def test_what_a_word_names(word: str | Path | None, kind: str, name: str) -> None:
    assert resolve(word) == Source(kind, name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["hvt_ti_1", "test_vit"])
def test_a_name_wins_over_a_folder(
    name: str, small_folder: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_folder(name)
    named = open_source(resolve(name))
    assert not isinstance(named, hvt.HVT) or named.config == hvt.get_config(name)
    for word in (f"./{name}", Path(name), Path(name).resolve()):
        assert resolve(word).kind == "checkpoint"
        assert open_source(resolve(word)).config.depth == 2  # type: ignore[union-attr]


@pytest.fixture
def small_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Build
) -> Callable[[str], None]:
    monkeypatch.chdir(tmp_path)
    return lambda name: build("hvt_ti_1", depth=2).save_pretrained(name)


def test_a_folder_of_weights_is_not_one_of_images(small_folder: Callable[[str], None]) -> None:
    small_folder("mine")
    Path("images").mkdir()
    assert is_checkpoint("mine")
    assert resolve("mine") == Source("checkpoint", "mine")
    assert not is_checkpoint("images")
    assert not is_checkpoint("x" * 5000)


def test_a_config_builds_a_model(tmp_path: Path) -> None:
    config = hvt.get_config("hvt_ti_1", depth=4, img_size=64)
    write_config(config, tmp_path / "plan.json")
    model = open_source(resolve(str(tmp_path / "plan.json")), num_classes=5)
    assert model.config == config.replace(num_classes=5)


@pytest.mark.parametrize("name", ["hvt_ti_1", "test_vit"])
def test_new_weights_are_those_of_a_seed(name: str) -> None:
    state = torch.random.get_rng_state()
    one, again, other = (open_source(resolve(name), seed=seed) for seed in (3, 3, 4))
    a, b, c = (next(iter(model.parameters())) for model in (one, again, other))
    assert a.equal(b)
    assert not a.equal(c)
    assert torch.random.get_rng_state().equal(state)


@pytest.mark.parametrize("word", ["hvt_s4", "renset50", "timm:renset50"])
def test_unknown_names_get_suggestions(word: str) -> None:
    with pytest.raises(HVTError, match=f"^'{word}' is neither a model nor a checkpoint: did you "):
        resolve(word)


def test_what_timm_cannot_build_or_fetch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(HVTError, match=r"timm cannot build test_resnet\.zzz \("):
        open_source(resolve("test_resnet.zzz"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    sentence = r"^timm's weights of test_resnet could not be fetched \(.+\): check the network, .+$"
    with pytest.raises(HVTError, match=sentence):
        open_source(resolve("test_resnet"), pretrained=True)
    assert caplog.text == ""
    with pytest.raises(HVTError, match="no weights are published for hvt_ti_4"):
        open_source(resolve("hvt_ti_4"), pretrained=True)
