"""Rebuild the lost or damaged catalog of a run from its manifests.

State that no manifest holds is lost: pins; names given or moved after the save, so that each name is back where it was
given first; and the marks of abandoned checkpoints, except those that follow because a later job saved an earlier step.
A checkpoint that was retired or never committed, and whose objects are all there, becomes live.

No job may use the run meanwhile, since a job deletes the objects of checkpoints that it has retired. A save that began
before does not commit, since it is below the new floor.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.provenance import describe_process
from dcp_remote.common.threads import in_parallel
from dcp_remote.errors import (
    CommitConflictError,
    CorruptCheckpointError,
    InvalidArgumentError,
    ObjectNotFoundError,
    UnsupportedFormatError,
)
from dcp_remote.format import catalog_json, manifest_json
from dcp_remote.format.catalog import CATALOG_KEY, Catalog, Entry
from dcp_remote.format.document import STORED_BYTES_MAX
from dcp_remote.format.keys import MANIFESTS_PREFIX, SHARDS_PREFIX, revision_of
from dcp_remote.format.manifest import Manifest
from dcp_remote.run.catalog_store import find_catalog, unknown_swap
from dcp_remote.run.conditional_put import FailedPut, Found, put_until_settled, require_compare_and_swap
from dcp_remote.run.gc import TIMEOUT_SECONDS
from dcp_remote.run.lookup import not_found
from dcp_remote.storage.base import ObjectInfo, ObjectStore
from dcp_remote.storage.conditional_writes import require_conditional_writes
from dcp_remote.storage.rereads import get_decoded
from dcp_remote.storage.retrying import RetryingStore

logger = logging.getLogger(__name__)

# Revisions and tokens that no name shows: more than there are between two saves. Added to the largest known ones, so
# that a job that took the fence and wrote nothing does not find its own token on the run.
_UNSEEN_MAX = 1_000

# Revisions and tokens above this are not genuine, and a catalog could not count on from them.
_NUMBER_MAX = 2**52


@dataclass(frozen=True, slots=True)
class FoundManifest:
    """Manifest of a run that can be read."""

    key: str
    revision: int  # in the key; for a thinned manifest later than that of the save
    run_id: str
    entry: Entry  # as a catalog would have it
    reason: str | None  # reason why it gives no checkpoint; None if every shard that it names is there


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Manifest that gives no checkpoint."""

    key: str
    step: int | None  # None if the manifest cannot be read
    reason: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """Result of rebuilding the catalog of a run."""

    catalog: Catalog  # that was, or would be, written
    left: tuple[LeftOut, ...]  # manifests that give no checkpoint
    damaged: bool  # a damaged catalog was there; otherwise there was none


def rebuild_catalog(
    found: Sequence[FoundManifest | LeftOut], revisions: Iterable[int], *, run_id: str
) -> tuple[Catalog, tuple[LeftOut, ...]]:
    """Make a catalog from all manifests of a run and the revisions in the names of all its objects. Pure.

    Returns it and the manifests that give no checkpoint. `run_id` is for a run of which no manifest can be read.
    """
    left = [one for one in found if isinstance(one, LeftOut)]
    readable = [one for one in found if isinstance(one, FoundManifest)]
    left += [LeftOut(one.key, one.entry.step, one.reason) for one in readable if one.reason is not None]
    whole = [manifest for manifest in readable if manifest.reason is None]
    if readable:
        run_id = max(whole or readable, key=lambda one: (one.entry.created, one.revision, one.key)).run_id
    ours = [manifest for manifest in whole if manifest.run_id == run_id]
    newest = _largest(
        ours, of=lambda manifest: manifest.entry.save_id, by=lambda manifest: (manifest.revision, manifest.key)
    )
    live = _largest(newest, of=lambda manifest: manifest.entry.step, by=_rank)
    for candidates, chosen, reason in (
        (whole, ours, "it is of another run"),
        (ours, newest, "its checkpoint has a newer manifest"),
        (newest, live, "a later save of its step is there"),
    ):
        keys = {manifest.key for manifest in chosen}
        left += [LeftOut(one.key, one.entry.step, reason) for one in candidates if one.key not in keys]
    entries = [manifest.entry for manifest in readable]
    revision = max([*revisions, *(entry.began_revision for entry in entries)], default=0) + _UNSEEN_MAX
    catalog = Catalog(
        run_id,
        revision=revision,
        token=max((entry.token for entry in entries), default=0) + _UNSEEN_MAX,
        floor=revision,
        entries=tuple(sorted(_give_names_once(_mark_abandoned(live)), key=lambda entry: entry.step)),
    )
    return catalog, tuple(sorted(left, key=lambda manifest: manifest.key))


