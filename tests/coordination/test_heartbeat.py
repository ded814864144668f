"""Heartbeats: silent ranks, and what happens when a store is stopped or gone, or the process ends."""

from __future__ import annotations

import itertools
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.coordination.heartbeat import (
    Heartbeat,
    LivenessMonitor,
    RankStatus,
    SuspendAwareClock,
    heartbeat_interval_seconds,
)
from dcp_remote.coordination.key_value import Client
from tests.support.rank_threads import Clock, CountingStore, host_command, wait_until

# ---- pure


def test_a_clock_that_ignores_suspended_time() -> None:
    """Read the clock every half second, then not for an hour, then again."""
    clock = Clock()
    awake = SuspendAwareClock(3.0, clock)
    for _ in range(10):
        clock.now += 0.5
        awake()
    assert awake() == 5.0
    clock.now += 3600
    assert awake() == 8.0
    clock.now += 0.5
    assert awake() == 8.5


@given(st.integers(0), st.integers(0), st.text(), st.booleans(), st.text())
def test_a_status_is_decoded_as_it_was(count: int, operation: int, what: str, is_inside: bool, note: str) -> None:
    """Encode and decode a status, with any text."""
    status = RankStatus(count, operation, what, is_inside, not is_inside, note)
    assert RankStatus.decode(status.encode()) == status


def test_silence_is_a_value_that_does_not_change() -> None:
    """Watch a rank with a heartbeat, one whose heartbeat stops, one dead before the watching began, and one without."""
    watch = LivenessMonitor(range(4), now=10.0)
    for now in (11.0, 12.0, 13.0, 14.0):
        watch.record(0, RankStatus(int(now)), now)
        watch.record(1, RankStatus(min(int(now), 12)), now)
        watch.record(2, RankStatus(5), now)
    assert [watch.silent_seconds(rank, 14.5) for rank in range(4)] == [0.5, 2.5, 3.5, 4.5]
    assert watch.last(1) == RankStatus(12)
    assert watch.last(3) is None


def test_heartbeats_of_many_ranks_are_rarer() -> None:
    """The server takes at most a thousand heartbeats a second."""
    assert [heartbeat_interval_seconds(world_size) for world_size in (1, 1000, 10_000)] == [1.0, 1.0, 10.0]


# ---- stores


