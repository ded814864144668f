"""Reads into the caller's memory: what is read, over how many connections, and what is left to obstore."""

from __future__ import annotations

import gc
import itertools
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from dcp_remote.common.hedging import SAMPLES_MIN
from dcp_remote.common.units import KiB, MiB
from dcp_remote.errors import StorageError, TransientStorageError
from dcp_remote.storage.cloud.direct_reads import BusyError, DirectReads, Outcome
from dcp_remote.storage.cloud.store import CloudStore, open_cloud_store
from dcp_remote.storage.cloud.tls_stream import TlsStream
from dcp_remote.storage.request_context import limit_requests
from dcp_remote.storage.rereads import RereadingStore
from dcp_remote.storage.url import parse_url
from tests.benchmark.server.server import BenchServer, bench_server
from tests.storage.cloud.range_server import range_server
from tests.support import clouds
from tests.support.clouds import OBJECT_HEADERS, answer_range, open_s3
from tests.support.scripted_server import HttpAnswer, HttpRequest, scripted_server

DATA = bytes(range(256)) * 4 * KiB  # 1 MiB


def open_at(endpoint_url: str) -> CloudStore:
    return open_s3(endpoint_url, "s3://bench/run")


def answer(request: HttpRequest) -> HttpAnswer:
    """Return the bytes that a request asks for."""
    return answer_range(request, DATA)


def is_direct(request: HttpRequest) -> bool:
    return clouds.is_direct(request.path)


def make_reads(*, connect_seconds: float = 5, silence_seconds: float = 5) -> DirectReads:
    return DirectReads("bucket", connect_seconds=connect_seconds, silence_seconds=silence_seconds)


def read_url(
    reads: DirectReads,
    endpoint_url: str,
    buffer: bytearray,
    *,
    start: int = 0,
    seconds: float = 60,
    may_repeat: bool = True,
) -> Outcome:
    url = f"{endpoint_url}/key"
    return reads.read(lambda: url, start, memoryview(buffer), verify=None, seconds=seconds, may_repeat=may_repeat)


def read(store: CloudStore, start: int, stop: int) -> bytes:
    buffer = bytearray(stop - start)
    store.get_into("key", start, memoryview(buffer))
    return bytes(buffer)


@pytest.fixture(params=["http", "tls"], scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[BenchServer]:
    with bench_server(size_bytes=64 * MiB, tls=request.param == "tls") as server:
        yield server


def test_ranges_of_all_sizes(server: BenchServer) -> None:
    """Read ranges around the sizes of buffers, over http and TLS: the bytes are right, with one GET each."""
    store = open_cloud_store(parse_url("s3://bench/run"), server.storage_options)
    store.put("key", [DATA])
    server.reset()
    ranges = [
        (start, start + length)
        for start in (0, 1, 8191, 500_001)
        for length in (1, 2, 8191, 8192, 8193, 16 * KiB - 1, 16 * KiB, 256 * KiB, 256 * KiB + 1, 300_001)
    ]
    for start, stop in ranges:
        assert read(store, start, stop) == DATA[start:stop]
    assert server.counts().requests == len(ranges)


def test_many_threads(server: BenchServer) -> None:
    """Read a thousand ranges by sixteen threads: each gets its own bytes."""
    store = open_cloud_store(parse_url("s3://bench/run"), server.storage_options)
    store.put("key", [DATA])

    def check(number: int) -> None:
        start = number * 997 % 900_000
        stop = start + 1 + number * 131 % 100_000
        assert read(store, start, stop) == DATA[start:stop]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(check, range(1000)))


def test_a_signal_handler_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in a signal handler that interrupts decryption: both reads get their bytes, without a deadlock."""
    with bench_server(size_bytes=16 * MiB, tls=True) as server:
        store = open_cloud_store(parse_url("s3://bench/run"), server.storage_options)
        store.put("key", [DATA])
        read_in_handler: list[bytes] = []
        usual, through = TlsStream._decrypt, [False]

        def interrupted(stream: TlsStream, view: memoryview) -> int | None:
            count = usual(stream, view)
            if count and not through[0]:
                through[0] = True
                signal.raise_signal(signal.SIGUSR1)
            return count

        monkeypatch.setattr(TlsStream, "_decrypt", interrupted)
        before = signal.signal(signal.SIGUSR1, lambda *_: read_in_handler.append(read(store, 7, 300_000)))
        try:
            assert read(store, 0, 500_000) == DATA[:500_000]
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert read_in_handler == [DATA[7:300_000]]


def test_a_certificate_that_is_not_trusted(tmp_path: Path) -> None:
    """Read with the authority's file, with verify=False, and with neither: only the last fails, as in obstore."""
    with bench_server(size_bytes=16 * MiB, tls=True, folder=tmp_path) as server:
        options = server.storage_options
        open_cloud_store(parse_url("s3://bench/run"), options).put("key", [DATA])
        trusting = open_cloud_store(parse_url("s3://bench/run"), {**options, "verify": False})
        assert read(trusting, 10, 20) == DATA[10:20]
        del options["verify"]
        with pytest.raises(StorageError, match="not trusted"):
            read(open_cloud_store(parse_url("s3://bench/run"), options), 10, 20)


