"""Detector of ranks that keep a collective operation from going on: absent, silent, in another operation, or late.

Every rank watches the coordinator, and the coordinator watches all others, in the thread of the heartbeat.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from dcp_remote.coordination.key_value import Client
from dcp_remote.coordination.member import GroupMember
from dcp_remote.coordination.messages import Commit, Contributions
from dcp_remote.coordination.outcome import Outcome

logger = logging.getLogger(__name__)

# Ranks whose positions an error shows.
_POSITIONS = 16

# Time after which an operation asks where the ranks are that have not begun it, and its share of `arrival_seconds`.
_ASK_SECONDS = 5.0
_ASK_SHARE = 0.25

# Time after which a warning names the ranks that have not begun the operation; a first restore waits ten times as long.
_WARN_SECONDS = 30.0


class FailureDetector:
    """Detector that ends an operation by an error that names the ranks which keep it from going on.

    Args:
        member: This rank as a member of the group.
        outcome: Outcome of the operation.

    Attributes:
        is_waiting: True on a coordinator that waits for contributions.
    """

    def __init__(self, member: GroupMember, outcome: Outcome) -> None:
        """Expect the first round."""
        self._member = member
        self._heartbeat = member.heartbeat
        self._outcome = outcome
        self._terms = outcome.terms
        # On the coordinator: the round, and the contributions to it if the coordinator reads them already.
        self._expected: tuple[int, Contributions | None] = (1, None)
        self.is_waiting = False
        self._has_asked = False
        self._warn_seconds = _WARN_SECONDS
        # On the coordinator, by rank: the heartbeat in which a rank was first seen in another operation of this number.
        self._elsewhere: dict[int, int] = {}

    def expect(self, round_number: int, contributions: Contributions | None = None) -> None:
        """Note the round that is expected, and its contributions if the coordinator reads them already."""
        self._expected = (round_number, contributions)

    def check(self, client: Client | None) -> None:
        """Look at the other ranks, and end the operation if it cannot go on; in the thread of the heartbeat.

        Without a client there is no store yet: the coordinator has not come, and only the coordinator can be absent.
        """
        outcome = self._outcome
        outcome.check_time_and_store()
        if outcome.has_left or outcome.cancelled is not None:
            return
        if client is None:
            self._end_if_absent(None, [0])
            return
        self._ask_positions(client)
        if not self._member.is_coordinator:
            status = outcome.coordinator_status()
            if status is not None and outcome.may_have_verdict(status) and not outcome.read_verdict(client):
                outcome.skip_deleted_verdicts(status)
            self._end_if_silent()
            self._end_if_absent(client, [0])
        elif not outcome.is_committing and not outcome.read_verdict(client):
            self._end_if_silent()
            self._end_if_elsewhere()
            self._end_if_absent(client, self._unread_ranks())
            if outcome.time_limit.expired():
                self._end_as_late(client)

    def _unread_ranks(self) -> list[int]:
        """Return the ranks whose contributions the coordinator has not read."""
        _, contributions = self._expected
        return [*range(1, self._member.world_size)] if contributions is None else sorted(contributions.missing)

    def _missing_ranks(self, client: Client) -> list[int]:
        """Return the ranks whose contributions are not in the store either; the coordinator may be busy elsewhere."""
        if self._expected[1] is not None:  # the coordinator reads these itself, some times a second
            return self._unread_ranks()
        series = self._outcome.keys.parts(self._expected[0])
        contributions = Contributions(series, self._unread_ranks())
        if client.has([series]):  # to ask for a count that was deleted would put it again
            contributions.read(client)
        return sorted(contributions.missing)

    def _ask_positions(self, client: Client) -> None:
        """Ask once where others are, if they do not come soon. A rank that is in a call of this package is coming."""
        seconds = self._outcome.time_limit.elapsed_seconds()
        if not self._has_asked and not self._outcome.has_met:
            assert self._heartbeat is not None, "called by the heartbeat"
            if seconds >= min(_ASK_SECONDS, _ASK_SHARE * self._terms.arrival_seconds):
                self._has_asked = True
                self._heartbeat.ask_positions(client)

    def _end_if_silent(self) -> None:
        """End the operation if a watched rank has fallen silent."""
        assert self._heartbeat is not None, "called by the heartbeat"
        outcome, silent = self._outcome, self._heartbeat.silent_ranks(self._terms.silence_seconds)
        if silent:
            subject = f"{outcome.name_ranks(list(silent))} {'has' if len(silent) == 1 else 'have'}"
            message = f"{subject} been silent for {max(silent.values()):.0f} s; {outcome.what} was given up."
            outcome.end(self._terms.failed(message, **outcome.rank_details(list(silent))), commit=Commit.UNKNOWN)

    def _end_if_absent(self, client: Client | None, ranks: Sequence[int]) -> None:
        """End the operation if a rank does not come to it: no rank under `if rank == 0` ever will.

        A rank that is in another call of this package is waited for, until the deadline. A wait that is longer than
        half a minute is logged once.

        Args:
            client: Client of the heartbeat; None on a rank that has no store yet.
            ranks: Ranks without which the operation cannot begin.
        """
        outcome, expected = self._outcome, self._expected
        keys = outcome.keys
        seconds = outcome.time_limit.elapsed_seconds()
        if (
            outcome.has_met
            or outcome.cancelled is not None
            or seconds < min(self._terms.arrival_seconds, self._warn_seconds)
        ):
            return
        absent = [rank for rank in ranks if not self._is_coming(rank)]
        if absent and client is not None and self._member.is_coordinator:
            # In a large group the heartbeats of a few hundred ranks are found at a time, a contribution at once.
            missing = set(self._missing_ranks(client))
            absent = [rank for rank in absent if rank in missing]
        if not absent or self._expected is not expected:
            return  # the contributions were deleted meanwhile; the next heartbeat looks again
        subject = f"{outcome.name_ranks(absent)} {'has' if len(absent) == 1 else 'have'}"
        begin = (
            f"{subject} not called {outcome.what} within {seconds:.0f} s of rank {outcome.name_rank(self._member.rank)}"
        )
        if seconds < self._terms.arrival_seconds:
            self._warn_seconds = math.inf
            logger.warning("%s, which goes on waiting. now=%s", begin, self._positions(absent))
            return
        message = (
            f"{begin}; it was given up. Call save and restore on every rank, not under `if rank == 0`; if ranks may be "
            "that far apart, pass a larger arrival_seconds."
        )
        error = self._terms.timed_out(message, **outcome.rank_details(absent), now=self._positions(absent))
        outcome.end(error, is_unattended=True, keys=keys)

    def _is_coming(self, rank: int) -> bool:
        """Return whether a rank has begun the operation, or is in a call of this package and may begin it next."""
        status = None if self._heartbeat is None else self._heartbeat.last(rank)
        if status is None or status.is_closed:
            return False
        # A rank that is ahead, or has left the operation already, is found by `_end_if_elsewhere` or the verdicts.
        return status.is_inside or status.is_calling or status.operation >= self._outcome.keys.number

    def _positions(self, ranks: Sequence[int]) -> str | None:
        """Return where ranks are in their users' code, for an error; None if no rank says so."""
        statuses = {
            rank: None if self._heartbeat is None else self._heartbeat.last(rank) for rank in ranks[:_POSITIONS]
        }
        shown = [f"{rank}: {status.where}" for rank, status in statuses.items() if status is not None and status.where]
        return "; ".join(shown) or None

    def _end_if_elsewhere(self) -> None:
        """End the operation if the coordinator waits for the contribution of a rank that will never give it."""
        outcome, keys = self._outcome, self._outcome.keys
        never, names = list[int](), set[str]()
        for rank in self._unread_ranks() if self.is_waiting else ():
            status = None if self._heartbeat is None else self._heartbeat.last(rank)
            if status is None:
                continue
            if status.operation == keys.number:
                names.add(status.what)
            if outcome.has_rank_left(status):
                never.append(rank)
            elif status.is_inside and status.operation == keys.number and status.what != outcome.what:
                # The rank may be about to leave the other operation; two heartbeats later it has said that it stays.
                if status.count >= self._elsewhere.setdefault(rank, status.count) + 2:
                    never.append(rank)
            else:
                self._elsewhere.pop(rank, None)
        if never:
            message = (
                f"{outcome.name_ranks(never)} did something else instead of {outcome.what}, which was given up. Every "
                f"rank must make the same calls: where values decide, decide on one rank and broadcast its decision."
            )
            outcome.end(self._terms.failed(message, **outcome.rank_details(never)), also=names, keys=keys)

    def _end_as_late(self, client: Client) -> None:
        """End the operation at its deadline, naming the ranks without a contribution, or the coordinator itself."""
        expected, outcome, is_coordinator_late = self._expected, self._outcome, not self.is_waiting
        late = self._missing_ranks(client)
        if self._expected is not expected:
            return  # the contributions were deleted meanwhile; the next heartbeat looks again
        if is_coordinator_late or not late:
            late.insert(0, 0)
        message = f"{outcome.name_ranks(late)} did not report by the deadline; {outcome.what} was given up."
        error = self._terms.timed_out(message, **outcome.rank_details(late))
        outcome.end(error, is_unattended=not outcome.has_met)
