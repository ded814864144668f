"""Heartbeat of a rank in the key-value store of torch's process group, and the ranks whose heartbeat has stopped.

One thread of each rank publishes the heartbeat and reads those of other ranks, over a connection of its own. It never
blocks: a helper thread makes its requests, so that it sees twice a second how long the store has been silent, and opens
another connection when one is. Clocks of two hosts are never compared: silence is measured by the reader's own
monotonic clock.

    beat/<rank>             status of a rank, put by the rank itself
    beat/by/<rank>          newest statuses of the ranks of one host, put by one of them, which speaks for all

Ranks of one host that are linked (see `host_link`) put the first key only at first, at last, when another rank speaks
for them from then on, and while that rank is silent. A reader that finds there which rank speaks for others reads the
second key, and again the first of those that the second brings nothing new of.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import pickle
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Any, Self, TypeVar

import torch.distributed as dist

from dcp_remote.common.deadline import RetryPolicy, jitter
from dcp_remote.common.threads import WAKE_SECONDS, OneTimeEvent
from dcp_remote.coordination.call_position import position_of
from dcp_remote.coordination.host_link import HostLink, News
from dcp_remote.coordination.key_value import Client, HelperClient, StoreAddress, address_of, require_reachable

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Often enough that all ranks know of a rank's failure within two or three seconds.
HEARTBEAT_SECONDS = 1.0

# First pause between two looks for a key or a store, of ranks that arrive together; each is longer than the one before.
POLLING_SECONDS = 0.005

# A heartbeat costs two operations on one server, which does some 6,800 a second (one client, loopback) and has torch's
# own work to do: at most 2,000 are for heartbeats. Ranks that are spoken for leave their share to the one that speaks.
_RANKS_PER_BEAT_SECOND = 1000

# Time without news of the rank that speaks for this one, after which this rank speaks for itself: so many seconds, or
# heartbeats if that is longer; but no more than a part of the silence that ends the operation, or the operation would
# end because of this rank, and not of the other.
_NEWS_SECONDS = 4.0
_NEWS_BEATS = 2.5
_NEWS_SHARE = 1 / 3

# Ranks without a heartbeat so far are looked for one by one: so many with each of this rank's heartbeats, in turn.
_UNHEARD_PER_BEAT = 512

# One line of an error: 10,000 of them fit into one answer.
_LINE_CHARACTERS_MAX = 160

# Interval at which the thread looks around, whether it waits for the store or for its next heartbeat.
_LOOK_SECONDS = 0.5

# Silence of a connection after which another is opened: after an outage TCP sends again only after a pause as long as
# the outage, up to two minutes. Up to a heartbeat of a rank alone is added, another for each rank, or all ranks of a
# store that is slow would connect at once. Doubled with each connection that is silent as well, so that a host that is
# only stopped gets few; after the last of them the thread waits for it alone.
_SILENT_CONNECTION_SECONDS = 5.0
_SILENT_CONNECTIONS_MAX = 6
# Pause before the next try to reach a host to which there is no way now.
_RECONNECT_SECONDS = 1.0

# Longest time that `close` waits for the thread, which may be stuck in the store.
_CLOSE_SECONDS = 5.0
# Its wait if the store has not answered for `_CLOSE_SECONDS`: the thread is probably stuck.
_CLOSE_SILENT_SECONDS = 0.5
# Part of its wait in which the thread calls `farewell`; the rest is left for the last heartbeat.
_FAREWELL_SHARE = 0.8


def heartbeat_interval_seconds(world_size: int) -> float:
    """Return the seconds between two heartbeats of a rank that is alone on its host, by the number of ranks."""
    return max(HEARTBEAT_SECONDS, world_size / _RANKS_PER_BEAT_SECOND)


class SuspendAwareClock:
    """Monotonic clock that ignores time in which nobody read it, because the process was suspended.

    After SIGSTOP, or minutes in which one C call held the interpreter, all other ranks would seem to have been silent.

    Args:
        gap_seconds_max: Largest time counted between two readings.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, gap_seconds_max: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start at zero."""
        self._gap_seconds_max = gap_seconds_max
        self._clock = clock
        self._lock = threading.Lock()
        self._last = clock()
        self._seconds = 0.0

    def __call__(self) -> float:
        """Return the seconds counted so far; from any thread."""
        with self._lock:
            now = self._clock()
            self._seconds += min(now - self._last, self._gap_seconds_max)
            self._last = now
            return self._seconds


@dataclass(frozen=True, slots=True)
class RankStatus:
    """State that a rank publishes with each heartbeat.

    Attributes:
        count: Heartbeats sent so far, so that the published value changes with each.
        operation: Number of the collective operation that the rank is in, or was in last.
        what: Name of that operation.
        is_inside: True until the rank leaves that operation.
        is_closed: True if this is the rank's last heartbeat.
        note: Activity of the rank, for error messages.
        where: Position of the rank's thread in the code of its user; "" unless another rank asks for it, and while the
            rank is in an operation.
        is_calling: True if that thread is in a call of this package, outside an operation; known as `where` is.
        host: Name of the rank's host, as that host knows it.
        pid: Identifier of the rank's process on that host.
        notices: Announcements of the coordinator to all ranks: a number by name. Empty on other ranks.
        token: Number of this heartbeat, which no other has: not that of an earlier process of the rank, either.
        speaker: Rank that speaks for this one from now on; 0 if this rank speaks for itself alone.
    """

    count: int
    operation: int = 0
    what: str = ""
    is_inside: bool = False
    is_closed: bool = False
    note: str = ""
    where: str = ""
    is_calling: bool = False
    host: str = ""
    pid: int = 0
    notices: Mapping[str, int] = field(default_factory=dict)
    token: int = 0
    speaker: int = 0

    def encode(self) -> bytes:
        """Return the value that is put into the store."""
        return json.dumps(astuple(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> RankStatus:
        """Return the status that `encode` encoded."""
        return cls(*json.loads(data))

    @property
    def process(self) -> str:
        """Process of the rank, as "gpu-07, pid 4711"."""
        return f"{self.host}, pid {self.pid}"


class LivenessMonitor:
    """Time of silence of each watched rank, by the reader's clock. Pure.

    Args:
        ranks: Ranks to watch.
        now: Time at which the watching begins; earlier heartbeats do not count.
    """

    def __init__(self, ranks: Iterable[int], now: float = 0.0) -> None:
        """Count every rank as heard at `now`."""
        self._changed_at = dict.fromkeys(ranks, now)
        self._last: dict[int, RankStatus] = {}

    @property
    def ranks(self) -> list[int]:
        """Watched ranks."""
        return list(self._changed_at)

    def record(self, rank: int, status: RankStatus, now: float) -> None:
        """Record the status that the store has now of a watched rank, which was heard if its status has changed."""
        if rank in self._changed_at and self._last.get(rank) != status:
            self._last[rank] = status
            self._changed_at[rank] = now

    def last(self, rank: int) -> RankStatus | None:
        """Return the last status of a rank; None if there was no heartbeat."""
        return self._last.get(rank)

    def silent_seconds(self, rank: int, now: float) -> float:
        """Return the seconds since the rank's status changed; since the watching began if there was no heartbeat."""
        return now - self._changed_at[rank]


