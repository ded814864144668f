"""Shards up, several at a time, under a fixed memory budget and a deadline; what fails is removed again.

Nothing here knows tensors or manifests. What is sent is prepared in a worker thread just before it is sent.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Generic, NoReturn, Self, TypeVar

from dcp_remote.errors import DcpRemoteError, SaveFailedError, SaveTimeoutError
from dcp_remote.pending import Pending
from dcp_remote.storage.base import Buffer, ObjectStore
from dcp_remote.storage.pace import Pace, pace_of
from dcp_remote.storage.retrying import Deadline, RetryingStore
from dcp_remote.transfer import WAKE_SECONDS, Patience, Workers, submitted

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A connection to S3 gives 50 to 100 MB/s; the client costs a fraction of a core for all of them together.
UPLOADS_IN_FLIGHT = 16
SECOND_UPLOADS_IN_FLIGHT = 2

# What is spent on removing the shards of a failed save before the error is raised: the other ranks wait for it, and an
# orphan costs less than they do.
CLEANUP_SECONDS = 5.0
# At least, where no time is left: why it is not done is what matters then.
LATE_CLEANUP_SECONDS = 0.5
# So few that a store which takes them one by one is done with them before the time is over.
_KEYS_PER_CLEANUP = 100


@dataclass(frozen=True, slots=True)
class Prepared(Generic[T]):
    """An object that is ready to be sent.

    Attributes:
        buffers: Its bytes.
        report: What `finish` gives for it, of the key that it lies under.
        check: Called when it was sent; raises if what was sent cannot be what was meant.
    """

    buffers: Sequence[Buffer]
    report: Callable[[str], T]
    check: Callable[[], None]

    @property
    def size_bytes(self) -> int:
        """Of all buffers."""
        return sum(memoryview(buffer).nbytes for buffer in self.buffers)


@dataclass(slots=True, eq=False)
class _Job(Generic[T]):
    """One object on its way, under one name or two. What changes is changed with the lock of its `Uploads` held."""

    key: str
    second_key: str
    prepare: Callable[[], Prepared[T]]
    claimed_bytes: int
    prepared: Prepared[T] | None = None  # while it is being sent
    began_seconds: float = math.inf  # being sent, by the clock of `Uploads`
    sending: int = 0  # how many puts are under way
    sent_twice: bool = False
    lies_under: str = ""  # the name of the put that was first
    reports: list[T] = field(default_factory=list)  # one at most
    over: bool = False  # sent, or failed


class Uploads(Generic[T]):
    """Puts the shards of one rank in one save, several at a time.

    Use as a context manager. If the block raises, or an upload fails, everything that was put is deleted (best effort,
    5 s), also what is still on its way when it arrives: no manifest can name it. Until `finish` returns, nobody has
    been told of any key.

    A put that is late (`storage/pace.py`) is sent again under another name, and the first of the two to arrive is the
    shard. Not under the same name: the other may still be read from memory when the state has changed already, and
    what it then writes must be nobody's. It is deleted when it arrives; until then what it sends stays in memory,
    beyond the budget.

    Args:
        store: Where to.
        rank: For the error message.
        deadline: Of the save; retries end there, and so does waiting.
        memory_budget_bytes: Bound of what `submit` calls claim at a time.
        on_put: Called with key and bytes of each object that was put, in the thread that put it. For a progress bar;
            what it raises fails the save.
        clock: In seconds, for `seconds` and for what is late.
        pace: What is known of the store; None for what this process knows of it.
        discard: Called instead of deleting, from any thread, with the keys of what is to be deleted.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        rank: int,
        deadline: Deadline,
        memory_budget_bytes: int,
        on_put: Callable[[str, int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        pace: Pace | None = None,
        discard: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        """See the class."""
        self._store = store
        self._discard = discard
        self._rank = rank
        self._on_put = on_put
        self._clock = clock
        self._pace = pace_of(store.url) if pace is None else pace
        self._deadline = deadline
        self._retries: dict[str, int] = {}
        self._patience = Patience()
        self._sender = RetryingStore(
            store,
            Deadline(deadline.remaining_seconds(), self._patience.clock),
            sleep=self._patience.pause,
            on_retry=self._count_retry,
        )
        self._budget_bytes = memory_budget_bytes
        self._claimed_bytes = 0
        self._unfinished = 0
        self._sent_twice = 0
        self._seconds: dict[str, float] = {}
        self._changed = threading.Condition()
        self._pool = Workers(UPLOADS_IN_FLIGHT, "dcp_remote-upload")
        self._second_pool = Workers(SECOND_UPLOADS_IN_FLIGHT, "dcp_remote-upload-again")
        self._jobs: list[_Job[T]] = []
        self._failure: tuple[str, BaseException] | None = None  # the first
        self._finished = False
        self._given_up = False

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Delete everything again unless `finish` has returned."""
        with self._changed:
            self._given_up = not self._finished
        self._pool.shutdown(wait=False)
        self._second_pool.shutdown(wait=False)
        # What is under way has lost against its second, or lost all sense.
        self._patience.give_up()
        if not self._finished:
            self._abandon()

    def claim(self, size_bytes: int) -> None:
        """Wait until the budget has room; a claim larger than the budget waits for all of it.

        A claim of nothing does not wait: it only looks whether going on makes sense.

        Raises:
            SaveFailedError: An upload failed.
            SaveTimeoutError: The deadline passed.
        """
        size_bytes = min(size_bytes, self._budget_bytes)
        with self._changed:
            while self._claimed_bytes and self._claimed_bytes + size_bytes > self._budget_bytes:
                self._wait()
            self._raise_if_over()
            self._claimed_bytes += size_bytes

    def submit(self, key: str, prepare: Callable[[], Prepared[T]], *, claimed_bytes: int, second_key: str = "") -> None:
        """Put one object in the background.

        Args:
            key: Its name, which nobody else will ever write.
            prepare: Gives what to send, and what to report; called in a worker thread.
            claimed_bytes: What was claimed for it; free again when it is done.
            second_key: Such a name for the case that the put is late; empty to wait for it.
        """
        job = _Job(key, second_key, prepare, claimed_bytes)
        with self._changed:
            self._unfinished += 1
            self._jobs.append(job)
        submitted(self._pool, partial(self._run, job))

    def finish(self) -> list[T]:
        """Wait for all of them; their reports in the order of submission.

        Raises:
            SaveFailedError: One failed: which, after how many attempts, why.
            SaveTimeoutError: The deadline passed.
        """
        with self._changed:
            while self._unfinished:
                self._wait()
            self._raise_failure()
            self._finished = True
            return [report for job in self._jobs for report in job.reports]

    @property
    def retries(self) -> int:
        """How many requests had to be sent again so far, or were sent twice."""
        return sum(self._retries.values()) + self._sent_twice

    @property
    def requests(self) -> int:
        """How many requests were sent for what was put, repeated ones included."""
        return len(self._seconds) + self.retries

    @property
    def seconds(self) -> Mapping[str, float]:
        """How long each object that was put took to be sent, with its attempts and the pauses between them."""
        return self._seconds

    def _wait(self) -> None:
        """Until something changes, or it is time to look again; with the lock held."""
        self._raise_if_over()
        self._repeat_what_is_late()
        self._changed.wait(min(WAKE_SECONDS, self._deadline.remaining_seconds()))

    def _repeat_what_is_late(self) -> None:
        now_seconds = self._clock()
        for job in self._jobs:
            if job.over or job.prepared is None or job.sent_twice or not job.second_key:
                continue
            late = now_seconds - job.began_seconds > self._pace.late_seconds(job.prepared.size_bytes)
            if late and self._pace.may_repeat():
                job.sent_twice = True
                self._sent_twice += 1
                # No thread can be started: it is sent by another that finds it in the queue, or not at all.
                with suppress(RuntimeError):
                    self._second_pool.submit(partial(self._send, job, job.second_key))

    def _raise_if_over(self) -> None:
        self._raise_failure()
        if self._deadline.expired():
            raise self._timeout()

    def _run(self, job: _Job[T]) -> None:
        try:
            prepared = job.prepare()
        except BaseException as error:  # noqa: BLE001  # told by whoever waits
            with self._changed:
                self._failure = self._failure or (job.key, error)
                self._end(job)
            return
        with self._changed:
            job.prepared, job.began_seconds = prepared, self._clock()
        del prepared  # or its bytes would outlive their place in the budget
        self._send(job, job.key)

    def _send(self, job: _Job[T], key: str) -> None:
        """Put an object under one of its names; the first that is there is the object, the other is deleted."""
        with self._changed:
            prepared = job.prepared
            if prepared is None or self._given_up:
                return
            job.sending += 1
        failure: BaseException | None = None
        try:
            self._sender.put(key, prepared.buffers)
            seconds = self._clock() - job.began_seconds
            prepared.check()
            with self._changed:
                if not job.lies_under and not self._needs_no_more(job):
                    job.lies_under = key
                    job.reports.append(prepared.report(key))
                    self._seconds[key] = seconds
                    self._pace.note(prepared.size_bytes, seconds)
            if job.lies_under == key and self._on_put is not None:
                self._on_put(key, prepared.size_bytes)
        except BaseException as error:  # noqa: BLE001  # told by whoever waits
            failure = error
        del prepared  # as above
        with self._changed:
            job.sending -= 1
            # A put that failed counts for nothing while the other may succeed.
            decides = not job.sending if job.lies_under == "" else job.lies_under == key
            lost = self._needs_no_more(job) or not decides
            if not job.over and decides:
                if failure is not None:
                    self._failure = self._failure or (key, failure)
                self._end(job)
        if lost and not self._is_the_object(job, key):
            # Also what failed: it may have been carried out, or may be yet.
            self._remove([key])

    def _is_the_object(self, job: _Job[T], key: str) -> bool:
        return job.lies_under == key and not self._given_up

    def _needs_no_more(self, job: _Job[T]) -> bool:
        return job.over or self._given_up

    def _end(self, job: _Job[T]) -> None:
        """Whatever came of it; with the lock held."""
        job.over = True
        # Or the bytes of all shards would stay until the last is sent.
        job.prepared = None
        job.prepare = _nothing_to_prepare
        self._claimed_bytes -= min(job.claimed_bytes, self._budget_bytes)
        self._unfinished -= 1
        self._changed.notify_all()

    def _count_retry(self, _verb: str, key: str, _error: Exception) -> None:
        self._retries[key] = self._retries.get(key, 0) + 1

    def _raise_failure(self) -> None:
        if self._failure is None:
            return
        key, error = self._failure
        # What the user must do stands in the cause, if that is an error of ours: said once, and first.
        what = f"Rank {self._rank} could not write a shard; nothing of the save counts."
        details: dict[str, object] = {"cause": error}
        if isinstance(error, DcpRemoteError):
            what = f"{what} {error.what}"
            details = {**error.details, "cause": type(error).__name__}
        details |= {"rank": self._rank, "url": self._store.url, "shard": key, "attempts": self._retries.get(key, 0) + 1}
        raise SaveFailedError(what, **details) from error

    def _timeout(self) -> SaveTimeoutError:
        waiting = [job.key for job in self._jobs if not job.over]
        return SaveTimeoutError(
            f"Rank {self._rank} did not finish writing its shards by the deadline; nothing of the save counts.",
            rank=self._rank,
            url=self._store.url,
            unfinished=len(waiting),
            shard=waiting[0] if waiting else None,
            attempts=self._retries.get(waiting[0], 0) + 1 if waiting else None,
        )

    def _abandon(self) -> None:
        """Delete what was sent, and what may yet arrive: its own worker does that again when it is through with it."""
        with self._changed:
            keys = [key for job in self._jobs for key in _names_used(job)]
        self._remove(keys)

    def _remove(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        if self._discard is not None:
            self._discard(keys)
            return
        seconds = min(CLEANUP_SECONDS, max(LATE_CLEANUP_SECONDS, self._deadline.remaining_seconds()))
        pending = Pending(self._store)
        pending.add(keys)
        try:
            deleted = pending.delete(deadline=Deadline(seconds), batch=_KEYS_PER_CLEANUP, pause_seconds=0)
        except Exception as error:  # noqa: BLE001  # whatever it is must not hide the error that is on its way
            logger.warning("Shards of a failed save stay as orphans. shards=%d cause=%s", len(keys), error)
            return
        if deleted.removed < len(keys):
            late: tuple[str, object] = (keys[-1], "There was no time left.")
            key, cause = next(iter(deleted.failed.items()), late)
            left = len(keys) - deleted.removed
            logger.warning("Shards of a failed save stay as orphans. shards=%d key=%s cause=%s", left, key, cause)


def _nothing_to_prepare() -> NoReturn:
    raise AssertionError("An object is prepared once.")


def _names_used(job: _Job[T]) -> list[str]:
    """Under which an object was, or is being, sent."""
    if job.began_seconds == math.inf:
        return []
    return [job.key, job.second_key] if job.sent_twice else [job.key]
