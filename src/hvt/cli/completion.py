"""`hvt completion`: a script that completes commands, flags and names in a shell."""

from __future__ import annotations

import argparse
from typing import Any

from .flags import add_command

SHELLS = ("bash", "zsh", "tcsh", "fish")


def register(commands: Any) -> None:
    parser = add_command(
        commands, "completion", run_completion, "complete commands and flags in a shell",
        'eval "$(hvt completion bash)"    in ~/.bashrc\n'
        'eval "$(hvt completion zsh)"     in ~/.zshrc, after compinit\n'
        "hvt completion fish | source     in ~/.config/fish/config.fish",
    )  # fmt: skip
    parser.add_argument("shell", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")


def run_completion(args: argparse.Namespace) -> None:
    """Print a script that completes hvt's commands, flags and names in a shell."""
    import shtab

    from . import build_parser

    parser = build_parser()
    _add_names(parser)
    print(shtab.complete(parser, args.shell))


def _add_names(parser: argparse.ArgumentParser) -> None:
    """Offer names and files where there are any; this parser will parse nothing."""
    import shtab

    from ..training.recipe import list_recipes
    from ..zoo import list_models

    names = {dest: list_models() for dest in ("name", "pattern", "model")}
    names |= {"recipe": list_recipes()}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                _add_names(child)
        elif action.nargs == 0 or action.choices:
            continue
        elif action.dest in names:
            action.choices = names[action.dest]
        else:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
