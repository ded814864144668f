"""Retention and deletion in a background thread, beside the saves that follow."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from dcp_remote.common.deadline import Clock, Deadline
from dcp_remote.errors import CommitUnknownError, DcpRemoteError, FencedError
from dcp_remote.format.catalog import Attempt, Catalog, Entry, Owner
from dcp_remote.run.deletions import Deletions
from dcp_remote.run.retention import ChooseToDelete, Retention
from dcp_remote.storage.base import ObjectStore

logger = logging.getLogger(__name__)

# Deadline of one round; what is not done by then is done in the next one.
_ROUND_SECONDS = 600.0

# A thread that outlasts its deadline by this is stuck in a request, and another thread takes over.
_STUCK_SECONDS = 30.0

# Call that notes or queues what a save leaves, in the thread that uses the `Deletions`.
_Task: TypeAlias = Callable[[Deletions], None]


class BackgroundDeletions:
    """Background deletion of a rank's unused shards; on the coordinator also of retired and replaced checkpoints.

    `retention_failures` is the number of rounds in which retention failed, each of which was logged; `orphans_left` is
    that of objects that were given up, and left to `dcp-remote gc`.
    """

    def __init__(self, store: ObjectStore, retention: Retention | ChooseToDelete | None = None) -> None:
        """Store the settings; no request, and no thread yet. Without a retention all checkpoints are kept."""
        self._store, self._retention = store, retention
        self.retention_failures = self.orphans_left = 0
        self._changed = threading.Condition()
        self._worker = _Worker(store)

    @property
    def pending(self) -> int:
        """Number of objects that may be deleted and are not yet."""
        return len(self._worker.deletions.queue)

    def committed(
        self,
        catalog: Catalog,
        entry: Entry,
        shards: Iterable[str],
        *,
        replaced: Iterable[Entry],
        unnamed: Iterable[str],
    ) -> None:
        """Apply retention, and delete the objects that a commit has replaced or does not name.

        The commit left `catalog`; `shards` are the keys of all shards that its checkpoint names, `replaced` the entries
        that its step had before, `unnamed` the keys of shards that its save put and its manifest does not name.
        """
        keys, former, dead = tuple(shards), tuple(replaced), tuple(unnamed)

        def task(deletions: Deletions) -> None:
            deletions.named.remember(entry.manifest, keys)
            deletions.queue.add(dead)
            for replaced_entry in former:
                deletions.note(catalog.run_id, replaced_entry)

        if self._retention is not None or former or dead or not self._worker.is_done:
            self._hand_over(task, catalog)

    def failed(self, attempt: Attempt, shards: Iterable[str], *, replaced: Iterable[Entry] = ()) -> None:
        """Delete the objects of an attempt once it is certain that it is not and cannot be committed.

        `shards` are the keys of the shards that it put, `replaced` the entries that its step had before.
        """
        keys, former, run_id = frozenset(shards), tuple(replaced), attempt.run_id

        def task(deletions: Deletions) -> None:
            deletions.note(run_id, attempt.entry, keys)
            for replaced_entry in former:
                deletions.note(run_id, replaced_entry)

        self._hand_over(task)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete shards of a save that ended before its commit began, so that no checkpoint can ever name them."""
        dead = tuple(keys)
        if dead:
            # Settles nothing: a save may be under way, which a raised floor would make begin again.
            self._hand_over(lambda deletions: deletions.queue.add(dead), settles=False)

    def wait(self, seconds: float) -> bool:
        """Wait for all queued work, for at most so many seconds; return whether it is done."""
        with self._changed:
            return self._changed.wait_for(lambda: self._worker.thread is None, seconds)

    def finish(self, seconds: float) -> None:
        """Retry what failed before, wait for at most so many seconds, and stop; the rest is left to gc."""
        deadline = Deadline(seconds)
        try:
            self.wait(deadline.remaining_seconds())
            if not self._worker.is_done and not deadline.expired():
                self._hand_over(lambda _: None)
                self.wait(deadline.remaining_seconds())
        finally:
            self._worker.stop.set()

    # ----

    def _hand_over(self, task: _Task, catalog: Catalog | None = None, *, settles: bool = True) -> None:
        with self._changed:
            worker = self._worker
            is_late = worker.deadline.elapsed_seconds() > _ROUND_SECONDS + _STUCK_SECONDS
            if worker.thread is not None and (worker.stop.is_set() or is_late):
                logger.warning(
                    "%s: a request to delete old objects does not end; they are left to `dcp-remote gc`",
                    self._store.url,
                )
                worker.stop.set()
                self.orphans_left += self.pending
                worker = self._worker = _Worker(self._store)
            worker.stop.clear()
            worker.tasks.append(task)
            worker.catalog = catalog or worker.catalog
            worker.settles |= settles
            if worker.thread is None:
                worker.begin_round()
                name = "dcp_remote-deletions"
                worker.thread = threading.Thread(target=self._run, name=name, args=(worker,), daemon=True)
                try:
                    worker.thread.start()
                except RuntimeError as error:
                    worker.thread = None  # the next task starts a thread, which does this one, too
                    logger.warning("%s: old objects are deleted later: %s", self._store.url, error)

    def _run(self, worker: _Worker) -> None:
        """Do rounds until nothing is queued, or the worker is stopped."""
        with self._changed:
            try:
                while worker.tasks and not worker.stop.is_set():
                    worker.begin_round()
                    tasks, catalog, settles = worker.tasks, worker.catalog, worker.settles
                    worker.tasks, worker.catalog, worker.settles = [], None, False
                    self._changed.release()
                    try:
                        self._do_round(worker, tasks, catalog, settles=settles)
                    finally:
                        self._changed.acquire()
            finally:
                worker.thread, worker.is_done = None, worker.deletions.is_done
                self._changed.notify_all()

    def _do_round(self, worker: _Worker, tasks: Sequence[_Task], catalog: Catalog | None, *, settles: bool) -> None:
        deletions, deadline = worker.deletions, worker.deadline
        for task in tasks:
            task(deletions)
        if settles:
            what = "objects of failed saves and of replaced checkpoints"
            self._try(what, lambda: deletions.settle(deadline=deadline, catalog=catalog))
        if catalog is not None and self._retention is not None:
            retention = self._retention
            self.retention_failures += not self._try(
                "checkpoints that retention does not keep",
                lambda: self._retain(retention, deletions, catalog, deadline),
            )
        self._try("old objects", lambda: self._delete(worker))

    def _delete(self, worker: _Worker) -> None:
        queue = worker.deletions.queue
        deleted = queue.delete(deadline=worker.deadline, stop=worker.stop.is_set)
        for_good = deleted.failed.keys() - set(queue)  # what failed for now stays in the queue
        with self._changed:
            if worker is self._worker:  # else all of its objects were counted when it was given up
                self.orphans_left += deleted.given_up + len(for_good)

    def _retain(
        self, retention: Retention | ChooseToDelete, deletions: Deletions, catalog: Catalog, deadline: Deadline
    ) -> None:
        # The commit of this job: a newer job may have other rules, and this thread may have been held up.
        owner = Owner(catalog.run_id, catalog.token)
        try:
            applied = deletions.apply(retention, deadline=deadline, catalog=catalog, owner=owner)
        except FencedError:
            logger.info("%s: retention was not applied: a newer job owns the run", self._store.url)
            return
        if applied.retired or applied.thinned:
            deleted = [f"step {step}" for step in applied.retired]
            deleted += [f"the optimizer of step {step}" for step in applied.thinned]
            logger.info("%s: retention deletes %s", self._store.url, ", ".join(deleted))

    def _try(self, what: str, act: Callable[[], object]) -> bool:
        """Delete `what` by an act, log its failure, and return whether it succeeded; the next round repeats it."""
        url = self._store.url
        try:
            act()
        except CommitUnknownError as error:
            logger.warning("%s: %s: it is not known whether the catalog was replaced: %s", url, what, error)
        except DcpRemoteError as error:
            logger.warning("%s: %s were not deleted, and will be later: %s", url, what, error)
        except BaseException:  # a user's retention may raise SystemExit, which must not end this thread
            logger.exception("%s: %s were not deleted", url, what)
        else:
            return True
        return False


class _Worker:
    """Thread, the `Deletions` that it alone uses, and what is queued for it; changed with the lock held.

    If a request hangs, all of it is left behind, and another worker takes over.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.stop = threading.Event()
        self._clock = Clock(lambda: math.inf if self.stop.is_set() else time.monotonic(), self.stop.wait)
        self.deletions = Deletions(store)
        self.thread: threading.Thread | None = None
        self.tasks: list[_Task] = []
        self.catalog: Catalog | None = None  # as the last commit since the last round left it
        self.settles = False  # the next round settles what is noted
        self.is_done = True
        self.begin_round()

    def begin_round(self) -> None:
        """Set the deadline of a round; it passes at once when the round is stopped."""
        self.deadline = Deadline(_ROUND_SECONDS, self._clock)
