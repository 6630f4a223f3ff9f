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
