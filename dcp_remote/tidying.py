"""Retention and deletion in the background, in one thread of its own beside the saves that follow. No torch."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from dcp_remote.catalog import Catalog, Entry
from dcp_remote.errors import CommitUnknownError, DcpRemoteError
from dcp_remote.retention import Retention
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.retrying import Deadline
from dcp_remote.upkeep import Upkeep

logger = logging.getLogger(__name__)

# Deadline of one round; what is not done by then is done in the next one.
_ROUND_SECONDS = 600.0

# A thread that outlasts its deadline by this is stuck in a request, and another one takes over.
_STUCK_SECONDS = 30.0


class Tidying:
    """What a rank tidies up: its own dead shards; on the coordinator also what retention, or a commit, lets go.

    Only the thread of a `Tidying` touches its `Upkeep`, and there is one at a time; others hand over what it is to do.
    A thread that is stuck is left behind and keeps its `Upkeep`: the one that takes over begins with another.

    Args:
        store: Opened at the run.
        retention: Checkpoints to keep; None keeps all.
    """

    def __init__(self, store: ObjectStore, retention: Retention | None = None) -> None:
        """Make no request, and start no thread."""
        self._store, self._retention = store, retention
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
            replaced: Entries that lay at its step before.
            unnamed: Keys of shards that its save put, and that it does not name.
        """
        keys, former, dead = tuple(shards), tuple(replaced), tuple(unnamed)

        def task(upkeep: Upkeep) -> None:
            upkeep.remember(entry.manifest, keys)
            upkeep.let_go(dead)
            for one in former:
                upkeep.note(catalog.run_id, one)

        if self._retention is not None or former or dead or not self._is_done:
            self._hand_over(task, catalog=catalog, settle=True)

    def failed(self, run_id: str, entry: Entry, shards: Iterable[str], *, replaced: Iterable[Entry] = ()) -> None:
        """Delete what an attempt put, once it is certain that it was not committed and never will be.

        Args:
            run_id: Run that it is of.
            entry: Entry that it would have had.
            shards: Keys of the shards that it put.
            replaced: Entries that lay at its step before.
        """
        keys, former = frozenset(shards), tuple(replaced)

        def task(upkeep: Upkeep) -> None:
            upkeep.note(run_id, entry, keys)
            for one in former:
                upkeep.note(run_id, one)

        self._hand_over(task, settle=True)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects that no checkpoint names or ever will: of a save that ended before its commit began."""
        dead = tuple(keys)
        if dead:
            self._hand_over(lambda upkeep: upkeep.let_go(dead))

    def wait(self, seconds: float) -> bool:
        """Wait until all is done that was handed over, for at most so long; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, seconds)

    def finish(self, seconds: float) -> None:
        """Do what failed before once more, wait for it, and then stop: the rest is left to `dcp-remote gc`.

        Args:
            seconds: How long to wait.
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

        self._stop, self._upkeep = stop, Upkeep(self._store, sleep=sleep)
        self._thread: threading.Thread | None = None
        self._deadline = _deadline(stop)
        self._tasks: list[Callable[[Upkeep], None]] = []
        self._catalog: Catalog | None = None
        self._settles, self._is_done = False, True

    def _hand_over(
        self, task: Callable[[Upkeep], None], *, catalog: Catalog | None = None, settle: bool = False
    ) -> None:
        with self._changed:
            is_late = self._deadline.elapsed_seconds() > _ROUND_SECONDS + _STUCK_SECONDS
            if self._thread is not None and (self._stop.is_set() or is_late):
                logger.warning("%s: deleting old objects is stuck; those are left to gc", self._store.url)
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
            target=self._run, name="dcp_remote-tidy", args=(self._upkeep, self._stop), daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            # The next task starts a thread for both.
            logger.warning("%s: old objects are deleted later: %s", self._store.url, error)
        else:
            self._thread = thread

    def _run(self, upkeep: Upkeep, stop: threading.Event) -> None:
        try:
            while (work := self._next(upkeep, stop)) is not None:
                self._do(work, upkeep, stop)
        finally:
            with self._changed:
                self._over(upkeep)

    def _next(self, upkeep: Upkeep, stop: threading.Event) -> _Work | None:
        """Take what was handed over; None if the thread is to end, which is then counted as ended."""
        with self._changed:
            if self._upkeep is not upkeep or not self._tasks or stop.is_set():
                self._over(upkeep)
                return None
            self._deadline = _deadline(stop)
            work = _Work(self._tasks, self._catalog, self._settles, self._deadline)
            self._tasks, self._catalog, self._settles = [], None, False
            return work

    def _over(self, upkeep: Upkeep) -> None:
        """Note that the thread of this `Upkeep` touches it no more; with the lock held."""
        if self._upkeep is upkeep and self._thread is threading.current_thread():
            self._thread, self._is_done = None, upkeep.is_done
            self._changed.notify_all()

    def _do(self, work: _Work, upkeep: Upkeep, stop: threading.Event) -> None:
        for task in work.tasks:
            task(upkeep)
        if work.settles:
            self._try(lambda: upkeep.settle(deadline=work.deadline, catalog=work.catalog))
        if work.catalog is not None and self._retention is not None:
            self._try(partial(self._apply, upkeep, self._retention, work))
        self._try(lambda: upkeep.delete(deadline=work.deadline, stop=stop.is_set))

    def _apply(self, upkeep: Upkeep, retention: Retention, work: _Work) -> None:
        applied = upkeep.apply(retention, deadline=work.deadline, catalog=work.catalog)
        if applied.retired or applied.thinned:
            logger.info("%s: retired %s, thinned %s", self._store.url, applied.retired, applied.thinned)

    def _try(self, act: Callable[[], object]) -> None:
        """Do it, and log what it fails with: the run is whole without it, and the next round does it."""
        url = self._store.url
        try:
            act()
        except CommitUnknownError as error:
            logger.warning("%s: it is not known whether checkpoints were retired: %s", url, error)
        except DcpRemoteError as error:
            logger.warning("%s: old checkpoints were not retired, and will be later: %s", url, error)
        except Exception:
            logger.exception("%s: old checkpoints were not retired", url)


@dataclass(frozen=True, slots=True)
class _Work:
    """Work of one round.

    Attributes:
        tasks: Notes to be made.
        catalog: Catalog that the last commit left; None if there was none since the last round.
        settles: Whether to look up what may be live no more.
        deadline: Deadline of the round.
    """

    tasks: Sequence[Callable[[Upkeep], None]]
    catalog: Catalog | None
    settles: bool
    deadline: Deadline


def _deadline(stop: threading.Event) -> Deadline:
    """Return the deadline of a round, which has passed once it is stopped."""
    return Deadline(_ROUND_SECONDS, lambda: math.inf if stop.is_set() else time.monotonic())
