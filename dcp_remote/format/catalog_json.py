"""Encoding and decoding of catalogs: JSON, sealed with a digest (`document.py`). Decoding is typed and bounded."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import msgspec

from dcp_remote.common.text import is_unicode
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError
from dcp_remote.format.catalog import Catalog, Entry
from dcp_remote.format.columns import VALUE_MAX
from dcp_remote.format.document import VERSION, open_document, parse, require_features, seal

FORMAT = "dcp_remote catalog"

# One checkpoint a minute for a year; a larger catalog would be slow to swap, and comes from a run without retention.
# A save reads the catalog two or three times, and decodes each revision once: 0.15 s of CPU for 10,000 checkpoints.
ENTRIES_MAX = 500_000
STORED_BYTES_MAX = 64 * 1024 * 1024

_NAME_CHARACTERS_MAX = 1_000

_ID = re.compile(r"[0-9a-f]{32}")
_MANIFEST_KEY = re.compile(r"manifests/[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}\.json", re.ASCII)


class _Entry(msgspec.Struct, omit_defaults=True, rename={"began_revision": "began"}):
    """Fields of an `Entry`, in its order; metrics as an object."""

    step: int
    save_id: str
    manifest: str
    size_bytes: int
    created: str
    token: int
    began_revision: int
    names: tuple[str, ...] = ()
    metrics: dict[str, float] = {}
    pinned: bool = False
    thinned: tuple[str, ...] = ()
    abandoned: bool = False


class _Document(msgspec.Struct, omit_defaults=True):
    format: str
    version: str
    requires: list[str]
    nonce: str
    run_id: str
    revision: int
    token: int
    floor: int
    checkpoints: list[_Entry]
    holder: str = ""
    requires_to_write: list[str] = []


# Made here, in one thread: two threads that decode a type for the first time at the same moment crash msgspec 0.22.
_DOCUMENT = msgspec.json.Decoder(_Document)

_values = operator.attrgetter(*_Entry.__struct_fields__)


def encode(catalog: Catalog, nonce: str) -> bytes:
    """Check a catalog and return the document to store.

    The nonce, 32 lower-case hex digits, is fresh: an object of equal bytes could get an equal version (ETag). Refused
    are a catalog that is larger than a reader accepts, and one that was read and that only software with features that
    this release lacks may replace.
    """
    assert _ID.fullmatch(nonce)
    require_features(catalog.requires_to_write, "catalog, to be changed,")
    check(catalog)
    entries = [_Entry(*_values(entry)) for entry in catalog.entries]
    for entry in entries:
        entry.metrics = dict(entry.metrics)
    document = _Document(
        format=FORMAT,
        version=VERSION,
        requires=[],
        nonce=nonce,
        run_id=catalog.run_id,
        revision=catalog.revision,
        token=catalog.token,
        floor=catalog.floor,
        checkpoints=entries,
        holder=catalog.holder,
    )
    data = seal(msgspec.json.encode(document))
    # No reader would accept the document, so it must not be committed.
    if len(data) > STORED_BYTES_MAX:
        raise InvalidArgumentError(
            "The run has more checkpoints, names and metrics than a catalog can hold. Use retention.",
            stored_bytes=len(data),
            stored_limit_bytes=STORED_BYTES_MAX,
        )
    return data


@lru_cache(maxsize=1)  # one operation reads a catalog several times, which takes 10 µs for each checkpoint
def decode(data: bytes) -> Catalog:
    """Decode and check a catalog."""
    document = parse(open_document(data, FORMAT), _DOCUMENT, FORMAT)
    return check(
        Catalog(
            run_id=document.run_id,
            revision=document.revision,
            token=document.token,
            floor=document.floor,
            entries=tuple(map(_entry, document.checkpoints)),
            holder=document.holder,
            requires_to_write=tuple(document.requires_to_write),
        )
    )


def _entry(wire: _Entry) -> Entry:
    return replace(Entry(*_values(wire)), metrics=tuple(wire.metrics.items()))


def check(catalog: Catalog) -> Catalog:
    """Check a catalog and return it; a `CorruptCheckpointError` says where it contradicts itself."""
    entries = catalog.entries
    if len(entries) > ENTRIES_MAX:
        raise _damaged("it has too many checkpoints", checkpoints=len(entries), limit=ENTRIES_MAX)
    _require_numbers(revision=catalog.revision, token=catalog.token, floor=catalog.floor)
    _require_identity(catalog.run_id)
    _require_texts([catalog.holder])
    for entry in entries:
        _check_entry(entry)
    if catalog.floor > catalog.revision or any(entry.began_revision >= catalog.revision for entry in entries):
        raise _damaged("the floor, or the revision of a checkpoint, is too high", revision=catalog.revision)
    if any(entry.token > catalog.token for entry in entries):
        raise _damaged("the token of a checkpoint is above that of the catalog", token=catalog.token)
    if any(entry.step >= following.step for entry, following in itertools.pairwise(entries)):
        raise _damaged("the steps of its checkpoints do not ascend")
    for field, values in (
        ("save_id", [entry.save_id for entry in entries]),
        ("manifest", [entry.manifest for entry in entries]),
        ("name", [name for entry in entries for name in entry.names]),
    ):
        if len(set(values)) != len(values):
            raise _damaged(f"two checkpoints have the same {field}")
    return catalog


def _check_entry(entry: Entry) -> None:
    _require_identity(entry.save_id)
    _require_numbers(step=entry.step, size_bytes=entry.size_bytes, token=entry.token, began=entry.began_revision)
    if not _MANIFEST_KEY.fullmatch(entry.manifest) or ".." in entry.manifest:
        raise _damaged("the key of a manifest is not of the form manifests/<name>.json", key=entry.manifest[:300])
    _require_texts([entry.created, *entry.names, *entry.thinned, *(name for name, _ in entry.metrics)])
    if len({name for name, _ in entry.metrics}) != len(entry.metrics):
        raise _damaged("a metric has two values", step=entry.step)
    if not all(math.isfinite(value) for _, value in entry.metrics):
        raise _damaged("a metric is not a finite number", step=entry.step)


def _require_identity(identity: str) -> None:
    if not _ID.fullmatch(identity):
        raise _damaged("an id is not 32 lower-case hex digits", id=identity[:100])


def _require_numbers(**numbers: int) -> None:
    for name, number in numbers.items():
        if not 0 <= number <= VALUE_MAX:
            raise _damaged("a number is out of bounds", **{name: number})


def _require_texts(texts: Iterable[str]) -> None:
    for text in texts:
        if not is_unicode(text):
            raise _damaged("a text is not Unicode", text=ascii(text[:100]))
        if len(text) > _NAME_CHARACTERS_MAX:
            raise _damaged("a text is too long", text=text[:100], characters=len(text))


def _damaged(what: str, **details: object) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"The catalog is damaged: {what}.", **details)