class Host:
    """Process that hosts a TCPStore."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(host_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self._port = int(self.process.stdout.readline())

    def client(self, name: str) -> dist.Store:
        store = dist.TCPStore("127.0.0.1", self._port, is_master=False, wait_for_workers=False)
        return dist.PrefixStore(name, store)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """Start one host for the tests of this file, the last of which kills it."""
    host = Host()
    try:
        yield host
    finally:
        host.kill()


# ---- heartbeats


@contextmanager
def heartbeats(world_size: int, store: dist.Store | None = None, **terms: float) -> Iterator[list[Heartbeat]]:
    store = dist.HashStore() if store is None else store
    started = [Heartbeat(store, rank, beat_seconds=0.02, **terms).start() for rank in range(world_size)]  # type: ignore[arg-type]
    try:
        yield started
    finally:
        for heartbeat in started:
            heartbeat.close()


def note_of(watching: Heartbeat, rank: int) -> str | None:
    status = watching.last(rank)
    return status.note if status is not None else None


def test_a_watching_rank_sees_the_status_of_another() -> None:
    """The operation is published at once, notes with the next heartbeat on one line each, the end as the last."""
    with heartbeats(2) as (one, other):
        one.enter(1, "watching", [1])
        other.enter(4, "a save", [])
        wait_until(lambda: note_of(one, 1) == "a save")
        status = one.last(1)
        assert status is not None
        assert (status.operation, status.is_inside, status.is_closed, status.what) == (4, True, False, "a save")
        other.set_activity("uploading,\n 1 of 2 " + 300 * "x")
        wait_until(lambda: (note_of(one, 1) or "").startswith("uploading, 1 of 2 xxx"))
        assert len(note_of(one, 1) or "") < 200
        other.leave("done")
        wait_until(lambda: note_of(one, 1) == "done")
        other.close()
        wait_until(lambda: note_of(one, 1) == "closed")
        status = one.last(1)
        assert status is not None
        assert status.is_closed


def test_a_heartbeat_costs_two_operations() -> None:
    """Count what a rank asks of the store in ten heartbeats, in an operation and after it; a hook asks nothing."""
    store = CountingStore(dist.HashStore())
    Client(store.store).put("beat/0", RankStatus(1).encode())
    counts: list[int] = []
    one = Heartbeat(store, 3, beat_seconds=0.02)  # type: ignore[arg-type]
    one.hooks.append(lambda _client: counts.append(store.operations))
    one.start()
    try:
        one.enter(1, "a save", [0])
        wait_until(lambda: len(counts) > 12)
        assert counts[11] - counts[1] == 20
        one.leave("done")
        seen = len(counts)
        wait_until(lambda: len(counts) > seen + 12)
        assert counts[seen + 11] - counts[seen + 1] == 20
    finally:
        one.close()


def test_all_ranks_hear_what_the_coordinator_announces() -> None:
    """Announce a number, and another: each is in the status of the coordinator, which ranks read in no operation."""
    with heartbeats(3) as (coordinator, *others):
        assert [one.announced("verdict") for one in others] == [0, 0]
        coordinator.announce("verdict", 1)
        wait_until(lambda: [one.announced("verdict") for one in others] == [1, 1])
        coordinator.announce("verdict", 7)
        wait_until(lambda: [one.announced("verdict") for one in others] == [7, 7])


def test_ranks_are_asked_by_the_coordinator_and_the_coordinator_by_any() -> None:
    """Ask, and take the question back."""
    store = dist.HashStore()
    client = Client(store)
    with heartbeats(3, store) as (coordinator, one, other):
        one.ask_positions(client)
        wait_until(lambda: coordinator.is_asked)
        assert not other.is_asked
        coordinator.stop_asking(client)
        wait_until(lambda: not coordinator.is_asked)
        coordinator.ask_positions(client)
        wait_until(lambda: one.is_asked and other.is_asked)
        coordinator.stop_asking(client)
        wait_until(lambda: not (coordinator.is_asked or one.is_asked or other.is_asked))


def test_no_rank_is_watched_between_operations() -> None:
    """Ten thousand ranks that are training read nothing."""
    with heartbeats(2) as (one, _):
        one.enter(1, "a save", [1])
        wait_until(lambda: one.last(1) is not None)
        one.leave("done")
        assert one.last(1) is None
        assert one.silent_ranks(0.0) == {}


def test_a_rank_whose_heartbeat_stops_is_silent_and_one_without_is_not() -> None:
    """Rank 1 has a heartbeat, rank 2 is closed, rank 3 never had one."""
    with heartbeats(3) as (one, _, other):
        one.enter(1, "a save", [1, 2, 3])
        wait_until(lambda: one.last(2) is not None)
        other.close()
        wait_until(lambda: one.silent_ranks(0.5))
        silent = one.silent_ranks(0.5)
        assert list(silent) == [2]
        assert silent[2] >= 0.5


def test_thousands_of_ranks() -> None:
    """Read three thousand statuses in slices, and look for the one that is missing in turn."""
    store = dist.HashStore()
    client = Client(store)
    for rank in range(1, 3001):
        if rank != 77:
            client.put(f"beat/{rank}", RankStatus(1, note=str(rank)).encode())
    with heartbeats(1, store) as (one,):
        one.enter(1, "a save", range(1, 3001))
        wait_until(lambda: sum(one.last(rank) is not None for rank in range(1, 3001)) == 2999)
        assert one.last(77) is None
        assert note_of(one, 3000) == "3000"


def test_a_watcher_that_was_suspended_finds_no_silent_rank() -> None:
    """The watching thread stands still for an hour, while another rank's heartbeat goes on."""
    clock = Clock()
    store = dist.HashStore()
    go_on, stands = threading.Event(), threading.Event()
    heard: list[dict[int, float]] = []
    counts = itertools.count(1)
    client = Client(store)

    def beat(_client: Client) -> None:
        client.put("beat/1", RankStatus(next(counts)).encode())

    def stand(_client: Client) -> None:
        if stands.is_set():
            heard.append(one.silent_ranks(60.0))
        elif one.last(1) is not None:
            stands.set()
            go_on.wait(30)

    one = Heartbeat(store, 0, beat_seconds=0.02, clock=clock).start()
    try:
        one.hooks.append(stand)
        client.put("beat/1", RankStatus(0).encode())
        one.enter(1, "a save", [1])
        assert stands.wait(30)
        clock.now += 3600
        go_on.set()
        wait_until(lambda: heard)
        assert heard[0] == {}
        one.hooks.append(beat)
    finally:
        one.close()


