"""Scores equal what is counted by hand, each image once, with labels by the classes' names."""

import dataclasses
import math
import multiprocessing
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

from hvt.data.arrays import ArrayImages
from hvt.data.classes import match_classes
from hvt.data.loader import Batch, EvalBatches
from hvt.distributed import DistributedContext
from hvt.errors import HVTError
from hvt.evaluation import Score, evaluate
from hvt.see.confusion import draw_confusion


class Lookup(nn.Module):
    """Gives the logits that the images themselves are: (B, classes, 1, 1) → (B, classes)."""

    def forward(self, images: Tensor) -> Tensor:
        assert not self.training
        return images.flatten(1)


def batches(logits: Tensor, labels: Tensor, size: int = 4, broken: int = 0) -> list[Batch]:
    pieces = zip(logits.split(size), labels.split(size), strict=True)
    return [Batch(x[:, :, None, None], y, broken) for x, y in pieces]


def by_hand(logits: list[list[float]], labels: list[int]) -> dict[str, Any]:
    """The same in plain Python, one image after the other."""
    classes = len(logits[0])
    top1 = top5 = loss = 0.0
    confusion = [[0] * classes for _ in range(classes)]
    for row, label in zip(logits, labels, strict=True):
        order = sorted(range(classes), key=lambda i: -row[i])
        top1 += order[0] == label
        top5 += label in order[:5]
        loss += math.log(sum(math.exp(x) for x in row)) - row[label]
        confusion[label][order[0]] += 1
    per_class: list[float | None] = []
    for label in range(classes):
        count = sum(confusion[label])
        per_class.append(100 * confusion[label][label] / count if count else None)
    n = len(labels)
    return {
        "top1": 100 * top1 / n, "top5": 100 * top5 / n, "loss": loss / n,
        "confusion": confusion, "per_class": per_class,
    }  # fmt: skip


@pytest.mark.parametrize("classes", [2, 4, 5, 12])
@pytest.mark.parametrize("size", [1, 4, 64])
def test_a_score_is_what_is_counted_by_hand(classes: int, size: int) -> None:
    logits, labels = torch.randn(30, classes), torch.randint(0, classes - 1, (30,))
    model = Lookup().train()
    score = evaluate(model, batches(logits, labels, size), classes)
    expected = by_hand(logits.double().tolist(), labels.tolist())
    assert score.top1 == pytest.approx(expected["top1"])
    assert score.top5 == pytest.approx(expected["top5"])
    assert score.loss == pytest.approx(expected["loss"], rel=1e-5)
    assert dense(score) == expected["confusion"]
    assert score.per_class == expected["per_class"]
    assert score.per_class[-1] is None  # the last class has no image
    assert (score.images, score.skipped, sum(score.class_images)) == (30, 0, 30)
    assert model.training  # unchanged
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    wrong = (logits.argmax(1) != labels).nonzero()[:, 0].tolist()
    places = sorted(wrong, key=lambda place: -float(losses[place]))
    assert [one.place for one in score.worst] == places[:24]
    assert all(one.predicted == int(logits[one.place].argmax()) for one in score.worst)


def test_places_count_what_was_skipped() -> None:
    right = torch.eye(2)
    listed = [
        Batch(right[:1], torch.tensor([1]), 1),  # which of both was skipped is not known
        Batch(right, torch.tensor([0, 0])),
    ]
    assert [one.place for one in evaluate(Lookup(), listed, 2).worst] == [3]


def test_broken_images_are_counted_apart() -> None:
    logits = torch.eye(3)
    listed = batches(logits, torch.arange(3), size=1, broken=2)
    empty = Batch(torch.empty(0), torch.empty(0, dtype=torch.int64), 4)
    score = evaluate(Lookup(), [*listed, empty], 3)
    assert (score.top1, score.images, score.skipped) == (100, 3, 10)
    with pytest.raises(HVTError, match="no readable image to evaluate on"):
        evaluate(Lookup(), [empty], 3)
    with pytest.raises(HVTError, match="no readable image to evaluate on"):
        evaluate(Lookup(), [], 3)


def dense(score: Score) -> list[list[int]]:
    classes = range(score.num_classes)
    return [[score.confusion[label, answer] for answer in classes] for label in classes]


