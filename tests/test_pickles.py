"""What `torch.save` wrote is data: any file is read in bounded memory and time, or refused."""

import argparse
import copy
import functools
import os
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import bounded
from data_paths import FIXTURES
from torch import Tensor, nn

import hvt
from hvt import HVT, CheckpointError, HVTConfig
from hvt.checkpoint.container import MAX_DIRECTORY
from hvt.checkpoint.foreign import read_pickle
from hvt.checkpoint.pickles import MAX_STEPS, TorchFile

TINY = HVTConfig(
    img_size=16, patch_size=4, num_heads=1, head_dim=64, depth=1, num_classes=3, stages=0
)
FORMS = {"zip": True, "legacy": False}


@functools.cache
def state() -> dict[str, Tensor]:
    return HVT(TINY).state_dict()


# ── what torch.save writes is read as torch.load reads it ───────────────────────────────────────


@pytest.mark.parametrize("zipped", FORMS.values(), ids=FORMS)
def test_every_kind_of_tensor_is_read_as_torch_reads_it(tmp_path: Path, zipped: bool) -> None:
    base = torch.randn(6, 8)
    attributed = nn.Parameter(torch.randn(3))
    attributed.kept = "x"  # type: ignore[attr-defined]
    tensors = {
        "plain": base,
        "slice": base[1:4, ::2],
        "transposed": base.t(),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "one column": base[:, :1],
        "parameter": nn.Parameter(torch.randn(2, 2)),
        "attributed": attributed,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "empty expanded": torch.empty(1, 0).expand(5, 0),
        **{
            str(dtype): torch.ones(3).to(dtype)
            for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool)
        },
    }
    if zipped:  # torch cannot read its own otherwise
        tensors["float8"] = torch.ones(5).to(torch.float8_e4m3fn)
    torch.save(tensors, tmp_path / "m.pth", _use_new_zipfile_serialization=zipped)
    theirs = torch.load(tmp_path / "m.pth", weights_only=True)
    ours, _ = read_pickle(tmp_path / "m.pth")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].shape == tensor.shape, name
        assert torch.equal(ours[name].double(), tensor.double()), name


@pytest.mark.parametrize("zipped", FORMS.values(), ids=FORMS)
def test_a_trainings_whole_state_is_no_objection(tmp_path: Path, zipped: bool) -> None:
    model = HVT(TINY)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    beside = {
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": schedule.state_dict(),
        "counter": Counter("aab"),
        "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99), tags={"a", "b"}, key=b"\xff\x00"),
        "dtype": torch.float16,
        "size": torch.Size((2, 3)),
        "device": torch.device("cpu"),
        "random": torch.get_rng_state(),
        "large": 2**100,
    }
    torch.save(
        {"model": model.state_dict(), **beside}, tmp_path / "m.pth",
        _use_new_zipfile_serialization=zipped,
    )  # fmt: skip
    content = TorchFile(tmp_path / "m.pth").content
    assert content["lr_scheduler"]["milestones"] == Counter((3, 5))
    assert content["args"] == beside["args"]
    assert content["large"] == 2**100
    assert content["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    loaded = hvt.load(tmp_path / "m.pth")
    assert all(torch.equal(t, loaded.state_dict()[k]) for k, t in model.state_dict().items())


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state(), tmp_path / "m.pth")
    finally:
        torch.serialization.set_crc32_options(before)
    assert hvt.load(tmp_path / "m.pth").config.depth == 1


def test_a_flipped_bit_among_the_weights_is_noticed(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "m.pth")
    content = bytearray((tmp_path / "m.pth").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "m.pth").write_bytes(content)
    with pytest.raises(CheckpointError, match="wrong checksum"):
        hvt.load(tmp_path / "m.pth")


def test_pythons_2_ordered_dicts_are_read(tmp_path: Path) -> None:
    pairs = b"\x80\x02ccollections\nOrderedDict\n]]" + b"U\x05epocha" + b"K\x03aa\x85R."
    write_zip(tmp_path / "m.pth", pairs)
    assert TorchFile(tmp_path / "m.pth").content == {"epoch": 3}


# ── hostile files ───────────────────────────────────────────────────────────────────────────────


def write_zip(path: Path, program: bytes, method: int = zipfile.ZIP_STORED) -> None:
    """A `.pth` of one handwritten pickle."""
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("m/data.pkl", program)
        archive.writestr("m/byteorder", b"little")
        archive.writestr("m/version", b"3\n")


def write_legacy(path: Path, program: bytes) -> None:
    machine = {"little_endian": True, "protocol_version": 1001, "type_sizes": {}}
    head = (0x1950A86A20F9469CFC6C, 1001, machine)
    pickles = [pickle.dumps(value, protocol=2) for value in head]
    path.write_bytes(b"".join((*pickles, program, pickle.dumps([], protocol=2))))


def call(module: str, name: str, arguments: bytes) -> bytes:
    """`{"model": module.name(*arguments)}` as a pickle."""
    made = f"c{module}\n{name}\n".encode() + arguments + b"R"
    return b"\x80\x02}X\x05\x00\x00\x00model" + made + b"s."


