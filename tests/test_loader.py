"""Batches follow from (seed, epoch, position) only: no worker, thread or process changes them."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from shards import write_shards
from timm.data import Mixup, create_transform
from torch import Tensor
from training import tiny

from hvt import cli
from hvt.data import loader
from hvt.data.arrays import ArrayImages
from hvt.data.augment import BatchAugment, normalise
from hvt.data.images import FileImages, UnreadableImageError
from hvt.data.loader import Batch, EvalBatches, TrainBatches, rows_of_shard
from hvt.distributed import DistributedContext
from hvt.errors import HVTError
from hvt.training.pipeline import build_model, open_batches

SIDE = 16


def arrays(count: int) -> ArrayImages:
    """Image i is noise and has the label i, so that a batch tells which images it has."""
    pixels = torch.randint(0, 256, (count, SIDE, SIDE, 3), dtype=torch.uint8)
    return ArrayImages(pixels, torch.arange(count))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> FileImages:
    """Twenty noisy PNG files; file i has the label i."""
    folder = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    paths = [folder / f"{number:02}.png" for number in range(20)]
    for path in paths:
        Image.fromarray(draw.integers(0, 256, (24, 20, 3), dtype=np.uint8)).save(path)
    return FileImages(paths, range(20))


@pytest.fixture(scope="module")
def some_broken(files: FileImages, tmp_path_factory: pytest.TempPathFactory) -> FileImages:
    """The same images, of which 3, 4 and 11 cannot be read."""
    folder = tmp_path_factory.mktemp("broken")
    paths = files.paths
    for number in (3, 4, 11):
        paths[number] = folder / f"{number:02}.png"
        paths[number].write_bytes(b"not an image")
    return FileImages(paths, files.labels)


def timm_training() -> Any:
    """timm's transform with everything that is random in it."""
    return create_transform(
        (3, SIDE, SIDE),
        is_training=True,
        auto_augment="rand-m6-mstd0.5-inc1",
        re_prob=0.5,
        re_mode="pixel",
        interpolation="random",
    )


def timm_eval() -> Any:
    return create_transform((3, SIDE, SIDE), is_training=False, crop_pct=1.0)


def lively() -> BatchAugment:
    return BatchAugment(SIDE, (0.4,) * 3, (0.2,) * 3)


def same(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) and a.broken == b.broken
        for a, b in zip(left, right, strict=True)
    )


def labels(batches: Any) -> list[int]:
    return [label for batch in batches for label in batch.labels.tolist()]


# The order


def test_each_epoch_has_every_image_in_another_order() -> None:
    batches = TrainBatches(arrays(40), lively(), batch_size=8, seed=1)
    orders = [batches.order(epoch).tolist() for epoch in range(4)]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert batches.order(2).tolist() == orders[2]
    other = TrainBatches(arrays(40), lively(), batch_size=8, seed=2)
    assert other.order(0).tolist() != orders[0]


def test_repeats_show_another_third_in_each_epoch() -> None:
    batches = TrainBatches(arrays(60), lively(), batch_size=6, repeats=3)
    seen = []
    for epoch in range(30):
        order = batches.order(epoch)
        assert len(order) == 60  # an epoch keeps its length
        assert (order.reshape(-1, 3) == order[::3, None]).all()  # three in a row
        assert Counter(Counter(order.tolist()).values()) == {3: 20}
        seen.append(frozenset(order.tolist()))
    assert len(set(seen)) == 30
    assert frozenset().union(*seen) == set(range(60))
    rest = TrainBatches(arrays(10), lively(), batch_size=2, repeats=3)  # which do not divide it
    assert sorted(Counter(rest.order(0).tolist()).values()) == [1, 3, 3, 3]


def test_an_epoch_is_its_order() -> None:
    images = arrays(23)
    batches = TrainBatches(images, lively(), batch_size=6, seed=5)
    assert batches.steps == 3  # five images do not fill a batch
    got = list(batches.epoch(2))
    assert [len(batch.labels) for batch in got] == [6, 6, 6]
    assert labels(got) == batches.order(2)[:18].tolist()
    assert not same(got, list(batches.epoch(3)))


# Shards


