"""Links between ranks of one host, which are processes that are late, killed, stopped, or closed."""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from dcp_remote.common.deadline import RetryPolicy
from dcp_remote.coordination import host_documents, host_link
from dcp_remote.coordination.heartbeat import Heartbeat
from dcp_remote.coordination.host_link import HostLink
from dcp_remote.coordination.key_value import Client
from tests.support.rank_pool import start_process
from tests.support.rank_threads import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")

T = TypeVar("T")


def make_link(name: str, rank: int, heartbeat: Heartbeat) -> HostLink:
    return HostLink(name, rank, heartbeat.request, lambda _: RetryPolicy(0.005, 0.05).growing_delays())


class Rank:
    """Rank with a link, for a process that calls its methods."""

    def __init__(self, port: int, name: str, rank: int, user: int | None) -> None:
        if user is not None:
            os.setuid(user)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self.link = make_link(name, rank, Heartbeat(store, rank).start())
        self.documents: dict[str, bytes | None] = {}
        self.from_leader: list[bytes] = []
        hear = self.link._hear_leader

        def hear_noted(leader: Any, frame: Any) -> None:
            hear(leader, frame)
            self.from_leader += frame[2:] if frame is not None and frame[:2] == ("answer", "1/out") else ()

        self.link._hear_leader = hear_noted  # type: ignore[method-assign]
        self.fetches: dict[str, queue.SimpleQueue[bytes | None]] = {}
        self.fetching = set[str]()

    def begin(self, number: int, data: bytes) -> None:
        self.link.begin(f"{number}/in", f"{number}/out", data)

    def answer(self, number: int) -> bytes:
        found: list[bytes] = []

        def has_come() -> bool:
            answer = self.link.answer(f"{number}/out", 0.01)
            if answer is not None:
                found.append(answer)
            return bool(found)

        wait_until(has_come)
        return found[0]

    def tell(self, status: bytes, is_urgent: bool) -> None:  # over a pipe
        self.link.tell(status, is_urgent=is_urgent)

    def statuses(self) -> dict[int, bytes]:
        return self.link.statuses

    def leads(self) -> bool:
        return self.link._listening is not None

    def follows(self) -> bool:
        return self.link._leader is not None

    def speaks_for(self) -> int:
        """Return the connections of this rank's members."""
        return len(self.link._members)

    def alone(self) -> int:
        return self.link.spoken_alone

    def merge_for(self, seconds: float) -> None:
        """Let parts wait so long for members that have not contributed."""
        host_link._MERGE_SECONDS = seconds

    def end(self, number: int) -> None:
        self.link.end(f"{number}/out")

    def rounds(self) -> int:
        return len(self.link._rounds)

    def want(self, key: str, patience: float = 60.0) -> None:
        """Ask for a document, in a thread; `fetched` is to follow where this rank fetches."""
        host_documents._PATIENCE_SECONDS = patience
        answers = self.fetches[key] = queue.SimpleQueue[bytes | None]()
        self.fetching.discard(key)

        def fetch() -> bytes:
            self.fetching.add(key)
            data = answers.get()
            if data is None:
                raise OSError("not fetched")
            return data

        def share() -> None:
            try:
                self.documents[key] = self.link.share(key, fetch)
            except OSError:
                self.documents[key] = None

        self.documents.pop(key, None)
        threading.Thread(target=share, daemon=True).start()

    def fetches_now(self, key: str) -> bool:
        return key in self.fetching

    def fetched(self, key: str, data: bytes | None) -> None:
        """End a fetch, with an error if there is no data."""
        self.fetches[key].put(data)

    def document(self, key: str) -> bytes | None:
        wait_until(lambda: key in self.documents)
        return self.documents[key]

    def kept(self) -> int:
        """Return the documents that this rank knows of."""
        documents = self.link._documents
        return len([*documents._fetched, *documents._holders, *documents._waiting, *documents._wanted])

    def waiting_for(self, key: str) -> int:
        return len(self.link._documents._waiting.get(key, ()))

    def heard(self) -> list[bytes]:
        """Return the answers that the leader has sent."""
        return list(self.from_leader)

    def copies(self) -> tuple[int, int]:
        """Return how many members have large frames to come, and how many copies of these there are."""
        boxes = [[id(view.obj) for view in one._outbox if len(view) > 2**20] for one in self.link._members]
        return sum(map(bool, boxes)), len({copy for box in boxes for copy in box})

    def want_interrupted(self, key: str) -> None:
        """Ask for a document, and be interrupted at once, as by Ctrl-C."""
        order = self.link._documents._order

        def interrupt(action: Callable[[], None]) -> None:
            order(action)
            self.link._documents._order = order
            raise KeyboardInterrupt

        self.link._documents._order = interrupt
        with contextlib.suppress(KeyboardInterrupt):
            self.link.share(key, lambda: b"")

    def waits_in_vain(self) -> int:
        return self.link._documents.waits_in_vain

    def close(self) -> None:
        self.link.close()

    def fork(self) -> int:
        """Fork a child that lives on, as a DataLoader's worker does, and return its identifier."""
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pause()
            os._exit(0)
        return child


