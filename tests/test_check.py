"""`check` reads every image and says all that is wrong with a data set."""

import argparse
import json
from pathlib import Path

import pytest
from hostile import png, tags_of_copies
from PIL import Image

from hvt.cli import check as commands
from hvt.cli.flags import Parser
from hvt.data.check import check
from hvt.data.sources import open_data, open_eval
from hvt.errors import HVTError


def save_image(path: Path, shade: int, mode: str = "RGB", size: tuple[int, int] = (6, 4)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, shade).convert(mode).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of 12 and 11 training images, with all that can be wrong with them."""
    shade = 0
    for part, name, count in (("train", "cat", 12), ("train", "dog", 9), ("val", "cat", 3)):
        for number in range(count):
            shade += 1
            save_image(tmp_path / part / name / f"{number:02}.png", shade)
    save_image(tmp_path / "train" / "dog" / "tall.png", 99, "L", (2, 40))
    (tmp_path / "train" / "cat" / "03.png").write_bytes(b"")
    (tmp_path / "val" / "cat" / "00.png").write_text("words")
    (tmp_path / "train" / "dog" / "notes.txt").write_text("words")
    same = (tmp_path / "train" / "cat" / "05.png").read_bytes()
    (tmp_path / "train" / "dog" / "copy of cat.png").write_bytes(same)
    (tmp_path / "val" / "cat" / "seen.png").write_bytes(same)
    return tmp_path


def run(*argv: str) -> int:
    parser = Parser(prog="hvt")
    commands.register(parser.add_subparsers(parser_class=Parser))
    args: argparse.Namespace = parser.parse_args(argv)
    return args.run(args)


def test_all_that_is_wrong(folder: Path) -> None:
    report = check(folder, workers=3)
    assert not report.clean
    assert [(Path(one.path).name, one.part, one.reason) for one in report.broken] == [
        ("03.png", "train", "the file is empty"),
        ("00.png", "val", "its content is not in an image format"),
    ]
    assert report.images == {"train": 23, "val": 4}
    assert report.classes == {"cat": {"train": 12, "val": 4}, "dog": {"train": 11, "val": 0}}
    assert [Path(path).name for path in report.ignored] == ["notes.txt"]
    assert report.tiny == {}
    (shared,) = report.shared
    assert [(Path(one.path).name, one.part, one.class_name) for one in shared] == [
        ("05.png", "train", "cat"), ("copy of cat.png", "train", "dog"), ("seen.png", "val", "cat"),
    ]  # fmt: skip
    assert report.contradicting == [shared]


def test_a_folder_without_val_is_one_part(tmp_path: Path) -> None:
    for number in range(12):
        save_image(tmp_path / "cat" / f"{number}.png", number)
        save_image(tmp_path / "dog" / f"{number}.png", 100 + number)
    save_image(tmp_path / "emu" / "0.png", 200)
    report = check(str(tmp_path))
    assert report.clean
    assert report.images == {"all": 25}
    assert report.tiny == {"emu": 1}
    assert report.shared == report.contradicting == []


def test_images_that_are_too_large_are_broken(tmp_path: Path) -> None:
    save_image(tmp_path / "cat" / "0.png", 0)
    (tmp_path / "cat" / "1.jpg").write_bytes(png(100_000, 100_000))
    (tmp_path / "cat" / "2.tif").write_bytes(tags_of_copies(200, 1000))
    save_image(tmp_path / "cat" / "3.tif", 3, "LAB")
    Image.new("L", (1, 9000)).save(tmp_path / "cat" / "4.png")
    report = check(tmp_path)
    assert [(Path(one.path).name, one.reason) for one in report.broken] == [
        ("1.jpg", "it has more pixels than the limit (PIL.Image.MAX_IMAGE_PIXELS) allows"),
        ("2.tif", "its content is not in an image format"),
        ("4.png", "its 1 × 9000 pixels are too elongated to resize the shorter side to 256"),
    ]  # fmt: skip


def test_digits_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    report = check("digits")
    assert report.images == {"train": 1438, "val": 359}
    assert run("check", "digits", "--workers", "1") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "every image can be read"


def test_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", str(folder)) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split() == ["part", "images", "broken", "classes"]
    assert lines[1].split() == ["train", "23", "1", "2"]
    assert lines[2].split() == ["val", "4", "1", "1"]
    assert "ignored files, not images: 1" in lines
    assert "the same image in more than one part (1):" in lines
    assert lines[-3:] == [
        "cannot be read (2):",
        f"  {folder}/train/cat/03.png: the file is empty",
        f"  {folder}/val/cat/00.png: its content is not in an image format",
    ]
    assert err == ""
    assert run("check", folder.name, "--root", str(folder.parent), "--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["clean"], result["images"]) == (False, {"train": 23, "val": 4})
    assert [one["reason"] for one in result["broken"]] == [
        one.reason for one in check(folder).broken
    ]


# ── what training cannot use ────────────────────────────────────────────────────────────────────


def test_everything_is_listed_in_one_go(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty class folder and an unknown class hide no broken image."""
    (folder / "train" / "emu").mkdir()
    save_image(folder / "val" / "dug" / "0.png", 77)
    (folder / "val" / "dug" / "1.png").write_bytes(b"")
    report = check(folder)
    assert [Path(one.path).name for one in report.broken] == ["03.png", "00.png", "1.png"]
    assert report.classes["dug"] == {"train": 0, "val": 2}
    assert len(report.problems) == 2
    with pytest.raises(HVTError, match=r"emu has no images: .*val/dug is a class that is not in"):
        open_data(folder)
    with pytest.raises(HVTError, match="val/dug is a class that is not in the training data"):
        open_eval(folder)
    assert run("check", str(folder)) == 1
    lines = capsys.readouterr().out.splitlines()
    place = lines.index("training cannot use this (2):")
    assert lines[place + 1].endswith("emu has no images: add some or remove the folder")
    assert "dug is a class that is not in the training data" in lines[place + 2]
