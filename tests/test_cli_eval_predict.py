"""`hvt eval` and `hvt predict` from the command line: tables, JSON, CSV, exit codes, bad input."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Command
from PIL import Image

import hvt

Build = Callable[..., hvt.HVT]


@pytest.fixture
def digits(build: Build, tmp_path: Path) -> Path:
    """A checkpoint for the digits, with their names."""
    model = build("hvt_ti_1", img_size=8, patch_size=1, depth=2)
    model.pretrained_cfg.update(crop_pct=1.0, label_names=tuple("0123456789"))
    hvt.save(model, tmp_path / "digits.safetensors")
    return tmp_path / "digits.safetensors"


@pytest.fixture
def animals(build: Build, tmp_path: Path) -> Path:
    """A checkpoint that knows four animals."""
    model = build("hvt_ti_1", num_classes=4, depth=2)
    hvt.save(model, tmp_path / "animals.safetensors", class_names=["ant", "bee", "cat", "dog"])
    return tmp_path / "animals.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images of ants and five of cats: two of the classes that the model knows."""
    draw = np.random.default_rng(0)
    for name, count in (("ant", 3), ("cat", 5)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(count):
            pixels = draw.integers(0, 256, (80, 70, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    return tmp_path / "images"


def break_one(folder: Path) -> Path:
    path = folder / "cat" / "2.png"
    path.write_bytes(path.read_bytes()[:500])
    return path


# eval


def test_eval_as_json(command: Command, digits: Path) -> None:
    code, out, err = command("eval", digits, "--data", "digits", "--json")
    assert (code, err) == (0, "")
    said, score = json.loads(out), hvt.evaluate(digits, "digits").to_dict()
    assert said.pop("images_per_second") > 0
    assert score.pop("images_per_second") > 0
    assert [said.pop(key) for key in ("checkpoint", "data")] == [str(digits), "digits"]
    assert (said.pop("matched_by"), said.pop("validation_part")) == ("name", True)
    assert said == score
    assert (said["images"], len(said["per_class"])) == (359, 10)


def test_eval_as_a_table(command: Command, digits: Path) -> None:
    code, out, _ = command("eval", digits, "--data", "digits", "--batch-size", 100)
    assert code == 0
    first, matched, *table = out.splitlines()
    assert first.startswith("top-1 ")
    assert "359 images" in first
    shares = [float(line.split()[1]) for line in table[1:]]
    assert len(shares) == 10
    assert shares == sorted(shares)  # the hardest first
    assert {line.split()[0] for line in table[1:]} == set("0123456789")
    assert matched == "classes matched by name: 10 of the model's 10"


def test_eval_on_some_of_the_classes(command: Command, animals: Path, folder: Path) -> None:
    """Labels go by name: the folder's second class is the model's third."""
    code, out, _ = command("eval", animals, "--data", folder, "--json", "--workers", 0)
    assert code == 0
    said = json.loads(out)
    answers = hvt.Predictor(animals)([str(path) for path in sorted(folder.rglob("*.png"))])
    labels = [Path(answer.source).parent.name for answer in answers]
    right = [answer.name == label for answer, label in zip(answers, labels, strict=True)]
    assert said["top1"] == pytest.approx(100 * sum(right) / 8)
    assert said["top5"] == 100
    assert [(one["name"], one["images"]) for one in said["per_class"]] == [("ant", 3), ("cat", 5)]


def test_eval_of_all_images_says_so(command: Command, animals: Path, folder: Path) -> None:
    """A model trained on class folders alone has seen nine tenths of them."""
    _, out, _ = command("eval", animals, "--data", folder, "--workers", 0)
    line = (
        f"all 8 images: {folder} has no validation split, so a model trained on it has seen most "
        "of them"
    )
    assert line in out.splitlines()
    _, out, _ = command("eval", animals, "--data", folder, "--workers", 0, "--json")
    assert json.loads(out)["validation_part"] is False


def test_eval_of_classes_that_are_all_unknown(
    command: Command, build: Build, folder: Path, tmp_path: Path
) -> None:
    """Equally many is not enough: their order decides only if that is asked for."""
    other = tmp_path / "other.safetensors"
    hvt.save(build("hvt_ti_1", num_classes=2), other, class_names=["[red]zebu\x1b[31m", "yak"])
    code, out, err = command("eval", other, "--data", folder)
    assert (code, out) == (2, "")
    assert err == (
        f"hvt: the class 'ant' of {folder} is not among the model's 2 classes: if both have the "
        "same classes in the same order, use --match-by-order\n"
    )
    code, out, _ = command("eval", other, "--data", folder, "--match-by-order")
    assert code == 0
    assert "classes matched by order: ant = [red]zebu\\x1b[31m, cat = yak\n" in out
    code, out, _ = command("eval", other, "--data", folder, "--match-by-order", "--json")
    matched = [(one["data"], one["name"]) for one in json.loads(out)["matched"]]
    assert matched == [("ant", "[red]zebu\x1b[31m"), ("cat", "yak")]


@pytest.mark.parametrize("workers", [0, 1])
def test_eval_stops_at_a_broken_image(
    command: Command, animals: Path, folder: Path, workers: int
) -> None:
    broken = break_one(folder)
    words = ("eval", animals, "--data", folder, "--workers", workers)
    code, out, err = command(*words)
    assert (code, out) == (2, "")
    assert err.startswith(f"hvt: {broken} cannot be read as an image: ")
    assert err.count("\n") == 1
    said = json.loads(command(*words, "--skip-broken", "--json")[1])
    assert (said["images"], said["skipped"]) == (7, 1)
    assert "1 unreadable images were skipped" in command(*words, "--skip-broken")[1]


def test_bad_input_is_one_line(
    command: Command, build: Build, digits: Path, tmp_path: Path
) -> None:
    features, void = tmp_path / "features.safetensors", tmp_path / "void"
    hvt.save(build("hvt_ti_1", num_classes=0), features)
    void.mkdir()
    good = tmp_path / "good.png"
    Image.new("RGB", (9, 9)).save(good)
    for words, message in (
        (("eval", "nothing.safetensors", "--data", "digits"), "cannot read nothing.safetensors"),
        (("eval", features, "--data", "digits"), "has no classifier"),
        (("eval", digits, "--data", "digit"), "did you mean digits?"),
        (("eval", digits, "--data", void), "is empty"),
        (("eval", digits, "--data", "digits", "--device", "gpu"), "'gpu' is not available"),
        (("eval", digits, "--data", "digits", "--confusion", "no/c.png"), "does not exist"),
        (("predict", digits), "no image is given"),
        (("predict", digits, "none.png"), "there is no file none.png"),
        (("predict", digits, good, void), "no images in"),
        (("predict", digits, tmp_path / "*.tiff"), "no images in"),
        (("predict", digits, good, "--json", "--csv"), "not allowed with"),
        (("predict",), "no image is given"),
    ):
        code, out, err = command(*words)
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1


# predict


def test_predict_as_json(command: Command, animals: Path, folder: Path) -> None:
    code, out, err = command("predict", animals, folder, "--json", "--top", 9)
    assert (code, err) == (0, "")
    said = json.loads(out)
    paths = [str(path) for path in sorted(folder.rglob("*.png"))]
    assert said == [answer.to_dict() for answer in hvt.Predictor(animals, top=9)(paths)]
    assert [len(one["top"]) for one in said] == [4] * 8  # four classes are all there are


def test_predict_as_csv(command: Command, animals: Path, folder: Path) -> None:
    broken = break_one(folder)
    code, out, _ = command("predict", animals, folder / "cat", "--csv", "--top", 2)
    assert code == 1
    rows = list(csv.DictReader(io.StringIO(out)))
    assert list(rows[0]) == ["source", "rank", "label", "name", "probability", "error"]
    assert "\r" not in out
    assert len(rows) == 4 * 2 + 1
    (bad,) = (row for row in rows if row["error"])
    assert list(bad.values())[:5] == [str(broken), "", "", "", ""]
    for row in rows:
        if row is not bad:
            answer = hvt.Predictor(animals, top=2)(row["source"])
            score = answer.top[int(row["rank"]) - 1]
            assert (row["label"], row["name"]) == (str(score.label), score.name)
            assert float(row["probability"]) == pytest.approx(score.probability, abs=1e-5)


def test_predict_as_a_table(command: Command, animals: Path, folder: Path) -> None:
    odd = folder / "ant" / "[red]a very long name that no table may cut or wrap[1].png"
    (folder / "ant" / "0.png").rename(odd)
    broken = break_one(folder)
    code, out, err = command("predict", animals, folder / "ant", folder / "cat" / "*.png")
    assert (code, err) == (1, "")
    heading, *lines = out.splitlines()
    assert heading.split()[0] == "image"
    assert len(lines) == 8
    for line, path in zip(lines, [*sorted((folder / "ant").iterdir()),
                                  *sorted((folder / "cat").iterdir())], strict=True):  # fmt: skip
        assert line.strip().startswith(str(path))
        if path == broken:
            assert "cannot be read: " in line
        else:
            best = hvt.Predictor(animals)(str(path))
            share = f"{best.name} {100 * best.probability:.0f} %"
            assert line.strip().removeprefix(str(path)).strip().startswith(share)


def test_predict_flags_stand_anywhere(command: Command, animals: Path, folder: Path) -> None:
    one, two = folder / "ant" / "0.png", folder / "cat" / "0.png"
    expected = command("predict", animals, one, two, "--top", 2, "--csv")
    assert expected[0] == 0
    assert command("predict", animals, "--top", 2, one, two, "--csv") == expected
    assert command("predict", animals, one, "--top", 2, "--csv", two) == expected
    assert command("predict", "--csv", "--top", 2, animals, one, two) == expected


def test_names_that_would_steer_the_terminal(
    command: Command, build: Build, folder: Path, tmp_path: Path
) -> None:
    """Escaped where people read, as they are where programs do."""
    names = ["ant\x1b]0;title\x07", "bee\r\nX", "cat\u202e", 'a,"b"']
    model, path = tmp_path / "steering.safetensors", folder / "ant" / "\x1b[2J.png"
    hvt.save(build("hvt_ti_1", num_classes=4), model, class_names=names)
    (folder / "ant" / "0.png").rename(path)
    code, out, _ = command("predict", model, path)
    assert code == 0
    assert not set(out) & {"\x1b", "\x07", "\r", "\u202e"}
    for shown in (r"\x1b[2J.png", r"ant\x1b]0;title\x07", r"bee\r\nX", r"cat\u202e"):
        assert shown in out
    _, out, _ = command("predict", model, path, "--json")
    (answer,) = json.loads(out)
    assert (answer["source"], {g["name"] for g in answer["top"]}) == (str(path), set(names))
    _, out, _ = command("predict", model, path, "--csv")
    rows = list(csv.DictReader(io.StringIO(out, newline="")))
    assert {row["source"] for row in rows} == {str(path)}
    assert {row["name"] for row in rows} == set(names)
