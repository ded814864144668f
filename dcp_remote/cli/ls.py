"""`dcp-remote ls`, and checkpoints of a run as other commands print them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Annotated

from dcp_remote.cli.arguments import StorageOptions, Url, flag
from dcp_remote.cli.output import Output
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import escape_unprintable, format_count, human_bytes, human_seconds, shorten
from dcp_remote.errors import PermissionDeniedError
from dcp_remote.format.catalog import Catalog, Entry
from dcp_remote.run.catalog_store import read_catalog
from dcp_remote.run.info import PlaceInfo, find_age_seconds, list_places, require_run, require_run_url
from dcp_remote.run.lookup import not_found, require_not_lost, require_reachable
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.storage.retrying import RetryingStore

# Short, because a user waits at a terminal: an outage is reported within seconds.
_RETRY_SECONDS = 10.0

# Deadline for listing what lies below a URL: far longer, for a LIST and a GET for each of many runs.
_LIST_SECONDS = 600.0


def ls(
    out: Output,
    url: Url,
    *,
    recursive: Annotated[bool, flag("list the runs at any depth below the URL", short="-r")] = False,
    abandoned: Annotated[
        bool, flag("list only the checkpoints that a job left behind when it went back to an older one")
    ] = False,
    storage_options: StorageOptions = None,
) -> bool:
    """List the checkpoints of a run, or the runs below a URL.

    Of a run reads its catalog alone, one GET; sizes are those of whole checkpoints, and `dcp-remote du` tells what they
    share. Below any other URL finds the runs, and the checkpoints by themselves, with about a LIST and a GET for each.
    """
    store = open_store(url, storage_options)
    asking = RetryingStore(store, Deadline(_RETRY_SECONDS))
    catalog = read_catalog(asking)
    if catalog is None:
        require_run_url(asking)
        return _list_places(out, store, is_recursive=recursive)
    entries = [entry for entry in catalog.entries if entry.abandoned or not abandoned]
    count = format_count(len(catalog.entries), "checkpoint")
    title = f"{len(entries)} abandoned of {count}" if abandoned else count
    out.say(f"{store.url}: {title}{'; `dcp-remote du` tells what they share' if len(entries) > 1 else ''}")
    out.say(*format_table(entries))
    out.give(
        {
            "url": store.url,
            "run_id": catalog.run_id,
            "revision": catalog.revision,
            "token": catalog.token,
            "checkpoints": [build_entry(entry) for entry in entries],
        }
    )
    return False


def _list_places(out: Output, store: ObjectStore, *, is_recursive: bool) -> bool:
    asking = RetryingStore(store, Deadline(_RETRY_SECONDS))
    require_reachable(asking)
    require_not_lost(asking)
    found: list[PlaceInfo] = []
    with suppress(PermissionDeniedError):  # without a grant to list, the error for a URL without a run is the answer
        found = list_places(store, is_recursive=is_recursive, timeout_seconds=_LIST_SECONDS)
    if not found:
        below = "" if is_recursive else ", and none directly below; `dcp-remote ls -r` looks deeper"
        raise not_found(asking, f"There is no committed checkpoint and no run (no catalog.json) here{below}.")
    runs = sum(info.place.kind != "checkpoint" for info in found)
    alone = len(found) - runs
    out.say(
        f"{store.url}: {format_count(runs, 'run')}"
        + (f", {format_count(alone, 'checkpoint')} outside of runs" if alone else "")
    )
    rows = [("run", "newest", "age", "checkpoints", "newest's size", "notes"), *map(_format_place, found)]
    out.say(*format_rows(rows, right=(False, True, True, True, True)))
    names = ("step", "created", "checkpoints", "size_bytes", "problem")
    out.give(
        {
            "url": store.url,
            "runs": [
                {"path": info.place.path, "url": info.url, "kind": info.place.kind.replace(" ", "_")}
                | {name.removeprefix("size_"): getattr(info, name) for name in names}
                for info in found
            ],
        }
    )
    return any(info.problem is not None for info in found)


def _format_place(info: PlaceInfo) -> tuple[str, ...]:
    is_alone = info.place.kind == "checkpoint"
    age_seconds = find_age_seconds(info.created, time.time()) if info.created is not None else None
    return (
        escape_unprintable(info.place.path),
        "" if info.step is None else str(info.step),
        "" if age_seconds is None else human_seconds(age_seconds),
        "" if is_alone or info.problem is not None else str(info.checkpoints),
        "" if info.size_bytes is None else human_bytes(info.size_bytes),
        escape_unprintable(info.problem or ("checkpoint outside of a run" if is_alone else "")),
    )


def read_run_catalog(store: ObjectStore) -> Catalog:
    """Read the catalog of a run, as `require_run` does; an outage is reported within seconds."""
    return require_run(store, retry_seconds=_RETRY_SECONDS)


def format_table(entries: Sequence[Entry]) -> Iterator[str]:
    """Return the aligned lines of a table of checkpoints, header first; none if there are no checkpoints."""
    rows = [("step", "saved", "size", "notes")] if entries else []
    rows += [
        (str(entry.step), escape_unprintable(entry.created), human_bytes(entry.size_bytes), _describe_notes(entry))
        for entry in entries
    ]
    return format_rows(rows, right=(True, False, True))


def format_rows(rows: Sequence[Sequence[str]], *, right: Sequence[bool]) -> Iterator[str]:
    """Yield the aligned lines of a table; `right` tells which columns are flush right, all but the last one."""
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(len(right))]
    for row in rows:
        cells = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=False)
        ]
        yield "  ".join([*cells, *row[len(right) :]]).rstrip()


def _describe_notes(entry: Entry) -> str:
    notes = ["pinned"] if entry.pinned else []
    notes += [f"without {', '.join(entry.thinned)}"] if entry.thinned else []
    notes += ["abandoned"] if entry.abandoned else []
    notes += [f'"{name}"' for name in entry.names]
    notes += [f"{name} {value:g}" for name, value in entry.metrics]
    return "; ".join(shorten(escape_unprintable(note)) for note in notes)


def build_entry(entry: Entry) -> dict[str, object]:
    """Return a checkpoint as it is in JSON documents."""
    return {
        "step": entry.step,
        "save_id": entry.save_id,
        "created": entry.created,
        "bytes": entry.size_bytes,
        "names": list(entry.names),
        "metrics": dict(entry.metrics),
        "pinned": entry.pinned,
        "thinned": list(entry.thinned),
        "abandoned": entry.abandoned,
    }
