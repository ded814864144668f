"""Heartbeats of ranks of one host, of which one speaks for all: processes that are killed, stopped, or closed."""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, ClassVar, TypeVar

import pytest
import torch.distributed as dist

from dcp_remote.coordination import heartbeat as beats
from dcp_remote.coordination.heartbeat import Heartbeat, RankStatus, heartbeat_interval_seconds
from dcp_remote.coordination.host_link import HostLink, News
from dcp_remote.coordination.key_value import Client
from tests.support.rank_pool import start_process
from tests.support.rank_threads import Clock, CountingStore, wait_until

T = TypeVar("T")

needs_links = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")


class Rank:
    """Rank with a heartbeat and a link, for a process that calls its methods."""

    def __init__(self, port: int, name: str, rank: int) -> None:
        self._store = CountingStore(dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
        self._looks: list[bytes] = []
        self.heartbeat = Heartbeat(self._store, rank, beat_seconds=0.05, link=lambda: self.link)  # type: ignore[arg-type]
        self.link = HostLink(name, rank, self.heartbeat.request, lambda _: iter(()), self.heartbeat.wake)
        self.heartbeat.start()

    def operations(self) -> int:
        return self._store.operations

    def spoken_for(self) -> list[int]:
        """Return the other ranks for which this one speaks."""
        return sorted(self.link.statuses)

    def speaker(self) -> int:
        return self.heartbeat._told.speaker

    def enter(self, operation: int, silence_seconds: float = math.inf) -> None:
        self.heartbeat.enter(operation, f"operation {operation}", [0], silence_seconds=silence_seconds)

    def announced(self, name: str) -> int:
        return self.heartbeat.announced(name)

    def last_count(self) -> int:
        """Return the number of the coordinator's heartbeat that this rank has heard last in its operation."""
        status = self.heartbeat.last(0)
        return 0 if status is None else status.count

    def tell(self, key: str) -> None:
        """Put a key with the next heartbeat."""
        self.heartbeat.enqueue(lambda client: client.put(key, b"told"))

    def look_for(self, key: str) -> None:
        """Look for a key with each heartbeat."""
        self.heartbeat.hooks.append(lambda client: self._looks.append(self.heartbeat.find(client, key)))

    def found(self) -> bytes:
        return self._looks[-1] if self._looks else b""

    def close(self) -> None:
        self.heartbeat.close()
        self.link.close()

    def fork(self) -> int:
        """Fork a child that lives on, and return its identifier."""
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pause()
            os._exit(0)
        return child


def serve(control: Connection, news_seconds: float, *arguments: Any) -> None:
    """Make a rank, and call its methods until the other end of the pipe is closed."""
    beats._NEWS_SECONDS = news_seconds
    one = Rank(*arguments)
    while True:
        try:
            method, *given = control.recv()
        except EOFError:
            os._exit(0)
        control.send(getattr(one, method)(*given))


class Process:
    """Process of a rank."""

    def __init__(self, news_seconds: float, port: int, name: str, rank: int) -> None:
        self.rank = rank
        self._control, theirs = Pipe()
        self.process = start_process(serve, theirs, news_seconds, port, name, rank)
        theirs.close()

    def call(self, method: Callable[..., T], *arguments: object) -> T:
        self._control.send((method.__name__, *arguments))
        assert self._control.poll(30), f"{method.__name__} hangs"
        return self._control.recv()  # type: ignore[no-any-return]

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._control.close()


class Job:
    """Coordinator in this process, which watches ranks of one host."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.client = Client(self._store)
        self.name = f"beats-{os.getpid()}-{self._store.port}"
        self.coordinator = Heartbeat(self._store, 0, beat_seconds=0.05).start()
        self.processes: list[Process] = []

    def start(self, *ranks: int, news_seconds: float = 20.0) -> list[Process]:
        """Start ranks, the first of which speaks for all, and watch them."""
        for rank in ranks:
            self.processes.append(Process(news_seconds, self._store.port, self.name, rank))
            if len(self.processes) == 1:
                wait_until(lambda: self.client.has([f"beat/{rank}"]))  # noqa: B023
        leader, *others = self.processes
        if others:
            self.wait_for_speaker(leader, others)
        self.coordinator.enter(1, "watching", ranks)
        return self.processes

    def wait_for_speaker(self, leader: Process, others: list[Process]) -> None:
        wait_until(lambda: leader.call(Rank.spoken_for) == [one.rank for one in others])
        wait_until(lambda: [one.call(Rank.speaker) for one in (leader, *others)] == [leader.rank] * (1 + len(others)))

    def own(self, one: Process) -> RankStatus:
        """Return the status that a rank has put itself last."""
        return RankStatus.decode(self.client.get(f"beat/{one.rank}"))

    def count(self, one: Process) -> int:
        """Return the number of the last heartbeat of a rank that the coordinator has heard."""
        status = self.coordinator.last(one.rank)
        return 0 if status is None else status.count

    def hear(self, *processes: Process, beats: int = 5) -> None:
        """Wait until the coordinator has heard so many more heartbeats of each of these ranks."""
        before = [self.count(one) for one in processes]
        wait_until(lambda: all(self.count(one) >= b + beats for one, b in zip(processes, before, strict=True)))

    def close(self) -> None:
        self.coordinator.close()
        for one in self.processes:
            one.kill()


@pytest.fixture
def job() -> Iterator[Job]:
    """Start a coordinator, and kill its ranks at the end."""
    job = Job()
    try:
        yield job
    finally:
        job.close()


@needs_links
def test_one_rank_speaks_for_its_host(job: Job) -> None:
    """Members ask the store nothing in many heartbeats, and hear of the coordinator; the leader asks two things."""
    leader, *others = job.start(3, 4, 5)
    for one in (leader, *others):
        one.call(Rank.enter, 1)
    wait_until(lambda: all(one.call(Rank.last_count) for one in others))
    job.hear(leader, *others)
    own, asked = [job.own(one) for one in others], [one.call(Rank.operations) for one in others]
    spoken, begin = leader.call(Rank.operations), job.count(leader)
    counts = [one.call(Rank.last_count) for one in others]
    job.hear(leader, *others, beats=10)
    assert [job.own(one) for one in others] == own
    assert [one.call(Rank.operations) for one in others] == asked
    assert all(one.call(Rank.last_count) > count for one, count in zip(others, counts, strict=True))
    end = leader.call(Rank.operations)
    wait_until(lambda: job.count(leader) * 2 + 10 > end)
    assert end - spoken <= 2 * (job.count(leader) - begin + 2)


@needs_links
def test_what_a_member_does_and_what_the_coordinator_announces(job: Job) -> None:
    """The coordinator hears that a member enters an operation, and all ranks what it announces."""
    ranks = job.start(1, 2, 3)
    ranks[2].call(Rank.enter, 7)
    wait_until(lambda: (last := job.coordinator.last(3)) is not None and last.what == "operation 7")
    job.coordinator.announce("verdict", 5)
    wait_until(lambda: [one.call(Rank.announced, "verdict") for one in ranks] == [5, 5, 5])
    job.coordinator.ask_positions(job.client)
    wait_until(lambda: all((last := job.coordinator.last(one.rank)) is not None and last.where for one in ranks[:2]))


@needs_links
def test_what_a_member_tells_is_there_before_its_status(job: Job) -> None:
    """A member that puts a key with its heartbeat publishes that heartbeat itself, after the key, and only that one."""
    _, member, _ = job.start(1, 2, 3)
    job.hear(member)
    before = job.own(member).count
    member.call(Rank.tell, "told")
    wait_until(lambda: job.own(member).count > before)
    assert job.client.get("told") == b"told"
    told = job.own(member)
    assert told.speaker == 1
    job.hear(member)
    assert job.own(member) == told


@needs_links
def test_a_key_that_all_look_for_is_looked_for_once(job: Job) -> None:
    """The leader looks with each heartbeat, the others ask the store nothing, and all find the key when it comes."""
    leader, *others = ranks = job.start(1, 2, 3)
    for one in ranks:
        one.call(Rank.look_for, "asked")
    job.hear(*ranks)
    asked = [one.call(Rank.operations) for one in others]
    job.hear(*ranks)
    assert [one.call(Rank.operations) for one in others] == asked
    job.client.put("asked", b"stop")
    wait_until(lambda: [one.call(Rank.found) for one in ranks] == [b"stop"] * 3)
    assert [one.call(Rank.operations) for one in others] == asked
    others[0].call(Rank.look_for, "of this rank alone")
    job.hear(*ranks)
    assert others[0].call(Rank.operations) > asked[0]
    assert others[1].call(Rank.operations) == asked[1]
    assert leader.call(Rank.speaker) == 1


@needs_links
@pytest.mark.parametrize("how", ["killed", "killed, and its child lives", "closed"])
def test_a_leader_that_ends_is_followed_by_another(job: Job, how: str) -> None:
    """The others are heard all the time, and one of them speaks for the others from then on."""
    leader, *others = job.start(1, 2, 3)
    child = leader.call(Rank.fork) if "child" in how else None
    try:
        if how == "closed":
            leader.call(Rank.close)
            wait_until(lambda: (last := job.coordinator.last(1)) is not None and last.is_closed)
        else:
            leader.kill()
        job.hear(*others)
        wait_until(lambda: sum(len(one.call(Rank.spoken_for)) for one in others) == 1)
        next_leader = next(one for one in others if one.call(Rank.spoken_for))
        wait_until(lambda: [one.call(Rank.speaker) for one in others] == [next_leader.rank] * 2)
        job.hear(*others)
        assert job.coordinator.silent_ranks(0.0).keys() >= {1}
    finally:
        if child is not None:
            os.kill(child, signal.SIGKILL)


@needs_links
@pytest.mark.parametrize(("news_seconds", "silence_seconds"), [(1.0, math.inf), (20.0, 3.0)])
def test_a_leader_that_is_stopped_silences_nobody_else(job: Job, news_seconds: float, silence_seconds: float) -> None:
    """The others speak for themselves, long before they count as silent; later the leader speaks for them again."""
    leader, *others = job.start(1, 2, 3, news_seconds=news_seconds)
    for one in others:
        one.call(Rank.enter, 1, silence_seconds)
    job.hear(leader, *others)
    leader.signal(signal.SIGSTOP)
    wait_until(lambda: [one.call(Rank.speaker) for one in others] == [0, 0])
    job.hear(*others)
    wait_until(lambda: list(job.coordinator.silent_ranks(2.0)) == [1])
    leader.signal(signal.SIGCONT)
    job.wait_for_speaker(leader, others)
    job.hear(leader, *others)


@needs_links
def test_a_member_that_is_stopped_is_silent_though_its_leader_lives(job: Job) -> None:
    """The leader publishes the same status of the member again and again."""
    leader, member, other = job.start(1, 2, 3)
    job.hear(leader, member, other)
    member.signal(signal.SIGSTOP)
    wait_until(lambda: list(job.coordinator.silent_ranks(2.0)) == [2])
    assert leader.call(Rank.spoken_for) == [2, 3]
    member.signal(signal.SIGCONT)
    job.hear(leader, member, other)


@needs_links
def test_a_member_that_closes_says_so_itself(job: Job) -> None:
    """Its last status is the one that it has put, which the coordinator reads; the leader drops it."""
    leader, member, other = job.start(1, 2, 3)
    member.call(Rank.close)
    assert job.own(member).is_closed
    wait_until(lambda: (last := job.coordinator.last(2)) is not None and last.is_closed)
    wait_until(lambda: leader.call(Rank.spoken_for) == [3])
    job.hear(leader, other)


@needs_links
def test_a_rank_alone_on_its_host_asks_two_things(job: Job) -> None:
    """It has a link, which no other rank has joined: each heartbeat is the rank's own."""
    (one,) = job.start(1)
    job.hear(one)
    begin, asked = job.count(one), one.call(Rank.operations)
    job.hear(one, beats=10)
    asked = one.call(Rank.operations) - asked
    wait_until(lambda: job.count(one) * 2 + 10 > 2 * begin + asked)
    assert asked <= 2 * (job.count(one) - begin + 2)
    assert not job.client.has(["beat/by/1"])


# ---- the reader, and the interval


def speak(client: Client, speaker: int, *statuses: tuple[int, RankStatus]) -> None:
    client.put(f"beat/by/{speaker}", pickle.dumps({rank: status.encode() for rank, status in statuses}))


def test_the_newest_status_of_a_rank_counts() -> None:
    """Whichever way it came: of one heartbeat by its count; of another process only if the rank itself put it."""
    store = CountingStore(dist.HashStore())
    client = Client(store)  # type: ignore[arg-type]
    reader = Heartbeat(store, 0)  # type: ignore[arg-type]

    def last() -> RankStatus:
        return reader.read(client, [5])[5]

    client.put("beat/5", RankStatus(3, token=1, speaker=4).encode())
    speak(client, 4, (4, RankStatus(9)), (5, RankStatus(8, token=1, speaker=4)))
    assert last().count == 8
    speak(client, 4, (5, RankStatus(7, token=1, speaker=4)))
    assert last().count == 8
    speak(client, 4, (5, RankStatus(20, token=2, speaker=4)))
    assert last().count == 8
    # The leader is silent: what it has put does not change any more, and the rank speaks for itself.
    client.put("beat/5", RankStatus(9, token=1).encode())
    assert [last().count, last().count][1] == 9
    client.put("beat/5", RankStatus(1, token=3, speaker=4).encode())
    assert last().token == 3
    # The leader has dropped the rank, which has put its last status itself.
    client.put("beat/5", RankStatus(2, token=3, is_closed=True).encode())
    speak(client, 4, (4, RankStatus(9)))
    assert last().is_closed


def test_ranks_are_read_beside_others() -> None:
    """Read other ranks in between: one whose leader is silent is looked for all the same, at its own key."""
    store = dist.HashStore()
    client, reader = Client(store), Heartbeat(store, 0)
    for rank in (4, 5):
        client.put(f"beat/{rank}", RankStatus(1, speaker=4).encode())
    speak(client, 4, (4, RankStatus(2, speaker=4)), (5, RankStatus(2, speaker=4)))
    reader.read(client, [4, 5])
    client.put("beat/5", RankStatus(3).encode())
    for _ in range(2):
        found = reader.read(client, [4, 5])
        reader.read(client, [4])
    assert found[5].count == 3


class OtherLeads:
    """Link over which news of rank 4 have come just now."""

    statuses: ClassVar[dict[int, bytes]] = {}

    def __init__(self, *, can_start: bool = True) -> None:
        self._can_start = can_start
        self.told: list[bool] = []
        self.news = News(4, 1e6, b"", {}, time.monotonic())

    def start(self) -> bool:
        return self._can_start

    def tell(self, _status: bytes, *, is_urgent: bool) -> None:
        self.told.append(is_urgent)


def test_a_heartbeat_that_the_store_did_not_answer_is_put_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store fails after a first status, or an action: only once it has answered may another rank speak for this."""
    store, link = dist.HashStore(), OtherLeads()
    client = Client(store)
    one = Heartbeat(store, 5, link=lambda: link)  # type: ignore[arg-type, return-value]
    for told in ([], [lambda client: client.put("key", b"")]):
        one._outbox.extend(told)
        with monkeypatch.context() as patch:
            patch.setattr(one, "_read_others", lose)
            with pytest.raises(dist.DistNetworkError):
                one._beat(client)
        lost = client.get("beat/5")
        one._beat(client)
        assert client.get("beat/5") != lost
        answered = client.get("beat/5")
        one._beat(client)
        assert client.get("beat/5") == answered
    one.enter(1, "a save", [0])
    one._beat(client)
    assert link.told == [False, False, False, False, True]


def test_a_rank_whose_link_cannot_start_speaks_for_itself() -> None:
    """The process may start no thread, or open no socket: each heartbeat is the rank's own."""
    store, link = dist.HashStore(), OtherLeads(can_start=False)
    one = Heartbeat(store, 5, link=lambda: link)  # type: ignore[arg-type, return-value]
    for count in (1, 2, 3):
        one._beat(Client(store))
        own = RankStatus.decode(Client(store).get("beat/5"))
        assert (own.count, own.speaker) == (count, 0)


class OthersFollow:
    """Link of a leader, which has a status of rank 6."""

    statuses: ClassVar[dict[int, bytes]] = {6: RankStatus(1).encode()}
    news = None

    def __init__(self) -> None:
        self.spread_seconds: list[float] = []

    def start(self) -> bool:
        return True

    def spread(self, seconds: float, _status: bytes, _found: Mapping[str, bytes]) -> None:
        self.spread_seconds.append(seconds)


@pytest.mark.parametrize(("slow_seconds", "expected"), [(0.0, 2.0), (5.0, 7.0), (60.0, 16.0)])
def test_ranks_wait_for_news_as_long_as_the_store_is_slow(slow_seconds: float, expected: float) -> None:
    """Up to the interval of ranks alone, which would make the store no faster."""
    link, clock, store = OthersFollow(), Clock(), dist.HashStore()
    one = Heartbeat(store, 5, beat_seconds=16.0, link=lambda: link, clock=clock)  # type: ignore[arg-type, return-value]
    one._count_interval = lambda _ranks: 2.0  # type: ignore[method-assign, assignment]
    one.hooks.append(lambda _client: setattr(clock, "now", clock.now + slow_seconds))
    one._beat(Client(store))
    assert link.spread_seconds == [expected]


def lose(_client: Client) -> bool:
    raise dist.DistNetworkError("lost")


def test_ranks_are_found_and_read_by_their_hosts() -> None:
    """4,000 ranks on 500 hosts: one look finds a rank of each host, and later looks cost two operations."""
    store = CountingStore(dist.HashStore())
    client = Client(store.store)
    ranks = range(1, 4001)
    for first in ranks[::8]:
        host = [(rank, RankStatus(2, speaker=first)) for rank in range(first, first + 8)]
        for rank, status in host:
            client.put(f"beat/{rank}", status.encode())
        speak(client, first, *host)
    reader = Heartbeat(store, 0, beat_seconds=16.0)  # type: ignore[arg-type]
    counted = Client(store)  # type: ignore[arg-type]
    assert len(reader.read(counted, ranks)) == 4000
    for first in ranks[::8]:
        speak(client, first, *[(rank, RankStatus(3, speaker=first)) for rank in range(first, first + 8)])
    before = store.operations
    assert {status.count for status in reader.read(counted, ranks).values()} == {3}
    assert store.operations - before == 1  # a `multi_get`
    assert reader._count_interval(1) == 2.0  # as that of each host


def test_the_interval_goes_by_the_ranks_that_one_speaks_for() -> None:
    """All ranks together keep to a thousand heartbeats a second, however many of them are alone."""
    seconds = heartbeat_interval_seconds(16_384)
    one = Heartbeat(dist.HashStore(), 1, beat_seconds=seconds)
    assert [one._count_interval(ranks) for ranks in (1, 8, 64)] == [seconds, seconds / 8, 1.0]
