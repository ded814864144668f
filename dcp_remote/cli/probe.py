"""Measurement of a user's bucket: latency, bandwidth by number of connections, conditional writes, CPU time.

Objects are put below a fresh prefix, read, and deleted, also after an interruption. Bytes are bounded, and no new
measurement starts after a time limit. Each result is reported at once, so that an interrupted or failed measurement
still shows the results so far.
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

from dcp_remote.cli.findings import Probe, Rate, Unit, describe_support, format_speed
from dcp_remote.common.arrays import Buffer
from dcp_remote.common.deadline import Deadline, RetryPolicy
from dcp_remote.common.text import format_count
from dcp_remote.common.units import MiB
from dcp_remote.errors import (
    ConditionFailedError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage.base import ObjectStore, Version
from dcp_remote.storage.counting import CountingStore
from dcp_remote.storage.retrying import RetryingStore

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

# Parallel connections, ascending. A save uses eight per rank, and often eight ranks share a host.
CONNECTIONS = (1, 2, 4, 8, 16)

# Objects that are moved with each number of connections: two per connection.
_OBJECTS = (2, 4, 8, 16, 32)

# Size of an object: at most that of a shard, and large enough that its transfer is not mostly latency.
_OBJECT_BYTES_MAX = 64 * MiB
_OBJECT_BYTES_MIN = 64 * 1024

_LATENCY_REQUESTS = 10
_SMALL_BYTES = 4096
_SMALL_REQUESTS = 64
_SMALL_CONNECTIONS = 8

_CONDITIONAL_ATTEMPTS = 4
_CONDITIONAL_PAUSE_SECONDS = 0.2
# Keys to try conditional writes on. After a lost answer, a refusal may be due to the lost request itself, so that only
# a fresh key gives a clear answer.
_CONDITIONAL_KEYS = 2

# Deadline and pauses of retries, short because a user waits at a terminal: an outage is reported within seconds.
_REQUEST_SECONDS = 10.0
_POLICY = RetryPolicy(delay_seconds_max=1.0)
_CLEANUP_SECONDS = 20.0


def object_bytes(bytes_max: int) -> int:
    """Return the size of each object in bytes, so that all objects together have at most `bytes_max`.

    Raises:
        InvalidArgumentError: `bytes_max` is too small to measure a bandwidth.
    """
    objects = 1 + sum(_OBJECTS)  # one object opens the connection
    size_bytes = min(_OBJECT_BYTES_MAX, bytes_max // objects)
    if size_bytes < _OBJECT_BYTES_MIN:
        least = _OBJECT_BYTES_MIN * objects
        raise InvalidArgumentError(
            f"Too few bytes to measure a bandwidth: --bytes must be at least {least} (such as {-(-least // MiB)}MiB).",
            bytes=bytes_max,
        )
    return size_bytes


def fresh_name() -> str:
    """Return a random name for a prefix that no other process uses."""
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
    """Measure a bucket. The objects are deleted in any case, or a warning says where they are left.

    Costs about 220 requests, at most `bytes_max` bytes up and as many down.

    Args:
        store: Store at the prefix below which all objects are written.
        name: Name of a fresh prefix in `store`, from `fresh_name`.
        bytes_max: Most bytes to upload, and to download.
        seconds_max: Seconds after which no new measurement starts; measurements that are missing then are left out.
        tell: Called with a line of text at the start of each part and with its result.
        quick: Store at the same prefix with shorter timeouts, for small requests and deletions; default `store`.
        unit: Noun for what works in parallel.
        hold: Called before the deletion starts, which must not be interrupted.

    Raises:
        PermissionDeniedError: Writing or reading is not permitted.
        StorageError: The bucket does not exist, or does not answer.
        InvalidArgumentError: `bytes_max` is too small.
    """
    size_bytes = object_bytes(bytes_max)
    deadline = Deadline(seconds_max)
    with _delete_at_end(_FreshPrefix(store.child(name), (quick or store).child(name), tell), hold) as prefix:
        tell("latency")
        first, answers = _run_in_thread(prefix, lambda: _measure_latency(prefix))
        answer_seconds = statistics.median(answers)
        tell(f"latency: {1000 * answer_seconds:.1f} ms, first request {1000 * first:.1f} ms")
        tell("conditional writes")
        creates, swaps = _run_in_thread(prefix, lambda: _test_conditions(prefix))
        tell(f"create-if-absent {describe_support(creates)}; compare-and-swap {describe_support(swaps)}")
        tell("small reads")
        small = _measure_small_reads(prefix, deadline)
        tell(f"small reads: {small:.0f}/s")
        up: list[Rate] = []
        down: list[Rate] = []
        if not deadline.expired():
            # Not measured: the first object opens the connection and warms up the client.
            _measure_upload(prefix, ["warm"], 1, size_bytes)
            _measure_download(prefix, ["warm"], 1, size_bytes)
        for connections, count in zip(CONNECTIONS, _OBJECTS, strict=True):
            if deadline.expired():
                break
            title = format_count(connections, unit)
            tell(title)
            keys = [f"{connections}-{number}" for number in range(count)]
            up.append(_measure_upload(prefix, keys, connections, size_bytes))
            tell(f"{title}: up {format_speed(up[-1])}")
            down.append(_measure_download(prefix, keys, connections, size_bytes))
            tell(f"{title}: down {format_speed(down[-1])}")
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
        requests_again=prefix.again,
        slow_downs=prefix.slow_downs,
        requests=prefix.requests,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        stopped_early=len(up) < len(CONNECTIONS),
        objects_left=prefix.left,
    )


# Error codes of S3 and Azure. Errors of reads have no code, only the client's text about the answer.
_SLOW_DOWN_CODES = {"SlowDown", "TooManyRequests", "ServerBusy", "503", "429"}
_SLOW_DOWN_TEXT = re.compile(r"\b(503 Service Unavailable|429 Too Many Requests)\b")


def _is_slow_down(error: StorageError) -> bool:
    details = error.details
    return str(details.get("code")) in _SLOW_DOWN_CODES or _SLOW_DOWN_TEXT.search(str(details.get("cause"))) is not None


class _StoppableDeadline(Deadline):
    """Deadline that expires at once when an event is set."""

    def __init__(self, seconds: float, stopped: threading.Event) -> None:
        super().__init__(seconds)
        self._stopped = stopped

    def remaining_seconds(self) -> float:
        return 0.0 if self._stopped.is_set() else super().remaining_seconds()


class _FreshPrefix:
    """Fresh prefix that records which objects may exist in it, and how many requests were sent again.

    Args:
        store: Store at the prefix for requests with large bodies, with the timeouts of a save.
        quick: Store at the prefix for all other requests.
        tell: Called with a line of text, as in `probe`.

    Attributes:
        tell: The argument.
        again: Requests that were sent again.
        slow_downs: Requests among these that the store refused for their rate.
        left: Objects that could not be deleted.
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
        """Store for small requests, without retries."""
        return self._quick

    @property
    def requests(self) -> int:
        """Number of requests so far, each attempt counted."""
        return self._bodies.counts.requests + self._quick.counts.requests

    def retrying_store(self, size_bytes: int = 0) -> ObjectStore:
        """Return a store for requests of about this size, which retries transient failures for a short time."""

        def pause(seconds: float) -> None:
            self._stopped.wait(seconds)

        store = self._bodies if size_bytes > _SMALL_BYTES else self._quick
        deadline = _StoppableDeadline(_REQUEST_SECONDS, self._stopped)
        return RetryingStore(store, deadline, _POLICY, sleep=pause, on_retry=self.count_again)

    def count_again(self, _: object, key: str, error: StorageError) -> None:
        """Count a request that failed transiently and is sent again."""
        with self._lock:
            self.again += 1
            self.slow_downs += _is_slow_down(error)
            self._keys_again.add(key)

    def stop(self) -> None:
        """Stop all retries, and let no thread start another request."""
        self._stopped.set()

    def is_stopped(self) -> bool:
        """Return True if a thread failed or the user interrupted."""
        return self._stopped.is_set()

    def put(self, key: str, buffers: Sequence[Buffer]) -> Version:
        """Put an object and record its key, unless the put was certainly refused."""
        with self._lock:
            self._keys.add(key)
        try:
            return self.retrying_store(sum(memoryview(buffer).nbytes for buffer in buffers)).put(key, buffers)
        except PermissionDeniedError:
            with self._lock:
                # An earlier attempt may have been carried out and its answer lost, so the key is then kept.
                if key not in self._keys_again:
                    self._keys.discard(key)
            raise

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Read a range of an object into a buffer."""
        self.retrying_store(len(buffer)).get_into(key, start, buffer)

    def delete(self) -> None:
        """Delete all recorded objects; log a warning if that fails, since the results are valid all the same."""
        keys = sorted(self._keys)
        if not keys:
            return
        try:
            # `tell` raises if the output is closed, which must not prevent the deletion.
            self.tell("deleting the objects")
        finally:
            _run_in_thread(self, lambda: self._delete(keys))

    def _delete(self, keys: Sequence[str]) -> None:
        deleting = RetryingStore(self._quick, Deadline(_CLEANUP_SECONDS), _POLICY, on_retry=self.count_again)
        try:
            failed = deleting.delete(keys)
        except StorageError as error:
            failed = dict.fromkeys(keys, error)
        self.left = len(failed)
        if failed:
            logger.warning(
                "Objects of the benchmark could not be deleted. Delete everything below this URL. "
                "url=%s objects=%d cause=%s",
                self._quick.url,
                self.left,
                next(iter(failed.values())),
            )


@contextmanager
def _delete_at_end(prefix: _FreshPrefix, hold: Callable[[], object]) -> Iterator[_FreshPrefix]:
    """Delete all objects of a prefix when the block ends or raises."""
    try:
        yield prefix
    finally:
        hold()
        prefix.delete()


def _measure_latency(prefix: _FreshPrefix) -> tuple[float, list[float]]:
    """Return the seconds of the first request and of later ones: HEAD of an absent object, which has no body."""
    store = prefix.retrying_store()
    seconds = []
    for _ in range(1 + _LATENCY_REQUESTS):
        began = time.monotonic()
        with suppress(ObjectNotFoundError):
            store.head("absent")
        seconds.append(time.monotonic() - began)
    return seconds[0], seconds[1:]


def _test_conditions(prefix: _FreshPrefix) -> tuple[bool | None, bool | None]:
    """Return whether create-if-absent and compare-and-swap work; None if the store gave no clear answer."""
    creates = swaps = None
    for number in range(_CONDITIONAL_KEYS):
        creates, swaps = _test_conditions_of_key(prefix, f"condition-{number}")
        if creates is False or (creates and (swaps is not None or not prefix.store.capabilities.compare_and_swap)):
            break
    return creates, swaps


def _test_conditions_of_key(prefix: _FreshPrefix, key: str) -> tuple[bool | None, bool | None]:
    first = prefix.put(key, [b"1"])
    created = _carried_out(prefix, key, lambda: prefix.store.put(key, [b"2"], condition="absent"))
    creates = None if created is None else not created
    if created or not prefix.store.capabilities.compare_and_swap:
        return creates, None
    newest = _carried_out(prefix, key, lambda: prefix.store.put(key, [b"3"], condition=first))
    stale = _carried_out(prefix, key, lambda: prefix.store.put(key, [b"4"], condition=first))
    return creates, None if newest is None or stale is None else newest and not stale


def _carried_out(prefix: _FreshPrefix, key: str, put: Callable[[], Version]) -> bool | None:
    """Return whether a conditional put was carried out; None if the store gave no clear answer."""
    errors: list[StorageError] = []
    for attempt in range(_CONDITIONAL_ATTEMPTS):
        try:
            put()
        except ConditionFailedError:
            # After a lost answer, the earlier attempt itself may be the reason for this refusal.
            carried_out = None if errors else False
            break
        except TransientStorageError as error:
            errors.append(error)
            time.sleep(_CONDITIONAL_PAUSE_SECONDS * 2**attempt)
        else:
            carried_out = True
            break
    else:
        # Not counted as transient failures: some stores always answer 501 to conditional writes.
        return None
    for earlier in errors:
        prefix.count_again("put", key, earlier)
    return carried_out


@contextmanager
def _thread_pool(prefix: _FreshPrefix, connections: int) -> Iterator[ThreadPoolExecutor]:
    """Provide a thread pool whose threads have all stopped sending requests when the block ends or raises."""
    pool = ThreadPoolExecutor(connections)
    try:
        yield pool
    except BaseException:
        prefix.stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run_in_thread(prefix: _FreshPrefix, work: Callable[[], _Answer]) -> _Answer:
    """Run `work` in another thread, so that this thread can handle signals while a request is pending."""
    with _thread_pool(prefix, 1) as pool:
        return pool.submit(work).result()


def _measure_small_reads(prefix: _FreshPrefix, deadline: Deadline) -> float:
    _run_in_thread(prefix, lambda: prefix.put("small", [os.urandom(_SMALL_BYTES)]))

    def read(_: int) -> bool:
        if deadline.expired():
            return False
        prefix.get_into("small", 0, memoryview(bytearray(_SMALL_BYTES)))
        return True

    with _thread_pool(prefix, _SMALL_CONNECTIONS) as pool:
        list(pool.map(read, range(_SMALL_CONNECTIONS)))  # opens the connections
        began = time.monotonic()
        done = sum(pool.map(read, range(_SMALL_REQUESTS)))
        seconds = time.monotonic() - began
    return done / seconds if seconds else math.inf


def _measure_upload(prefix: _FreshPrefix, keys: Sequence[str], connections: int, size_bytes: int) -> Rate:
    body = os.urandom(MiB)  # random, so that it cannot be compressed on its way
    views = [memoryview(body)[: min(MiB, size_bytes - start)] for start in range(0, size_bytes, MiB)]
    return _measure_rate(prefix, lambda key: prefix.put(key, views), keys, connections, size_bytes)


def _measure_download(prefix: _FreshPrefix, keys: Sequence[str], connections: int, size_bytes: int) -> Rate:
    local = threading.local()

    def read(key: str) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(bytearray(size_bytes))  # reused, because new memory costs page faults
        prefix.get_into(key, 0, local.buffer)

    return _measure_rate(prefix, read, keys, connections, size_bytes)


def _measure_rate(
    prefix: _FreshPrefix, transfer: Callable[[str], object], keys: Sequence[str], connections: int, size_bytes: int
) -> Rate:
    def transfer_unless_stopped(key: str) -> None:
        # The pool starts the next key before the caller sees a failure, which would take a minute on a silent store.
        if prefix.is_stopped():
            return
        try:
            transfer(key)
        except BaseException:
            prefix.stop()
            raise

    with _thread_pool(prefix, connections) as pool:
        cpu, began = _cpu_seconds(), time.monotonic()
        pending = {pool.submit(transfer_unless_stopped, key) for key in keys}
        while pending:
            done, pending = wait(pending, timeout=_REQUEST_SECONDS, return_when=FIRST_COMPLETED)
            if not done:
                # Reported, because a slow connection is not an error but looks like a hang.
                prefix.tell(f"no request has ended for {_REQUEST_SECONDS:.0f} s; still waiting")
            for future in done:
                future.result()
        wall, cpu = time.monotonic() - began, _cpu_seconds() - cpu
    return Rate(connections, len(keys) * size_bytes / wall, wall, cpu, len(keys) * size_bytes)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
