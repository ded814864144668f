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
from dcp_remote.storage import budget as room
from dcp_remote.storage.budget import REQUESTS_MAX, SHARE_MIN, RequestBudget, Shared, shared_budget
from dcp_remote.storage.cloud import CloudStore, open_cloud_store
from dcp_remote.testing.servers import HttpAnswer, HttpRequest, scripted_server
from dcp_remote.url import parse_url


@dataclass
class Clock:
    seconds: float = 1000.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Host:
    """Processes that share one budget, and send as many requests every tenth of a second as it lets them."""

    processes: int
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        shared = Shared()
        self.budgets = [RequestBudget(shared, clock=self.clock) for _ in range(self.processes)]

    def offer(self, *, seconds: float, taken: Callable[[int], int]) -> tuple[int, int]:
        """Requests that were sent and refused, by a store that takes `taken(sent)` of those sent in a tenth."""
        sent_in_all = refused_in_all = 0
        for _ in range(round(seconds * 10)):
            sent = [max(1, round(budget.share() * REQUESTS_MAX)) for budget in self.budgets]
            refused = sum(sent) - taken(sum(sent))
            sent_in_all += sum(sent)
            refused_in_all += refused
            # Spread evenly, as a balancer does.
            position = 0
            for budget, count in zip(self.budgets, sent, strict=True):
                for _ in range(count):
                    before = position * refused // sum(sent)
                    position += 1
                    budget.note(refused=position * refused // sum(sent) > before)
            self.clock.seconds += 0.1
        return sent_in_all, refused_in_all

    def share(self) -> float:
        return self.budgets[0].share()


@pytest.mark.parametrize("processes", [1, 2, 8, 64])
def test_an_overloaded_store_is_offered_what_it_takes(processes: int) -> None:
    """A store that takes a third of a full share, for a minute: few are refused, and most of what it takes is used."""
    host = Host(processes)
    capacity = processes * REQUESTS_MAX // 3
    host.offer(seconds=5, taken=lambda sent: min(sent, capacity))
    sent, refused = host.offer(seconds=60, taken=lambda sent: min(sent, capacity))
    assert refused < 0.2 * sent
    assert sent - refused > 0.8 * 600 * capacity


def test_it_recovers() -> None:
    """A storm in which nothing passes, and then none: from the smallest share to a full one in half a minute."""
    host = Host(4)
    host.offer(seconds=20, taken=lambda _: 0)
    assert host.share() == SHARE_MIN
    host.offer(seconds=35, taken=lambda sent: sent)
    assert host.share() == 1


def test_a_few_refusals_are_no_overload() -> None:
    """One in twenty is refused whatever is sent: the share stays where it is, but for moments."""
    host = Host(4)
    shares: list[float] = []
    for _ in range(100):
        host.offer(seconds=1, taken=lambda sent: sent - sent // 20)
        shares.append(host.share())
    assert sum(shares) / len(shares) > 0.9


def test_what_is_no_share_counts_as_a_full_one() -> None:
    """Anything in the file, since another program may write there: never less than a request, never more than all."""
    for text in (b"\xff" * 16, b"\x00" * 16, b"\x7f" * 16, b"1", b""):
        shared = Shared()
        shared.write(text)
        budget = RequestBudget(shared)
        assert budget.share() == 1
        for _ in range(100):
            budget.note(refused=True)
        assert SHARE_MIN <= budget.share() <= 1


def test_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the smallest share, threads pass one at a time; and who holds the slot for ever holds up nobody for ever."""
    monkeypatch.setattr(room, "WAIT_SECONDS_MAX", 0.1)
    host = Host(1)
    host.offer(seconds=20, taken=lambda _: 0)
    (budget,) = host.budgets
    monkeypatch.setattr(room, "WAIT_SECONDS_MAX", 60.0)
    running: list[int] = [0]
    most: list[int] = [0]
    lock = threading.Lock()

    def request(_: int) -> None:
        with budget.slot():
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            with lock:
                running[0] -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(request, range(200)))
    assert most[0] == 1
    monkeypatch.setattr(room, "WAIT_SECONDS_MAX", 0.05)
    with budget.slot(), ThreadPoolExecutor(1) as pool:
        pool.submit(request, 0).result(timeout=30)


def test_nobody_waits_for_the_file() -> None:
    """One looks at the share, in a file system that does not answer; the others' requests go on, and are counted."""
    looking, answered = threading.Event(), threading.Event()

    class Slow(Shared):
        def read(self) -> bytes:
            if threading.current_thread() is not threading.main_thread():
                looking.set()
                assert answered.wait(60)
            return super().read()

    clock = Clock()
    budget = RequestBudget(Slow(), clock=clock)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(budget.share)
        assert looking.wait(60)
        for _ in range(3):
            with budget.slot():
                budget.note(refused=False)
        assert not slow.done()
        answered.set()
        assert slow.result() == 1


def test_a_look_that_ends_late_undoes_no_step() -> None:
    """One read the share, and is held up; another lowers it meanwhile."""
    looking, lowered = threading.Event(), threading.Event()

    class Late(Shared):
        def read(self) -> bytes:
            data = super().read()
            if threading.current_thread() is not threading.main_thread():
                looking.set()
                assert lowered.wait(60)
            return data

    clock = Clock()
    budget = RequestBudget(Late(), clock=clock)
    for _ in range(8):
        budget.note(refused=True)
    clock.seconds += 2
    before = budget.share()
    clock.seconds += 2
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(budget.share)
        assert looking.wait(60)
        for _ in range(8):
            budget.note(refused=False)
        after = budget.share()
        lowered.set()
        late.result()
    assert budget.share() == after > before


def test_the_file_is_looked_at_now_and_then() -> None:
    """Not for each request: twice in a tenth of a second, whatever is sent; and what it says then counts."""
    looks: list[None] = []

    class Counting(Shared):
        def read(self) -> bytes:
            looks.append(None)
            return super().read()

    clock = Clock()
    shared = Counting()
    mine, other = RequestBudget(shared, clock=clock), RequestBudget(shared, clock=clock)
    for _ in range(1000):
        with mine.slot():
            mine.note(refused=False)
    assert len(looks) <= 2
    for _ in range(100):
        other.note(refused=True)
    clock.seconds += 0.2
    assert mine.share() == other.share() < 1


def open_at(endpoint_url: str) -> CloudStore:
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    return open_cloud_store(parse_url("s3://bucket/run"), {"endpoint_url": endpoint_url, **keys})


def test_ranks_of_a_host_have_one_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stores as two ranks open them: what one is refused, the other sees; another bucket's store does not."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scripted_server(lambda _: HttpAnswer(503)) as server:
        one, other = open_at(server.endpoint_url), open_at(server.endpoint_url)
        for _ in range(20):
            with pytest.raises(TransientStorageError):
                one.put("key", [b"1"])
        assert other._connections.budget.share() == one._connections.budget.share() < 1
    assert open_at("http://127.0.0.1:1")._connections.budget.share() == 1


def test_an_answer_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing object, asked for often: the store works."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def answer(request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    with scripted_server(answer) as server:
        store = open_at(server.endpoint_url)
        for _ in range(20):
            with pytest.raises(ObjectNotFoundError):
                store.get_into("key", 0, memoryview(bytearray(1)))
        assert store._connections.budget.share() == 1


@pytest.mark.parametrize("obstacle", ["a file", "a link", "open to all"])
def test_a_folder_that_is_not_ours(obstacle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody else may have left in the temporary folder is not used: the budget is the process's own."""
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
    budget = shared_budget("place")
    for _ in range(20):
        budget.note(refused=True)
    assert budget.share() < 1 == shared_budget("place").share()
    assert obstacle == "a file" or not list(folder.iterdir())


def test_a_file_that_is_cut_or_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is in use: nothing is raised, and the process goes on with what it knows."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared_budget("place").share()
    budget = shared_budget("place")
    (file,) = (tmp_path / f"dcp_remote-{os.getuid()}").iterdir()
    file.write_bytes(b"")
    assert budget.share() == 1
    file.unlink()
    file.mkdir()
    for _ in range(20):
        budget.note(refused=True)
    assert budget.share() < 1


@pytest.mark.parametrize("call", ["open", "pread", "pwrite", "close"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOSPC])
def test_a_file_system_that_fails(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every access to the file of the share fails: requests go on by this process's own share; told in one line."""
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
        budget = RequestBudget(shared_budget("place")._shared, clock=clock)
        for _ in range(3):
            for _ in range(20):
                with budget.slot():
                    budget.note(refused=True)
            clock.seconds += 2
        assert budget.share() < 1
    assert [record.name for record in caplog.records] == [room.__name__]


def test_a_folder_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk of the temporary folder is full or read-only: a request is sent, and one line says so."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", fail)
    with caplog.at_level(logging.WARNING), shared_budget("place").slot():
        pass
    assert len(caplog.records) == 1
    assert "TMPDIR" in caplog.text