def test_a_hook_that_fails_is_logged_once_and_the_heartbeat_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """A hook raises the same error each time, then another; the hook after it is called each time."""
    text, calls = ["no"], itertools.count()
    count = 0

    def fail(_client: Client) -> None:
        raise ValueError(text[0])

    def go_on(_client: Client) -> None:
        nonlocal count
        count = next(calls)

    with caplog.at_level(logging.ERROR), heartbeats(1) as (one,):
        one.hooks.append(fail)
        one.hooks.append(go_on)
        wait_until(lambda: count > 5)
        text[0] = "never"
        before = count
        wait_until(lambda: count > before + 5)
        assert one.gone is None
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["no", "never"]


def test_queued_actions_are_done_in_order_before_the_last_heartbeat() -> None:
    """A rank that reads that another has left finds what that one told before."""
    told: list[int] = []
    with heartbeats(1) as (one,):
        for number in range(50):
            one.enqueue(lambda _client, number=number: told.append(number))  # type: ignore[misc]
        one.close()
    assert told == list(range(50))


def test_what_is_queued_is_told_once_the_store_is_known() -> None:
    """Close before the store of the ranks is known: the heartbeat waits for it only if it has news."""
    opened: list[dist.Store] = []
    told: list[int] = []
    quiet = Heartbeat(lambda: None, 0, beat_seconds=0.02).start()
    quiet.enqueue(lambda _client: None)
    quiet.close()
    assert quiet._thread is not None
    assert not quiet._thread.is_alive()
    looks: list[int] = []

    def open_store() -> dist.Store | None:
        looks.append(1)
        return opened[0] if opened else None

    one = Heartbeat(open_store, 0, beat_seconds=0.02).start()
    one.enqueue(lambda _client: told.append(1))
    closing = threading.Thread(target=one.close, kwargs={"has_news": True})
    closing.start()
    wait_until(lambda: one._is_closing)
    seen = len(looks)
    wait_until(lambda: len(looks) >= seen + 3)
    opened.append(dist.HashStore())
    closing.join(30)
    assert told == [1]
    assert RankStatus.decode(Client(opened[0]).get("beat/0")).is_closed


def test_a_store_that_never_comes_does_not_hold_up_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_remote.coordination.heartbeat._CLOSE_SECONDS", 0.2)
    one = Heartbeat(lambda: None, 0, beat_seconds=0.02).start()
    one.enqueue(lambda _client: None)
    one.close(has_news=True)
    assert one._thread is not None
    one._thread.join(30)
    assert not one._thread.is_alive()


def test_closing_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """`farewell` is called until it returns True, or the time is over."""
    monkeypatch.setattr("dcp_remote.coordination.heartbeat._CLOSE_SECONDS", 0.3)
    asked = itertools.count(1)
    patient = Heartbeat(dist.HashStore(), 0, beat_seconds=0.02, farewell=lambda _client: next(asked) >= 3).start()
    patient.close()
    assert next(asked) == 4
    store = dist.HashStore()
    Heartbeat(store, 0, beat_seconds=0.02, farewell=lambda _client: False).start().close()
    assert RankStatus.decode(Client(store).get("beat/0")).is_closed