def serve(control: Connection, pings: int, *arguments: Any) -> None:
    """Make a rank, and call its methods until the other end of the pipe is closed."""
    host_link._PINGS_MAX, host_link._PING_SECONDS = pings, 0.1
    one = Rank(*arguments)
    while True:
        try:
            method, *arguments = control.recv()
        except EOFError:
            return
        control.send(getattr(one, method)(*arguments))


class Process:
    """Process of a rank."""

    def __init__(self, port: int, name: str, rank: int, user: int | None = None, *, pings: int = 20) -> None:
        self._control, theirs = Pipe()
        self.process = start_process(serve, theirs, pings, port, name, rank, user)
        theirs.close()
        self.pid = self.process.pid
        assert self.pid is not None

    def call(self, method: Callable[..., T], *arguments: object) -> T:
        self.ask(method, *arguments)
        assert self._control.poll(30), f"{method.__name__} hangs"
        return self._control.recv()  # type: ignore[no-any-return]

    def ask(self, method: Callable[..., object], *arguments: object) -> None:
        self._control.send((method.__name__, *arguments))

    def signal(self, number: signal.Signals) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._control.close()


class Host:
    """Ranks of one host, and the coordinator's view of their rounds."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.client = Client(self._store)
        self.name = f"test-{os.getpid()}-{self._store.port}"
        self.processes: list[Process] = []
        self.heartbeat = Heartbeat(self._store, 9).start()

    def make_link(self, rank: int) -> HostLink:
        """Return a link of this process."""
        return make_link(self.name, rank, self.heartbeat)

    def start(self, *ranks: int, **options: Any) -> list[Process]:
        started = [Process(self._store.port, self.name, rank, **options) for rank in ranks]
        self.processes += started
        return started

    def lead(self, one: Process) -> None:
        """Let a rank begin a round by itself, so that it leads."""
        one.call(Rank.begin, 0, b"")
        wait_until(lambda: one.call(Rank.leads))
        self.collect(0, 1)
        self.client.put("0/out", b"done")
        assert one.call(Rank.answer, 0) == b"done"

    def link(self, *ranks: int, **options: Any) -> list[Process]:
        """Start ranks that are linked; the first leads."""
        leader, *others = self.start(*ranks, **options)
        self.lead(leader)
        for other in others:
            other.call(Rank.begin, 0, b"")
            assert other.call(Rank.answer, 0) == b"done"
        return [leader, *others]

    def parts(self, number: int) -> list[dict[int, bytes]]:
        """Return the parts of a round that are there now."""
        keys = [f"{number}/in/{slot}" for slot in range(1, self.client.add(f"{number}/in", 0) + 1)]
        return [pickle.loads(data) for data in self.client.get_many(sorted(self.client.present(keys)))]

    def collect(self, number: int, count: int) -> dict[int, bytes]:
        """Return the contributions to a round, by rank, once there are so many."""
        wait_until(lambda: len({rank for part in self.parts(number) for rank in part}) >= count)
        return {rank: data for part in self.parts(number) for rank, data in part.items()}

    def finish(self, number: int, answer: bytes, processes: Sequence[Process]) -> None:
        """Publish the answer to a round, which all ranks get."""
        self.client.put(f"{number}/out", answer)
        assert [one.call(Rank.answer, number) for one in processes] == [answer] * len(processes)


@pytest.fixture
def host() -> Iterator[Host]:
    """Start a host, whose ranks are killed at the end."""
    host = Host()
    try:
        yield host
    finally:
        host.heartbeat.close()
        for one in host.processes:
            one.kill()


def test_ranks_of_a_host_put_one_part(host: Host) -> None:
    """Three ranks do three rounds: each round has one part and one slot, and each rank gets the answer."""
    ranks = host.link(4, 5, 6)
    ranks[0].call(Rank.merge_for, 5.0)  # a busy machine may pause between two ranks
    for number in (1, 2, 3):
        for rank, one in zip((4, 5, 6), ranks, strict=True):
            one.call(Rank.begin, number, b"%d of %d" % (rank, number))
        expected = {rank: b"%d of %d" % (rank, number) for rank in (4, 5, 6)}
        assert host.collect(number, 3) == expected
        assert host.parts(number) == [expected]
        host.finish(number, b"answer %d" % number, ranks)


def test_a_late_rank_is_in_a_part_of_its_own(host: Host) -> None:
    """The part of the others does not wait for it, even where the late rank is the leader's own."""
    late, *others = host.link(1, 2, 3)
    late.call(Rank.merge_for, 2.0)  # a busy machine may pause between two ranks
    for one in others:
        one.call(Rank.begin, 1, b"")
    host.collect(1, 2)
    late.call(Rank.merge_for, 0.0)
    late.call(Rank.begin, 1, b"late")
    assert host.collect(1, 3)[1] == b"late"
    assert [sorted(part) for part in host.parts(1)] == [[2, 3], [1]]
    host.finish(1, b"answer", [late, *others])


