"""A predictor answers for any picture, as an evaluation would, and a broken one stops nothing."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_paths import real_data
from PIL import Image

import hvt
from hvt.data.folders import FilePictures
from hvt.data.loader import EvalBatches
from hvt.data.sources import ArrayPictures, open_digits, open_eval
from hvt.deploy.predict import (
    Answer,
    Predictor,
    built_in,
    find_device,
    find_pictures,
    is_checkpoint,
)
from hvt.errors import HVTError
from hvt.evaluate import evaluate
from hvt.train.pipeline import eval_transform

DOCS = Path(__file__).parents[1] / "docs"
Build = Callable[..., hvt.HVT]
NAMES = ("ant", "bee", "cat", "dog", "emu", "fox", "gnu", "hen", "ibex", "jay")


@pytest.fixture
def model(build: Build) -> hvt.HVT:
    """A small model of ten classes with names, for pictures of 64 pixels taken whole."""
    made = build("hvt_ti_2")
    made.pretrained_cfg.update(label_names=NAMES, crop_pct=1.0)
    return made


@pytest.fixture
def pictures(tmp_path: Path) -> list[str]:
    draw = np.random.default_rng(0)
    paths = [str(tmp_path / f"{number}.png") for number in range(7)]
    for number, path in enumerate(paths):
        pixels = draw.integers(0, 256, (70 + 9 * number, 90, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return paths


# Answers


def test_three_lines(tmp_path: Path, model: hvt.HVT, pictures: list[str]) -> None:
    hvt.save(model, tmp_path / "model.safetensors")
    predictor = hvt.Predictor(tmp_path / "model.safetensors")
    answer = predictor(pictures[0])
    assert isinstance(answer, Answer)
    assert answer.source == pictures[0]
    assert len(answer.classes) == len(answer.probabilities) == 5
    assert set(answer.classes) < set(NAMES)
    assert list(answer.probabilities) == sorted(answer.probabilities, reverse=True)
    assert answer.error is None
    # A model that is in memory already does as well, and so does a picture.
    other = Predictor(model)
    assert other(pictures[0]) == answer
    with Image.open(pictures[0]) as image:
        assert other(image) == answer


def test_probabilities_are_the_models(model: hvt.HVT, pictures: list[str]) -> None:
    (answer,) = Predictor(model, top=10)([pictures[2]])
    with Image.open(pictures[2]) as image, torch.inference_mode():
        expected = model(eval_transform(model)(image)[None]).softmax(1)[0]
    assert dict(zip(answer.classes, answer.probabilities, strict=True)) == pytest.approx(
        dict(zip(NAMES, expected.tolist(), strict=True))
    )
    assert sum(answer.probabilities) == pytest.approx(1)


def test_answers_are_those_of_an_evaluation(model: hvt.HVT, pictures: list[str]) -> None:
    labels = [0, 3, 5, 5, 1, 9, 3]
    batches = EvalBatches(FilePictures(pictures, labels), eval_transform(model), batch_size=3)
    score = evaluate(model, batches, 10)
    answers = Predictor(model, top=10)(pictures)
    confusion = torch.zeros(10, 10, dtype=torch.int64)
    loss = 0.0
    for answer, label in zip(answers, labels, strict=True):
        confusion[label, NAMES.index(answer.classes[0])] += 1
        loss -= np.log(answer.probabilities[answer.classes.index(NAMES[label])])
    assert score.confusion.tolist() == confusion.tolist()
    assert score.loss == pytest.approx(loss / 7, rel=1e-5)


def test_digits_in_files_are_digits_in_memory(tmp_path: Path, build: Build) -> None:
    """A data set that is evaluated as arrays gets the same answers from files."""
    model = build("hvt_ti_1", img_size=8, patch_size=1)
    model.pretrained_cfg["crop_pct"] = 1.0
    _, val, _ = open_digits(3)
    some = val.subset(range(12))
    for number in range(12):
        some[number][0].save(tmp_path / f"{number:02}.png")
    batches = EvalBatches(some, eval_transform(model, arrays=True), batch_size=5)
    logits = torch.cat([model(batch.images) for batch in batches])
    for answer, row in zip(Predictor(model)(find_pictures([str(tmp_path)])), logits, strict=True):
        best = row.softmax(0).topk(5)
        assert answer.classes == tuple(map(str, best.indices.tolist()))
        assert answer.probabilities == pytest.approx(best.values.tolist(), rel=1e-4)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 64])
def test_the_batch_changes_nothing(model: hvt.HVT, pictures: list[str], batch_size: int) -> None:
    expected = [Predictor(model, top=10)(picture) for picture in pictures]
    for got, one in zip(
        Predictor(model, top=10, batch_size=batch_size)(pictures), expected, strict=True
    ):
        assert (got.source, got.classes) == (one.source, one.classes)
        assert got.probabilities == pytest.approx(one.probabilities, rel=1e-4)


def test_top_is_at_most_all_classes(model: hvt.HVT, pictures: list[str]) -> None:
    assert sorted(Predictor(model, top=50)(pictures[0]).classes) == sorted(NAMES)
    assert len(Predictor(model, top=1)(pictures[0]).classes) == 1


def test_classes_without_names_are_numbers(build: Build, pictures: list[str]) -> None:
    answer = Predictor(build("hvt_ti_2"), top=10)(pictures[0])
    assert sorted(answer.classes) == [str(i) for i in range(10)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision(
    tmp_path: Path, model: hvt.HVT, pictures: list[str], dtype: torch.dtype
) -> None:
    expected = Predictor(model)(pictures[0])
    hvt.save(model.to(dtype), tmp_path / "half.safetensors")
    predictor = Predictor(tmp_path / "half.safetensors")
    assert predictor.model.pos_embed.dtype == torch.float32
    assert predictor(pictures[0]).classes[0] == expected.classes[0]
    assert Predictor(model)(pictures[0]).error is None  # and as it is


def test_nothing_gives_nothing(model: hvt.HVT) -> None:
    assert Predictor(model)([]) == []


# Pictures of all kinds


@pytest.mark.parametrize(
    ("mode", "ending"),
    [
        ("1", "png"), ("L", "png"), ("LA", "png"), ("P", "png"), ("P", "gif"), ("RGB", "jpg"),
        ("RGBA", "png"), ("RGBA", "webp"), ("CMYK", "jpg"), ("CMYK", "tif"), ("I;16", "png"),
        ("I;16", "tif"), ("F", "tif"), ("YCbCr", "jpg"), ("LAB", "tif"), ("RGB", "bmp"),
    ],
)  # fmt: skip
def test_all_modes_work(tmp_path: Path, model: hvt.HVT, mode: str, ending: str) -> None:
    """From a file and from memory alike, and alike to the same picture in RGB where it is one."""
    ramp = np.linspace(0, 255, 64 * 64).reshape(64, 64)
    if mode == "I;16":
        image = Image.fromarray((ramp * 257).astype(np.uint16))
    elif mode == "LAB":
        image = Image.merge("LAB", [Image.fromarray(ramp.astype(np.uint8))] * 3)
    else:
        image = Image.fromarray(ramp.astype(np.uint8)).convert("RGB").convert(mode)
    path = tmp_path / f"picture.{ending}"
    image.save(path)
    predictor = Predictor(model, top=10)
    answer = predictor(str(path))
    assert answer.error is None
    with Image.open(path) as again:
        assert predictor(again) == answer
    if (mode, ending) in {("L", "png"), ("LA", "png"), ("RGBA", "png"), ("I;16", "png")}:
        grey = Image.fromarray(np.rint(ramp if mode == "I;16" else np.floor(ramp)).astype(np.uint8))
        plain = predictor(grey.convert("RGB"))
        assert answer.probabilities == pytest.approx(plain.probabilities, abs=0.02)


def test_a_grey_model(tmp_path: Path, build: Build, pictures: list[str]) -> None:
    model = build("hvt_ti_1", in_chans=1)
    assert len(model.pretrained_cfg["mean"]) == 3  # the colours', of which grey takes the average
    predictor = Predictor(model)
    answer = predictor(pictures[0])
    assert answer.error is None
    with Image.open(pictures[0]) as image:
        assert predictor(image.convert("L")).probabilities == answer.probabilities


def test_a_turned_photo_is_seen_upright(
    tmp_path: Path, model: hvt.HVT, pictures: list[str]
) -> None:
    with Image.open(pictures[0]) as image:
        exif = Image.Exif()
        exif[0x0112] = 6  # taken with the camera on its side
        image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    predictor = Predictor(model, top=10)
    expected = predictor(pictures[0])
    for seen in (str(tmp_path / "turned.png"), Image.open(tmp_path / "turned.png")):
        answer = predictor(seen)
        assert answer.classes == expected.classes
        assert answer.probabilities == pytest.approx(expected.probabilities)


def test_a_large_photo_before_a_small_model(tmp_path: Path, model: hvt.HVT) -> None:
    """Resized so that the short side fits, then the middle: the edges have no say."""
    draw = np.random.default_rng(1)
    middle = np.kron(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8), np.ones((60, 60, 1)))
    wide = draw.integers(0, 256, (480, 1080, 3), dtype=np.uint8)
    wide[:, 300:780] = middle
    far = draw.integers(0, 256, (480, 1080, 3), dtype=np.uint8)
    far[:, 270:810] = wide[:, 270:810]
    Image.fromarray(wide).save(tmp_path / "wide.png")
    Image.fromarray(far).save(tmp_path / "far.png")
    Image.fromarray(middle.astype(np.uint8)).save(tmp_path / "square.png")
    predictor = Predictor(model, top=10)
    wide_answer, far_answer, square = predictor(
        [str(tmp_path / f"{name}.png") for name in ("wide", "far", "square")]
    )
    assert wide_answer.probabilities == far_answer.probabilities
    assert wide_answer.classes == square.classes
    assert wide_answer.probabilities == pytest.approx(square.probabilities, abs=0.02)
    with Image.open(tmp_path / "wide.png") as image:
        assert predictor.transform(image).shape == (3, 64, 64)


def test_how_a_picture_is_cropped_is_the_checkpoints_to_say(tmp_path: Path, model: hvt.HVT) -> None:
    stripes = np.zeros((64, 128, 3), np.uint8)
    stripes[:, :32] = 255  # what a crop of the middle leaves out
    Image.fromarray(stripes).save(tmp_path / "stripes.png")
    seen = {}
    for mode in ("center", "squash"):
        model.pretrained_cfg["crop_mode"] = mode
        hvt.save(model, tmp_path / "model.safetensors")
        predictor = Predictor(tmp_path / "model.safetensors")
        with Image.open(tmp_path / "stripes.png") as image:
            seen[mode] = predictor.transform(image)
        assert seen[mode].shape == (3, 64, 64)
    assert seen["center"].unique().numel() == 3  # one black per channel
    assert (seen["squash"][:, :, :14] > seen["center"].max()).all()


# Broken pictures


def test_a_broken_picture_stops_nothing(
    tmp_path: Path, model: hvt.HVT, pictures: list[str]
) -> None:
    text, cut, empty = (tmp_path / name for name in ("text.jpg", "cut.png", "empty.png"))
    text.write_text("not a picture")
    cut.write_bytes(Path(pictures[0]).read_bytes()[:4000])
    empty.touch()
    listed: list[Any] = [pictures[0], text, cut, pictures[1], empty, tmp_path, tmp_path / "no.png"]
    opened = Image.open(cut)
    predictor = Predictor(model, batch_size=3)
    answers = predictor([*listed, opened, pictures[2]])
    assert [answer.source for answer in answers] == [*map(str, listed), str(cut), pictures[2]]
    good = [i for i, answer in enumerate(answers) if answer.error is None]
    assert good == [0, 3, 8]
    assert [answers[i].classes for i in good] == [predictor(p).classes for p in pictures[:3]]
    assert answers[1].error == "its content is not in a picture format"
    assert answers[4].error == "the file is empty"
    assert answers[6].error == "there is no such file"
    assert answers[2].error == answers[7].error
    assert answers[1].classes == answers[1].probabilities == ()
    assert answers[1].to_dict() == {"source": str(text), "top": [], "error": answers[1].error}
    assert list(answers[0].to_dict()) == ["source", "top"]


# Checkpoints


def test_a_model_without_a_classifier(tmp_path: Path, build: Build) -> None:
    model = build("hvt_ti_1", num_classes=0)
    hvt.save(model, tmp_path / "features.safetensors")
    with pytest.raises(HVTError, match=r"features\.safetensors has no classifier"):
        Predictor(tmp_path / "features.safetensors")
    with pytest.raises(HVTError, match="the model has no classifier"):
        Predictor(model)


def test_wrong_numbers_and_devices(model: hvt.HVT) -> None:
    for name in ("top", "batch_size"):
        with pytest.raises(HVTError, match=f"{name}=0 must be at least 1"):
            Predictor(model, **{name: 0})
    for device in ("gpu", "cuda:99", "xla"):
        with pytest.raises(HVTError, match=f"the device '{device}' is not there"):
            Predictor(model, device=device)
    assert find_device("cpu") == torch.device("cpu")
    assert find_device(torch.device("cpu")) == torch.device("cpu")


def test_the_built_in_model(pictures: list[str]) -> None:
    assert built_in().stat().st_size <= 12e6
    predictor = Predictor(top=200)
    answer = predictor(pictures[0])
    assert len(answer.classes) == 100
    assert {"apple", "maple_tree", "willow_tree", "worm"} < set(answer.classes)
    assert predictor.model.config.image[0] <= 64
    assert predictor.model.pretrained_cfg["crop_pct"] == 1.0
    assert sum(answer.probabilities) == pytest.approx(1, abs=1e-4)


def test_the_built_in_model_knows_its_classes(tmp_path: Path) -> None:
    """On CIFAR-100's first 400 test pictures it is as good as docs/built-in.md says of all."""
    unpack = real_data("unpack.py")
    subprocess.run([sys.executable, unpack, tmp_path], check=True, capture_output=True)
    test = open_eval("cifar100", root=tmp_path).val
    assert isinstance(test, ArrayPictures)
    predictor = Predictor(top=1)
    answers = predictor([Image.fromarray(picture) for picture in test.images[:400].numpy()])
    named = [predictor.class_names.index(answer.classes[0]) for answer in answers]
    right = (torch.tensor(named) == test.labels[:400]).float().mean()
    said = re.search(r"top-1 \*\*([0-9.]+) %", (DOCS / "built-in.md").read_text())
    assert said is not None
    assert 100 * right == pytest.approx(float(said[1]), abs=7)  # three deviations of 400 draws


