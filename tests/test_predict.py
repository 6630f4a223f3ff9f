"""A predictor classifies any image as an evaluation would, and a broken one stops nothing."""

import io
import itertools
import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from data_paths import real_data
from PIL import Image

import hvt
from hvt.data.evaluation import eval_transform
from hvt.data.images import FileImages, UnreadableImageError
from hvt.data.loader import EvalBatches
from hvt.data.sources import ArrayImages, open_eval
from hvt.deploy.inputs import find_images, open_image
from hvt.deploy.predict import Prediction, Predictor
from hvt.deploy.runtime import NOT_FINITE
from hvt.elastic import configs_of
from hvt.errors import HVTError
from hvt.evaluation import evaluate

DOCS = Path(__file__).parents[1] / "docs"
Build = Callable[..., hvt.HVT]
NAMES = ("ant", "bee", "cat", "dog", "emu", "fox", "gnu", "hen", "ibex", "jay")


@pytest.fixture
def model(build: Build) -> hvt.HVT:
    """A small model of ten classes with names, for images of 64 pixels taken whole."""
    made = build("hvt_ti_2", depth=2)
    made.pretrained_cfg.update(label_names=NAMES, crop_pct=1.0)
    return made


@pytest.fixture
def images(tmp_path: Path) -> list[str]:
    draw = np.random.default_rng(0)
    paths = [str(tmp_path / f"{number}.png") for number in range(7)]
    for number, path in enumerate(paths):
        pixels = draw.integers(0, 256, (70 + 9 * number, 90, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return paths


def names(prediction: Prediction) -> tuple[str, ...]:
    return tuple(score.name for score in prediction.top)


def odds(prediction: Prediction) -> tuple[float, ...]:
    return tuple(score.probability for score in prediction.top)


# Predictions


def test_predictions_are_those_of_an_evaluation(model: hvt.HVT, images: list[str]) -> None:
    labels = [0, 3, 5, 5, 1, 9, 3]
    batches = EvalBatches(FileImages(images, labels), eval_transform(model), batch_size=3)
    score = evaluate(model, batches, 10)
    predictions = Predictor(model, top=10)(images)
    confusion: Counter[tuple[int, int]] = Counter()
    loss = 0.0
    for prediction, label in zip(predictions, labels, strict=True):
        confusion[label, prediction.label] += 1
        loss -= np.log(odds(prediction)[names(prediction).index(NAMES[label])])
    assert score.confusion == confusion
    assert score.loss == pytest.approx(loss / 7, rel=1e-5)


# Broken images


def test_a_broken_image_stops_nothing(tmp_path: Path, model: hvt.HVT, images: list[str]) -> None:
    text, cut, empty = (tmp_path / name for name in ("text.jpg", "cut.png", "empty.png"))
    text.write_text("not an image")
    cut.write_bytes(Path(images[0]).read_bytes()[:4000])
    empty.touch()
    content = cut.read_bytes()
    listed: list[Any] = [images[0], text, cut, images[1], empty, content, b""]
    opened = Image.open(cut)
    predictor = Predictor(model, batch_size=3)
    predictions = predictor([*listed, opened, images[2]])
    paths = [*map(str, listed[:5]), None, None]
    assert [prediction.source for prediction in predictions] == [*paths, str(cut), images[2]]
    good = [i for i, prediction in enumerate(predictions) if prediction.error is None]
    assert good == [0, 3, 8]
    assert [names(predictions[i]) for i in good] == [names(predictor(p)) for p in images[:3]]
    assert predictions[1].error == "its content is not in an image format"
    assert predictions[4].error == "the file is empty"
    assert predictions[6].error == "the file is empty"
    assert predictions[2].error == predictions[5].error == predictions[7].error
    assert names(predictions[1]) == odds(predictions[1]) == ()
    assert predictions[1].to_dict() == {
        "source": str(text), "label": None, "name": None, "probability": None, "top": [],
        "error": predictions[1].error,
    }  # fmt: skip
    assert predictions[0].to_dict()["error"] is None


def test_one_broken_image_raises(tmp_path: Path, model: hvt.HVT, images: list[str]) -> None:
    cut = tmp_path / "cut.png"
    cut.write_bytes(Path(images[0]).read_bytes()[:4000])
    closed = io.BytesIO(cut.read_bytes())
    closed.close()
    for broken, reason in (
        (cut, r"cut\.png cannot be read as an image"),
        (cut.read_bytes(), "the image cannot be read as an image"),
        (Image.open(cut), r"cut\.png cannot be read as an image"),
        (io.BytesIO(), "the file is empty"),
        (Image.new("RGB", (0, 5)), "it has no pixels"),
        (closed, "closed file"),
        (io.StringIO("text"), "a bytes-like object is required, not 'str'"),
    ):
        with pytest.raises(UnreadableImageError, match=reason):
            Predictor(model)(broken)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(
    value: float, model: hvt.HVT, images: list[str]
) -> None:
    """The model computes no number for two of the images; the others are answered as ever."""
    expected, seen = Predictor(model)(images), iter(range(7))

    def damage(_: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        for row in logits:
            if next(seen) in (2, 5):
                row[3] = value
        return logits

    model.register_forward_hook(damage)
    predictions = Predictor(model, batch_size=4)(images)
    for place in (2, 5):
        assert predictions[place] == Prediction(images[place], error=NOT_FINITE)
        json.dumps(predictions[place].to_dict(), allow_nan=False)
        expected[place] = predictions[place]
    assert [names(prediction) for prediction in predictions] == [
        names(prediction) for prediction in expected
    ]
    seen = itertools.repeat(2)
    with pytest.raises(
        HVTError, match=r"0\.png cannot be classified: the model's output is not finite"
    ):
        Predictor(model)(images[0])


# What is taken for an image


@pytest.mark.parametrize("channels", [1, 3])
def test_16_bits_are_the_same_from_a_path_and_from_an_image(channels: int, tmp_path: Path) -> None:
    """A dark image stays dark: the range is the format's, not that of its values."""
    values = (4 * np.arange(64)).astype(">u2")
    (tmp_path / "dark.pgm").write_bytes(b"P5 8 8 65535\n" + values.tobytes())
    expected = np.asarray(open_image(str(tmp_path / "dark.pgm"), channels))
    assert expected.max() == 1
    with Image.open(tmp_path / "dark.pgm") as opened:
        np.testing.assert_array_equal(np.asarray(open_image(opened, channels)), expected)


def test_every_kind_of_image_gives_one_prediction(model: hvt.HVT, images: list[str]) -> None:
    """One in, one out, and the same prediction whatever it came as."""
    predictor, path = Predictor(model, top=10, batch_size=1), Path(images[0])
    expected = predictor(str(path))
    pixels, content = np.asarray(Image.open(path)), path.read_bytes()
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    written = io.BytesIO()
    written.write(content)  # left at its end, as after Image.save
    with path.open("rb") as file:
        kinds = {
            "path": path, "image": Image.open(path), "array": pixels, "view": pixels[:, ::-1],
            "tensor": tensor, "float": tensor / 255, "double": tensor.double() / 255,
            "half": tensor.half() / 255, "grad": (tensor / 255).requires_grad_(),
            "bytes": content, "bytearray": bytearray(content), "memoryview": memoryview(content),
            "file": file, "BytesIO": written,
        }  # fmt: skip
        predictions = {kind: predictor(image) for kind, image in kinds.items()}
        file.seek(0)
        listed = predictor(list(kinds.values()))
        generated = predictor(image for image in kinds.values())
    assert listed == generated == [predictions[kind] for kind in kinds]
    for kind, prediction in predictions.items():
        named = kind in ("path", "image", "file")
        assert prediction.source == (str(path) if named else None), kind
        if kind != "view":  # the mirror image
            assert prediction.top == expected.top, kind
    flipped = predictor(Image.open(path).transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    assert predictions["view"].top == flipped.top != expected.top


def test_grey_arrays_and_tensors(build: Build, model: hvt.HVT) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (70, 64, 1), dtype=np.uint8)
    for predictor in (Predictor(model), Predictor(build("hvt_ti_1", in_chans=1))):
        expected = predictor(Image.fromarray(grey[:, :, 0]))
        assert predictor(grey) == expected
        assert predictor(torch.from_numpy(grey).permute(2, 0, 1)) == expected


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((8, 8, 3), np.float32), "pixels of float32 are not an image: give uint8"),
        (np.zeros((8, 8), np.uint8), r"\(8, 8\) are not an image: .* \(H, W, C\) with C = 3 for"),
        (np.zeros((2, 8, 8, 3), np.uint8), r"\(2, 8, 8, 3\) .*, and a batch as list\(batch\)"),
        (np.zeros((3, 8, 8), np.uint8), r"\(3, 8, 8\) are not an image"),
        (torch.zeros(3, 8, 8, dtype=torch.int64), "pixels of int64 are not an image"),
        (torch.zeros(8, 8, 3), r"\(8, 8, 3\) .*\(C, H, W\) with C = 3"),
        (torch.full((3, 8, 8), 255.0), "a float tensor from 255 to 255 is not an image: its val"),
        (torch.full((3, 8, 8), math.nan), "a float tensor from nan to nan is not an image"),
        (None, "a value of type NoneType is not an image: give a path, a folder"),
        ({"a.png", "b.png"}, "a value of type set is not an image"),
        ((number for number in range(3)), "a value of type int is not an image"),
        (Path("none.png"), "there is no file none.png"),
        ("x" * 5000, "there is no file x"),
        ("~nobody-of-this-name/a.png", "there is no file ~nobody"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_what_is_not_an_image(image: Any, message: str, model: hvt.HVT) -> None:
    """An error, never a prediction for each row of pixels."""
    predictor = Predictor(model)
    with pytest.raises(HVTError, match=message):
        predictor(image)
    if isinstance(image, np.ndarray | torch.Tensor):
        with pytest.raises(HVTError, match=message):
            predictor([image])


def test_folders_and_globs_give_a_prediction_for_each_image(
    tmp_path: Path, model: hvt.HVT, images: list[str]
) -> None:
    predictor = Predictor(model, batch_size=1)
    expected = predictor(images)
    assert [prediction.source for prediction in expected] == images
    assert predictor(tmp_path) == predictor(str(tmp_path)) == expected
    assert predictor(f"{tmp_path}/*.png") == expected
    assert predictor(tmp_path / "[01].png") == expected[:2]
    assert predictor(tmp_path / "0*.png") == expected[:1]  # a pattern gives a list
    mixed = predictor([images[6], tmp_path, Image.open(images[1])])
    assert [a.source for a in mixed] == [images[6], *images, images[1]]


def test_a_generator_is_read_a_batch_at_a_time(model: hvt.HVT, images: list[str]) -> None:
    read: list[str] = []
    predictions = Predictor(model, batch_size=2).stream(read.append(p) or p for p in images)
    assert read == []
    next(predictions)
    assert read == images[:4]  # the next batch is being decoded


def test_predictions_as_a_table(model: hvt.HVT, images: list[str]) -> None:
    """In one line, with the words that the command and the service use."""
    table = pandas.DataFrame(Predictor(model, top=2)(images))
    assert list(table) == ["source", "label", "name", "probability", "top", "error"]
    assert [NAMES[label] for label in table.label] == list(table.name)


# Checkpoints


def test_models_that_cannot_classify_images(tmp_path: Path, build: Build) -> None:
    model = build("hvt_ti_1", num_classes=0)
    hvt.save(model, tmp_path / "features.safetensors")
    with pytest.raises(HVTError, match=r"features\.safetensors has no classifier"):
        Predictor(tmp_path / "features.safetensors")
    with pytest.raises(HVTError, match="the model has no classifier"):
        Predictor(model)
    with pytest.raises(HVTError, match="has global_pool='', so it classifies each token"):
        Predictor(build("hvt_ti_1", global_pool=""))
    with pytest.raises(HVTError, match="hvt_ti_1 is a model without weights"):
        Predictor("hvt_ti_1")
    for wrong, message in (
        ({"device": "gpu"}, "the device 'gpu' is not available"),
        ({"top": 2.0}, "top=2.0 must be a whole number of at least 1"),
        ({"batch_size": 0}, "batch_size=0 must be a whole number of at least 1"),
    ):
        with pytest.raises(HVTError, match=message):
            Predictor(build("hvt_ti_1"), **wrong)


def test_the_default_model(images: list[str]) -> None:
    predictor = Predictor(top=2000)
    prediction = predictor(images[0])
    assert len(names(prediction)) == 1000
    assert {"tench", "great white shark", "crane (bird)", "Granny Smith"} < set(names(prediction))
    assert not [name for name in names(prediction) if "_" in name]
    assert sum(odds(prediction)) == pytest.approx(1, abs=1e-4)
    model = predictor.model
    assert isinstance(model, hvt.HVT)
    costs = [hvt.cost(config).gflops for config in configs_of(model)]
    assert costs == pytest.approx([1.196, 0.699, 0.455, 0.270], abs=1e-3)
    assert "DeiT-Tiny" in model.pretrained_cfg["origin"]["source"]


@pytest.mark.slow
def test_the_built_in_model_knows_its_classes(tmp_path: Path) -> None:
    """On CIFAR-100's first 400 test images it is as good as docs/built-in.md says of all."""
    unpack = real_data("unpack.py")
    subprocess.run([sys.executable, unpack, tmp_path], check=True, capture_output=True)
    test = open_eval("cifar100", root=tmp_path).val
    assert isinstance(test, ArrayImages)
    predictor = Predictor("cifar100", top=1)
    predictions = predictor([Image.fromarray(image) for image in test.images[:400].numpy()])
    named = [predictor.class_names.index(prediction.name) for prediction in predictions]
    right = (torch.tensor(named) == test.labels[:400]).float().mean()
    page = (DOCS / "built-in.md").read_text()
    said = re.search(r"CIFAR-100's.*?top-1 \*\*([0-9.]+) %", page, re.DOTALL)
    assert said is not None
    assert 100 * right == pytest.approx(float(said[1]), abs=7)  # three deviations of 400 draws


# Which images


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
    assert find_images(patterns) == [f"{start}album/{name}" for name in expected]


def test_links_in_a_circle_end(album: Path) -> None:
    """And others are followed."""
    for name in ("round", "about", "again"):
        (album / name).symlink_to(album, target_is_directory=True)
    results = [f"album/{name}" for name in ("a.png", "odd[1].png")]
    assert find_images(["album/**/*.png"]) == results
    (album.parent / "elsewhere").mkdir()
    (album / "b.JPG").rename(album.parent / "elsewhere/e.png")
    (album / "more/link").symlink_to(album.parent / "elsewhere", target_is_directory=True)
    wanted = {"album/a.png", "album/more/deep/d.gif", "album/more/link/e.png"}
    assert wanted < set(find_images(["album"]))
