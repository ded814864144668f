"""One rank's part of a save into a run: agree, plan, upload, hear that it is committed."""

from __future__ import annotations

import itertools
import logging
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from dcp_remote.common.gil import short_turns
from dcp_remote.common.text import counted, human_bytes
from dcp_remote.coordination.collective import Collective
from dcp_remote.coordination.group import RankGroup
from dcp_remote.errors import CommitConflictError, CommitUnknownError, DcpRemoteError
from dcp_remote.format.keys import origin
from dcp_remote.format.shard import ShardNames
from dcp_remote.manager.coordinator import Again, Committed, Coordinator
from dcp_remote.manager.progress import Progress, can_redraw
from dcp_remote.manager.reports import RankFigures, SaveReport, Seconds, SlowShard, combine
from dcp_remote.manager.telemetry import Operation
from dcp_remote.run.background_maintenance import BackgroundMaintenance
from dcp_remote.run.job import CheckpointLabels, SaveTicket
from dcp_remote.run.lookup import read_manifest_at
from dcp_remote.run.run import catalog_of
from dcp_remote.saving.dcp_metadata import planned_of
from dcp_remote.saving.dedup import Baseline
from dcp_remote.saving.manifest_assembly import Planned, require_unicode, shard_bytes_max
from dcp_remote.saving.plan_cache import (
    Digests,
    PlanCache,
    Proposal,
    RankPlan,
    differing,
    is_torchs,
    plan_all,
    plan_of,
    propose,
    replica_digests,
    set_up,
    table_of,
    uncached,
)
from dcp_remote.saving.plan_table import Chunk, PlanTable, Share, arrange
from dcp_remote.saving.rank_report import RankReport
from dcp_remote.saving.shard_writer import write_shards
from dcp_remote.saving.uploads import Uploads
from dcp_remote.storage.counting import CountingStore, Counts

logger = logging.getLogger(__name__)

# How often a save begins again whose ground was taken away by somebody who keeps the run tidy.
_ATTEMPTS_MAX = 3

# Before the deadline of a save that of an upload passes: who says which shard it was, after how many attempts and why,
# is to be heard before who was late is all that can be said.
_TELL_SECONDS = 5.0
_TELL_SHARE = 0.2

# How long a manifest is asked for that only spares sending again what did not change.
_BASE_SECONDS = 20.0

