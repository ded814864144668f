"""Upload shards, several at a time, within a memory budget and a deadline; delete them again if the save fails.

Nothing here knows tensors or manifests. The bytes of a shard are prepared in a worker thread just before they are sent.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeVar

from dcp_remote.common.arrays import Buffer
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.hedging import LatencyTracker, get_latency_tracker
from dcp_remote.common.threads import WAKE_SECONDS, Cancellation, Workers, submit_or_run
from dcp_remote.errors import DcpRemoteError, SaveFailedError, SaveTimeoutError
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.deletion_queue import DeletionQueue
from dcp_remote.storage.retrying import RetryingStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

# One connection to S3 carries 50 to 100 MB/s; the client needs a fraction of a core for all of them together.
UPLOADS_IN_FLIGHT = 16
# From this latency on, a store is far away, and so many shards are in flight, each about half as large. Two numbers and
# none between them, or the size of the shards would differ from save to save.
_FAR_SECONDS = 0.05
FAR_UPLOADS_IN_FLIGHT = 32

SECOND_UPLOADS_IN_FLIGHT = 2

# Longest time for deleting the shards of a failed save before its error is raised: the other ranks wait meanwhile, and
# an orphan costs less than their time.
CLEANUP_SECONDS = 5.0
# Time for deleting them when the deadline has passed: reporting the error comes first then.
LATE_CLEANUP_SECONDS = 0.5
# Few keys per request, so that a store which deletes one by one finishes a request within the time.
_KEYS_PER_CLEANUP = 100


@dataclass(frozen=True, slots=True)
class Prepared(Generic[T]):
    """Object that is ready to be sent."""

    buffers: Sequence[Buffer]
    report: Callable[[str], T]  # returns what `finish` returns for the object, given the key under which it is stored
    check: Callable[[], None]  # called after the object was sent; raises if its bytes may have changed meanwhile

    @property
    def size_bytes(self) -> int:
        """Size of all buffers together, in bytes."""
        return sum(memoryview(buffer).nbytes for buffer in self.buffers)


@dataclass(slots=True, eq=False)
class _Job(Generic[T]):
    """Upload of one object, under one key or two. Its fields change only while the lock of its `Uploads` is held."""

    key: str
    second_key: str
    prepare: Callable[[], Prepared[T]] | None  # None once the job is over
    claimed_bytes: int
    prepared: Prepared[T] | None = None  # only while the object is being sent
    began_seconds: float = math.inf  # start of the first put, by the clock of `Uploads`
    puts_pending: int = 0
    sent_twice: bool = False
    stored_key: str = ""  # key of the put that ended first
    reports: list[T] = field(default_factory=list)  # at most one
    over: bool = False  # stored, or failed


def uploads_in_flight(latency_seconds: float) -> int:
    """Return how many shards to send at a time to a store that answers after this time. Pure."""
    return FAR_UPLOADS_IN_FLIGHT if latency_seconds >= _FAR_SECONDS else UPLOADS_IN_FLIGHT


class Uploads(Generic[T]):
    """Uploads of one rank's shards in one save, several at a time.

    Use as a context manager. If the block raises, or an upload fails, everything that was put is deleted (best effort,
    5 s); a put that is still pending is deleted when it ends. No manifest can name these objects, because no key is
    reported before `finish` returns.

    A late put (`common/hedging.py`) is sent again under a second key, and the first of the two to end is the shard. The
    second key must differ: the slower put may still read the state's memory after the state has changed, and must not
    overwrite the shard. Its object is deleted when it ends; until then, its bytes stay in memory, beyond the budget.

    `on_put` is called with key and size in bytes of each object that was put, in the thread that put it, for a progress
    bar; an error that it raises fails the save. `discard` is called from any thread, instead of deleting, with the keys
    of the objects to delete. `latency_seconds` is that of the store, 0 if unknown. `clock`, in seconds, is for
    `seconds` and for detecting late puts; `pace` has the latencies of puts, or is None for those that this process has
    measured.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        rank: int,
        deadline: Deadline,
        memory_budget_bytes: int,
        on_put: Callable[[str, int], None] | None = None,
        latency_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        pace: LatencyTracker | None = None,
        discard: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        """Store the settings; no thread is started and no request is made."""
        self._store = store
        self._discard = discard
        self.rank = rank
        self._on_put = on_put
        self._clock = clock
        self._latencies = get_latency_tracker(store.url) if pace is None else pace
        self._deadline = deadline
        self._retries: dict[str, int] = {}
        self._last_errors: dict[str, Exception] = {}  # by key, of uploads that are not over
        self._cancellation = Cancellation()
        self._sender = RetryingStore(
            store,
            Deadline(deadline.remaining_seconds(), self._cancellation.clock),
            on_retry=self._count_retry,
        )
        self.budget_bytes = memory_budget_bytes
        self._claimed_bytes = 0
        self._unfinished = 0
        self._sent_twice = 0
        # Seconds that each put took, by key, including its attempts and the pauses between them.
        self.seconds: dict[str, float] = {}
        self._changed = threading.Condition()
        self.in_flight = uploads_in_flight(latency_seconds)
        self._pool = Workers(self.in_flight, "dcp_remote-upload")
        self._second_pool = Workers(SECOND_UPLOADS_IN_FLIGHT, "dcp_remote-upload-again")
        self._jobs: list[_Job[T]] = []
        self._failure: tuple[str, BaseException] | None = None  # key and error of the first failure
        self._finished = False
        self._given_up = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Delete everything that was put, unless `finish` has returned."""
        with self._changed:
            self._given_up = not self._finished
        self._pool.shutdown(wait=False)
        self._second_pool.shutdown(wait=False)
        # Pending puts have lost against their repetition, or belong to a failed save: they are not to be retried.
        self._cancellation.cancel()
        if not self._finished:
            self._delete_all()

    def claim(self, size_bytes: int) -> None:
        """Wait until the budget has room; a claim larger than the budget waits for all of it.

        A claim of 0 bytes does not wait: it only raises if the save has failed or its deadline has passed.
        """
        size_bytes = min(size_bytes, self.budget_bytes)
        with self._changed:
            while self._claimed_bytes and self._claimed_bytes + size_bytes > self.budget_bytes:
                self._wait()
            self._raise_if_over()
            self._claimed_bytes += size_bytes

    def submit(self, key: str, prepare: Callable[[], Prepared[T]], *, claimed_bytes: int, second_key: str = "") -> None:
        """Put one object in the background, under a key that no other writer ever uses.

        `prepare` returns the object; it is called in a worker thread. The claimed bytes are released when the upload
        ends. A late put is sent again under the second key, if there is one.
        """
        job = _Job(key, second_key, prepare, claimed_bytes)
        with self._changed:
            self._unfinished += 1
            self._jobs.append(job)
        submit_or_run(self._pool, partial(self._run, job))

    def finish(self) -> list[T]:
        """Wait for all uploads, and return their reports in the order of submission."""
        with self._changed:
            while self._unfinished:
                self._wait()
            self._raise_failure()
            self._finished = True
            return [report for job in self._jobs for report in job.reports]

    @property
    def url(self) -> str:
        """URL of the store, to which keys are relative."""
        return self._store.url

    @property
    def retries(self) -> int:
        """Number of requests so far that were repeated after a failure, or sent twice because they were late."""
        return sum(self._retries.values()) + self._sent_twice

    def _wait(self) -> None:
        """Wait until a job changes, or for `WAKE_SECONDS`; with the lock held."""
        self._raise_if_over()
        self._repeat_late_puts()
        self._changed.wait(min(WAKE_SECONDS, self._deadline.remaining_seconds()))

    def _repeat_late_puts(self) -> None:
        now_seconds = self._clock()
        for job in self._jobs:
            if job.over or job.prepared is None or job.sent_twice or not job.second_key:
                continue
            is_late = now_seconds - job.began_seconds > self._latencies.late_seconds(job.prepared.size_bytes)
            if is_late and self._latencies.may_repeat():
                job.sent_twice = True
                self._sent_twice += 1
                # If no thread can be started, a running one may find the put in the queue; else it is not repeated.
                with suppress(RuntimeError):
                    self._second_pool.submit(partial(self._send, job, job.second_key))

    def _raise_if_over(self) -> None:
        self._raise_failure()
        if self._deadline.expired():
            raise self._timeout()

    def _run(self, job: _Job[T]) -> None:
        assert job.prepare is not None
        try:
            prepared = job.prepare()
        except BaseException as error:  # noqa: BLE001  # raised in the thread that waits
            with self._changed:
                self._failure = self._failure or (job.key, error)
                self._end_job(job)
            return
        with self._changed:
            job.prepared, job.began_seconds = prepared, self._clock()
        del prepared  # or its bytes would stay in memory after their claim is released
        self._send(job, job.key)

    def _send(self, job: _Job[T], key: str) -> None:
        """Put an object under one of its keys. The first put that ends is the object; the other one is deleted."""
        with self._changed:
            prepared = job.prepared
            if prepared is None or self._given_up:
                return
            job.puts_pending += 1
        failure: BaseException | None = None
        try:
            self._sender.put(key, prepared.buffers)
            seconds = self._clock() - job.began_seconds
            prepared.check()
            with self._changed:
                if not job.stored_key and not self._is_obsolete(job):
                    job.stored_key = key
                    job.reports.append(prepared.report(key))
                    self.seconds[key] = seconds
                    self._latencies.record(prepared.size_bytes, seconds)
            if job.stored_key == key and self._on_put is not None:
                self._on_put(key, prepared.size_bytes)
        except BaseException as error:  # noqa: BLE001  # raised in the thread that waits
            failure = error
        del prepared
        with self._changed:
            job.puts_pending -= 1
            # While the other put is pending, and may succeed, a failed put decides nothing.
            decides = not job.puts_pending if job.stored_key == "" else job.stored_key == key
            lost = self._is_obsolete(job) or not decides
            if not job.over and decides:
                if failure is not None:
                    self._failure = self._failure or (key, failure)
                self._end_job(job)
            if job.over:
                # The frames of an error hold the buffers of its attempt.
                self._last_errors.pop(job.key, None)
                self._last_errors.pop(job.second_key, None)
        if lost and (job.stored_key != key or self._given_up):
            # Also after a failure: the store may have carried the put out, or may yet do so.
            self._delete([key])

    def _is_obsolete(self, job: _Job[T]) -> bool:
        return job.over or self._given_up

    def _end_job(self, job: _Job[T]) -> None:
        """Mark a job as stored or failed, and release its claim; with the lock held."""
        job.over = True
        # Without this, the bytes of all shards would stay in memory until the last is sent.
        job.prepared = None
        job.prepare = None
        self._claimed_bytes -= min(job.claimed_bytes, self.budget_bytes)
        self._unfinished -= 1
        self._changed.notify_all()

    def _count_retry(self, _verb: str, key: str, error: Exception) -> None:
        self._retries[key] = self._retries.get(key, 0) + 1
        self._last_errors[key] = error

    def _raise_failure(self) -> None:
        if self._failure is None:
            return
        key, error = self._failure
        # A DcpRemoteError as cause says what to do: its text goes into the message, and its details are merged.
        what = f"Rank {self.rank} could not write a shard; nothing of this save was committed."
        details: dict[str, object] = {"cause": error}
        if isinstance(error, DcpRemoteError):
            what = f"{what} {error.what}"
            details = {**error.details, "cause": type(error).__name__}
        details |= {"rank": self.rank, "url": self._store.url, "shard": key, "attempts": self._retries.get(key, 0) + 1}
        raise SaveFailedError(what, **details) from error

    def _timeout(self) -> SaveTimeoutError:
        waiting = [job.key for job in self._jobs if not job.over]
        shard = next((key for key in waiting if key in self._last_errors), waiting[0] if waiting else None)
        return SaveTimeoutError(
            f"Rank {self.rank} did not finish writing its shards by the deadline; nothing of this save was committed.",
            rank=self.rank,
            url=self._store.url,
            unfinished=len(waiting),
            shard=shard,
            attempts=self._retries.get(shard, 0) + 1 if shard is not None else None,
            cause=self._last_errors.get(shard) if shard is not None else None,
        )

    def _delete_all(self) -> None:
        """Delete all objects that were put or may yet be stored; the worker of a pending put deletes its key again."""
        with self._changed:
            keys = [key for job in self._jobs for key in _used_keys(job)]
        self._delete(keys)

    def _delete(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        if self._discard is not None:
            self._discard(keys)
            return
        seconds = min(CLEANUP_SECONDS, max(LATE_CLEANUP_SECONDS, self._deadline.remaining_seconds()))
        pending = DeletionQueue(self._store)
        pending.add(keys)
        try:
            deleted = pending.delete(deadline=Deadline(seconds), batch=_KEYS_PER_CLEANUP, pause_seconds=0)
        except Exception as error:  # noqa: BLE001  # must not hide the error that made the save fail
            logger.warning("Shards of a failed save stay as orphans. shards=%d cause=%s", len(keys), error)
            return
        if deleted.removed < len(keys):
            out_of_time: tuple[str, object] = (keys[-1], "There was no time left.")
            key, cause = next(iter(deleted.failed.items()), out_of_time)
            left = len(keys) - deleted.removed
            logger.warning("Shards of a failed save stay as orphans. shards=%d key=%s cause=%s", left, key, cause)


def _used_keys(job: _Job[T]) -> list[str]:
    """Return the keys under which an object was sent, or is being sent."""
    if job.began_seconds == math.inf:
        return []
    return [job.key, job.second_key] if job.sent_twice else [job.key]