def test_many_classes_need_no_table_of_all_pairs() -> None:
    """Of 400,000 classes it would take 1.3 TB."""
    last = 399_999
    logits = torch.zeros(2, last + 1).scatter_(1, torch.tensor([[3], [last]]), 1.0)
    score = evaluate(Lookup(), batches(logits, torch.tensor([last, last])), last + 1)
    assert dict(score.confusion) == {(last, 3): 1, (last, last): 1}
    (row,) = score.to_dict()["per_class"]
    assert row == {"label": last, "name": str(last), "top1": 50.0, "images": 2}


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_that_the_model_does_not_have(label: int) -> None:
    message = f"the data has the label {label}, the model 3 classes"
    with pytest.raises(HVTError, match=message):
        evaluate(Lookup(), batches(torch.eye(3), torch.tensor([0, 1, label])), 3)


NUMBERED, CLASSES = 22, 6


def numbered() -> tuple[ArrayImages, Any]:
    """Images that are their own number, and a transform that turns each into its logits."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(NUMBERED, CLASSES, generator=draw)
    labels = torch.randint(0, CLASSES, (NUMBERED,), generator=draw)
    numbers = torch.arange(NUMBERED, dtype=torch.uint8)[:, None, None, None]

    def transform(images: Tensor) -> Tensor:
        return logits[images.flatten().long()][:, :, None, None]

    return ArrayImages(numbers, labels), transform


def _rank(rank: int, store: Path, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    images, transform = numbered()
    batches = EvalBatches(images, transform, batch_size=5, rank=rank, world_size=2)
    score = evaluate(Lookup(), batches, CLASSES, processes=DistributedContext(rank, 2))
    plain = vars(score) | {"worst": tuple(dataclasses.astuple(one) for one in score.worst)}
    torch.save(plain, folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_both_get_the_whole_score(tmp_path: Path) -> None:
    processes = [
        multiprocessing.get_context("fork").Process(
            target=_rank, args=(rank, tmp_path / "store", tmp_path)
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    images, transform = numbered()
    alone = evaluate(Lookup(), EvalBatches(images, transform, batch_size=5), CLASSES)
    for rank in range(2):
        score = Score(**torch.load(tmp_path / f"{rank}.pt"))
        assert {one[1:] for one in score.worst} == {  # type: ignore[index]
            (one.place, one.label, one.predicted) for one in alone.worst
        }
        assert (score.top1, score.top5, score.images) == (alone.top1, alone.top5, NUMBERED)
        assert score.loss == pytest.approx(alone.loss, rel=1e-6)
        assert score.confusion == alone.confusion


def test_mixed_precision_is_used() -> None:
    class Half(Lookup):
        def forward(self, images: Tensor) -> Tensor:
            self.dtype = (super().forward(images) @ torch.eye(3)).dtype
            return super().forward(images)

    model = Half()
    listed = batches(torch.eye(3), torch.arange(3))
    assert evaluate(model, listed, 3, amp=torch.bfloat16).top1 == 100
    assert model.dtype == torch.bfloat16
    evaluate(model, listed, 3)
    assert model.dtype == torch.float32


def made(confusion: list[list[int]]) -> Score:
    pairs = {(i, j): n for i, row in enumerate(confusion) for j, n in enumerate(row) if n}
    return Score(50.0, 75.0, 1.25, sum(pairs.values()), 2, 4.0, len(confusion), Counter(pairs))


def test_a_score_as_plain_values() -> None:
    names = ("crane", "dog", "crane")
    score = dataclasses.replace(made([[3, 1, 0], [0, 0, 0], [2, 0, 2]]), class_names=names)
    assert score.to_dict() == {
        "top1": 50.0,
        "top5": 75.0,
        "loss": 1.25,
        "images": 8,
        "skipped": 2,
        "images_per_second": 2.0,
        "per_class": [
            {"label": 0, "name": "crane", "top1": 75.0, "images": 4},
            {"label": 2, "name": "crane", "top1": 50.0, "images": 4},
        ],
    }


# The confusion matrix as an image


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts in the cells and at the rows of what is drawn."""
    axes = pytest.importorskip("matplotlib.axes").Axes
    words: list[str] = []
    text, yticks = axes.text, axes.set_yticks
    monkeypatch.setattr(axes, "text", lambda *a, **k: words.append(a[3]) or text(*a, **k))
    monkeypatch.setattr(axes, "set_yticks", lambda *a, **k: words.extend(a[2]) or yticks(*a, **k))
    return words


def test_a_small_confusion_shows_its_counts_and_row_totals(
    tmp_path: Path, drawn: list[str]
) -> None:
    path = tmp_path / "confusion.png"
    draw_confusion(path, made([[3, 1], [0, 4]]), ["a_b$c", "[d]\n"])
    assert drawn == ["3", "1", "4", "a_b$c (4)", "[d]\\n (4)"]
    with Image.open(path) as image:
        assert image.format == "PNG"
        colours = image.convert("RGB").getcolors(1 << 24)
        assert colours is not None
        assert len(colours) > 10


