"""Sources open by name and by path, split as promised, and refuse bad input in one sentence."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from data_paths import real_data
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from shards import write_shards

from hvt.data.check import check
from hvt.data.fingerprint import identity
from hvt.data.images import UnreadableImageError
from hvt.data.packed import read_names
from hvt.data.sources import Data, open_data, open_eval, open_parts, split_stratified
from hvt.data.splits import subsample
from hvt.errors import HVTError


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    unpack = real_data("unpack.py")
    root = tmp_path_factory.mktemp("cifar")
    subprocess.run([sys.executable, unpack, root], check=True, capture_output=True)
    return root


def save_image(path: Path, shade: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (5, 4), (shade % 256, 0, 0)).save(path)
    return path


def classes(folder: Path, **counts: int) -> Path:
    for name, count in counts.items():
        for number in range(count):
            save_image(folder / name / f"{number:03}.png", number)
    return folder


def sentence(error: pytest.ExceptionInfo[HVTError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    assert not message.endswith(".")
    return message


# Splits


@given(
    st.lists(st.integers(0, 5), min_size=2, max_size=120),
    st.floats(0.01, 0.99),
    st.integers(0, 2**40),
)
def test_split_properties(labels: list[int], fraction: float, seed: int) -> None:
    counts = Counter(labels)
    if max(counts.values()) < 2:
        with pytest.raises(HVTError, match="not enough images"):
            split_stratified(labels, fraction, seed)
        return
    train, val = split_stratified(labels, fraction, seed)
    assert sorted(train + val) == list(range(len(labels)))
    assert (train, val) == (sorted(train), sorted(val))
    assert (train, val) == split_stratified(torch.tensor(labels), fraction, seed)
    in_val = Counter(labels[i] for i in val)
    for label, count in counts.items():
        if count == 1:
            assert in_val[label] == 0
        else:
            assert 1 <= in_val[label] < count
            assert abs(in_val[label] - count * fraction) <= 1


@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=60), st.floats(0.01, 0.99), st.integers(0, 9)
)
def test_subsampling_empties_no_class(labels: list[int], fraction: float, seed: int) -> None:
    """It is the second part of a split, and the only image of a class beside."""
    kept = subsample(labels, fraction, seed)
    assert {labels[index] for index in kept} == set(labels)
    alone = {index for index, label in enumerate(labels) if labels.count(label) == 1}
    if len(alone) < len(set(labels)):
        assert set(kept) - alone == set(split_stratified(labels, fraction, seed)[1])
    assert kept == sorted(kept)


def test_split_is_the_same_everywhere() -> None:
    assert split_stratified([0, 1] * 10, 0.2, 0)[1] == [13, 16, 17, 18]
    assert split_stratified([0, 1] * 10, 0.2, 1)[1] == [10, 13, 15, 18]


# Digits


def test_digits() -> None:
    data = open_data("digits")
    assert (len(data.train), len(data.val)) == (1438, 359)
    assert data.class_names == tuple("0123456789")
    assert (data.held_out, data.name) == (False, "digits")
    assert data.train.images.dtype == torch.uint8
    assert data.train.images.shape == (1438, 8, 8, 3)
    assert (data.train.images.min(), data.train.images.max()) == (0, 255)
    assert data.train.labels.dtype == torch.int64
    image, label = data.val[0]
    assert (image.mode, image.size, type(label)) == ("RGB", (8, 8), int)
    assert Counter(data.val.labels.tolist()).keys() == set(range(10))
    other = open_data("digits", seed=5, val_fraction=0.5)  # the split is the same for everybody
    assert torch.equal(data.val.images, other.val.images)


def test_holdout_never_touches_the_official_split() -> None:
    whole, held = open_data("digits"), open_data("digits", holdout=0.25, seed=3)
    assert held.held_out
    assert len(held.train) + len(held.val) == len(whole.train)
    both = torch.cat([held.train.images, held.val.images]).flatten(1)
    ours, official = (sorted(map(bytes, x.numpy())) for x in (both, whole.train.images.flatten(1)))
    assert ours == official
    other = open_data("digits", holdout=0.25, seed=4).val
    assert not torch.equal(other.images, held.val.images)


def test_digits_labels_follow_the_models_classes() -> None:
    plain, turned = open_eval("digits"), open_eval("digits", class_names="9876543210")
    assert turned.class_names == plain.class_names[::-1]
    assert [turned.val[i][1] for i in range(50)] == [9 - plain.val[i][1] for i in range(50)]


# CIFAR


def test_cifar100(cifar: Path) -> None:
    data = open_data("cifar100", root=cifar)
    assert data.train.images.shape == (50000, 32, 32, 3)
    assert data.val.images.shape == (10000, 32, 32, 3)
    assert data.train.images.is_contiguous()
    assert data.train.images.dtype == torch.uint8
    assert (data.class_names[0], data.class_names[99], len(data.class_names)) == (
        "apple",
        "worm",
        100,
    )
    assert not data.held_out
    assert Counter(data.val.labels.tolist()) == dict.fromkeys(range(100), 100)


def test_cifar100_in_grey_is_as_pillow_has_it(cifar: Path) -> None:
    grey = open_eval("cifar100", root=cifar, in_chans=1).val
    colour = open_eval("cifar100", root=cifar).val
    assert len(grey) == 10000
    for index in range(0, 10000, 199):
        assert grey[index][0].tobytes() == colour[index][0].convert("L").tobytes()
        assert grey[index][1] == colour[index][1]


def test_absent_cifar(tmp_path: Path) -> None:
    with pytest.raises(HVTError, match=r"cifar10 is not in .*--download.*cifar-10-batches-py"):
        open_data("cifar10", root=tmp_path)


# Folders


def test_folder_with_train_and_val(tmp_path: Path) -> None:
    classes(tmp_path / "train", cat=3, dog=4)
    classes(tmp_path / "val", dog=2)
    data = open_data(str(tmp_path))
    assert data.class_names == ("cat", "dog")
    assert data.train.labels == [0] * 3 + [1] * 4
    assert data.val.labels == [1, 1]
    assert data.train.paths[0] == tmp_path / "train" / "cat" / "000.png"
    assert not data.held_out
    image, label = data.val[1]
    assert (image.mode, image.getpixel((0, 0)), label) == ("RGB", (1, 0, 0), 1)
    assert open_data(tmp_path, in_chans=1).train[0][0].mode == "L"


PAIR = {"cat": 3, "dog": 3}


@pytest.mark.parametrize(
    ("folders", "names", "sizes"),
    [
        ({"train": PAIR, "validation": PAIR}, "cat dog", (6, 6)),
        ({"train": PAIR, "Val": PAIR}, "cat dog", (6, 6)),
        ({"train": PAIR, "test": PAIR}, "cat dog", (6, 6)),
        ({"train": PAIR, "test": {"cat": 1}, "val": PAIR}, "cat dog", (6, 6)),  # val goes first
        ({"train": PAIR}, "cat dog", (4, 2)),
        ({"train": PAIR, "test": {}}, "cat dog", (4, 2)),  # a test part without labels
        ({".": PAIR | {"train": 3}}, "cat dog train", (6, 3)),  # a class may be called train
        # Images in a val beside classes are training images too, so they can validate nothing.
        ({".": PAIR, "val": PAIR}, "cat dog val", (9, 3)),
    ],
)
def test_layouts(
    tmp_path: Path, folders: dict[str, dict[str, int]], names: str, sizes: tuple[int, int]
) -> None:
    for part, counts in folders.items():
        (tmp_path / part).mkdir(exist_ok=True)
        classes(tmp_path / part, **counts)
    data = open_data(tmp_path)
    assert data.class_names == tuple(names.split())
    assert (len(data.train), len(data.val)) == sizes
    assert data.held_out == (sizes != (6, 6))


def test_folder_of_class_folders(tmp_path: Path) -> None:
    classes(tmp_path, cat=20, dog=10, emu=2, fox=1)
    data = open_data(tmp_path, val_fraction=0.2)
    assert Counter(data.val.labels) == {0: 4, 1: 2, 2: 1}
    assert Counter(data.train.labels) == {0: 16, 1: 8, 2: 1, 3: 1}
    assert not set(data.train.paths) & set(data.val.paths)
    assert data.held_out
    again, other = (open_data(tmp_path, val_fraction=0.2, seed=s) for s in (0, 1))
    assert again.val.paths == data.val.paths != other.val.paths


@pytest.mark.skipif(sys.platform != "linux", reason="names are any bytes on Linux alone")
def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    for name in (b"caf\xe9", b"dog"):
        save_image(tmp_path / os.fsdecode(name) / os.fsdecode(b"\xff.png"))
    parts = open_parts(tmp_path)
    assert parts.class_names == ("caf\\xe9", "dog")
    assert parts.train[0][0].size == (5, 4)
    empty = parts.train.path(0)
    empty.write_bytes(b"")
    with pytest.raises(UnreadableImageError, match=re.escape("caf\\xe9/\\xff.png cannot be read")):
        parts.train[0]
    report = json.dumps(check(tmp_path).to_dict(), ensure_ascii=False)
    assert "caf\\\\xe9/\\\\xff.png" in report.encode().decode()


def test_what_counts_as_an_image(tmp_path: Path) -> None:
    folder = classes(tmp_path, cat=1, dog=1)
    for name in ("UPPER.PNG", "deep/er/nested.jpeg", ".hidden.png", ".hidden/image.png"):
        save_image(folder / "cat" / name)
    save_image(folder / ".cache" / "image.png")
    save_image(folder / "loose.png")
    (folder / "cat" / "notes.txt").write_text("not an image")
    (folder / "dog" / "linked.png").symlink_to(folder / "cat" / "000.png")
    (folder / "dog" / "more").symlink_to(folder / "cat" / "deep", target_is_directory=True)
    (folder / "dog" / "round").symlink_to(folder / "dog", target_is_directory=True)
    (folder / "dog" / "nowhere.png").symlink_to(folder / "gone.png")
    parts = open_parts(folder)
    assert [str(path.relative_to(folder)) for path in parts.train.paths] == [
        "cat/000.png", "cat/UPPER.PNG", "cat/deep/er/nested.jpeg", "dog/000.png",
        "dog/linked.png", "dog/more/er/nested.jpeg", "dog/nowhere.png",
    ]  # fmt: skip
    assert parts.train.labels == [0, 0, 0, 1, 1, 1, 1]
    assert sorted(Path(path).name for path in parts.ignored) == ["loose.png", "notes.txt"]
    with pytest.raises(UnreadableImageError, match=r"nowhere\.png cannot be read .* no such file"):
        parts.train[6]


def test_a_folder_called_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classes(tmp_path / "digits", one=2, two=2)
    monkeypatch.chdir(tmp_path)
    assert open_data("./digits").class_names == ("one", "two")
    assert len(open_data("digits").class_names) == 10


def test_imagenet(tmp_path: Path) -> None:
    classes(tmp_path / "train", n01440764=2, n01443537=3)
    with pytest.raises(HVTError, match="val does not exist: pass --root"):
        open_data("imagenet", root=tmp_path)
    classes(tmp_path / "val", n01440764=1, n01443537=1)
    data = open_data("imagenet", root=tmp_path)
    assert (data.class_names, len(data.train)) == (("n01440764", "n01443537"), 5)


# Evaluation


def test_eval_says_whether_there_is_a_validation_part(tmp_path: Path) -> None:
    classes(tmp_path / "train", cat=4, dog=4)
    data = open_eval(tmp_path)  # all images, where there is none
    assert (data.validation_part, len(data.val), data.class_names) == (False, 8, ("cat", "dog"))
    assert not isinstance(data, Data)
    assert not open_data(tmp_path).validation_part
    classes(tmp_path / "val", cat=1, dog=1)
    assert (open_eval(tmp_path).validation_part, len(open_eval(tmp_path).val)) == (True, 2)
    assert open_eval("digits").validation_part


def test_eval_needs_no_train_folder(tmp_path: Path) -> None:
    classes(tmp_path / "val", cat=3)
    assert len(open_eval(tmp_path).val) == 3
    with pytest.raises(HVTError, match="has no train folder"):
        open_data(tmp_path)


def test_eval_labels_follow_the_classes_of_training_or_of_a_model(tmp_path: Path) -> None:
    classes(tmp_path / "parts" / "train", cat=1, dog=1, emu=1)
    classes(tmp_path / "parts" / "val", emu=2)
    data = open_eval(tmp_path / "parts")
    assert (data.class_names, data.val[0][1]) == (("cat", "dog", "emu"), 2)
    shutil.rmtree(tmp_path / "parts")
    classes(tmp_path, dog=1, emu=2)
    data = open_eval(tmp_path, class_names=["ant", "emu", "dog"])
    assert [label for _, label in (data.val[i] for i in range(3))] == [2, 1, 1]
    assert data.class_names == ("ant", "emu", "dog")
    with pytest.raises(HVTError, match=r"the class 'emu' .* not among the model's 2 classes"):
        open_eval(tmp_path, class_names=["ant", "dog"])


# Bad input


def text_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("words")
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "gone", "gone: No such file or directory; give a"),
        (lambda p: p / ("long" * 100), "cannot read the folder .*: File name too long"),
        (lambda p: p, "is empty: expected class folders such as"),
        (lambda p: text_file(p / "words.txt"), "words.txt: Not a directory; give a readable"),
        (lambda p: save_image(p / "a.png").parent, "has images but no class folders: put"),
        (lambda p: classes(p, cat=9), "has only the class 'cat': .* at least two class folders"),
        (
            lambda p: text_file(classes(p, cat=2) / "dog" / "a.txt").parents[1],
            "dog has no images: add some or remove the folder",
        ),
        (lambda p: classes(p, cat=1, dog=1), "not enough images to split"),
        (
            lambda p: classes(classes(p / "train", cat=2, dog=2).parent / "val", dug=1).parent,
            "dug is a class that is not in the training data: .*; did you mean dog?",
        ),
        (
            lambda p: save_image(
                classes(p / "train", cat=2, dog=2).parent / "val" / "a.png"
            ).parents[1],
            "val has images but no class folders: put",
        ),
    ],
)
def test_bad_folders(tmp_path: Path, make: object, message: str) -> None:
    with pytest.raises(HVTError, match=message) as caught:
        open_data(make(tmp_path))
    sentence(caught)


@pytest.mark.parametrize(
    ("name", "offer"),
    [("digit", "did you mean digits?"), ("xyz", "known: cifar10, cifar100, digits, imagenet")],
)
def test_unknown_source(name: str, offer: str) -> None:
    expected = f"'{name}' is neither a folder nor a known source: {offer}"
    with pytest.raises(HVTError, match=re.escape(expected)):
        open_data(name)


# Hugging Face and WebDataset


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(HVTError, match=r"pip install datasets$") as caught:
        open_data("hfds/mnist")
    sentence(caught)


@pytest.fixture
def hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set as the `datasets` package reads it."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    folder = tmp_path / "hub"
    for part, size in (("train", 6), ("validation", 4)):
        for number in range(size):
            save_image(folder / part / ("cat", "dog")[number % 2] / f"{number}.png", number)
    return folder


def test_hugging_face_data(hub_folder: Path, tmp_path: Path) -> None:
    data = open_data(f"hfds/{hub_folder}", root=tmp_path / "cache")
    assert (len(data.train), len(data.val), data.class_names) == (6, 4, ("cat", "dog"))
    assert sorted(data.train.labels) == [0, 0, 0, 1, 1, 1]
    for image, label in (data.train[i] for i in range(6)):
        assert (image.mode, image.size) == ("RGB", (5, 4))
        assert image.getpixel((0, 0))[0] % 2 == label
    turned = open_eval(f"hfds/{hub_folder}", root=tmp_path / "cache", class_names=("dog", "cat"))
    assert sorted(turned.val.labels) == [0, 0, 1, 1]
    assert turned.val[0][0].getpixel((0, 0))[0] % 2 == 1 - turned.val[0][1]
    with pytest.raises(HVTError, match=r"hfds/.*absent cannot be opened") as caught:
        open_data(f"hfds/{hub_folder / 'absent'}", root=tmp_path / "cache")
    sentence(caught)


def test_hugging_face_splits_and_columns(
    hub_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validation split that is missing, or has no labels, is cut from the training data."""
    datasets = pytest.importorskip("datasets")
    whole = datasets.load_dataset(str(hub_folder), cache_dir=str(tmp_path / "cache"))
    test = whole["train"].map(lambda row: row | {"label": -1}, load_from_cache_file=False)
    splits = datasets.DatasetDict(train=whole["train"], test=test)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **options: splits)
    data = open_data("hfds/mine", val_fraction=0.3)
    assert (len(data.train), data.held_out) == (4, True)
    assert len(open_eval("hfds/mine").val) == 6
    splits = datasets.DatasetDict(train=whole["train"].rename_column("label", "kind"))
    with pytest.raises(HVTError, match="hfds/mine cannot be opened with an image and a number"):
        open_data("hfds/mine")
    splits = datasets.DatasetDict(other=whole["train"])
    with pytest.raises(HVTError, match="hfds/mine has no split called train or validation"):
        open_eval("hfds/mine")