def test_a_leader_speaks_for_others_in_a_round_that_it_has_left(host: Host) -> None:
    """The leader's own rank ends its wait, and the others get the answer all the same."""
    leader, other = host.link(1, 2)
    for one in (leader, other):
        one.call(Rank.begin, 1, b"")
    host.collect(1, 2)
    leader.call(Rank.end, 1)
    host.finish(1, b"answer", [other])
    for one in (leader, other):
        one.call(Rank.begin, 2, b"")
    host.collect(2, 2)
    for one in (leader, other):
        one.call(Rank.end, 2)
    wait_until(lambda: leader.call(Rank.rounds) == 0)


@pytest.mark.parametrize("is_put", [False, True])
def test_a_leader_that_is_killed_is_followed_by_another(host: Host, is_put: bool) -> None:
    """Kill the leader before or after it has put the part: the others send again, and each rank counts once."""
    leader, *others = host.link(1, 2, 3, 4)
    for one in others:
        one.call(Rank.begin, 1, b"data")
        if not is_put:
            leader.signal(signal.SIGSTOP)
    if is_put:
        host.collect(1, 3)
    leader.kill()
    assert host.collect(1, 3) == dict.fromkeys((2, 3, 4), b"data")
    wait_until(lambda: sum(one.call(Rank.leads) for one in others) == 1)
    host.finish(1, b"answer", others)
    slots = host.client.add("1/in", 0)
    for one in others:
        one.call(Rank.begin, 2, b"")
    host.collect(2, 3)
    host.finish(2, b"answer", others)
    assert host.client.add("1/in", 0) == slots


def test_a_leader_that_is_killed_after_the_answer_came_costs_no_part(host: Host) -> None:
    """The next leader looks for the answer first: a part that it put would never be deleted."""
    leader, other = host.link(1, 2)
    other.call(Rank.begin, 1, b"")
    host.collect(1, 1)
    leader.signal(signal.SIGSTOP)
    host.client.put("1/out", b"answer")
    slots = host.client.add("1/in", 0)
    leader.kill()
    assert other.call(Rank.answer, 1) == b"answer"
    assert host.client.add("1/in", 0) == slots


def test_a_leader_that_closes_is_followed_by_another(host: Host) -> None:
    """Close the leader during a round."""
    leader, *others = host.link(1, 2, 3)
    for one in others:
        one.call(Rank.begin, 1, b"data")
    leader.call(Rank.close)
    assert host.collect(1, 2) == dict.fromkeys((2, 3), b"data")
    host.finish(1, b"answer", others)