def test_one_connection_for_one_thread() -> None:
    """Read ten times: the connection is kept, and reopened when the server closed it without notice."""
    answers = itertools.count(1)
    with range_server(DATA, cut=lambda _: None if next(answers) % 3 else 100) as server:
        store = open_at(server.endpoint_url)
        for start in range(10):
            assert read(store, start, start + 100) == DATA[start : start + 100]
    assert len(server.connections) == 4


@pytest.mark.parametrize("status", [301, 307, 400, 403, 404, 416, 501, 505, 200])
def test_other_answers_are_left_to_obstore(status: int) -> None:
    """Refuse signed URLs with each status: obstore repeats three reads, and later ones are not direct."""

    def answer(request: HttpRequest) -> HttpAnswer:
        if is_direct(request):
            return HttpAnswer(status, DATA[:100], {**OBJECT_HEADERS, "Location": "http://127.0.0.1:1/"})
        return answer_range(request, DATA)

    with scripted_server(answer) as server:
        store = open_at(server.endpoint_url)
        for _ in range(10):
            assert read(store, 0, 100) == DATA[:100]
    assert [is_direct(request) for request in server.requests] == [True, False] * 3 + [False] * 7


def test_direct_reads_are_tried_again_after_a_pause() -> None:
    """Refuse signed URLs for a while: one range is tried a minute later; its success ends the pause."""
    refuses = [True]

    def answer(request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(403, b"", OBJECT_HEADERS) if refuses and is_direct(request) else answer_range(request, DATA)

    with scripted_server(answer) as server:
        store = open_at(server.endpoint_url)
        for _ in range(5):
            read(store, 0, 100)
        for passed_seconds, expected in ((59, [False] * 2), (2, [True, False, False]), (61, [True] * 2)):
            if expected == [True] * 2:
                refuses.clear()
            server.requests.clear()
            store._bucket.direct._failed_seconds -= passed_seconds
            for _ in range(2):
                assert read(store, 0, 100) == DATA[:100]
            assert [is_direct(request) for request in server.requests] == expected


def test_memory_is_released_without_garbage_collection() -> None:
    """Fail a read with Python's garbage collector off, as trainers have it: nothing holds the caller's memory."""
    gc.disable()
    try:
        with scripted_server(lambda _: HttpAnswer(503)) as server:
            reads = make_reads()
            buffer = bytearray(100)
            with pytest.raises(BusyError):
                read_url(reads, server.endpoint_url, buffer)
            buffer.append(1)  # raises BufferError while a view exists
            del reads
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Range": f"bytes 1-100/{len(DATA)}"},
        {"Content-Range": "bytes 0-98/99", "Content-Length": "99"},
        {"Content-Range": f"bytes 0-99/{len(DATA)}", "Content-Encoding": "gzip"},
        {},
    ],
    ids=["another", "shorter", "encoded", "unnamed"],
)
def test_another_range_is_not_accepted(headers: dict[str, str]) -> None:
    """Answer 206 with another range, a shorter one, an encoding, or no range: obstore repeats the read."""

    def answer(request: HttpRequest) -> HttpAnswer:
        if is_direct(request):
            length = int(headers.get("Content-Length", 100))
            return HttpAnswer(206, b"x" * length, {**OBJECT_HEADERS, **headers})
        return answer_range(request, DATA)

    with scripted_server(answer) as server:
        assert read(open_at(server.endpoint_url), 0, 100) == DATA[:100]
    assert [is_direct(request) for request in server.requests] == [True, False]


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_busy_store_is_not_asked_twice(status: int) -> None:
    """Answer a direct read with a busy status: the error is raised at once; the other request is the diagnosis."""

    def answer(request: HttpRequest) -> HttpAnswer:
        return (
            answer_range(request, DATA) if "range" in request.headers and not is_direct(request) else HttpAnswer(status)
        )

    with scripted_server(answer) as server, pytest.raises(TransientStorageError, match=str(status)):
        read(open_at(server.endpoint_url), 0, 100)
    assert sum("range" in request.headers for request in server.requests) == 1


@pytest.mark.parametrize("cut_bytes", [0, 1, 50_000])
def test_a_cut_answer_is_raised(cut_bytes: int) -> None:
    """Cut a body on a kept connection: not taken for a connection closed while idle, obstore asks once more."""

    def answer(request: HttpRequest) -> HttpAnswer:
        whole = answer_range(request, DATA)
        if len(whole.body) == 100:
            return whole
        return HttpAnswer(206, whole.body, whole.headers, cut_bytes=cut_bytes)

    with scripted_server(answer) as server:
        store = open_at(server.endpoint_url)
        read(store, 0, 100)
        with pytest.raises(TransientStorageError):
            read(store, 0, 100_000)
        assert [is_direct(request) for request in server.requests if "range" in request.headers] == [True, True, False]


