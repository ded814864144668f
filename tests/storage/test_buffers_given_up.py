"""Reads that are given up: the buffers belong to their owner again at once, and no late answer changes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import StorageError
from dcp_remote.loading.downloads import Fetch, download
from dcp_remote.storage.cloud.store import CloudStore, open_cloud_store
from dcp_remote.storage.request_context import BufferLease, require_may_write, writes_nothing
from dcp_remote.storage.url import parse_url
from tests.support.clouds import FOREVER, answer_range, open_s3
from tests.support.scripted_server import HttpAnswer, HttpRequest, scripted_server

LENGTH = 1000


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Check that all threads end once the server has answered or hung up."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert set(threading.enumerate()) <= before


def open_at(endpoint_url: str, *, direct: bool) -> CloudStore:
    """Open a store that reads directly, or, without credentials, by obstore."""
    if direct:
        return open_s3(endpoint_url, timeouts=FOREVER)
    options = {"endpoint_url": endpoint_url, "region_name": "us-east-1", "anon": True}
    return open_cloud_store(parse_url("s3://bucket/run"), options, timeouts=FOREVER)


def read(store: CloudStore, into: bytearray, *, keys: int, deadline: Deadline) -> None:
    views = [memoryview(into)[n * LENGTH : (n + 1) * LENGTH] for n in range(keys)]
    fetches = [Fetch(f"key-{n}", 0, LENGTH, view, bytes, n) for n, view in enumerate(views)]
    for _ in download(store, fetches, memory_budget_bytes=1 << 20, deadline=deadline):
        pass


def range_of(request: HttpRequest) -> HttpAnswer:
    return answer_range(request, b"x" * LENGTH) if "range" in request.headers else HttpAnswer(404)


@pytest.mark.parametrize("direct", [True, False])
def test_a_load_ends_at_its_deadline(*, direct: bool) -> None:
    """Let a load of a silent store reach its deadline: it ends, and its memory stays unchanged.

    The server answers only after the load has ended, so a load that waited for an answer would hang.
    """
    asked, ended = threading.Semaphore(0), threading.Event()
    had_ended: list[bool] = []

    def answer(request: HttpRequest) -> HttpAnswer:
        asked.release()
        had_ended.append(ended.wait(60))
        return range_of(request)

    clock = [0.0]
    with scripted_server(answer) as server:
        store = open_at(server.endpoint_url, direct=direct)
        into = bytearray(4 * LENGTH)
        over = threading.Thread(target=lambda: [asked.acquire() for _ in range(4)] and clock.__setitem__(0, 100.0))
        over.start()
        with pytest.raises(StorageError, match="no time left for the load"):
            read(store, into, keys=4, deadline=Deadline(50, lambda: clock[0]))
        over.join()
        ended.set()
    assert had_ended == [True] * 4
    assert not any(into)


@pytest.mark.parametrize("direct", [True, False])
def test_a_load_ends_with_its_first_failure(*, direct: bool) -> None:
    """Read a missing object while the answer to another read is held back: the load fails at once."""
    asked, ended = threading.Event(), threading.Event()
    had_ended: list[bool] = []

    def answer(request: HttpRequest) -> HttpAnswer:
        if "key-1" in request.path:
            assert asked.wait(60)
            return HttpAnswer(404)
        asked.set()
        had_ended.append(ended.wait(60))
        return range_of(request)

    with scripted_server(answer) as server:
        store = open_at(server.endpoint_url, direct=direct)
        into = bytearray(2 * LENGTH)
        with pytest.raises(StorageError, match="no such object"):
            read(store, into, keys=2, deadline=Deadline(1e5))
        ended.set()
    assert had_ended == [True]
    assert not any(into)


def test_closing_a_lease_waits_for_writers_only() -> None:
    """Close a lease beside a writing, a waiting and a late thread: only the writer is waited for, and none goes on."""
    lease, writes, waits, answered = BufferLease(), threading.Event(), threading.Event(), threading.Event()
    written: list[str] = []

    def write() -> None:
        with suppress(StorageError), lease.used():
            writes.set()
            try:
                while True:
                    require_may_write()
                    time.sleep(0.001)
            finally:
                written.append("the first")

    def wait() -> None:
        with suppress(StorageError), lease.used():
            with writes_nothing():
                waits.set()
                assert answered.wait(30)
            written.append("the second")

    threads = [threading.Thread(target=target) for target in (write, wait)]
    for thread in threads:
        thread.start()
    assert writes.wait(30)
    assert waits.wait(30)
    assert lease.close()
    assert written == ["the first"]
    with pytest.raises(StorageError), lease.used():
        written.append("the third")
    answered.set()
    for thread in threads:
        thread.join()
    assert not lease.close()
    assert written == ["the first"]
