"""The coordinator's side of saves into a run: asked before, told after.

What ranks exchange is carried by a `Joint`; here is what the coordinator answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_remote.assembly import Planned, left_out
from dcp_remote.catalog import BeginAgainError, Catalog, Entry
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.joint import Joint
from dcp_remote.report import RankReport
from dcp_remote.retention import Retention
from dcp_remote.run_save import Begun, Job, Note
from dcp_remote.saving import assembled
from dcp_remote.storage.counting import CountingStore
from dcp_remote.storage.retrying import Deadline
from dcp_remote.tidying import Tidying

# What a commit waits for the deletions of the save before, and which share of its time: a store that is slower at
# deleting than this job at saving would else fill up without a bound.
_WAIT_SECONDS = 5.0
_WAIT_SHARE = 0.1


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

    Attributes:
        tidying: Deletes what a commit, or one that failed, leaves.
    """

    def __init__(self, store: CountingStore, job: Job, *, retention: Retention | None, dedup: bool) -> None:
        """See the class; no request is made."""
        self._store = store
        self._job = job
        self._dedup = dedup
        # Its requests are none of a save's, beside which it makes them.
        self.tidying = Tidying(store.uncounted, retention)

    def go_on_from(self, step: int) -> None:
        """Go on from this checkpoint; the thread of a save that was given up may be stuck in the job as it was."""
        self._job = self._job.after(step)

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
        return self._job.begin(notes[0], borrow=self._dedup and borrow, deadline=deadline)

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
        joint.note("waiting until old checkpoints are deleted")
        self.tidying.wait(min(_WAIT_SECONDS, _WAIT_SHARE * joint.deadline.remaining_seconds()))
        joint.note("committing")
        joint.no_return()
        put = [key for report in reports for key in report.shards.keys[: report.put]]
        replaced: dict[str, Entry] = {}

        def look(now: Catalog) -> None:
            there = now.at(begun.run.step)
            if there is not None and there.save_id != begun.save_id:
                replaced[there.manifest] = there

        try:
            catalog, entry = self._job.commit(
                begun, body, size_bytes=manifest.total_bytes, deadline=joint.deadline, look=look
            )
        except BaseException as error:
            self.failed(begun, put, replaced=replaced.values())
            if isinstance(error, BeginAgainError):
                return Again(str(error))
            raise
        self.tidying.committed(
            catalog,
            entry,
            manifest.shards.keys,
            replaced=replaced.values(),
            unnamed=set(put).difference(manifest.shards.keys),
        )
        return Committed(entry.save_id, entry.manifest, manifest.total_bytes, left_out(manifest, reports))

    def failed(self, begun: Begun, put: Iterable[str], *, replaced: Iterable[Entry] = ()) -> None:
        """Have deleted what a save put that failed, or whose end is not known: once it is certain that it did.

        Args:
            begun: The save.
            put: Keys of its shards.
            replaced: Entries that lay at its step before.
        """
        run = begun.run
        entry = Entry(run.step, begun.save_id, begun.manifest, 0, created="", token=run.token, began=run.revision)
        self.tidying.failed(run.run_id, entry, put, replaced=replaced)
