"""Detector of ranks that keep a collective operation from going on: silent, in another operation, or late.

Every rank watches the coordinator, and the coordinator watches all others, in the thread of the heartbeat.
"""

from __future__ import annotations

from collections.abc import Sequence

from dcp_remote.coordination.key_value import Client
from dcp_remote.coordination.member import GroupMember
from dcp_remote.coordination.messages import CollectiveKeys
from dcp_remote.coordination.outcome import Outcome, format_ranks


class FailureDetector:
    """Ends an operation by an error that names the ranks which keep it from going on.

    Args:
        member: This rank as a member of the group.
        outcome: Outcome of the operation.
        silence_seconds: Seconds of silence after which a rank that was heard before ends the operation.

    Attributes:
        is_waiting: True on a coordinator that waits for contributions.
    """

    def __init__(self, member: GroupMember, outcome: Outcome, *, silence_seconds: float) -> None:
        """Expect all contributions to the first round."""
        self._member = member
        self._heartbeat = member.heartbeat
        self._outcome = outcome
        self._silence_seconds = silence_seconds
        # On the coordinator: the round, and the ranks whose contributions to it are not read yet.
        self._missing: tuple[int, Sequence[int]] = (1, range(1, member.world_size))
        self.is_waiting = False
        # On the coordinator, by rank: the heartbeat in which a rank was first seen in another operation of this number.
        self._elsewhere: dict[int, int] = {}

    def expect(self, round_number: int, ranks: Sequence[int]) -> None:
        """Note whose contributions to a round are not read yet; all others are."""
        self._missing = (round_number, ranks)

    def unread_keys(self, keys: CollectiveKeys) -> list[str]:
        """Return the keys of the contributions that are not read yet."""
        round_number, ranks = self._missing
        return keys.contributions(round_number, ranks)

    def check(self, client: Client) -> None:
        """Look at the other ranks, and end the operation if it cannot go on; in the thread of the heartbeat."""
        outcome = self._outcome
        outcome.check_time_and_store()
        if outcome.has_left or outcome.error is not None:
            return
        if not self._member.is_coordinator:
            status = outcome.coordinator_status()
            if not outcome.read_verdict(client) and status is not None:
                outcome.follow(status)
            self._end_if_silent()
        elif not outcome.is_committing and not outcome.read_verdict(client):
            self._end_if_silent()
            self._end_if_elsewhere()
            if outcome.time_limit.expired():
                self._end_as_late(client)

    def _end_if_silent(self) -> None:
        """End the operation if a watched rank has fallen silent."""
        assert self._heartbeat is not None, "called by the heartbeat"
        outcome, silent = self._outcome, self._heartbeat.silent_ranks(self._silence_seconds)
        if silent:
            subject = f"{format_ranks(list(silent))} {'has' if len(silent) == 1 else 'have'}"
            message = f"{subject} been silent for {max(silent.values()):.0f} s; {outcome.what} was given up."
            outcome.end(outcome.failed(message, **outcome.rank_details(list(silent))), coordinator_lost=True)

    def _end_if_elsewhere(self) -> None:
        """End the operation if the coordinator waits for the contribution of a rank that will never give it."""
        outcome = self._outcome
        never: list[int] = []
        for rank in self._missing[1] if self.is_waiting else ():
            status = None if self._heartbeat is None else self._heartbeat.last(rank)
            if status is None:
                continue
            if outcome.has_rank_left(status):
                never.append(rank)
            elif status.is_inside and status.operation == outcome.keys.number and status.what != outcome.what:
                # The rank may be about to leave the other operation; two heartbeats later it has said that it stays.
                if status.count >= self._elsewhere.setdefault(rank, status.count) + 2:
                    never.append(rank)
            else:
                self._elsewhere.pop(rank, None)
        if never:
            message = f"{format_ranks(never)} did something else instead of {outcome.what}, which was given up."
            outcome.end(outcome.failed(message, **outcome.rank_details(never)), any_operation=True)

    def _end_as_late(self, client: Client) -> None:
        """End the operation at its deadline, naming the ranks without a contribution, or the coordinator itself."""
        missing = round_number, ranks = self._missing
        outcome, is_coordinator_late = self._outcome, not self.is_waiting
        keys = outcome.keys
        present = client.present(keys.contributions(round_number, ranks))
        if self._missing is not missing:
            return  # contributions were read meanwhile; the next heartbeat looks again
        late = [rank for rank in ranks if keys.contribution(round_number, rank) not in present]
        if is_coordinator_late or not late:
            late.insert(0, 0)
        message = f"{format_ranks(late)} did not report by the deadline; {outcome.what} was given up."
        outcome.end(outcome.timed_out(message, **outcome.rank_details(late)))
