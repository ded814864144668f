"""Shares of requests: what an overloaded store refuses, over simulated seconds and over real requests."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dcp_remote.errors import ObjectNotFoundError, TransientStorageError
from dcp_remote.storage.cloud import rate_limit
from dcp_remote.storage.cloud.rate_limit import (
    REQUESTS_MAX,
    SHARE_MIN,
    AdaptiveRequestLimit,
    LocalShare,
    shared_request_limit,
)
from dcp_remote.storage.cloud.store import CloudStore, open_cloud_store
from dcp_remote.storage.url import parse_url
from dcp_remote.testing.servers import HttpAnswer, HttpRequest, scripted_server


@dataclass
class Clock:
    seconds: float = 1000.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Host:
    """Processes that share one limit and send as many requests every tenth of a second as it allows."""

    processes: int
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        shared = LocalShare()
        self.budgets = [AdaptiveRequestLimit(shared, clock=self.clock) for _ in range(self.processes)]

    def offer(self, *, seconds: float, taken: Callable[[int], int]) -> tuple[int, int]:
        """Send to a store that accepts `taken(sent)` per tenth of a second; return how many were sent and refused."""
        sent_in_all = refused_in_all = 0
        for _ in range(round(seconds * 10)):
            sent = [max(1, round(request_limit.share() * REQUESTS_MAX)) for request_limit in self.budgets]
            refused = sum(sent) - taken(sum(sent))
            sent_in_all += sum(sent)
            refused_in_all += refused
            # Spread the refusals evenly, as a load balancer does.
            position = 0
            for request_limit, count in zip(self.budgets, sent, strict=True):
                for _ in range(count):
                    before = position * refused // sum(sent)
                    position += 1
                    request_limit.record_answer(refused=position * refused // sum(sent) > before)
            self.clock.seconds += 0.1
        return sent_in_all, refused_in_all

    def share(self) -> float:
        return self.budgets[0].share()


@pytest.mark.parametrize("processes", [1, 2, 8, 64])
def test_the_rate_adapts_to_the_capacity(processes: int) -> None:
    """Overload a store threefold for a minute: few requests are refused, and most of its capacity is used."""
    host = Host(processes)
    capacity = processes * REQUESTS_MAX // 3
    host.offer(seconds=5, taken=lambda sent: min(sent, capacity))
    sent, refused = host.offer(seconds=60, taken=lambda sent: min(sent, capacity))
    assert refused < 0.2 * sent
    assert sent - refused > 0.8 * 600 * capacity


def test_the_share_recovers() -> None:
    """Refuse everything and then nothing: the share grows from the smallest to full in half a minute."""
    host = Host(4)
    host.offer(seconds=20, taken=lambda _: 0)
    assert host.share() == SHARE_MIN
    host.offer(seconds=35, taken=lambda sent: sent)
    assert host.share() == 1


def test_a_few_refusals_are_no_overload() -> None:
    """Refuse one in twenty, whatever is sent: the share stays close to full."""
    host = Host(4)
    shares: list[float] = []
    for _ in range(100):
        host.offer(seconds=1, taken=lambda sent: sent - sent // 20)
        shares.append(host.share())
    assert sum(shares) / len(shares) > 0.9


def test_an_invalid_share_counts_as_a_full_one() -> None:
    """Write arbitrary bytes to the file: the share stays between one request and all of them."""
    for text in (b"\xff" * 16, b"\x00" * 16, b"\x7f" * 16, b"1", b""):
        shared = LocalShare()
        shared.write(text)
        request_limit = AdaptiveRequestLimit(shared)
        assert request_limit.share() == 1
        for _ in range(100):
            request_limit.record_answer(refused=True)
        assert SHARE_MIN <= request_limit.share() <= 1


def test_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run threads at the smallest share: one at a time; a slot that is never released blocks others only briefly."""
    monkeypatch.setattr(rate_limit, "WAIT_SECONDS_MAX", 0.1)
    host = Host(1)
    host.offer(seconds=20, taken=lambda _: 0)
    (request_limit,) = host.budgets
    monkeypatch.setattr(rate_limit, "WAIT_SECONDS_MAX", 60.0)
    running: list[int] = [0]
    most: list[int] = [0]
    lock = threading.Lock()

    def request(_: int) -> None:
        with request_limit.slot():
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            with lock:
                running[0] -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(request, range(200)))
    assert most[0] == 1
    monkeypatch.setattr(rate_limit, "WAIT_SECONDS_MAX", 0.05)
    with request_limit.slot(), ThreadPoolExecutor(1) as pool:
        pool.submit(request, 0).result(timeout=30)


def test_a_hanging_file_blocks_no_other_request() -> None:
    """Hang one read of the file: requests of other threads go on and are counted."""
    looking, answered = threading.Event(), threading.Event()

    class Slow(LocalShare):
        def read(self) -> bytes:
            if threading.current_thread() is not threading.main_thread():
                looking.set()
                assert answered.wait(60)
            return super().read()

    clock = Clock()
    request_limit = AdaptiveRequestLimit(Slow(), clock=clock)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(request_limit.share)
        assert looking.wait(60)
        for _ in range(3):
            with request_limit.slot():
                request_limit.record_answer(refused=False)
        assert not slow.done()
        answered.set()
        assert slow.result() == 1


