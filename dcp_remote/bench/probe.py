"""What a user's own bucket gives this machine: latency, bandwidth by connections, conditional writes, what it costs.

Objects are put below a fresh prefix, read, and deleted, also when somebody interrupts. What is asked is bounded in
bytes, and begun within a time. What was found is told at once: whoever stops it, or sees it fail, has that much.
"""

from __future__ import annotations

import logging
import math
import os
import re
import resource
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import TypeVar

from dcp_remote.bench.findings import Probe, Rate, Unit, said, speed
from dcp_remote.bench.space import MiB
from dcp_remote.errors import (
    ConditionFailedError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage.base import Buffer, ObjectStore, Version
from dcp_remote.storage.counting import CountingStore
from dcp_remote.storage.retrying import Deadline, RetryingStore, RetryPolicy
from dcp_remote.terminal import counted

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

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
# After a lost answer nobody knows whose doing a refusal is: a fresh key is asked once more.
_CONDITIONAL_KEYS = 2

# Somebody looks at a terminal: an outage is told in seconds, and tried again in short steps.
_REQUEST_SECONDS = 10.0
_POLICY = RetryPolicy(delay_seconds_max=1.0)
_CLEANUP_SECONDS = 20.0


def object_bytes(bytes_max: int) -> int:
    """Of each object, so that all together are at most that many; pure.

    Raises:
        InvalidArgumentError: That is too little to measure anything.
    """
    objects = 1 + sum(_OBJECTS)  # the first one opens the connection
    size_bytes = min(_OBJECT_BYTES_MAX, bytes_max // objects)
    if size_bytes < _OBJECT_BYTES_MIN:
        raise InvalidArgumentError(
            "Too few bytes to measure a bandwidth.", bytes=bytes_max, at_least=_OBJECT_BYTES_MIN * objects
        )
    return size_bytes


def fresh_name() -> str:
    """Of a prefix that nobody else has."""
    return f"bench-{secrets.token_hex(8)}"


def probe(
    store: ObjectStore,
    *,
    name: str,
    bytes_max: int,
    seconds_max: float,
    tell: Callable[[str], object],
    quick: ObjectStore | None = None,
    unit: Unit = "connection",
    hold: Callable[[], object] = lambda: None,
) -> Probe:
    """Ask a bucket; what was put is deleted, whatever happens, or a warning says where it lies.

    Costs about 220 requests, at most `bytes_max` bytes up and as many down.

    Args:
        store: Of the prefix; all objects go below `name` in it.
        name: A fresh one; see `fresh_name`.
        bytes_max: How much may be put, and read.
        seconds_max: After which nothing more is begun; what is missing then is left out.
        tell: Hears of each part that begins, and what it found.
        quick: The same prefix, by a client that gives up sooner: asked what carries next to nothing, and to delete.
        unit: What is at work at a time.
        hold: Called before anything is deleted: from there on nothing may interrupt.

    Raises:
        PermissionDeniedError: It may not be written, or read.
        StorageError: There is no such bucket, or it does not answer.
        InvalidArgumentError: `bytes_max` is too small.
    """
    size_bytes = object_bytes(bytes_max)
    deadline = Deadline(seconds_max)
    with _place(_Place(store.child(name), (quick or store).child(name), tell), hold) as place:
        tell("latency")
        first, answers = _aside(place, lambda: _latency(place))
        answer_seconds = statistics.median(answers)
        tell(f"latency: {1000 * answer_seconds:.1f} ms, of the first answer {1000 * first:.1f} ms")
        tell("conditional writes")
        creates, swaps = _aside(place, lambda: _conditions(place))
        tell(f"create-if-absent {said(creates)}; compare-and-swap {said(swaps)}")
        tell("small reads")
        small = _small_reads(place, deadline)
        tell(f"small reads: {small:.0f}/s")
        up: list[Rate] = []
        down: list[Rate] = []
        if not deadline.expired():
            # Untimed: the first bytes open a connection, and warm the client up.
            _up(place, ["warm"], 1, size_bytes)
            _down(place, ["warm"], 1, size_bytes)
        for connections, count in zip(CONNECTIONS, _OBJECTS, strict=True):
            if deadline.expired():
                break
            several = counted(connections, unit)
            tell(several)
            keys = [f"{connections}-{number}" for number in range(count)]
            up.append(_up(place, keys, connections, size_bytes))
            tell(f"{several}: up {speed(up[-1])}")
            down.append(_down(place, keys, connections, size_bytes))
            tell(f"{several}: down {speed(down[-1])}")
    return Probe(
        first_answer_seconds=first,
        answer_seconds=answer_seconds,
        slow_answer_seconds=max(answers),
        creates_if_absent=creates,
        compares_and_swaps=swaps,
        small_reads_per_second=small,
        object_bytes=size_bytes,
        up=tuple(up),
        down=tuple(down),
        requests_again=place.again,
        slow_downs=place.slow_downs,
        requests=place.requests,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        stopped_early=len(up) < len(CONNECTIONS),
        objects_left=place.left,
    )


# The code of S3 and Azure, where the error has one; of a read there is only what its client says of the answer.
_REFUSED_CODES = {"SlowDown", "TooManyRequests", "ServerBusy", "503", "429"}
_REFUSED = re.compile(r"\b(503 Service Unavailable|429 Too Many Requests)\b")


def _refused_for_its_rate(error: StorageError) -> bool:
    details = error.details
    return str(details.get("code")) in _REFUSED_CODES or _REFUSED.search(str(details.get("cause"))) is not None


class _Stoppable(Deadline):
    """One that has passed as soon as something is set."""

    def __init__(self, seconds: float, stopped: threading.Event) -> None:
        super().__init__(seconds)
        self._stopped = stopped

    def remaining_seconds(self) -> float:
        return 0.0 if self._stopped.is_set() else super().remaining_seconds()


class _Place:
    """A fresh prefix: remembers what may lie there, and how often a request was sent again.

    Args:
        store: Of the prefix, for bodies: as patient as a save is.
        quick: Of the prefix, for everything else.
        tell: See `probe`.
    """

    def __init__(self, store: ObjectStore, quick: ObjectStore, tell: Callable[[str], object]) -> None:
        self._bodies, self._quick = CountingStore(store), CountingStore(quick)
        self.tell = tell
        self.again = self.slow_downs = self.left = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._keys: set[str] = set()
        self._keys_again: set[str] = set()

    @property
    def store(self) -> ObjectStore:
        """For requests that carry next to nothing; what fails is not sent again."""
        return self._quick

    @property
    def requests(self) -> int:
        """So far, each attempt."""
        return self._bodies.counts.requests + self._quick.counts.requests

    def asking(self, size_bytes: int = 0) -> ObjectStore:
        """For some requests of about this size; what fails for now is sent again for a short while."""

        def pause(seconds: float) -> None:
            self._stopped.wait(seconds)

        store = self._bodies if size_bytes > _SMALL_BYTES else self._quick
        deadline = _Stoppable(_REQUEST_SECONDS, self._stopped)
        return RetryingStore(store, deadline, _POLICY, sleep=pause, on_retry=self.count_again)

    def count_again(self, _: object, key: str, error: StorageError) -> None:
        """A request failed for now, and is sent again."""
        with self._lock:
            self.again += 1
            self.slow_downs += _refused_for_its_rate(error)
            self._keys_again.add(key)

    def stop(self) -> None:
        """Nothing is sent again from here on, and no thread begins anything."""
        self._stopped.set()

    def stopped(self) -> bool:
        """Whether one of the threads failed, or somebody interrupted."""
        return self._stopped.is_set()

    def put(self, key: str, buffers: Sequence[Buffer]) -> Version:
        """Put, and remember; what was surely refused is forgotten."""
        with self._lock:
            self._keys.add(key)
        try:
            return self.asking(sum(memoryview(one).nbytes for one in buffers)).put(key, buffers)
        except PermissionDeniedError:
            with self._lock:
                # An earlier attempt may have been carried out, whose answer was lost.
                if key not in self._keys_again:
                    self._keys.discard(key)
            raise

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Read."""
        self.asking(len(buffer)).get_into(key, start, buffer)

    def delete(self) -> None:
        """All that may lie here. What cannot be deleted is a warning: the figures are right all the same."""
        keys = sorted(self._keys)
        if not keys:
            return
        try:
            # Not to be told of is a reason to stop, and none to leave anything.
            self.tell("deleting what was put")
        finally:
            _aside(self, lambda: self._delete(keys))

    def _delete(self, keys: Sequence[str]) -> None:
        deleting = RetryingStore(self._quick, Deadline(_CLEANUP_SECONDS), _POLICY, on_retry=self.count_again)
        try:
            failed = deleting.delete(keys)
        except StorageError as error:
            failed = dict.fromkeys(keys, error)
        self.left = len(failed)
        if failed:
            logger.warning(
                "What was put could not be deleted; remove all below this URL by hand. url=%s objects=%d cause=%s",
                self._quick.url,
                self.left,
                next(iter(failed.values())),
            )


@contextmanager
def _place(place: _Place, hold: Callable[[], object]) -> Iterator[_Place]:
    """One whose objects are gone behind the block, however that ends."""
    try:
        yield place
    finally:
        hold()
        place.delete()


def _latency(place: _Place) -> tuple[float, list[float]]:
    """Seconds of the first request, and of some more: for an object that is not there, which has no body."""
    store = place.asking()
    seconds = []
    for _ in range(1 + _LATENCY_REQUESTS):
        began = time.monotonic()
        with suppress(ObjectNotFoundError):
            store.head("absent")
        seconds.append(time.monotonic() - began)
    return seconds[0], seconds[1:]


def _conditions(place: _Place) -> tuple[bool | None, bool | None]:
    """Whether the store keeps its word: create-if-absent, and compare-and-swap."""
    creates = swaps = None
    for number in range(_CONDITIONAL_KEYS):
        creates, swaps = _conditions_of(place, f"condition-{number}")
        if creates is False or (creates and (swaps is not None or not place.store.capabilities.compare_and_swap)):
            break
    return creates, swaps


def _conditions_of(place: _Place, key: str) -> tuple[bool | None, bool | None]:
    first = place.put(key, [b"1"])
    created = _carried_out(place, key, lambda: place.store.put(key, [b"2"], condition="absent"))
    creates = None if created is None else not created
    if created or not place.store.capabilities.compare_and_swap:
        return creates, None
    newest = _carried_out(place, key, lambda: place.store.put(key, [b"3"], condition=first))
    stale = _carried_out(place, key, lambda: place.store.put(key, [b"4"], condition=first))
    return creates, None if newest is None or stale is None else newest and not stale


def _carried_out(place: _Place, key: str, put: Callable[[], Version]) -> bool | None:
    """Whether a conditional put was; None if the store did not say."""
    errors: list[StorageError] = []
    for attempt in range(_CONDITIONAL_ATTEMPTS):
        try:
            put()
        except ConditionFailedError:
            # Of a later attempt it may be the first one's doing, whose answer was lost.
            carried_out = None if errors else False
            break
        except TransientStorageError as error:
            errors.append(error)
            time.sleep(_CONDITIONAL_PAUSE_SECONDS * 2**attempt)
        else:
            carried_out = True
            break
    else:
        # A store that has no such writes answers some with 501, always: no failure for now.
        return None
    for earlier in errors:
        place.count_again("put", key, earlier)
    return carried_out


@contextmanager
def _pool(place: _Place, connections: int) -> Iterator[ThreadPoolExecutor]:
    """Threads, none of which sends anything behind the block, however that ends."""
    pool = ThreadPoolExecutor(connections)
    try:
        yield pool
    except BaseException:
        place.stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _aside(place: _Place, act: Callable[[], _Answer]) -> _Answer:
    """By another thread: this one hears of signals while a request is under way."""
    with _pool(place, 1) as pool:
        return pool.submit(act).result()


def _small_reads(place: _Place, deadline: Deadline) -> float:
    _aside(place, lambda: place.put("small", [os.urandom(_SMALL_BYTES)]))

    def read(_: int) -> bool:
        if deadline.expired():
            return False
        place.get_into("small", 0, memoryview(bytearray(_SMALL_BYTES)))
        return True

    with _pool(place, _SMALL_CONNECTIONS) as pool:
        list(pool.map(read, range(_SMALL_CONNECTIONS)))  # opens the connections
        began = time.monotonic()
        done = sum(pool.map(read, range(_SMALL_REQUESTS)))
        seconds = time.monotonic() - began
    return done / seconds if seconds else math.inf


def _up(place: _Place, keys: Sequence[str], connections: int, size_bytes: int) -> Rate:
    # What cannot be compressed on its way, and is no multiple of a shorter pattern.
    body = os.urandom(MiB)
    views = [memoryview(body)[: min(MiB, size_bytes - start)] for start in range(0, size_bytes, MiB)]
    return _rate(place, lambda key: place.put(key, views), keys, connections, size_bytes)


def _down(place: _Place, keys: Sequence[str], connections: int, size_bytes: int) -> Rate:
    local = threading.local()

    def read(key: str) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(bytearray(size_bytes))  # used again: fresh memory is dear
        place.get_into(key, 0, local.buffer)

    return _rate(place, read, keys, connections, size_bytes)


def _rate(place: _Place, act: Callable[[str], object], keys: Sequence[str], connections: int, size_bytes: int) -> Rate:
    def one(key: str) -> None:
        # A thread takes the next key before anybody hears that the last one failed: of a silent store, a minute more.
        if place.stopped():
            return
        try:
            act(key)
        except BaseException:
            place.stop()
            raise

    with _pool(place, connections) as pool:
        cpu, began = _cpu_seconds(), time.monotonic()
        pending = {pool.submit(one, key) for key in keys}
        while pending:
            done, pending = wait(pending, timeout=_REQUEST_SECONDS, return_when=FIRST_COMPLETED)
            if not done:
                # A slow connection is no error; to be silent about it would look like one.
                place.tell(f"no request has ended for {_REQUEST_SECONDS:.0f} s; still waiting")
            for future in done:
                future.result()
        wall, cpu = time.monotonic() - began, _cpu_seconds() - cpu
    return Rate(connections, len(keys) * size_bytes / wall, wall, cpu, len(keys) * size_bytes)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