# Somebody has waited for a minute already.
_SETTLE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Task:
    """A save, as one rank was told to do it.

    Attributes:
        note: Step, names and metrics.
        state: What to save: a copy, or what nobody changes meanwhile.
        planner: torch's.
        user: What the user notes in the manifest; the coordinator's counts.
        called_seconds: When `save` was called, by `time.monotonic`.
        waiting_seconds: How long it waited for the save before.
        staging_seconds: How long the state was copied.
        seconds: Until its deadline, from when ranks began to meet.
        operation: Of telemetry.
        background: Whether training goes on meanwhile.
        unheard: Its last attempt, once all shards are there, until something is heard of the commit. Not the saver's:
            the thread of an earlier save may still be at that.
    """

    note: CheckpointLabels
    state: dict[str, Any]
    planner: SavePlanner
    user: Mapping[str, Any]
    called_seconds: float
    waiting_seconds: float
    staging_seconds: float
    seconds: float
    operation: Operation
    background: bool
    unheard: list[tuple[SaveTicket, RankFigures]] = field(default_factory=list, init=False)


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What this rank is to write, and the planner that has it; the coordinator also knows what it amounts to.

    Kept by the save itself: a thread that was left behind in an earlier one may still plan that.
    """

    begun: SaveTicket
    planner: SavePlanner
    plan: RankPlan
    planned: Planned | None


@dataclass(frozen=True, slots=True)
class _Known:
    """What the coordinator keeps of the plans of all: for which save they were made, and what they amount to."""

    save_id: str
    planned: Planned


class _Part(NamedTuple):
    """What a rank says when a save begins: of its plan only what tells whether it must be made anew, and how."""

    note: CheckpointLabels
    key: str | None
    is_regular: bool
    digests: Digests
    unclear: list[tuple[SaveTicket, tuple[str, ...]]]


class _Beginning(NamedTuple):
    """What the coordinator answers.

    Attributes:
        begun: The save.
        is_known: Whether every rank writes what it wrote the last time.
        in_tables: Whether tables of their plans say all, of every rank.
    """

    begun: SaveTicket
    is_known: bool
    in_tables: bool


class RankSaver:
    """Saves of one rank, one after another; remembers what it wrote last, so as not to send it again.

    Args:
        ranks: Who save together.
        store: Opened at the run.
        coordinator: The coordinator's side; None on other ranks.
        memory_budget_bytes: Bound of the copies in memory beyond the state.
        allow_pickle: Also store objects that only code can load.
    """

    def __init__(
        self,
        ranks: RankGroup,
        store: CountingStore,
        coordinator: Coordinator | None,
        *,
        memory_budget_bytes: int,
        allow_pickle: bool,
    ) -> None:
        """See the class; no request is made."""
        self._ranks = ranks
        self._store = store
        self._coordinator = coordinator
        # Deletes what this rank's saves leave.
        self.background_maintenance = (
            BackgroundMaintenance(store.uncounted) if coordinator is None else coordinator.background_maintenance
        )
        self._memory_budget_bytes = memory_budget_bytes
        self._shard_bytes_max = shard_bytes_max(memory_budget_bytes)
        self._allow_pickle = allow_pickle
        # Shards of saves of which this rank does not know how they ended; the coordinator finds out.
        self._unclear: list[tuple[SaveTicket, tuple[str, ...]]] = []
        # What this rank wrote last, and the checkpoint that names it: save_id and manifest key.
        self._last: tuple[tuple[str, str], Baseline] | None = None
        # What all agreed on last, and for which save: plans on each rank, what they amount to on the coordinator.
        self._plans = PlanCache()
        self._planned: _Known | None = None

    @short_turns()
    def save(self, collective: Collective, task: Task) -> SaveReport:
        """Save; called by every rank, in a block of the joint. Returns when it is committed.

        Raises:
            DcpRemoteError: What this rank, another, or the coordinator failed with.
        """
        before = self._store.counts
        for attempt in range(1, _ATTEMPTS_MAX + 1):
            # The last attempt borrows nothing, and so rests on nothing that others could remove.
            answer = self._attempt(collective, task, attempt, before)
            if isinstance(answer, SaveReport):
                return answer
            logger.warning("%s: the save of step %d begins again: %s", self._store.url, task.note.step, answer.why)
        raise CommitConflictError(
            "What the save rested on was removed each time; nothing was committed. Is somebody removing orphans "
            "without a grace?",
            url=self._store.url,
            step=task.note.step,
            attempts=_ATTEMPTS_MAX,
        )

    def settle(self, task: Task, lost: DcpRemoteError) -> SaveReport:
        """The coordinator was lost: look whether it had committed; one GET.

        Args:
            task: Of the save.
            lost: How it was lost.

        Returns:
            That it had; with the figures of this rank alone.

        Raises:
            DcpRemoteError: `lost`, if there was nothing to commit yet.
            CommitUnknownError: It had not. If it was only stopped, it may do so when it wakes up.
        """
        if not task.unheard:
            raise lost
        begun, figures = task.unheard[0]
        catalog = catalog_of(self._store, retry_seconds=_SETTLE_SECONDS)
        entry = next((one for one in catalog.entries if one.save_id == begun.save_id), None) if catalog else None
        if entry is None:
            raise CommitUnknownError(
                f"{lost.what} It was about to commit, and has not done so: it will not unless it wakes up.",
                **{**lost.details, "url": self._store.url, "save_id": begun.save_id},
            ) from lost
        told = combine([figures], step=entry.step, save_id=entry.save_id, total_bytes=entry.size_bytes)
        return replace(told, world_size=self._ranks.world_size, background=task.background)

    def _attempt(self, collective: Collective, task: Task, attempt: int, before: Counts) -> SaveReport | Again:
        with task.operation.phase("planning"):
            agreed = self._plan(collective, task, borrow=attempt < _ATTEMPTS_MAX)
        begun = agreed.begun
        with self._progress(task, agreed.plan.plan) as progress:
            uploading_seconds = time.monotonic()
            with task.operation.phase("uploading"):
                report = self._upload(collective, task, agreed, progress)
            figures = self._figures(task, report, before, uploading_seconds)
            task.unheard.append((begun, figures))
            collective.note("waiting for the commit")
            progress.tell("waiting for the others")
            with task.operation.phase("committing"):
                try:
                    answer = collective.gather(
                        (report, figures), lambda parts: self._commit(collective, task, agreed, parts)
                    )
                except BaseException:
                    self._give_up(collective, begun, report.shards.keys[: report.put])
                    raise
            task.unheard.clear()
            if isinstance(answer, Again):
                return answer
            done, told = answer
            told = replace(told, attempts=attempt)
            progress.close(str(told) if self._ranks.is_coordinator else None)
        self._last = (done.save_id, done.manifest), Baseline.of_report(report, left_out=done.left_out)
        return told

    def _give_up(self, collective: Collective, begun: SaveTicket, put: tuple[str, ...]) -> None:
        """Have the shards of a save deleted that failed after they were put."""
        if collective.ended_before_commit:
            self.background_maintenance.delete(put)
        elif not self._ranks.is_coordinator:
            # The coordinator may have their keys, and may have committed them.
            self._unclear.append((begun, put))

    def _plan(self, collective: Collective, task: Task, *, borrow: bool) -> _Agreed:
        """Agree on what is saved, and who writes what of it: as the last time, if on every rank only values changed."""
        planner, proposal = uncached(task.planner), None
        if is_torchs(planner):  # a user's may want to know of the save
            proposal = self._propose(collective, planner, task)
        kept, known, unlike = self._plans, self._planned, frozenset[Chunk]()
        part = self._part(collective, task, planner, proposal)
        collective.note("asking whether this step may be saved")

        def compared(digests: list[Digests]) -> bool:
            """On the coordinator: whether what is written in parts is the same everywhere."""
            nonlocal unlike
            found = differing(digests)
            for name, offsets in sorted(found):
                logger.warning(
                    "Ranks hold different values of a tensor that each has whole; one rank's are saved. tensor=%s "
                    "offsets=%s",
                    name,
                    offsets,
                )
            unlike |= found
            return not found

        def begin(parts: list[_Part]) -> _Beginning:
            for one, put in itertools.chain.from_iterable(part.unclear for part in parts):
                _there(self._coordinator).failed(one, put)
            begun = _there(self._coordinator).begin([one.note for one in parts], collective.deadline, borrow=borrow)
            is_known = known is not None and all(one.key == known.save_id for one in parts)
            is_known = compared([one.digests for one in parts]) and is_known
            return _Beginning(begun, is_known, in_tables=all(one.is_regular for one in parts))

        beginning = collective.gather(part, begin)
        del self._unclear[: len(part.unclear)]  # the thread of an earlier save may have added more
        begun = beginning.begun
        if beginning.is_known:
            return _Agreed(begun, planner, kept.plan.finish(planner), known.planned if known is not None else None)
        if proposal is None:
            proposal = self._propose(collective, planner, task, save_id=begun.save_id)
        collective.note("planning")

        def arranged(tables: list[PlanTable]) -> list[Share]:
            nonlocal known
            arrangement = arrange(
                tables,
                shard_bytes_max=self._shard_bytes_max,
                unlike=unlike,
                to_lowest_rank=is_torchs(planner) and planner.dedup_save_to_lowest_rank,
            )
            known = _Known(begun.save_id, arrangement.planned)
            return arrangement.shares

        def planned(plans: list[SavePlan]) -> list[SavePlan]:
            nonlocal known
            own_plans, metadata = plan_all(planner, plans)
            known = _Known(begun.save_id, planned_of(metadata))
            return own_plans

        if beginning.in_tables:
            table, digests, agree = table_of(proposal), part.digests, False
            # Again where writers of parts turn out to hold different values: then one of them writes the whole.
            while not agree:
                share = collective.scatter(table, arranged)
                own = plan_of(proposal, share)
                digests = replica_digests(own, planner, collective.require_going_on, known=digests)
                agree = not share.is_cut or collective.gather(digests, compared)
        else:
            own = RankPlan(collective.scatter(proposal.plan, planned))
        self._planned = known
        self._plans = PlanCache(begun.save_id, proposal, own) if is_torchs(planner) else PlanCache()
        return _Agreed(begun, planner, own.finish(planner), known.planned if known is not None else None)

    def _part(self, collective: Collective, task: Task, planner: SavePlanner, proposal: Proposal | None) -> _Part:
        """What this rank says when a save begins; digests of what it would write in parts under the plan it kept."""
        key = self._plans.key_of(proposal)
        if proposal is None or key is None:
            return _Part(task.note, None, proposal is not None and proposal.is_regular, {}, self._unclear[:])
        collective.note("comparing replicas")
        digests = replica_digests(self._plans.plan, planner, collective.require_going_on)
        return _Part(task.note, key, proposal.is_regular, digests, self._unclear[:])

    def _propose(
        self, collective: Collective, planner: SavePlanner, task: Task, *, save_id: str | None = None
    ) -> Proposal:
        collective.note("planning")
        meta = StorageMeta(checkpoint_id=self._store.url, save_id=save_id)
        set_up(planner, task.state, meta, is_coordinator=self._ranks.is_coordinator)
        proposal = propose(planner, shard_bytes_max=self._shard_bytes_max)
        require_unicode(proposal.plan)
        return proposal

    def _commit(
        self,
        collective: Collective,
        task: Task,
        agreed: _Agreed,
        parts: list[tuple[RankReport, RankFigures]],
    ) -> tuple[Committed, SaveReport] | Again:
        """On the coordinator, which has heard from all."""
        began_seconds, counts = time.monotonic(), self._store.counts
        assert agreed.planned is not None, "on the coordinator"
        reports = [report for report, _ in parts]
        done = _there(self._coordinator).commit(collective, agreed.begun, agreed.planned, reports, task.user)
        if isinstance(done, Again):
            return done
        own = parts[0][1]
        mine = replace(
            own,
            requests=own.requests + self._store.counts.since(counts).requests,
            seconds=replace(own.seconds, committing=time.monotonic() - began_seconds),
        )
        return done, combine(
            [mine, *(figures for _, figures in parts[1:])],
            step=task.note.step,
            save_id=done.save_id,
            total_bytes=done.total_bytes,
            background=task.background,
        )

    def _progress(self, task: Task, plan: SavePlan) -> Progress:
        """Of this rank's upload; drawn on the coordinator's terminal alone."""
        shown = self._ranks.is_coordinator and can_redraw(sys.stderr)
        return Progress(f"saving step {task.note.step}", _plan_bytes(plan), sys.stderr, is_terminal=shown)

    def _upload(self, collective: Collective, task: Task, agreed: _Agreed, progress: Progress) -> RankReport:
        begun = agreed.begun
        collective.note("uploading")
        base = self._base(begun, retry_seconds=min(_BASE_SECONDS, collective.deadline.remaining_seconds() / 4))
        put: list[int] = []

        def on_put(_key: str, size_bytes: int) -> None:
            put.append(size_bytes)
            progress.add(size_bytes)
            collective.note(f"uploading, {counted(len(put), 'shard')} and {human_bytes(sum(put))} so far")

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
                ShardNames(self._ranks.rank, origin(revision=begun.run.revision, step=begun.run.step)),
                rank=self._ranks.rank,
                url=self._store.url,
                allow_pickle=self._allow_pickle,
                shard_bytes_max=self._shard_bytes_max,
                shared=agreed.plan.shared,
                base=base,
            )
        progress.add(report.figures.borrowed_bytes)
        return report

    def _base(self, begun: SaveTicket, *, retry_seconds: float) -> Baseline | None:
        """What may be borrowed of: what this rank wrote last, or else the manifest of the newest checkpoint."""
        if begun.borrowed is None:
            return None
        if self._last is not None and self._last[0] == begun.borrowed:
            return self._last[1]
        save_id, key = begun.borrowed
        try:
            manifest = read_manifest_at(self._store, key, save_id=save_id, retry_seconds=retry_seconds)
        except DcpRemoteError as error:
            logger.warning("%s: everything is sent again, for want of a manifest: %s", self._store.url, error)
            return None
        return Baseline.of_manifest(manifest, url=self._store.url)

    def _figures(self, task: Task, report: RankReport, before: Counts, uploading_seconds: float) -> RankFigures:
        now, own = time.monotonic(), report.figures
        staged_seconds = task.called_seconds + task.waiting_seconds + task.staging_seconds
        return RankFigures(
            rank=self._ranks.rank,
            written_bytes=own.put_bytes,
            deduplicated_bytes=own.borrowed_bytes,
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
    """Of the tensors of a rank's plan."""
    tensors = (item.tensor_data for item in plan.items if item.tensor_data is not None)
    return sum(math.prod(one.chunk.sizes) * one.properties.dtype.itemsize for one in tensors)


def _there(coordinator: Coordinator | None) -> Coordinator:
    assert coordinator is not None, "asked on the coordinator alone"
    return coordinator
