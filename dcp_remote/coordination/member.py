"""Membership of one rank in a group: the clients, keys and limits that a collective operation uses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from dcp_remote.coordination.heartbeat import Heartbeat
from dcp_remote.coordination.key_value import Client, HelperClient

# Operations that not all ranks came to, of which the coordinator's verdicts are kept: by these a rank that missed some
# finds out how many.
VERDICTS_KEPT = 64


class GroupMember:
    """This rank as a member of its group: its heartbeat, an idle client of the store, and the keys to delete later.

    Args:
        rank: Rank of this process, within the group.
        world_size: Ranks of the group.
        clock: Monotonic clock, in seconds.

    Attributes:
        rank: Rank of this process, within the group.
        world_size: Ranks of the group.
        clock: Monotonic clock, in seconds.
        is_coordinator: True on rank 0.
        heartbeat: Heartbeat of this rank; None if it is the only one, or before the first operation.
    """

    def __init__(self, rank: int, world_size: int, clock: Callable[[], float]) -> None:
        """Ask the store nothing."""
        self.rank = rank
        self.world_size = world_size
        self.clock = clock
        self.is_coordinator = rank == 0
        self.heartbeat: Heartbeat | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._idle_client: HelperClient | None = None
        self._leftovers: dict[int, list[str]] = {}
        self._verdicts: dict[int, str] = {}

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

    def note_left_keys(self, operation: int, keys: Iterable[str]) -> None:
        """Note keys that an operation may have left in the store; coordinator only. A single rank has no store."""
        with self._lock:
            if self.world_size > 1:
                self._leftovers.setdefault(operation, []).extend(keys)

    def note_verdict(self, operation: int, key: str) -> None:
        """Note the verdict on an operation that not all ranks came to, for ranks that come later; coordinator only."""
        with self._lock:
            if self.world_size > 1:
                self._verdicts[operation] = key

    def delete_left_keys(self, client: Client, before: int, *, have_all_come: bool = False) -> None:
        """Delete the keys that operations before number `before` left in the store.

        Args:
            client: Client of the store.
            before: Number of the first operation whose keys are kept.
            have_all_come: All ranks are in operation `before`, or none will come to an earlier one: no verdict is kept.
        """
        verdicts_before = before if have_all_come else before - VERDICTS_KEPT
        with self._lock:
            old = [key for number in _numbers_below(self._leftovers, before) for key in self._leftovers.pop(number)]
            old += [self._verdicts.pop(number) for number in _numbers_below(self._verdicts, verdicts_before)]
        client.delete(old)

    def close(self) -> None:
        """Close the idle client, and keep none from now on."""
        with self._lock:
            self._is_closed = True
            client, self._idle_client = self._idle_client, None
        if client is not None:
            client.close()


def _numbers_below(by_number: Iterable[int], limit: int) -> list[int]:
    return [number for number in by_number if number < limit]
