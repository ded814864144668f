"""Commit of a checkpoint by itself: the conditional PUT of its manifest.

The checkpoint exists if and only if its manifest was put. This module writes that one object exactly once, and finds
out whether it was written: a PUT without a clear answer is settled by reading the object.
"""

from __future__ import annotations

from typing import TypeAlias

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import CommitConflictError, CommitUnknownError, DcpRemoteError
from dcp_remote.format import manifest_json
from dcp_remote.format.document import STORED_BYTES_MAX
from dcp_remote.format.manifest import MANIFEST_KEY, REPLACES_MAX
from dcp_remote.format.manifest_json import Head
from dcp_remote.run.conditional_put import FailedPut, Found, find, put_until_settled
from dcp_remote.storage.base import ObjectStore

# Object at the manifest's key, as it was read.
Slot: TypeAlias = Found[Head]


def read_slot(store: ObjectStore) -> Slot:
    """Read the object at the manifest's key; one GET, and one more if it is damaged. Coordinator only."""
    return find(store, MANIFEST_KEY, manifest_json.decode_head, limit_bytes=STORED_BYTES_MAX)


def is_committed(slot: Slot) -> bool:
    """Return whether a checkpoint is here, or an object that must not be taken for the absence of one."""
    return slot.version is not None and (slot.content is None or slot.content.kind != manifest_json.TOMBSTONE)


def list_replaced(slot: Slot) -> tuple[str, ...]:
    """Return the ids of the saves that a manifest put over this one replaces, newest first."""
    return (slot.content.save_id, *slot.content.replaces)[:REPLACES_MAX] if slot.content else ()


def commit(store: ObjectStore, slot: Slot, body: bytes, *, save_id: str, deadline: Deadline) -> None:
    """Put the manifest on the condition that the slot is as it was seen; return only if it is committed.

    `slot` is as `read_slot` saw it before the first byte was uploaded; `body` carries `save_id`, so that no two are
    equal; the reads of `store` are retried. Costs one request, unless an answer is lost. Whatever is raised, a crash of
    this process included, the slot holds the old manifest or the new one, whole: another save was committed since
    (`CommitConflictError`), the store refused (`StorageError`), or it could not be found out (`CommitUnknownError`),
    also because an answer was lost and the object that is there now does not tell.
    """

    def decide(now: Slot, failed: FailedPut) -> bytes | None:
        if now.content is not None and save_id in (now.content.save_id, *now.content.replaces):
            return None
        if now.version != slot.version:
            raise _lost(store, save_id, slot, now, failed) from failed.error
        return body

    put_until_settled(
        store,
        MANIFEST_KEY,
        body,
        slot,
        look=lambda: read_slot(store),
        decide=decide,
        unknown=lambda failure: _unknown(store, save_id, failure),
        deadline=deadline,
    )


def _lost(
    store: ObjectStore, save_id: str, slot: Slot, now: Slot, failed: FailedPut
) -> CommitConflictError | CommitUnknownError:
    # A manifest that lists all saves since the slot was seen, and not ours, proves that ours was not committed. One
    # that was removed or cannot be read proves nothing, nor does one whose list has reached its limit and lost its end.
    head, before = now.content, slot.content
    is_proven = head is not None and (
        len(head.replaces) < REPLACES_MAX or (before is not None and before.save_id in (head.save_id, *head.replaces))
    )
    if failed.is_unclear and not is_proven:
        return _unknown(store, save_id, failed.error)
    if head is not None and (not is_committed(now) or (before is not None and head.save_id == before.save_id)):
        return CommitConflictError(
            "Orphans were removed here since this save began, perhaps its shards among them; it was not committed. "
            "Save again.",
            url=store.url,
            save_id=save_id,
        )
    return CommitConflictError(
        "Another save was committed here meanwhile, or the manifest was removed; this save was not committed. Check "
        "the checkpoint (`dcp-remote show`), then save again.",
        url=store.url,
        save_id=save_id,
        committed=head.save_id if head else now.error,
    )


def _unknown(store: ObjectStore, save_id: str, failure: DcpRemoteError) -> CommitUnknownError:
    return CommitUnknownError(
        "The store did not confirm the commit, which may or may not have happened. Check before saving again "
        "(`dcp-remote show`): the checkpoint exists if its manifest has this save_id.",
        url=store.url,
        save_id=save_id,
        cause=failure,
    )
