"""Reading and swapping a catalog: requests, refusals, damage, and many processes at once.

Time is a counter that the pauses advance. Assertions read the `MemoryStore` itself, past all wrappers.
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
from dcp_remote.format.catalog import CATALOG_KEY, Catalog, add_entry, pin_entry, retire_entries, take_fence
from dcp_remote.format.catalog_json import STORED_BYTES_MAX, encode
from dcp_remote.format.document import seal, unseal
from dcp_remote.run.catalog_store import Change, Seen, read_catalog, see_catalog, swap
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.base import Capabilities
from dcp_remote.storage.wrapper import WrappedStore
from dcp_remote.testing import RecordingStore
from tests.support.catalogs import NONCE, ONE, SECONDS, attempt, commit, identity, store_of, stored, swapped

# ---- nothing goes wrong


def test_reading() -> None:
    """Read a catalog and an absent one: one request each, and no error."""
    recording = RecordingStore(store_of())
    assert see_catalog(recording) == Seen(ONE, recording.head(CATALOG_KEY).version)
    assert recording.calls[0] == ("get", CATALOG_KEY)
    assert recording.count("get") == 1
    assert read_catalog(store_of()) == ONE
    assert read_catalog(MemoryStore()) is None


def test_two_requests() -> None:
    """Swap: one GET and one PUT, and the result is the stored catalog."""
    store = store_of()
    recording = RecordingStore(store)
    after = swapped(recording, commit(2))
    assert recording.calls == [("get", CATALOG_KEY), ("put", CATALOG_KEY)]
    assert after == stored(store) == add_entry(ONE, attempt(2, "b"))


def test_one_request_if_nothing_is_to_be_done() -> None:
    """Apply a change that was already made: no PUT."""
    recording = RecordingStore(store_of())
    assert swapped(recording, partial(pin_entry, step=1, pin=False)) == ONE
    assert recording.calls == [("get", CATALOG_KEY)]


def test_a_refusal_writes_nothing() -> None:
    """Raise in a change: the error reaches the caller unchanged, after one request."""
    recording = RecordingStore(store_of())
    with pytest.raises(CommitConflictError, match="step=1"):
        swapped(recording, commit(1))
    assert recording.calls == [("get", CATALOG_KEY)]


def test_a_catalog_that_only_newer_software_may_replace() -> None:
    """A catalog with `requires_to_write` is read, and every swap is refused before its PUT, also a fence."""
    store = store_of()
    newer = seal(unseal(encode(ONE, NONCE)).replace(b'"requires":[]', b'"requires":[],"requires_to_write":["holds"]'))
    store.put(CATALOG_KEY, [newer])
    found = read_catalog(store)
    assert found is not None
    assert found.entries == ONE.entries
    recording = RecordingStore(store)
    changes: list[Change] = [take_fence, commit(2), lambda run: retire_entries(run, [identity(1)])]
    for change in changes:
        with pytest.raises(UnsupportedFormatError, match="holds"):
            swapped(recording, change)
    assert recording.count("put") == 0
    assert bytes(store.space.objects[CATALOG_KEY].data) == newer


def test_no_run() -> None:
    """Swap without `create` where there is no catalog: refused, and nothing is written."""
    store = MemoryStore()
    with pytest.raises(CheckpointNotFoundError, match="no run"):
        swapped(store, take_fence)
    assert stored(store) is None


def test_a_run_begins() -> None:
    """Swap with `create`: two requests, and each run gets an id of its own."""
    stores = [MemoryStore(), MemoryStore()]
    recording = RecordingStore(stores[0])
    runs = [swapped(recording, take_fence, create=True), swapped(stores[1], take_fence, create=True)]
    assert recording.calls == [("get", CATALOG_KEY), ("put", CATALOG_KEY)]
    assert runs == [stored(store) for store in stores]
    assert runs[0].run_id != runs[1].run_id
    assert [(run.revision, run.token, run.entries) for run in runs] == [(1, 1, ())] * 2


def test_a_run_begins_empty() -> None:
    """Create a run by a change that does nothing: the result is the empty catalog that is stored."""
    store = MemoryStore()
    begun = swapped(store, lambda run: retire_entries(run, [identity(1)]), create=True)
    assert begun == stored(store) == Catalog(begun.run_id)


def test_a_run_that_is_there_is_not_begun() -> None:
    """Swap with `create` where there is a run: the run stays."""
    store = store_of()
    assert swapped(store, take_fence, create=True).run_id == ONE.run_id
    assert stored(store) == take_fence(ONE)


class NoSwap(WrappedStore):
    """Store that cannot compare and swap."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(compare_and_swap=False, shared=True, swap_refusal="It is on NFS.")


def test_a_store_that_cannot_swap() -> None:
    """Swap on such a store: refused before the first request, with the store's reason."""
    recording = RecordingStore(store_of())
    with pytest.raises(InvalidArgumentError, match="NFS"):
        swapped(NoSwap(recording), take_fence)
    assert recording.calls == []


# ---- damage

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
    """Swap over a damaged catalog: the bytes stay, and the error names the run."""
    data, error = DAMAGED[what]
    store = MemoryStore()
    store.put(CATALOG_KEY, [data])
    recording = RecordingStore(store)
    with pytest.raises(error) as caught:
        swapped(recording, take_fence, create=create)
    assert caught.value.details["url"] == store.url
    reads = 2 if error is CorruptCheckpointError else 1  # read twice, since the damage may be of the answer alone
    assert recording.calls == [("get", CATALOG_KEY)] * reads
    assert store.space.objects[CATALOG_KEY].data == data


def test_what_is_too_large_is_not_read() -> None:
    """Store one byte more than a catalog may have: refused."""
    store = MemoryStore()
    store.put(CATALOG_KEY, [bytes(STORED_BYTES_MAX + 1)])
    with pytest.raises(CorruptCheckpointError):
        swapped(store, take_fence, create=True)
    assert len(store.space.objects[CATALOG_KEY].data) == STORED_BYTES_MAX + 1


def test_a_change_that_makes_nonsense() -> None:
    """Return an invalid catalog from a change: refused before anything is written."""
    recording = RecordingStore(store_of())
    with pytest.raises(CorruptCheckpointError):
        swapped(recording, lambda run: Catalog(run.run_id, floor=1))
    assert recording.calls == [("get", CATALOG_KEY)]


# ---- many at once


@pytest.mark.parametrize("threads", [2, 8])
def test_many_at_once_lose_nothing(threads: int) -> None:
    """Commit steps from many threads: all are there at the end, and every swap was one revision."""
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
    """Take the fence of an absent run from many threads: one run_id remains, and each gets its own token."""
    store = MemoryStore()
    ready = threading.Barrier(threads)

    def work(_number: int) -> Catalog:
        ready.wait(timeout=SECONDS)
        return swap(store, take_fence, create=True, deadline=Deadline(SECONDS), sleep=lambda _seconds: None)

    with ThreadPoolExecutor(threads) as pool:
        runs = list(pool.map(work, range(threads)))
    now = stored(store)
    assert now is not None
    assert {run.run_id for run in runs} == {now.run_id}
    assert sorted(run.token for run in runs) == list(range(1, threads + 1))