def test_webdataset_shards(tmp_path: Path) -> None:
    write_shards(tmp_path, {"train": [12, 8], "validation": [6]}, label=lambda shade: shade % 2)
    assert open_data(f"wds/{tmp_path}").class_names == ()
    (tmp_path / "classes.txt").write_text("even\nodd\n")
    data = open_data(f"wds/{tmp_path.name}", root=tmp_path.parent, holdout=0.2)
    assert (len(data.train), len(data.val), data.class_names) == (16, 4, ("even", "odd"))
    for image, label in (data.train[i] for i in range(16)):
        assert (image.size, image.getpixel((0, 0))[0] % 2) == ((20, 16), label)
    turned = open_eval(f"wds/{tmp_path}", class_names=("odd", "even"))
    assert [turned.val[i][1] for i in range(6)] == [1, 0, 1, 0, 1, 0]
    before = identity(open_data(f"wds/{tmp_path}"))
    write_shards(tmp_path, {"train": [11, 9], "validation": [6]}, label=lambda shade: shade % 2)
    after = identity(open_data(f"wds/{tmp_path}"))
    changed = [name for name in before if before[name] != after[name]]
    assert changed == ["training images"]


def test_shards_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(HVTError, match=r"has no tar files called \*train\*\.tar or"):
        open_data(f"wds/{tmp_path}")
    write_shards(tmp_path, {"train": [4]}, label=lambda shade: shade % 2)
    (tmp_path / "classes.txt").write_text("even\n")
    with pytest.raises(HVTError, match="has the label 1 but only 1 class names: name them all"):
        open_eval(f"wds/{tmp_path}")
    shard = tmp_path / "train-0.tar"
    shard.write_bytes(b"x" * 1024)
    with pytest.raises(HVTError, match=r"train-0\.tar cannot be read as a shard of WebDataset"):
        open_data(f"wds/{tmp_path}")
    with tarfile.open(shard, "w") as tar:
        tar.add(save_image(tmp_path / "7.png"), "7.png")
    with pytest.raises(HVTError, match=r"train-0\.tar has no label 7\.cls"):
        open_data(f"wds/{tmp_path}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"even\n\nodd\n", "line 2 of .*classes.txt is empty: give each class its line"),
        ("gr\u00fcn\nrot\n".encode("latin-1"), "classes.txt cannot be read as UTF-8 text"),
    ],
)
def test_names_that_cannot_be_right_are_an_error(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "classes.txt").write_bytes(content)
    with pytest.raises(HVTError, match=message) as caught:
        read_names(tmp_path / "classes.txt")
    sentence(caught)
    (tmp_path / "classes.txt").write_bytes(b"\xef\xbb\xbfeven \r\nodd\r\n\r\n")
    assert read_names(tmp_path / "classes.txt") == ("even", "odd")