def test_a_late_read_of_the_file_undoes_no_change() -> None:
    """Delay one read of the file while another thread changes the share: the change stays."""
    looking, lowered = threading.Event(), threading.Event()

    class Late(LocalShare):
        def read(self) -> bytes:
            data = super().read()
            if threading.current_thread() is not threading.main_thread():
                looking.set()
                assert lowered.wait(60)
            return data

    clock = Clock()
    request_limit = AdaptiveRequestLimit(Late(), clock=clock)
    for _ in range(8):
        request_limit.record_answer(refused=True)
    clock.seconds += 2
    before = request_limit.share()
    clock.seconds += 2
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(request_limit.share)
        assert looking.wait(60)
        for _ in range(8):
            request_limit.record_answer(refused=False)
        after = request_limit.share()
        lowered.set()
        late.result()
    assert request_limit.share() == after > before


def test_the_file_is_read_now_and_then() -> None:
    """Send a thousand requests: the file is read at most twice in a tenth of a second, and its share is used."""
    looks: list[None] = []

    class Counting(LocalShare):
        def read(self) -> bytes:
            looks.append(None)
            return super().read()

    clock = Clock()
    shared = Counting()
    mine, other = AdaptiveRequestLimit(shared, clock=clock), AdaptiveRequestLimit(shared, clock=clock)
    for _ in range(1000):
        with mine.slot():
            mine.record_answer(refused=False)
    assert len(looks) <= 2
    for _ in range(100):
        other.record_answer(refused=True)
    clock.seconds += 0.2
    assert mine.share() == other.share() < 1


def open_at(endpoint_url: str) -> CloudStore:
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    return open_cloud_store(parse_url("s3://bucket/run"), {"endpoint_url": endpoint_url, **keys})


def test_ranks_of_a_host_have_one_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open two stores as two ranks do: a refusal to one reduces the share of both, and not of another bucket."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scripted_server(lambda _: HttpAnswer(503)) as server:
        first, second = open_at(server.endpoint_url), open_at(server.endpoint_url)
        for _ in range(20):
            with pytest.raises(TransientStorageError):
                first.put("key", [b"1"])
        assert second._clients.request_limit.share() == first._clients.request_limit.share() < 1
    assert open_at("http://127.0.0.1:1")._clients.request_limit.share() == 1


def test_an_answer_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for a missing object many times: the share stays full."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def answer(request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    with scripted_server(answer) as server:
        store = open_at(server.endpoint_url)
        for _ in range(20):
            with pytest.raises(ObjectNotFoundError):
                store.get_into("key", 0, memoryview(bytearray(1)))
        assert store._clients.request_limit.share() == 1


@pytest.mark.parametrize("obstacle", ["a file", "a link", "open to all"])
def test_a_folder_of_another_user_is_not_used(obstacle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a file, a link or an open folder in its place: nothing is written there, and the limit is not shared."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"dcp_remote-{os.getuid()}"
    if obstacle == "a file":
        folder.write_text("mine")
    elif obstacle == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    request_limit = shared_request_limit("place")
    for _ in range(20):
        request_limit.record_answer(refused=True)
    assert request_limit.share() < 1 == shared_request_limit("place").share()
    assert obstacle == "a file" or not list(folder.iterdir())


def test_a_file_that_is_truncated_or_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncate and replace the file while it is in use: nothing is raised, and the share is still reduced."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared_request_limit("place").share()
    request_limit = shared_request_limit("place")
    (file,) = (tmp_path / f"dcp_remote-{os.getuid()}").iterdir()
    file.write_bytes(b"")
    assert request_limit.share() == 1
    file.unlink()
    file.mkdir()
    for _ in range(20):
        request_limit.record_answer(refused=True)
    assert request_limit.share() < 1


@pytest.mark.parametrize("call", ["open", "pread", "pwrite", "close"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOSPC])
def test_a_file_system_that_fails(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fail every access to the file: requests use the process's own share, and one line is logged."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    real = getattr(os, call)

    def fail(first: object, *args: object, **options: object) -> object:
        if call == "open" and "requests-" not in str(first):
            return real(first, *args, **options)
        if call == "close":
            real(first)
        raise OSError(number, os.strerror(number))

    clock = Clock()
    with monkeypatch.context() as failing, caplog.at_level(logging.WARNING):
        failing.setattr(os, call, fail)
        request_limit = AdaptiveRequestLimit(shared_request_limit("place")._storage, clock=clock)
        for _ in range(3):
            for _ in range(20):
                with request_limit.slot():
                    request_limit.record_answer(refused=True)
            clock.seconds += 2
        assert request_limit.share() < 1
    assert [record.name for record in caplog.records] == [rate_limit.__name__]


def test_a_folder_that_cannot_be_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fill the disk of the temporary folder: a request is sent, and one line is logged."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", fail)
    with caplog.at_level(logging.WARNING), shared_request_limit("place").slot():
        pass
    assert len(caplog.records) == 1
    assert "TMPDIR" in caplog.text
