"""The coordinator's side of saves into a run: asked before, told after, and what keeps the run tidy.

What ranks exchange is carried by a `Joint`; here is what the coordinator answers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_remote.assembly import Planned, left_out
from dcp_remote.catalog import BeginAgainError, Catalog
from dcp_remote.errors import CommitUnknownError, DcpRemoteError, InvalidArgumentError
from dcp_remote.joint import Joint
from dcp_remote.report import RankReport
from dcp_remote.retention import Retention
from dcp_remote.run_save import Begun, Job, Note
from dcp_remote.saving import assembled
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.retrying import Deadline
from dcp_remote.upkeep import Upkeep

logger = logging.getLogger(__name__)

# Of retiring after a save; what is not done by then is done after the next one.
_TIDY_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Committed:
    """What ranks are told of a save that is committed.

    Attributes:
        save_id: Of it.
        manifest: Key of its manifest.
        total_bytes: Of the shards that it names.
        left_out: Keys of shards that were put and that it does not name.
    """

    save_id: str
    manifest: str
    total_bytes: int
    left_out: frozenset[str]


@dataclass(frozen=True, slots=True)
class Again:
    """Nothing was committed, and nothing was lost: the save is to begin again."""

    why: str


class Desk:
    """The coordinator's side.

    Args:
        store: Opened at the run.
        job: This job's side of the run.
        retention: What to keep; None keeps everything.
        dedup: Whether shards of earlier checkpoints are named again.
    """

    def __init__(self, store: ObjectStore, job: Job, *, retention: Retention | None, dedup: bool) -> None:
        """See the class; no request is made."""
        self._store = store
        self.job = job
        self._retention = retention
        self._dedup = dedup
        self._upkeep = Upkeep(store)
        self._catalog: Catalog | None = None  # as the last commit left it
        self._tidying = threading.Lock()

    def begin(self, notes: Sequence[Note], deadline: Deadline, *, borrow: bool = True) -> Begun:
        """Begin a save of all ranks.

        Args:
            notes: Of all ranks, the coordinator's first; its names and metrics count.
            deadline: Of the save.
            borrow: Whether shards of an earlier checkpoint may be named again.

        Raises:
            InvalidArgumentError: They save different steps.
            DcpRemoteError: See `Job.begin`.
        """
        steps = {note.step: rank for rank, note in reversed(list(enumerate(notes)))}
        if len(steps) > 1:
            raise InvalidArgumentError(
                "Ranks save different steps at a time; nothing was saved.",
                steps=", ".join(f"{step} (rank {rank})" for step, rank in sorted(steps.items())[:16]),
            )
        return self.job.begin(notes[0], borrow=self._dedup and borrow, deadline=deadline)

    def commit(
        self,
        joint: Joint,
        begun: Begun,
        planned: Planned,
        reports: Sequence[RankReport],
        user: Mapping[str, Any],
    ) -> Committed | Again:
        """Put all reports together and commit; or say that the save is to begin again.

        Raises:
            DcpRemoteError: See `saving.assembled` and `Job.commit`.
        """
        manifest, body = assembled(
            planned, reports, url=self._store.url, save_id=begun.save_id, run=begun.run, user=user
        )
        joint.note("committing")
        joint.no_return()
        try:
            self._catalog, entry = self.job.commit(
                begun, body, size_bytes=manifest.total_bytes, deadline=joint.deadline
            )
        except BeginAgainError as error:
            return Again(str(error))
        self._upkeep.remember(entry.manifest, manifest.shards.keys)
        return Committed(entry.save_id, entry.manifest, manifest.total_bytes, left_out(manifest, reports))

    def tidy(self, stop: Callable[[], bool]) -> None:
        """Retire what retention lets go, and delete what no checkpoint names any more.

        Never raises for what the store does: the run is whole without it, and the next time does it.

        Args:
            stop: Asked between requests: a save begins, and nothing is deleted beside it.
        """
        if not self._tidying.acquire(blocking=False):
            # A thread that was left behind is stuck with these: it keeps them.
            self._upkeep, self._tidying = Upkeep(self._store), threading.Lock()
            self._tidying.acquire()
        upkeep, tidying, deadline = self._upkeep, self._tidying, Deadline(_TIDY_SECONDS)
        try:
            if self._retention is not None and not stop():
                applied = upkeep.apply(self._retention, deadline=deadline, catalog=self._catalog)
                if applied.retired or applied.thinned:
                    logger.info("%s: retired %s, thinned %s", self._store.url, applied.retired, applied.thinned)
            upkeep.delete(deadline=deadline, stop=stop)
        except CommitUnknownError as error:
            logger.warning("%s: it is not known whether checkpoints were retired: %s", self._store.url, error)
        except DcpRemoteError as error:
            logger.warning("%s: old checkpoints were not retired, and will be later: %s", self._store.url, error)
        finally:
            tidying.release()
