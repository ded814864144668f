"""CountingStore: numbers of requests and bytes."""

from __future__ import annotations

import pytest

from dcp_remote.errors import BucketNotFoundError, TransientStorageError
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.counting import CountingStore, Counts
from dcp_remote.testing import FaultyStore, nth


def test_counts() -> None:
    """Count requests, bytes in both directions, failures, and the requests of a child."""
    store = CountingStore(FaultyStore(MemoryStore(), [nth(3, "request")]))
    store.put("a", [b"12", b"345"])
    child = store.child("below")
    child.put("b", [b"6"])
    with pytest.raises(TransientStorageError):
        store.get("a", limit_bytes=10)
    before = store.counts
    assert before == Counts(requests=3, put_bytes=6, got_bytes=0, failed=1)
    assert store.get("a", limit_bytes=10).data == b"12345"
    buffer = bytearray(3)
    store.get_into("a", 1, memoryview(buffer))
    list(store.list())
    store.delete(["a", "below/b"])
    assert store.counts.since(before) == Counts(requests=4, put_bytes=0, got_bytes=8)
    assert child.counts == store.counts


def test_explain_missing_is_forwarded() -> None:
    class Knowing(MemoryStore):
        def explain_missing(self) -> BucketNotFoundError:
            return missing

    missing = BucketNotFoundError("no such bucket")
    assert CountingStore(Knowing()).explain_missing() is missing
    assert CountingStore(MemoryStore()).explain_missing() is None
