"""Conditional writes, settled: how a set of shards becomes a checkpoint.

A checkpoint exists if and only if its manifest was put. Everything here is about writing that one object exactly once,
and knowing whether we did: a put without a clear answer is settled by reading what lies there now.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dcp_remote import manifest_json
from dcp_remote.envelope import STORED_BYTES_MAX
from dcp_remote.errors import (
    CommitConflictError,
    CommitUnknownError,
    ConditionFailedError,
    CorruptCheckpointError,
    DcpRemoteError,
    ObjectNotFoundError,
    StorageError,
    TransientStorageError,
    UnsupportedFormatError,
)
from dcp_remote.manifest import MANIFEST_KEY, REPLACES_MAX
from dcp_remote.manifest_json import Head
from dcp_remote.storage.base import ObjectStore, Version
from dcp_remote.storage.rereads import RereadingStore
from dcp_remote.storage.retrying import Deadline, jitter

# The pause before the same conditional put is sent again, doubled each time, with full jitter.
_FIRST_PAUSE_SECONDS = 0.1
_PAUSE_SECONDS_MAX = 10.0

# S3 answers 409 while another conditional write of the key is under way; that clears in a moment. A store that goes on
# refusing although nothing changed does not do conditional writes.
_REFUSALS_MAX = 12


@dataclass(frozen=True, slots=True)
class Slot:
    """What lay at the manifest's key when it was looked at.

    Attributes:
        version: Of the object there; None if there is none.
        head: Whose it is; None if there is none, or if it cannot be read.
        unreadable: Why it cannot be read; None if it can, or if there is none.
    """

    version: Version | None
    head: Head | None
    unreadable: str | None = None

    @property
    def committed(self) -> bool:
        """A checkpoint is here, or something that nobody may take for the absence of one."""
        return self.version is not None and (self.head is None or self.head.kind != manifest_json.TOMBSTONE)

    @property
    def lineage(self) -> tuple[str, ...]:
        """The saves that a manifest put over this one replaces, newest first."""
        return (self.head.save_id, *self.head.replaces)[:REPLACES_MAX] if self.head else ()


def look(store: ObjectStore) -> Slot:
    """Read the manifest's slot; one request, and one more if what is there cannot be read. Coordinator only."""
    slot = _look_once(store)
    return slot if slot.unreadable is None else _look_once(RereadingStore(store))


def _look_once(store: ObjectStore) -> Slot:
    try:
        content = store.get(MANIFEST_KEY, limit_bytes=STORED_BYTES_MAX)
    except ObjectNotFoundError:
        return Slot(None, None)
    except CorruptCheckpointError as error:
        # Larger than any manifest. Something is here, and must not be taken for nothing.
        return _look_from_outside(store, str(error))
    try:
        return Slot(content.version, manifest_json.decode_head(content.data))
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        return Slot(content.version, None, unreadable=str(error))


def _look_from_outside(store: ObjectStore, unreadable: str) -> Slot:
    try:
        return Slot(store.head(MANIFEST_KEY).version, None, unreadable=unreadable)
    except ObjectNotFoundError:
        return Slot(None, None)


def commit(
    store: ObjectStore,
    slot: Slot,
    body: bytes,
    *,
    save_id: str,
    deadline: Deadline,
    sleep: Callable[[float], None] = time.sleep,
    uniform: Callable[[float, float], float] = jitter,
) -> None:
    """Put the manifest, on the condition that the slot is as it was seen; return only if it is committed.

    One request, unless an answer is lost. Whatever is raised, a crash of this process included, the slot holds the old
    manifest or the new one, whole.

    Args:
        store: Whose reads are retried; a conditional put is not, as only this function can settle one.
        slot: As `look` saw it before the first byte was uploaded.
        body: The manifest; it carries `save_id`, so that no two are equal.
        save_id: Of this save.
        deadline: Until when an unclear answer is pursued.
        sleep: For tests.
        uniform: For tests.

    Raises:
        CommitConflictError: Another save was committed since; this one was not.
        CommitUnknownError: By the deadline it could not be found out whether this save is committed; or an answer was
            lost, and what lies there now does not tell.
        StorageError: The store refused; nothing was committed.
    """
    pause, refusals, unclear = _FIRST_PAUSE_SECONDS, 0, False
    while True:
        try:
            store.put(MANIFEST_KEY, [body], condition=slot.version or "absent")
        except DcpRemoteError as error:
            failure = error
        else:
            return
        unclear |= isinstance(failure, TransientStorageError)
        try:
            now = look(store)
        except DcpRemoteError as error:
            if not unclear and not isinstance(failure, ConditionFailedError):
                raise failure from None
            raise _unknown(store, save_id, failure) from error
        if now.head is not None and save_id in (now.head.save_id, *now.head.replaces):
            return
        if now.version != slot.version:
            raise _lost(store, save_id, slot, now, failure, unclear=unclear) from failure
        if isinstance(failure, ConditionFailedError):
            refusals += 1
            if refusals >= _REFUSALS_MAX and not unclear:
                raise StorageError(
                    "The store keeps refusing a conditional write although nothing changed: it may not support them, "
                    "or want ETags without quotes, as Ceph 16 does (on S3 storage_options={'etag_quotes': False}).",
                    url=store.url,
                    attempts=refusals,
                ) from failure
        elif not isinstance(failure, TransientStorageError) and not unclear:
            raise failure
        if deadline.remaining_seconds() <= pause:
            raise _unknown(store, save_id, failure) from failure
        sleep(uniform(0, pause))
        pause = min(2 * pause, _PAUSE_SECONDS_MAX)


def _lost(
    store: ObjectStore, save_id: str, slot: Slot, now: Slot, failure: DcpRemoteError, *, unclear: bool
) -> CommitConflictError | CommitUnknownError:
    # Told all saves since we looked, we know that ours is none of them. A manifest that was removed, or replaced by
    # something that cannot be read, tells nothing; and a long list forgets its end.
    told = now.head is not None and (
        len(now.head.replaces) < REPLACES_MAX
        or (slot.head is not None and slot.head.save_id in (now.head.save_id, *now.head.replaces))
    )
    if unclear and not told:
        return _unknown(store, save_id, failure)
    if now.head is not None and (
        not now.committed or (slot.head is not None and now.head.save_id == slot.head.save_id)
    ):
        return CommitConflictError(
            "Orphans were removed here since this save began, and its shards may have been taken for such; it was not "
            "committed. Save again.",
            url=store.url,
            save_id=save_id,
        )
    return CommitConflictError(
        "Another save was committed here meanwhile, or the manifest was removed; this save was not committed. Look at "
        "what is here, then save again.",
        url=store.url,
        save_id=save_id,
        committed=now.head.save_id if now.head else now.unreadable,
    )


def _unknown(store: ObjectStore, save_id: str, failure: DcpRemoteError) -> CommitUnknownError:
    return CommitUnknownError(
        "The store never said whether the checkpoint was committed. Look before you save again: it exists if its "
        "manifest names this save.",
        url=store.url,
        save_id=save_id,
        cause=failure,
    )
