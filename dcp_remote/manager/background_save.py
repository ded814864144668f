"""Saves in background threads: one under way at a time; waiting for it, giving it up, and the end of the process."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Literal, TypeAlias

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.threads import OneTimeEvent
from dcp_remote.coordination.collective import Collective
from dcp_remote.coordination.group import RankGroup
from dcp_remote.errors import (
    BucketNotFoundError,
    CheckpointExistsError,
    CommitUnknownError,
    CorruptCheckpointError,
    DcpRemoteError,
    FencedError,
    InvalidArgumentError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
from dcp_remote.manager.preemption import Preemption
from dcp_remote.manager.rank_save import RankSaver
from dcp_remote.manager.reports import SaveReport
from dcp_remote.manager.save_planning import Task

logger = logging.getLogger(__name__)

# Interval at which a waiting caller looks whether the save goes on; and the shorter one once the save is cancelled.
_LOOK_SECONDS = 0.5
_LAST_LOOKS_SECONDS = 0.05

# Time in which the thread of a cancelled save may end. A thread that is stuck in a request is then left behind: it does
# no harm, because the collective operation takes nothing from it any more.
_UNWIND_SECONDS = 2.0
# Share of the time left before the process is killed; the rest is for closing.
_UNWIND_SHARE = 0.125

# Time for which a save waits for the thread of an earlier save that was given up.
_STOP_SECONDS = 30.0

# Time for deleting old checkpoints when a manager closes; what remains is left to `dcp-remote gc`.
_FINISH_SECONDS = 60.0
# After a failed save the store may be down, and retries would use all of the time.
_FINISH_FAILED_SECONDS = 5.0

# Rule for a background save that fails: the next call raises its error, or logs it.
OnError: TypeAlias = Literal["raise", "warn"]

# Errors that end a job with either rule: of the caller, or such that the next save would fail in the same way.
_LASTING = (
    *(InvalidArgumentError, UnsafeObjectError, CheckpointExistsError, FencedError),
    *(BucketNotFoundError, CorruptCheckpointError, UnsupportedFormatError),
)


def may_pass(error: BaseException) -> bool:
    """Return whether a job may go on without the save that failed so; the same on all ranks.

    An error of another package may pass, since the other ranks are told a `SaveFailedError` in its place.
    """
    return isinstance(error, Exception) and not isinstance(error, _LASTING)


class BackgroundSave:
    """One save: `start` begins it, `result` waits for it, `abandon` gives it up.

    `before` is the previous save, whose result is known, and whose thread may be stuck. `begun` is set once all ranks
    have come with their states and the run takes the step, or the save has a result; `settled`, once the save has a
    result, or was given up. `left_seconds` of the methods gives the seconds until this process is killed.
    """

    def __init__(
        self, collective: Collective, ranks: RankGroup, saver: RankSaver, before: BackgroundSave | None
    ) -> None:
        """Store the arguments; no thread is started yet."""
        self.collective, self._ranks, self._saver, self._before = collective, ranks, saver, before
        self.what = collective.what  # name of the save in messages: "the save of step 100"
        # Taken by the thread or by a caller that gives up: whoever is first leaves the collective operation.
        # After Ctrl-C in `Thread.start` the caller cannot know whether there is a thread.
        self._leaves = threading.Lock()
        self.begun, self.settled = OneTimeEvent(), OneTimeEvent()
        self.ended = OneTimeEvent()  # the thread of the save has sent its last request
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._is_awaited = False

    def start(self, task: Task) -> None:
        """Begin the save in a thread. If this method raises, as when no thread can be started, call `abandon`."""
        self._task, self.step = task, task.labels.step
        # A daemon, because a stuck thread must not keep the process alive; `AtExit` waits for the thread.
        threading.Thread(target=self._run, name="dcp_remote-save", daemon=True).start()

    def has_raised(self, error: BaseException) -> bool:
        """Return whether the save has failed by this error, and not the call of `save` that began it."""
        return error is self._error or error is self.collective.cancelled

    def result(self, left_seconds: Callable[[], float]) -> SaveReport:
        """Wait for the report of the save.

        Raises:
            DcpRemoteError: The save failed, or was given up.
        """
        self.wait_for(self.settled, left_seconds)
        if self._error is not None:
            raise self._error
        assert self._report is not None, "settled without an error"
        return self._report

    def wait_for(self, event: OneTimeEvent, left_seconds: Callable[[], float]) -> None:
        """Wait for an event of the save; give the save up if it is cancelled and does not end."""
        self._is_awaited = True
        try:
            last_seconds: float | None = None
            while not event.wait(_LOOK_SECONDS if last_seconds is None else _LAST_LOOKS_SECONDS):
                self.collective.check_time_and_store()
                cancelled = self.collective.cancelled
                if cancelled is None:
                    continue
                now = time.monotonic()
                if last_seconds is None:
                    last_seconds = now + min(_UNWIND_SECONDS, _UNWIND_SHARE * left_seconds())
                if now > last_seconds:
                    self._give_up(cancelled)
        finally:
            self._is_awaited = False

    def _settle(self) -> None:
        self.settled.set()
        self.begun.set()

    def _give_up(self, error: DcpRemoteError) -> None:
        """Set the error of the save, and leave its thread behind, which is stuck in a request."""
        if self.collective.is_committing:
            what = f"{error.what} The commit had begun, and the store has not said whether it was carried out."
            error = CommitUnknownError(what, **error.details)
        self._error = error
        self._settle()

    def abandon(self, error: BaseException) -> bool:
        """Give the save up, because the calling `save` raises and its caller may change the state; commit nothing.

        A save whose commit has begun reads the state no more, and goes on. The other ranks are told the error. Returns
        True if a thread has begun the save.
        """
        if self._leaves.acquire(blocking=False):
            self._error = error
            self._settle()
            self._ranks.abandon(self.collective, error)
            self.ended.set()
            return False
        if not self.settled.is_set() and self.collective.abort(error):
            self._error = self.collective.cancelled
            self._settle()
        return True

    def finish(self, seconds: float = _FINISH_SECONDS) -> None:
        """Wait until the thread has ended and old checkpoints are deleted, for `seconds` and at most a minute.

        A deletion that has not ended by then is told to stop.
        """
        deadline = Deadline(min(seconds, _FINISH_SECONDS if self._error is None else _FINISH_FAILED_SECONDS))
        try:
            self.ended.wait(deadline.remaining_seconds())
            self._saver.background_deletions.finish(deadline.remaining_seconds())
        except BaseException:  # Ctrl-C
            self._saver.background_deletions.finish(0.0)
            raise

    def _saved(self) -> SaveReport:
        try:
            with self.collective:
                if not self._task.is_awaited:
                    self._task.late.finish()
                return self._saver.save(self.collective, self._task)
        except DcpRemoteError as error:
            if not self.collective.is_commit_unknown:
                raise
            return self._saver.find_commit(self._task, error)

    def _run(self) -> None:
        if not self._leaves.acquire(blocking=False):
            return  # given up before the thread began
        try:
            self._save()
        finally:  # also after an error in a handler of the log: the operation was left, so no deadline ends a wait
            self._task.late.cancel()
            # Frees the copy of the state, because the next save makes another.
            del self._task
            self._settle()
            self.ended.set()

    def _save(self) -> None:
        if self._before is not None:
            self._before.ended.wait(_STOP_SECONDS)
            self._before = None
        operation = self._task.operation
        try:
            self._report = self._saved()
        except BaseException as error:  # noqa: BLE001  # raised by `result`
            is_first, self._error = self._error is None, self._error or error
            # An interval may be hours long, and the error is raised only at its end.
            if is_first and self._ranks.is_coordinator and not self._is_awaited:
                text = '%s has failed; the next save, wait or close raises this error (logs it if on_error="warn"): %s'
                logger.error(text, self.what, error)  # noqa: TRY400  # its traceback comes when it is raised
            operation.end(error=error)
        else:
            # A report covers all ranks: only the coordinator's telemetry records it.
            operation.end(self._report if self._ranks.is_coordinator else None)


class BackgroundSaves:
    """Saves of one rank, one after another."""

    def __init__(
        self, url: str, preemption: Preemption, is_requesting: Callable[[], bool], *, on_error: OnError
    ) -> None:
        """Begin without a save. `is_requesting` returns whether a request to the store is under way."""
        self._url = url
        self._preemption = preemption
        self._is_requesting = is_requesting
        self._on_error = on_error
        self._under_way: BackgroundSave | None = None  # until `wait` has given its result
        self.report: SaveReport | None = None  # of the last save that was committed and waited for
        self.newest: BackgroundSave | None = None  # last save that was begun; it may be deleting old checkpoints

    @property
    def step(self) -> int | None:
        """Step of the save whose result `wait` has not given yet; None if there is none."""
        return self._under_way.step if self._under_way is not None else None

    @property
    def is_busy(self) -> bool:
        """True if a save is under way that has no result and was not cancelled."""
        save = self._under_way
        return save is not None and not save.settled.is_set() and save.collective.cancelled is None

    def start(self, background_save: BackgroundSave, task: Task) -> None:
        """Begin a save. If this method or the rest of the calling `save` raises, call `abandon`."""
        self._under_way = background_save
        background_save.start(task)
        self.newest = background_save

    def abandon(self, background_save: BackgroundSave, error: BaseException) -> None:
        """Give a save up, because the calling `save` or `close` raises; a save whose commit has begun goes on."""
        is_own = not background_save.has_raised(error)
        if is_own and self._on_error == "warn" and (may_pass(error) or not isinstance(error, DcpRemoteError)):
            # The training of this rank ends by its own error, and so must that of the others.
            error = InvalidArgumentError("The call of `save` or `close` raised an error on one rank.", cause=error)
        if background_save.abandon(error):
            self.newest = background_save
        if self._under_way is background_save and background_save.settled.is_set():
            self._under_way = None

    def wait(self) -> SaveReport | None:
        """Wait until no save is under way; return the report of the last save that was committed.

        Raises:
            DcpRemoteError: The save failed. Each failure is raised once.
        """
        background_save = self._under_way
        if background_save is not None:
            try:
                self.report = background_save.result(self._preemption.remaining_seconds)
            finally:
                # After Ctrl-C the save is still under way.
                if background_save.settled.is_set():
                    self._under_way = None
        return self.report

    def wait_until_begun(self) -> None:
        """Wait until all ranks have come to the save under way and the run takes its step.

        Raises:
            DcpRemoteError: The save has failed. Each failure is raised once.
        """
        background_save = self._under_way
        if background_save is not None:
            background_save.wait_for(background_save.begun, self._preemption.remaining_seconds)
            if background_save.settled.is_set():
                self.wait()

    def close(self, error: BaseException | None) -> None:
        """Wait for the save under way, and for its deletion of old checkpoints.

        Python may show the error that ended the block of the manager, or the process, only after the wait, during which
        a launcher may kill the process; so this method logs it, and what it waits for, before it waits. Without an
        error, the next Ctrl-C does that. A Ctrl-C after the line gives the save up.

        Raises:
            DcpRemoteError: The save failed.
            KeyboardInterrupt: The save was given up.
        """
        seconds = math.inf
        is_interrupted = isinstance(error, KeyboardInterrupt)
        try:
            self._wait_to_close(error)
        except KeyboardInterrupt:
            seconds = 0.0
            raise
        finally:
            newest, self.newest = self.newest, None
            if newest is not None:
                if is_interrupted and (not newest.ended.is_set() or self._is_requesting()):
                    # A store that does not answer holds the process for as long as one request may take.
                    logger.warning(
                        "%s: waiting for requests of %s; press Ctrl-C to stop waiting", self._url, newest.what
                    )
                newest.finish(min(seconds, self._preemption.working_seconds()))

    def _wait_to_close(self, error: BaseException | None) -> None:
        while (background_save := self._under_way) is not None:
            is_interrupted = isinstance(error, KeyboardInterrupt)
            if error is not None and not background_save.settled.is_set():
                until = time.strftime(
                    "%H:%M:%S", time.localtime(time.time() + background_save.collective.deadline.remaining_seconds())
                )
                first_line = str(error).partition("\n")[0]
                cause = "" if is_interrupted else f"after {type(error).__name__} ({first_line}), "
                logger.warning(
                    "%s: %swaiting for %s, until %s; Ctrl-C gives it up", self._url, cause, background_save.what, until
                )
            try:
                self.wait()
            except KeyboardInterrupt as interrupt:
                if is_interrupted:
                    self.abandon(background_save, interrupt)
                    raise
                error = interrupt


class AtExit:
    """Close a manager when the process ends, if its user has not.

    `close` gets the error that ends the process, or None; it waits for the last save, and raises the error of that
    save.
    """

    def __init__(self, url: str, close: Callable[[BaseException | None], None]) -> None:
        """Register with `atexit`, and with `multiprocessing`, whose forked processes may end without the former."""
        self._url = url
        self._close = close
        atexit.register(self._run)
        self._child: Finalize | None = None
        if multiprocessing.parent_process() is not None:
            self._child = Finalize(None, self._run, exitpriority=0)

    def cancel(self) -> None:
        """Forget the manager, which was closed."""
        atexit.unregister(self._run)
        if self._child is not None:
            self._child.cancel()

    def _run(self) -> None:
        """Wait for the last save; log its failure, and end the process with exit code 1.

        The exit code matters: a job that ended with 0 would be taken for one that has its last checkpoint.
        """
        # multiprocessing calls this method while the error is raised; the interpreter, once it is set and shown. Of an
        # interactive session that is any earlier error.
        error = sys.exc_info()[1] or (None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))
        try:
            self._close(None if isinstance(error, SystemExit) else error)
        except BaseException:
            logger.critical("%s: the last save of this process failed", self._url, exc_info=True)
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(1)
