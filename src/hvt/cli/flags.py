"""Dataclass fields as command-line flags, with their help, types and nearest names."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..errors import did_you_mean
from ..fields import MAX_THREADS, expected, fits, hints_of, options_of


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows several words such as `[MODEL] IMAGE…` as they are, instead of repeating them."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if isinstance(action.metavar, str) and " " in action.metavar:
            return action.metavar
        return super()._format_args(action, default_metavar)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line that suggests the nearest flag; exit code 2."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Formatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        # A field's own spelling, --num_classes, works too.
        dashed = [re.sub("^--[a-z_]+", lambda m: m[0].replace("_", "-"), word) for word in args]
        known, unknown = self.parse_known_args(dashed, namespace)
        if hasattr(known, "others"):  # argparse leaves over those that follow a flag
            words = [word for word in unknown if not word.startswith("-")]
            known.others = [*known.others, *words]
            unknown = [flag for flag in unknown if flag.startswith("-")]
        if unknown:
            # The subcommand's own flags are the ones to compare with.
            owner: Parser = getattr(known, "parser", self)
            flag = unknown[0].split("=")[0]
            if not flag.startswith("-"):
                owner.error(f"{flag!r} is one argument too many")
            flags = [name for action in owner._actions for name in action.option_strings]
            ending = [f"did you mean {name}?" for name in flags if name.endswith(flag[1:])]
            owner.error(f"unknown flag {flag!r}: {(ending or [did_you_mean(flag, flags)])[0]}")
        return known

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = "command" if isinstance(action, argparse._SubParsersAction) else action.dest
            message = f"unknown {what} {value!r}: {did_you_mean(str(value), action.choices)}"
            raise argparse.ArgumentError(None, message)

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument \S+: (?=\w+=)", "", message)  # our converters name the field
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def add_fields(
    parser: argparse._ActionsContainer, cls: type, skip: Sequence[str] = (), shown: Any = None
) -> None:
    """A flag for each field of a dataclass; what is not given is left out of the namespace.

    Help shows the class's defaults, or the values of the instance `shown`.
    """
    hints = hints_of(cls)
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        default = getattr(shown or cls, field.name, None)
        suffix = "" if default in (None, "", ()) else f" (default: {default})"
        text = field.metadata.get("help", "") + suffix
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        if bool in options_of(hints[field.name]):
            options["action"] = argparse.BooleanOptionalAction
        elif hints[field.name] == tuple[str, ...]:  # a name may hold any separator
            options |= {"action": "append", "metavar": "TEXT"}
        else:
            options["type"] = converter(field.name, hints[field.name])
            options["metavar"] = _metavar(hints[field.name])
        parser.add_argument(f"--{field.name.replace('_', '-')}", help=text, **options)


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    help: str,
    examples: str,
) -> Parser:
    """Add a command; the docstring of the function that runs it is its description."""
    parser: Parser = commands.add_parser(
        name,
        help=help,
        description=inspect.getdoc(run),
        epilog="examples:\n" + textwrap.indent(examples.strip(), "  "),
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_group(commands: Any, name: str, help: str, examples: str, description: str) -> Any:
    """Add a command with subcommands; without one it shows its help."""

    def run(args: argparse.Namespace) -> None:
        args.parser.print_help()

    run.__doc__ = description
    group = add_command(commands, name, run, help, examples)
    return group.add_subparsers(metavar="COMMAND", parser_class=Parser)


_SHARED: dict[str, dict[str, Any]] = {
    "--allow-changed-data": {"help": "resume even if images have changed", "kind": bool},
    "--batch-size": {"help": "images per batch", "kind": int, "default": 64, "ge": 1},
    "--csv": {"help": "print CSV", "kind": bool},
    "--device": {"help": "auto, cpu, cuda …", "default": "auto"},
    "--gflops": {"help": "for an elastic checkpoint: the largest setting within this cost",
                 "kind": float, "gt": 0},
    "--json": {"help": "print JSON", "kind": bool},
    "--match-by-order": {"help": "match classes by order instead of by name",
                         "kind": bool},
    "--plot": {"help": "draw the results", "metavar": "PNG|SVG"},
    "--pretrained": {"help": "download the published weights of a named model", "kind": bool},
    "--root": {"help": "folder that contains the named dataset"},
    "--threads": {"help": "CPU threads (default: torch's)", "kind": int, "ge": 1,
                  "le": MAX_THREADS},
}  # fmt: skip
"""Flags of several commands, as `add_flag` takes them."""


def add_shared(parser: argparse._ActionsContainer, *flags: str) -> None:
    """Add flags that mean the same for several commands."""
    for flag in flags:
        add_flag(parser, flag, **_SHARED[flag])


def add_flag(
    parser: argparse._ActionsContainer,
    flag: str,
    help: str,
    kind: Any = str,
    default: Any = None,
    metavar: str | None = None,
    required: bool = False,
    **limits: Any,
) -> None:
    """Add a flag: a switch for `bool`, else a value within the bounds of `fields.field`."""
    if kind is bool:
        parser.add_argument(flag, action="store_true", help=help)
        return
    shown = help if default in (None, argparse.SUPPRESS) else f"{help} (default: {default})"
    convert = converter(flag.strip("-").replace("-", "_"), kind, **limits)
    metavar = metavar or (None if kind is str else _metavar(kind))
    parser.add_argument(
        flag, type=convert, default=default, metavar=metavar, required=required, help=shown
    )


def keywords_of(function: Callable[..., Any], args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a function, or fields of a dataclass, that the command line has by name."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in vars(args).items() if name in names}


def converter(name: str, hint: Any, **limits: Any) -> Callable[[str], Any]:
    """An argparse `type`: from text to `hint`, within the bounds of `fields.field`."""
    options = options_of(hint)

    def convert(text: str) -> Any:
        if type(None) in options and text.lower() in ("none", "null"):
            return None
        for option in options:
            try:
                value = _read(option, text)
            except (TypeError, ValueError):
                continue
            if not limits or (value != () and fits(value, option, **limits)):
                return value
        raise argparse.ArgumentTypeError(f"{name}={text!r} must be {expected(hint, **limits)}")

    return convert


def _read(option: Any, text: str) -> Any:
    if typing.get_origin(option) is not tuple:
        return option(text)
    of, *rest = typing.get_args(option)
    inner = text.strip("()[] ").removesuffix(",")
    parts = re.split(r"[x,]\s*|\s+" if of is not str else r",\s*", inner) if inner else []
    if rest != [...] and len(parts) != 1 + len(rest):
        raise ValueError
    return tuple(of(part) for part in parts)


def _metavar(hint: Any) -> str | None:
    """A name for the values of a flag, such as `N|NxN`; None leaves it to argparse."""
    names: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}
    names |= {tuple[int, ...]: "N,N,…", tuple[float, ...]: "X,X,…", tuple[int, int]: "NxN"}
    return "|".join(names[option] for option in options_of(hint) if option in names) or None
