"""Link between the ranks of one host, one of which speaks to the key-value store for all of them.

The ranks of one network namespace find each other by the name of an abstract Unix socket. The kernel lets one process
bind the name, which becomes the leader, and frees the name when that process ends. The other ranks connect to it and
send what they contribute to a round; the leader merges the contributions into one part, puts the part, polls for the
answer, and sends the answer back. Statuses of heartbeats go the same way: the leader's heartbeat publishes them with
its own, and sends the status of the coordinator back, its news.

- A leader that dies or closes: its connections end. Each member tries to bind the name; the one that can is the next
  leader. Each member sends again what has no answer yet.
- A leader whose process is stopped: it answers no ping, and sends no news. Each member speaks to the store itself until
  the leader answers again.
- A connection to the store that breaks, or is silent for long: the heartbeat opens another, over which the leader puts
  the parts again.
- A system without abstract sockets, or a name that a process of another user has bound: each rank speaks for itself.

So a rank may be in two parts of a round, with the same bytes, and a number of a part may be taken and never used.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import logging
import math
import os
import pickle
import queue
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dcp_remote.coordination.host_documents import HostDocuments, SharedFrame
from dcp_remote.coordination.key_value import Client, series_key

logger = logging.getLogger(__name__)

# Longest wait of a part for members that have not contributed.
_MERGE_SECONDS = 0.25
# Wait of a part for members that are about to connect: ranks that begin together connect within that time.
_CONNECT_SECONDS = 0.05
# Interval at which a leader looks whether a part is due.
_TICK_SECONDS = 0.02
# Wait of a leader's heartbeat for the statuses of other members, which enter and leave an operation together.
_STATUS_SECONDS = 0.1

# Interval of a member's pings, and how many a leader leaves unanswered before it counts as stopped.
_PING_SECONDS = 1.0
_PINGS_MAX = 5
# Pause before the next try to bind or connect: a process that has bound the name is about to listen, or has just died.
_RETRY_SECONDS = 0.01
# Connections in a row to which no leader has answered, after which this rank speaks for itself.
_REFUSALS_MAX = 100
_PASSING_ERRORS = {errno.ECONNREFUSED, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}

# Longest wait of `close` for the thread.
_CLOSE_SECONDS = 0.5

_BACKLOG = 1024
_READ_BYTES = 2**20
_HEAD = struct.Struct("!Q32s")  # length and HMAC of a pickled frame
_CREDENTIALS = struct.Struct("3i")  # process, user, group


@dataclass(frozen=True, slots=True)
class News:
    """Sign of life of a leader's heartbeat.

    Attributes:
        leader: Rank of the leader.
        seconds: Seconds until the leader's next heartbeat.
        status: Encoded status of the coordinator; b"" if it has none yet.
        found: Values of the keys that the leader has looked for, b"" for one that is not there.
        at: Moment at which the news came, by the monotonic clock of the receiver.
    """

    leader: int
    seconds: float
    status: bytes
    found: Mapping[str, bytes]
    at: float


class HostLink:
    """Link of this rank to the other ranks of its host; for a caller thread and the heartbeat's, which it never blocks.

    Costs one thread. A leader speaks for its members whether its own rank takes part in a round or not, until it is
    closed; over the connection of its heartbeat.

    Args:
        name: Name of the link, the same on all ranks of a group; only they know it, and seal all frames with it.
        rank: Rank of this process, within the group.
        request: Queues a request to the store; `Heartbeat.request`.
        pauses: Returns the pauses between two looks for an answer, in seconds, by the number of ranks it is for.
        wake: Wakes this rank's heartbeat: there are statuses to publish, or news, or the leader has ended.

    Attributes:
        news: Last news of the leader; None on the leader itself, and before the first.
        spoken_alone: Rounds in which this rank spoke for itself because its leader was stopped.
        failure: Error that ended the thread of the link; no answer can come any more.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        request: Callable[[Callable[[Client], dict[str, bytes]]], Future[dict[str, bytes]]],
        pauses: Callable[[int], Iterator[float]],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Start nothing; `start` starts the thread."""
        self._key = name.encode()
        self._address = b"\0dcp_remote/" + hashlib.sha256(self._key).hexdigest().encode()
        self._rank = rank
        self._wake = wake
        self.news: News | None = None
        self.spoken_alone = 0
        self.failure: Exception | None = None
        self._request = request
        self._pauses = pauses
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # By key: answers for which this rank waits, once they have come.
        self._awaited: dict[str, queue.SimpleQueue[bytes | BaseException]] = {}
        self._is_closing = False
        self._start_lock, self._run_lock = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._selector = selectors.PollSelector()  # epoll would be shared with a child that is forked
        self._wakers: tuple[socket.socket, ...] = ()  # the thread wakes up when something is sent over the first
        # In the thread of the link from here on. Contributions of this rank that have no answer yet, by its key.
        self._own: dict[str, tuple[_Round, bytes]] = {}
        self._rounds: dict[str, _Round] = {}  # that this rank speaks for
        self._is_asking = False  # True while the store has not answered the last request
        self._listening: socket.socket | None = None  # of a leader
        self._members: set[_Connection] = set()
        self._statuses: dict[_Connection, tuple[int, bytes]] = {}  # of members, by the rank
        self._wake_at = math.inf
        self._connected_at = 0.0
        self._leader: _Connection | None = None  # of a member
        self._documents = HostDocuments(self._order, self._tell_leader)
        self._may_join = sys.platform == "linux"
        self._pings, self._next_ping = 0, 0.0  # pings without an answer, and the moment of the next
        self._refusals = 0  # connections in a row that have ended without a frame of a leader

    def start(self) -> bool:
        """Start the thread, unless it was started; return False if there can be none, or no file descriptor is free."""
        with self._start_lock, contextlib.suppress(RuntimeError, OSError):
            if self._thread is None:
                self._wakers = self._wakers or _open_sockets(socket.socketpair)
                thread = threading.Thread(target=self._run, name="dcp_remote-host", daemon=True)
                thread.start()
                self._thread = thread
        return self._thread is not None

    @property
    def statuses(self) -> dict[int, bytes]:
        """Encoded statuses of the members for which this rank's heartbeat speaks, by rank."""
        return dict([*self._statuses.values()])

    def tell(self, status: bytes, *, is_urgent: bool) -> None:
        """Hand this rank's encoded status to the leader, which publishes it at once if it is urgent."""
        self._order(partial(self._tell_status, ("status", self._rank, status, is_urgent), is_urgent=is_urgent))

    def spread(self, seconds: float, status: bytes, found: Mapping[str, bytes]) -> None:
        """Send news to the members; see `News`."""
        self._order(partial(self._spread, ("news", self._rank, seconds, status, found)))

    def begin(self, series: str, answer: str, data: bytes) -> bool:
        """Contribute to a round; return False if this rank must speak for itself, as `start` says.

        Args:
            series: Series of the parts of the round; each is a pickled dictionary of contributions by rank.
            answer: Key of the answer.
            data: Contribution of this rank.
        """
        if not self.start():
            return False
        self._awaited[answer] = queue.SimpleQueue()
        self._order(partial(self._begin, _Round(series, answer), data))
        return True

    def answer(self, key: str, seconds: float = 0.0) -> bytes | None:
        """Wait some seconds for the answer of a round that was begun, and return it, once; None if it does not come.

        Raises:
            Exception: This rank speaks for its host or itself, and the store raised this; or the link's thread failed.
        """
        found: bytes | BaseException | None = self.failure
        with contextlib.suppress(queue.Empty):
            found = self._awaited[key].get(timeout=seconds)
        if isinstance(found, BaseException):
            raise found
        return found

    def end(self, key: str) -> None:
        """Stop waiting for an answer that has not come."""
        self._awaited.pop(key, None)
        self._order(partial(self._end, key))

    def share(self, key: str, fetch: Callable[[], bytes]) -> bytes:
        """Return a document that one rank of this host fetches for all; from any thread. See `host_documents`.

        Waits for five seconds at most for another rank. `fetch` is called at once where this rank is alone, and where
        it has begun no round yet.
        """
        is_alone = self._thread is None or not (self._members or self._leader)
        return fetch() if is_alone else self._documents.share(key, fetch)

    def close(self) -> None:
        """End the link, within a second; the leader's members choose another."""
        self._is_closing = True
        self._order(lambda: None)
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        for waker in self._wakers:
            waker.close()

    def _order(self, action: Callable[[], None]) -> None:
        """Do something in the thread of the link; from any thread."""
        self._orders.put(action)
        with contextlib.suppress(OSError):  # the thread is about to wake up, or has ended
            for waker in self._wakers[:1]:
                waker.send(b"\0")

    # ---- in the thread of the link

    def _run(self) -> None:
        if not self._run_lock.acquire(blocking=False):
            return  # Ctrl-C interrupted an earlier `begin` after its thread had begun
        self._thread = threading.current_thread()
        try:
            woken = self._wakers[1]
            self._selector.register(woken, selectors.EVENT_READ, lambda _event: woken.recv(_READ_BYTES))
            self._join()
            while not self._is_closing:
                while not self._orders.empty():
                    self._orders.get()()
                self._ask_store()
                self._ping()
                if time.monotonic() >= self._wake_at:
                    self._wake_at = math.inf
                    self._wake()
                for key, event in self._selector.select(self._pause()):
                    key.data(event)
        except Exception as error:  # a defect: the caller must not wait for ever
            logger.exception("rank %d: the link between the ranks of this host failed", self._rank)
            self.failure = error
        finally:
            self._stop_leading()
            if self._leader is not None:
                self._leader.close()

    def _pause(self) -> float | None:
        if self._wake_at < math.inf or any(one.contributions for one in self._rounds.values()):
            return _TICK_SECONDS
        pauses = [one.look_at - time.monotonic() for one in self._rounds.values() if not self._is_asking]
        if self._leader is not None and self._own:
            pauses.append(_PING_SECONDS)
        return max(0.0, min(pauses)) if pauses else None

    def _join(self) -> None:
        """Bind the name, or connect to the process that has; where neither is possible this rank speaks for itself."""
        end = time.monotonic() + _PINGS_MAX * _PING_SECONDS
        while self._may_join and not self._is_closing:
            try:
                self._bind_or_connect()
                break
            except OSError as error:
                if error.errno not in _PASSING_ERRORS or time.monotonic() >= end:
                    self._may_join = False
                    logger.info("rank %d: no link to the other ranks of this host: %s", self._rank, error)
                time.sleep(_RETRY_SECONDS)
        self._contribute_again()
        self._documents.ask_again()

    def _bind_or_connect(self) -> None:
        """Become the leader, or a member.

        Raises:
            OSError: Neither is possible; for the moment, if the number is one of `_PASSING_ERRORS`.
        """
        own = _open_sockets(lambda: (socket.socket(socket.AF_UNIX),))[0]
        try:
            own.bind(self._address)
            own.listen(_BACKLOG)
            self._selector.register(own, selectors.EVENT_READ, lambda _event: self._accept(own))
            self._listening, self._connected_at = own, time.monotonic()
        except OSError as error:
            try:
                if error.errno != errno.EADDRINUSE:
                    raise
                own.connect(self._address)
                if _peer_of(own)[1] != os.geteuid():
                    raise PermissionError(errno.EPERM, "a process of another user has taken the name") from error
            except OSError:
                own.close()
                raise
            self._leader, self._pings = _Connection(own, self._selector, self._hear_leader, self._key), 0

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection = _open_sockets(lambda: (listening.accept()[0],))[0]
        except OSError:  # no free file descriptor: the member speaks for itself after some pings
            time.sleep(_TICK_SECONDS)
            return
        with contextlib.suppress(OSError):  # in a sandbox that does not tell who connects
            if _peer_of(connection)[1] == os.geteuid():
                self._members.add(_Connection(connection, self._selector, self._hear_member, self._key))
                self._connected_at = time.monotonic()
                return
        connection.close()

    def _stop_leading(self) -> None:
        """Let another rank lead: free the name, then end the connections."""
        if self._listening is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._listening)
            self._listening.close()
            self._listening = None
        for member in list(self._members):
            member.close()
            self._hear_member(member, None)

    def _begin(self, one: _Round, data: bytes) -> None:
        if self._may_join and self._leader is None and self._listening is None:
            self._join()  # this rank has led, until an error of the store
        if not self._own:
            self._next_ping = time.monotonic() + _PING_SECONDS
        self._own[one.answer] = one, data
        self._contribute(one, data)

    def _contribute(self, one: _Round, data: bytes) -> None:
        """Send what this rank contributes to the leader, unless this rank leads, or the leader is stopped."""
        if self._leader is not None and self._pings < _PINGS_MAX:
            self._leader.send(("begin", one, self._rank, data))
            return
        self.spoken_alone += self._leader is not None
        self._merge(None, one, self._rank, data)

    def _contribute_again(self) -> None:
        """Send again what has no answer yet, but for what this rank speaks for already."""
        for key, (one, data) in self._own.items():
            if key not in self._rounds:
                self._contribute(_Round(one.series, one.answer, is_again=True), data)

    def _end(self, key: str) -> None:
        self._own.pop(key, None)
        if self._leader is not None:
            self._leader.send(("end", key))
        self._forget(None, key)

    def _hear_member(self, member: _Connection, frame: tuple[Any, ...] | None) -> None:
        match frame:
            case ("begin", _Round() as one, int(rank), bytes(data)):
                self._merge(member, one, rank, data)
            case ("end", str(key)):
                self._forget(member, key)
            case ("ping",):
                member.send(("pong",))
            case ("status", int(rank), bytes(data), bool(is_urgent)):
                if is_urgent or member not in self._statuses:
                    self._wake_soon()
                self._statuses[member] = rank, data
            case None:
                self._members.discard(member)
                if self._statuses.pop(member, None) is not None:
                    self._wake_soon()
                for key in list(self._rounds):
                    self._forget(member, key)
        self._documents.hear_member(member.send, frame)

    def _hear_leader(self, leader: _Connection, frame: tuple[Any, ...] | None) -> None:
        self._pings = 0
        self._refusals = self._refusals + 1 if frame is None else 0
        match frame:
            case ("answer", str(key), bytes(data)):
                self._finish(key, data)
            case ("news", rank, seconds, status, found):
                self.news = News(rank, seconds, status, found, time.monotonic())
                self._wake()
            case None if self._leader is leader:
                self._leader = self.news = None
                self._wake()
                time.sleep(_RETRY_SECONDS)  # a process that refuses this rank would be asked without end
                if self._refusals >= _REFUSALS_MAX:
                    self._may_join = False
                    logger.info("rank %d: no link to the other ranks of this host: each connection ended", self._rank)
                self._join()
        self._documents.hear_leader(frame)

    def _tell_leader(self, frame: tuple[Any, ...]) -> None:
        if self._leader is None or self._pings >= _PINGS_MAX:
            self._documents.hear_member(self._documents.hear_leader, frame)
        else:
            self._leader.send(frame)

    def _tell_status(self, frame: tuple[Any, ...], *, is_urgent: bool) -> None:
        if self._leader is not None:
            send = self._leader.send if is_urgent else self._leader.offer
            send(frame)

    def _spread(self, frame: tuple[Any, ...]) -> None:
        for member in self._members:
            member.offer(frame)

    def _wake_soon(self) -> None:
        self._wake_at = min(self._wake_at, time.monotonic() + _STATUS_SECONDS)

    def _merge(self, source: _Connection | None, one: _Round, rank: int, data: bytes) -> None:
        """Take a contribution of a member, or of this rank (None), into the next part of its round."""
        known = self._rounds.setdefault(one.answer, one)
        if not known.contributions:
            known.since = time.monotonic()
        known.is_again |= one.is_again
        known.contributions[rank] = data
        known.sources.add(source)

    def _ask_store(self) -> None:
        """Put the parts to which all have contributed, or that have waited long enough, and look for answers."""
        now, everyone, due = time.monotonic(), {None, *self._members}, list[tuple[_Round, dict[int, bytes]]]()
        has_settled = self._listening is None or now >= self._connected_at + _CONNECT_SECONDS
        for one in self._rounds.values() if not self._is_asking else ():
            is_whole = now >= one.since + _MERGE_SECONDS or (has_settled and one.sources >= everyone)
            if one.contributions and is_whole:
                due.append((one, one.contributions))
                one.told |= one.contributions
                one.contributions, one.pauses = {}, self._pauses(len(one.told))
                one.look_at = now + next(one.pauses)
            elif now >= one.look_at:
                due.append((one, {}))
                one.look_at = now + next(one.pauses)
        if due:
            self._is_asking = True
            answer = self._request(partial(_put_and_look, due))
            answer.add_done_callback(lambda answer: self._order(partial(self._hear_store, due, answer)))

    def _hear_store(self, asked: Sequence[tuple[_Round, object]], answer: Future[dict[str, bytes]]) -> None:
        self._is_asking = False
        error = answer.exception()
        found = answer.result() if error is None else {one.answer: error for one, _ in asked}
        for key, data in found.items():
            self._finish(key, data)

    def _ping(self) -> None:
        """Ask the leader for a sign of life as long as this rank waits for an answer; speak for it without one."""
        now = time.monotonic()
        if now < self._next_ping:
            return
        self._next_ping = now + _PING_SECONDS
        if self._leader is not None and self._own and self._pings < _PINGS_MAX:
            self._pings += 1
            self._leader.send(("ping",))
            if self._pings == _PINGS_MAX:
                self._speak_alone(self._leader)

    def _speak_alone(self, leader: _Connection) -> None:
        log = logger.debug if self.spoken_alone else logger.warning
        log(
            "rank %d: process %d, which speaks to the key-value store for the ranks of this host, has not answered for "
            "%d s; this rank speaks for itself.",
            *(self._rank, leader.pid, _PINGS_MAX * _PING_SECONDS),
        )
        self._contribute_again()

    def _finish(self, key: str, found: bytes | BaseException) -> None:
        """Hand an answer to all that wait for it; or an error of the store to this rank, which lets another lead."""
        if key in self._rounds or key in self._own:  # the answer may come twice, the second time in a later round
            self._documents.forget()
        if one := self._rounds.pop(key, None):
            for member in one.sources:
                if member is not None and isinstance(found, bytes):
                    member.send(("answer", key, found))
        if self._own.pop(key, None) is not None and (awaited := self._awaited.get(key)) is not None:
            awaited.put(found)
        if isinstance(found, BaseException):
            logger.info("rank %d: another rank speaks for this host: %s", self._rank, found)
            self._stop_leading()

    def _forget(self, source: _Connection | None, key: str) -> None:
        if one := self._rounds.get(key):
            one.sources.discard(source)
            if not one.sources:
                del self._rounds[key]