def test_confusion_of_some_classes_among_many(tmp_path: Path, drawn: list[str]) -> None:
    """A thousand classes of which two have images make a small image."""
    pairs = Counter({(3, 3): 2, (3, 500): 2, (900, 900): 1})
    score = Score(60.0, 60.0, 1.0, 5, 0, 1.0, 1000, pairs)
    draw_confusion(tmp_path / "few.png", score, [str(i) for i in range(1000)])
    assert drawn == ["2", "2", "1", "3 (4)", "900 (1)"]
    with Image.open(tmp_path / "few.png") as few:
        assert max(few.size) < 600


# Labels by name


@given(st.data())
def test_labels_are_places_by_name(data: st.DataObject) -> None:
    known = data.draw(st.lists(st.integers(0, 99).map(str), min_size=1, max_size=20, unique=True))
    names = data.draw(st.lists(st.sampled_from(known), min_size=1, unique=True))
    match = match_classes(names, known, len(known), "here")
    assert match.by == "name"
    assert [known[place] for place in match.places] == names
    assert match.pairs == [(name, name) for name in names]


def test_a_class_that_the_model_does_not_know() -> None:
    with pytest.raises(HVTError) as caught:
        match_classes(["cat", "dgo"], ["ant", "cat", "dog"], 3, "mine")
    assert str(caught.value) == (
        "the class 'dgo' of mine is not among the model's 3 classes: did you mean dog?"
    )
    many = [f"n{number:08}" for number in range(1000)]
    with pytest.raises(HVTError, match=r"'tench' of mine is not among the model's 1000") as caught:
        match_classes(["tench"], many, 1000, "mine")
    assert len(str(caught.value)) < 300  # not a thousand names


def test_names_of_another_kind_are_matched_by_order_if_that_is_asked() -> None:
    known = ["tench", "shark", "ray"]
    with pytest.raises(HVTError, match="in the same order, use --match-by-order"):
        match_classes(["n01", "n02", "n03"], known, 3, "here")
    match = match_classes(["n01", "n02", "n03"], known, 3, "here", by_order=True)
    assert (match.by, match.places) == ("order", (0, 1, 2))
    assert match.describe() == ("classes matched by order: n01 = tench, n02 = shark, n03 = ray")
    many = match_classes([f"n{i}" for i in range(9)], list("abcdefghi"), 9, "here", by_order=True)
    assert many.describe().endswith("n0 = a, n1 = b, n2 = c, 6 more")
    with pytest.raises(HVTError, match="here has 2 classes and the model 3"):
        match_classes(["n01", "n02"], known, 3, "here", by_order=True)
    for names in (["n01", "n02"], ["tench", "n02", "ray"]):  # fewer, or one is shared
        with pytest.raises(HVTError, match=r"'n0\d' of here is not among") as caught:
            match_classes(names, known, 3, "here")
        assert "--match-by-order" not in str(caught.value)


def test_an_order_that_the_names_contradict() -> None:
    with pytest.raises(HVTError, match="'b' of here has another index among the model's"):
        match_classes(["x", "b", "y"], ["b", "c", "d"], 3, "here", by_order=True)
    match = match_classes(["x", "b", "y"], ["a", "b", "c"], 3, "here", by_order=True)
    assert match.places == (0, 1, 2)


def test_classes_without_names() -> None:
    with pytest.raises(HVTError, match="the model does not name its 2 classes, here has 2: if"):
        match_classes(["a", "b"], None, 2, "here")
    match = match_classes(["a", "b"], None, 2, "here", by_order=True)
    assert (match.by, match.pairs) == ("order", [("a", "a"), ("b", "b")])
    assert match_classes([], ["a", "b"], 2, "here").by == "label"  # shards without a classes.txt
    assert match_classes([], None, 2, "here").places == (0, 1)


def test_a_name_that_occurs_twice() -> None:
    """ImageNet has two cranes: all its names in order are all its classes."""
    known = ["crane", "dog", "crane"]
    assert match_classes(known, known, 3, "here").places == (0, 1, 2)
    assert match_classes(["dog"], known, 3, "here").places == (1,)
    with pytest.raises(HVTError) as caught:
        match_classes(["crane", "dog"], known, 3, "here")
    assert str(caught.value) == (
        "the class 'crane' of here matches 2 classes of the model: give each a unique name by "
        "hvt.save(hvt.load(MODEL), FILE, class_names=NAMES)"
    )
