"""What a user's own bucket gives this machine: latency, bandwidth by connections, conditional writes, what it costs.

Objects are put below a fresh prefix, read, and deleted, also when somebody interrupts. What is asked is bounded in
bytes, and begun within a time.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from dcp_remote.bench.space import GiB, MiB
from dcp_remote.errors import (
    ConditionFailedError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage.base import Buffer, ObjectStore, Version
from dcp_remote.storage.retrying import Deadline, RetryingStore

logger = logging.getLogger(__name__)

# Connections at a time, ascending: a save uses eight per rank, and eight ranks share many a host.
CONNECTIONS = (1, 2, 4, 8, 16)

# Objects for each of these: twice as many as connections, at least, of the sum of bytes that may be put.
_OBJECTS = (2, 4, 8, 16, 32)

# Of an object: as a shard at most, and large enough that its bytes matter beside its latency.
_OBJECT_BYTES_MAX = 64 * MiB
_OBJECT_BYTES_MIN = 64 * 1024

_LATENCY_REQUESTS = 10
_SMALL_BYTES = 4096
_SMALL_REQUESTS = 64
_SMALL_CONNECTIONS = 8

_CONDITIONAL_ATTEMPTS = 4
_CONDITIONAL_PAUSE_SECONDS = 0.2

# Somebody looks at a terminal: an outage is told in seconds.
_FIRST_SECONDS = 10.0
_CLEANUP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Rate:
    """What a number of connections moved.

    Attributes:
        connections: At a time.
        bytes_per_second: All of them together.
        wall_seconds: How long it was tried.
        cpu_seconds: Of this process.
        size_bytes: How much was moved.
    """

    connections: int
    bytes_per_second: float
    wall_seconds: float
    cpu_seconds: float
    size_bytes: int

    @property
    def cpu_seconds_per_gib(self) -> float:
        """Of this process."""
        return self.cpu_seconds / (self.size_bytes / GiB)


@dataclass(frozen=True, slots=True)
class Probe:
    """What was found.

    Attributes:
        first_answer_seconds: Of the first request: credentials, name, connection, TLS, and an answer.
        answer_seconds: Of requests without a body on an open connection, in the median.
        slow_answer_seconds: The slowest of these.
        creates_if_absent: A create of a key that was there was refused. None: the store never said.
        compares_and_swaps: A replacement of an older version was refused, one of the newest not. None: the store never
            said, or does not claim it.
        small_reads_per_second: Of 4 KiB, by eight connections.
        object_bytes: Of each object that was put and read for the rates.
        up: By connections.
        down: By connections.
        requests_again: Requests that failed for now and were sent again.
        slow_downs: Of these, how many the store refused for their rate.
        requests: All of them, these included.
        cores: Of this process.
        stopped_early: Whether time ran out before all was tried.
        objects_left: That could not be deleted.
    """

    first_answer_seconds: float
    answer_seconds: float
    slow_answer_seconds: float
    creates_if_absent: bool | None
    compares_and_swaps: bool | None
    small_reads_per_second: float
    object_bytes: int
    up: tuple[Rate, ...]
    down: tuple[Rate, ...]
    requests_again: int
    slow_downs: int
    requests: int
    cores: int
    stopped_early: bool
    objects_left: int


# Of a core, of all cores, and of requests: from where on one of them is what limits.
_BUSY = 0.9
_THROTTLED = 0.02
# A connection more that gives less than half of what the first one gave is not worth having.
_WORTH = 0.5


def limit(probe: Probe) -> str:
    """What limits it, in a sentence; pure."""
    if probe.requests_again > _THROTTLED * probe.requests:
        return (
            f"Throttling: {probe.requests_again} of {probe.requests} requests failed for now and were sent again, "
            f"{probe.slow_downs} of them refused for their rate. Ask for a higher one, or spread runs over prefixes."
        )
    if not probe.up:
        return "There was no time to move bytes: give it more --seconds."
    told = [_limit_of("up", probe.up, probe), _limit_of("down", probe.down, probe)]
    return " ".join(sentence for sentence in told if sentence)


def _limit_of(way: str, rates: Sequence[Rate], probe: Probe) -> str:
    if not rates:
        return ""
    best = max(rates, key=lambda rate: rate.bytes_per_second)
    first = rates[0]
    name = "Upload" if way == "up" else "Download"
    if best.cpu_seconds >= _BUSY * probe.cores * best.wall_seconds:
        return f"{name}: the CPU of this machine ({probe.cores} cores) is all in use."
    if best.connections == rates[-1].connections and len(rates) > 1:
        times = best.bytes_per_second / first.bytes_per_second
        if times >= _WORTH * best.connections / first.connections:
            waiting = probe.answer_seconds / (probe.object_bytes / first.bytes_per_second)
            if waiting > _WORTH:
                return f"{name}: latency; most of a request of {probe.object_bytes / MiB:.1f} MiB is waiting."
            return (
                f"{name}: one connection gives {first.bytes_per_second / MiB:.0f} MiB/s, {best.connections} give "
                f"{times:.1f} times that: the connection is what limits, not the network."
            )
    enough = next(rate for rate in rates if rate.bytes_per_second >= _BUSY * best.bytes_per_second)
    speed = f"{enough.bytes_per_second / MiB:.0f} MiB/s"
    return f"{name}: the network or the store; {speed} by {enough.connections} connections, and hardly more by others."


def object_bytes(bytes_max: int) -> int:
    """Of each object, so that all together are at most that many; pure.

    Raises:
        InvalidArgumentError: That is too little to measure anything.
    """
    size_bytes = min(_OBJECT_BYTES_MAX, bytes_max // sum(_OBJECTS))
    if size_bytes < _OBJECT_BYTES_MIN:
        raise InvalidArgumentError(
            "Too few bytes to measure a bandwidth.", bytes=bytes_max, at_least=_OBJECT_BYTES_MIN * sum(_OBJECTS)
        )
    return size_bytes


def probe(store: ObjectStore, *, bytes_max: int, seconds_max: float, tell: Callable[[str], object]) -> Probe:
    """Ask a bucket; what was put is deleted, whatever happens, or a warning says where it lies.

    Costs about 160 requests, at most `bytes_max` bytes up and as many down.

    Args:
        store: Of the prefix; all objects go below a fresh name in it.
        bytes_max: How much may be put, and read.
        seconds_max: After which nothing more is begun; what is missing then is left out.
        tell: Hears of each part that begins.

    Raises:
        PermissionDeniedError: It may not be written, or read.
        StorageError: There is no such bucket, or it does not answer.
        InvalidArgumentError: `bytes_max` is too small.
    """
    size_bytes = object_bytes(bytes_max)
    deadline = Deadline(seconds_max)
    with _place(store, Deadline(seconds_max + _FIRST_SECONDS), tell) as place:
        tell("latency")
        first, answers = _latency(RetryingStore(place.store, Deadline(_FIRST_SECONDS)))
        tell("conditional writes")
        creates, swaps = _conditions(place)
        tell("small reads")
        small = _small_reads(place, deadline)
        up: list[Rate] = []
        down: list[Rate] = []
        for connections, count in zip(CONNECTIONS, _OBJECTS, strict=True):
            if deadline.expired():
                break
            tell(f"{connections} connection{'s' * (connections > 1)}")
            keys = [f"{connections}-{number}" for number in range(count)]
            up.append(_up(place, keys, connections, size_bytes))
            down.append(_down(place, keys, connections, size_bytes))
    return Probe(
        first_answer_seconds=first,
        answer_seconds=statistics.median(answers),
        slow_answer_seconds=max(answers),
        creates_if_absent=creates,
        compares_and_swaps=swaps,
        small_reads_per_second=small,
        object_bytes=size_bytes,
        up=tuple(up),
        down=tuple(down),
        requests_again=place.again,
        slow_downs=place.slow_downs,
        requests=place.requests + place.again,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        stopped_early=len(up) < len(CONNECTIONS),
        objects_left=place.left,
    )


class _Place:
    """A fresh prefix: remembers what may lie there, and how often a request was sent again."""

    def __init__(self, store: ObjectStore, deadline: Deadline) -> None:
        self.name = f"bench-{secrets.token_hex(8)}"
        self.store = store.child(self.name)
        self.again = self.slow_downs = self.requests = self.left = 0
        self._asking = RetryingStore(self.store, deadline, on_retry=self._count)
        self._lock = threading.Lock()
        self._keys: set[str] = set()

    def _count(self, verb: object, key: str, error: StorageError) -> None:
        with self._lock:
            self.again += 1
            self.slow_downs += str(error.details.get("code")) in {"SlowDown", "503"}

    def put(self, key: str, buffers: Sequence[Buffer]) -> Version:
        """Put, and remember; what was surely refused is forgotten."""
        with self._lock:
            self._keys.add(key)
            self.requests += 1
        try:
            return self._asking.put(key, buffers)
        except PermissionDeniedError:
            with self._lock:
                self._keys.discard(key)
            raise

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Read."""
        with self._lock:
            self.requests += 1
        self._asking.get_into(key, start, buffer)

    def delete(self) -> None:
        """All that may lie here. What cannot be deleted is a warning: the figures are right all the same."""
        if not self._keys:
            return
        failed = RetryingStore(self.store, Deadline(_CLEANUP_SECONDS)).delete(sorted(self._keys))
        self.left = len(failed)
        if failed:
            logger.warning(
                "What was put could not be deleted; remove all below this URL by hand. url=%s objects=%d cause=%s",
                self.store.url,
                self.left,
                next(iter(failed.values())),
            )


