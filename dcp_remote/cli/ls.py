"""`dcp-remote ls`: list the checkpoints of a run, from its catalog alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from dcp_remote.common.text import escape_unprintable, format_count, human_bytes
from dcp_remote.format.catalog import Catalog, Entry
from dcp_remote.run.run import require_run
from dcp_remote.storage import ObjectStore, open_store

# Short, because a user waits at a terminal: an outage is reported within seconds.
_RETRY_SECONDS = 10.0

# Characters of a name or other note in the table; `--json` prints all of it.
_NOTE_CHARACTERS_MAX = 60


def run(url: str, *, storage_options: Mapping[str, object], as_json: bool, out: TextIO) -> None:
    """Print the checkpoints of a run; one GET.

    Args:
        url: URL of the run.
        storage_options: Options as for `RemoteReader`.
        as_json: Print a JSON document instead of text.
        out: Output stream.

    Raises:
        CheckpointNotFoundError: There is no run at the URL.
        InvalidArgumentError: The URL is that of a checkpoint by itself.
        CorruptCheckpointError: The catalog is damaged.
        UnsupportedFormatError: A newer version of dcp_remote wrote the catalog.
    """
    store = open_store(url, storage_options)
    catalog = read_run_catalog(store)
    if as_json:
        out.write(json.dumps(_build_document(store.url, catalog), indent=2) + "\n")
        return
    size = human_bytes(sum(entry.size_bytes for entry in catalog.entries))
    count = format_count(len(catalog.entries), "checkpoint")
    out.write(escape_unprintable(f"{store.url}: {count}, {size} in total, shared shards counted in each") + "\n")
    out.writelines(f"{line}\n" for line in format_table(catalog.entries))


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
    flags = [
        *(["pinned"] if entry.pinned else []),
        *([f"without {', '.join(entry.thinned)}"] if entry.thinned else []),
        *(["abandoned"] if entry.abandoned else []),
    ]
    metrics = [f"{name} {value:g}" for name, value in entry.metrics]
    return "; ".join(_shorten(note) for note in [*flags, *(f'"{name}"' for name in entry.names), *metrics])


def _shorten(note: str) -> str:
    text = escape_unprintable(note)
    return text if len(text) <= _NOTE_CHARACTERS_MAX else f"{text[:_NOTE_CHARACTERS_MAX]}…"


def _build_document(url: str, catalog: Catalog) -> dict[str, object]:
    return {
        "url": url,
        "run_id": catalog.run_id,
        "revision": catalog.revision,
        "token": catalog.token,
        "checkpoints": [build_entry(entry) for entry in catalog.entries],
    }


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
