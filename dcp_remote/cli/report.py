"""`dcp-remote report`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Annotated

from dcp_remote.cli import html_page as page
from dcp_remote.cli.arguments import StorageOptions, Url, argument
from dcp_remote.cli.deletions import say_unreadable
from dcp_remote.cli.html_page import Markup, Series
from dcp_remote.cli.ls import read_run_catalog
from dcp_remote.cli.output import Output
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import human_bytes, human_seconds, join_some
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.catalog import Catalog, Entry
from dcp_remote.run.gc import TIMEOUT_SECONDS
from dcp_remote.run.info import find_seconds
from dcp_remote.run.usage import Usage, read_usage
from dcp_remote.storage import open_store
from dcp_remote.storage.url import is_remote

# Newest checkpoints, most frequent metrics and first errors that are shown, so that the file is below 2 MB.
_ENTRIES_MAX, _METRICS_MAX, _ERRORS_MAX = 2_000, 8, 10

_format_step, _format_value = "{:.0f}".format, "{:.6g}".format


def report(
    out: Output,
    url: Url,
    *,
    file: Annotated[
        str | None,
        argument("-o", metavar="FILE", help="file to write or replace (default: report.html, which is not replaced)"),
    ] = None,
    storage_options: StorageOptions = None,
) -> bool:
    """Write a report of a run: one HTML file, to open or to send.

    Shows when each step was saved and by which job, what was abandoned, pinned, named and thinned, what checkpoints
    share, and metrics as curves. Costs a GET of the catalog and one of each manifest. Exit code 1 if a manifest cannot
    be read.
    """
    path = Path("report.html" if file is None else file)
    if is_remote(file):
        raise InvalidArgumentError("The report can only be written to a local file. Name one by -o.")
    if file is None and path.exists():
        raise InvalidArgumentError(
            "There is such a file already. Name the file to write, or to replace, by -o.", file=path
        )
    store = open_store(url, storage_options)
    catalog = read_run_catalog(store)
    usage = read_usage(store, catalog, Deadline(TIMEOUT_SECONDS))
    text = page.make_page(f"Checkpoints of {store.url}", _make_parts(catalog, usage))
    with path.open("x" if file is None else "w", encoding="utf-8") as opened:  # it may have come meanwhile
        opened.write(text)
    out.say(f"{store.url}: the report is {path} ({human_bytes(path.stat().st_size)})")
    say_unreadable(out, usage)
    unreadable = sorted(entry.step for entry in usage.unreadable)
    out.give({"url": store.url, "file": str(path), "checkpoints": len(catalog.entries), "unreadable": unreadable})
    return bool(usage.unreadable)


def _make_parts(catalog: Catalog, usage: Usage) -> Iterator[Markup]:
    entries, newest = catalog.entries[-_ENTRIES_MAX:], catalog.latest()
    ordered = sorted(entries, key=lambda entry: (entry.token, entry.began_revision))
    jobs = [list(group) for _, group in groupby(ordered, key=lambda entry: entry.token)]
    summary = {
        "report": f"{_format_time(time.time())} UTC",
        "checkpoints": f"{len(catalog.entries)}, of which the newest {len(entries)} are in this report",
        "newest": "none" if newest is None else f"step {newest.step}, saved {newest.created}",
        "stored": human_bytes(sum(usage.sizes.values())) + " in shards" + " or more" * bool(usage.unreadable),
        "jobs": f"{len(jobs)} saved what is shown; the token, which each job raises, is {catalog.token}",
        "may save": f"job {catalog.token}: {catalog.holder or 'not described'}",
    }
    for state, chosen in {
        "pinned": [entry for entry in entries if entry.pinned],
        "named": [entry for entry in entries if entry.names],
        "thinned": [entry for entry in entries if entry.thinned],
        "abandoned": [entry for entry in entries if entry.abandoned],
    }.items():
        steps = join_some([entry.step for entry in reversed(chosen)])
        size = human_bytes(sum(entry.size_bytes for entry in chosen))
        summary[state] = f"{len(chosen)}, {size}: step {steps}" if chosen else "none"
    for entry, error in islice(usage.unreadable.items(), _ERRORS_MAX):
        summary[f"step {entry.step}"] = f"The manifest cannot be read: {error.message}"
    yield page.table("summary", ("what", "value"), list(summary.items()), right=0, wide=1_000)
    if entries:
        yield from _show_checkpoints(entries, jobs, usage)
        yield page.element("h2", "Jobs")
        header = ("job", "checkpoints", "ranks", "steps", "beginning", "software")
        yield page.table("jobs", header, list(_describe_jobs(jobs, usage)), right=4, wide=300)
        yield from _show_metrics(entries)


def _show_checkpoints(entries: Sequence[Entry], jobs: Sequence[list[Entry]], usage: Usage) -> Iterator[Markup]:
    yield page.element("h2", "Checkpoints")
    at = {entry: (seconds, entry.step) for entry in entries if (seconds := find_seconds(entry.created)) is not None}
    lines = [line for job in jobs if (line := [at[entry] for entry in job if entry in at])]
    timeline = [
        *(Series("link", (before[-1], after[0])) for before, after in pairwise(lines)),
        *(Series("line", line) for line in lines),
        Series("full", [at[entry] for entry in at if not (entry.thinned or entry.abandoned)], "complete"),
        Series("thin", [at[entry] for entry in at if entry.thinned], "thinned"),
        Series("left", [at[entry] for entry in at if entry.abandoned], "abandoned"),
        Series("kept", [at[entry] for entry in at if entry.pinned or entry.names], "pinned or named"),
    ]
    yield page.plot("Step by time (UTC)", timeline, form_x=_format_time, form_y=_format_step)
    own_bytes = {entry: usage.own_bytes(entry) for entry in entries}
    sizes = [
        Series("thin", [(entry.step, entry.size_bytes) for entry in entries], "size"),
        Series("full", [(e.step, own) for e, own in own_bytes.items() if own is not None], "used by no other"),
    ]
    yield page.plot("Bytes by step", sizes, form_x=_format_step, form_y=lambda size: human_bytes(int(size)))
    yield page.element("p", "What was deleted is in no document: a gap may be due to retention.")
    rows = []
    for entry, own in own_bytes.items():
        used = map(human_bytes, (entry.size_bytes, own, None if own is None else entry.size_bytes - own))
        state = [f"without {', '.join(entry.thinned)}"] if entry.thinned else []
        state += ["pinned"] * entry.pinned + ["abandoned"] * entry.abandoned
        numbers = (str(entry.step), str(entry.token), entry.created, *used)
        rows.append((*numbers, ", ".join(state), ", ".join(entry.names)))
    header = ("step", "job", "saved", "size", "used by no other", "shared", "state", "names")
    yield page.table("checkpoints", header, rows, right=6)


def _describe_jobs(jobs: Iterable[list[Entry]], usage: Usage) -> Iterator[tuple[str, ...]]:
    """Yield a row for each job; its beginning is told from the live checkpoints of the job before."""
    before: list[Entry] = []
    for job in jobs:
        beginning = ""
        if before:
            reached = max(entry.step for entry in before)
            began, ended = find_seconds(job[0].created), find_seconds(before[-1].created)
            pause = "" if began is None or ended is None else f", {human_seconds(max(0.0, began - ended))} later"
            has_gone_back = min(entry.step for entry in job) <= reached
            beginning = f"{'went back from' if has_gone_back else 'went on after'} step {reached}{pause}"
        before = job
        written = [entry for entry in job if entry in usage.writers]
        ranks = join_some(sorted({usage.world_sizes[entry] for entry in written}))
        software = sorted({", ".join(map(" ".join, usage.writers[entry].items())) for entry in written})
        steps = f"{min(entry.step for entry in job)} to {max(entry.step for entry in job)}"
        yield str(job[0].token), str(len(job)), ranks, steps, beginning, "; ".join(software)


def _show_metrics(entries: Sequence[Entry]) -> Iterator[Markup]:
    values = {entry: dict(entry.metrics) for entry in entries if entry.metrics}
    counts = Counter(name for metrics in values.values() for name in metrics)
    names = [name for name, _ in counts.most_common(_METRICS_MAX)]
    if not names:
        return
    yield page.element("h2", "Metrics")
    for name in names:
        known = {entry: metrics[name] for entry, metrics in values.items() if name in metrics}
        counted = [(entry.step, value) for entry, value in known.items() if not entry.abandoned]
        left = [(entry.step, value) for entry, value in known.items() if entry.abandoned]
        curves = [Series("line", counted), Series("full", counted, "by step"), Series("left", left, "abandoned")]
        yield page.plot(name, curves, form_x=_format_step, form_y=_format_value)
    rows = [
        (str(entry.step), *(_format_value(metrics[name]) if name in metrics else "" for name in names))
        for entry, metrics in values.items()
    ]
    yield page.table(f"{len(names)} of {len(counts)} metrics", ("step", *names), rows, right=1 + len(names))


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