def find_recovery(store: ObjectStore, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Recovered:
    """Make the catalog that `recover` would write; changes nothing.

    Costs a GET of the catalog, a LIST of the whole run (a request per thousand objects), and a GET of each manifest.
    A catalog that can be read is refused, also one of a newer version.
    """
    return _rebuild(RetryingStore(store, Deadline(timeout_seconds)))[0]


def recover(store: ObjectStore, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Recovered:
    """Rebuild the catalog and write it, unless another process writes one meanwhile. No job may use the run.

    Costs as `find_recovery`, and a PUT. After a crash at any moment the catalog is as it was, or rebuilt and whole;
    after `CommitUnknownError` it could not be found out which.
    """
    require_compare_and_swap(store)
    deadline = Deadline(timeout_seconds)
    asking = RetryingStore(store, deadline)
    recovered, there = _rebuild(asking)
    require_conditional_writes(store, deadline, swaps=True)
    body = catalog_json.encode(recovered.catalog, uuid.uuid4().hex)

    def decide(now: Found[Catalog], failed: FailedPut) -> bytes | None:
        if now.content == recovered.catalog:
            return None
        if now.version != there.version:
            raise CommitConflictError(
                "Another catalog is here now: another process recovered the run, or a job saved into it, at the same "
                "time. Look at the run (`dcp-remote ls`).",
                url=store.url,
                cause=failed.error,
            ) from failed.error
        return body

    put_until_settled(
        asking,
        CATALOG_KEY,
        body,
        there,
        look=lambda: find_catalog(asking),
        decide=decide,
        unknown=lambda failure: unknown_swap(store, failure),
        deadline=deadline,
    )
    logger.info("%s: recovered a catalog of %d checkpoints", store.url, len(recovered.catalog.entries))
    return recovered


def _rebuild(store: ObjectStore) -> tuple[Recovered, Found[Catalog]]:
    there = find_catalog(store)
    if there.content is not None:
        raise InvalidArgumentError(
            "The catalog of this run can be read, so that there is nothing to recover.",
            url=store.url,
            checkpoints=len(there.content.entries),
        )
    shards = {info.key: info.size_bytes for info in store.list(SHARDS_PREFIX)}
    infos = [info for info in store.list(MANIFESTS_PREFIX) if revision_of(info.key) is not None]
    names = [*shards, *(info.key for info in infos)]
    revisions = [number for number in map(revision_of, names) if number is not None and number < _NUMBER_MAX]
    if there.version is None and not revisions:
        raise not_found(store)

    def read(info: ObjectInfo) -> FoundManifest | LeftOut:
        return _read(store, info.key, shards)

    catalog, left = rebuild_catalog(in_parallel(read, infos), revisions, run_id=uuid.uuid4().hex)
    # The token rises above that of any job, which is told the reason.
    catalog = replace(catalog, holder=f"recovery of the catalog on {describe_process()}")
    return Recovered(catalog, left, damaged=there.version is not None), there


def _read(store: ObjectStore, key: str, shards: Mapping[str, int]) -> FoundManifest | LeftOut:
    revision = revision_of(key)
    assert revision is not None, "other names are not listed"
    try:
        _, manifest = get_decoded(store, key, manifest_json.decode, limit_bytes=STORED_BYTES_MAX)
    except (CorruptCheckpointError, UnsupportedFormatError, ObjectNotFoundError) as error:
        return LeftOut(key, None, str(error))
    if manifest is None or manifest.run is None:
        return LeftOut(key, None, "it is no manifest of a run")
    run = manifest.run
    entry = Entry(
        step=run.step,
        save_id=manifest.save_id,
        manifest=key,
        size_bytes=manifest.total_bytes,
        created=manifest.created,
        token=run.token,
        began_revision=run.revision,
        names=run.names,
        metrics=run.metrics,
        thinned=run.thinned,
    )
    if max(revision, run.revision, run.token) >= _NUMBER_MAX:
        return LeftOut(key, None, "its numbers are larger than those of any run")
    try:
        catalog_json.check(Catalog(run.run_id, revision=run.revision + 1, token=run.token, entries=(entry,)))
    except CorruptCheckpointError as error:
        return LeftOut(key, None, str(error))
    return FoundManifest(key, revision, run.run_id, entry, reason=_why_not_whole(manifest, shards))


def _why_not_whole(manifest: Manifest, shards: Mapping[str, int]) -> str | None:
    sizes = zip(manifest.shards.keys, manifest.shards.sizes.tolist(), strict=True)
    wrong = sum(shards.get(key) != size_bytes for key, size_bytes in sizes)
    if not wrong:
        return None
    return f"of its {len(manifest.shards.keys)} shards {wrong} are missing or of another size"


def _rank(manifest: FoundManifest) -> tuple[int, int, str, str]:
    entry = manifest.entry
    return entry.token, entry.began_revision, entry.created, manifest.key


def _largest(
    found: Sequence[FoundManifest],
    *,
    of: Callable[[FoundManifest], str | int],
    by: Callable[[FoundManifest], tuple[str | int, ...]],
) -> list[FoundManifest]:
    """Return the largest manifest of each group, in ascending order."""
    largest: dict[str | int, FoundManifest] = {of(manifest): manifest for manifest in sorted(found, key=by)}
    return sorted(largest.values(), key=by)


def _mark_abandoned(live: Collection[FoundManifest]) -> list[Entry]:
    """Mark checkpoints newer than one that a later job saved, since that job went on from a still older one."""
    by_token: dict[int, list[Entry]] = {}
    for manifest in live:
        by_token.setdefault(manifest.entry.token, []).append(manifest.entry)
    marked: list[Entry] = []
    saved_later = math.inf
    for token in sorted(by_token, reverse=True):
        marked += [replace(entry, abandoned=entry.step > saved_later) for entry in by_token[token]]
        saved_later = min(saved_later, *(entry.step for entry in by_token[token]))
    return marked


def _give_names_once(entries: Sequence[Entry]) -> list[Entry]:
    """Leave each name with the checkpoint that was given it last."""
    taken: set[str] = set()
    result: list[Entry] = []
    for entry in sorted(entries, key=lambda entry: (entry.token, entry.began_revision, entry.created), reverse=True):
        result.append(replace(entry, names=tuple(name for name in entry.names if name not in taken)))
        taken.update(entry.names)
    return result
