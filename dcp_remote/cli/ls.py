"""`dcp-remote ls`, and checkpoints of a run as other commands print them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

from dcp_remote.cli.arguments import StorageOptions, Url, argument, flag
from dcp_remote.cli.output import Output, format_rows
from dcp_remote.cli.show import RETRY_SECONDS
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import escape_unprintable, format_count, human_bytes, human_seconds, shorten
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.catalog import CATALOG_KEY, Catalog, Entry
from dcp_remote.format.keys import step_of
from dcp_remote.run.catalog_store import read_catalog
from dcp_remote.run.conditional_put import find_object
from dcp_remote.run.gc import find_orphans
from dcp_remote.run.info import CheckpointInfo, find_age_seconds, require_run, require_run_url
from dcp_remote.run.lookup import not_found
from dcp_remote.run.runs_below import FoundRun, list_runs
from dcp_remote.storage import ObjectInfo, ObjectStore, open_store
from dcp_remote.storage.retrying import RetryingStore

# Deadline for listing what lies below a URL: far longer, for a LIST and a GET for each of many runs.
_LIST_SECONDS = 600.0


def ls(
    out: Output,
    url: Url,
    *,
    recursive: Annotated[
        bool, argument("-r", action="store_true", help="list the runs below the URL of a bucket or folder")
    ] = False,
    abandoned: Annotated[
        bool, flag("list only the checkpoints that a job left behind when it went back to an older one")
    ] = False,
    failed: Annotated[
        bool, flag("list the steps of which only objects are left that no checkpoint uses: most often of failed saves")
    ] = False,
    storage_options: StorageOptions = None,
) -> bool:
    """List the checkpoints of a run, or with -r the runs below a URL.

    Of a run reads its catalog alone, one GET; sizes are those of whole checkpoints, and `dcp-remote du` tells what they
    share. -r costs at most a LIST and a GET for each run, and a LIST per thousand objects outside of runs; exit code 1
    if a run cannot be read. --failed costs a LIST per thousand objects, and a GET of each manifest. Saves that failed,
    were interrupted or replaced, or are under way look the same, and so do deletions that have not ended; a save that
    failed and could delete its objects leaves none.
    """
    if recursive + abandoned + failed > 1:
        raise InvalidArgumentError("-r, --abandoned and --failed exclude each other.")
    store = open_store(url, storage_options)
    asking = RetryingStore(store, Deadline(RETRY_SECONDS))
    catalog = read_catalog(asking)
    if catalog is None:
        require_run_url(asking)
        runs = list_runs(store, timeout_seconds=_LIST_SECONDS) if recursive else []
        if not runs:
            below = ", and none below" if recursive else "; `dcp-remote ls -r` looks below"
            raise not_found(asking, f"There is no committed checkpoint and no run (no catalog.json) here{below}.")
        return _print_runs(out, store, runs)
    if failed:
        return _print_failed(out, store)
    entries = [entry for entry in catalog.entries if entry.abandoned or not abandoned]
    count = format_count(len(catalog.entries), "checkpoint")
    title = f"{len(entries)} abandoned of {count}" if abandoned else count
    out.say(f"{store.url}: {title}{'; `dcp-remote du` tells what they share' if len(entries) > 1 else ''}")
    if catalog.holder:
        out.say(f"written by {catalog.holder}")
    out.say(*format_table(entries))
    out.give(
        {
            "url": store.url,
            "run_id": catalog.run_id,
            "revision": catalog.revision,
            "token": catalog.token,
            "holder": catalog.holder or None,
            "checkpoints": [build_entry(entry) for entry in entries],
        }
    )
    return False


def _print_runs(out: Output, store: ObjectStore, runs: Sequence[FoundRun]) -> bool:
    out.say(f"{store.url}: {format_count(len(runs), 'run')}")
    rows = [("run", "newest", "age", "newest's size", "written by"), *map(_format_run, runs)]
    out.say(*format_rows(rows, right=(False, True, True, True)))
    out.give(
        {
            "url": store.url,
            "runs": [
                {
                    "path": run.path,
                    "newest": build_entry(run.newest) if run.newest is not None else None,
                    "holder": run.holder or None,
                    "problem": run.problem,
                }
                for run in runs
            ],
        }
    )
    return any(run.problem is not None for run in runs)


def _print_failed(out: Output, store: ObjectStore) -> bool:
    orphans = find_orphans(store, grace_seconds=0, timeout_seconds=_LIST_SECONDS)
    by_step: defaultdict[int, list[ObjectInfo]] = defaultdict(list)
    for info in (*orphans.old, *orphans.young):
        by_step[step_of(info.key) or 0].append(info)
    rows = [("step", "last written", "size", "objects")] if by_step else []
    failed: list[dict[str, object]] = []
    for step, infos in sorted(by_step.items()):
        size_bytes = sum(info.size_bytes for info in infos)
        modified = datetime.fromtimestamp(max(info.modified_seconds for info in infos), UTC).isoformat(
            timespec="seconds"
        )
        rows.append((str(step), modified, human_bytes(size_bytes), str(len(infos))))
        failed.append({"step": step, "modified": modified, "bytes": size_bytes, "objects": len(infos)})
    out.say(f"{store.url}: {format_count(len(failed), 'step')} with objects that no checkpoint uses")
    out.say(*format_rows(rows, right=(True, False, True, True)))
    out.give({"url": store.url, "failed": failed})
    return False


def _format_run(run: FoundRun) -> tuple[str, ...]:
    last = run.problem or run.holder
    if run.newest is None:
        return run.path, "", "", "", last
    age_seconds = find_age_seconds(run.newest.created, time.time())
    age = human_seconds(age_seconds) if age_seconds is not None else ""
    return run.path, str(run.newest.step), age, human_bytes(run.newest.size_bytes), last


def require_answer(store: ObjectStore) -> None:
    """Raise unless the store answers soon: later requests of a command wait for an outage to end. One HEAD."""
    find_object(RetryingStore(store, Deadline(RETRY_SECONDS)), CATALOG_KEY)


def read_run_catalog(store: ObjectStore) -> Catalog:
    """Read the catalog of a run, as `require_run` does; an outage is reported within seconds."""
    return require_run(store, retry_seconds=RETRY_SECONDS)


def format_table(entries: Sequence[Entry]) -> Iterator[str]:
    """Return the aligned lines of a table of checkpoints, header first; none if there are no checkpoints."""
    rows = [("step", "saved", "size", "notes")] if entries else []
    rows += [
        (str(entry.step), entry.created, human_bytes(entry.size_bytes), describe_notes(entry)) for entry in entries
    ]
    return format_rows(rows, right=(True, False, True))


def describe_notes(entry: Entry) -> str:
    """Return marks, names and metrics of a checkpoint as a line, escaped."""
    notes = ["pinned"] if entry.pinned else []
    notes += [f"without {', '.join(entry.thinned)}"] if entry.thinned else []
    notes += ["abandoned"] if entry.abandoned else []
    notes += [f'"{name}"' for name in entry.names]
    notes += [f"{name} {value:g}" for name, value in entry.metrics]
    return "; ".join(shorten(escape_unprintable(note)) for note in notes)


def build_entry(entry: Entry) -> dict[str, object]:
    """Return a checkpoint as it is in JSON documents: as `CheckpointInfo`, with the size as `bytes`."""
    fields = asdict(CheckpointInfo.of(entry))
    return {"bytes" if name == "size_bytes" else name: value for name, value in fields.items()}