@contextmanager
def _place(store: ObjectStore, deadline: Deadline, tell: Callable[[str], object]) -> Iterator[_Place]:
    """One whose objects are gone behind the block, however that ends."""
    place = _Place(store, deadline)
    try:
        yield place
    finally:
        tell("deleting what was put")
        place.delete()


def _latency(store: ObjectStore) -> tuple[float, list[float]]:
    """Seconds of the first request, and of some more: for an object that is not there, which has no body."""
    seconds = []
    for _ in range(1 + _LATENCY_REQUESTS):
        began = time.monotonic()
        with suppress(ObjectNotFoundError):
            store.head("absent")
        seconds.append(time.monotonic() - began)
    return seconds[0], seconds[1:]


def _conditions(place: _Place) -> tuple[bool | None, bool | None]:
    """Whether the store keeps its word: create-if-absent, and compare-and-swap."""
    first = place.put("condition", [b"1"])
    created = _carried_out(lambda: place.store.put("condition", [b"2"], condition="absent"))
    creates = None if created is None else not created
    if created or not place.store.capabilities.compare_and_swap:
        return creates, None
    newest = _carried_out(lambda: place.store.put("condition", [b"3"], condition=first))
    stale = _carried_out(lambda: place.store.put("condition", [b"4"], condition=first))
    return creates, None if newest is None or stale is None else newest and not stale


