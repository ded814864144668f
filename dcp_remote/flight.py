"""A save under way: a thread of its own, and who waits for it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from dcp_remote.desk import Desk
from dcp_remote.errors import CommitUnknownError, DcpRemoteError
from dcp_remote.joint import Joint
from dcp_remote.ranks import Ranks
from dcp_remote.reports import SaveReport
from dcp_remote.save_rank import RankSaver, Task
from dcp_remote.storage.retrying import Deadline

logger = logging.getLogger(__name__)

# How often whoever waits looks whether there is still something to wait for; and once there is not.
_LOOK_SECONDS = 0.5
_LAST_LOOKS_SECONDS = 0.05

# What a thread gets to unwind once its save is given up. One that is stuck in a store that does not answer is left
# behind; it can do no harm any more, as the joint takes nothing from it.
_UNWIND_SECONDS = 2.0
# Of what a process that is about to be killed has left then: the rest is for closing.
_UNWIND_SHARE = 0.25

# What the next save waits for the thread of one that was given up.
_STOP_SECONDS = 30.0

# What closing gives to deleting old checkpoints; the rest is left to `dcp-remote gc`.
_FINISH_SECONDS = 60.0
# Less after a save that failed: the store may be dead, which its retries find out no sooner.
_FINISH_FAILED_SECONDS = 5.0


def _no_end() -> float:
    return math.inf


class Flight:
    """A save: begun by `start`, waited for by `result`, given up by `abandon`.

    Args:
        joint: Of all ranks, prepared by them.
        ranks: Who save together.
        saver: This rank's.
        desk: The coordinator's side; None on other ranks.
        before: The flight before this one, which is settled; its thread may be stuck.
    """

    def __init__(self, joint: Joint, ranks: Ranks, saver: RankSaver, desk: Desk | None, before: Flight | None) -> None:
        """See the class; no thread is started yet."""
        self._joint, self._ranks, self._saver, self._desk = joint, ranks, saver, desk
        self._before = before
        # Whoever takes it first, the thread or a caller that gives up, leaves the joint: after Ctrl-C in `Thread.start`
        # the caller cannot know whether there is a thread.
        self._leaves = threading.Lock()
        self._settled, self._ended = threading.Event(), threading.Event()
        self._report: SaveReport | None = None
        self._error: BaseException | None = None

    def start(self, task: Task) -> None:
        """Begin it, in a thread. If this raises, the flight is to be abandoned.

        Args:
            task: What to save.

        Raises:
            RuntimeError: No thread can be started.
        """
        self._task = task
        # A daemon: one that is stuck must not keep the process. `CheckpointManager` waits for it at exit.
        threading.Thread(target=self._run, name="dcp_remote-save", daemon=True).start()

    @property
    def is_settled(self) -> bool:
        """Whether it is known how it ended, or it was given up."""
        return self._settled.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether its thread has sent its last request."""
        return self._ended.is_set()

    @property
    def what(self) -> str:
        """What is saved: "the save of step 100"."""
        return self._joint.what

    @property
    def remaining_seconds(self) -> float:
        """Until it is given up."""
        return self._joint.deadline.remaining_seconds()

    def result(self, left_seconds: Callable[[], float] = _no_end) -> SaveReport:
        """Wait until it is settled.

        Args:
            left_seconds: Until this process is killed.

        Raises:
            DcpRemoteError: It failed, or was given up.
        """
        last_seconds: float | None = None
        while not self._settled.wait(_LOOK_SECONDS if last_seconds is None else _LAST_LOOKS_SECONDS):
            self._joint.look()
            cancelled = self._joint.cancelled
            if cancelled is None:
                continue
            now = time.monotonic()
            if last_seconds is None:
                last_seconds = now + min(_UNWIND_SECONDS, _UNWIND_SHARE * left_seconds())
            if now > last_seconds:
                self._give_up(cancelled)
        if self._error is not None:
            raise self._error
        assert self._report is not None, "settled without an error"
        return self._report

    def _give_up(self, error: DcpRemoteError) -> None:
        """Leave the thread behind: it is stuck in a request."""
        if self._joint.past_return:
            what = f"{error.what} It was committing, and whether it did the store has not said yet."
            error = CommitUnknownError(what, **error.details)
        self._error = error
        self._settled.set()

    def abandon(self, error: BaseException) -> bool:
        """Give it up, since the call that saves raises, and what is saved will change: nothing of it is committed.

        Where nothing is read any more, since the coordinator is committing already, it goes on.

        Args:
            error: What is raised.

        Returns:
            Whether a thread has begun it.
        """
        if self._leaves.acquire(blocking=False):
            self._error = error
            self._settled.set()
            self._ranks.abandon(self._joint, error)
            return False
        if not self._settled.is_set() and self._joint.give_up("was interrupted"):
            self._error = self._joint.cancelled
            self._settled.set()
        return True

    def finish(self, seconds: float = _FINISH_SECONDS) -> None:
        """Wait until its thread has ended and old checkpoints are deleted, but not for ever.

        Args:
            seconds: After which deleting is told to stop.
        """
        deadline = Deadline(min(seconds, _FINISH_SECONDS if self._error is None else _FINISH_FAILED_SECONDS))
        try:
            self._ended.wait(deadline.remaining_seconds())
            self._saver.tidying.finish(deadline.remaining_seconds())
        except BaseException:  # Ctrl-C
            self._saver.tidying.finish(0.0)
            raise

    def _saved(self) -> SaveReport:
        try:
            with self._joint:
                return self._saver.save(self._joint, self._task)
        except DcpRemoteError as error:
            if not self._joint.coordinator_lost:
                raise
            return self._saver.settle(self._task, error)

    def _run(self) -> None:
        if not self._leaves.acquire(blocking=False):
            return  # given up before it began
        try:
            self._save()
        finally:
            self._ended.set()

    def _save(self) -> None:
        if self._before is not None:
            self._before._ended.wait(_STOP_SECONDS)
            self._before = None
        operation = self._task.operation
        try:
            self._report = self._saved()
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            self._error = self._error or error
            operation.fail(error)
        else:
            # A report speaks for all ranks.
            operation.end(self._report if self._desk is not None else None)
        # And with it the copy of the state, which the next save must not find beside its own.
        del self._task
        self._settled.set()
