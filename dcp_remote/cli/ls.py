"""`dcp-remote ls`: the checkpoints of a run, from its catalog alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from dcp_remote.catalog import Catalog, Entry
from dcp_remote.catalog_store import read_catalog
from dcp_remote.checkpoint import not_found
from dcp_remote.errors import InvalidArgumentError, ObjectNotFoundError
from dcp_remote.manifest import MANIFEST_KEY
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.storage.retrying import Deadline, RetryingStore
from dcp_remote.terminal import counted, human_bytes, printable

# Somebody looks at a terminal: an outage is told in seconds, not retried for minutes.
_RETRY_SECONDS = 10.0

# A terminal is not a disk: whoever wants all of it asks for JSON.
_NOTE_CHARACTERS_MAX = 60


def run(url: str, *, storage_options: Mapping[str, object], as_json: bool, out: TextIO) -> None:
    """Print the checkpoints of a run; one GET.

    Args:
        url: Of the run.
        storage_options: As for `RemoteReader`.
        as_json: A JSON document instead of text.
        out: Where to.

    Raises:
        CheckpointNotFoundError: There is no run here.
        InvalidArgumentError: This is a checkpoint by itself.
        CorruptCheckpointError: The catalog is damaged.
        UnsupportedFormatError: A newer version wrote it.
    """
    store = open_store(url, storage_options)
    catalog = catalog_of(store)
    if as_json:
        out.write(json.dumps(_document(store.url, catalog), indent=2) + "\n")
        return
    size = human_bytes(sum(entry.size_bytes for entry in catalog.entries))
    out.write(printable(f"{store.url}: {counted(len(catalog.entries), 'checkpoint')}, {size} named") + "\n")
    out.writelines(f"{line}\n" for line in table(catalog.entries))


def catalog_of(store: ObjectStore) -> Catalog:
    """The catalog of a run; one GET. Where there is none, a few more say why.

    Raises:
        CheckpointNotFoundError: There is no run here, or it has lost its catalog.
        InvalidArgumentError: This is a checkpoint by itself.
        CorruptCheckpointError: The catalog is damaged.
        UnsupportedFormatError: A newer version wrote it.
    """
    asking = RetryingStore(store, Deadline(_RETRY_SECONDS))
    seen = read_catalog(asking)
    if seen is not None:
        return seen.catalog
    try:
        asking.head(MANIFEST_KEY)
    except ObjectNotFoundError as error:
        raise not_found(asking) from error
    raise InvalidArgumentError(
        "This is a checkpoint by itself, not a run: `dcp-remote show` says what it holds. To remove it, remove "
        "everything below its URL, manifest.json first.",
        url=store.url,
    )


def table(entries: Sequence[Entry]) -> Iterator[str]:
    """Lines for a terminal, aligned; none of no checkpoints."""
    rows = [("step", "saved", "size", "notes")] if entries else []
    rows += [
        (str(entry.step), printable(entry.created), human_bytes(entry.size_bytes), _notes(entry)) for entry in entries
    ]
    widths = [max(len(row[column]) for row in rows) if rows else 0 for column in range(3)]
    for step, saved, size, notes in rows:
        yield f"{step:>{widths[0]}}  {saved:<{widths[1]}}  {size:>{widths[2]}}  {notes}".rstrip()


def _notes(entry: Entry) -> str:
    flags = [
        *(["pinned"] if entry.pinned else []),
        *([f"without {', '.join(entry.thinned)}"] if entry.thinned else []),
        *(["abandoned"] if entry.abandoned else []),
    ]
    metrics = [f"{name} {value:g}" for name, value in entry.metrics]
    return "; ".join(_short(note) for note in [*flags, *(f'"{name}"' for name in entry.names), *metrics])


def _short(note: str) -> str:
    text = printable(note)
    return text if len(text) <= _NOTE_CHARACTERS_MAX else f"{text[:_NOTE_CHARACTERS_MAX]}…"


def _document(url: str, catalog: Catalog) -> dict[str, object]:
    return {
        "url": url,
        "run_id": catalog.run_id,
        "revision": catalog.revision,
        "token": catalog.token,
        "checkpoints": [
            {
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
            for entry in catalog.entries
        ],
    }
