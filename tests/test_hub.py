"""Hugging Face directories and repositories: there and back, by us, timm and transformers."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from conftest import stir
from PIL import Image
from torch import Tensor

import hvt  # before timm: it makes torchvision importable
from hvt import HVT, HVTConfig, HVTError
from hvt.checkpoint.hub import nearest_model

SMALL = {"img_size": 32, "patch_size": 4, "head_dim": 8, "num_classes": 3}


@pytest.fixture
def model() -> HVT:
    built = stir(hvt.create_model("hvt_ti_2", **SMALL)).eval()
    built.pretrained_cfg |= {"mean": (0.1, 0.2, 0.3), "crop_pct": 0.9, "interpolation": "bilinear"}
    built.pretrained_cfg["label_names"] = ("one", "two", "three")
    return built


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 32, 32)


def assert_same(back: HVT, model: HVT, images: Tensor) -> None:
    assert back.config == model.config
    assert torch.equal(back(images), model(images))
    assert back.class_names == model.class_names
    for key in ("mean", "std", "crop_pct", "crop_mode", "interpolation"):
        assert back.pretrained_cfg[key] == model.pretrained_cfg[key], key


# ── directories ─────────────────────────────────────────────────────────────────────────────────


def test_a_directory_gives_the_model_back(tmp_path: Path, model: HVT, images: Tensor) -> None:
    model.save_pretrained(tmp_path / "deep" / "mine")
    folder = tmp_path / "deep" / "mine"
    assert sorted(p.name for p in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    for back in (hvt.from_pretrained(folder), HVT.from_pretrained(str(folder)), hvt.load(folder)):
        assert_same(back, model, images)
    other = hvt.from_pretrained(folder, img_size=48, num_classes=5)
    assert other(torch.randn(1, 3, 48, 48)).shape == (1, 5)


def test_the_card_says_what_it_is_and_is_not_overwritten(tmp_path: Path, model: HVT) -> None:
    model.save_pretrained(tmp_path / "mine")
    card = (tmp_path / "mine" / "README.md").read_text()
    priced = hvt.cost(model)
    assert f"{priced.gflops:.2f} GFLOPs" in card
    assert f"{priced.params_m:.2f} M parameters" in card
    assert "# mine" in card
    assert "license:" not in card
    model.pretrained_cfg["origin"] = {"source": "somebody else's", "license": "cc-by-nc-4.0"}
    model.save_pretrained(tmp_path / "theirs")
    assert "license: cc-by-nc-4.0" in (tmp_path / "theirs/README.md").read_text()
    (tmp_path / "mine" / "README.md").write_text("my own words")
    model.save_pretrained(tmp_path / "mine")
    assert (tmp_path / "mine" / "README.md").read_text() == "my own words"


# ── timm ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "fields",
    [
        {"pool_after": (1, 5), "pool": "conv"},
        {"img_size": (32, 48), "in_chans": 1, "class_token": True, "stages": 0},
        {"num_heads": 2, "mlp_ratio": 2.5, "num_classes": 0},
    ],
)
def test_timm_reads_our_directory(tmp_path: Path, fields: dict[str, Any]) -> None:
    model = stir(hvt.create_model("hvt_ti_2", **SMALL | fields)).eval()
    model.pretrained_cfg |= {"crop_pct": 0.9, "interpolation": "bilinear"}
    model.save_pretrained(tmp_path / "mine")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'mine'}", pretrained=True).eval()
    told = timm.data.resolve_model_data_config(theirs)
    assert (told["crop_pct"], told["interpolation"]) == (0.9, "bilinear")
    assert isinstance(theirs, HVT)
    assert theirs.config == model.config
    images = torch.randn(2, model.config.in_chans, *model.config.image)
    assert torch.equal(theirs(images), model(images))


@pytest.mark.parametrize(
    "fields",
    [
        {"pool": "avg", "merge": 3},
        {"class_token": True, "retention": (50, 20, 5)},
        {"act_layer": "quick_gelu", "norm_eps": 1e-3, "num_heads": 2},
        {"img_size": (16, 64)},
    ],
    ids=str,
)
def test_our_model_that_timm_saved_is_the_same(tmp_path: Path, fields: dict[str, Any]) -> None:
    fields = SMALL | {"depth": 3, "num_heads": 1} | fields
    model = stir(timm.create_model("hvt_ti_0", **fields)).eval()
    arguments = {k: v for k, v in fields.items() if k != "num_classes"}
    timm.models.save_for_hf(model, tmp_path, model_args=arguments, safe_serialization=True)
    back, images = hvt.load(tmp_path), torch.randn(2, 3, *model.config.image)
    assert back.config == model.config
    assert torch.equal(back(images), model(images))


@pytest.mark.parametrize("size", [{"img_size": 64}, {"img_size": 384}, {"depth": 24}])
def test_a_retention_comes_back_as_it_is(size: dict[str, int]) -> None:
    """Unnamed, it would be scaled from that of the nearest model."""
    kept = hvt.get_config("deit_s_power", **size).retention
    named = hvt.get_config("deit_s_power").retention
    for retention in (kept, (5,) * len(kept), *([named] if size == {"img_size": 384} else [])):
        config = HVTConfig(class_token=True, retention=retention, **size)
        name, arguments = nearest_model(config)
        assert hvt.get_config(name, **json.loads(json.dumps(arguments))) == config


# ── transformers ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    """Imported where it is used: it takes two seconds."""
    return importlib.import_module("transformers")


@pytest.mark.parametrize(
    "fields",
    [
        {"num_classes": 1000, "pool_dims": 2, "depth": 4},
        {"class_token": True, "stages": 0, "img_size": (32, 48), "in_chans": 1},
    ],
)
def test_transformers_opens_our_directory(
    transformers: ModuleType, tmp_path: Path, fields: dict[str, Any]
) -> None:
    model = stir(hvt.create_model("hvt_ti_2", **SMALL | fields)).eval()
    names = [f"class {i}" for i in range(model.num_classes)]
    model.pretrained_cfg["label_names"] = names
    model.save_pretrained(tmp_path)
    auto = transformers.AutoModelForImageClassification
    theirs, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())  # neither missing nor unexpected weights
    assert theirs.timm_model.config == model.config
    assert theirs.config.id2label == dict(enumerate(names))
    assert theirs.config.label2id == {name: i for i, name in enumerate(names)}
    images = torch.randn(2, model.config.in_chans, *model.config.image)
    with torch.no_grad():
        assert torch.equal(theirs(images).logits, model(images))
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    assert processor.data_config["input_size"] == (model.config.in_chans, *model.config.image)


def test_its_pipeline_predicts_as_the_predictor(
    transformers: ModuleType, tmp_path: Path, model: HVT
) -> None:
    model.save_pretrained(tmp_path)
    pixels = torch.randint(256, (40, 50, 3), dtype=torch.uint8)
    image = Image.fromarray(pixels.numpy())
    theirs = transformers.pipeline("image-classification", model=str(tmp_path))(image)
    with torch.no_grad():
        transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
        probabilities = model(transform(image)[None]).softmax(1)[0]
    assert {row["label"] for row in theirs} == {"one", "two", "three"}
    for row in theirs:
        index = model.class_names.index(row["label"])
        assert row["score"] == pytest.approx(probabilities[index].item(), abs=1e-6)


def commands(card: str) -> str:
    return card.split("```python\n")[1].split("```")[0]


def test_the_cards_commands_open_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: HVT
) -> None:
    name = 'my "best" model, v1.0'
    model.save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for folder in (name, str(tmp_path / name)):
        assert hvt.load(folder).class_names == model.class_names
    code = commands((tmp_path / name / "README.md").read_text())
    before, _, rest = code.partition("import timm\n")
    opened: dict[str, Any] = {}
    exec(before, opened)
    assert torch.equal(opened["model"].head.weight, model.head.weight)
    exec("import timm\n" + rest, opened)
    assert torch.equal(opened["model"].head.weight, model.head.weight)
    assert opened["model"].class_names == model.class_names


# ── repositories ────────────────────────────────────────────────────────────────────────────────


def test_without_a_network_the_error_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: HVT
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host\n(details)")

    monkeypatch.setattr("hvt.checkpoint.hub.snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", fail)
    with pytest.raises(HVTError, match=r"nobody/nothing is neither .*no route") as one:
        hvt.from_pretrained("nobody/nothing", cache_dir=tmp_path)
    with pytest.raises(HVTError, match=r"cannot upload to nobody/nothing.*no route") as other:
        model.push_to_hub("nobody/nothing", token="hf_none")
    assert "\n" not in f"{one.value}{other.value}"


class Hub:
    """A hub in memory, in place of the calls that would reach the real one."""

    def __init__(self, **_: Any) -> None:
        self.files: dict[str, bytes] = {}
        self.commits: list[str] = []

    def __call__(self, token: str | None) -> "Hub":
        return self

    def create_repo(self, repo_id: str, **_: Any) -> huggingface_hub.RepoUrl:
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload_folder(self, folder_path: str, commit_message: str, **_: Any) -> None:
        self.files |= {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        self.commits.append(commit_message)

    def download(self, repo: str, cache_dir: Path, allow_patterns: list[str], **_: Any) -> str:
        folder = cache_dir / repo
        folder.mkdir(parents=True, exist_ok=True)
        for name in allow_patterns:
            if name in self.files:
                (folder / name).write_bytes(self.files[name])
        return str(folder)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    fake = Hub()
    monkeypatch.setattr("hvt.checkpoint.hub.HfApi", fake)
    monkeypatch.setattr("hvt.checkpoint.hub.snapshot_download", fake.download)
    return fake


def test_push_and_fetch(tmp_path: Path, hub: Hub, model: HVT, images: Tensor) -> None:
    address = model.push_to_hub("me/mine", token="hf_none", commit_message="First")
    assert address.endswith("/me/mine")
    assert hub.commits == ["First"]
    assert sorted(hub.files) == ["README.md", "config.json", "model.safetensors"]
    assert b'hvt.from_pretrained("me/mine")' in hub.files["README.md"]
    back = hvt.from_pretrained("me/mine", cache_dir=tmp_path)
    assert_same(back, model, images)


def test_a_repository_of_timms_keeps_its_preprocessing(tmp_path: Path, hub: Hub) -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, num_classes=2)
    torch.save(theirs.state_dict(), tmp_path / "weights")
    hub.files["pytorch_model.bin"] = (tmp_path / "weights").read_bytes()
    hub.files["config.json"] = b'{"pretrained_cfg": {"mean": [0.5, 0.5, 0.5]}}'
    ours = hvt.from_pretrained("me/mine", cache_dir=tmp_path / "cache")
    assert ours.pretrained_cfg["mean"] == (0.5, 0.5, 0.5)
    images = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(ours(images), theirs.eval()(images), atol=1e-5, rtol=0)


SIZES: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "hidden_size": 24, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "fields"), [("ViT", {"layer_norm_eps": 0.1}), ("DeiT", {}), ("DeiTWithTeacher", {})]
)
@torch.inference_mode()
def test_we_open_what_transformers_writes(
    transformers: ModuleType, tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    """With its norms' epsilon, and DeiT's second token whether or not a head reads it."""
    kind, _, teacher = name.partition("With")
    config = getattr(transformers, f"{kind}Config")(**SIZES | fields)
    head = f"{kind}ForImageClassification{'With' if teacher else ''}{teacher}"
    theirs = getattr(transformers, head)(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path)
    getattr(transformers, f"{kind}ImageProcessor")().save_pretrained(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    assert torch.allclose(hvt.load(tmp_path)(images), theirs(images).logits, atol=1e-4)