def test_ranks_speak_for_themselves_while_their_leader_is_stopped(host: Host) -> None:
    """Stop the leader: each member puts a part of its own; when it goes on, the leader speaks for them again."""
    leader, *others = host.link(1, 2, 3, pings=10)
    leader.call(Rank.merge_for, 2.0)  # a busy machine may pause between two ranks
    leader.signal(signal.SIGSTOP)
    for one in others:
        one.call(Rank.begin, 1, b"data")
    assert host.collect(1, 2) == dict.fromkeys((2, 3), b"data")
    assert sorted(map(len, host.parts(1))) == [1, 1]
    host.finish(1, b"answer", others)
    assert [one.call(Rank.alone) for one in others] == [1, 1]
    leader.signal(signal.SIGCONT)
    wait_until(lambda: host.client.has(["1/in/3"]))  # what they sent before it was stopped
    for one in others:
        one.call(Rank.begin, 2, b"data")
    assert host.collect(2, 2) == dict.fromkeys((2, 3), b"data")
    host.finish(2, b"answer", others)
    assert [one.call(Rank.alone) for one in others] == [1, 1]
    assert [sorted(part) for part in host.parts(2)] == [[2, 3]]


def test_a_child_of_the_leader_keeps_neither_its_name_nor_its_connections(host: Host) -> None:
    """Kill a leader whose forked child lives on: the members see it at once, and one of them binds the name."""
    leader, *others = host.link(1, 2, 3, pings=1000)
    child = leader.call(Rank.fork)
    try:
        for one in others:
            one.call(Rank.begin, 1, b"data")
        leader.kill()
        assert host.collect(1, 2) == dict.fromkeys((2, 3), b"data")
        wait_until(lambda: sum(one.call(Rank.leads) for one in others) == 1)
        os.kill(child, 0)
        host.finish(1, b"answer", others)
    finally:
        os.kill(child, signal.SIGKILL)


def test_values_of_many_mebibytes(host: Host) -> None:
    """Contributions and an answer that fill every buffer on the way, while a third rank reads nothing."""
    *ranks, stopped = host.link(1, 2, 3, pings=1000)
    for one in (*ranks, stopped):
        one.call(Rank.begin, 1, bytes(20 * 2**20))
    assert sum(map(len, host.collect(1, 3).values())) == 3 * 20 * 2**20
    stopped.signal(signal.SIGSTOP)
    host.finish(1, bytes(30 * 2**20), ranks)
    for one in ranks:
        one.call(Rank.begin, 2, b"")
    host.collect(2, 2)
    host.finish(2, b"answer", ranks)
    stopped.signal(signal.SIGCONT)
    host.finish(1, bytes(30 * 2**20), [stopped])


