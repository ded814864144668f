"""One rank's part of a save into a run: agree on the plan, upload, get the answer to the commit."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from dcp_remote.common.gil import short_switch_interval
from dcp_remote.common.text import format_count, human_bytes
from dcp_remote.common.threads import OneTimeEvent
from dcp_remote.coordination.collective import Collective
from dcp_remote.coordination.group import RankGroup
from dcp_remote.errors import CommitConflictError, CommitUnknownError, DcpRemoteError
from dcp_remote.format.catalog import Owner
from dcp_remote.format.keys import origin
from dcp_remote.format.shard import ShardNames
from dcp_remote.manager.coordinator import Again, Committed, Coordinator, Labelled
from dcp_remote.manager.progress import Progress, ProgressSetting, start_progress
from dcp_remote.manager.reports import RankFigures, SaveReport, Seconds, SlowShard, combine
from dcp_remote.manager.save_planning import (
    CoordinatorPlanning,
    Known,
    Noted,
    Replicas,
    Request,
    Values,
    require_coordinator,
)
from dcp_remote.manager.telemetry import Operation
from dcp_remote.run.background_maintenance import BackgroundMaintenance
from dcp_remote.run.job import CheckpointLabels, SaveTicket
from dcp_remote.run.lookup import read_manifest_at
from dcp_remote.run.run import catalog_of
from dcp_remote.saving.dedup import Baseline
from dcp_remote.saving.manifest_assembly import Planned, require_unicode, shard_bytes_max
from dcp_remote.saving.plan_cache import (
    PlanCache,
    Proposal,
    RankPlan,
    compared_items,
    describe_entries,
    digest_objects,
    digest_sets,
    list_digests,
    plans_as_torch,
    propose,
    replica_digests,
    set_up,
    to_rank_plan,
    to_table,
    without_torchs_cache,
)
from dcp_remote.saving.rank_report import RankReport
from dcp_remote.saving.shard_writer import write_shards
from dcp_remote.saving.uploads import Uploads
from dcp_remote.serialization.state_dict import TensorRoles
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


@dataclass(frozen=True, slots=True)
class Task:
    """Save, as `CheckpointManager.save` describes it to one rank.

    Attributes:
        labels: Step, names and metrics.
        state: State to save: a copy, or the caller's own, which the caller leaves unchanged meanwhile.
        planner: Planner of torch.
        user: Notes of the user for the manifest; the coordinator's are stored.
        called_seconds: Time of the call of `save`, by `time.monotonic`.
        waiting_seconds: Seconds for which the call waited for the previous save.
        staging_seconds: Seconds in which the state was copied.
        seconds: Seconds from the beginning of the collective operation to its deadline.
        operation: Operation of telemetry.
        background: True if training goes on meanwhile.
        begun: Event to set once all ranks have come with their states, and the run takes the step.
        roles: Names of the state's tensors whose role is known.
        uncommitted: Ticket and figures of the attempt that waits for the answer to its commit; empty at other times.
            Kept here because the thread of an earlier save may be stuck, with a task of its own.
    """

    labels: CheckpointLabels
    state: dict[str, Any]
    planner: SavePlanner
    user: Mapping[str, Any]
    called_seconds: float
    waiting_seconds: float
    staging_seconds: float
    seconds: float
    operation: Operation
    background: bool
    begun: OneTimeEvent
    roles: TensorRoles = field(default_factory=TensorRoles)
    uncommitted: list[tuple[SaveTicket, RankFigures]] = field(default_factory=list, init=False)


@dataclass(frozen=True, slots=True)
class _Agreed:
    """Plan of one save, as the ranks agreed on it.

    Not kept by the saver, because the thread of an earlier save may be stuck while it plans.

    Attributes:
        ticket: Ticket of the save.
        planner: Planner that holds the state.
        plan: Plan of this rank.
        planned: Contents of the checkpoint; None on other ranks than the coordinator.
    """

    ticket: SaveTicket
    planner: SavePlanner
    plan: RankPlan
    planned: Planned | None


class RankSaver:
    """Saves of one rank, one after another; keeps what it wrote last, so as not to send the same bytes again.

    Args:
        ranks: Ranks that save together.
        store: Store, opened at the run.
        coordinator: Coordinator's part; None on other ranks.
        memory_budget_bytes: Bound in bytes of the copies in memory beyond the state.
        allow_pickle: True to store objects that only code can load.
        progress: Whether, or by which function, the coordinator shows progress.
        replicas: Rule for tensors that several ranks hold; the coordinator's counts.

    Attributes:
        background_maintenance: Thread that deletes what this rank's saves leave.
        owner: Job as which this rank saved last; None before the first save.
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
    ) -> None:
        """Store the arguments; no request is made."""
        self._ranks = ranks
        self._store = store
        self._coordinator = coordinator
        self.background_maintenance = (
            BackgroundMaintenance(store.uncounted) if coordinator is None else coordinator.background_maintenance
        )
        self._memory_budget_bytes = memory_budget_bytes
        self._shard_bytes_max = shard_bytes_max(memory_budget_bytes)
        self._allow_pickle = allow_pickle
        self._progress = progress
        self._replicas = replicas
        # Saves of which this rank does not know the outcome, and the shards put for each; the coordinator finds out.
        self._unclear: list[tuple[SaveTicket, tuple[str, ...]]] = []
        # Checkpoint that names what this rank wrote last (save_id and manifest key), and what that was.
        self._last: tuple[tuple[str, str], Baseline] | None = None
        # Last plans on which the ranks agreed: this rank's, and on the coordinator what they amount to.
        self._plans = PlanCache()
        self._known: Known | None = None
        # On the coordinator: names that were compared between ranks in this job.
        self._noted = Noted()
        self.owner: Owner | None = None

    @short_switch_interval()
    def save(self, collective: Collective, task: Task) -> SaveReport:
        """Save; return when the checkpoint is committed. Called by every rank, in the block of the operation.

        Raises:
            DcpRemoteError: This rank, another, or the coordinator failed.
        """
        before = self._store.counts
        for attempt in range(1, _ATTEMPTS_MAX + 1):
            # The last attempt reuses no shard, and so depends on nothing that others could remove.
            answer = self._attempt(collective, task, attempt, before)
            if isinstance(answer, SaveReport):
                return answer
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

        Args:
            task: Task of the save.
            lost: Error by which the coordinator was lost.

        Returns:
            Report of the commit, with the figures of this rank alone.

        Raises:
            DcpRemoteError: `lost`, if there was nothing to commit yet.
            CommitUnknownError: The coordinator had not committed. If it was only stopped, it may do so when it goes on.
        """
        if not task.uncommitted:
            raise lost
        ticket, figures = task.uncommitted[0]
        catalog = catalog_of(self._store, retry_seconds=_FIND_COMMIT_SECONDS)
        entry = next((entry for entry in catalog.entries if entry.save_id == ticket.save_id), None) if catalog else None
        if entry is None:
            raise CommitUnknownError(
                f"{lost.what} The coordinator was about to commit, and has not done so. It may commit later if its "
                "process is only stopped.",
                **{**lost.details, "url": self._store.url, "save_id": ticket.save_id},
            ) from lost
        report = combine([figures], step=entry.step, save_id=entry.save_id, total_bytes=entry.size_bytes)
        return replace(report, world_size=self._ranks.world_size, background=task.background)

    def _attempt(self, collective: Collective, task: Task, attempt: int, before: Counts) -> SaveReport | Again:
        with task.operation.phase("planning"):
            agreed = self._plan(collective, task, borrow=attempt < _ATTEMPTS_MAX)
        if isinstance(agreed, Labelled):
            return self._report_repeated(task, agreed, before)
        ticket = agreed.ticket
        with start_progress(self._progress, "save", is_coordinator=self._ranks.is_coordinator) as progress:
            progress.begin(ticket.run.step, _plan_bytes(agreed.plan.plan))
            uploading_seconds = time.monotonic()
            with task.operation.phase("uploading"):
                report = self._upload(collective, task, agreed, progress)
            figures = self._make_figures(task, report, before, uploading_seconds)
            task.uncommitted.append((ticket, figures))
            collective.set_activity("waiting for the commit")
            progress.tell("waiting for the others")
            with task.operation.phase("committing"):
                try:
                    answer = collective.gather(
                        (report, figures), lambda parts: self._commit(collective, task, agreed, parts)
                    )
                except BaseException:
                    self._give_up(collective, ticket, report.shards.keys[: report.put])
                    raise
            task.uncommitted.clear()
            if isinstance(answer, Again):
                return answer
            committed, save_report = answer
            save_report = replace(save_report, attempts=attempt)
            progress.close(str(save_report) if self._ranks.is_coordinator else None)
        baseline = Baseline.of_report(report, left_out=committed.left_out)
        self._last = (committed.save_id, committed.manifest), baseline
        return save_report

    def _give_up(self, collective: Collective, ticket: SaveTicket, put: tuple[str, ...]) -> None:
        """Delete the shards of a save that failed, as soon as it is certain that it was not committed."""
        if collective.ended_before_commit:
            self.background_maintenance.delete(put)
        elif not self._ranks.is_coordinator:
            # The coordinator may have their keys, and may have committed them.
            self._unclear.append((ticket, put))

    def _report_repeated(self, task: Task, labelled: Labelled, before: Counts) -> SaveReport:
        """Report a save of a step that this job had saved before, with the figures of this rank."""
        staged_seconds = task.called_seconds + task.waiting_seconds + task.staging_seconds
        seconds = Seconds(task.waiting_seconds, task.staging_seconds, planning=time.monotonic() - staged_seconds)
        requests = self._store.counts.since(before).requests
        figures = RankFigures(self._ranks.rank, requests=requests, seconds=seconds)
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
        report = combine([figures], step=entry.step, save_id=entry.save_id, total_bytes=entry.size_bytes)
        return replace(report, world_size=self._ranks.world_size, background=task.background, is_repeated=True)

    def _plan(self, collective: Collective, task: Task, *, borrow: bool) -> _Agreed | Labelled:
        """Agree on what is saved, and who writes what of it: as in the last save, if only values have changed."""
        planner, proposal = without_torchs_cache(task.planner), None
        if plans_as_torch(planner):  # a user's planner may want to know the save
            proposal = self._propose(collective, planner, task)
        plans = self._plans
        planning = CoordinatorPlanning(
            self._coordinator,
            self._known,
            shard_bytes_max=self._shard_bytes_max,
            noted=self._noted,
            replicas=self._replicas,
        )
        request = self._make_request(collective, task, planner, proposal)
        collective.set_activity("asking whether this step may be saved")
        begun = collective.gather(
            request, lambda requests: planning.begin(requests, collective=collective, borrow=borrow)
        )
        del self._unclear[: len(request.unclear)]  # the thread of an earlier save may have added more
        if isinstance(begun, Labelled) and begun.is_doubtful:
            # Averaged weights in a save of their own, or a resized model, are not to be dropped.
            kept, proposal = begun.entry, proposal or self._propose(collective, planner, task)
            collective.gather(
                describe_entries(proposal.plan),
                lambda described: require_coordinator(self._coordinator).require_same(
                    kept, task.labels, described, collective
                ),
            )
        task.begun.set()
        if isinstance(begun, Labelled):
            return begun
        ticket = begun.ticket
        self.owner = Owner(ticket.run.run_id, ticket.run.token)
        if begun.is_known:
            return _Agreed(ticket, planner, plans.plan.finish(planner), planning.planned)
        if proposal is None:
            proposal = self._propose(collective, planner, task, save_id=ticket.save_id)
        collective.set_activity("planning")
        if begun.in_tables:
            arrange_tables = partial(planning.arrange_tables, ticket=ticket, planner=planner)
            # Values are compared with new plans only: each difference is reported once, and other saves cost no more.
            has_others = self._ranks.world_size > 1
            table = to_table(proposal, *([digest_objects(proposal, planner)] if has_others else []))
            digests, is_agreed = request.digests, False
            # Again where writers of parts turn out to hold different values: then one of them writes the whole.
            while not is_agreed:
                share = collective.scatter(table, arrange_tables)
                own, check = to_rank_plan(proposal, share), collective.raise_if_cancelled
                sets = compared_items(proposal, share)
                if not share.is_cut and not share.has_sets:
                    break
                collective.set_activity("comparing replicas")
                digests = replica_digests(own, planner, check, known=digests, sets=sets)
                compared = collective.gather(
                    Values(digest_sets(sets, planner, check), digests), planning.compare_values
                )
                if compared.listing:
                    listed = [number for number, ranks in compared.listing.items() if self._ranks.rank in ranks]
                    collective.gather(
                        {number: list_digests(sets[number], planner, check) for number in listed},
                        planning.compare_lists,
                    )
                is_agreed = compared.is_agreed
        else:
            own = RankPlan(
                collective.scatter(proposal.plan, partial(planning.plan_all, ticket=ticket, planner=planner))
            )
        self._known = planning.known
        self._plans = PlanCache(ticket.save_id, proposal, own) if plans_as_torch(planner) else PlanCache()
        return _Agreed(ticket, planner, own.finish(planner), planning.planned)

    def _make_request(
        self, collective: Collective, task: Task, planner: SavePlanner, proposal: Proposal | None
    ) -> Request:
        """Return the request to begin the save; digests what this rank would write in parts under the plan it kept."""
        key = self._plans.key_of(proposal)
        if proposal is None or key is None:
            return Request(task.labels, None, proposal is not None and proposal.is_regular, {}, self._unclear[:])
        collective.set_activity("comparing replicas")
        digests = replica_digests(self._plans.plan, planner, collective.raise_if_cancelled)
        return Request(task.labels, key, proposal.is_regular, digests, self._unclear[:])

    def _propose(
        self, collective: Collective, planner: SavePlanner, task: Task, *, save_id: str | None = None
    ) -> Proposal:
        collective.set_activity("planning")
        meta = StorageMeta(checkpoint_id=self._store.url, save_id=save_id)
        set_up(planner, task.state, meta, is_coordinator=self._ranks.is_coordinator)
        proposal = propose(planner, shard_bytes_max=self._shard_bytes_max, roles=task.roles)
        require_unicode(proposal.plan)
        return proposal

    def _commit(
        self,
        collective: Collective,
        task: Task,
        agreed: _Agreed,
        parts: list[tuple[RankReport, RankFigures]],
    ) -> tuple[Committed, SaveReport] | Again:
        """Commit what all ranks report; called on the coordinator only."""
        began_seconds, counts = time.monotonic(), self._store.counts
        assert agreed.planned is not None, "called on the coordinator"
        coordinator, reports = require_coordinator(self._coordinator), [report for report, _ in parts]
        answer = coordinator.commit(collective, agreed.ticket, agreed.planned, reports, task.user)
        if isinstance(answer, Again):
            return answer
        own = parts[0][1]
        own = replace(
            own,
            requests=own.requests + self._store.counts.since(counts).requests,
            seconds=replace(own.seconds, committing=time.monotonic() - began_seconds),
        )
        return answer, combine(
            [own, *(figures for _, figures in parts[1:])],
            step=task.labels.step,
            save_id=answer.save_id,
            total_bytes=answer.total_bytes,
            background=task.background,
        )

    def _upload(self, collective: Collective, task: Task, agreed: _Agreed, progress: Progress) -> RankReport:
        run = agreed.ticket.run
        collective.set_activity("uploading")
        retry_seconds = min(_BASELINE_SECONDS, collective.deadline.remaining_seconds() / 4)
        baseline = self._find_baseline(agreed.ticket, retry_seconds=retry_seconds)
        put: list[int] = []

        def on_put(_key: str, size_bytes: int) -> None:
            put.append(size_bytes)
            progress.add(size_bytes)
            collective.set_activity(f"uploading, {format_count(len(put), 'shard')} and {human_bytes(sum(put))} so far")

        with Uploads[Any](
            self._store,
            rank=self._ranks.rank,
            deadline=collective.deadline.earlier(min(_TELL_SECONDS, _TELL_SHARE * task.seconds)),
            memory_budget_bytes=self._memory_budget_bytes,
            on_put=on_put,
            discard=self.background_maintenance.delete,
        ) as uploads:
            report = write_shards(
                agreed.plan.plan,
                agreed.planner,
                uploads,
                ShardNames(self._ranks.rank, origin(revision=run.revision, step=run.step)),
                rank=self._ranks.rank,
                url=self._store.url,
                allow_pickle=self._allow_pickle,
                shard_bytes_max=self._shard_bytes_max,
                shared=agreed.plan.shared,
                base=baseline,
            )
        progress.add(report.figures.reused_bytes)
        return report

    def _find_baseline(self, ticket: SaveTicket, *, retry_seconds: float) -> Baseline | None:
        """Return what this rank wrote last, or else what the newest checkpoint holds; None if nothing may be reused."""
        if ticket.reused is None:
            return None
        if self._last is not None and self._last[0] == ticket.reused:
            return self._last[1]
        save_id, key = ticket.reused
        try:
            manifest = read_manifest_at(self._store, key, save_id=save_id, retry_seconds=retry_seconds)
        except DcpRemoteError as error:
            logger.warning(
                "%s: all data is uploaded again, because the manifest of the newest checkpoint cannot be read: %s",
                self._store.url,
                error,
            )
            return None
        return Baseline.of_manifest(manifest, url=self._store.url)

    def _make_figures(self, task: Task, report: RankReport, before: Counts, uploading_seconds: float) -> RankFigures:
        now, own = time.monotonic(), report.figures
        staged_seconds = task.called_seconds + task.waiting_seconds + task.staging_seconds
        return RankFigures(
            rank=self._ranks.rank,
            written_bytes=own.put_bytes,
            deduplicated_bytes=own.reused_bytes,
            requests=self._store.counts.since(before).requests,
            retries=own.retries,
            seconds=Seconds(
                waiting=task.waiting_seconds,
                staging=task.staging_seconds,
                planning=uploading_seconds - staged_seconds,
                uploading=now - uploading_seconds,
            ),
            slowest_shard=SlowShard(own.slowest_shard, own.slowest_seconds, self._ranks.rank)
            if own.slowest_shard
            else None,
        )


def _plan_bytes(plan: SavePlan) -> int:
    """Return the bytes of the tensors of a rank's plan."""
    tensors = (item.tensor_data for item in plan.items if item.tensor_data is not None)
    return sum(math.prod(tensor.chunk.sizes) * tensor.properties.dtype.itemsize for tensor in tensors)
