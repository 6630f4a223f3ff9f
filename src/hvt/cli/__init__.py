"""The command line: one thin layer over the library."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder

from .. import __version__
from .._openmp import wait_briefly
from ..errors import HVTError
from ..terminal import printable
from ..training.interrupt import Interrupted
from .flags import Parser

_EXAMPLES = """\
examples:
  hvt models 'hvt_s_*'              the small models, their cost and tokens
  hvt cost hvt_s_4 --img-size 384   where the MACs go, block by block
  hvt train digits                  a first model, in a minute on two cores
  hvt fit IMAGES                    a classifier of your own images
  hvt predict cat.jpg               classify an image with the built-in model
  hvt plan --help                   flags and examples of a command
"""

COMMANDS = (
    "models", "cost", "plan", "search", "recipes", "fit", "check", "train", "eval", "predict",
    "embed", "export", "bench", "serve", "see", "power", "upcycle", "paper", "completion",
)  # fmt: skip
"""Each is in the module of its name, or of that in `_MODULES`: only one is imported, or all."""
_MODULES = {"cost": "models", "embed": "predict", "recipes": "train"}

LONG_RUNNING = ("train", "fit", "serve", "upcycle", "search", "power")
"""Commands that tell on stderr what they wait for before they have a log."""


def build_parser(words: Sequence[str] = ()) -> Parser:
    """The parser of a command line: with the command that it begins with, or else with all."""
    parser = Parser(
        prog="hvt",
        description="Vision transformers that get cheaper as they get deeper.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"hvt {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    first = words[0] if words else ""
    if first == "--version":
        return parser
    wanted = [first] if first in COMMANDS else COMMANDS
    for module in dict.fromkeys(_MODULES.get(name, name) for name in wanted):
        import_module(f".{module}", __name__).register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; bad input is one line on stderr and exit code 2."""
    words = sys.argv[1:] if argv is None else list(argv)
    wait_briefly()
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names need not be UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    code = 0
    try:
        try:
            code = _run(words)
        finally:
            sys.stdout.flush()  # or a full disk would be noticed too late for an error
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        _drop_output()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _drop_output()
        print(f"hvt: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    return code


def _run(words: Sequence[str]) -> int:
    try:
        parser = build_parser(words)
        args = parser.parse_args(words)
        if not hasattr(args, "run"):
            parser.print_help()
            return 0
        args.argv = words
        if words[0] in LONG_RUNNING and "RANK" not in os.environ:  # which torchrun sets
            sys.meta_path.insert(0, _TorchNotice())
        return args.run(args) or 0
    except HVTError as error:
        return _fail(error)
    except RuntimeError as error:
        from ..data.loader import worker_error

        if (ours := worker_error(error)) is None:
            raise
        return _fail(ours)
    except (Interrupted, KeyboardInterrupt) as stopped:
        if os.environ.get("RANK", "0") == "0":  # the other processes have the same to say
            print(f"hvt: {str(stopped) or 'stopped'}", file=sys.stderr)
        return 130


def _fail(error: HVTError) -> int:
    rank = os.environ.get("RANK", "0")  # the other processes may have reasons of their own
    who = "hvt" if rank == "0" else f"hvt ({rank})"
    print(f"{who}: {printable(str(error))}", file=sys.stderr)
    return 2


class _TorchNotice(MetaPathFinder):
    """Tells that torch is being imported, which takes seconds on a busy machine."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "torch" and self in sys.meta_path:
            sys.meta_path.remove(self)
            print("loading torch", file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Discard what is still buffered, so that Python does not write it again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
