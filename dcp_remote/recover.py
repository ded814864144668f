"""Making a lost or damaged catalog again, from what the manifests of a run say of themselves. No torch.

What no manifest says is lost: pins; names that moved on, which are back where they were given; and marks of what a
later job left behind, but for those that show because the later job saved an earlier step. A checkpoint that was
retired or never committed, and of which everything lies there, is live.

Nobody may use the run meanwhile: a job that goes on would delete what it has let go. What it began does not commit,
since it is below the new floor.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dcp_remote import catalog_json, manifest_json
from dcp_remote.catalog import CATALOG_KEY, Catalog, Entry
from dcp_remote.checkpoint import not_found
from dcp_remote.envelope import STORED_BYTES_MAX
from dcp_remote.errors import (
    CommitConflictError,
    CommitUnknownError,
    ConditionFailedError,
    CorruptCheckpointError,
    DcpRemoteError,
    InvalidArgumentError,
    ObjectNotFoundError,
    StorageError,
    TransientStorageError,
    UnsupportedFormatError,
)
from dcp_remote.gc import TIMEOUT_SECONDS
from dcp_remote.manifest import Manifest
from dcp_remote.named import in_parallel
from dcp_remote.run_names import MANIFESTS_PREFIX, revision_of
from dcp_remote.shard import SHARDS_PREFIX
from dcp_remote.storage.base import ObjectInfo, ObjectStore, Version
from dcp_remote.storage.conditional_writes import require_conditional_writes
from dcp_remote.storage.rereads import RereadingStore, get_decoded
from dcp_remote.storage.retrying import Deadline, RetryingStore, jitter

logger = logging.getLogger(__name__)

# Swaps and fences since the newest that left a name: more than anybody makes between two saves. A job that took the
# fence and left nothing must not find its own token on the run.
_UNSEEN_MAX = 1_000

# Larger numbers were made up: a catalog could not count on from them.
_NUMBER_MAX = 2**52

# Before the catalog is put again, doubled each time, with full jitter.
_FIRST_PAUSE_SECONDS = 0.1
_PAUSE_SECONDS_MAX = 10.0

# A store that goes on refusing although nothing changed does not write on condition.
_REFUSALS_MAX = 12


@dataclass(frozen=True, slots=True)
class Found:
    """A manifest of a run, as it lies there.

    Attributes:
        key: Its name.
        revision: That the name carries; of a thinned manifest a later one than that of the save.
        run_id: Of its run; None if it cannot be read.
        entry: What a catalog would say of it; None if it cannot be read.
        reason: Why it is no checkpoint; None if it can be read and every shard that it names is there.
    """

    key: str
    revision: int
    run_id: str | None
    entry: Entry | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Left:
    """A manifest that gives no checkpoint.

    Attributes:
        key: Its name.
        step: None if it cannot be read.
        reason: Why not.
    """

    key: str
    step: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """The catalog of a run, made again.

    Attributes:
        catalog: As it was, or would be, written.
        left: What gives no checkpoint.
        damaged: A damaged catalog lay there; otherwise there was none.
    """

    catalog: Catalog
    left: tuple[Left, ...]
    damaged: bool


def rebuilt(found: Sequence[Found], revisions: Iterable[int], *, run_id: str) -> tuple[Catalog, tuple[Left, ...]]:
    """Make a catalog of manifests. Pure.

    Args:
        found: All manifests.
        revisions: In the names of whatever lies there.
        run_id: For a run of which no manifest can be read.
    """
    left = [Left(one.key, one.entry.step if one.entry else None, one.reason) for one in found if one.reason is not None]
    whole = [one for one in found if one.reason is None]
    told = [one for one in whole or found if one.run_id is not None]
    if told:
        run_id = str(max(told, key=_age).run_id)
    ours = [one for one in whole if one.run_id == run_id]
    left += [Left(one.key, _entry(one).step, "it is of another run") for one in whole if one.run_id != run_id]
    newest = _best(ours, of=lambda one: _entry(one).save_id, by=lambda one: (one.revision, one.key))
    live = _best(newest, of=lambda one: _entry(one).step, by=_rank)
    for those, best, reason in (
        (ours, newest, "its checkpoint has a newer manifest"),
        (newest, live, "a later save of its step is there"),
    ):
        taken = {one.key for one in best}
        left += [Left(one.key, _entry(one).step, reason) for one in those if one.key not in taken]
    tokens = [one.entry.token for one in found if one.entry is not None]
    known = [*revisions, *(one.entry.began for one in found if one.entry is not None)]
    revision = max(known, default=0) + _UNSEEN_MAX
    catalog = Catalog(
        run_id,
        revision=revision,
        token=max(tokens, default=0) + _UNSEEN_MAX,
        floor=revision,
        entries=tuple(sorted(_named_once(_marked(live)), key=lambda entry: entry.step)),
    )
    return catalog, tuple(sorted(left, key=lambda one: one.key))


def find_recovery(store: ObjectStore, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Recovered:
    """What `recover` would write. Changes nothing.

    Costs a GET of the catalog, a LIST of the whole run (a request per thousand objects), and a GET of each manifest.

    Args:
        store: Opened at the run.
        timeout_seconds: Until when requests are repeated.

    Raises:
        InvalidArgumentError: The catalog can be read: nothing is to be recovered.
        CheckpointNotFoundError: There is nothing of a run here.
        UnsupportedFormatError: A newer version wrote the catalog.
        StorageError: The store refused, or did not answer until the time was over.
    """
    return _found(store, Deadline(timeout_seconds))[0]


def recover(
    store: ObjectStore,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
    uniform: Callable[[float, float], float] = jitter,
) -> Recovered:
    """Write the catalog again, if nobody else did meanwhile. No job may use the run.

    Costs what `find_recovery` does, and a PUT. Killed at any moment, the catalog is as it was, or whole.

    Args:
        store: Opened at the run.
        timeout_seconds: Until when requests are repeated.
        sleep: For tests.
        uniform: For tests.

    Raises:
        InvalidArgumentError: The catalog can be read: nothing is to be recovered; or the store cannot replace an
            object on condition.
        CheckpointNotFoundError: There is nothing of a run here.
        UnsupportedFormatError: A newer version wrote the catalog.
        CommitConflictError: Another catalog was written meanwhile.
        CommitUnknownError: The store never said whether it was written.
        StorageError: The store refused, or did not answer until the time was over; nothing was written.
    """
    if not store.capabilities.compare_and_swap:
        raise InvalidArgumentError(
            "A run needs a store that can replace an object on condition.",
            url=store.url,
            reason=store.capabilities.swap_refusal,
        )
    deadline = Deadline(timeout_seconds)
    recovered, there = _found(store, deadline)
    require_conditional_writes(store, deadline, swaps=True, sleep=sleep)
    body = catalog_json.encode(recovered.catalog, uuid.uuid4().hex)
    pause, refusals = _FIRST_PAUSE_SECONDS, 0
    while True:
        try:
            store.put(CATALOG_KEY, [body], condition="absent" if there is None else there)
            break
        except StorageError as error:
            failure = error
        # Any refusal may be of our own write, carried out a moment ago.
        if _is_written(store, recovered.catalog, there, failure, deadline):
            break
        if not isinstance(failure, (ConditionFailedError, TransientStorageError)):
            raise failure
        refusals = refusals + 1 if isinstance(failure, ConditionFailedError) else 0
        if refusals >= _REFUSALS_MAX:
            raise StorageError(
                "The store keeps refusing to write the catalog although nothing changed: it may not support that.",
                url=store.url,
                attempts=refusals,
            ) from failure
        if deadline.remaining_seconds() <= pause:
            raise _unknown(store, failure) from failure
        sleep(uniform(0, pause))
        pause = min(2 * pause, _PAUSE_SECONDS_MAX)
    logger.info("%s: recovered a catalog of %d checkpoints", store.url, len(recovered.catalog.entries))
    return recovered


def _found(store: ObjectStore, deadline: Deadline) -> tuple[Recovered, Version | None]:
    asking = RetryingStore(store, deadline)
    catalog, there = _look(asking)
    if catalog is not None:
        raise InvalidArgumentError(
            "The catalog of this run can be read: there is nothing to recover.",
            url=store.url,
            checkpoints=len(catalog.entries),
        )
    shards = {info.key: info.size_bytes for info in asking.list(SHARDS_PREFIX)}
    infos = [info for info in asking.list(MANIFESTS_PREFIX) if revision_of(info.key) is not None]
    names = [*shards, *(info.key for info in infos)]
    revisions = [number for number in map(revision_of, names) if number is not None and number < _NUMBER_MAX]
    if there is None and not revisions:
        raise not_found(store)

    def read(info: ObjectInfo) -> Found:
        return _read(asking, info.key, shards)

    rebuilt_catalog, left = rebuilt(in_parallel(read, infos), revisions, run_id=uuid.uuid4().hex)
    return Recovered(rebuilt_catalog, left, damaged=there is not None), there


def _look(store: ObjectStore) -> tuple[Catalog | None, Version | None]:
    """The catalog, if it can be read, and the version of whatever lies at its key; what cannot be is read twice."""
    catalog, version = _look_once(store)
    return (catalog, version) if catalog is not None or version is None else _look_once(RereadingStore(store))


def _look_once(store: ObjectStore) -> tuple[Catalog | None, Version | None]:
    try:
        content = store.get(CATALOG_KEY, limit_bytes=catalog_json.STORED_BYTES_MAX)
    except ObjectNotFoundError:
        return None, None
    except CorruptCheckpointError:  # larger than any
        return None, store.head(CATALOG_KEY).version
    try:
        return catalog_json.decode(content.data), content.version
    except CorruptCheckpointError:
        return None, content.version
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(error.what, **{"url": store.url, **error.details}) from error


def _read(store: ObjectStore, key: str, shards: Mapping[str, int]) -> Found:
    revision = revision_of(key)
    assert revision is not None, "only names of ours are read"
    try:
        _, manifest = get_decoded(store, key, manifest_json.decode, limit_bytes=STORED_BYTES_MAX)
    except (CorruptCheckpointError, UnsupportedFormatError, ObjectNotFoundError) as error:
        return Found(key, revision, None, None, reason=str(error))
    if manifest is None or manifest.run is None:
        return Found(key, revision, None, None, reason="it is not that of a checkpoint of a run")
    run = manifest.run
    entry = Entry(
        step=run.step,
        save_id=manifest.save_id,
        manifest=key,
        size_bytes=manifest.total_bytes,
        created=manifest.created,
        token=run.token,
        began=run.revision,
        names=run.names,
        metrics=run.metrics,
        thinned=run.thinned,
    )
    if max(revision, run.revision, run.token) >= _NUMBER_MAX:
        return Found(key, revision, None, None, reason="its numbers are larger than those of any run")
    try:
        catalog_json.check(Catalog(run.run_id, revision=run.revision + 1, token=run.token, entries=(entry,)))
    except CorruptCheckpointError as error:
        return Found(key, revision, None, None, reason=str(error))
    return Found(key, revision, run.run_id, entry, reason=_why_not_whole(manifest, shards))


def _why_not_whole(manifest: Manifest, shards: Mapping[str, int]) -> str | None:
    sizes = zip(manifest.shards.keys, manifest.shards.sizes.tolist(), strict=True)
    wrong = sum(shards.get(key) != size_bytes for key, size_bytes in sizes)
    if not wrong:
        return None
    return f"of its {len(manifest.shards.keys)} shards {wrong} are missing or of another size"


def _is_written(
    store: ObjectStore, catalog: Catalog, there: Version | None, failure: StorageError, deadline: Deadline
) -> bool:
    """Settle a write that did not clearly succeed; False if what was there is there still."""
    try:
        now, version = _look(RetryingStore(store, Deadline(deadline.remaining_seconds())))
    except DcpRemoteError as error:
        raise _unknown(store, failure) from error
    if now == catalog:
        return True
    if version == there:
        return False
    raise CommitConflictError(
        "Another catalog is here now: somebody recovered the run, or went on with it, at the same time. Look at it.",
        url=store.url,
        cause=failure,
    ) from failure


def _unknown(store: ObjectStore, cause: StorageError) -> CommitUnknownError:
    return CommitUnknownError(
        "The store never said whether the catalog was written. Look before you act again.", url=store.url, cause=cause
    )


def _entry(one: Found) -> Entry:
    assert one.entry is not None, "a manifest that cannot be read has a reason"
    return one.entry


def _age(one: Found) -> tuple[str, int, str]:
    return _entry(one).created, one.revision, one.key


def _rank(one: Found) -> tuple[int, int, str, str]:
    entry = _entry(one)
    return entry.token, entry.began, entry.created, one.key


def _best(
    found: Sequence[Found], *, of: Callable[[Found], str | int], by: Callable[[Found], tuple[str | int, ...]]
) -> list[Found]:
    """Of each group the largest, in ascending order."""
    best: dict[str | int, Found] = {of(one): one for one in sorted(found, key=by)}
    return sorted(best.values(), key=by)


def _marked(live: Collection[Found]) -> list[Entry]:
    """Abandoned is what is newer than what a later job saved: that job went on from something older still."""
    by_token: dict[int, list[Entry]] = {}
    for one in live:
        by_token.setdefault(_entry(one).token, []).append(_entry(one))
    marked: list[Entry] = []
    saved_later = math.inf
    for token in sorted(by_token, reverse=True):
        marked += [replace(one, abandoned=one.step > saved_later) for one in by_token[token]]
        saved_later = min(saved_later, *(one.step for one in by_token[token]))
    return marked


def _named_once(entries: Sequence[Entry]) -> list[Entry]:
    """A name belongs to the last that was given it."""
    taken: set[str] = set()
    result: list[Entry] = []
    for entry in sorted(entries, key=lambda one: (one.token, one.began, one.created), reverse=True):
        result.append(replace(entry, names=tuple(name for name in entry.names if name not in taken)))
        taken.update(entry.names)
    return result
