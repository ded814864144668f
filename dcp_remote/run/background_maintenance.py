"""Retention and deletion in a background thread, beside the saves that follow."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import CommitUnknownError, DcpRemoteError, FencedError
from dcp_remote.format.catalog import Catalog, Entry, Owner
from dcp_remote.run.maintenance import Maintenance
from dcp_remote.run.retention import ChooseToDelete, Retention
from dcp_remote.run.run import CheckpointInfo
from dcp_remote.storage.base import ObjectStore

logger = logging.getLogger(__name__)

# Deadline of one round; what is not done by then is done in the next one.
_ROUND_SECONDS = 600.0

# A thread that outlasts its deadline by this is stuck in a request, and another thread takes over.
_STUCK_SECONDS = 30.0


class BackgroundMaintenance:
    """Background deletion of a rank's unused shards; on the coordinator also of what retention or a commit lets go.

    One thread at a time uses the `Maintenance`, and other threads queue tasks for it. A thread that is stuck is left
    behind with its `Maintenance`, and the thread that takes over gets a new one.

    Args:
        store: Store opened at the run.
        retention: Checkpoints to keep, or a function that returns the steps to delete; None keeps all.

    Attributes:
        retention_failures: Number of rounds in which retention failed, each of which was logged.
    """

    def __init__(self, store: ObjectStore, retention: Retention | ChooseToDelete | None = None) -> None:
        """Store the settings; no request, and no thread yet."""
        self._store, self._retention = store, retention
        self.retention_failures = 0
        self._changed = threading.Condition()
        self._begin_anew()

    def committed(
        self,
        catalog: Catalog,
        entry: Entry,
        shards: Iterable[str],
        *,
        replaced: Iterable[Entry],
        unnamed: Iterable[str],
    ) -> None:
        """Apply retention, and delete what this commit let go.

        Args:
            catalog: Catalog that the commit left.
            entry: Entry of the checkpoint that was committed.
            shards: Keys of all shards that it names.
            replaced: Entries that its step had before.
            unnamed: Keys of shards that its save put and its manifest does not name.
        """
        keys, former, dead = tuple(shards), tuple(replaced), tuple(unnamed)

        def task(maintenance: Maintenance) -> None:
            maintenance.remember(entry.manifest, keys)
            maintenance.queue_deletion(dead)
            for replaced_entry in former:
                maintenance.note(catalog.run_id, replaced_entry)

        if self._retention is not None or former or dead or not self._is_done:
            self._hand_over(task, catalog=catalog, settle=True)

    def failed(self, run_id: str, entry: Entry, shards: Iterable[str], *, replaced: Iterable[Entry] = ()) -> None:
        """Delete the objects of an attempt once it is certain that it is not and cannot be committed.

        Args:
            run_id: Run of the attempt.
            entry: Entry that the attempt would have had.
            shards: Keys of the shards that the attempt put.
            replaced: Entries that its step had before.
        """
        keys, former = frozenset(shards), tuple(replaced)

        def task(maintenance: Maintenance) -> None:
            maintenance.note(run_id, entry, keys)
            for replaced_entry in former:
                maintenance.note(run_id, replaced_entry)

        self._hand_over(task, settle=True)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete shards of a save that ended before its commit began, so that no checkpoint can ever name them."""
        dead = tuple(keys)
        if dead:
            self._hand_over(lambda maintenance: maintenance.queue_deletion(dead))

    def wait(self, seconds: float) -> bool:
        """Wait for all queued work, for at most so many seconds; return whether it is done."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, seconds)

    def finish(self, seconds: float) -> None:
        """Retry what failed before, wait, and stop; the rest is left to `dcp-remote gc`.

        Args:
            seconds: Longest wait, in seconds.
        """
        deadline = Deadline(seconds)
        try:
            self.wait(deadline.remaining_seconds())
            if not self._is_done and not deadline.expired():
                self._hand_over(lambda _: None, settle=True)
                self.wait(deadline.remaining_seconds())
        finally:
            self._stop.set()

    # ----

    def _begin_anew(self) -> None:
        stop = threading.Event()

        def sleep(seconds: float) -> None:
            stop.wait(seconds)

        self._stop, self._maintenance = stop, Maintenance(self._store, sleep=sleep)
        self._thread: threading.Thread | None = None
        self._deadline = _deadline(stop)
        self._tasks: list[Callable[[Maintenance], None]] = []
        self._catalog: Catalog | None = None
        self._settles, self._is_done = False, True

    def _hand_over(
        self, task: Callable[[Maintenance], None], *, catalog: Catalog | None = None, settle: bool = False
    ) -> None:
        with self._changed:
            is_late = self._deadline.elapsed_seconds() > _ROUND_SECONDS + _STUCK_SECONDS
            if self._thread is not None and (self._stop.is_set() or is_late):
                logger.warning(
                    "%s: a request to delete old objects does not end; they are left to `dcp-remote gc`",
                    self._store.url,
                )
                self._stop.set()
                self._begin_anew()
            self._stop.clear()
            self._tasks.append(task)
            self._catalog = catalog or self._catalog
            self._settles |= settle
            if self._thread is None:
                self._start()

    def _start(self) -> None:
        self._deadline = _deadline(self._stop)
        thread = threading.Thread(
            target=self._run, name="dcp_remote-tidy", args=(self._maintenance, self._stop), daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            # The next task starts a thread, which does this one, too.
            logger.warning("%s: old objects are deleted later: %s", self._store.url, error)
        else:
            self._thread = thread

    def _run(self, maintenance: Maintenance, stop: threading.Event) -> None:
        try:
            while (work := self._next(maintenance, stop)) is not None:
                self._do(work, maintenance, stop)
        finally:
            with self._changed:
                self._over(maintenance)

    def _next(self, maintenance: Maintenance, stop: threading.Event) -> _Work | None:
        """Take the queued work; None if the thread is to end, which then counts as ended."""
        with self._changed:
            if self._maintenance is not maintenance or not self._tasks or stop.is_set():
                self._over(maintenance)
                return None
            self._deadline = _deadline(stop)
            work = _Work(self._tasks, self._catalog, self._settles, self._deadline)
            self._tasks, self._catalog, self._settles = [], None, False
            return work

    def _over(self, maintenance: Maintenance) -> None:
        """Note that the thread of this `Maintenance` no longer uses it. Called with the lock held."""
        if self._maintenance is maintenance and self._thread is threading.current_thread():
            self._thread, self._is_done = None, maintenance.is_done
            self._changed.notify_all()

    def _do(self, work: _Work, maintenance: Maintenance, stop: threading.Event) -> None:
        for task in work.tasks:
            task(maintenance)
        if work.settles:
            self._try(lambda: maintenance.settle(deadline=work.deadline, catalog=work.catalog))
        if work.catalog is not None and self._retention is not None:
            is_applied = self._try(partial(self._apply, maintenance, self._retention, work))
            self.retention_failures += not is_applied
        self._try(lambda: maintenance.delete(deadline=work.deadline, stop=stop.is_set))

    def _apply(self, maintenance: Maintenance, retention: Retention | ChooseToDelete, work: _Work) -> None:
        if not isinstance(retention, Retention):
            retention = partial(_choose_without_exit, retention)
        assert work.catalog is not None, "retention follows a commit"
        # The commit of this job: a newer job may have other rules, and this thread may have been held up.
        owner = Owner(work.catalog.run_id, work.catalog.token)
        try:
            applied = maintenance.apply(retention, deadline=work.deadline, catalog=work.catalog, owner=owner)
        except FencedError:
            logger.info("%s: retention was not applied: a newer job owns the run", self._store.url)
            return
        if applied.retired or applied.thinned:
            deleted = [f"step {step}" for step in applied.retired]
            deleted += [f"the optimizer of step {step}" for step in applied.thinned]
            logger.info("%s: retention deletes %s", self._store.url, ", ".join(deleted))

    def _try(self, act: Callable[[], object]) -> bool:
        """Run an act, log its failure, and return whether it succeeded; the next round repeats what failed."""
        url = self._store.url
        try:
            act()
        except CommitUnknownError as error:
            logger.warning("%s: it is not known whether old checkpoints were retired: %s", url, error)
        except DcpRemoteError as error:
            logger.warning("%s: old checkpoints were not retired, and will be later: %s", url, error)
        except Exception:
            logger.exception("%s: old checkpoints were not retired", url)
        else:
            return True
        return False


@dataclass(frozen=True, slots=True)
class _Work:
    """Work of one round.

    Attributes:
        tasks: Calls that note checkpoints and objects.
        catalog: Catalog that the last commit left; None if there was none since the last round.
        settles: True to look up the checkpoints and attempts that may not be live.
        deadline: Deadline of the round.
    """

    tasks: Sequence[Callable[[Maintenance], None]]
    catalog: Catalog | None
    settles: bool
    deadline: Deadline


def _choose_without_exit(choose: ChooseToDelete, checkpoints: Sequence[CheckpointInfo]) -> Any:
    """Call a user's function and take all that it yields; SystemExit and KeyboardInterrupt would end this thread."""
    try:
        chosen: object = choose(checkpoints)
        return list(chosen) if isinstance(chosen, Iterator) else chosen
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"The function passed as retention raised {type(error).__name__}.") from error


def _deadline(stop: threading.Event) -> Deadline:
    """Return the deadline of a round; it passes at once when the round is stopped."""
    return Deadline(_ROUND_SECONDS, lambda: math.inf if stop.is_set() else time.monotonic())
