"""Files are written whole or not at all."""

import os
from pathlib import Path

import pytest

import hvt
from hvt import HVTError
from hvt.files import atomic_write, check_writable


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", [str, Path])
def test_the_old_file_stands_until_the_new_one_is_whole(tmp_path: Path, kind: type) -> None:
    path = tmp_path / "a.txt"
    for old, new in ((None, "first"), ("first", "second")):
        with atomic_write(kind(path)) as temporary:
            temporary.write_text(new)
            assert (path.read_text() if path.exists() else None) == old
            assert temporary.parent == tmp_path  # the same disk, or the last step would be a copy
        assert path.read_text() == new
    assert names_in(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail() -> None:
        with atomic_write(path) as temporary:
            temporary.write_text("half of the n")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["a.txt"]


def test_an_operating_system_error_becomes_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with pytest.raises(HVTError, match=r"cannot write .*a\.txt: No space left"), atomic_write(path):
        raise OSError(28, "No space left on device")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("folder", "folder: it is a folder"),
        ("null", "null: it is not a regular file"),
        ("gone", r"a\.txt: the folder .*nowhere does not exist"),
        ("none/a.txt", "the folder .*none does not exist"),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, name: str, words: str) -> None:
    """Told before anything is written, and before the work where that is asked for."""
    (tmp_path / "folder" / "b").mkdir(parents=True)
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "gone").symlink_to("nowhere/a.txt")
    with pytest.raises(HVTError, match=words), atomic_write(tmp_path / name):
        pytest.fail("it was opened")
    with pytest.raises(HVTError, match=words):
        check_writable(tmp_path / name)
    assert names_in(tmp_path) == ["folder", "gone", "null"]
    assert names_in(tmp_path / "folder") == ["b"]


@pytest.mark.skipif(os.name == "nt", reason="links there are for administrators")
@pytest.mark.parametrize("old", ["old", None])
def test_a_link_stays_one(tmp_path: Path, old: str | None) -> None:
    path, link = tmp_path / "there" / "a.txt", tmp_path / "link"
    path.parent.mkdir()
    if old is not None:
        path.write_text(old)
    link.symlink_to("there/a.txt")
    check_writable(link)
    with atomic_write(link) as temporary:
        temporary.write_text("new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert names_in(tmp_path / "there") == ["a.txt"]


def test_a_folder_that_is_not_writable_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(HVTError, match=r"cannot write .*a\.txt: the folder .* is not writable"):
        check_writable(tmp_path / "a.txt")


def test_weights_have_the_mode_that_new_files_have(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    hvt.save(hvt.create_model("hvt_ti_1"), tmp_path / "model.safetensors")
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1
