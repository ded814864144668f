"""Coordinator's part of saves into a run: asks the catalog before, commits and deletes after.

A `Collective` carries what ranks exchange; this module has what the coordinator answers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_remote.common.arrays import Buffer
from dcp_remote.coordination.collective import Collective
from dcp_remote.errors import CheckpointExistsError, InvalidArgumentError
from dcp_remote.format.catalog import Attempt, BeginAgainError, Catalog, Entry
from dcp_remote.format.keys import origin
from dcp_remote.format.manifest import RunInfo
from dcp_remote.format.segments import segment_keys
from dcp_remote.format.shard import ShardNames
from dcp_remote.run.background_deletions import BackgroundDeletions
from dcp_remote.run.job import CheckpointLabels, JobSession
from dcp_remote.run.lookup import note_last, read_manifest_at
from dcp_remote.run.retention import ChooseToDelete, Retention
from dcp_remote.saving.manifest_assembly import Planned, assemble_manifest, find_orphaned_shards
from dcp_remote.saving.rank_differences import NAMED_MAX, Described, describe_saved
from dcp_remote.saving.rank_report import SentReport
from dcp_remote.serialization.state_dict import PER_RANK_KEY
from dcp_remote.storage.counting import CountingStore
from dcp_remote.storage.retrying import RetryingStore

# Time, and share of the save's time left, for which a commit waits for the deletions of the previous save. Without the
# wait, a store that deletes more slowly than the job saves would fill up without a bound.
_WAIT_SECONDS = 5.0
_WAIT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Committed:
    """Answer to the ranks: the save was committed."""

    save_id: str
    manifest: str  # key
    total_bytes: int  # of the shards that the manifest names
    left_out: frozenset[str]  # keys of shards that were uploaded, and that the manifest does not name


@dataclass(frozen=True, slots=True)
class Labelled:
    """Answer to the ranks: this step was saved before, and the checkpoint has the names and metrics of this save."""

    entry: Entry
    # True if the save did not say `exist_ok`: the checkpoint stays only if the state has its structure, and is given
    # nothing.
    is_doubtful: bool = False


@dataclass(frozen=True, slots=True)
class Again:
    """Answer to the ranks: nothing was committed, and the save begins again."""

    why: str  # for the log


class Coordinator:
    """Coordinator's part of the saves of one manager, into the run at which the store is opened."""

    def __init__(
        self, store: CountingStore, job: JobSession, *, retention: Retention | ChooseToDelete | None, dedup: bool
    ) -> None:
        """Store the arguments; no request is sent."""
        self.store = store
        self.job = job
        self._dedup = dedup
        # Checkpoint that was committed last (save_id and manifest key), and keys of its segments by their digests.
        self._named_by: tuple[str, str] | None = None
        self._segments: dict[bytes, str] = {}
        # Deletes what a commit or a failed save leaves. Uncounted, because its requests belong to no save, although
        # they run beside one.
        self.background_deletions = BackgroundDeletions(store.uncounted, retention)

    def begin(self, notes: Sequence[CheckpointLabels], collective: Collective, *, borrow: bool) -> Attempt | Labelled:
        """Begin a save of all ranks; or return the checkpoint that this job has at the step, labelled with `exist_ok`.

        `notes` are the labels of all ranks; those of the coordinator count. With `borrow`, shards of an earlier
        checkpoint may be reused.

        Raises:
            InvalidArgumentError: Ranks save different steps.
            DcpRemoteError: See `JobSession.begin` and `JobSession.label`.
        """
        steps = {note.step: rank for rank, note in reversed(list(enumerate(notes)))}
        if len(steps) > 1:
            raise InvalidArgumentError(
                "Ranks save different steps; nothing was saved. Call save with one step on all ranks.",
                steps=", ".join(f"{step} (rank {rank})" for step, rank in sorted(steps.items())[:16]),
            )
        job, note, deadline = self.job, notes[0], collective.deadline
        begun = job.begin(note, borrow=self._dedup and borrow, deadline=deadline)
        if isinstance(begun, Attempt):
            return begun
        if note.exist_ok is None:
            return Labelled(begun, is_doubtful=True)
        collective.begin_commit()
        return Labelled(job.label(begun, note, deadline=deadline))

    def require_same(
        self, entry: Entry, note: CheckpointLabels, described: Iterable[Described], collective: Collective
    ) -> None:
        """Refuse to keep a checkpoint in place of a save that gives a new name, or has a state of another structure.

        Values of single ranks (`PerRank`) are not compared: their number may have changed. One GET, of the manifest.
        `described` has the entries of the state on each rank, as of `describe_entries`.

        Raises:
            CheckpointExistsError: The save differs from the checkpoint.
            DcpRemoteError: The manifest cannot be read.
        """
        seconds = collective.deadline.remaining_seconds() / 4
        manifest = read_manifest_at(self.store, entry.manifest, save_id=entry.save_id, retry_seconds=seconds)
        saved, own = describe_saved(manifest), {one for of_rank in described for one in of_rank}
        differing = sorted({name for name, *_ in saved ^ own if not name.startswith(f"{PER_RANK_KEY}.")})
        new_names = sorted(set(note.names).difference(entry.names))
        if differing or new_names:
            raise CheckpointExistsError(
                "Checkpoint already exists at this step, and this save gives it a new name, or has values of other "
                "names, shapes or dtypes. Save another step.",
                url=self.store.url,
                step=entry.step,
                new_names=", ".join(new_names) or None,
                differing=", ".join(differing[:NAMED_MAX]) or None,
                values=len(differing) or None,
            ).advise(
                exist_ok="exist_ok=True keeps the checkpoint, and gives it the names and metrics",
                overwrite="overwrite=True replaces it",
            )

    def commit(
        self,
        collective: Collective,
        begun: Attempt,
        planned: Planned,
        reports: Sequence[SentReport],
        user: Mapping[str, Any],
    ) -> Committed | Again:
        """Assemble the manifest of all reports and commit it; or answer that the save begins again.

        Raises:
            DcpRemoteError: See `manifest_assembly.assemble_manifest` and `JobSession.commit`.
        """
        ours, deadline = begun.entry, collective.deadline
        segments: list[str] = []
        # Set if the save fails: threads that still put segments repeat no request, and delete what they have put.
        has_failed = threading.Event()
        storing = RetryingStore(self.store, deadline.until(has_failed))

        def put_segment(key: str, parts: Sequence[Buffer]) -> None:
            collective.raise_if_cancelled()
            if has_failed.is_set():
                return
            segments.append(key)
            try:
                storing.put(key, parts)
            finally:
                if has_failed.is_set():
                    self.background_deletions.delete([key])

        try:
            manifest, body = assemble_manifest(
                planned,
                reports,
                url=self.store.url,
                save_id=ours.save_id,
                run=RunInfo(begun.run_id, ours.step, ours.token, ours.began_revision, ours.names, ours.metrics),
                user=user,
                segment_names=ShardNames(0, origin(revision=ours.began_revision, step=ours.step)),
                # As of any shard that is reused: the commit asks for the checkpoint that names them.
                segments_known=self._segments if begun.reused == self._named_by else {},
                put=put_segment,
            )
            collective.set_activity("waiting until old checkpoints are deleted")
            self.background_deletions.wait(min(_WAIT_SECONDS, _WAIT_SHARE * collective.deadline.remaining_seconds()))
            collective.set_activity("committing")
            collective.begin_commit()
        except BaseException:
            has_failed.set()
            self.background_deletions.delete(segments)
            raise
        put = [*(key for report in reports for key in report.put_keys), *segments]
        replaced: dict[str, Entry] = {}

        def look(now: Catalog) -> None:
            there = now.entry_at(ours.step)
            if there is not None and there.save_id != ours.save_id:
                replaced[there.manifest] = there

        try:
            catalog, entry = self.job.commit(
                begun,
                body,
                size_bytes=manifest.total_bytes,
                deadline=collective.deadline,
                look=look,
            )
        except BaseException as error:
            self.background_deletions.failed(begun, put, replaced=replaced.values())
            if isinstance(error, BeginAgainError):
                return Again(str(error))
            raise
        self.background_deletions.committed(
            catalog,
            entry,
            manifest.shards.keys,
            replaced=replaced.values(),
            unnamed=set(put).difference(manifest.shards.keys),
        )
        note_last(self.store, entry)
        self._named_by, self._segments = (entry.save_id, entry.manifest), segment_keys(manifest)
        return Committed(entry.save_id, entry.manifest, manifest.total_bytes, find_orphaned_shards(manifest, reports))