@given(st.integers(1, 16), st.integers(1, 8))
def test_shards_partition_the_batch_in_mirrored_pairs(shards: int, pairs: int) -> None:
    size = 2 * shards * pairs
    rows = [rows_of_shard(size, shards, shard) for shard in range(shards)]
    assert sorted(np.concatenate(rows).tolist()) == list(range(size))
    for own in rows:
        assert len(own) == size // shards
        # Row i of a shard and the row opposite are opposite in the batch too.
        assert (own + own[::-1] == size - 1).all()


@pytest.mark.parametrize("shards", [2, 3, 6])
@pytest.mark.parametrize("seed", range(8))
def test_mixup_of_shards_is_mixup_of_the_batch(shards: int, seed: int) -> None:
    """timm's mixup and CutMix, whole and in shards, from the same numpy state."""
    images, targets = torch.randn(24, 3, 8, 8), torch.randint(0, 5, (24,))

    def mixed(rows: np.ndarray) -> tuple[Tensor, Tensor]:
        np.random.seed(seed)
        mixup = Mixup(0.8, 1.0, prob=0.9, switch_prob=0.5, label_smoothing=0.1, num_classes=5)
        return mixup(images[rows].clone(), targets[rows].clone())

    whole_images, whole_targets = mixed(np.arange(24))
    if seed == 0:
        assert not torch.equal(whole_images, images)  # something is mixed at all
    for shard in range(shards):
        rows = rows_of_shard(24, shards, shard)
        own_images, own_targets = mixed(rows)
        assert torch.equal(own_images, whole_images[rows])
        assert torch.equal(own_targets, whole_targets[rows])


