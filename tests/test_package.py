"""What is packed: an sdist that runs its Makefile, and a README whose links lead somewhere."""

import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The paths in an sdist."""
    builders = pytest.importorskip("hatchling.builders.sdist", reason="hatchling is not installed")
    folder = tmp_path_factory.mktemp("sdist")
    (built,) = builders.SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with tarfile.open(built) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_an_sdist_has_what_its_makefile_runs_and_its_readme_links_to(names: set[str]) -> None:
    toml = (ROOT / "pyproject.toml").read_text()
    (checked,) = re.findall(r"^files = \[(.*)\]", toml, flags=re.M)
    for folder in re.findall(r'"([^"]+)"', checked):
        assert any(name.startswith(f"{folder}/") for name in names), folder
    scripts = re.findall(
        r"bin/python (\S+\.py)|\$\(BIN\)/python (\S+\.py)", (ROOT / "Makefile").read_text()
    )
    assert {path for pair in scripts for path in pair if path} <= names
    assert {"Makefile", "constraints.txt", "pyproject.toml", "README.md", "LICENSE"} <= names
    assert "hatch_build.py" in names
    linked = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert linked
    assert set(linked) <= names


@pytest.mark.parametrize("url", ["", "https://example.org/hvt/blob/v1/"])
def test_an_index_shows_no_link_that_leads_nowhere(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVT_URL", url)
    metadata = pytest.importorskip("hatchling.metadata.core", reason="hatchling is not installed")
    plugins = pytest.importorskip("hatchling.plugin.manager")
    project: Any = metadata.ProjectMetadata(str(ROOT), plugins.PluginManager())
    shown = project.core.readme
    links = re.findall(r"\]\(([^)]+)\)", shown)
    assert all(link.startswith("https://") for link in links)
    assert ("https://example.org/hvt/blob/v1/CONTRIBUTING.md" in links) == bool(url)
    assert ("docs/tradeoff.svg" in shown) == bool(url)
