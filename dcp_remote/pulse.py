"""A heartbeat of each rank in the key-value store of torch's process group, and who is silent there.

One thread of each rank beats, watches the others and reports, with a connection of its own; how long the store has been
silent can be seen from any other thread without touching it. No clocks of two hosts are ever compared: silence is what
the reader's own monotonic clock says it is.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch.distributed as dist

from dcp_remote.key_value import Client

logger = logging.getLogger(__name__)

# Often enough that a rank's failure is known to all in two or three seconds.
BEAT_SECONDS = 1.0

# A beat of every rank is about three operations on one server, which does some 6,800 a second (one client, loopback)
# and has torch's own work to do: at 10,000 ranks a beat every ten seconds is 3,000 a second.
_RANKS_PER_BEAT_SECOND = 1000

# Ranks not heard of yet are asked for one by one: so many a beat, in turn.
_UNHEARD_PER_BEAT = 512

# A line in an error, and 10,000 of them in one answer.
_LINE_CHARACTERS_MAX = 160

# What the thread gets to say goodbye, when nobody can know whether it is stuck in the store.
_CLOSE_SECONDS = 5.0


def beat_seconds_of(world_size: int) -> float:
    """How often each of so many ranks beats."""
    return max(BEAT_SECONDS, world_size / _RANKS_PER_BEAT_SECOND)


class Awake:
    """Seconds for which this process was awake: a clock that stands still while nobody reads it.

    After SIGSTOP, or minutes in which one C call held the interpreter, everybody else seems to have been silent.

    Args:
        gap_seconds_max: What is counted at most between two readings.
        clock: Monotonic, in seconds.
    """

    def __init__(self, gap_seconds_max: float, clock: Callable[[], float] = time.monotonic) -> None:
        """See the class."""
        self._gap_seconds_max = gap_seconds_max
        self._clock = clock
        self._lock = threading.Lock()
        self._last = clock()
        self._seconds = 0.0

    def __call__(self) -> float:
        """The reading, from any thread."""
        with self._lock:
            now = self._clock()
            self._seconds += min(now - self._last, self._gap_seconds_max)
            self._last = now
            return self._seconds


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank last said of itself.

    Attributes:
        count: Of its beats; the value changes with each.
        joint: Number of the last thing that it does or did together with the others.
        what: What that is.
        inside: Whether it still does.
        closed: It will not beat any more.
        note: What it is doing.
    """

    count: int
    joint: int = 0
    what: str = ""
    inside: bool = False
    closed: bool = False
    note: str = ""

    def encode(self) -> bytes:
        """As it stands in the store."""
        return json.dumps([self.count, self.joint, self.what, self.inside, self.closed, self.note]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Beat:
        """What `encode` made."""
        count, joint, what, inside, closed, note = json.loads(data)
        return cls(int(count), int(joint), str(what), bool(inside), bool(closed), str(note))


class Watch:
    """Who is silent, and since when, by one reader's clock. Pure.

    Args:
        ranks: Who is watched.
        now: When the watching begins. What was heard of before then does not count.
    """

    def __init__(self, ranks: Iterable[int], now: float = 0.0) -> None:
        """See the class."""
        self._since = dict.fromkeys(ranks, now)
        self._last: dict[int, Beat] = {}

    @property
    def ranks(self) -> list[int]:
        """Who is watched."""
        return list(self._since)

    def see(self, rank: int, beat: Beat, now: float) -> None:
        """What stands in the store now."""
        if self._last.get(rank) != beat:
            self._last[rank] = beat
            self._since[rank] = now

    def last(self, rank: int) -> Beat | None:
        """The last beat; None if there never was one."""
        return self._last.get(rank)

    def silent_seconds(self, rank: int, now: float) -> float:
        """For how long its value has not changed; if there is none, since the watching began."""
        return now - self._since[rank]


class Pulse:
    """A thread that beats for this rank, from `start` until `close`, and watches others while a joint is under way.

    A daemon: it keeps no process alive, and ends quietly when the store has gone. A beat costs a `set` and a `check`,
    and while it watches, a `check` or `multi_get` per thousand ranks. A closed one leaves its last beat in the store.

    Args:
        store: Reached by no other thread; the keys below it are this pulse's, and those of its hooks. Or what gives
            it, called once in the thread, where it may block.
        rank: Whose heartbeat this is.
        beat_seconds: How often.
        farewell: Called over and over in the thread when it closes, until it returns True, for five seconds at most.
        clock: For tests.
    """

    def __init__(
        self,
        store: dist.Store | Callable[[], dist.Store],
        rank: int,
        *,
        beat_seconds: float = BEAT_SECONDS,
        farewell: Callable[[Client], bool] = lambda _client: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """See the class."""
        self._give: Callable[[], dist.Store] = store if callable(store) else lambda: store
        self._store: dist.Store | None = None
        self._given = threading.Event()
        self._rank = rank
        self._beat_seconds = beat_seconds
        self._farewell = farewell
        self._clock = clock
        # Who does not beat for so long is not just a little late.
        self.patience_seconds = max(3 * beat_seconds, 1.0)
        self._awake = Awake(self.patience_seconds, clock)
        self._contact = 0.0
        # Runs in the thread alone: while that is stuck in the store, it sees nobody, and blames nobody.
        self._watching = Awake(self.patience_seconds, clock)
        self._watched = 0.0
        self._count = 0
        self._now = Beat(0)
        self._now_lock = threading.Lock()
        self._watch: Watch | None = None
        self._known: set[int] = set()
        self._unheard_from = 0
        self._hooks: list[Callable[[Client], None]] = []
        self._outbox: deque[Callable[[Client], None]] = deque()
        self._wake = threading.Event()
        self._told: str | None = None
        self._closing = False
        self._gone: Exception | None = None
        self._begun = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Begin to beat, if that has not begun: itself. May be called again after Ctrl-C, or without a thread.

        Raises:
            RuntimeError: No thread can be started.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="dcp_remote pulse", daemon=True)
            thread.start()
            self._thread = thread
            _beating.add(self)
        return self

    @property
    def gone(self) -> Exception | None:
        """Why the thread ended by itself: the store's host is no more. None while it runs."""
        return self._gone

    @property
    def last_note(self) -> str:
        """What this rank is doing."""
        return self._now.note

    def client(self) -> Client:
        """A connection for another thread, which counts as contact, too; connects, and blocks if the store does."""
        self._given.wait()
        if self._store is None:
            raise dist.DistNetworkError(f"The ranks could not meet in the store of their group: {self._gone}")
        return Client(self._store, self._answered)

    def contact_seconds(self) -> float:
        """How long ago the store last answered anybody here, not counting time in which this process was stopped.

        From any thread; never touches the store.
        """
        return self._awake() - self._contact

    def note(self, text: str) -> None:
        """What this rank is doing; goes with the next beat."""
        with self._now_lock:
            self._now = replace(self._now, note=line_of(text))

    def enter(self, joint: int, what: str, watched: Iterable[int]) -> None:
        """Something joint begins: tell it at once, and watch these ranks from now on."""
        self._watch = Watch(watched, self._watched)
        with self._now_lock:
            self._now = Beat(0, joint, line_of(what), inside=True, note=line_of(what))
        self._wake.set()

    def move(self, joint: int) -> None:
        """It has another number than was thought: tell it at once."""
        with self._now_lock:
            self._now = replace(self._now, joint=joint)
        self._wake.set()

    def leave(self, note: str) -> None:
        """It is over for this rank: tell it at once, and watch nobody."""
        self._watch = None
        with self._now_lock:
            self._now = replace(self._now, inside=False, note=line_of(note))
        self._wake.set()

    def last(self, rank: int) -> Beat | None:
        """The last beat of a rank that is watched; None if it was never heard of."""
        watch = self._watch
        return None if watch is None else watch.last(rank)

    def silent(self, seconds: float) -> dict[int, float]:
        """Which of the watched ranks have been heard of before, and not for so long: for how long. In the thread."""
        watch = self._watch
        if watch is None:
            return {}
        silences = {rank: watch.silent_seconds(rank, self._watched) for rank in watch.ranks if rank in self._known}
        return {rank: silence for rank, silence in silences.items() if silence >= seconds}

    def tell(self, action: Callable[[Client], None]) -> None:
        """Do something in the thread, at once; never blocks, never fails. Done before anything else, in order."""
        self._outbox.append(action)
        self._wake.set()

    def add_hook(self, hook: Callable[[Client], None]) -> None:
        """Call something in the thread after each beat, when those that are watched have been looked at."""
        self._hooks = [*self._hooks, hook]

    def remove_hook(self, hook: Callable[[Client], None]) -> None:
        """Do not call it any more."""
        self._hooks = [one for one in self._hooks if one != hook]

    def read(self, client: Client, ranks: Sequence[int]) -> dict[int, Beat]:
        """The beats of those ranks that have ever been heard of; in the thread."""
        unheard = [rank for rank in ranks if rank not in self._known]
        if len(unheard) > _UNHEARD_PER_BEAT:
            self._unheard_from %= len(unheard)
            unheard = (unheard[self._unheard_from :] + unheard)[:_UNHEARD_PER_BEAT]
            self._unheard_from += _UNHEARD_PER_BEAT
        present = client.present([_beat_key(rank) for rank in unheard])
        self._known.update(rank for rank in unheard if _beat_key(rank) in present)
        heard = [rank for rank in ranks if rank in self._known]
        values = client.get_many([_beat_key(rank) for rank in heard])
        return {rank: Beat.decode(value) for rank, value in zip(heard, values, strict=True)}

    def close(self, seconds: float = math.inf) -> None:
        """Say goodbye, and stop; at most some seconds later, also if the store is stuck.

        Args:
            seconds: At most, if that is less.
        """
        _beating.discard(self)
        self._closing = True
        self._wake.set()
        if self._thread is not None and threading.current_thread() is not self._thread:
            patience = 2 * _CLOSE_SECONDS if self.contact_seconds() < _CLOSE_SECONDS else 0.5
            self._thread.join(min(patience, seconds))

    # ---- in the thread

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return  # another has begun
        try:
            self._store = self._give()
            self._given.set()
            client = self.client()
            while not self._closing:
                self._beat(client)
                self._wake.wait(self._beat_seconds)
                self._wake.clear()
            self._say_goodbye(client)
        except Exception as error:  # noqa: BLE001  # the store has gone, which whoever needs it is told by `gone`
            self._gone = error
            self._given.set()
            logger.debug("rank %d: the store does not answer any more: %s", self._rank, error)

    def _beat(self, client: Client) -> None:
        # Looked at first: who reads that this rank has left, finds what it told before it left.
        now = self._now
        self._empty_outbox(client)
        self._count += 1
        client.put(_beat_key(self._rank), replace(now, count=self._count).encode())
        client.has([_beat_key(self._rank)])  # a stopped host takes what is put, but does not answer
        watch = self._watch
        self._watched = self._watching()
        if watch is not None:
            for rank, beat in self.read(client, watch.ranks).items():
                watch.see(rank, beat, self._watched)
        for hook in self._hooks:
            self._call(hook, client)

    def _empty_outbox(self, client: Client) -> None:
        while self._outbox:
            self._call(self._outbox.popleft(), client)

    def _call(self, hook: Callable[[Client], None], client: Client) -> None:
        try:
            hook(client)
        except dist.DistNetworkError:
            raise
        except Exception as error:
            told, self._told = self._told, repr(error)
            if told != self._told:  # once, not once a second
                logger.exception("rank %d: something that was to be done with a beat failed", self._rank)

    def _say_goodbye(self, client: Client) -> None:
        self._empty_outbox(client)
        end = self._clock() + _CLOSE_SECONDS
        while not self._farewell(client) and self._clock() < end:
            time.sleep(0.02)
        goodbye = replace(self._now, count=self._count + 1, inside=False, closed=True, note="closed")
        client.put(_beat_key(self._rank), goodbye.encode())
        client.has([_beat_key(self._rank)])  # it has arrived

    def _answered(self) -> None:
        self._contact = self._awake()


_beating: weakref.WeakSet[Pulse] = weakref.WeakSet()


def _close_all() -> None:
    """A thread that comes back from C++ while the interpreter goes down takes the process with it."""
    for pulse in list(_beating):
        pulse.close()


# Here, and not when one begins to beat: what is registered later, as by a manager, still needs it for the last save.
atexit.register(_close_all)


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def line_of(text: str) -> str:
    """On one line, and short: what stands in an error, and in a beat."""
    line = " ".join(text.split())
    return line if len(line) <= _LINE_CHARACTERS_MAX else f"{line[:_LINE_CHARACTERS_MAX]}…"
