"""Reading and swapping a catalog: what it costs, what it refuses, what it never overwrites, and many at once.

Time is a counter that the pauses advance; the store is a `MemoryStore`, whose content is looked at past all wrappers.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CommitConflictError,
    CorruptCheckpointError,
    DcpRemoteError,
    InvalidArgumentError,
    UnsupportedFormatError,
)
from dcp_remote.format.catalog import CATALOG_KEY, Catalog, committed, fenced, pinned, retired
from dcp_remote.format.catalog_json import STORED_BYTES_MAX, encode
from dcp_remote.format.document import seal, unseal
from dcp_remote.run.catalog_store import Seen, read_catalog, swap
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.base import Capabilities
from dcp_remote.storage.wrapper import WrappedStore
from dcp_remote.testing import RecordingStore
from tests.support.catalogs import NONCE, ONE, SECONDS, attempt, commit, identity, store_of, stored, swapped

# ---- nothing goes wrong ----


def test_reading() -> None:
    """One request; and none lying there is no error."""
    recording = RecordingStore(store_of())
    seen = read_catalog(recording)
    assert seen == Seen(ONE, recording.head(CATALOG_KEY).version)
    assert recording.calls[0] == ("get", CATALOG_KEY)
    assert recording.count("get") == 1
    assert read_catalog(MemoryStore()) is None


def test_two_requests() -> None:
    """One to look, one to swap; what is returned is what lies there."""
    store = store_of()
    recording = RecordingStore(store)
    after = swapped(recording, commit(2))
    assert recording.calls == [("get", CATALOG_KEY), ("put", CATALOG_KEY)]
    assert after == stored(store) == committed(ONE, attempt(2, "b"))


def test_one_request_if_nothing_is_to_be_done() -> None:
    """A change that is there already."""
    recording = RecordingStore(store_of())
    assert swapped(recording, partial(pinned, step=1, pin=False)) == ONE
    assert recording.calls == [("get", CATALOG_KEY)]


def test_a_refusal_writes_nothing() -> None:
    """It reaches the caller as it is, after one request."""
    recording = RecordingStore(store_of())
    with pytest.raises(CommitConflictError, match="step=1"):
        swapped(recording, commit(1))
    assert recording.calls == [("get", CATALOG_KEY)]


def test_no_run() -> None:
    """Nothing is begun unless it is asked for."""
    store = MemoryStore()
    with pytest.raises(CheckpointNotFoundError, match="no run"):
        swapped(store, fenced)
    assert stored(store) is None


def test_a_run_begins() -> None:
    """Two requests; its identity is its own."""
    stores = [MemoryStore(), MemoryStore()]
    recording = RecordingStore(stores[0])
    runs = [swapped(recording, fenced, create=True), swapped(stores[1], fenced, create=True)]
    assert recording.calls == [("get", CATALOG_KEY), ("put", CATALOG_KEY)]
    assert runs == [stored(store) for store in stores]
    assert runs[0].run_id != runs[1].run_id
    assert [(run.revision, run.token, run.entries) for run in runs] == [(1, 1, ())] * 2


def test_a_run_begins_empty() -> None:
    """A change that has nothing to do on an empty run leaves one there; what is returned lies there."""
    store = MemoryStore()
    begun = swapped(store, lambda run: retired(run, [identity(1)]), create=True)
    assert begun == stored(store) == Catalog(begun.run_id)


def test_a_run_that_is_there_is_not_begun() -> None:
    """`create` is for the first job; the next finds the run."""
    store = store_of()
    assert swapped(store, fenced, create=True).run_id == ONE.run_id
    assert stored(store) == fenced(ONE)


class NoSwap(WrappedStore):
    """Cannot compare and swap."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(compare_and_swap=False, shared=True, swap_refusal="It is on NFS.")


def test_a_store_that_cannot_swap() -> None:
    """Refused before the first request, with the store's reason."""
    recording = RecordingStore(store_of())
    with pytest.raises(InvalidArgumentError, match="NFS"):
        swapped(NoSwap(recording), fenced)
    assert recording.calls == []


# ---- damage ----

DAMAGED: dict[str, tuple[bytes, type[DcpRemoteError]]] = {
    "empty": (b"", CorruptCheckpointError),
    "cut": (encode(ONE, NONCE)[:-1], CorruptCheckpointError),
    "one bit": (encode(ONE, NONCE).replace(b'"step":1', b'"step":0'), CorruptCheckpointError),
    "of a newer version": (
        seal(unseal(encode(ONE, NONCE)).replace(b'"version":"1', b'"version":"2')),
        UnsupportedFormatError,
    ),
}


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("what", DAMAGED)
def test_what_cannot_be_read_is_never_overwritten(what: str, *, create: bool) -> None:
    """Nor taken for nothing: the bytes stay for whoever can repair them, and the error names the run."""
    data, error = DAMAGED[what]
    store = MemoryStore()
    store.put(CATALOG_KEY, [data])
    recording = RecordingStore(store)
    with pytest.raises(error) as caught:
        swapped(recording, fenced, create=create)
    assert caught.value.details["url"] == store.url
    reads = 2 if error is CorruptCheckpointError else 1  # what is damaged may have been so on the way
    assert recording.calls == [("get", CATALOG_KEY)] * reads
    assert store.space.objects[CATALOG_KEY].data == data


def test_what_is_too_large_is_not_read() -> None:
    """A byte more than a catalog may have."""
    store = MemoryStore()
    store.put(CATALOG_KEY, [bytes(STORED_BYTES_MAX + 1)])
    with pytest.raises(CorruptCheckpointError):
        swapped(store, fenced, create=True)
    assert len(store.space.objects[CATALOG_KEY].data) == STORED_BYTES_MAX + 1


def test_a_change_that_makes_nonsense() -> None:
    """A bug of whoever made it is found before it is written."""
    recording = RecordingStore(store_of())
    with pytest.raises(CorruptCheckpointError):
        swapped(recording, lambda run: Catalog(run.run_id, floor=1))
    assert recording.calls == [("get", CATALOG_KEY)]


# ---- many at once ----


@pytest.mark.parametrize("threads", [2, 8])
def test_many_at_once_lose_nothing(threads: int) -> None:
    """Each commits its steps one after another: in the end all are there, and every swap was one revision."""
    store, each = store_of(), 12
    ready = threading.Barrier(threads)

    def work(number: int) -> None:
        ready.wait(timeout=SECONDS)
        for step in range(number, threads * each, threads):
            swap(store, commit(10 + step), deadline=Deadline(SECONDS), sleep=lambda _seconds: None)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    now = stored(store)
    assert now is not None
    assert [one.step for one in now.entries] == [1, *range(10, 10 + threads * each)]
    assert now.revision == ONE.revision + threads * each


@pytest.mark.parametrize("threads", [2, 8])
def test_a_run_begins_once(threads: int) -> None:
    """All begin it at once, by taking the fence: one run_id survives, and everybody has a token of his own."""
    store = MemoryStore()
    ready = threading.Barrier(threads)

    def work(_number: int) -> Catalog:
        ready.wait(timeout=SECONDS)
        return swap(store, fenced, create=True, deadline=Deadline(SECONDS), sleep=lambda _seconds: None)

    with ThreadPoolExecutor(threads) as pool:
        runs = list(pool.map(work, range(threads)))
    now = stored(store)
    assert now is not None
    assert {run.run_id for run in runs} == {now.run_id}
    assert sorted(run.token for run in runs) == list(range(1, threads + 1))
