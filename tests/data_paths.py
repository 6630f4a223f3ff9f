"""Where test data lies: fixtures beside the tests, real weights where a machine has them."""

import os
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent / "fixtures"


def real_data(name: str) -> Path:
    """A file of the data folder, which `HVT_DATA` names; the test is skipped where it is absent."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    path = Path(os.environ.get("HVT_DATA", beside)) / name
    if not path.exists():
        pytest.skip(f"{name} is not in the data folder; HVT_DATA names it")
    return path


def npm_package(name: str) -> Path:
    """A package of `node_modules`, which `HVT_NODE_MODULES` names; the test is skipped without."""
    modules = os.environ.get("HVT_NODE_MODULES", "")
    path = Path(modules) / name
    if not modules or not path.is_dir():
        pytest.skip(f"HVT_NODE_MODULES names no folder with {name}: see make test-npm")
    return path
