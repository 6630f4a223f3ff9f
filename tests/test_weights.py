"""Our own files: exact, atomic, resizable; every bad one is one clear error."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import stir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import hvt
from hvt import HVT, CheckpointError, HVTConfig, HVTError
from hvt.checkpoint.description import FORMAT_VERSION
from hvt.checkpoint.save_load import load_into

TINY = HVTConfig(
    img_size=16, patch_size=4, num_heads=2, head_dim=4, depth=2, stages=1, num_classes=3
)

VARIANTS = {
    "1d": {},
    "2d": {"pool_dims": 2},
    "conv 2d": {"pool": "conv", "pool_dims": 2},
    "named blocks": {"pool_after": (1,)},
    "power": {"stages": 0, "class_token": True, "retention": (17, 5)},
    "grey features": {"img_size": (16, 24), "in_chans": 1, "num_classes": 0},
    "dropouts": {"drop_rate": 0.1, "attn_drop_rate": 0.2, "drop_path_rate": 0.3},
}


def tiny(**fields: Any) -> HVT:
    return stir(HVT(TINY.replace(**fields))).eval()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_same_weights(one: HVT, other: HVT) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


# ── there and back ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
def test_round_trip_is_exact(tmp_path: Path, fields: dict[str, Any]) -> None:
    model = tiny(**fields)
    hvt.save(model, tmp_path / "m.safetensors")
    back = hvt.load(tmp_path / "m.safetensors")
    assert back.config == model.config
    assert_same_weights(model, back)
    assert not back.training
    images = torch.randn(2, model.config.in_chans, *model.config.image)
    assert torch.equal(model(images), back(images))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_narrow_file_gives_the_model_s_own_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    """Half the bytes; the weights are rounded, and the model is float32 again, or as it was."""
    model, path = tiny(), tmp_path / "narrow.safetensors"
    hvt.save(model.to(dtype), path)
    assert_same_weights(model, hvt.load(path))
    model.float()
    model.pretrained_cfg["origin"] = {"license": "apache-2.0"}
    hvt.save(model, tmp_path / "wide.safetensors")
    hvt.save(model, path, dtype=dtype)
    with safe_open(path, framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {dtype}  # noqa: SIM118
    weights = sum(parameter.numel() for parameter in model.parameters())
    saved = (tmp_path / "wide.safetensors").stat().st_size - path.stat().st_size
    assert saved == pytest.approx(2 * weights, abs=100)
    assert_same_weights(copy.deepcopy(model).to(dtype).float(), hvt.load(path))
    assert hvt.load(path).pretrained_cfg["origin"] == {"license": "apache-2.0"}
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # which was only read


def test_a_weight_beyond_float16_is_not_written_as_infinite(tmp_path: Path) -> None:
    model, path = tiny(), tmp_path / "m.safetensors"
    hvt.save(model, path)
    before = path.read_bytes()
    model.head.weight.data[0, 0] = 1e5
    with pytest.raises(HVTError, match=r"head\.weight has the value 100000, too large for"):
        hvt.save(model, path, dtype=torch.float16)
    assert path.read_bytes() == before


def test_class_names_and_preprocessing_travel(tmp_path: Path) -> None:
    preprocessing = {
        "mean": (0.1, 0.2, 0.3),
        "std": (0.4, 0.5, 0.6),
        "interpolation": "bilinear",
        "crop_pct": 0.9,
        "crop_mode": "squash",
    }
    names = ["Käse", "zebra", "犬"]
    hvt.save(tiny(), tmp_path / "a.safetensors", names, preprocessing)
    first = hvt.load(tmp_path / "a.safetensors")
    hvt.save(first, tmp_path / "b.safetensors")  # the model's own, this time
    for model in (first, hvt.load(tmp_path / "b.safetensors")):
        assert model.class_names == tuple(names)
        assert {key: model.pretrained_cfg[key] for key in preprocessing} == preprocessing


def test_names_and_preprocessing_must_fit(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with pytest.raises(HVTError, match="unknown preprocessing 'crop_ptc': did you mean crop_pct"):
        hvt.save(tiny(), path, preprocessing={"crop_ptc": 1.0})
    with pytest.raises(HVTError, match="2 class names do not fit 3 classes"):
        hvt.save(tiny(), path, ["a", "b"])
    model = tiny()
    model.pretrained_cfg["origin"] = {"epochs": 3}
    with pytest.raises(HVTError, match="origin epochs=3 must be text"):
        hvt.save(model, path)
    assert names_in(tmp_path) == []
    hvt.save(tiny(), path)
    assert hvt.load(path).class_names is None
    hvt.save(tiny(), path, ["a", "b", "c"])
    assert hvt.load(path, num_classes=4).class_names is None


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    """Ten times: the order of two names comes out right by chance every other time.

    `assert_same_run` compares files of several processes, whose hash seeds differ.
    """
    model = tiny()
    names = [f'Müller {i} 🐈 \x7f \x01 "' for i in range(model.num_classes)]
    paths = [tmp_path / f"{i}.safetensors" for i in range(10)]
    for path in paths:
        hvt.save(model, path, class_names=names)
    hvt.save(hvt.load(paths[0]), tmp_path / "again.safetensors")
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {paths[0].read_bytes()}
    assert hvt.load(paths[0]).class_names == tuple(names)


# ── another size, another task ──────────────────────────────────────────────────────────────────


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    hvt.save(tiny(), tmp_path / "m.safetensors", ["a", "b", "c"])
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize("fields", [{}, {"pool_dims": 2}, {"stages": 0, "class_token": True}])
@pytest.mark.parametrize(
    "size",
    [{"img_size": 32}, {"img_size": (24, 40)}, {"patch_size": 8, "img_size": 32}],
    ids=["square", "HxW", "patch"],
)
def test_load_at_another_size_is_set_input_size(
    tmp_path: Path, fields: dict[str, Any], size: dict[str, Any]
) -> None:
    model = tiny(**fields)
    hvt.save(model, tmp_path / "m.safetensors")
    loaded = hvt.load(tmp_path / "m.safetensors", **size)
    assert loaded.config == model.config.replace(**size)
    model.set_input_size(**size)
    assert_same_weights(model, loaded)
    assert loaded.pretrained_cfg["input_size"] == (3, *loaded.config.image)
    assert loaded(torch.randn(1, 3, *loaded.config.image)).shape == (1, 3)


def test_another_class_count_gets_a_new_head_and_keeps_the_rest(saved: Path) -> None:
    old, new = hvt.load(saved).state_dict(), hvt.load(saved, num_classes=7)
    assert new.get_classifier().weight.shape == (7, 8)
    assert new.get_classifier().weight.std() > 0
    assert torch.equal(new.get_classifier().bias, torch.zeros(7))
    for name, tensor in new.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(tensor, old[name]), name


def test_one_channel_sums_the_filters_of_three(saved: Path) -> None:
    model, grey = hvt.load(saved), hvt.load(saved, in_chans=1)
    image = torch.randn(2, 1, 16, 16)
    # What a grey image, repeated, gave before.
    torch.testing.assert_close(grey(image), model(image.expand(-1, 3, -1, -1)))


def test_other_channels_cannot_be_turned(tmp_path: Path) -> None:
    hvt.save(tiny(in_chans=2), tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"m\.safetensors takes 2 channels"):
        hvt.load(tmp_path / "m.safetensors", in_chans=5)


def test_load_into_resizes_to_the_model(saved: Path) -> None:
    model = tiny(img_size=24, num_classes=5).double()  # which it stays
    head = model.get_classifier().weight.clone()
    load_into(model, saved)
    assert torch.equal(model.get_classifier().weight, head)
    wanted = hvt.load(saved, img_size=24).double()
    for name, tensor in model.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(tensor, wanted.state_dict()[name]), name


@pytest.mark.parametrize(
    "fields",
    [
        {"num_heads": 2, "head_dim": 4},
        {"pool": "avg"},
        {"act_layer": "quick_gelu"},
        {"norm_eps": 1e-3},
        {"proportional_attention": True},
    ],
    ids=str,
)
def test_load_into_needs_the_same_outputs(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Shapes would not tell these apart."""
    own = {"num_heads": 1, "head_dim": 8, "stages": 2}
    hvt.save(tiny(**own), tmp_path / "own.safetensors")
    name = next(iter(fields))
    with pytest.raises(CheckpointError, match=f"has another architecture: its {name} is "):
        load_into(tiny(**own | fields), tmp_path / "own.safetensors")
    after = tiny(**own).config.pool_blocks
    for alike in ({}, {"drop_path_rate": 0.3}, {"stages": None, "pool_after": after}):
        load_into(tiny(**own | alike), tmp_path / "own.safetensors")


