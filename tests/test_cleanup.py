"""What a save that failed deletes again, and how long that may take: requests are counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dcp_remote import uploads as uploads_module
from dcp_remote.errors import PermissionDeniedError, SaveFailedError, StorageError
from dcp_remote.pending import KEYS_PER_DELETE, Pending, delete_all
from dcp_remote.storage import MemoryStore, ObjectStore
from dcp_remote.storage.base import Buffer, Condition, Version
from dcp_remote.storage.retrying import Deadline
from dcp_remote.storage.wrapper import WrappedStore
from dcp_remote.uploads import Prepared, Uploads

PATIENCE_SECONDS = 60.0


def sending(number: int) -> Callable[[], Prepared[int]]:
    return lambda: Prepared([b"x"], lambda _: number, lambda: None)


class DenyingStore(WrappedStore):
    """Deletes nothing, and says so of each key; refuses one put; notes how many keys were asked for at a time."""

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
    """A save of which 708 shards are there, and one is refused."""
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


def test_who_may_not_delete_asks_once(caplog: pytest.LogCaptureFixture) -> None:
    """One definite refusal ends the cleanup of a failed save, however many shards there are."""
    store = DenyingStore(MemoryStore())
    fail_after_many(store)
    assert store.asked == [100]
    assert "stay as orphans. shards=709" in caplog.text


def test_cleaning_up_ends_between_two_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that takes longer for a request than there is time for all of them gets one."""
    monkeypatch.setattr(uploads_module, "CLEANUP_SECONDS", 0.01)
    store = DenyingStore(MemoryStore(), seconds=0.02, error=StorageError)
    fail_after_many(store)
    assert store.asked == [100]
    assert "stay as orphans. shards=709" in caplog.text


def test_what_is_to_be_deleted_can_be_handed_over() -> None:
    """Then the error of the save waits for no deletion at all."""
    store = DenyingStore(MemoryStore())
    told: list[str] = []
    fail_after_many(store, discard=told.extend)
    assert store.asked == []
    assert {*told} == {"refused", *(f"k{number}" for number in range(708))}


class HoldingStore(WrappedStore):
    """Does not delete what is held, as a store with object lock; notes how many keys were asked for at a time."""

    def __init__(self, store: ObjectStore, held: Callable[[str], bool]) -> None:
        super().__init__(store)
        self.held = held
        self.asked: list[int] = []

    def delete(self, keys: Sequence[str]) -> dict[str, StorageError]:
        self.asked.append(len(keys))
        super().delete([key for key in keys if not self.held(key)])
        return {key: PermissionDeniedError("Held.", key=key) for key in keys if self.held(key)}


def test_an_object_that_is_held_is_no_want_of_permission() -> None:
    """The last of many is asked for alone, and refused; what is noted later is deleted all the same."""
    store = HoldingStore(MemoryStore(), lambda key: key == "z")
    pending = Pending(store)
    pending.add(["a", "b", "z"])
    assert pending.delete(deadline=Deadline(PATIENCE_SECONDS), batch=2, pause_seconds=0).removed == 2
    pending.add(["c"])
    assert pending.delete(deadline=Deadline(PATIENCE_SECONDS), pause_seconds=0).removed == 1


def test_gc_without_permission_asks_once() -> None:
    """Two thousand and one orphans: a request, and its refusal is raised; one that is held is returned."""
    keys = [f"{number:05d}" for number in range(2 * KEYS_PER_DELETE + 1)]
    store = HoldingStore(MemoryStore(), lambda _: True)
    with pytest.raises(PermissionDeniedError):
        delete_all(store, keys)
    assert store.asked == [KEYS_PER_DELETE]
    store = HoldingStore(MemoryStore(), lambda key: key == keys[-1])
    assert list(delete_all(store, keys)) == [keys[-1]]
