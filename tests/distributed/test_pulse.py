"""Heartbeats: who is silent, and what becomes of them when a store is stopped, goes away, or the process ends."""

from __future__ import annotations

import itertools
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.key_value import Client
from dcp_remote.pulse import Awake, Beat, Pulse, Watch, beat_seconds_of
from tests.distributed.parties import Clock, host_command, wait_until

# ---- pure


def test_a_clock_that_stands_still_while_nobody_reads_it() -> None:
    """Read every half second, then not for an hour, then again."""
    clock = Clock()
    awake = Awake(3.0, clock)
    for _ in range(10):
        clock.now += 0.5
        awake()
    assert awake() == 5.0
    clock.now += 3600
    assert awake() == 8.0
    clock.now += 0.5
    assert awake() == 8.5


@given(st.integers(0), st.integers(0), st.text(), st.booleans(), st.text())
def test_a_beat_comes_back_as_it_was(count: int, joint: int, what: str, inside: bool, note: str) -> None:
    """Notes of any text."""
    beat = Beat(count, joint, what, inside, not inside, note)
    assert Beat.decode(beat.encode()) == beat


def test_silence_is_a_value_that_does_not_change() -> None:
    """One that beats, one that stops beating, one that was dead before the watching began, one never heard of."""
    watch = Watch(range(4), now=10.0)
    for now in (11.0, 12.0, 13.0, 14.0):
        watch.see(0, Beat(int(now)), now)
        watch.see(1, Beat(min(int(now), 12)), now)
        watch.see(2, Beat(5), now)
    assert [watch.silent_seconds(rank, 14.5) for rank in range(4)] == [0.5, 2.5, 3.5, 4.5]
    assert watch.last(1) == Beat(12)
    assert watch.last(3) is None


def test_beats_of_many_ranks_are_rarer() -> None:
    """The server has a thousand ranks' beats a second to take, at most."""
    assert [beat_seconds_of(world_size) for world_size in (1, 1000, 10_000)] == [1.0, 1.0, 10.0]


# ---- stores


class Host:
    """A process that hosts a TCPStore."""

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
    """For the tests of this file, the last of which kills it."""
    host = Host()
    try:
        yield host
    finally:
        host.kill()


# ---- pulses


@contextmanager
def pulses(world_size: int, store: dist.Store | None = None, **terms: float) -> Iterator[list[Pulse]]:
    store = dist.HashStore() if store is None else store
    made = [Pulse(store, rank, beat_seconds=0.02, **terms).start() for rank in range(world_size)]  # type: ignore[arg-type]
    try:
        yield made
    finally:
        for pulse in made:
            pulse.close()


def note_of(watching: Pulse, rank: int) -> str | None:
    beat = watching.last(rank)
    return beat.note if beat is not None else None


def test_what_a_rank_does_is_seen_by_the_one_that_watches() -> None:
    """Its joint at once, its notes with a beat, one line each; its last is that it has closed."""
    with pulses(2) as (one, other):
        one.enter(1, "watching", [1])
        other.enter(4, "a save", [])
        wait_until(lambda: note_of(one, 1) == "a save")
        beat = one.last(1)
        assert beat is not None
        assert (beat.joint, beat.inside, beat.closed, beat.what) == (4, True, False, "a save")
        other.note("uploading,\n 1 of 2 " + 300 * "x")
        wait_until(lambda: (note_of(one, 1) or "").startswith("uploading, 1 of 2 xxx"))
        assert len(note_of(one, 1) or "") < 200
        other.leave("done")
        wait_until(lambda: note_of(one, 1) == "done")
        other.close()
        wait_until(lambda: note_of(one, 1) == "closed")
        beat = one.last(1)
        assert beat is not None
        assert beat.closed


def test_nobody_is_watched_between_joints() -> None:
    """Ten thousand ranks that are training read nothing."""
    with pulses(2) as (one, _):
        one.enter(1, "a save", [1])
        wait_until(lambda: one.last(1) is not None)
        one.leave("done")
        assert one.last(1) is None
        assert one.silent(0.0) == {}


def test_a_rank_that_stops_beating_is_silent_and_one_never_heard_of_is_not() -> None:
    """Rank 1 beats, rank 2 is closed, rank 3 never was."""
    with pulses(3) as (one, _, other):
        one.enter(1, "a save", [1, 2, 3])
        wait_until(lambda: one.last(2) is not None)
        other.close()
        wait_until(lambda: one.silent(0.5))
        silent = one.silent(0.5)
        assert list(silent) == [2]
        assert silent[2] >= 0.5


def test_thousands_of_ranks() -> None:
    """Three thousand beats in the store, and one that is missing: read in slices, the unheard ones in turn."""
    store = dist.HashStore()
    client = Client(store)
    for rank in range(1, 3001):
        if rank != 77:
            client.put(f"beat/{rank}", Beat(1, note=str(rank)).encode())
    with pulses(1, store) as (one,):
        one.enter(1, "a save", range(1, 3001))
        wait_until(lambda: sum(one.last(rank) is not None for rank in range(1, 3001)) == 2999)
        assert one.last(77) is None
        assert note_of(one, 3000) == "3000"