class Heartbeat:
    """Thread that publishes this rank's status from `start` until `close`, and watches others during an operation.

    The thread is a daemon: it keeps no process alive, and ends quietly when the store is gone. A heartbeat costs two
    operations: it sets the rank's status, and reads that of rank 0, the coordinator, which announces what all ranks
    need to know. It costs none on a rank for which another of its host speaks. While the coordinator watches ranks, a
    `multi_get` per thousand hosts and ranks that were heard before is added, and up to 544 operations while 512 ranks
    or more were not. After `close` the last status stays in the store.

    Hooks, queued actions and `farewell` are called in the helper thread that makes the requests. If its connection is
    silent, the helper thread is left behind: its next request raises, and another one does again what had not ended.

    Args:
        store: Store that no other thread uses; all keys in it belong to this heartbeat and its hooks. Or a function
            that returns the store, or None as long as it is not known which store that is: called in the helper thread,
            where it may block, again and again.
        rank: Rank whose heartbeat this is.
        beat_seconds: Seconds between two heartbeats of a rank alone; of one that speaks for several, its part of that.
        address: Address of the store, if it is known before the store is open.
        while_waiting: Called repeatedly in the helper thread as long as there is no store.
        farewell: Called repeatedly at `close`, until it returns True, for four seconds at most.
        look: Called twice a second in the thread, also while the store does not answer; must not block or raise.
        link: Returns the link to the other ranks of the host; None where there is none.
        clock: Monotonic clock, in seconds; for tests.

    Attributes:
        hooks: Functions called after each heartbeat, once the watched ranks have been read; in the helper thread.
        status: Status of this rank, as last noted.
        gone: Error that ended the thread: the host of the store is gone. None while the thread runs.
        trouble: Error that kept the thread from opening another connection last; None while the store answers.
        delay_seconds_max: Delay of a heartbeat, in seconds, beyond which its rank is not just a little late.
        interval_seconds: Seconds between two heartbeats as they are now, of this rank or the one that speaks for it.
        is_asked: True while a rank asks where this one is; then each heartbeat outside of operations says so. On the
            coordinator also while it asks itself.
    """

    def __init__(
        self,
        store: dist.Store | Callable[[], dist.Store | None],
        rank: int,
        *,
        beat_seconds: float = HEARTBEAT_SECONDS,
        address: StoreAddress | None = None,
        while_waiting: Callable[[], None] = lambda: None,
        farewell: Callable[[Client], bool] = lambda _client: True,
        look: Callable[[], None] = lambda: None,
        link: Callable[[], HostLink | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the arguments; `start` starts the thread."""
        self._open_store: Callable[[], dist.Store | None] = store if callable(store) else lambda: store
        self._store: dist.Store | None = None
        self._is_store_open = threading.Event()
        self._rank = rank
        self._beat_seconds = beat_seconds
        self._address = address
        self._while_waiting = while_waiting
        self._farewell = farewell
        self._look_around = look
        self._link = link
        self._clock = clock
        self.delay_seconds_max = max(3 * beat_seconds, 1.0)
        self._process_clock = SuspendAwareClock(self.delay_seconds_max, clock)
        self._answered_at = 0.0
        self._last_answer = clock()
        # Read with each heartbeat alone: while the store does not answer this rank sees no rank, and must blame none.
        self._watch_clock = SuspendAwareClock(self.delay_seconds_max, clock)
        self._watched_at = 0.0
        self._count = 0
        self._answered_count = 0
        self.status = RankStatus(0, host=socket.gethostname(), pid=os.getpid(), token=secrets.randbits(32))
        self._status_lock = threading.Lock()
        self._monitor: LivenessMonitor | None = None
        self._last_known: dict[int, RankStatus] = {}  # of each rank that was ever read
        self._unheard_from = 0
        self._silence_seconds = math.inf
        self._reads_in_vain: dict[int, int] = {}  # by a rank for which another speaks: reads since its status changed
        self.interval_seconds = self._rest_seconds = beat_seconds
        # In the helper thread: status that this rank has told last, if the outbox was emptied since, news in place of
        # what this rank would read itself, and what it has looked for since the last heartbeat.
        self._told, self._has_emptied = self.status, False
        self._news: News | None = None
        self._found: dict[str, bytes] = {}
        self.hooks: list[Callable[[Client], None]] = []
        self._outbox: deque[Callable[[Client], object]] = deque()
        self._requests: deque[tuple[Callable[[Client], Any], Future[Any]]] = deque()
        self._wake, self._is_due = threading.Event(), False
        self._logged: str | None = None
        self.is_asked = False
        self._notices: dict[str, int] = {}
        self._is_closing = self._has_ended = False  # the thread ends, or has ended, and makes no more requests
        self._farewell_end = self._close_end = 0.0
        self._says_goodbye, self._has_news = True, False
        self.gone: Exception | None = None
        self._helper = HelperClient(self._connect_first)
        self._connection = object()  # identity of the connection in use; answers over another raise
        self._heard_at = 0.0  # last answer over that connection, or the moment at which the request began
        self._silent_connections, self._spread_seconds = 0, jitter(0.0, beat_seconds)
        self.trouble: Exception | None = None
        self._run_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # Thread that makes the calls of this rank: the one that began the last operation.
        self._caller = threading.current_thread()

    def start(self) -> Self:
        """Start the thread unless it was started, and return self; may be called again after a failure or Ctrl-C.

        Raises:
            RuntimeError: No thread can be started.
        """
        if self._thread is None:
            self._caller = threading.current_thread()
            thread = threading.Thread(target=self._run, name="dcp_remote-heartbeat", daemon=True)
            thread.start()
            self._thread = thread
            _running.add(self)
        return self

    @property
    def has_started(self) -> bool:
        """True once the thread was started."""
        return self._thread is not None

    @property
    def address(self) -> StoreAddress | None:
        """Address of the store; None if the store has none, or is neither open yet nor known."""
        return self._address if self._store is None else address_of(self._store)

    def client(self) -> Client:
        """Return a client for another thread, whose answers count as contact; blocks if the store does.

        Raises:
            DistNetworkError: The store could not be opened, or is gone.
        """
        self._is_store_open.wait()
        if self._store is None or self.gone is not None:  # to connect anew would take minutes
            raise dist.DistNetworkError(f"The key-value store of the process group is not there: {self.gone}")
        return Client(self._store, self._record_answer)

    def contact_seconds(self) -> float:
        """Return the seconds since the store last answered this process, without time in which it was suspended.

        From any thread; never touches the store.
        """
        return self._process_clock() - self._answered_at

    def unanswered_seconds(self) -> float:
        """Return the seconds since the store last answered this process, with time in which it was suspended."""
        return self._clock() - self._last_answer

    def wake(self) -> None:
        """Let the next heartbeat come at once; from any thread."""
        self._is_due = True
        self._wake.set()

    def request(self, request: Callable[[Client], T]) -> Future[T]:
        """Queue a request that is made between two heartbeats; from any thread, never blocks.

        A request whose connection breaks is made again over the next. Once this heartbeat has ended, the answer is an
        error.
        """
        return self._queue(request, Future())

    def _queue(self, request: Callable[[Client], T], answer: Future[T]) -> Future[T]:
        self._requests.append((request, answer))
        self._wake.set()
        if self._has_ended:
            self._refuse_requests()
        return answer

    def ask(self, request: Callable[[Client], T], look: Callable[[], None]) -> T:
        """Make a request as `request` does, and wait for its answer; as `HelperClient.ask`, from any thread."""
        answer, answered = Future[T](), OneTimeEvent()
        # Before another thread knows of it: Ctrl-C may leave its lock held.
        answer.add_done_callback(lambda _answer: answered.set())
        self._queue(request, answer)
        while not answered.wait(WAKE_SECONDS):
            look()
        return answer.result()

    def set_activity(self, text: str) -> None:
        """Set the activity of this rank, which is published with the next heartbeat."""
        with self._status_lock:
            self.status = replace(self.status, note=one_line(text))

    def enter(self, operation: int, what: str, watched: Iterable[int], *, silence_seconds: float = math.inf) -> None:
        """Publish at once that this rank is in an operation, and watch these ranks from now on.

        Ranks end the operation if one of them, or the store, is silent for `silence_seconds`.
        """
        self._silence_seconds = silence_seconds
        self._monitor = LivenessMonitor(watched, self._watched_at)
        self._caller = threading.current_thread()
        with self._status_lock:
            what = one_line(what)
            self.status = replace(self.status, operation=operation, what=what, is_inside=True, note=what)
        self.wake()

    def renumber(self, operation: int) -> None:
        """Publish at once that the operation has another number than this rank had counted."""
        with self._status_lock:
            self.status = replace(self.status, operation=operation)
        self.wake()

    def leave(self, note: str) -> None:
        """Publish at once that this rank has left the operation, and watch no rank."""
        self._monitor = None
        with self._status_lock:
            self.status = replace(self.status, is_inside=False, note=one_line(note))
        self.wake()

    def last(self, rank: int) -> RankStatus | None:
        """Return the last status of a watched rank in this operation; None if there was no heartbeat."""
        monitor = self._monitor
        return None if monitor is None else monitor.last(rank)

    def last_known(self, rank: int) -> RankStatus | None:
        """Return the last status of a rank in any operation; None if this rank has never read one."""
        return self._last_known.get(rank)

    def silent_ranks(self, seconds: float) -> dict[int, float]:
        """Return the watched ranks that were heard before, but not for so long: by rank, the seconds of silence.

        In the thread of the hooks only.
        """
        monitor = self._monitor
        if monitor is None:
            return {}
        silences = {
            rank: monitor.silent_seconds(rank, self._watched_at) for rank in monitor.ranks if rank in self._last_known
        }
        return {rank: silence for rank, silence in silences.items() if silence >= seconds}

    def enqueue(self, action: Callable[[Client], object]) -> None:
        """Queue an action for the thread, which wakes up at once and does queued actions first, in order.

        Never blocks, never raises. An action whose connection falls silent is done again over the next.
        """
        self._outbox.append(action)
        self.wake()

    def find(self, client: Client, key: str) -> bytes:
        """Return the value of a key that all ranks look for, b"" if it is not there; in the thread of the hooks only.

        Costs one operation; none on a rank for which another speaks that looks for the key as well.
        """
        if self._news is not None and key in self._news.found:
            return self._news.found[key]
        value = self._found[key] = client.get(key)
        return value

    def announce(self, name: str, number: int) -> None:
        """Publish a number to all ranks at once, in the coordinator's `RankStatus.notices`; from any thread."""
        if self._notices.get(name, 0) != number:
            self._notices = {**self._notices, name: number}
            self.wake()

    def announced(self, name: str) -> int:
        """Return the number that the coordinator has announced last, as far as this rank knows; 0 if there is none."""
        status = self._last_known.get(0)
        return 0 if status is None else status.notices.get(name, 0)

    def ask_positions(self, client: Client) -> None:
        """Ask where ranks are that are in no operation: the coordinator asks all others, any other the coordinator."""
        if self._rank == 0:
            self.is_asked = True
            self.announce(_ASKED, 1)
        else:
            client.put(_ASKED_KEY, b"1")

    def stop_asking(self, client: Client) -> None:
        """Take all questions back; on the coordinator."""
        self.announce(_ASKED, 0)
        client.delete([_ASKED_KEY])

    def read(self, client: Client, ranks: Collection[int]) -> dict[int, RankStatus]:
        """Return the status of those ranks that ever had a heartbeat; in the thread of the hooks only."""
        known = self._last_known
        unheard = [rank for rank in ranks if rank not in known]
        # Ranks that are far apart, so that they are of many hosts: one of a host is enough to find the others.
        stride = max(1, math.ceil(len(unheard) / _UNHEARD_PER_BEAT))
        unheard = unheard[self._unheard_from % stride :: stride]
        self._unheard_from += 1
        present = client.present([_status_key(rank) for rank in unheard])
        alone = [rank for rank in ranks if rank in known and not known[rank].speaker]
        self._read_own(client, [*alone, *(rank for rank in unheard if _status_key(rank) in present)])
        before = {rank: known[rank] for rank in ranks if rank in known and known[rank].speaker}
        brought = self._read_spoken(client, {status.speaker for status in before.values()})
        in_vain = self._reads_in_vain
        for rank, status in before.items():
            in_vain[rank] = in_vain.get(rank, 0) + 1 if known[rank] is status else 0
        self._read_own(client, [rank for rank in before if rank not in brought or in_vain[rank] > 1])
        return {rank: known[rank] for rank in ranks if rank in known}

    def _read_own(self, client: Client, ranks: Collection[int]) -> None:
        """Read what ranks have put themselves, which each of them has."""
        values = client.get_many([_status_key(rank) for rank in ranks]) if ranks else []
        for rank, value in zip(ranks, values, strict=True):
            self._take(rank, RankStatus.decode(value), is_own=True)

    def _read_spoken(self, client: Client, speakers: Collection[int]) -> set[int]:
        """Read what ranks have put that speak for others, and return the ranks that they speak for."""
        values = client.get_many([_speaker_key(rank) for rank in speakers]) if speakers else []
        spoken: list[tuple[int, bytes]] = [pair for value in values for pair in pickle.loads(value).items()]  # noqa: S301  # of a rank of this job
        for rank, data in spoken:
            self._take(rank, RankStatus.decode(data), is_own=False)
        return {rank for rank, _ in spoken}

    def _take(self, rank: int, status: RankStatus, *, is_own: bool) -> None:
        """Take a status if it is newer than the last one: only the rank's own tells that its process is another."""
        last = self._last_known.get(rank)
        if last is None or (status.count > last.count if status.token == last.token else is_own):
            self._last_known[rank] = status

    def close(self, seconds: float = math.inf, *, says_goodbye: bool = True, has_news: bool = False) -> None:
        """Publish the last heartbeat and stop the thread; returns in time even if the store is stuck.

        Args:
            seconds: Longest time to wait for the thread; never more than five seconds.
            says_goodbye: Publish that there will be no more heartbeats. Otherwise ranks that watch this one take it for
                a silent rank, unless another heartbeat of this rank begins later; and where it is not known yet which
                store that is, the thread waits until it is, or the process ends.
            has_news: An action that is queued tells other ranks what they wait for: where it is not known yet which
                store that is, the thread looks for it as long as this may take.
        """
        is_unknown = not self._is_store_open.is_set() and not has_news
        is_stuck = is_unknown or self.contact_seconds() >= _CLOSE_SECONDS
        patience_seconds = min(_CLOSE_SILENT_SECONDS if is_stuck else _CLOSE_SECONDS, seconds)
        self._says_goodbye, self._has_news = says_goodbye, has_news
        self._farewell_end = self._clock() + _FAREWELL_SHARE * patience_seconds
        self._close_end = self._clock() + patience_seconds
        self._is_closing = True
        self.wake()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(patience_seconds)
        if says_goodbye or self._is_store_open.is_set():
            _running.discard(self)

    # ---- in the thread

    def _run(self) -> None:
        if not self._run_lock.acquire(blocking=False):
            return  # Ctrl-C interrupted an earlier `start` after its thread had begun
        try:
            while not self._is_closing:
                self._ask(self._beat)
                self._rest(self._rest_seconds)
            self._ask(self._say_goodbye)
        except _ClosedError:
            self._helper.abandon()  # the store does not answer
        except Exception as error:  # noqa: BLE001  # the store is gone; callers see that in `gone`
            self.gone = error
            logger.debug("rank %d: heartbeat ended, the key-value store is gone: %s", self._rank, error)
        finally:
            self._is_store_open.set()
            self._helper.close()
            self._has_ended = True
            self._refuse_requests()

    def _refuse_requests(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                _, answer = self._requests.popleft()
                answer.set_exception(dist.DistNetworkError(str(self.gone or "The heartbeat was closed.")))

    def _rest(self, seconds: float) -> None:
        """Wait for some seconds or until a heartbeat is due; make requests and look around meanwhile."""
        end = time.monotonic() + seconds
        if self._requests and not self._is_closing:  # also where the next heartbeat is due
            self._ask(self._make_requests)
        while (left_seconds := end - time.monotonic()) > 0 and not (self._is_due or self._is_closing):
            if self._requests:
                self._ask(self._make_requests)
            else:
                self._wake.wait(min(left_seconds, _LOOK_SECONDS))
                self._wake.clear()
                self._look()

    def _look(self) -> None:
        self._process_clock()
        self._look_around()

    def _ask(self, request: Callable[[Client], None]) -> None:
        """Make requests in the helper thread; over another connection if the one in use falls silent or breaks.

        Raises:
            _ClosedError: The time of `close` is over.
            Exception: The store is gone.
        """
        has_failed = False
        while True:
            self._heard_at = self._process_clock()
            try:
                self._helper.ask(request, self._look_while_waiting)
            except _SilentConnectionError:
                self._silent_connections += 1
            except ConnectionRefusedError:
                raise
            except (OSError, dist.DistError) as error:
                if self._answered_count == 0 or self.address is None:
                    raise
                self.trouble = error
                if has_failed:
                    self._wait_to_reconnect()
                has_failed = True
            else:
                self._silent_connections = 0
                return
            self._helper.abandon()
            self._connection = object()
            self._helper = HelperClient(partial(self._connect_again, self._connection))

    def _look_while_waiting(self) -> None:
        self._look()
        # A rank that leaves without a word waits for the store that the others use.
        may_leave = self._says_goodbye or self._store is not None
        if self._is_closing and may_leave and self._clock() >= self._close_end:
            raise _ClosedError
        seconds = (_SILENT_CONNECTION_SECONDS + self._spread_seconds) * 2**self._silent_connections
        is_silent = self._process_clock() - self._heard_at >= seconds
        may_connect = self._answered_count > 0 and self._silent_connections < _SILENT_CONNECTIONS_MAX
        if is_silent and may_connect and self.address is not None:
            raise _SilentConnectionError

    def _wait_to_reconnect(self) -> None:
        end = time.monotonic() + _RECONNECT_SECONDS
        while time.monotonic() < end:
            self._look()
            if self._is_closing and self._clock() >= self._close_end:
                raise _ClosedError
            time.sleep(_LOOK_SECONDS)

    # ---- in the helper thread

    def _connect_first(self) -> Client:
        self._store = self._wait_for_store()
        client = Client(self._store, partial(self._record_own_answer, self._connection))
        self._is_store_open.set()
        return client

    def _wait_for_store(self) -> dist.Store:
        """Return the store, once it is known.

        Raises:
            _ClosedError: This heartbeat was closed before; with news, the time of `close` is over.
        """
        first_seconds = POLLING_SECONDS * max(1.0, self._beat_seconds / HEARTBEAT_SECONDS)  # many ranks look together
        pauses = RetryPolicy(first_seconds, max(first_seconds, self._beat_seconds)).growing_delays()
        while (store := self._open_store()) is None:
            may_wait = not self._says_goodbye or (self._has_news and self._clock() < self._close_end)
            if self._is_closing and not may_wait:
                raise _ClosedError
            self._record_answer()
            self._while_waiting()
            self._wake.wait(next(pauses))
            self._wake.clear()
        return store

    def _connect_again(self, connection: object) -> Client:
        """Return a client over another connection to the same store.

        Raises:
            OSError: There is no way to the host now, or its process is gone (`ConnectionRefusedError`).
        """
        assert self._store is not None, "it has answered"
        address = address_of(self._store)
        assert address is not None, "only a TCPStore is connected again"
        require_reachable(address)
        client = Client(self._store, partial(self._record_own_answer, connection))
        # Another job may have taken the place of this one, at the same address: this rank must not appear in it.
        value = client.get(_status_key(self._rank))
        if not value or RankStatus.decode(value).token != self.status.token:
            raise ConnectionRefusedError(f"Another key-value store answers at {address}: this job's has ended.")
        return client

    def _beat(self, client: Client) -> None:
        self._is_due = False
        # Read before the outbox is emptied: a rank that reads that this one has left finds what it told before leaving.
        status, began_at = self.status, self._clock()
        self._empty_outbox(client)
        is_asked = self.is_asked and not status.is_inside
        where, is_calling = position_of(self._caller) if is_asked else ("", False)
        link, news = self._find_link()
        others = {} if link is None else link.statuses
        speaker = self._rank if others else 0 if news is None else news.leader
        status = self._number(replace(status, where=one_line(where), is_calling=is_calling, speaker=speaker))
        data, told = status.encode(), self._told
        if others:
            client.put(_speaker_key(self._rank), pickle.dumps({**others, self._rank: data}))
        # What the outbox has put, and a first status, must be there before another rank publishes this status.
        is_own = not speaker or speaker != told.speaker or self._has_emptied
        if is_own:
            client.put(_status_key(self._rank), data)
        was_asked, last_news, self._found = self.is_asked, self._news, {}
        self._news = None if is_own or others else news
        if self._news is None:
            self.is_asked = self._read_others(client)
        elif self._news is not last_news:
            self.is_asked = self._read_news(self._news)
        if self.is_asked and not was_asked:
            self.wake()  # the next heartbeat, which has the position, follows at once
        self._answered_count, self._told, self._has_emptied = self._count, status, False
        for hook in tuple(self.hooks):
            self._call(hook, client)
        self.interval_seconds = self._rest_seconds = self._count_interval(1 + len(others))
        if link is not None and others:
            coordinator = self._last_known.get(0)
            # While the store is slow, members that each speak for themselves would keep it slow.
            slow_seconds = min(self.interval_seconds + self._clock() - began_at, self._beat_seconds)
            seconds = max(self.interval_seconds, slow_seconds)
            link.spread(seconds, b"" if coordinator is None else coordinator.encode(), self._found)
        elif link is not None:
            operation, is_inside = status.operation, status.is_inside
            link.tell(data, is_urgent=(operation, is_inside) != (told.operation, told.is_inside))
            if news is not None:
                self.interval_seconds = news.seconds
                self._rest_seconds = self._end_of(news) - time.monotonic()

    def _find_link(self) -> tuple[HostLink | None, News | None]:
        """Return the link to the other ranks of this host, and the leader's news if there are and they are fresh."""
        link = self._link()
        if link is not None and not link.start():
            link = None
        news = None if link is None else link.news
        is_fresh = news is not None and time.monotonic() < self._end_of(news)
        return link, news if is_fresh else None

    def _end_of(self, news: News) -> float:
        """Return the moment as of which this rank speaks for itself, unless there are other news."""
        patience_seconds = max(_NEWS_SECONDS, _NEWS_BEATS * news.seconds)
        return news.at + min(patience_seconds, _NEWS_SHARE * self._silence_seconds)

    def _count_interval(self, ranks: int) -> float:
        """Return the seconds to the next heartbeat, which speaks for so many ranks; or the usual on rank 0."""
        if self._rank == 0 and self._last_known:
            speakers = {status.speaker or rank for rank, status in self._last_known.items()}
            ranks = len(self._last_known) // len(speakers)
        return max(min(HEARTBEAT_SECONDS, self._beat_seconds), self._beat_seconds / ranks)

    def _number(self, status: RankStatus) -> RankStatus:
        self._count += 1
        return replace(status, count=self._count, notices=self._notices)

    def _read_others(self, client: Client) -> bool:
        """Read the statuses of the coordinator and of watched ranks; return whether this rank is asked where it is."""
        # Each heartbeat needs an answer: a stopped host takes what is put, and gives none.
        is_coordinator, monitor = self._rank == 0, self._monitor
        is_asked = is_coordinator and (client.has([_ASKED_KEY]) or self._notices.get(_ASKED, 0) > 0)
        watched = [] if monitor is None else monitor.ranks
        self._watched_at = self._watch_clock()
        for rank, status in self.read(client, watched if is_coordinator else {0, *watched}).items():
            if monitor is not None:
                monitor.record(rank, status, self._watched_at)
        return is_asked if is_coordinator else self.announced(_ASKED) > 0

    def _read_news(self, news: News) -> bool:
        """Take what another rank has read of the coordinator as read by this one, as `_read_others` does."""
        monitor = self._monitor
        self._record_answer()
        self._watched_at = self._watch_clock()
        if news.status:
            self._take(0, RankStatus.decode(news.status), is_own=True)
            if monitor is not None:
                monitor.record(0, self._last_known[0], self._watched_at)
        return self.announced(_ASKED) > 0

    def _empty_outbox(self, client: Client) -> None:
        while self._outbox:
            self._has_emptied = True
            action = self._outbox[0]
            self._call(action, client)
            if self._outbox[0] is action:
                self._outbox.popleft()

    def _make_requests(self, client: Client) -> None:
        self._empty_outbox(client)
        while self._requests:
            request, answer = asked = self._requests[0]
            try:
                tell = partial(answer.set_result, request(client))
            except dist.DistNetworkError:
                raise
            except BaseException as error:  # noqa: BLE001  # raised where the answer is awaited
                tell = partial(answer.set_exception, error)
            with contextlib.suppress(ValueError):  # it was answered over another connection meanwhile
                self._requests.remove(asked)
                tell()

    def _call(self, hook: Callable[[Client], object], client: Client) -> None:
        try:
            hook(client)
        except dist.DistNetworkError:
            raise
        except Exception as error:
            logged, self._logged = self._logged, repr(error)
            if logged != self._logged:  # once, not with every heartbeat
                logger.exception("rank %d: a function called with the heartbeat failed", self._rank)

    def _say_goodbye(self, client: Client) -> None:
        own_key = _status_key(self._rank)
        self._empty_outbox(client)
        # Ranks for which `farewell` waits may wait for an announcement.
        client.put(own_key, self._number(self.status).encode())
        while not self._farewell(client) and self._clock() < self._farewell_end:
            time.sleep(0.02)
        note = "closed" if self._says_goodbye else self.status.note
        last = replace(self.status, is_inside=False, is_closed=self._says_goodbye, note=note)
        client.put(own_key, self._number(last).encode())
        client.has([own_key])  # its answer says that the status has arrived

    def _record_answer(self) -> None:
        self._answered_at, self._last_answer = self._process_clock(), self._clock()

    def _record_own_answer(self, connection: object) -> None:
        if connection is not self._connection:
            raise dist.DistNetworkError("This connection was silent for long, and another has taken its place.")
        self._record_answer()
        self._heard_at, self.trouble = self._answered_at, None


class _SilentConnectionError(Exception):
    """The connection in use has not answered for long: another is opened."""


class _ClosedError(Exception):
    """The heartbeat is closed, and the store does not answer."""


_running: weakref.WeakSet[Heartbeat] = weakref.WeakSet()


def _close_all() -> None:
    """Stop all threads: one that returns from C++ while the interpreter shuts down takes the process with it."""
    for heartbeat in list(_running):
        heartbeat.close()


# Registered on import and not by the first heartbeat: functions registered later, as by a manager, run before this one
# and still need the heartbeat for the last save.
atexit.register(_close_all)


def read_statuses(client: Client, ranks: Iterable[int]) -> dict[int, RankStatus]:
    """Return the last status of those ranks that ever had a heartbeat."""
    keys = {_status_key(rank): rank for rank in ranks}
    return {keys[key]: RankStatus.decode(value) for key, value in client.get_present(list(keys)).items()}


# Exists while a rank asks where the coordinator is; and the coordinator's announcement that it asks the others.
_ASKED_KEY = "beat/asked"
_ASKED = "asked"


def _status_key(rank: int) -> str:
    return f"beat/{rank}"


def _speaker_key(rank: int) -> str:
    return f"beat/by/{rank}"


def one_line(text: str, characters_max: int = _LINE_CHARACTERS_MAX) -> str:
    """Return the text on one line, cut to a length: by default to that which errors and heartbeats take."""
    line = " ".join(text.split())
    return line if len(line) <= characters_max else f"{line[:characters_max]}…"