def test_connections_of_others_change_nothing(host: Host) -> None:
    """A process connects and says nothing, breaks off in the middle of a frame, or sends none, or one of its own."""
    leader, other = host.link(1, 2)
    address = host.make_link(0)._address
    forged = pickle.dumps(("end", "1/out"))
    seal = hmac.digest(address, forged, "sha256")
    sent = (b"", b"\0\0\0\0\0\0\1\0half", b"\xff" * 100, len(forged).to_bytes(8, "big") + seal + forged)
    strangers = [socket.socket(socket.AF_UNIX) for _ in sent]
    try:
        for stranger, data in zip(strangers, sent, strict=True):
            stranger.connect(address)
            stranger.sendall(data)
        for one in (leader, other):
            one.call(Rank.begin, 1, b"data")
        assert host.collect(1, 2) == dict.fromkeys((1, 2), b"data")
        host.finish(1, b"answer", [leader, other])
        strangers[-1].settimeout(30)
        assert strangers[-1].recv(1) == b"", "the connection is ended"
    finally:
        for stranger in strangers:
            stranger.close()
    wait_until(lambda: leader.call(Rank.speaks_for) == 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_no_member(host: Host) -> None:
    """Neither leads the other: each speaks for itself, also where the stranger has bound the name."""
    (leader,) = host.link(1)
    (stranger,) = host.start(2, user=65534)
    for one in (leader, stranger):
        one.call(Rank.begin, 1, b"data")
    host.collect(1, 2)
    assert sorted(map(len, host.parts(1))) == [1, 1]
    host.finish(1, b"answer", [leader, stranger])
    assert not stranger.call(Rank.leads)
    assert not stranger.call(Rank.follows)
    assert leader.call(Rank.speaks_for) == 0


def test_a_system_without_abstract_sockets_has_no_links(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank puts a part of its own."""
    monkeypatch.setattr(sys, "platform", "darwin")
    links = [host.make_link(rank) for rank in (1, 2)]
    for link in links:
        link.begin("1/in", "1/out", b"data")
    host.collect(1, 2)
    assert sorted(map(len, host.parts(1))) == [1, 1]
    for link in links:
        link.close()


@pytest.mark.parametrize("lacking", ["threads", "descriptors"])
def test_a_rank_without_threads_or_descriptors_speaks_for_itself(
    host: Host, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    """The next round goes through the link, if the process may start one by then."""
    link = host.make_link(1)
    with monkeypatch.context() as patch:
        if lacking == "threads":
            patch.setattr(threading.Thread, "start", no_thread)
        else:
            patch.setattr(socket, "socketpair", too_many_files)
        assert not link.begin("1/in", "1/out", b"data")
    assert link.begin("2/in", "2/out", b"data")
    host.collect(2, 1)
    host.finish(2, b"answer", [])
    wait_until(lambda: link.answer("2/out") == b"answer")
    assert host.parts(1) == []
    link.close()


def test_a_rank_without_descriptors_for_a_moment_is_linked_afterwards(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the name can be bound nor the leader be reached at first."""
    (leader,) = host.link(1)
    link = host.make_link(2)
    make, failed = host_link._open_sockets, list[int]()

    def open_later(opened: Callable[[], tuple[socket.socket, ...]]) -> tuple[socket.socket, ...]:
        if opened is not socket.socketpair and len(failed) < 3:
            failed.append(1)
            too_many_files()
        return make(opened)

    monkeypatch.setattr(host_link, "_open_sockets", open_later)
    link.start()
    wait_until(lambda: leader.call(Rank.speaks_for) == 1)
    assert len(failed) == 3
    link.close()


def test_an_answer_that_comes_after_its_round_was_left_is_not_kept(host: Host) -> None:
    """An operation was cancelled; its answer comes before the link has forgotten the round."""
    link = host.make_link(1)
    for number in (1, 2):
        link.begin(f"{number}/in", f"{number}/out", b"data")
    host.collect(1, 1)
    host.collect(2, 1)
    link._end = lambda _key: None  # type: ignore[method-assign, assignment]
    link.end("1/out")
    host.client.put("1/out", b"late")
    wait_until(lambda: "1/out" not in link._own)
    host.client.put("2/out", b"answer")
    wait_until(lambda: link.answer("2/out") == b"answer")
    assert [*link._awaited] == ["2/out"]
    link.close()


def test_an_urgent_status_goes_behind_what_the_leader_has_not_taken(host: Host) -> None:
    """A rank that enters an operation says so to a leader that was busy; of other statuses the next one will do."""
    leader, member = host.link(1, 2)
    leader.signal(signal.SIGSTOP)
    member.call(Rank.begin, 1, bytes(2**22))
    for status, is_urgent in [(b"a heartbeat", False), (b"entered", True)]:
        member.call(Rank.tell, status, is_urgent)
    leader.signal(signal.SIGCONT)
    wait_until(lambda: leader.call(Rank.statuses) == {2: b"entered"})


def test_an_error_of_the_store_is_raised_where_the_answer_is_awaited(host: Host) -> None:
    """The rank that speaks raises the error; another becomes the leader, and in the next round also speaks for it."""
    failing = host.make_link(1)
    gone = Future[dict[str, bytes]]()
    gone.set_exception(dist.DistNetworkError("gone"))
    failing._request = lambda _request: gone
    failing.begin("1/in", "1/out", b"data")
    wait_until(failing._awaited["1/out"].qsize)
    (other,) = host.start(2)
    other.call(Rank.begin, 1, b"data")
    with pytest.raises(dist.DistNetworkError, match="gone"):
        wait_until(lambda: failing.answer("1/out"))
    host.collect(1, 1)
    host.finish(1, b"answer", [other])
    failing._request = host.heartbeat.request
    failing.begin("2/in", "2/out", b"data")
    assert host.collect(2, 1) == {1: b"data"}
    host.client.put("2/out", b"answer")
    wait_until(lambda: failing.answer("2/out") == b"answer")
    failing.close()


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM])
def test_a_frame_that_is_lost_is_sent_again(host: Host, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has no memory for a frame of a member, which connects again."""
    host.link(1)
    link = host.make_link(2)
    link.start()
    wait_until(lambda: link._leader is not None)
    assert link._leader is not None
    own, send, failed = link._leader._own, socket.socket.send, list[int]()

    def send_later(one: socket.socket, data: bytes) -> int:
        if one is own and not failed:
            failed.append(number)
            raise OSError(number, os.strerror(number))
        return send(one, data)

    monkeypatch.setattr(socket.socket, "send", send_later)
    link.begin("1/in", "1/out", b"data")
    assert host.collect(1, 1) == {2: b"data"}
    host.client.put("1/out", b"answer")
    wait_until(lambda: link.answer("1/out") == b"answer")
    assert failed
    link.close()


def assert_speaks_for_itself(host: Host, link: HostLink) -> None:
    host.collect(0, 1)
    host.client.put("0/out", b"answer")
    wait_until(lambda: link.answer("0/out") == b"answer")
    assert link.failure is None
    link.close()


def test_a_sandbox_that_does_not_tell_who_connects(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that cannot know a member refuses it; both go on, each for itself."""
    link = host.make_link(1)
    link.begin("0/in", "0/out", b"")
    wait_until(lambda: link._listening is not None)
    monkeypatch.setattr(host_link, "_peer_of", too_many_files)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(30)
        stranger.connect(link._address)
        assert stranger.recv(1) == b""
    assert_speaks_for_itself(host, link)


def test_a_leader_that_refuses_this_rank(host: Host) -> None:
    """A process that has taken the name ends each connection: after many of them this rank speaks for itself."""
    link = host.make_link(1)
    refused = 0
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(link._address)
        stranger.listen()
        stranger.settimeout(30)
        link.begin("0/in", "0/out", b"")
        while link._may_join:
            with contextlib.suppress(TimeoutError):
                stranger.accept()[0].close()
                refused += 1
            stranger.settimeout(0.5)
    assert refused == 100
    assert_speaks_for_itself(host, link)


def test_closing_does_not_wait_for_a_store_that_does_not_answer(host: Host) -> None:
    """Close a link that never began, and one whose request has no answer: its thread ends."""
    links = [host.make_link(1), host.make_link(2)]
    asked: list[object] = []

    def ask_in_vain(request: object) -> Future[dict[str, bytes]]:
        asked.append(request)
        return Future()

    links[1]._request = ask_in_vain
    links[1].begin("1/in", "1/out", b"data")
    wait_until(lambda: asked)
    for link in links:
        link.close()
    thread = links[1]._thread
    assert thread is not None
    wait_until(lambda: not thread.is_alive())


def too_many_files(*_arguments: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def no_thread(*_arguments: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_link_that_failed_says_so(host: Host) -> None:
    """A defect ends the thread of the link: the round ends, and so does the link."""
    link = host.make_link(1)
    link._request = too_many_files  # type: ignore[assignment]
    link.begin("1/in", "1/out", b"data")
    wait_until(lambda: link.failure is not None)
    with pytest.raises(OSError, match="Too many"):
        link.answer("1/out")
    link.begin("2/in", "2/out", b"data")
    with pytest.raises(OSError, match="Too many"):
        link.answer("2/out")
    link.close()


def test_an_interrupt_while_the_thread_starts(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread runs all the same, and the next round goes through it."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    link = host.make_link(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            link.begin("1/in", "1/out", b"data")
    link.begin("2/in", "2/out", b"data")
    host.collect(2, 1)
    host.finish(2, b"answer", [])
    wait_until(lambda: link.answer("2/out") == b"answer")
    link.close()


def test_a_process_that_never_closed_ends_quietly() -> None:
    """An interpreter with a link that waits for an answer ends with status 0."""
    code = """
import time
import torch.distributed as dist
from dcp_remote.coordination.heartbeat import Heartbeat
from dcp_remote.coordination.host_link import HostLink
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
heartbeat = Heartbeat(store, 1).start()
link = HostLink(f"quiet-{store.port}", 1, heartbeat.request, lambda _: iter([0.001] * 100000))
link.begin("parts", "answer", b"data")
time.sleep(0.3)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