def test_a_watcher_that_was_asleep_blames_nobody() -> None:
    """Its thread stands still for longer than its patience, while the other goes on beating, and one has stopped."""
    clock = Clock()
    store = dist.HashStore()
    go_on, stands = threading.Event(), threading.Event()
    heard: list[dict[int, float]] = []
    counts = itertools.count(1)
    client = Client(store)

    def beat(_client: Client) -> None:
        client.put("beat/1", Beat(next(counts)).encode())

    def stand(_client: Client) -> None:
        if stands.is_set():
            heard.append(one.silent(60.0))
        elif one.last(1) is not None:
            stands.set()
            go_on.wait(30)

    one = Pulse(store, 0, beat_seconds=0.02, clock=clock).start()
    try:
        one.add_hook(stand)
        client.put("beat/1", Beat(0).encode())
        one.enter(1, "a save", [1])
        assert stands.wait(30)
        clock.now += 3600
        go_on.set()
        wait_until(lambda: heard)
        assert heard[0] == {}
        one.add_hook(beat)
    finally:
        one.close()


def test_a_hook_that_fails_is_logged_once_and_the_heart_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """The same error each beat, then another; the hook after it is called each time."""
    text, calls = ["no"], itertools.count()
    count = 0

    def fail(_client: Client) -> None:
        raise ValueError(text[0])

    def go_on(_client: Client) -> None:
        nonlocal count
        count = next(calls)

    with caplog.at_level(logging.ERROR), pulses(1) as (one,):
        one.add_hook(fail)
        one.add_hook(go_on)
        wait_until(lambda: count > 5)
        text[0] = "never"
        before = count
        wait_until(lambda: count > before + 5)
        assert one.gone is None
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["no", "never"]


def test_what_is_told_is_told_in_order_and_before_the_beat_that_follows() -> None:
    """Who reads that a rank has left finds what it told before."""
    told: list[int] = []
    with pulses(1) as (one,):
        for number in range(50):
            one.tell(lambda _client, number=number: told.append(number))  # type: ignore[misc]
        one.close()
    assert told == list(range(50))


def test_goodbyes_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The farewell is asked until it says yes; one that never does is left after a while."""
    monkeypatch.setattr("dcp_remote.pulse._CLOSE_SECONDS", 0.3)
    asked = itertools.count(1)
    patient = Pulse(dist.HashStore(), 0, beat_seconds=0.02, farewell=lambda _client: next(asked) >= 3).start()
    patient.close()
    assert next(asked) == 4
    store = dist.HashStore()
    Pulse(store, 0, beat_seconds=0.02, farewell=lambda _client: False).start().close()
    assert Beat.decode(Client(store).get("beat/0")).closed


# ---- hosts that are stopped, or gone


def test_a_host_that_is_stopped_is_seen_without_touching_the_store(host: Host) -> None:
    """Contact is counted from another thread while the pulse is stuck; when the host goes on, so does it."""
    store = host.client("stopped")
    with pulses(1, store) as (one,):
        wait_until(lambda: store.check(["beat/0"]))
        with host.stopped():
            wait_until(lambda: one.contact_seconds() > 1.0)
            assert one.gone is None
        wait_until(lambda: one.contact_seconds() < 0.5)


def test_a_pulse_that_is_stuck_can_be_closed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread is left behind."""
    monkeypatch.setattr("dcp_remote.pulse._CLOSE_SECONDS", 0.3)
    store = host.client("stuck")
    one = Pulse(store, 0, beat_seconds=0.02).start()
    wait_until(lambda: store.check(["beat/0"]))
    with host.stopped():
        wait_until(lambda: one.contact_seconds() > 0.5)
        one.close()
        assert one._thread is not None
        thread = one._thread
        assert thread is not None
        assert thread.is_alive()
    thread.join(30)
    assert not thread.is_alive()


def test_a_host_that_is_gone_ends_the_thread(host: Host) -> None:
    """And it says why."""
    store = host.client("gone")
    with pulses(1, store) as (one,):
        wait_until(lambda: store.check(["beat/0"]))
        host.kill()
        wait_until(lambda: one.gone)
        assert isinstance(one.gone, dist.DistNetworkError)
        assert one._thread is not None
        thread = one._thread
        assert thread is not None
        thread.join(30)
        assert not thread.is_alive()


def test_a_process_that_never_closed_ends_without_a_word() -> None:
    """An interpreter of its own, with pulses of every kind: status 0, nothing on stderr, no wait for a thread.

    One beats in the store of a group that was destroyed, one is in the midst of many operations, one was closed, and
    one is stuck.
    """
    code = """
import time
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from dcp_remote import pulse
pulse._CLOSE_SECONDS = 0.5
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
del store
store = _get_default_store()
one, busy, stuck, closed = (
    pulse.Pulse(dist.PrefixStore(name, store), 0, beat_seconds=0.001).start()
    for name in ("one", "busy", "stuck", "closed")
)
busy.enter(1, "a save", range(1000))
stuck.add_hook(lambda client: time.sleep(1e6))
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