@pytest.mark.parametrize("norm", [False, True])
def test_a_pruned_model_is_not_saved(tmp_path: Path, norm: bool) -> None:
    model = tiny()
    last = len(model.blocks) - 1
    model.prune_intermediate_layers([last if norm else 0], prune_norm=norm, prune_head=False)
    with pytest.raises(HVTError, match="was not written, because the model does not match"):
        hvt.save(model, tmp_path / "m.safetensors")
    assert names_in(tmp_path) == []


def test_positions_of_another_kind_are_not_resized(tmp_path: Path) -> None:
    hvt.save(tiny(class_token=True), tmp_path / "m.safetensors")
    for other in ({"no_embed_class": True}, {"pool_dims": 2}):
        with pytest.raises(CheckpointError, match="different architecture than requested"):
            hvt.load(tmp_path / "m.safetensors", img_size=128, **other)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"depth": 4}, "it lacks blocks.2."),
        ({"depth": 1}, "it has blocks.1."),
        ({"mlp_ratio": 2.0}, "it has another shape of blocks.0.mlp.fc1.weight"),
    ],
)
def test_another_architecture_is_an_error(saved: Path, fields: dict[str, Any], words: str) -> None:
    model = tiny(**fields)
    before = copy.deepcopy(model)
    for use in (lambda: load_into(model, saved), lambda: hvt.load(saved, **fields)):
        with pytest.raises(
            CheckpointError, match="different architecture than requested"
        ) as caught:
            use()
        assert words in str(caught.value)
        assert str(saved) in str(caught.value)
    assert_same_weights(model, before)


