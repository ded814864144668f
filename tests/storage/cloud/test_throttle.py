"""Shares of requests: what an overloaded store refuses, over simulated seconds and over real requests."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise, repeat

import pytest

from dcp_remote.errors import ObjectNotFoundError, TransientStorageError
from dcp_remote.storage.cloud import throttle
from dcp_remote.storage.cloud.throttle import REQUESTS_MAX, SHARE_MIN, Throttle
from tests.support.clouds import always, open_s3
from tests.support.scripted_server import HttpAnswer, scripted_server
from tests.support.threads import opened


@dataclass
class Clock:
    seconds: float = 1000.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Host:
    """Processes that each send as many requests every tenth of a second as their own limit allows."""

    processes: int
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.throttles = [Throttle(self.clock) for _ in range(self.processes)]

    def offer(self, *, seconds: float, taken: Callable[[int], int]) -> tuple[int, int]:
        """Send to a store that accepts `taken(sent)` per tenth of a second; return how many were sent and refused."""
        sent_in_all = refused_in_all = 0
        for _ in range(round(seconds * 10)):
            sent = [limit_of(one) for one in self.throttles]
            refused = sum(sent) - taken(sum(sent))
            sent_in_all += sum(sent)
            refused_in_all += refused
            # Spread the refusals evenly, as a load balancer does.
            numbers = range(1, sum(sent) + 1)
            answers = iter([n * refused // sum(sent) > (n - 1) * refused // sum(sent) for n in numbers])
            for one, count in zip(self.throttles, sent, strict=True):
                send_together(one, count, answers)
            self.clock.seconds += 0.1
        return sent_in_all, refused_in_all

    def share(self) -> float:
        return self.throttles[0].share


def limit_of(one: Throttle) -> int:
    return math.ceil(one.share * REQUESTS_MAX)


def send_together(one: Throttle, count: int, answers: Iterator[bool]) -> None:
    """Have so many requests in flight, one within the other; the last is answered first. An answer tells of refusal."""
    if not count:
        return

    def request() -> None:
        send_together(one, count - 1, answers)
        if next(answers):
            raise ConnectionResetError

    with suppress(ConnectionResetError):
        one.send(request)


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
    """Refuse everything and then nothing: the share grows from the smallest to full in 40 s, by a tenth a second."""
    host = Host(4)
    host.offer(seconds=20, taken=lambda _: 0)
    assert host.share() == SHARE_MIN
    limits = [limit_of(host.throttles[0])]
    for _ in range(45):
        host.offer(seconds=1, taken=lambda sent: sent)
        limits.append(limit_of(host.throttles[0]))
    assert host.share() == 1
    assert all(after <= 1.1 * before + 1 for before, after in pairwise(limits)), limits


def test_the_share_recovers_sooner_after_a_time_without_requests() -> None:
    """Refuse everything before a time without requests, and nothing after it: the share doubles each second."""
    host = Host(4)
    host.offer(seconds=20, taken=lambda _: 0)
    host.clock.seconds += 60
    host.offer(seconds=7, taken=lambda sent: sent)
    assert host.share() == 1


@pytest.mark.parametrize(("in_flight", "capacity"), [(32, 4), (32, 16), (32, 24), (16, 4), (16, 8)])
def test_one_step_reaches_the_capacity(in_flight: int, capacity: int) -> None:
    """Send more than a store takes at a time, for an interval: the limit is then what the store takes."""
    clock, refused = Clock(), in_flight - capacity
    one = Throttle(clock)
    send_together(one, 10, repeat(False))

    def answers() -> Iterator[bool]:
        for number in range(in_flight):
            clock.seconds += number == in_flight - 1
            yield number < refused

    send_together(one, in_flight, answers())
    assert limit_of(one) == capacity


def test_requests_under_way_are_not_refused() -> None:
    """Let the first eight answers be refusals, which come soonest: 24 of 32 requests are still under way."""
    one = Throttle(Clock())
    send_together(one, 32, iter([True] * 8 + [False] * 24))
    assert limit_of(one) == 24


def test_a_few_refusals_are_no_overload() -> None:
    """Refuse one in twenty, whatever is sent: the share stays close to full."""
    host = Host(4)
    shares: list[float] = []
    for _ in range(100):
        host.offer(seconds=1, taken=lambda sent: sent - sent // 20)
        shares.append(host.share())
    assert sum(shares) / len(shares) > 0.9


def test_one_refusal_is_no_overload() -> None:
    """Refuse the first of requests that are sent one after another: those that are sent together later are as many."""
    clock = Clock()
    one = Throttle(clock)
    for number in range(20):
        send_together(one, 1, iter([number == 0]))
        clock.seconds += 0.2
    assert one.share == 1
    assert not one.is_overloaded


def test_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run threads at the smallest share: one at a time; a slot that is never released blocks others only briefly."""
    monkeypatch.setattr(throttle, "WAIT_SECONDS_MAX", 0.1)
    host = Host(1)
    host.offer(seconds=20, taken=lambda _: 0)
    (one,) = host.throttles
    monkeypatch.setattr(throttle, "WAIT_SECONDS_MAX", 60.0)
    running: list[int] = [0]
    most: list[int] = [0]
    lock = threading.Lock()

    def request() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        with lock:
            running[0] -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: one.send(request), range(200)))
    assert most[0] == 1
    monkeypatch.setattr(throttle, "WAIT_SECONDS_MAX", 0.05)
    with ThreadPoolExecutor(1) as pool:
        one.send(lambda: pool.submit(one.send, request).result(timeout=30))


def test_stores_of_a_bucket_have_one_share() -> None:
    """Refuse requests of a store's child: the share of the store is reduced, and not that of another bucket."""
    with scripted_server(lambda _: HttpAnswer(503)) as server:
        store = open_s3(server.endpoint_url)
        for _ in range(20):
            with pytest.raises(TransientStorageError):
                store.child("below").put("key", [b"1"])
        assert store._bucket.throttle.share < 1
        assert open_s3(server.endpoint_url)._bucket.throttle.share == 1


def test_an_answer_is_no_refusal() -> None:
    """Ask for a missing object many times: the share stays full."""
    with scripted_server(always(404, "NoSuchKey")) as server:
        store = open_s3(server.endpoint_url)
        for _ in range(20):
            with pytest.raises(ObjectNotFoundError):
                store.get_into("key", 0, memoryview(bytearray(1)))
        assert store._bucket.throttle.share == 1


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_store_that_refuses_nothing_gets_more(is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count requests that are under way together: 32 at a full share, and fewer once some were refused."""
    monkeypatch.setattr(throttle, "WAIT_SECONDS_MAX", 60.0)
    host = Host(1)
    if is_refused:
        host.offer(seconds=3, taken=lambda sent: sent - sent // 4)
    (one,) = host.throttles
    at_most = limit_of(one)
    assert at_most < REQUESTS_MAX if is_refused else at_most == 32
    running: list[int] = []
    enough, gate = threading.Event(), threading.Event()

    def request() -> None:
        running.append(1)
        if len(running) == at_most:
            enough.set()
        opened(gate)

    with ThreadPoolExecutor(40) as pool:
        sent = [pool.submit(one.send, request) for _ in range(40)]
        opened(enough)
        assert len(running) == at_most
        gate.set()
    for future in sent:
        future.result()
