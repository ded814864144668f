"""The store in memory: the shipped suite, names, clocks and pickles."""

from __future__ import annotations

import itertools
import pickle
import uuid

import pytest

from dcp_remote.errors import InvalidArgumentError, ObjectNotFoundError
from dcp_remote.storage import MemoryStore, ObjectStore, Version, open_store
from dcp_remote.storage.memory import MemoryObject
from dcp_remote.testing.store_suite import StoreSuite


class TestMemoryStore(StoreSuite):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return MemoryStore(f"test-{uuid.uuid4().hex}")

    def raw_write(self, store: ObjectStore, key: str, data: bytes) -> None:
        assert isinstance(store, MemoryStore)
        store.space.objects[key] = MemoryObject(data=data, version=Version(etag="raw"), modified_seconds=1.0)

    def raw_read(self, store: ObjectStore, key: str) -> bytes:
        assert isinstance(store, MemoryStore)
        return store.space.objects[key].data


def test_names_are_shared() -> None:
    """Open one name in three ways, and another name."""
    name = f"test-{uuid.uuid4().hex}"
    open_store(f"memory://{name}/prefix").put("key", [b"x"])
    assert MemoryStore(name).get("prefix/key", limit_bytes=1).data == b"x"
    assert open_store(f"memory://{name}").child("prefix").head("key").size_bytes == 1
    with pytest.raises(ObjectNotFoundError):
        MemoryStore(f"{name}-other").head("prefix/key")


def test_anonymous_stores_are_alone() -> None:
    """Create two anonymous stores: they share nothing, their URLs do not open, and they cannot be pickled."""
    first, second = MemoryStore(), MemoryStore()
    first.child("a").put("b", [b"x"])
    assert [info.key for info in first.list()] == ["a/b"]
    assert list(second.list()) == []
    with pytest.raises(InvalidArgumentError):
        open_store(first.url)
    for store in (first, first.child("a")):
        with pytest.raises(InvalidArgumentError, match="without a name"):
            pickle.dumps(store)


def test_the_clock_gives_modification_times() -> None:
    """Pass a counting clock: modification times come from it, in children too."""
    clock = itertools.count(1000.0)
    store = MemoryStore(clock=lambda: next(clock))
    store.put("a", [b"x"])
    store.child("b").put("c", [b"x"])
    store.put("a", [b"x"])
    assert [(info.key, info.modified_seconds) for info in store.list()] == [("a", 1002.0), ("b/c", 1001.0)]


def test_a_put_keeps_no_reference_to_the_callers_buffer() -> None:
    """Change the buffer after the put."""
    store, buffer = MemoryStore(), bytearray(b"before")
    store.put("key", [buffer])
    buffer[:] = b"after!"
    assert store.get("key", limit_bytes=6).data == b"before"
