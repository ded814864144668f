"""Jobs whose ranks all begin after one barrier, at a store that refuses what is above its rates; in simulated time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dcp_remote.errors import TransientStorageError
from dcp_remote.storage import limits
from dcp_remote.storage.cloud import throttle
from dcp_remote.storage.cloud.throttle import PROCESSES_MAX, REQUESTS_MAX, SHARE_MIN, Throttle
from dcp_remote.storage.limits import count_processes
from dcp_remote.storage.location import Location, join_job
from dcp_remote.storage.request_context import limit_requests
from dcp_remote.storage.retrying import RANGE_RETRY_SECONDS
from tests.support.storm import Prefixes, Storm

# Ranks of the simulated job; the store's rates are as much smaller than S3's as the job is than one of 10,000 ranks.
RANKS = 500
GETS, PUTS = 5500 * RANKS / 10_000, 3500 * RANKS / 10_000


def restore(prefixes: int, processes: int = 10_000) -> Storm:
    """Read 32 ranges of 8 MiB on each rank."""
    return Storm(RANKS, 32, Prefixes(prefixes, GETS), seconds=0.13, processes=processes).run()


def save(prefixes: int, processes: int = 10_000) -> Storm:
    """Put 30 shards of each rank."""
    return Storm(RANKS, 30, Prefixes(prefixes, PUTS), seconds=0.3, processes=processes).run()


@pytest.mark.parametrize("storm", [restore, save])
def test_a_storm_is_refused_little(storm: Callable[..., Storm]) -> None:
    """Begin at a bucket of one prefix: a tenth of the requests is refused, and sent in one second, at most.

    Compared with ranks that each begin as if they were alone. All is done in about the same time, that of the store.
    """
    before, after = storm(1, processes=1), storm(1)
    assert after.taken == before.taken
    assert before.refused > 5 * before.taken
    assert after.refused < before.refused / 10
    assert after.peak < before.peak / 10
    assert after.now_seconds < 1.15 * before.now_seconds


@pytest.mark.parametrize("size", [300, 1000, 2000])
def test_a_storm_of_fewer_ranks_is_refused_little(size: int) -> None:
    """Begin with a job whose ranks each have several requests in flight: a refused one is not followed at once.

    Compared with ranks that each begin as if they were alone.
    """
    rates = Prefixes(1, 5500 * 100 / size), Prefixes(1, 5500 * 100 / size)
    before, after = (
        Storm(100, 32, rate, seconds=0.13, processes=told).run() for rate, told in zip(rates, (1, size), strict=True)
    )
    assert after.taken == before.taken
    assert after.refused < before.refused / 3
    assert after.peak < before.peak / 3
    assert after.now_seconds < before.now_seconds


def test_no_request_fails_in_a_long_storm() -> None:
    """Read 150 ranges on each rank, for 270 s at least: each waits for less than the time for which it is repeated."""
    after = Storm(RANKS, 150, Prefixes(1, GETS), seconds=0.13, processes=10_000).run()
    assert after.now_seconds > 270
    assert after.longest_seconds < RANGE_RETRY_SECONDS * 2 / 3


def test_a_bucket_of_many_prefixes_is_used() -> None:
    """Begin at a bucket that takes all at once: nothing is refused, and all is done within a few seconds."""
    after = restore(256)
    assert after.refused == 0
    assert after.now_seconds < 6


def test_a_small_job_is_not_slowed_down() -> None:
    """Begin with 64 ranks: all is as if each was alone, also at a store that refuses most requests."""
    for prefixes in (1, 256):
        told, alone = (
            Storm(PROCESSES_MAX, 32, Prefixes(prefixes, 100), seconds=0.1, processes=count).run()
            for count in (PROCESSES_MAX, 1)
        )
        assert (told.offered, told.refused, told.now_seconds) == (alone.offered, alone.refused, alone.now_seconds)
    assert alone.refused == 0


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def test_a_job_begins_gently_again_after_a_time_without_requests() -> None:
    """Let the share of a job of 128 grow to full, then send nothing: the next request finds half of it."""
    clock = Clock()
    one = Throttle(clock, processes=lambda: 128)

    def send(seconds: float) -> None:
        clock.seconds += seconds
        assert one.begin(0)
        one.end(refused=False)

    send(0)
    assert one.share == 0.5
    for _ in range(20):
        send(0.2)
    assert one.share == 1
    send(9)
    assert one.share == 1
    send(11)
    assert one.share == 0.5


def test_no_pause_follows_a_stray_refusal() -> None:
    """Refuse a request of one of 10,000 after many answers: the next one begins at once, but not after two refusals."""
    clock = Clock()
    one = Throttle(clock, uniform=lambda _low, high: high, processes=lambda: 10_000)

    def send(*, refused: bool) -> bool:
        has_begun = one.begin(0)
        if has_begun:
            one.end(refused=refused)
        return has_begun

    for _ in range(60):
        clock.seconds += 1
        send(refused=False)
    assert one.share == 1
    assert all(send(refused=False) for _ in range(REQUESTS_MAX))
    assert send(refused=True)
    assert send(refused=True)
    assert not send(refused=False)


def test_a_pause_follows_the_first_refusal_after_a_time_without_requests() -> None:
    """A thousand ranks begin their next save together, each after many answers to the last one."""
    clock = Clock()
    one = Throttle(clock, uniform=lambda _low, high: high, processes=lambda: 1000)
    for _ in range(60):
        clock.seconds += 1
        assert one.begin(0)
        one.end(refused=False)
    clock.seconds += 60
    assert one.begin(0)
    one.end(refused=True)
    assert not one.begin(0)


@pytest.mark.parametrize("processes", [64_000, 640_000])
def test_less_than_a_request_is_a_pause(processes: int) -> None:
    """Begin as one of very many, at the latest of the random times: after a pause, and after another one."""
    clock = Clock()
    one = Throttle(clock, uniform=lambda _low, high: high, processes=lambda: processes)
    pauses = []
    for _ in range(2):
        began = clock.seconds
        while not one.begin(0):
            clock.seconds += 0.1
            assert clock.seconds < began + 100
        pauses.append(round(clock.seconds - began, 1))
        one.end(refused=True)
    assert pauses == pytest.approx([2 * 0.1 * processes / 64 / 32] * 2, abs=0.2)
    assert one.share >= SHARE_MIN / 32_000


@pytest.mark.parametrize("seconds", [8, 3600])
def test_one_slow_answer_doubles_the_share_at_most(seconds: float) -> None:
    """One of 10,000 has a large shard, whose put takes eight seconds; or it is stopped for an hour meanwhile."""
    clock = Clock()
    one = Throttle(clock, uniform=lambda low, _high: low, processes=lambda: 10_000)
    assert one.begin(0)
    first = one.share
    clock.seconds += seconds
    one.end(refused=False)
    assert one.share == 2 * first
    assert not one.is_overloaded  # a late read may be sent twice


def test_a_pause_ends_with_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the deadline of a request pass while it waits: a transient error, and the next request has its turn."""
    monkeypatch.setattr(throttle, "CHECK_SECONDS", 0.01)
    one = Throttle(uniform=lambda _low, _high: 1e9, processes=lambda: 100_000)
    left = iter([1.0, 1.0])
    with limit_requests(lambda: next(left, 0.0)), pytest.raises(TransientStorageError, match="No time is left"):
        one.send(lambda: None)
    one._resume_seconds = 0.0
    assert one.send(lambda: "answer") == "answer"