def test_what_is_a_checkpoint(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.pth", "c.PT", "d/pytorch_model.bin"):
        assert is_checkpoint(name)
    for name in ("a.jpg", "b", "safetensors", str(tmp_path)):
        assert not is_checkpoint(name)
    (tmp_path / "model.safetensors").touch()  # a run's folder, or Hugging Face's
    assert is_checkpoint(str(tmp_path))


# Which pictures


@pytest.fixture
def album(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = ("a.png", "b.JPG", "notes.txt", "more/c.webp", "more/deep/d.gif", ".hidden/e.png",
             ".f.png", "odd[1].png", "empty/readme.md")  # fmt: skip
    for file in files:
        path = tmp_path / "album" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "album"


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["album"], ["a.png", "b.JPG", "more/c.webp", "more/deep/d.gif", "odd[1].png"]),
        (["album/more"], ["more/c.webp", "more/deep/d.gif"]),
        (["album/notes.txt"], ["notes.txt"]),  # named, so asked for
        (["album/odd[1].png"], ["odd[1].png"]),  # a file's name before a pattern
        (["album/*.png"], ["a.png", "odd[1].png"]),
        (["album/?.png", "album/a.png"], ["a.png", "a.png"]),
        (["album/[ab].*"], ["a.png", "b.JPG"]),
        (["album/*"], ["a.png", "b.JPG", "more/c.webp", "more/deep/d.gif", "odd[1].png"]),
        (["album/**/*.gif"], ["more/deep/d.gif"]),
        (["album/more/../*.JPG"], ["more/../b.JPG"]),
        (["album/b.JPG", "album/a.png"], ["b.JPG", "a.png"]),  # in the order given
    ],
)
@pytest.mark.parametrize("absolute", [False, True])
def test_paths_folders_and_globs(
    album: Path, patterns: list[str], expected: list[str], absolute: bool
) -> None:
    if absolute:
        patterns = [str(album.parent / pattern) for pattern in patterns]
    start = str(album.parent) + "/" if absolute else ""
    assert find_pictures(patterns) == [f"{start}album/{name}" for name in expected]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("album/none.png", r"there is no file album/none\.png"),
        ("album/empty", "the folder album/empty has no pictures in it"),
        ("album/*.tiff", r"no picture matches album/\*\.tiff"),
        ("album/empty/*", r"no picture matches album/empty/\*"),
    ],
)
def test_nothing_to_look_at(album: Path, pattern: str, message: str) -> None:
    with pytest.raises(HVTError, match=message):
        find_pictures(["album/a.png", pattern])
