"""What `torch.save` wrote is read as data: nothing runs, and anything but data is named."""

import argparse
import functools
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hvt
from hvt import HVT, CheckpointError, HVTConfig
from hvt.checkpoint.torch_files import read_torch
from hvt.errors import UnsafeCheckpointError

TINY = HVTConfig(
    img_size=16, patch_size=4, num_heads=1, head_dim=64, depth=1, num_classes=3, stages=0
)
both_forms = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def state() -> dict[str, Tensor]:
    return HVT(TINY).state_dict()


# ── data is read ────────────────────────────────────────────────────────────────────────────────


@both_forms
def test_a_trainings_whole_state_is_read(tmp_path: Path, zipped: bool) -> None:
    model = HVT(TINY)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    optimizer.step()
    arguments = argparse.Namespace(
        lr=0.1, betas=(0.9, 0.99), tags=["a", ("b", None)], key=b"\xff\x00", extra={"x": {1, 2}}
    )
    content = {
        "model": {name: nn.Parameter(tensor) for name, tensor in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "counter": Counter("aab"),
        "args": arguments,
        "size": torch.Size((2, 3)),
        "random": torch.get_rng_state(),
    }
    torch.save(content, tmp_path / "m.pth", _use_new_zipfile_serialization=zipped)
    tensors, told = read_torch(tmp_path / "m.pth")
    assert told == vars(arguments)
    assert all(torch.equal(t, tensors[k]) for k, t in model.state_dict().items())
    assert hvt.load(tmp_path / "m.pth").config == TINY


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state(), tmp_path / "m.pth")
    finally:
        torch.serialization.set_crc32_options(before)
    assert hvt.load(tmp_path / "m.pth").config.depth == 1


# ── nothing is ever run ─────────────────────────────────────────────────────────────────────────


class Runs:
    """Unpickling this runs a shell command that leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"echo run > '{self.mark}'",)


SYSTEM = f"{os.system.__module__}.system"
PAYLOADS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "os.system": (Runs, SYSTEM),
    "eval": (lambda mark: functools.partial(eval, f"open({str(mark)!r}, 'w')"), "partial"),
    "module": (lambda mark: nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    "in arguments": (lambda mark: argparse.Namespace(lr=0.1, deep=[{"a": (Runs(mark),)}]), SYSTEM),
}


@pytest.mark.parametrize("case", PAYLOADS)
@both_forms
def test_anything_else_is_named_and_not_run(tmp_path: Path, case: str, zipped: bool) -> None:
    make, name = PAYLOADS[case]
    mark, path, payload = tmp_path / "mark", tmp_path / "evil.pth", make(tmp_path / "mark")
    content = {"model": state(), "args": payload}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnsafeCheckpointError) as caught:
        hvt.load(path)
    assert name in str(caught.value)
    assert str(path) in str(caught.value)
    assert "save only its state_dict" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not mark.exists()


# ── damaged files ───────────────────────────────────────────────────────────────────────────────


def test_a_flipped_bit_among_the_weights_is_noticed(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "m.pth")
    content = bytearray((tmp_path / "m.pth").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "m.pth").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.pth is damaged .*Bad CRC-32"):
        hvt.load(tmp_path / "m.pth")
