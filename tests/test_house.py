"""Imports go down the list of rooms in CONTRIBUTING.md, and never round in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "hvt"
TOP = ("__init__", "__main__")


def rooms() -> dict[str, int]:
    """Each room's floor, the lowest first, as CONTRIBUTING.md lists them from the top."""
    page = ROOT / "CONTRIBUTING.md"
    if not page.exists():
        pytest.skip("a source distribution has no CONTRIBUTING.md")
    text = page.read_text(encoding="utf-8")
    listed = text.partition("<!-- house:begin -->")[2].partition("<!-- house:end -->")[0]
    lines = [line.strip() for line in listed.splitlines() if line.strip(" `")]
    names = [line.split("  ")[0].split() for line in lines]
    return {name: floor for floor, row in enumerate(reversed(names)) for name in row}


def modules() -> dict[str, Path]:
    """Every module by its dotted name below `hvt`."""
    result = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)
        result[name] = path
    return result


def imports(name: str, path: Path) -> Iterator[tuple[str, int]]:
    """The modules of ours that a module imports anywhere in it, `TYPE_CHECKING` blocks aside."""
    known = modules()
    whole = "hvt" if name in TOP else f"hvt.{name}"
    package = whole if path.name == "__init__.py" or name in TOP else whole.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    ignored = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in ignored or not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        for imported in targets(node, package):
            top, _, inner = imported.partition(".")
            if top == "hvt" and inner != "__version__":  # a string, set before any import
                module = inner if inner in known else inner.rpartition(".")[0]
                yield module or "__init__", node.lineno


def targets(node: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    """What a statement imports, as absolute dotted names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = resolve_name("." * node.level + (node.module or ""), package)
    return [f"{base}.{alias.name}" for alias in node.names]


def test_every_module_has_a_room() -> None:
    named = {name.split(".")[0] for name in modules()} - set(TOP)
    assert named == set(rooms())


def test_no_import_goes_up() -> None:
    floor = rooms()
    upwards = []
    for name, path in modules().items():
        own = name.split(".")[0]
        for target, line in imports(name, path):
            other = target.split(".")[0]
            if own in TOP or own == other:
                continue
            if other in TOP or floor[other] > floor[own]:
                upwards.append(f"{path.relative_to(ROOT)}:{line} imports {target}")
    assert not upwards, "\n".join(upwards)


def test_no_modules_import_each_other() -> None:
    graph = {
        name: {t for t, _ in imports(name, path) if t != name and t not in TOP}
        for name, path in modules().items()
    }
    # A room's __init__ collects what is in it, which may import nothing of the collection.
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_no_module_but_the_model_is_long() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert [name for name, count in lines.items() if count > 400] in ([], ["model"])
