"""Membership of one rank in a group: the clients, keys and limits that a collective operation uses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from dcp_remote.common.deadline import RetryPolicy
from dcp_remote.coordination.heartbeat import POLLING_SECONDS, Heartbeat
from dcp_remote.coordination.host_link import HostLink
from dcp_remote.coordination.key_value import Client, HelperClient

# Operations whose answers and verdicts are kept until all ranks meet again: a rank that is slow reads what it was sent,
# and one that missed operations finds out how many.
OPERATIONS_KEPT = 64

# Longest pause between two looks for a key, and looks of all ranks together, of which the store does 6,800 a second for
# one client (loopback): 2,000 leave it time for torch.
POLLING_SECONDS_MAX = 0.25
_LOOKS_PER_SECOND = 2000

# With fewer ranks there is no rank but the coordinator that a rank could be linked to.
_LINKED_RANKS_MIN = 3


class GroupMember:
    """This rank as a member of its group: its heartbeat, an idle client of the store, and the keys to delete later.

    Args:
        rank: Rank of this process, within the group.
        world_size: Ranks of the group.
        clock: Monotonic clock, in seconds.
        link_name: Returns a name of this group that no other process knows; None if there is none, or none yet.

    Attributes:
        rank: Rank of this process, within the group.
        world_size: Ranks of the group.
        clock: Monotonic clock, in seconds.
        is_coordinator: True on rank 0.
        may_link: True if this rank may be linked to others of its host; False on the coordinator.
        heartbeat: Heartbeat of this rank; None if it is the only one, or before the first operation.
        last_met: Number of the last operation in which all ranks met, as this rank knows; -1 before the first.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        clock: Callable[[], float],
        link_name: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Ask the store nothing."""
        self.rank = rank
        self.world_size = world_size
        self.clock = clock
        self.is_coordinator = rank == 0
        self.may_link = rank > 0 and world_size >= _LINKED_RANKS_MIN
        self.heartbeat: Heartbeat | None = None
        self.last_met = -1
        self._link_name = link_name
        self._link: HostLink | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._idle_client: HelperClient | None = None
        self._leftovers: dict[str, int] = {}  # number of the operation, by key
        self._left_series: dict[str, int] = {}  # the same, by series
        self._answers: dict[str, int] = {}  # the same, by key

    def take_client(self) -> HelperClient:
        """Return a client for the thread of an operation: the idle one, or another."""
        with self._lock:
            client, self._idle_client = self._idle_client, None
        assert self.heartbeat is not None, "a single rank needs no store"
        return HelperClient(self.heartbeat.client) if client is None else client

    def return_client(self, client: HelperClient) -> None:
        """Keep a client for the next operation, or close it; no thread may be stuck in it."""
        with self._lock:
            is_kept = self._idle_client is None and not self._is_closed
            if is_kept:
                self._idle_client = client
        if not is_kept:
            client.close()

    def link(self) -> HostLink | None:
        """Return the link to the other ranks of this host, once there is a store; None where each rank is alone.

        The coordinator takes part in no link, and another rank only if there is a third.
        """
        with self._lock:
            name = self._link_name() if self.may_link and not self._is_closed else None
            if self._link is None and name is not None and self.heartbeat is not None:
                self._link = HostLink(name, self.rank, self.heartbeat.request, self.polling_pauses, self.heartbeat.wake)
            return None if self._link is None or self._link.failure is not None else self._link

    def polling_pauses(self, ranks: int = 1) -> Iterator[float]:
        """Yield the pauses between two looks of a rank for a key, in seconds, where each looks for so many `ranks`."""
        seconds = self.world_size / ranks / _LOOKS_PER_SECOND
        return RetryPolicy(max(POLLING_SECONDS, seconds), max(POLLING_SECONDS_MAX, seconds)).growing_delays()

    def note_left_keys(self, operation: int, keys: Iterable[str], series: Iterable[str] = ()) -> None:
        """Note keys and series that an operation has left in the store, and other ranks do not read; coordinator only.

        A single rank has no store.
        """
        with self._lock:
            if self.world_size > 1:
                self._leftovers.update(dict.fromkeys(keys, operation))
                self._left_series.update(dict.fromkeys(series, operation))

    def note_answers(self, operation: int, keys: Iterable[str]) -> None:
        """Note keys of an operation that other ranks may still have to read: answers, a verdict; coordinator only."""
        with self._lock:
            if self.world_size > 1:
                self._answers.update(dict.fromkeys(keys, operation))

    def delete_left_keys(self, client: Client, before: int, *, have_all_come: bool = False) -> None:
        """Delete the keys that operations before number `before` left in the store.

        Args:
            client: Client of the store.
            before: Number of the first operation whose keys are kept.
            have_all_come: All ranks are in operation `before`, or none will come to an earlier one. Else the answers
                and verdicts of at least the last 64 operations are kept: some rank may not have read them.
        """
        answers_before = before if have_all_come else before - OPERATIONS_KEPT
        with self._lock:
            old = [key for key, operation in self._leftovers.items() if operation < before]
            old += [key for key, operation in self._answers.items() if operation < answers_before]
            old_series = [key for key, operation in self._left_series.items() if operation < before]
        client.delete(old)
        for series in old_series:
            client.delete_series(series)
        with self._lock:  # only now: a connection that breaks leaves the keys to the next call
            for key in [*old, *old_series]:
                for noted in (self._leftovers, self._left_series, self._answers):
                    noted.pop(key, None)

    def close(self) -> None:
        """Close the link and the idle client, and keep none from now on."""
        with self._lock:
            self._is_closed = True
            client, self._idle_client = self._idle_client, None
            link, self._link = self._link, None
        if link is not None:
            link.close()
        if client is not None:
            client.close()