@dataclass(slots=True)
class _Round:
    """Round of a collective operation, as its speaker knows it.

    Attributes:
        series: Series of the parts.
        answer: Key of the answer.
        is_again: True if the same contributions may have been put, by an earlier speaker or over another connection.
        told: Contributions in the parts so far, by rank.
        contributions: Contributions that are in no part yet, by rank.
        since: Moment at which the first of them came.
        sources: Connections of the members that wait for the answer; None for this rank.
        look_at: Moment of the next look for the answer; the first follows the first part.
        pauses: Pauses between the looks after that.
        client: Client over whose connection the parts were put last.
    """

    series: str
    answer: str
    is_again: bool = False
    told: dict[int, bytes] = field(default_factory=dict)
    contributions: dict[int, bytes] = field(default_factory=dict)
    since: float = 0.0
    sources: set[_Connection | None] = field(default_factory=set)
    look_at: float = math.inf
    pauses: Iterator[float] = field(default_factory=lambda: iter(()))
    client: Client | None = None


class _Connection:
    """Connection to another rank of the host, over which pickled frames are sent; never blocks.

    Args:
        own: Socket, which does not block.
        selector: Selector of the thread that uses the connection.
        hear: Called with this connection and each frame; with None when the connection has ended.
        key: Key of the frames: what a process outside the group sends is never unpickled, and ends the connection.
    """

    def __init__(
        self, own: socket.socket, selector: selectors.BaseSelector, hear: Callable[[_Connection, Any], None], key: bytes
    ) -> None:
        """Register the socket."""
        self.pid = _peer_of(own)[0]
        self._own = own
        self._selector = selector
        self._hear = hear
        self._key = key
        self._inbox = bytearray()
        self._outbox: deque[memoryview] = deque()
        selector.register(own, selectors.EVENT_READ, self._serve)

    def send(self, frame: tuple[Any, ...]) -> None:
        """Send a frame, as soon as the other side takes it; nothing if the connection has ended."""
        sealed = frame.sealed if isinstance(frame, SharedFrame) else None
        if sealed is None:
            data = pickle.dumps(tuple(frame))
            sealed = _HEAD.pack(len(data), hmac.digest(self._key, data, "sha256")), data
        if isinstance(frame, SharedFrame):
            frame.sealed = sealed
        self._outbox += map(memoryview, sealed)
        self._flush()

    def offer(self, frame: tuple[Any, ...]) -> None:
        """Send a frame, unless the other side has not taken an earlier one: a later frame will say more."""
        if not self._outbox:
            self.send(frame)

    def close(self) -> None:
        """End the connection."""
        if self._own.fileno() >= 0:
            self._selector.unregister(self._own)
            self._own.close()

    def _serve(self, event: int) -> None:
        if event & selectors.EVENT_WRITE:
            self._flush()
        if event & selectors.EVENT_READ:
            self._receive()

    def _flush(self) -> None:
        if self._own.fileno() < 0:
            return
        try:
            while self._outbox:
                sent = self._own.send(self._outbox[0])
                self._outbox[0] = self._outbox[0][sent:]
                if not self._outbox[0]:
                    self._outbox.popleft()
        except BlockingIOError:
            pass
        except OSError:  # the other side has ended, or a frame is lost: as the next read says
            self._outbox.clear()
            with contextlib.suppress(OSError):
                self._own.shutdown(socket.SHUT_RDWR)
        writes = selectors.EVENT_WRITE if self._outbox else 0
        self._selector.modify(self._own, selectors.EVENT_READ | writes, self._serve)

    def _receive(self) -> None:
        if self._own.fileno() < 0:
            return
        try:
            data = self._own.recv(_READ_BYTES)
            self._inbox += data
            frames = list(self._take_frames())
        except BlockingIOError:
            return
        except Exception:  # noqa: BLE001  # reset by the other side, or not one of our frames
            data, frames = b"", []
        for frame in frames:
            self._hear(self, frame)
        if not data:
            self.close()
            self._hear(self, None)

    def _take_frames(self) -> Iterator[Any]:
        while len(self._inbox) >= _HEAD.size:
            length, seal = _HEAD.unpack_from(self._inbox)
            end = _HEAD.size + length
            if len(self._inbox) < end:
                return
            with memoryview(self._inbox) as whole, whole[_HEAD.size : end] as data:
                if not hmac.compare_digest(seal, hmac.digest(self._key, data, "sha256")):
                    raise ValueError("a frame of a process that is no rank of the group")
                frame = pickle.loads(data)  # noqa: S301  # of a rank of the group
            del self._inbox[:end]
            yield frame