def large(number: int, size: int = 8) -> bytes:
    return pickle.LONG1 + bytes([size]) + number.to_bytes(size, "little")


def doubled(first: bytes, times: int = 60) -> bytes:
    """A tuple of twice a tuple of twice …: small, and 2⁶⁰ leaves for who walks or hashes it."""
    return first + b"".join(b"q\x00h\x00\x86" for _ in range(times))


def hexed(times: int = 40) -> bytes:
    """Text encoded as hexadecimal digits of hexadecimal digits …, 2⁴⁰ of them."""
    start = b"c_codecs\nencode\nU\x01aU\x06latin1\x86R"
    for _ in range(times):
        start = b"c_codecs\nencode\n" + start + b"U\x03hex\x86R"
    return b"\x80\x02}X\x05\x00\x00\x00model" + start + b"s."


def copies() -> bytes:
    """Sets made of one list of 20,000 texts, 2,000 times."""
    texts = b"".join(b"X" + struct.pack("<I", 5) + b"%05d" % n for n in range(20_000))
    listed = b"](" + texts + b"e\x85q\x00"
    again = b"c__builtin__\nset\nh\x00R" * 2000
    return b"\x80\x02(" + listed + again + b"t."


GIANT = large(12 * 10**9)
PROGRAMS: dict[str, tuple[bytes, str]] = {
    "bytearray": (call("__builtin__", "bytearray", GIANT + b"\x85"), "carries builtins.bytearray"),
    "tensor class": (call("torch", "FloatTensor", GIANT + b"\x85"), "carries torch.FloatTensor"),
    "tensor": (call("torch", "Tensor", GIANT + b"\x85"), "carries torch.Tensor"),
    "storage": (call("torch", "UntypedStorage", GIANT + b"\x85"), "is damaged"),
    "sparse": (
        call("torch._utils", "_rebuild_sparse_tensor", b")"),
        "carries torch._utils._rebuild_sparse_tensor",
    ),
    "hexadecimal": (hexed(), "carries _codecs.encode"),
    "nested key": (b"\x80\x02}" + doubled(b"K\x01") + b"K\x01s.", "a key is neither text nor"),
    "nested set": (call("__builtin__", "set", b"]" + doubled(b"K\x01") + b"a\x85"), "a key is"),
    "colliding keys": (
        b"\x80\x02}(" + b"".join(large(n * (2**61 - 1), 10) + b"N" for n in range(30_000)) + b"u.",
        "more values than any model",
    ),
    "copies": (copies(), "more values than any model"),
    "instructions": (b"\x80\x02" + b"]" * (MAX_STEPS + 1) + b".", "more values than any model"),
    "sets": (b"\x80\x02" + b"\x8f" * (MAX_STEPS // 2) + b".", "more values than any model"),
    "long text": (b"\x80\x02X\xff\xff\xff\xffabc.", "is damaged"),
    "no end": (b"\x80\x02}", "is damaged"),
    "newer pickle": (pickle.dumps({"a": 1}, protocol=4), "torch.save does not write"),
    "far memo": (b"\x80\x02}r\xff\xff\xff\xff.", "it has no tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", PROGRAMS)
@pytest.mark.parametrize("write", [write_zip, write_legacy])
def test_a_hostile_pickle_is_refused_at_little_cost(
    tmp_path: Path, case: str, write: Callable[[Path, bytes], None]
) -> None:
    program, words = PROGRAMS[case]
    path = tmp_path / "m.pth"
    write(path, program)
    with bounded(), pytest.raises(CheckpointError) as caught:
        hvt.load(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def vast(*shape: int) -> Tensor:
    """One number that looks like many."""
    return torch.zeros(1).expand(shape)


def far(tensor: Tensor) -> Tensor:
    """A view that torch itself would not make: overlapping rows."""
    return tensor.as_strided((1000, tensor.numel() - 999), (1, 1))


CONTENTS: dict[str, tuple[Callable[[], Any], str]] = {
    "stride 0": (lambda: state() | {"pos_embed": vast(1, 10**8, 64)}, "stride 0"),
    "overlapping rows": (
        lambda: state() | {"pos_embed": far(torch.zeros(10**5))},
        "share their memory",
    ),
    "one weight, many names": (
        lambda: {
            name.replace("blocks.0", f"blocks.{i}"): tensor
            for i in range(2500)
            for name, tensor in state().items()
        },
        "together far larger than the file",
    ),
}


@pytest.mark.parametrize("case", CONTENTS)
@pytest.mark.parametrize("zipped", FORMS.values(), ids=FORMS)
def test_tensors_that_share_their_memory_are_refused(
    tmp_path: Path, case: str, zipped: bool
) -> None:
    make, words = CONTENTS[case]
    path = tmp_path / "m.pth"
    torch.save(make(), path, _use_new_zipfile_serialization=zipped)
    assert path.stat().st_size < 30e6
    with bounded(), pytest.raises(CheckpointError) as caught:
        hvt.load(path)
    assert words in str(caught.value)


def test_shared_lists_are_not_walked(tmp_path: Path) -> None:
    """2⁶⁰ leaves, which a message about a wrong value would print."""
    nested: list[Any] = [1]
    for _ in range(60):
        nested = [nested, nested]
    arguments = argparse.Namespace(pool=nested, pool_dims=nested, img_size=nested, deep=nested)
    torch.save({"model": state(), "args": arguments, "extra": nested}, tmp_path / "m.pth")
    with bounded():
        assert hvt.load(tmp_path / "m.pth").config == TINY


def test_a_structure_within_itself_does_not_matter(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    torch.save({"model": state(), "extra": loop}, tmp_path / "m.pth")
    with bounded():
        assert hvt.load(tmp_path / "m.pth").config == TINY


def test_a_tensor_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pth"
    torch.save({"norm.weight": torch.zeros(77)}, path)
    content = path.read_bytes()
    assert content.count(b"KM\x85q") == 1  # (77,), the shape
    with zipfile.ZipFile(path) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, part in parts.items():
            new.writestr(name, part.replace(b"KM\x85q", b"K\xff\x85q"))
    with pytest.raises(CheckpointError, match=r"norm\.weight goes beyond its storage"):
        hvt.load(path)


def test_names_with_and_without_ddps_prefix_are_ambiguous(tmp_path: Path) -> None:
    both = state() | {"module.norm.weight": torch.ones(64)}
    torch.save(both, tmp_path / "m.pth")
    with pytest.raises(CheckpointError, match="both with and without module"):
        hvt.load(tmp_path / "m.pth")


# ── zips ────────────────────────────────────────────────────────────────────────────────────────


def repacked(path: Path, change: Callable[[zipfile.ZipFile], None], method: int = 0) -> None:
    with zipfile.ZipFile(path) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", method) as new:
        for name, part in parts.items():
            new.writestr(name, part)
        change(new)


def overlap(archive: zipfile.ZipFile) -> None:
    """Every weight once more in the directory, but not in the file."""
    for entry in list(archive.filelist):
        again = copy.copy(entry)
        again.filename = f"{entry.filename}+"
        archive.filelist.append(again)


def twice(archive: zipfile.ZipFile) -> None:
    archive.filelist.append(copy.copy(archive.filelist[0]))


@pytest.mark.parametrize(
    ("change", "method", "words"),
    [
        (lambda archive: None, zipfile.ZIP_DEFLATED, "entries are compressed"),
        (lambda archive: None, zipfile.ZIP_BZIP2, "entries are compressed"),
        (overlap, 0, "entries are larger than the file"),
        (twice, 0, "the same name"),
    ],
)
def test_a_zip_that_is_larger_than_it_looks_is_refused(
    tmp_path: Path, change: Callable[[zipfile.ZipFile], None], method: int, words: str
) -> None:
    path = tmp_path / "m.pth"
    torch.save(state(), path)
    repacked(path, change, method)
    with bounded(), pytest.raises(CheckpointError) as caught:
        hvt.load(path)
    assert words in str(caught.value)


def test_a_giant_directory_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.pth"
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 9, 9, MAX_DIRECTORY + 99, 4, 0)
    path.write_bytes(b"PK\x03\x04" + bytes(MAX_DIRECTORY + 99) + end)
    with pytest.raises(CheckpointError, match="directory is larger than that of any model"):
        hvt.load(path)


# ── what is not a regular file ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["m.pth", "m.safetensors", "m.pt2", "m.onnx"])
def test_a_fifo_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / "link").symlink_to(name)
    for path in (tmp_path / name, tmp_path / "link"):
        with bounded(), pytest.raises(CheckpointError, match=f"{path.name}.* not a regular file"):
            hvt.Predictor(path) if path.suffix == ".onnx" else hvt.load(path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json"])
def test_a_fifo_in_a_directory_is_named(tmp_path: Path, name: str) -> None:
    hvt.save(HVT(TINY), tmp_path / "model.safetensors")
    if name == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with bounded(), pytest.raises(CheckpointError, match=f"{name}: .* not a regular file"):
        hvt.load(tmp_path)


def test_a_device_is_not_read() -> None:
    with bounded(), pytest.raises(CheckpointError, match=r"/dev/zero: .* not a regular file"):
        hvt.load("/dev/zero")


def test_a_linked_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "link.pth").symlink_to(FIXTURES / "reference_hvt.pth")
    assert hvt.load(tmp_path / "link.pth").num_classes == 10


def test_a_name_that_cannot_be(tmp_path: Path) -> None:
    for name in ("a\0b", str(tmp_path / ("n" * 5000))):
        with pytest.raises(CheckpointError, match="cannot read"):
            hvt.load(name)


def test_ordered_dicts_keep_their_order(tmp_path: Path) -> None:
    torch.save(OrderedDict(b=1, a=2), tmp_path / "m.pth")
    assert list(TorchFile(tmp_path / "m.pth").content) == ["b", "a"]
