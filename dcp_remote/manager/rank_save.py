"""One rank's saves into a run. `RankSaver.save` is the whole of a save: agree on the plan, upload, commit."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from torch.distributed.checkpoint.planner import SavePlan

from dcp_remote.common.gil import short_switch_interval
from dcp_remote.common.text import format_count, human_bytes
from dcp_remote.coordination.collective import Collective
from dcp_remote.coordination.group import RankGroup
from dcp_remote.errors import CommitConflictError, CommitUnknownError, DcpRemoteError
from dcp_remote.format.catalog import Attempt
from dcp_remote.format.keys import origin
from dcp_remote.format.segments import find_segments
from dcp_remote.manager.coordinator import Again, Committed, Coordinator, Labelled
from dcp_remote.manager.progress import Progress, ProgressSetting
from dcp_remote.manager.reports import RankFigures, SaveReport, Seconds, combine
from dcp_remote.manager.save_planning import Agreed, RankPlanning, Replicas, Task
from dcp_remote.manager.sharing_store import SharingStore
from dcp_remote.run.background_deletions import BackgroundDeletions
from dcp_remote.run.info import catalog_of
from dcp_remote.run.lookup import join_segments, read_manifest_at
from dcp_remote.saving.dedup import Baseline
from dcp_remote.saving.plan_cache import chunk_bytes, planned_boxes
from dcp_remote.saving.rank_report import RankReport, SentReport, WrittenShard
from dcp_remote.saving.shard_writer import write_shards
from dcp_remote.saving.uploads import Uploads
from dcp_remote.storage.counting import CountingStore, Counts

logger = logging.getLogger(__name__)

# Attempts of a save whose objects are removed by another process meanwhile.
_ATTEMPTS_MAX = 3

# Time, and share of the save's time, by which uploads end before the deadline of the save: an error that names the
# shard, the attempts and the cause has to arrive before the one that only names the late rank.
_TELL_SECONDS = 5.0
_TELL_SHARE = 0.2

# Time to read the manifest of the baseline, which only saves uploads.
_BASELINE_SECONDS = 20.0

# Time to look for the commit of a lost coordinator: the caller has waited for a minute already.
_FIND_COMMIT_SECONDS = 10.0


class RankSaver:
    """Saves of one rank, one after another; keeps what it wrote last, so as not to send the same bytes again.

    `coordinator` is None on other ranks. `background_deletions` deletes what this rank's saves leave.
    """

    def __init__(
        self,
        ranks: RankGroup,
        store: CountingStore,
        coordinator: Coordinator | None,
        *,
        memory_budget_bytes: int,
        allow_pickle: bool,
        progress: ProgressSetting = True,
        replicas: Replicas = "equal",
        shard_bytes: int | None = None,
    ) -> None:
        """Store the arguments; no request is made."""
        self._ranks = ranks
        self._store = store
        self._coordinator = coordinator
        self.background_deletions = (
            BackgroundDeletions(store.uncounted) if coordinator is None else coordinator.background_deletions
        )
        self._memory_budget_bytes = memory_budget_bytes
        self._shard_bytes = shard_bytes
        self._allow_pickle = allow_pickle
        self._progress = progress
        self.planning = RankPlanning(ranks, coordinator, replicas=replicas)
        # Checkpoint that names what this rank wrote or read last (save_id and manifest key), and what that was. The
        # next save does not read its manifest again; 100 bytes for each piece (at most 64 MiB), at most 20 MB; of a
        # manifest in segments for the pieces of those that this rank has read (165 MB, if these are 33).
        self.last: tuple[tuple[str, str], Baseline] | None = None

    @short_switch_interval()
    def save(self, collective: Collective, task: Task) -> SaveReport:
        """Save; return when the checkpoint is committed. Called by every rank, in the block of the operation.

        Raises:
            DcpRemoteError: This rank, another, or the coordinator failed.
        """
        before, phase = self._store.counts, task.operation.phase
        for attempt in range(1, _ATTEMPTS_MAX + 1):
            with phase("planning"):
                # The last attempt reuses no shard, and so depends on nothing that others could remove.
                agreed = self.planning.agree(collective, task, borrow=attempt < _ATTEMPTS_MAX)
            if isinstance(agreed, Labelled):  # this job has saved the step before
                return self._report_repeated(task, agreed, before)
            with Progress(self._progress, "save", is_coordinator=self._ranks.is_coordinator) as progress:
                progress.begin(task.labels.step, sum(map(chunk_bytes, agreed.plan.items)))
                uploading_seconds = time.monotonic()
                with phase("uploading"):
                    report = self._upload(collective, task, agreed, progress)
                figures = self._make_figures(task, report, before, uploading_seconds)
                progress.tell("waiting for the others")
                with phase("committing"):
                    answer = self._commit(collective, task, agreed, report, figures)  # by Coordinator.commit
                if not isinstance(answer, Again):
                    save_report = replace(answer, attempts=attempt)
                    progress.close(str(save_report) if self._ranks.is_coordinator else None)
                    return save_report
            logger.warning("%s: the save of step %d begins again: %s", self._store.url, task.labels.step, answer.why)
        raise CommitConflictError(
            "Another process removed objects that the save needed during each attempt; nothing was committed. Give "
            "`dcp-remote gc` a grace period that is longer than a save.",
            url=self._store.url,
            step=task.labels.step,
            attempts=_ATTEMPTS_MAX,
        )

    def find_commit(self, task: Task, lost: DcpRemoteError) -> SaveReport:
        """Find out whether the coordinator, which is lost, had committed the save; one GET.

        The report of the commit has the figures of this rank alone. `lost` is the error by which the coordinator was
        lost; it is raised if there was nothing to commit yet.

        Raises:
            CommitUnknownError: The coordinator had not committed. If it was only stopped, it may do so when it goes on.
        """
        if not task.uncommitted:
            raise lost
        ticket, figures = task.uncommitted[0]
        save_id = ticket.entry.save_id
        catalog = catalog_of(self._store, retry_seconds=_FIND_COMMIT_SECONDS)
        entry = next((entry for entry in catalog.entries if entry.save_id == save_id), None) if catalog else None
        if entry is None:
            raise CommitUnknownError(
                f"{lost.what} The coordinator was about to commit, and has not done so. It may commit later if its "
                "process is only stopped.",
                **{**lost.details, "url": self._store.url, "save_id": save_id},
            ) from lost
        report = combine([figures], step=entry.step, save_id=entry.save_id, total_bytes=entry.size_bytes)
        return replace(report, world_size=self._ranks.world_size, background=task.background)

    def _report_repeated(self, task: Task, labelled: Labelled, before: Counts) -> SaveReport:
        """Report a save of a step that this job had saved before, with the figures of this rank."""
        entry = labelled.entry
        are_metrics_left = labelled.is_doubtful and not set(task.labels.metrics) <= set(entry.metrics)
        if self._ranks.is_coordinator and (task.user or labelled.is_doubtful):
            logger.warning(
                "%s: step %d was saved before, and its checkpoint stays as it is, without what has changed in the "
                "state since%s%s. Pass overwrite=True to replace the checkpoint, or exist_ok=True to keep it",
                self._store.url,
                entry.step,
                " and the notes of this save (user=)" if task.user else "",
                " and the metrics of this save" if are_metrics_left else "",
            )
        figures = RankFigures(
            self._ranks.rank,
            requests=self._store.counts.since(before).requests,
            seconds=Seconds(
                task.waiting_seconds, task.staging_seconds, planning=time.monotonic() - task.staged_seconds
            ),
        )
        report = combine([figures], step=entry.step, save_id=entry.save_id, total_bytes=entry.size_bytes)
        return replace(report, world_size=self._ranks.world_size, background=task.background, is_repeated=True)

    def _upload(self, collective: Collective, task: Task, agreed: Agreed, progress: Progress) -> RankReport:
        """Upload what this rank writes, and keep a record of it for the next save once it is committed."""
        entry = agreed.ticket.entry
        collective.set_activity("uploading")
        baseline = self._find_baseline(
            agreed.ticket,
            agreed.plan,
            SharingStore(self._store, collective.share),
            retry_seconds=min(_BASELINE_SECONDS, collective.deadline.remaining_seconds() / 4),
        )
        put: list[int] = []

        def on_put(_key: str, size_bytes: int) -> None:
            put.append(size_bytes)
            progress.add(size_bytes)
            collective.set_activity(f"uploading, {format_count(len(put), 'shard')} and {human_bytes(sum(put))} so far")

        with Uploads[WrittenShard](
            self._store,
            rank=self._ranks.rank,
            deadline=collective.deadline.earlier(min(_TELL_SECONDS, _TELL_SHARE * task.seconds)),
            memory_budget_bytes=self._memory_budget_bytes,
            on_put=on_put,
            latency_seconds=agreed.latency_seconds,
            discard=self.background_deletions.delete,
        ) as uploads:
            report = write_shards(
                agreed.plan,
                task.planner,
                uploads,
                origin=origin(revision=entry.began_revision, step=entry.step),
                allow_pickle=self._allow_pickle,
                shard_bytes=self._shard_bytes,
                base=baseline,
            )
            task.late.require_unchanged()
        progress.add(report.figures.reused_bytes)
        return report

    def _find_baseline(
        self, ticket: Attempt, plan: SavePlan, store: SharingStore, *, retry_seconds: float
    ) -> Baseline | None:
        """Return what this rank wrote or read last of the newest checkpoint, or all of it; None: nothing is reused.

        Of a manifest in segments, this rank reads those that may have chunks of its plan.
        """
        if ticket.reused is None:
            return None
        if self.last is not None and self.last[0] == ticket.reused:
            return self.last[1]
        save_id, key = ticket.reused
        try:
            manifest = read_manifest_at(store, key, save_id=save_id, retry_seconds=retry_seconds)
            needed = find_segments(manifest, planned_boxes(plan))
            manifest = join_segments(store, manifest, needed, retry_seconds=retry_seconds)
        except DcpRemoteError as error:
            logger.warning(
                "%s: all data is uploaded again, because the manifest of the newest checkpoint cannot be read: %s",
                self._store.url,
                error,
            )
            return None
        return Baseline.of_manifest(manifest)

    def _make_figures(self, task: Task, report: RankReport, before: Counts, uploading_seconds: float) -> RankFigures:
        return RankFigures(
            rank=self._ranks.rank,
            uploads=report.figures,
            requests=self._store.counts.since(before).requests,
            copied_bytes=task.copied_bytes,
            seconds=Seconds(
                waiting=task.waiting_seconds,
                staging=task.staging_seconds,
                planning=uploading_seconds - task.staged_seconds,
                uploading=time.monotonic() - uploading_seconds,
                copying=task.late.waited_seconds,
            ),
        )

    def _commit(
        self, collective: Collective, task: Task, agreed: Agreed, report: RankReport, figures: RankFigures
    ) -> SaveReport | Again:
        """Report to the coordinator, which commits; keep what was written as the baseline of the next save."""
        task.uncommitted.append((agreed.ticket, figures))
        collective.set_activity("waiting for the commit")
        try:
            answer = collective.gather(
                (report.to_sent(), figures), lambda parts: self._commit_reports(collective, task, agreed, parts)
            )
        except BaseException:
            self._give_up(collective, agreed.ticket, report.put_keys)
            raise
        task.uncommitted.clear()
        if isinstance(answer, Again):
            return answer
        committed, save_report = answer
        baseline = Baseline.of_report(report, left_out=committed.left_out)
        self.last = (committed.save_id, committed.manifest), baseline
        return save_report

    def _commit_reports(
        self,
        collective: Collective,
        task: Task,
        agreed: Agreed,
        parts: list[tuple[SentReport, RankFigures]],
    ) -> tuple[Committed, SaveReport] | Again:
        """Commit what all ranks report; called on the coordinator only."""
        began_seconds, counts = time.monotonic(), self._store.counts
        assert self._coordinator is not None
        assert agreed.planned is not None
        reports = [report for report, _ in parts]
        answer = self._coordinator.commit(collective, agreed.ticket, agreed.planned, reports, task.user)
        if isinstance(answer, Again):
            return answer
        own, *others = (figures for _, figures in parts)
        own = replace(
            own,
            requests=own.requests + self._store.counts.since(counts).requests,
            seconds=replace(own.seconds, committing=time.monotonic() - began_seconds),
        )
        save_report = combine(
            [own, *others], step=task.labels.step, save_id=answer.save_id, total_bytes=answer.total_bytes
        )
        return answer, replace(save_report, background=task.background)

    def _give_up(self, collective: Collective, ticket: Attempt, put: tuple[str, ...]) -> None:
        """Delete the shards of a save that failed, as soon as it is certain that it was not committed."""
        if collective.ended_before_commit:
            self.background_deletions.delete(put)
        elif not self._ranks.is_coordinator:
            # The coordinator may have their keys, and may have committed them.
            self.planning.unclear.append((ticket, put))