def test_a_request_whose_deadline_passed_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a save fail while one of its requests waits, just before its turn."""
    one, left, sent = Throttle(uniform=lambda _low, _high: 1e9, processes=lambda: 100_000), [1.0], list[str]()

    def wait_seconds() -> float:
        left[0] = one._resume_seconds = 0.0
        return 0.01

    monkeypatch.setattr(one, "wait_seconds", wait_seconds)
    with limit_requests(lambda: left[0]), pytest.raises(TransientStorageError, match="No time is left"):
        one.send(lambda: sent.append("request"))
    assert not sent


def test_requests_have_their_turn_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send six requests while none may begin, one after another: they begin in that order, but for one in a hurry."""
    monkeypatch.setattr(throttle, "CHECK_SECONDS", 0.01)
    clock, sent = Clock(), list[int]()
    one = Throttle(clock, uniform=lambda _low, _high: 1.0, processes=lambda: 100_000)
    threads = []

    def send(number: int) -> None:
        with limit_requests(lambda: 50.0 if number == 5 else 100.0):
            one.send(lambda: sent.append(number))

    for number in range(6):
        threads.append(threading.Thread(target=send, args=(number,)))
        threads[-1].start()
        while len(one._waiting) <= number:
            threading.Event().wait(0.001)
    while any(thread.is_alive() for thread in threads):
        clock.seconds += 1.0
        threading.Event().wait(0.005)
    assert sent == [5, 0, 1, 2, 3, 4]


@pytest.fixture
def job() -> Iterator[None]:
    yield
    limits.note_processes(1)


@pytest.mark.usefixtures("job")
def test_stores_know_the_size_of_the_job(tmp_path: Path) -> None:
    """Join a job of 1,000 ranks, as manager, writer and reader do."""
    assert count_processes() == 1
    join_job(Location.of(tmp_path, None), 1000)
    assert count_processes() == 1000
