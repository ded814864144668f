"""Pages about the package: the files and functions that they name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dcp_remote"
PAGES = [PACKAGE / "ARCHITECTURE.md", PACKAGE / "run" / "PROTOCOL.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    """Of this repository; relative to the page."""
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """From the root, below the package, or somewhere in it where only the file's name is given."""
    known = {path.name for path in PACKAGE.rglob("*.py")} | {path.name for path in (ROOT / "tests").rglob("*.py")}
    for name in re.findall(r"`([\w/]+\.py)`", page.read_text()):
        places = [ROOT / name, PACKAGE / name, ROOT / "tests" / name]
        assert any(place.exists() for place in places) or ("/" not in name and name in known), name


def test_functions_on_the_ways_exist() -> None:
    """Each row of the two ways names functions that one of its files defines."""
    ways = (
        (PACKAGE / "ARCHITECTURE.md").read_text().partition("## The way of a tensor")[2].partition("## Which file")[0]
    )
    rows = re.findall(r"^\| (`[^|]*\.py`[^|]*) \| ([^|]*) \|", ways, re.MULTILINE)
    assert len(rows) > 20
    for files, functions in rows:
        folder, text = PACKAGE, ""
        for name in re.findall(r"`([\w/]+\.py)`", files):
            path = PACKAGE / name if (PACKAGE / name).exists() else folder / name
            folder = path.parent
            text += path.read_text()
        for function in re.findall(r"`([\w.]+)`", functions):
            assert re.search(rf"(def|class) {function.rpartition('.')[2]}\b", text), (files, function)
