"""torchvision imports with and without its compiled operators, and still fails for other reasons.

What torch knows of an operator cannot be taken back, so each case has an interpreter of its own.
"""

import subprocess
import sys
from pathlib import Path

COMPAT = Path(__file__).parents[1] / "src" / "hvt" / "_compat.py"

# The module alone: `import hvt` would already have called it.
LOAD = f"""
import importlib, importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("compat", {str(COMPAT)!r})
compat = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compat)
load = lambda: compat.twice(lambda: importlib.import_module("torchvision"))
"""

# What torchvision meets when its shared library was built for another torch.
NO_SHARED_LIBRARY = """
load_library = torch.ops.load_library
def refuse(path):
    if "torchvision" in str(path):
        raise OSError("undefined symbol")
    load_library(path)
torch.ops.load_library = refuse
"""

# The parts of torchvision that are written in Python.
USE = """
torchvision = load()
assert torchvision is sys.modules["torchvision"]
from torchvision import transforms
assert transforms.functional.center_crop(torch.zeros(3, 8, 8), [4, 4]).shape == (3, 4, 4)
"""


def succeed(code: str, path: Path | None = None) -> None:
    """Run `code` in a fresh interpreter, with `path` first on sys.path."""
    first = f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else ""
    command = [sys.executable, "-c", first + code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def fake_torchvision(directory: Path, body: str) -> Path:
    package = directory / "torchvision"
    package.mkdir()
    (package / "extension.py").write_text("")
    (package / "__init__.py").write_text(f"from . import extension\n{body}\n")
    return directory


def test_as_installed() -> None:
    succeed(LOAD + USE + "assert load() is torchvision\n")


def test_missing_operators_are_declared() -> None:
    succeed(LOAD + NO_SHARED_LIBRARY + USE + "assert compat._library is not None\n")


OTHERS = """
for error in (
    RuntimeError("something else"),
    RuntimeError("operator torchvision::roi_align does not exist"),
    ImportError("operator torchvision::nms does not exist"),
):
    try:
        load()
    except Exception as caught:
        assert caught is error, caught
    else:
        raise AssertionError(f"{error!r} was hidden")
    assert compat._library is None
error = None
"""


def test_another_failure_is_not_hidden(tmp_path: Path) -> None:
    body = (
        "import sys, torch\n"
        "if sys.modules['__main__'].error: raise sys.modules['__main__'].error\n"
        "torch._C._dispatch_has_kernel_for_dispatch_key('torchvision::nms', 'CPU')"
    )
    succeed(LOAD + OTHERS + "load()\n", fake_torchvision(tmp_path, body))
