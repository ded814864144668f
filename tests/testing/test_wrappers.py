"""Tests of the wrappers of the test kit: what they record and inject, and that they are stores otherwise."""

from __future__ import annotations

import pickle
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest

from dcp_remote.errors import TransientStorageError
from dcp_remote.storage import MemoryStore, ObjectStore
from dcp_remote.storage.wrapper import Request, WrappedStore
from dcp_remote.testing import Fault, FaultyStore, RecordingStore, nth
from dcp_remote.testing.store_suite import StoreSuite


class _WrapperSuite(StoreSuite):
    def raw_write(self, store: ObjectStore, key: str, data: bytes) -> None:
        assert isinstance(store, WrappedStore)
        store._store.put(key, [data])

    def raw_read(self, store: ObjectStore, key: str) -> bytes:
        assert isinstance(store, WrappedStore)
        return store._store.get(key, limit_bytes=1 << 30).data


class TestRecordingStore(_WrapperSuite):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return RecordingStore(MemoryStore(uuid.uuid4().hex))


class TestFaultyStore(_WrapperSuite):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return FaultyStore(MemoryStore(uuid.uuid4().hex), [nth(1_000_000, "request", persistent=True)])


def _use_every_verb(store: ObjectStore) -> None:
    """Send eight requests."""
    store.put("a", [b"12", b"345"])
    store.head("a")
    store.get("a", limit_bytes=100)
    store.get_into("a", 1, memoryview(bytearray(3)))
    list(store.list("b"))
    store.child("b").put("c", [b"1"])
    list(store.child("b").list())
    store.delete(["a", "b/c"])


def test_every_request_is_recorded() -> None:
    """Use all verbs, also through a child: keys are relative to the outermost wrapper, sizes are bytes moved."""
    recording = RecordingStore(MemoryStore())
    _use_every_verb(recording)
    assert recording.requests == [
        Request("put", ("a",), size_bytes=5),
        Request("head", ("a",)),
        Request("get", ("a",), size_bytes=5),
        Request("get_into", ("a",), size_bytes=3),
        Request("list", ("b",)),
        Request("put", ("b/c",), size_bytes=1),
        Request("list", ("b/",)),
        Request("delete", ("a", "b/c")),
    ]
    assert recording.calls[-1] == ("delete", "a")
    assert (recording.count(), recording.count("put")) == (8, 2)
    assert (recording.size_bytes(), recording.size_bytes("put")) == (14, 6)
    recording.clear()
    assert recording.requests == []


def test_records_of_many_threads_are_whole() -> None:
    """Put and get fifty objects from each of eight threads."""
    recording = RecordingStore(MemoryStore())

    def work(number: int) -> None:
        for _ in range(50):
            recording.put(f"key-{number}", [bytes(number)])
            recording.get(f"key-{number}", limit_bytes=8)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert recording.count() == 800
    assert recording.size_bytes() == 2 * 50 * sum(range(8))


def _put_five_keys(store: ObjectStore) -> list[str]:
    """Put five keys and return those whose put was answered."""
    answered = []
    for key in "abcde":
        try:
            store.put(key, [b"x"])
        except TransientStorageError:
            continue
        answered.append(key)
    return answered


@pytest.mark.parametrize(
    ("lost", "persistent", "answered", "there"),
    [
        ("request", False, "acde", "acde"),
        ("response", False, "acde", "abcde"),
        ("request", True, "a", "a"),
        ("response", True, "a", "abcde"),
    ],
)
def test_faults_have_a_direction(
    lost: Literal["request", "response"], persistent: bool, answered: str, there: str
) -> None:
    """Hit the second of five puts, once or from then on: check the answers, and what was carried out."""
    memory = MemoryStore()
    faulty = FaultyStore(memory, [nth(2, lost, persistent=persistent)])
    assert "".join(_put_five_keys(faulty)) == answered
    assert "".join(info.key for info in memory.list()) == there
    assert [request.key for request in faulty.hits] == [key for key in "abcde" if key not in answered]