@pytest.mark.parametrize(("processes", "count"), [(2, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("kind", ["arrays", "files"])
def test_processes_and_microbatches_see_what_one_would(
    files: FileImages, processes: int, count: int, kind: str
) -> None:
    images, augment = (files, timm_training()) if kind == "files" else (arrays(30), lively())
    whole = list(TrainBatches(images, augment, batch_size=12, repeats=3).epoch(1))
    assert all(batch.rows is None for batch in whole)
    for rank in range(processes):
        shard_of = (rank * count, count, processes * count)
        own = TrainBatches(images, augment, batch_size=12, repeats=3, shard_of=shard_of)
        got = list(own.epoch(1))
        assert own.steps == len(whole)
        assert [batch.shard for batch in got[:count]] == [rank * count + i for i in range(count)]
        for number, batch in enumerate(got):
            rows = slice(None) if batch.rows is None else batch.rows
            assert torch.equal(batch.images, whole[number // count].images[rows])
            assert torch.equal(batch.labels, whole[number // count].labels[rows])


# Resuming, workers, threads


@pytest.mark.parametrize("start", [0, 1, 3, 4])
def test_the_middle_of_an_epoch_is_its_tail(files: FileImages, start: int) -> None:
    for images, augment in ((arrays(20), lively()), (files, timm_training())):
        batches = TrainBatches(images, augment, batch_size=4, shard_of=(0, 2, 2))
        whole = list(batches.epoch(3))
        assert len(whole) == 10  # five steps of two microbatches
        assert same(list(batches.epoch(3, start)), whole[2 * start :])
    assert list(batches.epoch(3, 5)) == []


def test_workers_change_nothing(files: FileImages) -> None:
    def epoch(workers: int, number: int) -> list[Batch]:
        batches = TrainBatches(files, timm_training(), batch_size=4, repeats=3, workers=workers)
        torch.manual_seed(workers)  # nor does the state of the generators
        return list(batches.epoch(number))

    alone = epoch(0, 1)
    assert same(epoch(1, 1), alone)
    assert same(epoch(2, 1), alone)
    assert not same(epoch(0, 2), alone)


def test_a_thread_ahead_changes_nothing() -> None:
    images = arrays(40)
    plain = TrainBatches(images, lively(), batch_size=4)
    ahead = TrainBatches(images, lively(), batch_size=4, prefetch=True)
    assert same(list(ahead.epoch(0)), list(plain.epoch(0)))
    assert same(list(ahead.epoch(0, 7)), list(plain.epoch(0, 7)))
    partly = ahead.epoch(0)
    next(partly)
    partly.close()  # a reader that has seen enough


def begun(files: FileImages) -> tuple[Batch, Iterator[Batch], int]:
    """The first batch of an epoch, the others, and the process that reads them."""
    before = set(multiprocessing.active_children())
    reading = TrainBatches(files, timm_training(), batch_size=2, workers=1).epoch(0)
    first = next(reading)
    (worker,) = set(multiprocessing.active_children()) - before
    assert worker.pid is not None
    return first, reading, worker.pid


def test_signals_leave_reading_processes_alone(files: FileImages) -> None:
    """Ctrl-C reaches all of a group; a run that saves itself still needs its batches."""
    whole = list(TrainBatches(files, timm_training(), batch_size=2).epoch(0))
    first, reading, worker = begun(files)
    os.kill(worker, signal.SIGINT)
    os.kill(worker, signal.SIGTERM)
    assert same([first, *reading], whole)


HOST = """
import multiprocessing, signal, sys, time
from pathlib import Path

def child(path):
    def tidy_up(*_):
        path.write_text("tidied up")
        sys.exit()
    signal.signal(signal.SIGTERM, tidy_up)
    path.write_text("started")
    time.sleep(600)

def to_tensor(image):
    return torch.zeros(3, 2, 2)

if __name__ == "__main__":
    import torch
    from hvt.data.images import FileImages
    from hvt.data.loader import EvalBatches
    path, image = Path(sys.argv[1]), sys.argv[2]
    fork = multiprocessing.get_context("fork")
    fork.Process(target=child, args=(path,), daemon=True).start()
    while not (path.exists() and path.read_text()):
        time.sleep(0.01)
    images = FileImages([image] * 64, [0] * 64)
    reading = iter(EvalBatches(images, to_tensor, batch_size=1, workers=1))
    next(reading)
    keep = [reading]
    keep.append(keep)  # still reading as the program ends
"""


@pytest.mark.skipif(os.name == "nt", reason="signals of this kind are POSIX's")
def test_at_exit_only_reading_processes_are_killed(files: FileImages, tmp_path: Path) -> None:
    script = tmp_path / "host.py"
    script.write_text(HOST)
    command = [sys.executable, str(script), str(tmp_path / "word"), str(files.path(0))]
    # It does not wait for its reader, and has nothing to say.
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert ended.stderr == ""
    assert (tmp_path / "word").read_text() == "tidied up"


# Errors


@pytest.mark.parametrize(
    ("count", "batch", "shard_of", "message"),
    [
        (10, 7, (0, 1, 1), r"batch_size=7 must be a multiple of 2 \(2 × processes × accumulate\)"),
        (11, 16, (0, 2, 4), "batch_size=16 is more than the 11 training images: use a smaller"),
    ],
)
def test_batches_that_do_not_fit(
    count: int, batch: int, shard_of: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(HVTError, match=message):
        TrainBatches(arrays(count), lively(), batch_size=batch, shard_of=shard_of)


# Broken images


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_stops_by_one_sentence(some_broken: FileImages, workers: int) -> None:
    train = TrainBatches(some_broken, timm_training(), batch_size=4, workers=workers)
    val = EvalBatches(some_broken, timm_eval(), batch_size=4, workers=workers)
    for batches in (train.epoch(0), iter(val)):
        with pytest.raises(UnreadableImageError) as caught:
            list(batches)
        assert str(caught.value).endswith("cannot be read as an image: its content is not in an "
                                          "image format")  # fmt: skip
        assert caught.value.path in map(str, some_broken.paths)
        assert "\n" not in str(caught.value)


def test_skipped_images_are_replaced_and_counted(some_broken: FileImages) -> None:
    def epoch(workers: int) -> list[Batch]:
        batches = TrainBatches(
            some_broken, timm_training(), batch_size=4, workers=workers, skip_broken=True
        )
        return list(batches.epoch(0))

    got = epoch(0)
    order = TrainBatches(some_broken, timm_training(), batch_size=4).order(0).tolist()
    assert labels(got) == [{3: 5, 4: 5, 11: 12}.get(i, i) for i in order]
    assert sum(batch.broken for batch in got) == 2 + 1 + 1  # from 3 over 4 to 5; from 4; from 11
    assert same(epoch(2), got)


def test_skipping_ends_somewhere(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(6)]
    for path in paths:
        path.write_bytes(b"")
    batches = TrainBatches(
        FileImages(paths, range(6)), timm_training(), batch_size=2, skip_broken=True
    )
    with pytest.raises(
        UnreadableImageError, match=r"6 images in a row are unreadable; the last: .*empty"
    ):
        next(batches.epoch(0))


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_leaves_skipped_images_out(some_broken: FileImages, workers: int) -> None:
    got = list(
        EvalBatches(some_broken, timm_eval(), batch_size=1, workers=workers, skip_broken=True)
    )
    assert labels(got) == [i for i in range(20) if i not in (3, 4, 11)]
    assert [batch.broken for batch in got] == [int(i in (3, 4, 11)) for i in range(20)]


# Evaluation


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 6))
def test_evaluation_counts_every_image_once(count: int, batch: int, size: int) -> None:
    images = ArrayImages(torch.zeros(count, 2, 2, 3, dtype=torch.uint8), torch.arange(count))
    transform = partial(normalise, mean=(0.5,) * 3, std=(0.5,) * 3, size=2)
    seen = []
    for rank in range(size):
        own = list(EvalBatches(images, transform, batch_size=batch, rank=rank, world_size=size))
        assert all(1 <= len(b.labels) <= batch for b in own)
        seen += labels(own)
    assert sorted(seen) == list(range(count))


# Shards


def test_a_training_on_shards(tmp_path: Path) -> None:
    """Without names of classes there is no head."""
    shards = write_shards(tmp_path, {"train": (6, 6, 6, 6), "validation": (2, 5)})
    recipe = tiny(tmp_path / "run", data=f"wds/{shards}", holdout=0.0, batch_size=8, repeats=1)
    with pytest.raises(HVTError, match=r"does not name its classes: .* classes\.txt beside"):
        build_model(recipe)
    (shards / "classes.txt").write_text("\n".join(f"class {i}" for i in range(24)))
    model, data, _ = build_model(recipe)
    assert model.class_names == tuple(f"class {i}" for i in range(24))
    batches, _ = open_batches(recipe, model, data, DistributedContext(), torch.device("cpu"))
    assert sorted(labels(batches.epoch(0))) == sorted(data.train.labels)


# Reading processes that have no room, die or get stuck


@pytest.mark.parametrize(("free", "room"), [(62_000, 2), (60_000, 1), (10_000, 0)])
def test_reading_processes_need_room_for_their_batches(
    files: FileImages, monkeypatch: pytest.MonkeyPatch, free: int, room: int
) -> None:
    """Two batches of 12,288 bytes in shared memory for each, and the one in use.

    A container has 64 MB; a batch that is larger hung a training for ever.
    """
    usage = shutil.disk_usage(".")._replace(free=free)
    monkeypatch.setattr(loader.shutil, "disk_usage", lambda path: usage)
    alone = list(TrainBatches(files, timm_training(), batch_size=4).epoch(0))
    with pytest.warns(UserWarning, match=rf"/dev/shm has 0 MB free, too .*: using {room} "):
        got = list(TrainBatches(files, timm_training(), batch_size=4, workers=3).epoch(0))
    assert same(got, alone)


def test_a_reading_process_that_dies_is_an_error(files: FileImages) -> None:
    _, reading, worker = begun(files)
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(HVTError, match="a reading process died, or took more than") as caught:
        list(reading)
    assert "\n" not in str(caught.value)


def test_a_reading_process_that_dies_between_batches_is_an_error_of_the_command(
    files: FileImages, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch raises it from a signal handler, wherever the program is."""

    def run(args: Any) -> int:
        _, reading, worker = begun(files)
        os.kill(worker, signal.SIGKILL)
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)  # as torch's handler looks
        return reading is None

    monkeypatch.setattr("hvt.cli.check.run_check", run)
    assert cli.main(["check", "digits"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hvt: a reading process died, or took more than")


class Stuck:
    """Images that never come."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        threading.Event().wait()


def test_a_reading_process_that_is_stuck_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "READ_TIMEOUT", 0.1)
    monkeypatch.setattr(loader, "_workers_with_room", lambda images, workers, first: workers)
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    before = set(multiprocessing.active_children())
    reading = iter(EvalBatches(Stuck(), timm_eval(), batch_size=2, workers=1))
    with pytest.raises(HVTError, match="or took more than 0 s for a batch: use fewer workers"):
        next(reading)
    for worker in set(multiprocessing.active_children()) - before:
        worker.join(10)
        assert not worker.is_alive()  # killed, though deaf to SIGTERM
