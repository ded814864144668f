"""Direct reads that fail, again and again: which way ranges are read, and what is logged."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dcp_remote.common.deadline import Clock, Deadline
from dcp_remote.common.units import KiB, MiB
from dcp_remote.errors import TransientStorageError
from dcp_remote.storage.cloud.direct_reads import DirectReads
from dcp_remote.storage.cloud.store import CloudStore
from dcp_remote.storage.retrying import RetryingStore
from tests.benchmark.server.certificates import make_certificates
from tests.storage.cloud.range_server import range_server
from tests.support.clouds import error_body, is_direct, open_s3
from tests.support.scripted_server import HttpAnswer, HttpRequest, scripted_server

DATA = bytes(range(256)) * 16 * KiB  # 4 MiB


def read(store: CloudStore, start: int, stop: int) -> None:
    """Read a range and compare it; transient failures are retried without a pause."""
    buffer = bytearray(stop - start)
    RetryingStore(store, Deadline(60, Clock(sleep=lambda _: None))).get_into("key", start, memoryview(buffer))
    assert buffer == DATA[start:stop]


@pytest.mark.parametrize("tls", [False, True], ids=["http", "tls"])
@pytest.mark.parametrize("size_bytes", [100, 9000, 300_000, 4 * MiB])
def test_a_server_that_closes_after_each_answer(size_bytes: int, *, tls: bool, tmp_path: Path) -> None:
    """Answer with `Connection: close` and bodies of any size: each is sent once, and directly."""
    context, options = None, dict[str, Any]()
    if tls:
        authority, chain = make_certificates(tmp_path)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(chain)
        options = {"verify": str(authority)}
    with range_server(DATA, context=context, headers={"Connection": "close"}) as server:
        store = open_s3(server.endpoint_url, **options)
        for _ in range(3):
            read(store, 0, size_bytes)
        assert [is_direct(target) for target in server.targets] == [True] * 3


def test_direct_reads_can_be_switched_off() -> None:
    """Read with `direct_reads=False`: obstore reads the same bytes, in one request a range."""
    with range_server(DATA) as server:
        store = open_s3(server.endpoint_url, direct_reads=False)
        for stop in (1, 9000, 4 * MiB):
            read(store, 0, stop)
        assert [is_direct(target) for target in server.targets] == [False] * 3


@pytest.mark.parametrize("cut_bytes", [-1, 0, 50_000], ids=["no answer", "no body", "in the body"])
def test_a_middlebox_that_cuts_signed_urls(cut_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    """Cut every direct read: obstore reads each range at once, after three ranges alone, with one line in the log."""
    with (
        caplog.at_level(logging.WARNING, "dcp_remote.storage.cloud.direct_reads"),
        range_server(DATA, cut=lambda target: cut_bytes if is_direct(target) else None) as server,
    ):
        store = open_s3(server.endpoint_url)
        for start in range(10):
            read(store, start, start + 100_000)
        assert [is_direct(target) for target in server.targets] == [True, False] * 3 + [False] * 7
    (line,) = [record.getMessage() for record in caplog.records if "Direct reads" in record.getMessage()]
    assert "bucket=bucket" in line


def test_many_threads_behind_a_middlebox() -> None:
    """Read by sixteen threads while direct reads are cut: all ranges arrive, after few direct attempts."""
    with range_server(DATA, cut=lambda target: 0 if is_direct(target) else None) as server:
        store = open_s3(server.endpoint_url)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda start: read(store, start, start + 10_000), range(100)))
        assert sum(map(is_direct, server.targets)) <= 3 * 16
        assert len(server.targets) == 100 + sum(map(is_direct, server.targets))


def test_one_broken_connection_costs_one_request() -> None:
    """Cut the first of ten reads: obstore reads that range, and all other reads are direct."""
    cuts = [50_000]
    with range_server(DATA, cut=lambda _: cuts.pop() if cuts else None) as server:
        store = open_s3(server.endpoint_url)
        for start in range(10):
            read(store, start, start + 100_000)
        assert [is_direct(target) for target in server.targets] == [True, False] + [True] * 9


def test_a_middlebox_that_cuts_large_answers_only() -> None:
    """Cut large direct reads while small ones succeed: the large ranges arrive as well, and direct reads go on."""
    large = threading.Event()
    with range_server(DATA, cut=lambda target: 10 if is_direct(target) and large.is_set() else None) as server:
        store = open_s3(server.endpoint_url)
        for start in range(5):
            large.clear()
            read(store, start, start + 100)
            large.set()
            read(store, start, start + 100_000)
        assert [is_direct(target) for target in server.targets] == [True, True, False] * 5


def test_a_busy_store_does_not_end_direct_reads() -> None:
    """Answer 503 to everything: each third range is read by obstore, one request as well, and direct reads go on."""
    with scripted_server(lambda _: HttpAnswer(503)) as server:
        store = open_s3(server.endpoint_url)
        for _ in range(30):
            with pytest.raises(TransientStorageError):
                store.get_into("key", 0, memoryview(bytearray(100)))
        assert sum(map(is_direct, (request.path for request in server.requests))) == 21  # with the diagnosis
        assert len(server.requests) == 31


def test_a_store_that_refuses_for_a_while_does_not_end_direct_reads() -> None:
    """Let the store say "SlowDown" to two direct reads of each range: the third is direct again, and so are all."""
    refused: Counter[str] = Counter()

    def answer(request: HttpRequest) -> HttpAnswer:
        asked = request.headers["range"]
        refused[asked] += 1
        if is_direct(request.path) and refused[asked] <= 2:
            return HttpAnswer(503, error_body("SlowDown"))
        return HttpAnswer(206, b"x" * 100, {"Content-Range": f"{asked.replace('=', ' ')}/1000", "ETag": '"1"'})

    with scripted_server(answer) as server:
        store = RetryingStore(open_s3(server.endpoint_url), Deadline(60, Clock(sleep=lambda _: None)))
        for start in range(5):
            store.get_into("key", start, memoryview(bytearray(100)))
        assert [is_direct(request.path) for request in server.requests] == [True] * 15


def test_a_gateway_that_is_busy_for_signed_urls_alone() -> None:
    """Answer 502 to signed URLs: obstore reads the ranges, and direct reads end."""

    def answer(request: HttpRequest) -> HttpAnswer:
        if is_direct(request.path):
            return HttpAnswer(502)
        return HttpAnswer(206, b"x" * 100, {"Content-Range": "bytes 0-99/200", "ETag": '"1"'})

    with scripted_server(answer) as server:
        store = open_s3(server.endpoint_url)
        for _ in range(5):
            buffer = bytearray(100)
            RetryingStore(store, Deadline(60, Clock(sleep=lambda _: None))).get_into("key", 0, memoryview(buffer))
            assert buffer == b"x" * 100
        before = len(server.requests)
        store.get_into("key", 0, memoryview(bytearray(100)))
        assert [is_direct(request.path) for request in server.requests[before:]] == [False]


def test_a_short_object_behind_a_middlebox() -> None:
    """Cut direct reads of an object that ends before the range: the error says so, whoever reads."""

    def answer(request: HttpRequest) -> HttpAnswer:
        too_short = HttpAnswer(416, b"<Error><Code>InvalidRange</Code></Error>")
        return HttpAnswer(206, b"1", cut_bytes=0) if is_direct(request.path) else too_short

    with scripted_server(answer) as server:
        store = RetryingStore(open_s3(server.endpoint_url), Deadline(60, Clock(sleep=lambda _: None)))
        for start in range(3):
            buffer = bytearray(100)
            with pytest.raises(Exception, match="ends before the range"):
                store.get_into("key", start, memoryview(buffer))


def test_reads_that_break_together_count_as_one() -> None:
    """Break sixteen reads at once, as a restarting load balancer does: direct reads go on, and end after two more."""
    asked: list[int] = []
    reads = DirectReads("bucket", connect_seconds=5, silence_seconds=5)

    def is_asked() -> bool:
        before = len(asked)
        reads.read(lambda: asked.append(1), 0, memoryview(bytearray(1)), verify=None, seconds=1, may_repeat=False)
        return len(asked) > before

    began_seconds = time.monotonic()
    for _ in range(16):
        reads.note_failed(began_seconds)
    assert is_asked()
    reads.note_failed(time.monotonic())
    assert is_asked()
    reads.note_failed(time.monotonic())
    assert not is_asked()
