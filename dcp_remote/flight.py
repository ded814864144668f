"""A save under way: a thread of its own, and who waits for it."""

from __future__ import annotations

import logging
import math
import threading
import time

from dcp_remote.desk import Desk
from dcp_remote.errors import CommitUnknownError, DcpRemoteError, SaveTimeoutError
from dcp_remote.joint import Joint
from dcp_remote.reports import SaveReport
from dcp_remote.save_rank import RankSaver, Task

logger = logging.getLogger(__name__)

# How often whoever waits looks whether there is still something to wait for.
_LOOK_SECONDS = 0.5

# What a thread gets to unwind once its save is given up. One that is stuck in a store that does not answer is left
# behind; it can do no harm any more, as the joint takes nothing from it.
_UNWIND_SECONDS = 2.0

# What the next save waits for the thread of one that was given up.
_STOP_SECONDS = 30.0

# What closing gives to deleting old checkpoints; the rest is left to `dcp-remote gc`.
_FINISH_SECONDS = 60.0


class Flight:
    """A save under way.

    Args:
        joint: Of all ranks.
        saver: This rank's.
        task: What to save.
        desk: The coordinator's side; None on other ranks.
        before: The flight before this one, which is settled; its thread may be stuck.
    """

    def __init__(self, joint: Joint, saver: RankSaver, task: Task, desk: Desk | None, before: Flight | None) -> None:
        """See the class; the thread starts here."""
        self._joint, self._saver, self._desk = joint, saver, desk
        self._task = task
        self._before = before
        self._settled = threading.Event()
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        # A daemon: one that is stuck must not keep the process. `CheckpointManager` waits for it at exit.
        self._thread = threading.Thread(target=self._run, name="dcp_remote-save", daemon=True)
        self._thread.start()

    @property
    def is_settled(self) -> bool:
        """Whether it is known how it ended, or it was given up."""
        return self._settled.is_set()

    def result(self, seconds: float = math.inf) -> SaveReport:
        """Wait until it is settled.

        Args:
            seconds: After which it is given up, whatever its deadline.

        Raises:
            DcpRemoteError: It failed, or was given up.
        """
        end_seconds = time.monotonic() + seconds
        given_up_seconds: float | None = None
        while not self._settled.wait(_LOOK_SECONDS):
            if time.monotonic() > end_seconds:
                self._give_up(SaveTimeoutError(f"There is no time left for {self._joint.what}; it was given up."))
                break
            self._joint.look()
            cancelled = self._joint.cancelled
            if cancelled is None:
                continue
            given_up_seconds = time.monotonic() if given_up_seconds is None else given_up_seconds
            if time.monotonic() - given_up_seconds > _UNWIND_SECONDS:
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

    def interrupt(self) -> None:
        """Whoever waited for it stops waiting, and will change what is being saved: nothing of that is to be committed.

        Where nothing is read any more, since the coordinator is committing already, it goes on.
        """
        if not self._settled.is_set() and self._joint.give_up("was interrupted"):
            self._error = self._joint.cancelled
            self._settled.set()

    def finish(self) -> None:
        """Wait until its thread has ended and old checkpoints are deleted, but not for ever."""
        end_seconds = time.monotonic() + _FINISH_SECONDS
        self._thread.join(_FINISH_SECONDS)
        self._saver.tidying.finish(max(0.0, end_seconds - time.monotonic()))

    def _saved(self) -> SaveReport:
        try:
            with self._joint:
                return self._saver.save(self._joint, self._task)
        except DcpRemoteError as error:
            if not self._joint.coordinator_lost:
                raise
            return self._saver.settle(self._task, error)

    def _run(self) -> None:
        if self._before is not None:
            self._before._thread.join(_STOP_SECONDS)
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
