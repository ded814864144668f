"""The ranks of a process group, and the things that they do together, one after the other.

They meet in the key-value store of the group, never in a collective; see `dcp_remote.joint`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from dcp_remote.errors import DcpRemoteError, InvalidArgumentError
from dcp_remote.joint import Joint
from dcp_remote.joint_keys import Place
from dcp_remote.key_value import Client, Line, connection
from dcp_remote.pulse import Pulse, Watch, beat_seconds_of, line_of

# What a pulse waits for the one before it to take its number: Ctrl-C may have kept that from starting.
_TURN_SECONDS = 10.0

# By prefix: set when the last use of this process has its number.
_last_uses: dict[str, threading.Event] = {}


class Ranks:
    """The ranks of a group, for one user of them that does one joint thing after another; made by all alike.

    Args:
        rank: Of this process, within the group.
        world_size: Of the group; at 1 there is no thread and no store, and all behaves as with more.
        store: Of the group, below a prefix of this user's own, and touched by nobody else. Or called by the first
            use, in its thread: gives what gives the store, in the thread of the pulse, where it may block.
        beat_seconds: Of the pulse; by default what suits the number of ranks.
        store_host: Of a store that is given later: where it is, if that is known.
        clock: Monotonic, in seconds; for tests.

    Attributes:
        rank: See above.
        world_size: See above.
        is_coordinator: Whether this is rank 0.
        pulse: Its heartbeat; None for a rank that is alone, or before the first use.
        store_host: Where the store is, which all ranks can reach; None if that is not known.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: dist.Store | Callable[[], Callable[[], dist.Store]] | None,
        *,
        beat_seconds: float | None = None,
        store_host: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """See the class; the pulse starts here if there is a store already."""
        self.rank = rank
        self.world_size = world_size
        self.is_coordinator = rank == 0
        self.store_host = store_host if callable(store) else _host_of(store)
        self.pulse: Pulse | None = None
        self._clock = clock
        self._number = 0
        self._joint: Joint | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._leftovers: dict[int, list[str]] = {}
        # A connection goes from one joint to the next, unless a thread is stuck in it.
        self._spare: Line | None = None
        self._leaving: Watch | None = None
        self._hooks: list[Callable[[Client], None]] = [self._beat]
        self._store = store
        self._beat_seconds = beat_seconds_of(world_size) if beat_seconds is None else beat_seconds
        if not callable(store):
            self.meet()

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None, name: str, *, beat_seconds: float | None = None) -> Ranks:
        """The ranks of a process group. All of them use theirs in the same order; making them asks the store nothing.

        Args:
            process_group: None for the default group; where torch.distributed is not initialized, this process alone.
            name: What they are for; there may be several of one name.
            beat_seconds: As in the class.

        Raises:
            InvalidArgumentError: This process does not belong to the group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if process_group is not None:
                raise InvalidArgumentError("A process group was given, but torch.distributed is not initialized.")
            return cls(0, 1, None)
        group = dist.group.WORLD if process_group is None else process_group
        rank = dist.get_rank(group)
        if group is None or rank < 0:
            raise InvalidArgumentError("This process does not belong to the process group.", rank=dist.get_rank())
        world_size = dist.get_world_size(group)
        if world_size == 1:
            return cls(rank, world_size, None)
        prefix = f"dcp_remote/{group.group_name}/{name}"
        store = _get_default_store()

        def use() -> Callable[[], dist.Store]:
            # In the thread that uses it: threads of pulses take their numbers in the order of uses.
            before, taken = _last_uses.get(prefix), threading.Event()
            _last_uses[prefix] = taken
            return partial(place, before, taken)

        def place(before: threading.Event | None, taken: threading.Event) -> dist.Store:
            if before is not None:
                before.wait(_TURN_SECONDS)
            # Of uses, and not of what was made: a rank may make one more than others, and not use it. Counted in the
            # store, where the number outlives a group that is destroyed and made again over the same store.
            try:
                number = connection(store).add(f"{prefix}/used/{rank}", 1)
            finally:
                taken.set()
            # That store itself, and no clone: where this process is the host, it stays as long as somebody has it, and
            # the last save can end although the group is destroyed.
            return dist.PrefixStore(f"{prefix}/{number}", store)

        return cls(rank, world_size, use, beat_seconds=beat_seconds, store_host=_host_of(store))

    def meet(self) -> None:
        """Let the others hear of this rank from now on, as the first use does; never blocks.

        Raises:
            RuntimeError: No thread can be started.
        """
        if self.world_size == 1:
            return
        if self.pulse is None:
            assert self._store is not None, "several ranks need a store to meet in"
            store = self._store() if callable(self._store) else self._store
            pulse = Pulse(store, self.rank, beat_seconds=self._beat_seconds, farewell=self._farewell, clock=self._clock)
            for hook in self._hooks:
                pulse.add_hook(hook)
            self.pulse = pulse
        self.pulse.start()

    def add_hook(self, hook: Callable[[Client], None]) -> None:
        """Call something in the thread of the pulse after each beat, as soon as there is one."""
        self._hooks.append(hook)
        if self.pulse is not None:
            self.pulse.add_hook(hook)

    def remove_hook(self, hook: Callable[[Client], None]) -> None:
        """Do not call it any more."""
        self._hooks = [one for one in self._hooks if one != hook]
        if self.pulse is not None:
            self.pulse.remove_hook(hook)

    def join(self, what: str, **terms: Any) -> Joint:
        """Prepare something that all ranks do, and begin it; see `prepare` and `begin`."""
        joint = self.prepare(what, **terms)
        self.begin(joint)
        return joint

    def prepare(
        self,
        what: str,
        *,
        seconds: float,
        silence_seconds: float = 60.0,
        left_seconds: Callable[[], float] = lambda: math.inf,
        failed: type[DcpRemoteError],
        timed_out: type[DcpRemoteError],
    ) -> Joint:
        """Make something that all ranks begin, in the same order; nobody hears of it before `begin`.

        Args:
            what: Named in errors: "the save of step 100".
            seconds: Until its deadline, from now on.
            silence_seconds: After which a rank that was heard of and fell silent fails it; and a store that does not
                answer.
            left_seconds: For work, before this process is killed.
            failed: What is raised for a cause that is no error of ours.
            timed_out: What is raised at the deadline.

        Raises:
            InvalidArgumentError: These ranks are closed, or the last joint is not over.
        """
        if self._closed:
            raise InvalidArgumentError("This is closed.", what=what)
        if self._joint is not None and self._joint.cancelled is None:
            raise InvalidArgumentError("Something else is under way.", what=what, under_way=self._joint.what)
        self.meet()
        return Joint(
            self,
            Place(self._number + 1, line_of(what)),
            seconds=seconds,
            silence_seconds=silence_seconds,
            left_seconds=left_seconds,
            failed=failed,
            timed_out=timed_out,
            clock=self._clock,
        )

    def begin(self, joint: Joint) -> None:
        """Begin what was prepared last; never touches the store, and so never blocks.

        Whoever begins it leaves it: by its block, or by `abandon`, whatever happens in between.
        """
        with self._lock:
            self._joint = joint
            self._number = joint.number
            if self.pulse is not None:
                watched = range(1, self.world_size) if self.is_coordinator else [0]
                self.pulse.enter(joint.number, joint.what, watched)

    def abandon(self, joint: Joint, error: BaseException) -> None:
        """Leave it as a block does that raises this error, unless it has been left, or never began.

        Args:
            joint: Its block is not being run any more, in whatever thread.
            error: What the others are told.
        """
        if self._joint is joint:
            self._number = joint.number
            with suppress(DcpRemoteError):
                joint.__exit__(type(error), error, error.__traceback__)

    def close(self, seconds: float = math.inf, *, is_missed: bool = False) -> None:
        """Leave. The coordinator first gives the others some seconds to read its last answer.

        It may be the host of the store, which goes with it.

        Args:
            seconds: At most.
            is_missed: Whether the others may be about to begin without this rank: they are told that it has gone, also
                if it never took part.
        """
        if is_missed and not self._closed:
            with suppress(RuntimeError):  # no thread can be started
                self.meet()
        self._closed = True
        joint = self._joint
        if joint is not None:
            joint.cancel(joint.failed(f"Closed in the middle of {joint.what}."))
        if self.pulse is not None:
            self.pulse.close(seconds)
        with self._lock:
            line, self._spare = self._spare, None
        if line is not None:
            line.close()

    # ---- for joints

    def over(self, joint: object, line: Line | None) -> None:
        """It was left; the connection is free again."""
        with self._lock:
            is_kept = line is not None and self._spare is None and not self._closed
            if is_kept:
                self._spare = line
            mine = self._joint
            if mine is not None and mine is joint:
                self._joint = None
                if self.pulse is not None:
                    self.pulse.leave(f"done with {mine.what}")
        if line is not None and not is_kept:
            line.close()

    def line(self) -> Line:
        """A connection for a joint's thread: the one to spare, or another."""
        with self._lock:
            line, self._spare = self._spare, None
        assert self.pulse is not None, "one rank needs no store"
        return Line(self.pulse.client) if line is None else line

    def renumber(self, joint: object, number: int) -> None:
        """It turned out to be this one."""
        with self._lock:
            if self._joint is joint:
                self._number = number
                if self.pulse is not None:
                    self.pulse.move(number)

    def leave_behind(self, number: int, keys: Iterable[str]) -> None:
        """What may lie in the store of that joint; the coordinator's. A rank that is alone has no store."""
        with self._lock:
            if self.world_size > 1:
                self._leftovers.setdefault(number, []).extend(keys)

    def sweep(self, client: Client, before: int) -> None:
        """Delete what joints before that one left behind."""
        with self._lock:
            old = [self._leftovers.pop(number) for number in list(self._leftovers) if number < before]
        client.delete(key for keys in old for key in keys)

    # ---- in the pulse's thread

    def _beat(self, client: Client) -> None:
        joint = self._joint
        if joint is not None:
            joint.beat(client)

    def _farewell(self, client: Client) -> bool:
        """Whether all others that live have left the last joint, so that nobody needs this process any more."""
        if not self.is_coordinator or self._number == 0 or self._joint is not None:
            return True
        assert self.pulse is not None, "whoever says goodbye has one"
        now = self._clock()
        if self._leaving is None:
            self._leaving = Watch(range(1, self.world_size), now)
        inside: list[int] = []
        for rank, beat in self.pulse.read(client, self._leaving.ranks).items():
            self._leaving.see(rank, beat, now)
            if beat.inside and beat.joint == self._number:
                inside.append(rank)
        if any(self._leaving.silent_seconds(rank, now) < self.pulse.patience_seconds for rank in inside):
            return False
        self.sweep(client, self._number + 1)
        return True


def _host_of(store: dist.Store | None) -> str | None:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return str(store.host) if isinstance(store, dist.TCPStore) else None