# ── files that cannot be loaded ─────────────────────────────────────────────────────────────────


def written(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """One of our files whose description was changed."""
    hvt.save(tiny(), path)
    metadata = description(path)
    described = json.loads(metadata["hvt"])
    change(described)
    save_file(load_file(path), path, metadata=metadata | {"hvt": json.dumps(described)})
    return path


def description(path: Path) -> dict[str, str]:
    """A file's metadata without the checksum, for a file of other tensors."""
    with safe_open(path, "pt") as file:
        return {key: value for key, value in file.metadata().items() if key != "crc32"}


def config(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda described: described["config"].update(fields)


UNUSABLE = "does not describe a usable model"
DESCRIPTIONS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "newer format": (lambda d: d.update(format_version=FORMAT_VERSION + 1), "newer hvt"),
    "no format": (lambda d: d.pop("format_version"), UNUSABLE),
    "unknown field": (config(speed=9), "unknown override 'speed'"),
    "impossible field": (config(patch_size=5), "patch_size=5"),
    "more blocks": (config(depth=4), "it lacks blocks.2"),
    "endless depth": (config(depth=10**12), "depth=1000000000000 must be a whole number"),
    "vast width": (config(num_heads=10**12), UNUSABLE),
    "vast image": (config(img_size=4 * 10**6), "another shape of pos_embed"),
    "names of numbers": (lambda d: d.update(class_names=[1, 2, 3]), "class names must be a list"),
    "too few names": (lambda d: d.update(class_names=["a", "b"]), "2 class names do not fit 3"),
    "preprocessing of another kind": (lambda d: d.update(preprocessing=3), UNUSABLE),
    "unknown precision": (lambda d: d.update(dtype="float99"), "dtype='float99' must be float32"),
    "origin of another kind": (lambda d: d.update(origin={"a": 1}), "origin a=1 must be text"),
}


PREPROCESSING: list[tuple[str, Any, str]] = [
    ("crop_pct", float("nan"), "crop_pct=nan must be"),
    ("mean", [0.5, 0.5], "mean=(0.5, 0.5) must be 1 or 3 numbers"),
    ("mean", "grey", "mean='grey' must be numbers"),
    ("std", [0, 0, 0], "std=(0, 0, 0) must be numbers from 1e-05 to 1000"),
    ("interpolation", "bicubik", "interpolation='bicubik' must be nearest or bilinear or bicubic"),
]


@pytest.mark.parametrize(("key", "value", "words"), PREPROCESSING)
def test_wrong_preprocessing_is_named(tmp_path: Path, key: str, value: Any, words: str) -> None:
    path = written(tmp_path / "m.safetensors", lambda d: d["preprocessing"].update({key: value}))
    with pytest.raises(CheckpointError) as caught:
        hvt.load(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    with pytest.raises(HVTError):  # nor is it written
        hvt.save(tiny(), tmp_path / "new.safetensors", preprocessing={key: value})
    assert names_in(tmp_path) == ["m.safetensors"]
    # timm's directories say the same in config.json.
    save_file(tiny(head_dim=64, depth=1).state_dict(), path.rename(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": {key: value}}))
    with pytest.raises(CheckpointError, match="the JSON files in") as caught:
        hvt.load(tmp_path)
    assert words in str(caught.value)


def test_a_field_that_a_file_does_not_have_takes_its_default(tmp_path: Path) -> None:
    path = written(tmp_path / "m.safetensors", lambda d: d["config"].pop("merge"))
    assert hvt.load(path).config == TINY


@pytest.mark.parametrize("case", DESCRIPTIONS)
def test_a_wrong_description_is_one_clear_error(tmp_path: Path, case: str) -> None:
    change, words = DESCRIPTIONS[case]
    path = written(tmp_path / "m.safetensors", change)
    with pytest.raises(HVTError) as caught:
        hvt.load(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("blocks.0.pos_embed"), "it lacks blocks.0.pos_embed"),
        (lambda t: t.update({"norm.bias": t["norm.bias"].int()}), "norm.bias as torch.int32"),
        (lambda t: t["norm.bias"].fill_(float("inf")), "NaN or infinite weights in norm.bias"),
    ],
)
def test_tensors_that_are_not_the_weights_are_named(
    saved: Path, change: Callable[[dict[str, Tensor]], object], words: str
) -> None:
    tensors = load_file(saved)
    change(tensors)
    save_file(tensors, saved, metadata=description(saved))
    for use in (lambda: hvt.load(saved, img_size=32), lambda: load_into(tiny(), saved)):
        with pytest.raises(CheckpointError) as caught:
            use()
        assert words in str(caught.value)
        assert str(saved) in str(caught.value)


def resnet() -> dict[str, Tensor]:
    return {
        "conv1.weight": torch.zeros(8, 3, 7, 7),
        "layer1.0.conv1.weight": torch.zeros(8, 8, 1, 1),
        "fc.weight": torch.zeros(3, 8),
    }


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "random bytes": (
        lambda p: p.write_bytes(bytes(torch.randint(256, (5000,)).tolist())),
        "neither a safetensors nor a PyTorch file",
    ),
    "text that looks like ours": (lambda p: p.write_text("weights {}"), "damaged"),
    "zip": (lambda p: p.write_bytes(b"PK\x03\x04" + b"\0" * 500), "damaged or cut short"),
    "ResNet safetensors": (lambda p: save_file(resnet(), p), "is not an HVT, DeiT or plain ViT"),
    "no tensors": (lambda p: torch.save({"epoch": 3}, p), "it has no tensors"),
    "a list": (lambda p: torch.save([torch.zeros(2)], p), "contains a list"),
    "empty folder": (lambda p: p.mkdir(), "contains no model.safetensors or pytorch_model.bin"),
    "missing": (lambda p: None, "No such file"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_of_another_kind_is_one_clear_error(tmp_path: Path, case: str) -> None:
    write, words = FILES[case]
    path = tmp_path / "file.bin"
    write(path)
    with pytest.raises(CheckpointError) as caught:
        hvt.load(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


# ── damaged files ───────────────────────────────────────────────────────────────────────────────


def without_checksum(model: HVT, path: Path) -> None:
    """As other programs write it, so that what is damaged is read."""
    hvt.save(model, path)
    save_file(load_file(path), path, metadata=description(path))


FORMATS: dict[str, Callable[[HVT, Path], object]] = {
    "safetensors": hvt.save,
    "no checksum": without_checksum,
    "pth": lambda m, p: torch.save({"model": m.state_dict(), "epoch": 3}, p),
    "legacy": lambda m, p: torch.save(m.state_dict(), p, _use_new_zipfile_serialization=False),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The bytes of a small model in each format; heads of 64 leave nothing to guess."""
    folder = tmp_path_factory.mktemp("whole")
    model = HVT(TINY.replace(num_heads=1, head_dim=64, depth=1, mlp_ratio=0.25))
    for name, write in FORMATS.items():
        write(model, folder / name)
        hvt.load(folder / name)
    return {name: (folder / name).read_bytes() for name in FORMATS}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(list(FORMATS)))
def test_damage_never_raises_anything_else(
    tmp_path: Path, whole: dict[str, bytes], data: st.DataObject, kind: str
) -> None:
    content = bytearray(whole[kind])
    # Where the structure is: the beginning of all, the directory at the end of a zip archive.
    last = len(content) - 1
    place = st.one_of(st.integers(0, 6000), st.integers(0, last), st.integers(last - 3000, last))
    for _ in range(data.draw(st.integers(1, 4), label="bytes")):
        at = min(data.draw(place, label="at"), last)
        content[at] = data.draw(st.integers(0, 255), label="byte")
    end = data.draw(st.one_of(st.none(), st.integers(0, last)), label="end")
    path = tmp_path / "damaged"
    path.write_bytes(content[:end])
    try:
        outcome: object = hvt.load(path)
    except HVTError as error:
        outcome = str(error)
    assert isinstance(outcome, HVT) or str(path) in str(outcome)


def test_a_flipped_byte_is_noticed_wherever_it_is(tmp_path: Path, whole: dict[str, bytes]) -> None:
    """In the weights, where nothing else would tell, and in the description."""
    content, path = whole["safetensors"], tmp_path / "flipped"
    start = content.index(b'"class_names')
    for at in (*range(start, start + 30), *range(len(content) - 1, 0, -len(content) // 300)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(CheckpointError) as caught:
            hvt.load(path)
        assert str(path) in str(caught.value)
        weights = at > len(content) // 10
        assert not weights or "is damaged: its content does not match" in str(caught.value)


def test_a_file_that_another_program_rewrote_loads(tmp_path: Path) -> None:
    model, path = tiny(head_dim=64), tmp_path / "m.safetensors"
    hvt.save(model, path, ["a", "b", "c"])
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    reordered = dict(sorted(metadata.items(), reverse=True))
    save_file(dict(reversed(tensors.items())), tmp_path / "same", metadata=reordered)
    assert_same_weights(hvt.load(tmp_path / "same"), model)
    save_file(tensors, tmp_path / "bare")  # without our metadata, known by its tensors
    assert_same_weights(hvt.load(tmp_path / "bare"), model)
    tensors["head.bias"] = tensors["head.bias"] + 1
    save_file(tensors, tmp_path / "changed", metadata=metadata)
    with pytest.raises(CheckpointError, match="save it again if another program changed it"):
        hvt.load(tmp_path / "changed")
    del metadata["crc32"]
    save_file(tensors, tmp_path / "changed", metadata=metadata)
    assert torch.equal(hvt.load(tmp_path / "changed").head.bias, tensors["head.bias"])
