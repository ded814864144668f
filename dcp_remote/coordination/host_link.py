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
- A connection to the store that breaks, or is silent for long: the leader puts the parts again, over another.
- A system without abstract sockets, or a name that a process of another user has bound: each rank speaks for itself.

So a rank may be in two parts of a round, with the same bytes, and a number of a part may be taken and never used.
"""

from __future__ import annotations

import atexit
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist

from dcp_remote.common.deadline import jitter
from dcp_remote.coordination.host_documents import HostDocuments, SharedFrame
from dcp_remote.coordination.key_value import Client

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

# Longest wait of `close` for each of the two threads.
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

    Costs one thread, and another on a rank that speaks to the store. A leader speaks for its members whether its own
    rank takes part in a round or not, until it is closed.

    Args:
        name: Name of the link, the same on all ranks of a group; only they know it, and seal all frames with it.
        rank: Rank of this process, within the group.
        connect: Returns a client of the store; called in a thread of the link.
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
        connect: Callable[[], Client],
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
        self._speaker = _Speaker(connect, pauses, lambda *found: self._order(partial(self._finish, *found)))
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[tuple[str, bytes | Exception]] = queue.SimpleQueue()
        self._awaited: set[str] = set()
        self._answers: dict[str, bytes | Exception] = {}
        self._is_closing = False
        self._start_lock, self._run_lock = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._selector = selectors.PollSelector()  # epoll would be shared with a child that is forked
        self._wakers: tuple[socket.socket, ...] = ()  # the thread wakes up when something is sent over the first
        # In the thread of the link from here on. Contributions of this rank that have no answer yet, by its key.
        self._own: dict[str, tuple[_Round, bytes]] = {}
        self._rounds: dict[str, _Round] = {}  # that this rank speaks for
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
                _links.add(self)
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

    def begin(self, slots: str, parts: str, answer: str, data: bytes) -> bool:
        """Contribute to a round; return False if this rank must speak for itself, as `start` says.

        Args:
            slots: Key of the counter that numbers the parts of the round.
            parts: Prefix of the parts: part n, a pickled dictionary of contributions by rank, is put at `<parts>/<n>`.
            answer: Key of the answer.
            data: Contribution of this rank.
        """
        if not self.start():
            return False
        self._awaited.add(answer)
        self._order(partial(self._begin, _Round(slots, parts, answer), data))
        return True

    def answer(self, key: str) -> bytes | None:
        """Return the answer of a round that was begun, once; None as long as there is none.

        Raises:
            Exception: This rank speaks for its host or itself, and the store raised this; or the link's thread failed.
        """
        while not self._arrived.empty():
            self.wait(0.0)
        found = self._answers.pop(key, self.failure)
        if isinstance(found, Exception):
            raise found
        return found

    def wait(self, seconds: float) -> None:
        """Wait for some seconds, or until an answer comes."""
        with contextlib.suppress(queue.Empty):
            key, found = self._arrived.get(timeout=seconds)
            if key in self._awaited:
                self._answers[key] = found

    def end(self, key: str) -> None:
        """Stop waiting for an answer that has not come."""
        self._awaited.discard(key)
        self._answers.pop(key, None)
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
        self._speaker.close()
        _links.discard(self)

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
                self._put_parts()
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
        return _PING_SECONDS if self._rounds or (self._leader is not None and self._own) else None

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
                self._contribute(_Round(one.slots, one.parts, one.answer, is_again=True), data)

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
            known.since, known.is_again = time.monotonic(), one.is_again
        known.contributions[rank] = data
        known.sources.add(source)

    def _put_parts(self) -> None:
        """Put the parts to which all have contributed, or that have waited long enough."""
        now, everyone = time.monotonic(), {None, *self._members}
        has_settled = self._listening is None or now >= self._connected_at + _CONNECT_SECONDS
        for one in self._rounds.values():
            is_due = now >= one.since + _MERGE_SECONDS or (has_settled and one.sources >= everyone)
            if one.contributions and is_due:
                one.told |= one.contributions
                try:
                    self._speaker.put(one)
                except RuntimeError as error:  # no thread can be started
                    self._order(partial(self._finish, one.answer, error))
                one.contributions = {}

    def _ping(self) -> None:
        """Ask the leader for a sign of life as long as this rank waits for an answer; speak for it without one."""
        now = time.monotonic()
        if now < self._next_ping:
            return
        self._next_ping = now + _PING_SECONDS
        self._speaker.look()
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

    def _finish(self, key: str, found: bytes | Exception | None) -> None:
        """Hand an answer to all that wait for it; or an error of the store to this rank, which lets another lead."""
        if found is None:  # the connection was lost, and parts may be
            if one := self._rounds.get(key):
                one.contributions, one.is_again = one.told | one.contributions, True
            return
        if key in self._rounds or key in self._own:  # the answer may come twice, the second time in a later round
            self._documents.forget()
        if one := self._rounds.pop(key, None):
            self._speaker.forget(key)
            for member in one.sources:
                if member is not None and isinstance(found, bytes):
                    member.send(("answer", key, found))
        if self._own.pop(key, None) is not None:
            self._arrived.put((key, found))
        if isinstance(found, Exception):
            logger.info("rank %d: another rank speaks for this host: %s", self._rank, found)
            self._stop_leading()

    def _forget(self, source: _Connection | None, key: str) -> None:
        if one := self._rounds.get(key):
            one.sources.discard(source)
            if not one.sources:
                del self._rounds[key]
                self._speaker.forget(key)


@dataclass(slots=True)
class _Round:
    """Round of a collective operation, as its speaker knows it.

    Attributes:
        slots: Key of the counter of parts.
        parts: Prefix of the keys of parts.
        answer: Key of the answer.
        is_again: True if the same contributions may have been put, by an earlier speaker or over another connection.
        told: Contributions in the parts so far, by rank.
        contributions: Contributions that are in no part yet, by rank.
        since: Moment at which the first of them came.
        sources: Connections of the members that wait for the answer; None for this rank.
    """

    slots: str
    parts: str
    answer: str
    is_again: bool = False
    told: dict[int, bytes] = field(default_factory=dict)
    contributions: dict[int, bytes] = field(default_factory=dict)
    since: float = 0.0
    sources: set[_Connection | None] = field(default_factory=set)


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


class _Speaker:
    """Thread that puts parts into the store and polls for the answers; started by the first part.

    Args:
        connect: Returns a client of the store.
        pauses: Returns the pauses between two looks for an answer, in seconds, by the number of ranks it is for.
        deliver: Called with the key of an answer and the answer, or the error of the store; None if the connection was
            lost, and the parts are to be put again.
    """

    def __init__(
        self,
        connect: Callable[[], Client],
        pauses: Callable[[int], Iterator[float]],
        deliver: Callable[[str, bytes | Exception | None], object],
    ) -> None:
        """Start nothing."""
        self._connect = connect
        self._pauses = pauses
        self._deliver = deliver
        self._client: Client | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Next look for each answer, and the pauses after it.
        self._looks: dict[str, tuple[float, Iterator[float]]] = {}
        # Looks from outside at the request under way, and their number beyond which the connection is silent. It is
        # another for each host, or all hosts of a store that is slow would connect at once.
        self._unanswered, self._unanswered_max = -math.inf, jitter(_PINGS_MAX, 2 * _PINGS_MAX)
        self._broken_by: Exception | None = None  # error of the last connection, until one answers

    def put(self, one: _Round) -> None:
        """Put the next part of a round, and poll for the answer until it comes, or is forgotten."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="dcp_remote-host-store", daemon=True)
            thread.start()
            self._thread = thread
        self._jobs.put(partial(self._put, one, one.contributions, self._pauses(len(one.told)), is_again=one.is_again))

    def forget(self, answer: str) -> None:
        """Poll for an answer no longer."""
        self._jobs.put(lambda: self._looks.pop(answer, None) and None)

    def look(self) -> None:
        """Break a silent connection, later each time; called once a second, which a stopped process does not do."""
        client, self._unanswered = self._client, self._unanswered + 1
        if client is not None and self._unanswered > self._unanswered_max:
            self._unanswered_max *= 2
            client.shut_down()

    def close(self) -> None:
        """End the thread, which may wait for the store."""
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
            client, self._client = self._client, None  # whose connection would last as long as this object
            if self._thread.is_alive() and client is not None:
                client.shut_down()

    def _run(self) -> None:
        while True:
            due = min((due for due, _ in self._looks.values()), default=None)
            job: Callable[[], None] | None = self._look
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
            if job is None:
                return
            self._unanswered = 0
            try:
                job()
            except Exception as error:  # noqa: BLE001  # raised where the answer is awaited
                self._fail(error)
            self._unanswered = -math.inf

    def _fail(self, error: Exception) -> None:
        """Open another connection for the parts, once there is a way to the host; give up if the store has ended."""
        looks, self._looks, client, self._client = self._looks, {}, self._client, None
        was_broken = self._broken_by is not None
        if client is not None:
            self._connect, self._broken_by = client.reopen, error
        is_gone = self._broken_by is None or isinstance(error, ConnectionRefusedError)
        is_lost = not is_gone and isinstance(error, (OSError, dist.DistNetworkError))
        if is_lost and was_broken:
            time.sleep(_PING_SECONDS)
        for answer in looks:
            self._deliver(answer, None if is_lost else self._broken_by or error)

    def _put(self, one: _Round, part: dict[int, bytes], pauses: Iterator[float], *, is_again: bool) -> None:
        self._looks[one.answer] = time.monotonic() + next(pauses), pauses
        client = self._client = self._client or self._connect()
        if not (is_again and client.has([one.answer])):
            key = f"{one.parts}/{client.add(one.slots, 1)}"
            self._unanswered = 0
            client.put(key, pickle.dumps(part))
            self._unanswered = 0
            if is_again and client.has([one.answer]):  # the round has ended, and the coordinator deletes no more
                client.delete([key, one.slots], {one.slots: 0})

    def _look(self) -> None:
        assert self._client is not None, "it has put a part"
        for answer, (due, pauses) in list(self._looks.items()):
            if due <= time.monotonic():
                self._looks[answer] = time.monotonic() + next(pauses), pauses
                data = self._client.get(answer)
                self._unanswered = 0
                self._unanswered_max, self._broken_by = jitter(_PINGS_MAX, 2 * _PINGS_MAX), None
                if data:
                    del self._looks[answer]
                    self._deliver(answer, data)


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


def _close_all() -> None:
    for link in list(_links):
        link.close()


_forking = threading.RLock()
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_links: weakref.WeakSet[HostLink] = weakref.WeakSet()
os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_inherited)
atexit.register(_close_all)
