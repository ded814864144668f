"""Tests of `dcp-remote report` through its command line: the file is parsed as a browser does."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given

from dcp_remote.cli.html_page import make_page
from dcp_remote.cli.report import _make_parts
from dcp_remote.common.deadline import Deadline
from dcp_remote.format import manifest_json
from dcp_remote.format.catalog import Catalog, pin_entry, take_fence
from dcp_remote.format.manifest import RunInfo
from dcp_remote.run.catalog_store import swap
from dcp_remote.run.deletions import Deletions
from dcp_remote.run.usage import Usage
from dcp_remote.storage import LocalStore, MemoryStore
from dcp_remote.testing import RecordingStore
from tests.support.catalogs import catalogs
from tests.support.command_line import CommandLine
from tests.support.manifests import decode
from tests.support.runs import entry_of, fence, manifest_of, put_catalog, save, thin
from tests.support.schemas import require_schema

HOSTILE = "s3://me:pass-word@host/x?X-Amz-Signature=sig-nature&token=to-ken "
HOSTILE += "</td></svg><script>alert(1)</script><img src=//evil onerror='x'>\"\x1b[2J\u202e"
LONG = f"https://oauth2:pass-word{'w' * 3_000}@host/x"  # a token in place of a password


class Page(HTMLParser):
    """Rows of cells of each table, header first, by title; data of all paths; elements and attributes that are used."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.paths, self.used = list[str](), set[str]()
        self.feed(text)
        assert not self.used & {"script", "img", "link", "iframe", "a", "src", "href", "onerror"}
        assert all(re.fullmatch(r"[Mh\d. ]+", path) for path in self.paths), "nan, inf, or no point at all"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.used |= {tag, *values}
        self.paths += [values["d"]] if tag == "path" else []
        if "role" in values and tag == "div":
            self.tables[values["aria-label"]] = []
        elif tag == "tr":
            [*self.tables.values()][-1].append([])
        elif tag in ("th", "td"):
            [*self.tables.values()][-1][-1].append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag in ("th", "td"):
            [*self.tables.values()][-1][-1][-1] += data.strip("\n")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """Save 100 to 300 by a job; then one that saves nothing, and one that goes back to 200 and saves 250 and 400."""
    monkeypatch.chdir(tmp_path)
    store = LocalStore(tmp_path / "run")
    save(store, 100, metrics=(("loss", 0.5),))
    save(store, 200, base=100, names=("best",), metrics=(("loss", 0.25), ("acc", 0.75)))
    save(store, 300, base=200, metrics=(("loss", 9.0),))
    thin(Deletions(store), [100], deadline=Deadline(30))
    fence(store)
    swap(store, lambda now: pin_entry(take_fence(now, "gpu-07, pid 4711"), 200, pin=True), deadline=Deadline(30))
    save(store, 250, base=200, abandons=200, metrics=(("loss", 0.125),))
    save(store, 400, base=250)
    return store


def read_report(cli: CommandLine, *arguments: object, code: int = 0) -> Page:
    cli.run("report", *arguments, "-o", "out.html", code=code)
    return Page(Path("out.html").read_text())


def test_tells_what_the_documents_tell(cli: CommandLine, run: LocalStore) -> None:
    """Read the tables: checkpoints with their bytes as `du` prints them, jobs, what is kept, and metrics."""
    page = read_report(cli, run.url)
    rows = {row[0]: row[1:] for row in page.tables["checkpoints"][1:]}
    own = {row["step"]: row["own_bytes"] for row in cli.run("du", run.url, "--json").document["steps"]}
    assert rows["200"][2:] == ["682 B", f"{own[200]} B", f"{682 - own[200]} B", "pinned", "best"]
    assert (len(rows), rows["100"][5], rows["300"][5], rows["400"][0]) == (5, "without optim", "abandoned", "3")
    assert page.tables["jobs"][1][:5] == ["1", "3", "4", "100 to 300", ""]
    assert page.tables["jobs"][2][:5] == ["3", "2", "4", "250 to 400", "went back from step 300, 0 s later"]
    summary = dict(page.tables["summary"])
    assert summary["jobs"] == "2 saved what is shown; the token, which each job raises, is 3"
    assert (summary["may save"], summary["thinned"]) == ("job 3: gpu-07, pid 4711", "1, 498 B: step 100")
    assert page.tables["2 of 2 metrics"][:3] == [["step", "loss", "acc"], ["100", "0.5", ""], ["200", "0.25", "0.75"]]