def test_late_requests() -> None:
    """Delay two puts and a delete: one until two requests later, the others until `settle`.

    A late put sends what its buffer held when it was called, and its failure is ignored.
    """
    memory = MemoryStore()
    faulty = FaultyStore(memory, [nth(1, "late", later_by=1), nth(2, "late"), nth(4, "late"), nth(5, "late")])
    buffer = bytearray(b"then")
    for key in "ab":
        with pytest.raises(TransientStorageError, match="the response was lost"):
            faulty.put(key, [buffer], condition="absent")
    buffer[:] = b"now."
    assert list(memory.list()) == []
    assert [info.key for info in faulty.list()] == ["a"]
    with pytest.raises(TransientStorageError):
        faulty.delete(["a"])
    with pytest.raises(TransientStorageError):
        faulty.head("a")  # and nothing is read later
    memory.put("b", [b"another's"])
    assert memory.get("a", limit_bytes=9).data == b"then"
    faulty.settle()
    assert [(info.key, info.size_bytes) for info in memory.list()] == [("b", 9)]


def test_faults_by_predicate() -> None:
    """Hit the first put below a prefix, through a child, and every delete with a certain key."""
    memory = MemoryStore()
    faulty = FaultyStore(
        memory,
        [
            Fault(lambda verb, key, number: verb == "put" and key.startswith("shards/"), "request"),
            Fault(lambda verb, key, number: verb == "delete" and key == "b", "response", persistent=True),
            Fault(lambda verb, key, number: verb == "head", "request", error=KeyboardInterrupt),
        ],
    )
    with pytest.raises(KeyboardInterrupt):
        faulty.head("manifest")
    faulty.put("manifest", [b"x"])
    with pytest.raises(TransientStorageError, match="verb='put' key='shards/a'"):
        faulty.child("shards").put("a", [b"x"])
    faulty.child("shards").put("a", [b"x"])
    faulty.put("b", [b"x"])
    for _ in range(2):
        with pytest.raises(TransientStorageError):
            faulty.delete(["a", "b", "c"])
    assert faulty.delete(["a"]) == {}
    assert [info.key for info in memory.list()] == ["manifest", "shards/a"]


@pytest.mark.parametrize("lost", ["request", "response"])
def test_a_fault_loop_reaches_every_request(lost: Literal["request", "response"]) -> None:
    """Fail the first request, then the second, until a run succeeds: eight requests, eight failures."""
    failures = 0
    while True:
        faulty = FaultyStore(MemoryStore(), [nth(failures + 1, lost)])
        try:
            _use_every_verb(faulty)
        except TransientStorageError:
            assert len(faulty.hits) == 1
            failures += 1
            continue
        break
    assert failures == 8
    assert faulty.hits == []


def test_a_listing_is_sent_when_it_is_iterated() -> None:
    """Create an iterator: nothing is sent until the first key is asked for, which raises the fault."""
    recording = RecordingStore(MemoryStore())
    infos = FaultyStore(recording, [nth(1, "response")]).list()
    assert recording.requests == []
    with pytest.raises(TransientStorageError):
        next(infos)
    assert recording.calls == [("list", "")]


def test_copies_do_not_share_state() -> None:
    """Pickle wrappers: records and spent faults are not copied; the store, children and prefixes are."""
    memory = MemoryStore(uuid.uuid4().hex)
    recording = RecordingStore(memory)
    recording.put("a/b", [b"x"])
    copy = pickle.loads(pickle.dumps(recording.child("a")))
    assert copy.requests == []
    copy.head("b")
    assert copy.calls == [("head", "a/b")]
    faulty = FaultyStore(memory, [nth(1, "request")])
    for store in (faulty, pickle.loads(pickle.dumps(faulty))):
        with pytest.raises(TransientStorageError):
            store.head("a/b")
        assert store.head("a/b").size_bytes == 1