def _put_and_look(due: Sequence[tuple[_Round, dict[int, bytes]]], client: Client) -> dict[str, bytes]:
    """Put the parts of rounds, look for the answers to rounds without a part, and return those found, by key.

    In the thread of the heartbeat's requests, where another connection may be in use since the last time: what went
    over the earlier one may be lost, so that all contributions are put again.
    """
    found = dict[str, bytes]()
    for one, part in due:
        is_other = one.client not in (None, client)
        is_again = one.is_again or is_other
        if (is_again or not part) and (data := client.get(one.answer)):
            found[one.answer] = data
        elif one.sources and (part or is_other):  # some rank has not left the round
            one.client = client
            key = series_key(one.series, client.add(one.series, 1))
            client.put(key, pickle.dumps(one.told if is_other else part))
            if is_again and client.has([one.answer]):  # the round has ended, and the coordinator deletes no more
                client.delete([key, one.series], {one.series: 0})
    return found


def _peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a Unix socket."""
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


def _open_sockets(make: Callable[[], tuple[socket.socket, ...]]) -> tuple[socket.socket, ...]:
    """Return sockets that do not block, and that a child which is forked closes.

    A child lives on when this process has died, and would keep the name, and the members' connections, open.
    """
    with _forking:
        made = make()
        for one in made:
            one.settimeout(0)
        _sockets.update(made)
    return made


def _close_inherited() -> None:
    _forking.release()
    for one in list(_sockets):
        one.close()


_forking = threading.RLock()
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_inherited)