def test_a_proxy_is_left_to_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a proxy in the environment: no read is direct, except to hosts in no_proxy."""
    with scripted_server(answer) as server:
        monkeypatch.setenv("http_proxy", server.endpoint_url)
        store = open_at("http://storage.invalid")
        assert read(store, 0, 100) == DATA[:100]
        assert not any(is_direct(request) for request in server.requests)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert read(open_at(server.endpoint_url), 0, 100) == DATA[:100]
        assert is_direct(server.requests[-1])


@pytest.mark.parametrize("late", [False, True])
def test_an_unrequested_answer_is_not_accepted(*, late: bool) -> None:
    """Send a second, unrequested answer at once or later: it is not taken for the answer to the next request."""
    unasked = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 4\r\nContent-Range: bytes 4-7/8\r\n\r\nZZZZ"

    def serve(listener: socket.socket) -> None:
        for start in (0, 4):
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                head = (
                    f"HTTP/1.1 206 Partial Content\r\nContent-Length: 4\r\nContent-Range: bytes {start}-{start + 3}/8"
                )
                body = head.encode() + b"\r\n\r\n" + DATA[start : start + 4]
                connection.sendall(body if late else body + unasked)
                if late:
                    asked.wait(30)
                    connection.sendall(unasked)
                    sent.set()
                with suppress(ConnectionError):  # the client closes without reading the second answer
                    connection.recv(1)

    asked, sent = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reads = make_reads()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for start in (0, 4):
            buffer = bytearray(4)
            assert read_url(reads, url, buffer, start=start) == "direct"
            assert buffer == DATA[start : start + 4]
            asked.set()
            assert not late or sent.wait(30)
        del reads
        gc.collect()
        thread.join()


def test_silence_in_an_answer_ends() -> None:
    """Send half of the headers and then nothing: the read ends after the silence limit; at the deadline it raises."""
    for left_seconds in (60.0, 0.0):
        with socket.create_server(("127.0.0.1", 0)) as listener, limit_requests(lambda: left_seconds):  # noqa: B023  # called in this turn of the loop
            reads = make_reads(silence_seconds=0.3)
            thread = threading.Thread(target=_answer_half, args=(listener,))
            thread.start()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            if left_seconds:
                assert read_url(reads, url, bytearray(10)) == "failed"
            else:
                with pytest.raises(TimeoutError, match="silent"):
                    read_url(reads, url, bytearray(10))
            thread.join()


def test_a_late_read_is_repeated() -> None:
    """Let sixteen reads be quick and then one hang: obstore reads the range, and the next read is direct again."""
    hang = threading.Event()

    def answer(request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(silent=True) if hang.is_set() and is_direct(request) else answer_range(request, DATA)

    with scripted_server(answer) as server:
        store = open_at(server.endpoint_url)
        for start in range(SAMPLES_MIN):
            read(store, start, start + 100)
        hang.set()
        assert read(store, 5, 105) == DATA[5:105]
        hang.clear()
        assert read(store, 6, 106) == DATA[6:106]
        assert [is_direct(request) for request in server.requests[SAMPLES_MIN:]] == [True, False, True]


@pytest.mark.parametrize(("may_repeat", "outcome"), [(True, "skipped"), (False, "failed")])
def test_an_overloaded_store_gets_no_second_request(*, may_repeat: bool, outcome: Outcome) -> None:
    """Let a read be late: given up for another one, or, where the store refuses others, only at its time limit."""
    hang = threading.Event()

    def answer(request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(silent=True) if hang.is_set() else answer_range(request, DATA)

    with scripted_server(answer) as server:
        reads, url, buffer = make_reads(), server.endpoint_url, bytearray(100)
        for _ in range(SAMPLES_MIN):
            assert read_url(reads, url, buffer) == "direct"
        hang.set()
        assert read_url(reads, url, buffer, seconds=2, may_repeat=may_repeat) == outcome


def test_connecting_ends_with_the_read() -> None:
    """Connect to an address that never answers: the read ends at its own limit, which is shorter than the connect's.

    The address is a listener whose queue is full.
    """
    reads = make_reads(connect_seconds=1e5, silence_seconds=1e5)
    with socket.socket() as listener, ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert read_url(reads, url, bytearray(10), seconds=0.1) == "failed"


def _answer_half(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 206 Partial Content\r\nContent-")
        connection.recv(1)  # until the client disconnects


def test_a_reread_is_not_direct() -> None:
    """Reread bytes whose digest did not match: obstore reads them once, and the next read is direct again."""
    with scripted_server(answer) as server:
        store = open_at(server.endpoint_url)
        assert read(store, 0, 100) == DATA[:100]
        for _ in range(5):
            buffer = bytearray(100)
            RereadingStore(store).get_into("key", 0, memoryview(buffer))
            assert buffer == DATA[:100]
        assert read(store, 0, 100) == DATA[:100]
    assert [is_direct(request) for request in server.requests] == [True] + [False] * 5 + [True]