# Identity


def test_a_moved_folder_is_the_same_and_a_replaced_image_is_not(tmp_path: Path) -> None:
    folder = classes(tmp_path / "here", cat=40, dog=40)
    before = identity(open_data(folder))
    names = [f"{what}{part} images" for part in ("training", "validation")
             for what in ("number of ", "")]  # fmt: skip
    assert list(before) == names
    copied = Path(shutil.copytree(folder, tmp_path / "there" / "copy"))
    assert identity(open_data(copied)) == before

    def changed(path: Path) -> list[str]:
        after = identity(open_data(folder))
        return [name for name in names if after[name] != before[name]]

    data = open_data(folder)
    path = data.train.paths[3]
    content = path.read_bytes()
    path.write_bytes(content + b"\0")
    assert changed(path) == ["training images"]
    path.write_bytes(content[:-1] + b"\0")  # of the same size, among the files that are read
    assert changed(path) == ["training images"]
    path.write_bytes(content)
    assert changed(path) == []
    path.rename(path.with_name("other.png"))
    assert "training images" in changed(path)


def test_a_link_to_nothing_has_an_identity(tmp_path: Path) -> None:
    folder = classes(tmp_path, cat=4, dog=4)
    (folder / "cat" / "gone.png").symlink_to("nothing.png")
    assert identity(open_data(folder))["number of training images"] == "7"
    assert len(identity(open_data("digits"))) == 4
