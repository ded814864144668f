"""Find a checkpoint and read its manifest, for readers and for the command line.

A URL is that of a checkpoint by itself, which has a manifest, or that of a run, which has a catalog of checkpoints.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import SupportsIndex, TypeVar

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.hedging import is_far
from dcp_remote.common.threads import begin_early, in_parallel
from dcp_remote.errors import (
    CheckpointExistsError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpRemoteError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
    UnsupportedFormatError,
)
from dcp_remote.format import manifest_json
from dcp_remote.format.catalog import CATALOG_KEY, NEWEST_WORDS, Catalog, Entry
from dcp_remote.format.document import STORED_BYTES_MAX, unseal
from dcp_remote.format.entry_names import near_names
from dcp_remote.format.keys import MANIFESTS_PREFIX, revision_of
from dcp_remote.format.manifest import MANIFEST_KEY, Manifest
from dcp_remote.format.segments import Segment, decode_segment, join, place_of
from dcp_remote.run.catalog_store import read_catalog
from dcp_remote.run.commit import read_slot
from dcp_remote.run.conditional_put import find_object
from dcp_remote.run.foreign_checkpoints import describe_foreign
from dcp_remote.storage.base import Content, ObjectStore
from dcp_remote.storage.rereads import RereadingStore, get_decoded
from dcp_remote.storage.retrying import RANGE_RETRY_SECONDS, RetryingStore
from dcp_remote.storage.url import parse_url

logger = logging.getLogger(__name__)

_Seen = TypeVar("_Seen")

# An error lists so many steps of a run, the newest, and so many names that are like the one asked for.
_STEPS_NAMED_MAX = 10
_NEAR_MAX = 3

# Comparing takes 35 µs a name; a run may have a name for each of many thousand checkpoints.
_NAMES_COMPARED_MAX = 5_000

# Time to look for older steps, in seconds: the load has failed, and its deadline may be near.
_OLDER_SECONDS = 5.0

# Segments that are read at a time: the memory of a manifest takes more.
_SEGMENTS_IN_FLIGHT = 16

# The look for similar names only completes a message: a page of a listing, and so many seconds.
_NEAR_KEYS = 1_000
_NEAR_SECONDS = 5.0

# Entry of the checkpoint that this process read or saved last, by the URL of its run; None for a checkpoint by itself.
_last_read: dict[str, Entry | None] = {}
_LAST_READ_MAX = 1_000


def read_stored(store: ObjectStore) -> tuple[Content | None, Manifest | None]:
    """Read and check the object at the manifest's key, if there is one; one GET, and one more if it is damaged.

    The manifest is None also if the object is a tombstone, and so no checkpoint is here.
    """
    try:
        return get_decoded(store, MANIFEST_KEY, manifest_json.decode, limit_bytes=STORED_BYTES_MAX)
    except ObjectNotFoundError:
        return None, None
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        raise error.with_details(url=store.url) from error


def read_manifest(
    store: ObjectStore,
    *,
    step: int | str | None = None,
    retry_seconds: float = RANGE_RETRY_SECONDS,
    whole: bool = True,
) -> Manifest:
    """Read and check a checkpoint's manifest; one GET, for a run three (two if a step is given).

    If the manifest is to be `whole`, its segments are read as well, if it has any: one GET each.

    `step` is the step or name of a checkpoint of a run; None and `NEWEST_WORDS` are a checkpoint by itself, or the
    newest of a run. From a cloud, manifest.json, the catalog and the manifest that the process read last are asked for
    at once: a GET more for a checkpoint by itself that the process has not read yet, and where another one is newest.
    """
    if step is not None and type(step) not in (int, str):
        raise wrong_step(step, "A step must be an integer, or a checkpoint's name.")
    step = as_step(step)
    reading = RetryingStore(store, Deadline(retry_seconds))
    stored: Content | None = None
    may_be_run = _last_read.get(store.url, ...) is not None
    with (
        begin_early(
            lambda clock: read_catalog(RetryingStore(store, Deadline(retry_seconds, clock))),
            at_once=is_far(store.url) and may_be_run,
        ) as read_early,
        expect_entry(store, step, retry_seconds=retry_seconds) as expected,
    ):
        if step is None:
            stored, manifest = read_stored(reading)
            if manifest is not None:
                note_last(store, None)
                return join_segments(store, manifest, retry_seconds=retry_seconds) if whole else manifest
        catalog = read_early()
        if catalog is not None:
            entry = find_entry(catalog, step, url=store.url)
            data = expected.fetch(entry, retry_seconds=retry_seconds)
            return decode_entry(store, entry, data, retry_seconds=retry_seconds, whole=whole)
    if step is not None:
        raise no_run(reading, step)
    if stored is None:
        raise not_found(reading)
    require_not_lost(reading)
    raise CheckpointNotFoundError(
        "There is no committed checkpoint here: manifest.json is a tombstone, which gc put when it removed orphans. "
        "The next save replaces it.",
        url=store.url,
    )


def as_step(step: int | str | None) -> int | str | None:
    """Return None for one of `NEWEST_WORDS`, and any other step or name as it is. Pure."""
    return None if step in NEWEST_WORDS else step


def wrong_step(step: object, what: str) -> InvalidArgumentError:
    """Make the error for what is no step, with the message `what` and the type; the value of numbers and texts only.

    Anything else may be a whole state, which would fill the message.
    """
    shown = step if isinstance(step, int | float | str) else None
    if isinstance(step, Mapping) or hasattr(step, "state_dict"):
        what += " State and step are exchanged: the calls are save(step, state) and restore(state, step)."
    elif type(step) is not int and isinstance(step, SupportsIndex) and not isinstance(step, bool):
        try:
            shown = operator.index(step)  # a numpy integer, a tensor of one integer
            what += " Write int(step)."
        except Exception:  # noqa: BLE001, S110  # a tensor of several elements is no step at all
            pass
    return InvalidArgumentError(what, step=shown, type=type(step).__name__)


def find_entry(catalog: Catalog, step: int | str | None, *, url: str) -> Entry:
    """Return the entry of a step or name; of the newest checkpoint for None and for `NEWEST_WORDS`. Pure.

    If there is none, a `CheckpointNotFoundError` lists the steps and names that there are.
    """
    entry = catalog.find(step)
    if entry is None:
        raise no_such_entry(catalog, step, url=url)
    return entry


def no_such_entry(
    catalog: Catalog, step: int | str | None, *, url: str, what: str | None = None
) -> CheckpointNotFoundError:
    """Make the error for a checkpoint that a catalog does not have; it lists steps, names and near names. Pure.

    `what` is the message, if it is not that there is no such checkpoint.
    """
    if what is None:
        what = "The run has no live checkpoint of this step."
        if as_step(step) is None:
            what = "No checkpoint is live in this run yet."
        elif isinstance(step, str):
            what = "The run has no live checkpoint of this name."
            if step.isdecimal():
                what += " Pass a step as an integer, not as text."
            metrics = [name for other in catalog.entries for name, _ in other.metrics]
            if step == "best" and metrics:
                what += f" `best({metrics[-1]!r})` finds the checkpoint with the best value of a metric."
    steps = [other.step for other in catalog.entries if not other.abandoned][-_STEPS_NAMED_MAX:]
    names = [name for other in catalog.entries for name in other.names]
    known = [*names[-_NAMES_COMPARED_MAX:], *NEWEST_WORDS]
    near = difflib.get_close_matches(step, known, n=_NEAR_MAX) if isinstance(step, str) else []
    return CheckpointNotFoundError(
        what,
        url=url,
        step=step,
        checkpoints=len(catalog.entries),
        steps=", ".join(map(str, steps)) or None,
        near=", ".join(near) or None,
        names=", ".join(names) or None,
    )


def read_entry(
    store: ObjectStore, entry: Entry, *, retry_seconds: float = RANGE_RETRY_SECONDS, whole: bool = True
) -> Manifest:
    """Read and check the manifest of a checkpoint of a run, as `fetch_entry` and `decode_entry` do."""
    data = fetch_entry(store, entry, retry_seconds=retry_seconds)
    return decode_entry(store, entry, data, retry_seconds=retry_seconds, whole=whole)


def fetch_entry(
    store: ObjectStore,
    entry: Entry,
    *,
    retry_seconds: float = RANGE_RETRY_SECONDS,
    read_early: Callable[[], bytes] | None = None,
) -> bytes:
    """Read the manifest of a checkpoint of a run as it is stored, and check its digest; one GET, or three if damaged.

    If the manifest is not there, or may not be read, the catalog is read: `CheckpointGoneError` if the checkpoint was
    deleted, replaced or thinned since, and else `CorruptCheckpointError` or the refusal. `read_early` returns the
    manifest, or raises the error, of a GET that was sent before.
    """
    asking = RetryingStore(store, Deadline(retry_seconds))
    try:
        if read_early is not None:
            return read_early()
        return _get_entry(asking, entry)
    except CorruptCheckpointError as error:
        older = find_older_steps(store, entry.step, retry_seconds=retry_seconds)
        details = error.details | {"url": store.url, "manifest": entry.manifest} | older
        raise CorruptCheckpointError(f"{error.what} Use another checkpoint.", **details) from error
    except (ObjectNotFoundError, PermissionDeniedError) as error:
        catalog = _look_again(lambda: read_catalog(asking), error)
        if catalog is None or all(live.manifest != entry.manifest for live in catalog.entries):
            raise gone_error(catalog, save_id=entry.save_id, step=entry.step, url=store.url) from error
        if isinstance(error, PermissionDeniedError):
            raise
        raise CorruptCheckpointError(
            "The manifest of a checkpoint of the run is missing. Use another checkpoint.",
            url=store.url,
            step=entry.step,
            manifest=entry.manifest,
        ) from error


def _get_entry(store: ObjectStore, entry: Entry) -> bytes:
    return get_decoded(store, entry.manifest, unseal, limit_bytes=STORED_BYTES_MAX)[0].data


@dataclass(slots=True)
class ExpectedEntry:
    """Entry whose manifest is asked for before the catalog has said that it is the wanted one; None for no entry."""

    store: ObjectStore
    entry: Entry | None = None
    read_early: Callable[[], bytes] = bytes
    was_wrong: bool = False  # whether the catalog named another manifest, so that one GET was in vain

    def fetch(self, entry: Entry, *, retry_seconds: float) -> bytes:
        """Return the manifest of an entry of the catalog as `fetch_entry` does, by the early GET if that was right.

        An early GET that failed was repeated for `retry_seconds` already, and is not sent again.
        """
        note_last(self.store, entry)
        if self.entry is not None and self.entry.manifest == entry.manifest:
            return fetch_entry(self.store, entry, retry_seconds=retry_seconds, read_early=self.read_early)
        if self.entry is not None:
            self.was_wrong = True
            logger.info("%s: an early read of the manifest of step %d was in vain", self.store.url, self.entry.step)
        return fetch_entry(self.store, entry, retry_seconds=retry_seconds)


@contextmanager
def expect_entry(store: ObjectStore, step: int | str | None, *, retry_seconds: float) -> Iterator[ExpectedEntry]:
    """Ask a cloud for the manifest that this process read last, if it is that of the step; given up with the block."""
    entry = _last_read.get(store.url)
    if entry is None or not is_far(store.url) or step not in (None, entry.step, *entry.names):
        yield ExpectedEntry(store)
        return
    with begin_early(
        lambda clock: _get_entry(RetryingStore(store, Deadline(retry_seconds, clock)), entry), at_once=True
    ) as read_early:
        yield ExpectedEntry(store, entry, read_early)


def note_last(store: ObjectStore, entry: Entry | None) -> None:
    """Note the checkpoint that a later load of this process probably reads; None for a checkpoint by itself."""
    if len(_last_read) >= _LAST_READ_MAX:
        _last_read.clear()
    _last_read[store.url] = entry


def decode_entry(
    store: ObjectStore,
    entry: Entry,
    data: bytes,
    *,
    retry_seconds: float = RANGE_RETRY_SECONDS,
    whole: bool = True,
) -> Manifest:
    """Decode the result of `fetch_entry` on any rank; one GET if it is damaged, and one a segment if `whole`."""
    try:
        manifest = _decode_at(store, entry.manifest, data, save_id=entry.save_id)
    except CorruptCheckpointError:
        data = fetch_entry(RereadingStore(store), entry, retry_seconds=retry_seconds)
        manifest = _decode_at(store, entry.manifest, data, save_id=entry.save_id)
    return join_segments(store, manifest, retry_seconds=retry_seconds) if whole else manifest


def read_manifest_at(
    store: ObjectStore, key: str, *, save_id: str, retry_seconds: float = RANGE_RETRY_SECONDS
) -> Manifest:
    """Read and check the manifest of a save into a run, without a catalog and segments; one GET, two if damaged."""
    decode = partial(_decode_at, store, key, save_id=save_id)
    return get_decoded(RetryingStore(store, Deadline(retry_seconds)), key, decode, limit_bytes=STORED_BYTES_MAX)[1]


def join_segments(
    store: ObjectStore, manifest: Manifest, segments: Sequence[int] | None = None, *, retry_seconds: float
) -> Manifest:
    """Return a manifest with the chunks of these segments, None for all; nothing is done if the manifest has none.

    `manifest` is as it was decoded. One GET for each segment, 16 at a time, and one more for a damaged one.

    Raises:
        CheckpointGoneError: The checkpoint was deleted, replaced or thinned since its manifest was read.
        CorruptCheckpointError: A segment is damaged or missing; the message names its shard.
    """
    if manifest.segments is None:
        return manifest

    def read(segment: int) -> Segment:
        key, start, length = place_of(manifest, segment)
        data = memoryview(bytearray(length))
        reading = RetryingStore(store, Deadline(retry_seconds))
        try:
            reading.get_into(key, start, data)
            return decode_segment(manifest, segment, data)
        except CorruptCheckpointError:
            RereadingStore(reading).get_into(key, start, data)
            return decode_segment(manifest, segment, data)
        except ObjectNotFoundError as error:
            raise error.with_details(shard=key) from error

    try:
        numbers = range(len(manifest.segments.tensors)) if segments is None else segments
        found = in_parallel(read, numbers, threads=_SEGMENTS_IN_FLIGHT)
        return join(manifest, found, is_whole=segments is None)
    except CorruptCheckpointError as error:
        raise error.with_details(url=store.url) from error
    except (ObjectNotFoundError, PermissionDeniedError) as error:
        gone = explain_missing_shard(store, manifest, retry_seconds=retry_seconds, error=error)
        if gone is None and isinstance(error, PermissionDeniedError):
            raise
        raise gone or CorruptCheckpointError(
            "A segment of the manifest is missing. Use another checkpoint.", **error.details | {"url": store.url}
        ) from error


def _decode_at(store: ObjectStore, key: str, data: bytes, *, save_id: str) -> Manifest:
    try:
        manifest = manifest_json.decode(data)
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        raise error.with_details(url=store.url, manifest=key) from error
    if manifest is None or manifest.save_id != save_id or manifest.run is None:
        raise CorruptCheckpointError(
            "The manifest is not that of the save that the catalog names.", url=store.url, manifest=key, save_id=save_id
        )
    return manifest


def explain_missing_shard(
    store: ObjectStore, manifest: Manifest, *, retry_seconds: float, error: DcpRemoteError | None = None
) -> CheckpointGoneError | None:
    """Make the error for a checkpoint that lacks a shard; None if it is unchanged, and so is damaged. One GET.

    `error` is that of reading the shard; a refusal is raised again where nothing else can be read.
    """
    reading = RetryingStore(store, Deadline(retry_seconds))
    if manifest.run is None:
        head = _look_again(lambda: read_slot(reading), error).content
        if head is not None and head.save_id == manifest.save_id:
            return None
        return CheckpointGoneError(
            "The checkpoint was removed or replaced while it was being read. Load again.",
            url=store.url,
            save_id=manifest.save_id,
        )
    catalog = _look_again(lambda: read_catalog(reading), error)
    entries = catalog.entries if catalog is not None else ()
    if any((entry.save_id, entry.thinned) == (manifest.save_id, manifest.run.thinned) for entry in entries):
        return None
    return gone_error(catalog, save_id=manifest.save_id, step=manifest.run.step, url=store.url)


def _look_again(read: Callable[[], _Seen], error: DcpRemoteError | None) -> _Seen:
    """Read what tells whether a checkpoint is gone; if that fails after a refusal, raise the refusal.

    Without a grant to list, S3 refuses what is missing.
    """
    try:
        return read()
    except DcpRemoteError as unread:
        failure = error if isinstance(error, PermissionDeniedError) else unread
    raise failure


def find_older_steps(store: ObjectStore, step: int | None, *, retry_seconds: float) -> dict[str, object]:
    """Return the step of a damaged checkpoint of a run, and the newest older ones, for an error. One GET.

    `step` is None for a checkpoint by itself, of which nothing is said, and without a request. Nothing is said of older
    ones if the catalog cannot be read, too.
    """
    if step is None:
        return {}
    try:
        catalog = read_catalog(RetryingStore(store, Deadline(min(retry_seconds, _OLDER_SECONDS))))
    except (CorruptCheckpointError, StorageError):
        catalog = None
    entries = catalog.entries if catalog is not None else ()
    older = [entry.step for entry in reversed(entries) if entry.step < step and not entry.abandoned]
    return {"step": step, "older": ", ".join(map(str, older[:_STEPS_NAMED_MAX])) or None}


def gone_error(catalog: Catalog | None, *, save_id: str, step: int, url: str) -> CheckpointGoneError:
    """Make the error for a checkpoint of a run that is not live any more, or not as it was read. Pure."""
    live = catalog.entries if catalog is not None else ()
    above = [entry.step for entry in live if entry.step > step and not entry.abandoned]
    newest = catalog.latest() if catalog is not None else None
    there = catalog.entry_at(step) if catalog is not None else None
    if there is not None and there.save_id == save_id:
        what = "The checkpoint was thinned (its optimizer was deleted) while it was being read. Load again"
    elif there is not None:
        what = "The checkpoint was replaced by another save of its step while it was being read. Load again"
    else:
        what = "The checkpoint was retired (deleted) while it was being read. Load another one"
    return CheckpointGoneError(
        what + (f", or step {above[0]}." if above else "; no newer checkpoint is live."),
        url=url,
        step=step,
        save_id=save_id,
        next=above[0] if above else None,
        newest=newest.step if newest is not None else None,
    )


def require_reachable(store: ObjectStore) -> None:
    """Refuse a bucket that does not exist; called where nothing was found. One request, if the store can tell.

    The store may also say that no object is there for another reason, such as another region (`StorageError`).
    """
    explain = getattr(store, "explain_missing", None)
    error = explain() if callable(explain) else None
    if error is not None:
        raise error


def require_not_lost(store: ObjectStore) -> bool:
    """Refuse a run that has lost its catalog, so that no job begins it anew; called where no catalog was found.

    There are manifests then (`CorruptCheckpointError`), although the catalog is written first. Costs a LIST; where that
    finds manifests, also a HEAD. Returns whether the catalog is there after all: a job began the run meanwhile, or a
    gateway before the store answered 404.
    """
    try:
        has_begun = any(revision_of(info.key) is not None for info in store.list(MANIFESTS_PREFIX))
    except PermissionDeniedError:
        return False  # without a grant to list there is no way to tell
    if has_begun and find_object(store, CATALOG_KEY) is None:
        raise CorruptCheckpointError(
            "This run has manifests, but has lost its catalog.json. `dcp-remote recover` rebuilds it.",
            url=store.url,
        )
    return has_begun


def require_no_checkpoint_by_itself(store: ObjectStore) -> None:
    """Refuse the prefix of a checkpoint by itself: readers would find that checkpoint, and never the run.

    One HEAD; a GET more where there is a manifest.
    """
    if find_object(store, MANIFEST_KEY) is not None:
        read_slot(store)  # raises if a server that is no store says that every object exists
        raise CheckpointExistsError(
            "A checkpoint by itself lies here (manifest.json); a run needs a URL of its own. If a run was here first, "
            "the checkpoint was saved over it: load the checkpoint if it is wanted, and delete manifest.json.",
            url=store.url,
        )


def not_found(
    store: ObjectStore,
    what: str = "There is no committed checkpoint here (no manifest.json), and no run (no catalog.json).",
    **details: object,
) -> CheckpointNotFoundError:
    """Make the error for a URL with neither a checkpoint nor a run; it names what else lies there.

    A missing bucket, a run that has lost its catalog, and one whose catalog is there after all are raised instead.
    Costs two LISTs of a page each, and perhaps one request more; where nothing lies there, also the LIST of
    `find_near_runs`.
    """
    require_reachable(store)
    if require_not_lost(store):
        raise TransientStorageError(
            "The store said that there is no catalog.json, and then that there is one: try again.", url=store.url
        )
    found = describe_foreign(store)
    near = find_near_runs(store) if found is None else []
    return CheckpointNotFoundError(
        f"{what} {found or 'Check the URL.'}", url=store.url, **details, near=", ".join(near) or None
    )


def describe_surroundings(store: ObjectStore) -> str | None:
    """Describe what lies at a URL without a run as `describe_foreign` does; if that is nothing, name similar runs."""
    found = describe_foreign(store)
    if found is None and (near := find_near_runs(store)):
        found = f"Is one of these runs meant: {', '.join(near)}?"
    return found


def find_near_runs(store: ObjectStore) -> list[str]:
    """Return names of runs beside a URL that are similar to its own; for the message of a mistyped URL.

    Or the URL of the folder above, if that is a run, and this one ends in a number, such as a step. One LIST of a page,
    behind the first half of the name: runs further behind are not seen. The result is empty without permission to list,
    after a failure, and on a store that has no parent.
    """
    make_parent = getattr(store, "parent", None)
    parent = make_parent() if callable(make_parent) else None
    if parent is None:
        return []
    try:
        name = parse_url(store.url).prefix.rpartition("/")[2]  # as in keys: not encoded
        beside = RetryingStore(parent, Deadline(_NEAR_SECONDS)).list(after=name[: len(name) // 2])
        folders = [info.key.split("/") for info in itertools.islice(beside, _NEAR_KEYS)]
        if [CATALOG_KEY] in folders and name.isdecimal():
            return [parent.url]
        return near_names(name, [folder for folder, *rest in folders if rest == [CATALOG_KEY]])
    except DcpRemoteError as error:
        logger.debug("%s: no look at what lies beside it: %s", store.url, error)
        return []


def no_run(store: ObjectStore, step: int | str) -> CheckpointNotFoundError:
    """Make the error for a step of a run where there is no run, as `not_found` does."""
    return not_found(
        store,
        "There is no run here (no catalog.json), and so no step of one. To read a checkpoint by itself, leave out the "
        "step.",
        step=step,
    )


def find_newest(
    catalog: Catalog | None,
    store: ObjectStore,
    *,
    must_exist: bool,
    starts_over: bool = False,
    retry_seconds: float = RANGE_RETRY_SECONDS,
) -> Entry | None:
    """Return the newest checkpoint of a run (`catalog`: None if there is none).

    Without a checkpoint, return None and log a warning with what else lies at the URL; with `must_exist`, raise
    `CheckpointNotFoundError`. Refuse (`CheckpointExistsError`) to start from nothing where all are abandoned, unless
    the job `starts_over`: saves would replace them. Without a catalog, this costs a LIST of a page, or two; with
    `must_exist`, what `not_found` costs.
    """
    if catalog is not None and (newest := catalog.latest()) is not None:
        return newest
    if must_exist:
        if catalog is not None:
            raise no_such_entry(catalog, None, url=store.url)
        raise not_found(RetryingStore(store, Deadline(retry_seconds)))
    if catalog is not None and catalog.entries and not starts_over:
        raise CheckpointExistsError(
            "All checkpoints of this run are abandoned, and a job that starts from nothing would replace them. Restore "
            "one by its step, delete them (`dcp-remote rm --abandoned`), or pass start_over=True to replace them.",
            url=store.url,
            abandoned=", ".join(str(entry.step) for entry in catalog.entries[-_STEPS_NAMED_MAX:]),
        )
    # A mistyped URL looks the same, so that a job would begin anew unnoticed.
    found = describe_surroundings(store) if catalog is None else None
    logger.warning(
        "%s: there is no checkpoint here yet; the job starts from nothing%s", store.url, f". {found}" if found else ""
    )
    return None