def test_hostile_texts_are_text_without_secrets(cli: CommandLine, run: LocalStore) -> None:
    """Put markup and signed URLs into all texts of the documents: the page has the elements that it has without."""
    used = read_report(cli, run.url).used

    def spoil(now: Catalog) -> Catalog:
        first, second, *others = now.entries
        first = replace(first, names=(HOSTILE,), thinned=(HOSTILE,), metrics=((HOSTILE, 1.0), ("x", 1.7e308)))
        second = replace(second, created=HOSTILE, metrics=((HOSTILE, 5e-324), ("x", -1.7e308)))
        return replace(now, revision=now.revision + 1, holder=HOSTILE, entries=(first, second, *others))

    for entry in swap(run, spoil, deadline=Deadline(30)).entries:
        path = Path("run", entry.manifest)
        spoiled = replace(decode(path.read_bytes()), writer={HOSTILE: HOSTILE, LONG: LONG})
        path.write_bytes(manifest_json.encode(spoiled))
    page = read_report(cli, run.url)
    assert page.used == used, "no element and no attribute more"
    assert not re.search(r"pass-word|sig-nature|to-ken|\x1b|\u202e", Path("out.html").read_text())
    assert "…@host/x?… </td></svg><script>alert(1)</script>" in dict(page.tables["summary"])["may save"]


@given(catalogs())
def test_any_catalog_makes_a_page(drawn: Catalog) -> None:
    """Draw catalogs that a reader accepts, whose manifests are gone: numbers of any size, texts of any kind."""
    page = Page(make_page("x", _make_parts(drawn, Usage())))
    assert len(page.tables.get("checkpoints", [()])) == len(drawn.entries) + 1


def test_a_long_run(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 2,100 checkpoints with long names: a GET each, and a file below 2 MB that shows 2,000."""
    store, before, entries = MemoryStore(), None, []
    metrics = tuple((f"{name}{'m' * 300}", 0.123456789) for name in range(10))
    for step in range(10**9, 10**9 + 2_100):
        before = manifest_of(RunInfo("f" * 32, step, step % 50, 0, (f"{step}" + "<" * 300,), metrics), base=before)
        entries.append(entry_of(f"manifests/{step}.json", before))
        store.put(entries[-1].manifest, [manifest_json.encode(before)])
    put_catalog(store, Catalog("f" * 32, revision=1, token=50, entries=tuple(entries)))
    recording = RecordingStore(store)
    monkeypatch.setattr("dcp_remote.cli.report.open_store", lambda url, options: recording)
    monkeypatch.chdir(tmp_path)
    assert len(read_report(cli, "memory://x").tables["checkpoints"]) == 1 + 2_000
    assert Path("out.html").stat().st_size < 2_000_000
    assert (recording.count("get"), recording.count()) == (1 + 2_100, 1 + 2_100)


def test_files_and_failures(cli: CommandLine, run: LocalStore) -> None:
    """Write report.html once, replace what -o names, miss a manifest, and report a run that has saved nothing."""
    require_schema("report", cli.run("report", run.url, "--json").document)
    cli.fail("report", run.url, code=2, says="to replace, by -o")
    cli.fail("report", run.url, "-o", "s3://bucket/x", code=2, says="local file")
    next(Path("run").glob("manifests/step-000000000300-*")).write_bytes(b"{}")
    page = read_report(cli, run.url, code=1)
    assert {row[4] for row in page.tables["checkpoints"][1:]} == {"?"}
    assert "cannot be read" in dict(page.tables["summary"])["step 300"]
    fence(LocalStore("empty"))
    assert dict(read_report(cli, "empty").tables["summary"])["newest"] == "none"
