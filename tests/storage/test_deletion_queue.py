"""Deletions after a failed save, by a queue and by gc: requests are counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from dcp_remote.common.arrays import Buffer
from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import PermissionDeniedError, SaveFailedError, StorageError
from dcp_remote.run.gc import Orphans, delete_orphans
from dcp_remote.saving import uploads as uploads_module
from dcp_remote.saving.uploads import Prepared, Uploads
from dcp_remote.storage import MemoryStore, ObjectStore
from dcp_remote.storage.base import Condition, ObjectInfo, Version
from dcp_remote.storage.deletion_queue import KEYS_PER_DELETE, DeletionQueue
from dcp_remote.storage.wrapper import WrappedStore

PATIENCE_SECONDS = 60.0


def sending(number: int) -> Callable[[], Prepared[int]]:
    return lambda: Prepared([b"x"], lambda _: number, lambda: None)


class DenyingStore(WrappedStore):
    """Store that denies each deletion and one put, and records the number of keys of each delete."""

    def __init__(
        self, store: ObjectStore, *, seconds: float = 0.0, error: type[StorageError] = PermissionDeniedError
    ) -> None:
        super().__init__(store)
        self.seconds, self.error = seconds, error
        self.asked: list[int] = []

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        if key == "refused":
            raise PermissionDeniedError("An injected refusal.")
        return super().put(key, buffers, condition=condition)

    def delete(self, keys: Sequence[str]) -> dict[str, StorageError]:
        self.asked.append(len(keys))
        time.sleep(self.seconds)
        return {key: self.error("An injected refusal.", key=key) for key in keys}


def fail_after_many(store: ObjectStore, **options: Any) -> None:
    """Fail a save of which 708 shards are in the store, and one is refused."""
    deadline = Deadline(1800, lambda: 0.0)
    with (
        pytest.raises(SaveFailedError, match="An injected refusal"),
        Uploads[int](store, rank=7, deadline=deadline, memory_budget_bytes=1000, **options) as uploads,
    ):
        put_many(uploads)


def put_many(uploads: Uploads[int]) -> None:
    for number in range(708):
        uploads.submit(f"k{number}", sending(1), claimed_bytes=0)
    with uploads._changed:
        uploads._changed.wait_for(lambda: not uploads._unfinished, PATIENCE_SECONDS)
    uploads.submit("refused", sending(1), claimed_bytes=0)
    uploads.finish()


def test_cleanup_without_permission_sends_one_request(caplog: pytest.LogCaptureFixture) -> None:
    """Deny deletion: one refused request ends the cleanup of a failed save, whatever the number of shards."""
    store = DenyingStore(MemoryStore())
    fail_after_many(store)
    assert store.asked == [100]
    assert "stay as orphans. shards=709" in caplog.text


def test_cleanup_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Delete at a store that takes longer for one request than there is time for all: only one is sent."""
    monkeypatch.setattr(uploads_module, "CLEANUP_SECONDS", 0.01)
    store = DenyingStore(MemoryStore(), seconds=0.02, error=StorageError)
    fail_after_many(store)
    assert store.asked == [100]
    assert "stay as orphans. shards=709" in caplog.text


def test_deletions_can_be_handed_over() -> None:
    """Pass `discard`: the failed save deletes nothing, and hands over all its keys."""
    store = DenyingStore(MemoryStore())
    told: list[str] = []
    fail_after_many(store, discard=told.extend)
    assert store.asked == []
    assert {*told} == {"refused", *(f"k{number}" for number in range(708))}


class HoldingStore(DenyingStore):
    """Store with object lock, which denies the deletion of held objects alone."""

    def __init__(self, store: ObjectStore, held: Callable[[str], bool]) -> None:
        super().__init__(store)
        self.held = held

    def delete(self, keys: Sequence[str]) -> dict[str, StorageError]:
        denied = super().delete(keys)
        self._store.delete([key for key in keys if not self.held(key)])
        return {key: error for key, error in denied.items() if self.held(key)}


def test_a_held_object_is_no_lack_of_permission() -> None:
    """Delete a held object alone, after others were deleted: refused, but objects added later are deleted."""
    store = HoldingStore(MemoryStore(), lambda key: key == "z")
    pending = DeletionQueue(store)
    pending.add(["a", "b", "z"])
    assert pending.delete(deadline=Deadline(PATIENCE_SECONDS), batch=2, pause_seconds=0).removed == 2
    pending.add(["c"])
    assert pending.delete(deadline=Deadline(PATIENCE_SECONDS), pause_seconds=0).removed == 1


def test_gc_without_permission_sends_one_request() -> None:
    """Delete 2,001 orphans without permission: one request, whose error is raised. One held orphan is returned."""
    keys = [f"{number:05d}" for number in range(2 * KEYS_PER_DELETE + 1)]
    infos = [ObjectInfo(key, size_bytes=1, version=Version(etag="e"), modified_seconds=0) for key in keys]
    orphans, deadline = Orphans(old=tuple(infos), young=()), Deadline(PATIENCE_SECONDS)
    store = HoldingStore(MemoryStore(), lambda _: True)
    with pytest.raises(PermissionDeniedError):
        delete_orphans(store, orphans, deadline)
    assert store.asked == [KEYS_PER_DELETE]
    store = HoldingStore(MemoryStore(), lambda key: key == keys[-1])
    removal = delete_orphans(store, orphans, deadline)
    assert list(removal.failed) == [keys[-1]]
    assert [info.key for info in removal.old] == keys[:-1]


def test_gc_that_has_no_time_left_says_what_it_left() -> None:
    """The deadline has passed: nothing is asked, and each orphan is told as not deleted."""
    infos = tuple(ObjectInfo(key, size_bytes=1, version=Version(etag="e"), modified_seconds=0) for key in "ab")
    store = HoldingStore(MemoryStore(), lambda _: False)
    removal = delete_orphans(store, Orphans(old=infos, young=()), Deadline(0))
    assert store.asked == []
    assert removal.old == ()
    assert list(removal.failed) == ["a", "b"]


class ExpiringStore(WrappedStore):
    """Store that refuses the first deletion for its credentials."""

    def __init__(self, store: ObjectStore, code: str) -> None:
        super().__init__(store)
        self.codes = [code]

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        if self.codes:
            error = PermissionDeniedError("An injected refusal.", code=self.codes.pop())
            return dict.fromkeys(keys, error)
        return super().delete(keys)


@pytest.mark.parametrize(
    "code", ["ExpiredToken", "TokenRefreshRequired", "RequestTimeTooSkewed", "InvalidToken", "InvalidAccessKeyId"]
)
def test_refused_credentials_are_no_lack_of_permission(code: str) -> None:
    """Refuse the credentials of the first batch: its objects stay in the queue, and the next call deletes all."""
    pending = DeletionQueue(ExpiringStore(MemoryStore(), code))
    pending.add(["a", "b", "c"])
    first = pending.delete(deadline=Deadline(PATIENCE_SECONDS), batch=2, pause_seconds=0)
    assert (first.removed, len(first.failed), first.left, first.given_up) == (0, 2, 3, 0)
    assert pending.delete(deadline=Deadline(PATIENCE_SECONDS), batch=2, pause_seconds=0).removed == 3