def test_closing_takes_no_longer_than_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block in `farewell`: `close` returns after the limit, and not after twice the limit."""
    monkeypatch.setattr("dcp_remote.coordination.heartbeat._CLOSE_SECONDS", 1.5)
    go_on = threading.Event()
    heartbeat = Heartbeat(dist.HashStore(), 0, beat_seconds=0.02, farewell=lambda _client: go_on.wait(30)).start()
    wait_until(lambda: heartbeat.contact_seconds() < 0.5)
    began_seconds = time.monotonic()
    heartbeat.close()
    assert time.monotonic() - began_seconds < 2.5
    go_on.set()


def test_the_last_heartbeat_comes_within_the_time_to_close() -> None:
    """Close with half a second while `farewell` never returns True: the last heartbeat is in the store after that."""
    store = dist.HashStore()
    heartbeat = Heartbeat(store, 0, beat_seconds=0.02, farewell=lambda _client: False).start()
    wait_until(lambda: heartbeat.contact_seconds() < 0.5)
    heartbeat.close(0.5)
    assert RankStatus.decode(Client(store).get("beat/0")).is_closed


# ---- hosts that are stopped, or gone


def test_a_host_that_is_stopped_is_seen_without_touching_the_store(host: Host) -> None:
    """Another thread counts the seconds without contact while the heartbeat is stuck, until the host goes on."""
    store = host.client("stopped")
    with heartbeats(1, store) as (one,):
        wait_until(lambda: store.check(["beat/0"]))
        with host.stopped():
            wait_until(lambda: one.contact_seconds() > 1.0)
            assert one.gone is None
        wait_until(lambda: one.contact_seconds() < 0.5)


def test_a_stuck_heartbeat_can_be_closed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` ends the connection, and with it the helper thread that waits for the host."""
    monkeypatch.setattr("dcp_remote.coordination.heartbeat._CLOSE_SECONDS", 0.3)
    store = host.client("stuck")
    threads = set(threading.enumerate())  # helper threads of other tests among them
    one = Heartbeat(store, 0, beat_seconds=0.02).start()
    wait_until(lambda: store.check(["beat/0"]))
    with host.stopped():
        wait_until(lambda: one.contact_seconds() > 0.5)
        one.close()
        wait_until(lambda: "dcp_remote-store_0" not in {new.name for new in set(threading.enumerate()) - threads})
        thread = one._thread
        assert thread is not None
        thread.join(30)
        assert not thread.is_alive()


def test_a_host_that_is_gone_ends_the_thread(host: Host) -> None:
    """`gone` is the error of another try to connect, which only a heartbeat that was answered makes."""
    store = host.client("gone")
    with heartbeats(1, store) as (one,):
        wait_until(lambda: one._answered_count)
        host.kill()
        wait_until(lambda: one.gone)
        assert isinstance(one.gone, ConnectionRefusedError)
        with pytest.raises(dist.DistNetworkError, match="refused"):
            one.client()
        thread = one._thread
        assert thread is not None
        thread.join(30)
        assert not thread.is_alive()


def test_a_process_that_never_closed_ends_quietly() -> None:
    """An interpreter with heartbeats of every kind ends with status 0, nothing on stderr, and no wait for a thread.

    One heartbeat runs in the store of a group that was destroyed, one is in the middle of many store operations, one
    was closed, and one is stuck.
    """
    code = """
import time
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from dcp_remote.coordination import heartbeat
heartbeat._CLOSE_SECONDS = 0.5
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
del store
store = _get_default_store()
one, busy, stuck, closed = (
    heartbeat.Heartbeat(dist.PrefixStore(name, store), 0, beat_seconds=0.001).start()
    for name in ("one", "busy", "stuck", "closed")
)
busy.enter(1, "a save", range(1000))
stuck.hooks.append(lambda client: time.sleep(1e6))
closed.close()
del store
time.sleep(0.2)
dist.destroy_process_group()
time.sleep(0.1)
assert one.gone is None
raise SystemExit(0)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
