"""`dcp-remote ls`, and checkpoints of a run as other commands print them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dcp_remote.cli.arguments import StorageOptions, Url
from dcp_remote.cli.output import Output
from dcp_remote.common.text import escape_unprintable, format_count, human_bytes, shorten
from dcp_remote.format.catalog import Catalog, Entry
from dcp_remote.run.info import require_run
from dcp_remote.storage import ObjectStore, open_store

# Short, because a user waits at a terminal: an outage is reported within seconds.
_RETRY_SECONDS = 10.0


def ls(out: Output, url: Url, *, storage_options: StorageOptions = None) -> None:
    """List the checkpoints of a run.

    Reads its catalog alone: one GET.
    """
    store = open_store(url, storage_options)
    catalog = read_run_catalog(store)
    size = human_bytes(sum(entry.size_bytes for entry in catalog.entries))
    count = format_count(len(catalog.entries), "checkpoint")
    out.say(f"{store.url}: {count}, {size} in total, shared shards counted in each")
    if catalog.holder:
        out.say(f"written by {catalog.holder}")
    out.say(*format_table(catalog.entries))
    out.give(
        {
            "url": store.url,
            "run_id": catalog.run_id,
            "revision": catalog.revision,
            "token": catalog.token,
            "holder": catalog.holder or None,
            "checkpoints": [build_entry(entry) for entry in catalog.entries],
        }
    )


def read_run_catalog(store: ObjectStore) -> Catalog:
    """Read the catalog of a run, as `require_run` does; an outage is reported within seconds."""
    return require_run(store, retry_seconds=_RETRY_SECONDS)


def format_table(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield the aligned lines of a table of checkpoints, header first; none if there are no checkpoints."""
    rows = [("step", "saved", "size", "notes")] if entries else []
    rows += [
        (str(entry.step), escape_unprintable(entry.created), human_bytes(entry.size_bytes), _describe_notes(entry))
        for entry in entries
    ]
    widths = [max(len(row[column]) for row in rows) if rows else 0 for column in range(3)]
    for step, saved, size, notes in rows:
        yield f"{step:>{widths[0]}}  {saved:<{widths[1]}}  {size:>{widths[2]}}  {notes}".rstrip()


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
