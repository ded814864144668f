"""Ranks of a process group, and the collective operations that they do one after another.

Ranks meet in the key-value store of the process group, never in a torch collective; see `collective`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from dcp_remote.common.deadline import Deadline, RetryPolicy
from dcp_remote.common.descriptors import find_store_shortage
from dcp_remote.coordination.collective import Collective
from dcp_remote.coordination.heartbeat import (
    POLLING_SECONDS,
    Heartbeat,
    LivenessMonitor,
    RankStatus,
    SuspendAwareClock,
    heartbeat_interval_seconds,
    one_line,
)
from dcp_remote.coordination.incarnation import incarnation_of
from dcp_remote.coordination.key_value import Client, StoreAddress, address_of
from dcp_remote.coordination.member import GroupMember
from dcp_remote.coordination.messages import CollectiveKeys
from dcp_remote.coordination.outcome import Cancelled, Terms
from dcp_remote.coordination.use_counter import UseCounter
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError

logger = logging.getLogger(__name__)

# Time for the store to say which answer came first.
_ANSWER_SECONDS = 5.0

# Default process group of the parent, in a child that was forked: it is initialized there, and the child is no rank.
_inherited: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


class RankGroup:
    """Ranks of a group, for one user that does one collective operation after another; made by all ranks alike.

    Args:
        rank: Rank of this process, within the group.
        world_size: Ranks of the group; with 1 there is no thread and no store, and all else is as with more.
        store: Store of the group, below a prefix that nothing else uses. Or the counter that opens the store for the
            first operation. None for a single rank.
        beat_seconds: Seconds between two heartbeats; by default what suits the number of ranks.
        store_address: Address of a store that a counter will open, if the address is known.
        clock: Monotonic clock, in seconds; for tests.

    Attributes:
        rank: Rank of this process, within the group.
        world_size: Ranks of the group.
        is_coordinator: True on rank 0.
        has_met: True once all ranks have met in an operation of this group.
        hooks: Functions called in the heartbeat's helper thread after each heartbeat, from the first operation on.
        looks: Functions called twice a second in a thread of the heartbeat, also while the store does not answer.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: dist.Store | UseCounter | None,
        *,
        beat_seconds: float | None = None,
        store_address: StoreAddress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the heartbeat if there is a store already."""
        self.rank = rank
        self.world_size = world_size
        self.is_coordinator = rank == 0
        self._store_address = store_address if isinstance(store, UseCounter) else address_of(store)
        self._member = GroupMember(
            rank, world_size, clock, lambda: store.prefix if isinstance(store, UseCounter) else None
        )
        self._number = 0
        self._asked = 0  # times that this rank has asked the coordinator
        self._collective: Collective | None = None
        self._is_closed = False
        self.has_met = False
        self._has_met_last = False  # in the last operation
        self._has_news = False  # of the last operation, for other ranks
        self._lock = threading.Lock()
        self._farewell_monitor: LivenessMonitor | None = None
        self.hooks: list[Callable[[Client], None]] = [self._check_collective]
        self.looks: list[Callable[[], None]] = []
        self._store = store
        self._beat_seconds = heartbeat_interval_seconds(world_size) if beat_seconds is None else beat_seconds
        self._farewell_clock = SuspendAwareClock(self._beat_seconds, clock)
        if not isinstance(store, UseCounter):
            self.start_heartbeat()

    @classmethod
    def from_process_group(
        cls, process_group: dist.ProcessGroup | None, name: str, *, beat_seconds: float | None = None
    ) -> RankGroup:
        """Return the ranks of a process group; asks the store nothing.

        All ranks use their groups of one name in the same order; see `use_counter`.

        Args:
            process_group: None for the default group; this process alone if torch.distributed is not initialized.
            name: Name that ranks find each other by; several groups may have the same.
            beat_seconds: Seconds between two heartbeats; by default what suits the number of ranks.

        Raises:
            InvalidArgumentError: This process does not belong to the group; or is a child of a rank, made by a fork.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if process_group is not None:
                raise InvalidArgumentError("A process group was given, but torch.distributed is not initialized.")
            return cls(0, 1, None)
        if dist.group.WORLD in _inherited:
            raise InvalidArgumentError(
                "This process was forked from a rank, as a DataLoader's worker is, and is no rank itself: save and "
                "restore in its parent. To read a checkpoint here, use dcp_remote.load.",
                pid=os.getpid(),
            )
        group = dist.group.WORLD if process_group is None else process_group
        rank = dist.get_rank(group)
        if group is None or rank < 0:
            raise InvalidArgumentError("This process does not belong to the process group.", rank=dist.get_rank())
        world_size = dist.get_world_size(group)
        if world_size == 1:
            return cls(rank, world_size, None)
        store = _get_default_store()
        if dist.get_rank() == 0 and (address := address_of(store)) is not None:
            _warn_of_shortage(address.host, dist.get_world_size())
        own_store = dist.PrefixStore(f"dcp_remote/{group.group_name}", store)
        uses = UseCounter(incarnation_of(group, rank), own_store, name, rank, world_size)
        return cls(rank, world_size, uses, beat_seconds=beat_seconds, store_address=address_of(store))

    @property
    def store_host(self) -> str | None:
        """Host of the store, which all ranks can reach; None if the host is not known."""
        return self._store_address.host if self._store_address is not None else None

    @property
    def beat_seconds(self) -> float:
        """Seconds between two heartbeats of a rank, as far as this one knows."""
        return self._beat_seconds if self.heartbeat is None else self.heartbeat.interval_seconds

    @property
    def heartbeat(self) -> Heartbeat | None:
        """Heartbeat of this rank; None if it is the only one, or before the first operation."""
        return self._member.heartbeat

    def start_heartbeat(self) -> None:
        """Start the heartbeat, as the first operation does; never blocks.

        Raises:
            RuntimeError: No thread can be started.
        """
        if self.world_size == 1:
            return
        if self._member.heartbeat is None:
            assert self._store is not None, "several ranks need a store to meet in"
            store = self._store.begin() if isinstance(self._store, UseCounter) else self._store
            self._member.heartbeat = self._new_heartbeat(store)
            self._member.heartbeat.hooks = self.hooks
        self._member.heartbeat.start()

    def prepare(self, what: str, terms: Terms) -> Collective:
        """Return a collective operation that all ranks begin, in the same order; no rank hears of it before `begin`.

        Its name is for errors, such as "the save of step 100"; its time begins now.

        Raises:
            InvalidArgumentError: This group is closed, or its last operation has not ended.
        """
        if self._is_closed:
            raise InvalidArgumentError("This rank group is closed and can begin no operation.", what=what)
        if self._collective is not None and self._collective.cancelled is None:
            raise InvalidArgumentError(
                "Another operation is under way; wait for its end.", what=what, under_way=self._collective.what
            )
        self.start_heartbeat()
        return Collective(
            self._member,
            CollectiveKeys(self._number + 1, one_line(what)),
            terms,
            on_renumber=self._renumber,
            on_leave=self._leave,
        )

    def begin(self, collective: Collective) -> None:
        """Begin the operation that was prepared last; never touches the store, and so never blocks.

        Whatever happens afterwards, the caller must leave the operation: by its `with` block, or by `abandon`.
        """
        with self._lock:
            self._collective = collective
            self._number = collective.keys.number
            if self.heartbeat is not None:
                watched = range(1, self.world_size) if self.is_coordinator else [0]
                silence_seconds = collective.terms.silence_seconds
                self.heartbeat.enter(collective.keys.number, collective.what, watched, silence_seconds=silence_seconds)

    def abandon(self, collective: Collective, error: BaseException) -> None:
        """Leave an operation as if its block had raised this error; nothing if it was left, or never began.

        Args:
            collective: Operation whose block no thread is running any more.
            error: Error that the other ranks are told.
        """
        if self._collective is collective:
            self._number = collective.keys.number
            with suppress(DcpRemoteError):
                collective.__exit__(type(error), error, error.__traceback__)

    def ask_coordinator(
        self, question: str, answer: Callable[[], bool], *, seconds: float, left_seconds: Callable[[], float]
    ) -> bool:
        """Return the coordinator's answer on every rank, beside the operation under way; no before the first one.

        Other ranks wait for the coordinator alone, for `seconds`, and until `left_seconds` returns 0. A rank that has
        waited in vain answers no for all ranks, the coordinator included, which may come later; a rank that does not
        hear the store gets no. All ranks ask the same questions. `answer` is called on the coordinator only.
        """
        heartbeat, deadline = self.heartbeat, Deadline(seconds, self._member.clock)
        if heartbeat is None or self._number == 0:
            return self._number > 0 and answer()
        self._asked += 1
        key = f"asked/{question}/{self._asked}"

        def look() -> None:
            if heartbeat.gone is not None or deadline.elapsed_seconds() > seconds + _ANSWER_SECONDS:
                raise dist.DistNetworkError("The key-value store of the process group does not answer.")

        def answer_first(client: Client) -> bytes:
            client.put_first(key, own)  # the first value stays: who has answered has done so for all ranks
            return client.get(key)

        own = b"no"
        pauses = RetryPolicy(POLLING_SECONDS, max(POLLING_SECONDS, self._beat_seconds)).growing_delays()
        try:
            while not (self.is_coordinator or heartbeat.ask(lambda client: client.has([key]), look)):
                if deadline.expired() or left_seconds() <= 0:
                    break
                time.sleep(next(pauses))
            own = b"yes" if self.is_coordinator and answer() else b"no"
            found = heartbeat.ask(answer_first, look)
        except BaseException as error:
            own = b"no"  # of a request that is made nevertheless, once the store answers
            if not isinstance(error, dist.DistError):
                raise
            return False
        if self.is_coordinator:
            # As of the next operation: if this rank closes before, others may still have to read the answer.
            self._member.note_answers(self._number + 1, [key])
        return found == b"yes"

    def close(self, seconds: float = math.inf, *, is_missed: bool = False) -> None:
        """Cancel the operation under way, and stop the heartbeat.

        The coordinator first gives the others some seconds to read its last answer, since its process may host the
        store.

        Args:
            seconds: Longest time to wait.
            is_missed: Other ranks may begin an operation that this rank never will. If this rank never began one, one
                heartbeat makes them take it for a silent rank, so that they do not wait for it until their deadline.
        """
        if not self._is_closed and isinstance(self._store, UseCounter):
            self._note_missed_use(self._store, seconds, is_told=is_missed)
        self._is_closed = True
        collective = self._collective
        if collective is not None:
            collective.cancel(Cancelled(collective.failed(f"The rank group was closed during {collective.what}.")))
        if self.heartbeat is not None:
            self.heartbeat.close(seconds, has_news=self._has_news)
            if self.heartbeat.has_started and isinstance(self._store, UseCounter):
                self._store.release_turn()
        self._member.close()

    def _new_heartbeat(self, store: dist.Store | Callable[[], dist.Store | None]) -> Heartbeat:
        return Heartbeat(
            store,
            self.rank,
            beat_seconds=self._beat_seconds,
            address=self._store_address,
            while_waiting=self._check_collective,
            farewell=self._may_stop,
            look=self._look,
            link=self._member.link,
            clock=self._member.clock,
        )

    def _note_missed_use(self, uses: UseCounter, seconds: float, *, is_told: bool) -> None:
        """Mark the count of uses if the ranks did not meet in this one.

        Args:
            uses: Counter of this use.
            seconds: Longest time to wait.
            is_told: If this use never began here, tell the other ranks, which may wait in it.
        """
        has_begun = self.heartbeat is not None and self.heartbeat.has_started
        if self.heartbeat is not None and not has_begun:
            uses.release_turn()
        if not self.has_met:
            uses.mark_doubtful()
        if is_told and not has_begun:
            heartbeat = self._new_heartbeat(uses.begin(is_missed=True))
            heartbeat.set_activity("left by an error before its first call")
            try:
                heartbeat.start().close(seconds, says_goodbye=False)
            except RuntimeError:  # no thread can be started
                uses.release_turn()

    # ---- called by the operation

    def _leave(self, collective: Collective) -> None:
        with self._lock:
            if self._collective is not collective:
                return
            self._collective = None
            self._has_met_last = collective.has_met
            self.has_met = self.has_met or collective.has_met
            self._has_news = collective.has_failed_here
            if collective.has_met and isinstance(self._store, UseCounter):
                self._store.confirm()
            if self.heartbeat is not None:
                self.heartbeat.leave(f"done with {collective.what}")

    def _renumber(self, collective: Collective, number: int) -> None:
        with self._lock:
            if self._collective is collective:
                self._number = number
                if self.heartbeat is not None:
                    self.heartbeat.renumber(number)

    # ---- in the heartbeat's threads

    def _look(self) -> None:
        collective = self._collective
        if collective is not None:
            collective.check_time_and_store()
        for look in tuple(self.looks):
            look()

    def _check_collective(self, client: Client | None = None) -> None:
        collective = self._collective
        if collective is not None:
            collective.failure_detector.check(client)

    def _may_stop(self, client: Client) -> bool:
        """Return whether no living rank needs this process any more: all have left the last operation."""
        if not self.is_coordinator or self._number == 0 or self._collective is not None:
            return True
        assert self.heartbeat is not None, "called by the heartbeat"
        # The looks follow each other closely: a longer time was spent suspended, perhaps with all ranks of the host.
        now = self._farewell_clock()
        if self._farewell_monitor is None:
            self._farewell_monitor = LivenessMonitor(range(1, self.world_size), now)
        monitor = self._farewell_monitor
        statuses = self.heartbeat.read(client, monitor.ranks)
        for rank, status in statuses.items():
            monitor.record(rank, status, now)
        inside = [rank for rank in monitor.ranks if self._is_inside_last(statuses.get(rank))]
        if any(monitor.silent_seconds(rank, now) < self.heartbeat.delay_seconds_max for rank in inside):
            return False
        # A rank that has not come to the last operation, or was stopped in it, hears why this was given up afterwards.
        gone = [one for one in statuses.values() if one.is_closed or one.operation >= self._number]
        have_all_left = not inside and len(gone) == self.world_size - 1
        self._member.delete_left_keys(client, self._number + 1, have_all_come=have_all_left)
        return True

    def _is_inside_last(self, status: RankStatus | None) -> bool:
        """Return whether a rank of this status may still be in the last operation, and wait for an answer.

        Contributions and heartbeats go different ways: where all ranks have met, an older heartbeat is only late.
        """
        if status is None or status.operation < self._number:
            return self._has_met_last and (status is None or not status.is_closed)
        return status.is_inside and status.operation == self._number


def default_world_size() -> int:
    """Return the world size of the default process group; 1 where torch.distributed is not initialized."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@cache  # once
def _warn_of_shortage(host: str, ranks: int) -> None:
    if shortage := find_store_shortage(host, ranks):
        logger.warning(shortage)


def _note_inherited_group() -> None:
    if dist.is_available() and dist.group.WORLD is not None:
        _inherited.add(dist.group.WORLD)


os.register_at_fork(after_in_child=_note_inherited_group)
