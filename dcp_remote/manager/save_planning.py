"""Decisions of the coordinator while the ranks plan one save, and the messages by which they plan."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from dcp_remote.coordination.collective import Collective
from dcp_remote.manager.coordinator import Coordinator, Labelled
from dcp_remote.run.job import CheckpointLabels, SaveTicket
from dcp_remote.saving.dcp_metadata import to_columns
from dcp_remote.saving.manifest_assembly import Planned
from dcp_remote.saving.plan_cache import (
    LISTED_BYTES,
    Digests,
    describe_tensors,
    find_differing_replicas,
    plan_all,
    plans_as_torch,
)
from dcp_remote.saving.plan_table import Chunk, PlanTable, ReplicaSet, Share, arrange
from dcp_remote.saving.rank_differences import (
    ObjectDifference,
    SetDigests,
    choose_listing_ranks,
    describe_buffer_differences,
    describe_object_differences,
    find_unequal,
    group_by_digest,
    make_value_error,
    require_equal_tensors,
)

logger = logging.getLogger(__name__)

# Rule for tensors that several ranks hold: refuse different values, or save those of the lowest rank.
Replicas: TypeAlias = Literal["equal", "coordinator"]


@dataclass(frozen=True, slots=True)
class Known:
    """Last plans of all ranks, as the coordinator keeps them.

    Attributes:
        save_id: Save in which the ranks agreed on the plans.
        planned: Contents of the checkpoint.
    """

    save_id: str
    planned: Planned


class Request(NamedTuple):
    """Request of a rank to begin a save: of its plan only as much as tells whether the ranks must plan anew, and how.

    Attributes:
        labels: Step, names and metrics.
        key: Save in which the ranks agreed on the plan that this rank would write again; None if it has another one.
        is_regular: True if a table holds this rank's plan.
        digests: Digests of the replicas of which this rank would write parts.
        unclear: Saves that failed here, of which this rank does not know the outcome, and the shards put for each.
    """

    labels: CheckpointLabels
    key: str | None
    is_regular: bool
    digests: Digests
    unclear: list[tuple[SaveTicket, tuple[str, ...]]]


class Begun(NamedTuple):
    """Answer of the coordinator to the requests, if a save begins.

    Attributes:
        ticket: Ticket of the save.
        is_known: True if every rank writes what it wrote in the last save.
        in_tables: True if tables hold the plans of all ranks.
    """

    ticket: SaveTicket
    is_known: bool
    in_tables: bool


class Values(NamedTuple):
    """Digests of the values that a rank compares with those of others under a new plan.

    Attributes:
        sets: Digests of sets of tensors.
        parts: Digests of the replicas of which this rank writes parts.
    """

    sets: SetDigests
    parts: Digests


class Compared(NamedTuple):
    """Answer of the coordinator to the values of all ranks.

    Attributes:
        is_agreed: True if the plan stands; False if replicas differ of which several ranks were to write parts.
        listing: Ranks that must list the digests of a set tensor by tensor, by the number of each set that differs.
    """

    is_agreed: bool
    listing: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Noted:
    """Names that were compared in this job, as the coordinator keeps them.

    Attributes:
        compared: Names of tensors whose values were equal, or may differ.
        reported: Names of objects that differ, of which a warning was logged.
    """

    compared: set[str] = field(default_factory=set)
    reported: set[str] = field(default_factory=set)


class CoordinatorPlanning:
    """Decisions of the coordinator while the ranks plan one save. Made by every rank; called on the coordinator only.

    Args:
        coordinator: Coordinator's part; None on other ranks.
        known: Last plans of all ranks; None if there are none, and on other ranks.
        shard_bytes_max: Bytes of data in a shard.
        noted: Names that were compared and reported; added to.
        replicas: Rule for tensors that several ranks hold.

    Attributes:
        known: Plans of all ranks, as last decided.
    """

    def __init__(
        self,
        coordinator: Coordinator | None,
        known: Known | None,
        *,
        shard_bytes_max: int,
        noted: Noted,
        replicas: Replicas,
    ) -> None:
        """Begin with no replica that differs between ranks."""
        self._coordinator = coordinator
        self._noted = noted
        self._replicas = replicas
        self._sets: tuple[ReplicaSet, ...] = ()
        # Ranks with equal values, of each set that differs.
        self._groups: dict[int, list[list[int]]] = {}
        self._shard_bytes_max = shard_bytes_max
        self._differing = frozenset[Chunk]()
        self.known = known

    @property
    def planned(self) -> Planned | None:
        """Contents of the checkpoint; None on other ranks."""
        return self.known.planned if self.known is not None else None

    def begin(self, requests: list[Request], *, collective: Collective, borrow: bool) -> Begun | Labelled:
        """Begin the save, and decide how the ranks plan; see `Coordinator.begin`."""
        coordinator = require_coordinator(self._coordinator)
        for ticket, put in itertools.chain.from_iterable(request.unclear for request in requests):
            coordinator.failed(ticket, put)
        labels = [request.labels for request in requests]
        is_known = self.known is not None and all(request.key == self.known.save_id for request in requests)
        begun = coordinator.begin(labels, collective, borrow=borrow)
        if isinstance(begun, Labelled):
            return begun
        is_known = self.compare_replicas([request.digests for request in requests]) and is_known
        return Begun(begun, is_known, in_tables=all(request.is_regular for request in requests))

    def compare_replicas(self, digests: list[Digests]) -> bool:
        """Return whether ranks that write parts of a replica hold equal values; log the replicas that differ."""
        found = find_differing_replicas(digests)
        for name, offsets in sorted(found):
            logger.warning(
                "Ranks have come to hold different values of a tensor that is replicated; those of the lowest rank are "
                "saved. tensor=%s offsets=%s",
                name,
                offsets,
            )
        self._differing |= found
        return not found

    def compare_values(self, values: list[Values]) -> Compared:
        """Compare the values that ranks hold under a new plan."""
        is_agreed = self.compare_replicas([own.parts for own in values])
        digests = [own.sets for own in values]
        found = {
            number: group_by_digest(one.ranks.tolist(), digests, number) for number, one in enumerate(self._sets, 1)
        }
        self._groups = {number: groups for number, groups in found.items() if len(groups) > 1}
        if not self._groups:
            self._note_compared()
        return Compared(is_agreed, {number: choose_listing_ranks(groups) for number, groups in self._groups.items()})

    def compare_lists(self, lists: list[dict[int, bytes]]) -> None:
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
        self._noted.compared.update(name for one in self._sets for name, _ in one.chunks)

    def arrange_tables(self, tables: list[PlanTable], *, ticket: SaveTicket, planner: SavePlanner) -> list[Share]:
        """Decide which rank writes what, by tables of the plans; return the share of each rank."""
        arrangement = arrange(
            tables,
            shard_bytes_max=self._shard_bytes_max,
            unlike=self._differing,
            to_lowest_rank=self._replicas == "coordinator"
            or (plans_as_torch(planner) and planner.dedup_save_to_lowest_rank),
            compared=self._noted.compared if self._replicas == "equal" else None,
        )
        self._sets = arrangement.sets
        self._report(arrangement.differing, ticket)
        self.known = Known(ticket.save_id, arrangement.planned)
        return arrangement.shares

    def plan_all(self, plans: list[SavePlan], *, ticket: SaveTicket, planner: SavePlanner) -> list[SavePlan]:
        """Have the planner decide which rank writes what; return the plan of each rank."""
        own_plans, metadata = plan_all(planner, plans)
        require_equal_tensors([describe_tensors(plan) for plan in plans], lambda: metadata.state_dict_metadata)
        self.known = Known(ticket.save_id, to_columns(metadata))
        return own_plans

    def _report(self, differing: Sequence[ObjectDifference], ticket: SaveTicket) -> None:
        """Warn of objects that differ between ranks; once for each name."""
        new = [difference for difference in differing if difference.name not in self._noted.reported]
        if new:
            logger.warning("step %d: %s", ticket.run.step, describe_object_differences(new))
            self._noted.reported.update(difference.name for difference in new)


def require_coordinator(coordinator: Coordinator | None) -> Coordinator:
    """Return the coordinator's part, on the rank that has it."""
    assert coordinator is not None, "called on the coordinator"
    return coordinator
