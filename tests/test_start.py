"""What a start costs: commands that need no torch do not import it, and timm knows our names.

What an interpreter has imported cannot be taken back, so these have interpreters of their own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hvt
from hvt.cli import COMMANDS, build_parser, main

COMPAT = Path(__file__).parents[1] / "src" / "hvt" / "_compat.py"
HEAVY = ("torch", "timm", "torchvision", "numpy", "PIL", "sklearn", "matplotlib", "onnxruntime")

# Each command, its exit code, what it wrote to stderr and what heavy thing is imported after it.
RUN = f"""
import contextlib, io, json, sys
from hvt.__main__ import main
answers = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["hvt", *words]
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            code = main()
        except SystemExit as stop:
            code = stop.code
    heavy = [name for name in {HEAVY} if name in sys.modules]
    answers.append([code or 0, errors.getvalue(), heavy])
print(json.dumps(answers))
"""


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


COMMANDS_WITHOUT_TORCH: list[tuple[list[str], int]] = [
    ([], 0),
    (["--version"], 0),
    (["--help"], 0),
    (["models"], 0),
    (["cost", "hvt_s_4", "--img-size", "384"], 0),
    (["recipes"], 0),
    (["completion", "bash"], 0),
    (["paper", "costs"], 0),
    (["modles"], 2),
    (["train", "digits", "--epoch", "3"], 2),
    (["predict", "--top", "0", "cat.jpg"], 2),
    (["train", "digit"], 2),
    (["train", "--resume", "nowhere", "--lr", "1"], 2),
    (["serve", "--port", "-1"], 2),
    (["serve", "model.onnx", "--pretrained"], 2),
    (["export", "model.safetensors", "model.pt2", "--int8"], 2),
    (["bench", "hvt_s_4", "--modes", "egaer"], 2),
    (["see", "tokens"], 2),
    (["power", "search", "model.pth"], 2),
    (["plan", "--help"], 0),
    (["search", "digits"], 2),
]


def test_no_command_imports_torch_before_it_computes() -> None:
    """One after another in one interpreter: what one imports, all that follow have too."""
    done = python(RUN, json.dumps([words for words, _ in COMMANDS_WITHOUT_TORCH]))
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    for (words, expected), (code, err, heavy) in zip(COMMANDS_WITHOUT_TORCH, answers, strict=True):
        assert (code, heavy) == (expected, []), (words, err)
        assert "Traceback" not in err


def test_threads_wait_briefly_unless_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert int(os.environ["GOMP_SPINCOUNT"]) <= 5000
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    with pytest.raises(SystemExit):
        main(["--version"])
    assert "GOMP_SPINCOUNT" not in os.environ


def test_every_command_is_found_where_the_table_says() -> None:
    (commands,) = [a for a in build_parser()._actions if a.choices is not None]
    assert set(commands.choices) == set(COMMANDS)
    for name in COMMANDS:
        (commands,) = [a for a in build_parser([name])._actions if a.choices is not None]
        assert name in commands.choices


# timm alone, where torchvision's operators may be missing: what `import hvt` would see to.
ALONE = f"""
import importlib, importlib.util
spec = importlib.util.spec_from_file_location("compat", {str(COMPAT)!r})
compat = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compat)
compat.twice(lambda: importlib.import_module("torchvision"))
"""
KNOWN = "import timm; assert timm.create_model('hvt_ti_4', depth=4).config.depth == 4\n"
# Unchanged: found without being imported, read by its own loader, and no hook left behind, also
# where hvt was dropped and imported again.
UNTOUCHED = """
import importlib.util, sys, hvt
hooks = len(sys.meta_path)
for name in [name for name in sys.modules if name.partition(".")[0] == "hvt"]:
    del sys.modules[name]
import hvt
assert importlib.util.find_spec("timm") is not None and "timm" not in sys.modules
import torchvision, timm, importlib.resources
assert len(sys.meta_path) == hooks - 1
for module in (torchvision, timm):
    assert "hvt" not in type(module.__spec__.loader).__module__
    assert importlib.resources.files(module).joinpath("version.py").is_file()
"""


@pytest.mark.parametrize(
    "code",
    [
        UNTOUCHED + KNOWN,
        pytest.param(
            ALONE + "from timm.layers import Mlp\nimport hvt\n" + KNOWN, marks=pytest.mark.slow
        ),
        pytest.param("import hvt.model\n" + KNOWN, marks=pytest.mark.slow),
        pytest.param("import hvt.data.arrays, hvt.registry\n" + KNOWN, marks=pytest.mark.slow),
    ],
    ids=["hvt first", "timm first", "model first", "torchvision first"],
)
def test_timm_knows_the_names_in_whatever_order(code: str) -> None:
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_the_public_names_are_what_dir_shows() -> None:
    assert dir(hvt) == sorted(hvt.__all__)
    assert set(hvt._HOMES) | {"power", "__version__"} == set(hvt.__all__)
    for name in hvt.__all__:
        assert getattr(hvt, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        hvt.trian  # noqa: B018


INTERRUPT = """
import builtins, os, signal, sys
moment, sys.argv = sys.argv[1], ["hvt", *sys.argv[2:]]
plain = builtins.__import__
def interrupted(name, *rest):
    if name == moment:
        os.kill(os.getpid(), signal.SIGINT)
    return plain(name, *rest)
builtins.__import__ = interrupted
from hvt.__main__ import main
raise SystemExit(main())
"""


@pytest.mark.parametrize(
    ("moment", "words"),
    [("argparse", ["models"]), ("rich.table", ["models"]), ("torch", ["predict", "cat.jpg"])],
)
def test_ctrl_c_is_quiet_while_modules_are_imported(moment: str, words: list[str]) -> None:
    done = python(INTERRUPT, moment, *words)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "hvt: stopped\n"


# What is on stderr when torch is asked for; the first of all its modules tells that it is.
FIRST_LINE = """
import builtins, sys
sys.argv[0] = "hvt"
plain = builtins.__import__
def stop_at_torch(name, *rest):
    if name == "torch.version" or "torch.version" in sys.modules:
        raise SystemExit("torch is imported")
    return plain(name, *rest)
builtins.__import__ = stop_at_torch
from hvt.__main__ import main
raise SystemExit(main())
"""


@pytest.mark.parametrize("words", [["train", "digits"], ["serve", "cifar100"]])
def test_the_first_line_is_there_before_torch(words: list[str], tmp_path: Path) -> None:
    done = python(FIRST_LINE, *words)
    assert done.stderr.splitlines() == ["loading torch", "torch is imported"]
    assert done.stdout == ""
