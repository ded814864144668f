"""Planning of a save: the ranks' part, the decisions of the coordinator, and the messages between them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

from torch.distributed.checkpoint.planner import SavePlan

from dcp_remote.common.threads import OneTimeEvent
from dcp_remote.coordination.collective import Collective
from dcp_remote.coordination.group import RankGroup
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.catalog import Attempt, Owner
from dcp_remote.manager.coordinator import Coordinator, Labelled
from dcp_remote.manager.reports import RankFigures
from dcp_remote.manager.telemetry import Operation
from dcp_remote.run.job import CheckpointLabels
from dcp_remote.saving.late_copies import LateCopies
from dcp_remote.saving.manifest_assembly import Planned, require_unicode
from dcp_remote.saving.plan_cache import (
    LISTED_BYTES,
    PlanCache,
    Proposal,
    RunPlanner,
    compared_items,
    describe_entries,
    digest_objects,
    digest_sets,
    list_digests,
    propose,
    to_rank_plan,
    to_table,
)
from dcp_remote.saving.plan_table import PlanTable, ReplicaSet, Share, arrange
from dcp_remote.saving.rank_differences import (
    SetDigests,
    choose_listing_ranks,
    describe_buffer_differences,
    describe_object_differences,
    find_unequal,
    group_by_digest,
    make_value_error,
    require_equal_options,
)
from dcp_remote.serialization.leaves import FlatState
from dcp_remote.serialization.state_dict import TensorRoles

logger = logging.getLogger(__name__)

# Rule for tensors that several ranks hold: refuse different values, or save those of the lowest rank.
Replicas: TypeAlias = Literal["equal", "coordinator"]


@dataclass(frozen=True, slots=True)
class Task:
    """Save, as `CheckpointManager.save` describes it to one rank. Times are by `time.monotonic`."""

    labels: CheckpointLabels
    state: FlatState  # a copy, or the caller's own, which the caller leaves unchanged meanwhile
    planner: RunPlanner
    user: Mapping[str, Any]  # notes for the manifest; the coordinator's are stored
    called_seconds: float  # time of the call of `save`
    waiting_seconds: float  # for which the call waited for the previous save
    staging_seconds: float  # in which the state was copied
    seconds: float  # from the beginning of the collective operation to its deadline
    operation: Operation
    background: bool  # True if training goes on meanwhile
    begun: OneTimeEvent  # to be set once all ranks have come with their states, and the run takes the step
    roles: TensorRoles = field(default_factory=TensorRoles)
    late: LateCopies = field(default_factory=LateCopies)  # copies of the state that are under way
    is_awaited: bool = False  # True if the caller waits for `begun`: the copies are then made afterwards
    copied_bytes: int = 0  # memory of the copy of the state
    # Ticket and figures of the attempt that waits for the answer to its commit; empty at other times. Kept here
    # because the thread of an earlier save may be stuck, with a task of its own.
    uncommitted: list[tuple[Attempt, RankFigures]] = field(default_factory=list, init=False)

    @property
    def staged_seconds(self) -> float:
        """Time at which the state was copied."""
        return self.called_seconds + self.waiting_seconds + self.staging_seconds


class Agreed(NamedTuple):
    """Plan of one save, as the ranks agreed on it."""

    ticket: Attempt  # to commit; its entry has neither size nor time yet
    plan: SavePlan  # of this rank
    planned: Planned | None  # contents of the checkpoint; None on other ranks than the coordinator
    latency_seconds: float = 0.0  # of the store, as the coordinator measured it; 0 if unknown


class _Request(NamedTuple):
    """Request of a rank to begin a save, with its plan if that is new."""

    labels: CheckpointLabels
    key: str | None  # save in which the ranks agreed on the plan that this rank would write again; None for a new plan
    table: PlanTable | None  # new plan
    # Saves that failed here, of which this rank does not know the outcome, and the shards put for each.
    unclear: list[tuple[Attempt, tuple[str, ...]]]


class _Begun(NamedTuple):
    """Answer of the coordinator to the requests, if a save begins."""

    ticket: Attempt
    is_known: bool  # True if every rank writes what it wrote in the last save
    latency_seconds: float  # of the store, which other ranks have perhaps not measured
    share: Share | None = None  # share of this rank in a new plan; None if not all ranks have sent a new one


def require_one_kind(*, is_one_kind: bool) -> None:
    """Refuse a save for which some ranks pass a function and others a state: they would wait for each other."""
    if not is_one_kind:
        raise InvalidArgumentError(
            "Some ranks pass a function as the state, and others the state itself. Pass the same on all ranks."
        )


class RankPlanning:
    """Planning of the saves of one rank, one after another; keeps the last plan on which the ranks agreed.

    `owner` is the job as which this rank saved last; None before its first save.
    """

    def __init__(self, ranks: RankGroup, coordinator: Coordinator | None, *, replicas: Replicas) -> None:
        """Begin without a plan. `coordinator` is None on other ranks."""
        self._ranks = ranks
        self.coordinator, self.replicas = coordinator, replicas
        # Saves of which this rank does not know the outcome, and the shards put for each; the coordinator finds out.
        self.unclear: list[tuple[Attempt, tuple[str, ...]]] = []
        self.owner: Owner | None = None
        self._kept = PlanCache()
        # On the coordinator: names of tensors that were compared between ranks in this job, and of objects of which a
        # warning was logged.
        self.compared, self.reported = set[str](), set[str]()

    def agree(self, collective: Collective, task: Task, *, borrow: bool) -> Agreed | Labelled:
        """Agree on what is saved, and who writes what of it: as in the last save, if only values have changed.

        Called by every rank. The coordinator begins the save; with `borrow`, shards of an earlier one may be reused.
        """
        # Nothing is kept before the end, because the thread of an earlier save may be stuck while it plans.
        kept, planner = self._kept, task.planner
        decisions = _Decisions(self, kept, task.labels.step)
        collective.set_activity("planning")
        planner.set_up_planner(task.state)
        proposal = propose(planner, task.roles)
        require_unicode(proposal.plan)
        key = kept.key_of(proposal)
        table = self._make_table(proposal, planner) if key is None else None
        request = _Request(task.labels, key, table, self.unclear[:])
        collective.set_activity("asking whether this step may be saved")
        begun = collective.scatter(request, partial(decisions.begin, collective=collective, borrow=borrow))
        del self.unclear[: len(request.unclear)]  # the thread of an earlier save may have added more
        if isinstance(begun, Labelled) and begun.is_doubtful:
            # Averaged weights in a save of their own, or a resized model, are not to be dropped.
            entry = begun.entry
            collective.gather(
                describe_entries(proposal.plan),
                lambda described: decisions.coordinator.require_same(entry, task.labels, described, collective),
            )
        task.begun.set()
        if isinstance(begun, Labelled):
            return begun
        task.late.finish()  # of copies that were finished before, this costs nothing
        ticket = begun.ticket
        self.owner = Owner(ticket.run_id, ticket.entry.token)
        if not begun.is_known:
            share = begun.share
            if share is None:
                collective.set_activity("planning")
                share = collective.scatter(table or self._make_table(proposal, planner), decisions.arrange_tables)
            self._compare_values(collective, planner, proposal, share, decisions)
            plan = to_rank_plan(proposal, share)
            self._kept = kept = PlanCache(ticket.entry.save_id, proposal, plan, decisions.planned)
        planner.finish_plan(kept.plan)
        return Agreed(ticket, kept.plan, kept.planned, begun.latency_seconds)

    def _make_table(self, proposal: Proposal, planner: RunPlanner) -> PlanTable:
        return to_table(proposal, digest_objects(proposal, planner) if self._ranks.world_size > 1 else None)

    def _compare_values(
        self, collective: Collective, planner: RunPlanner, proposal: Proposal, share: Share, decisions: _Decisions
    ) -> None:
        """Compare the values that several ranks hold, with new plans only: each difference is reported once."""
        if not share.has_sets:
            return
        check = collective.raise_if_cancelled
        collective.set_activity("comparing replicas")
        sets = compared_items(proposal, share)
        listing = collective.gather(digest_sets(sets, planner, check), decisions.compare_values)
        if listing:
            listed = [number for number, ranks in listing.items() if self._ranks.rank in ranks]
            lists = {number: list_digests(sets[number], planner, check) for number in listed}
            collective.gather(lists, decisions.compare_lists)


@dataclass(slots=True)
class _Decisions:
    """Decisions of the coordinator while the ranks plan one save. Made by every rank, called on the coordinator."""

    _planning: RankPlanning
    _kept: PlanCache
    _step: int
    _sets: tuple[ReplicaSet, ...] = ()
    # Ranks with equal values, of each set that differs.
    _groups: dict[int, list[list[int]]] = field(default_factory=dict)
    planned: Planned | None = None

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator's part, on the rank that has it."""
        assert self._planning.coordinator is not None, "called on the coordinator"
        return self._planning.coordinator

    def begin(
        self, requests: Sequence[_Request], *, collective: Collective, borrow: bool
    ) -> Sequence[_Begun | Labelled]:
        """Begin the save, and decide who writes what if all ranks have a new plan; see `Coordinator.begin`."""
        require_one_kind(is_one_kind=all(isinstance(request, _Request) for request in requests))
        for ticket, put in itertools.chain.from_iterable(request.unclear for request in requests):
            self.coordinator.background_deletions.failed(ticket, put)
        begun = self.coordinator.begin([request.labels for request in requests], collective, borrow=borrow)
        if isinstance(begun, Labelled):
            return [begun] * len(requests)
        is_known = self._kept.key is not None and all(request.key == self._kept.key for request in requests)
        answer = _Begun(begun, is_known, self.coordinator.store.latency_seconds)
        tables = [request.table for request in requests if request.table is not None]
        if len(tables) < len(requests):
            return [answer] * len(requests)
        return [answer._replace(share=share) for share in self.arrange_tables(tables)]

    def arrange_tables(self, tables: Sequence[PlanTable]) -> list[Share]:
        """Decide which rank writes what; return the share of each rank.

        Raises:
            InvalidArgumentError: Ranks hold different options of an optimizer's group.
        """
        arrangement = arrange(
            tables,
            to_lowest_rank=self._planning.replicas == "coordinator",
            compared=self._planning.compared if self._planning.replicas == "equal" else None,
        )
        if self._planning.replicas == "equal" and self._kept.planned is None:  # not in the middle of a training
            require_equal_options(arrangement.differing)
        self._sets, self.planned = arrangement.sets, arrangement.planned
        known = self._planning.reported
        new = [one for one in arrangement.differing if one.name not in known and not one.is_harmless]
        if new:
            logger.warning("step %d: %s", self._step, describe_object_differences(new))
            self._planning.reported.update(difference.name for difference in new)
        return arrangement.shares

    def compare_values(self, digests: Sequence[SetDigests]) -> dict[int, tuple[int, ...]]:
        """Compare the values that ranks hold; return, by the number of a set that differs, the ranks that list it."""
        found = {
            number: group_by_digest(one.ranks.tolist(), digests, number) for number, one in enumerate(self._sets, 1)
        }
        self._groups = {number: groups for number, groups in found.items() if len(groups) > 1}
        if not self._groups:
            self._note_compared()
        return {number: choose_listing_ranks(groups) for number, groups in self._groups.items()}

    def compare_lists(self, lists: Sequence[dict[int, bytes]]) -> None:
        """Find the tensors that differ, by digests of single tensors; log those that are buffers.

        Raises:
            InvalidArgumentError: Ranks hold different values of tensors that are no buffers.
        """
        replicas, buffers = dict[str, list[str]](), dict[str, None]()
        for number, groups in self._groups.items():
            listed = [lists[rank][number] for rank in choose_listing_ranks(groups)]
            one = self._sets[number - 1]
            names = [name for name, _ in sorted(one.chunks)]
            for position, holders in find_unequal(groups, listed, item_bytes=LISTED_BYTES).items():
                if one.are_buffers:
                    buffers.setdefault(names[position])
                else:
                    replicas.setdefault(names[position], holders)
        if replicas:
            raise make_value_error(replicas)
        self._note_compared()
        if buffers:
            logger.info("%s", describe_buffer_differences(buffers))

    def _note_compared(self) -> None:
        self._planning.compared.update(name for one in self._sets for name, _ in one.chunks)