def _carried_out(put: Callable[[], Version]) -> bool | None:
    """Whether a conditional put was; None if the store did not say."""
    for attempt in range(_CONDITIONAL_ATTEMPTS):
        try:
            put()
        except ConditionFailedError:
            # Of a later attempt it may be the first one's doing, whose answer was lost.
            return False if attempt == 0 else None
        except TransientStorageError:
            time.sleep(_CONDITIONAL_PAUSE_SECONDS * 2**attempt)
        else:
            return True
    return None


def _small_reads(place: _Place, deadline: Deadline) -> float:
    place.put("small", [os.urandom(_SMALL_BYTES)])

    def read(_: int) -> bool:
        if deadline.expired():
            return False
        place.get_into("small", 0, memoryview(bytearray(_SMALL_BYTES)))
        return True

    with ThreadPoolExecutor(_SMALL_CONNECTIONS) as pool:
        list(pool.map(read, range(_SMALL_CONNECTIONS)))  # opens the connections
        began = time.monotonic()
        done = sum(pool.map(read, range(_SMALL_REQUESTS)))
        seconds = time.monotonic() - began
    return done / seconds if seconds else math.inf


def _up(place: _Place, keys: Sequence[str], connections: int, size_bytes: int) -> Rate:
    # What cannot be compressed on its way, and is no multiple of a shorter pattern.
    body = os.urandom(MiB)
    views = [memoryview(body)[: min(MiB, size_bytes - start)] for start in range(0, size_bytes, MiB)]
    return _rate(lambda key: place.put(key, views), keys, connections, size_bytes)


def _down(place: _Place, keys: Sequence[str], connections: int, size_bytes: int) -> Rate:
    local = threading.local()

    def read(key: str) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(bytearray(size_bytes))  # used again: fresh memory is dear
        place.get_into(key, 0, local.buffer)

    return _rate(read, keys, connections, size_bytes)


def _rate(act: Callable[[str], object], keys: Sequence[str], connections: int, size_bytes: int) -> Rate:
    with ThreadPoolExecutor(connections) as pool:
        cpu, began = _cpu_seconds(), time.monotonic()
        for future in [pool.submit(act, key) for key in keys]:
            try:
                future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        wall, cpu = time.monotonic() - began, _cpu_seconds() - cpu
    return Rate(connections, len(keys) * size_bytes / wall, wall, cpu, len(keys) * size_bytes)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
