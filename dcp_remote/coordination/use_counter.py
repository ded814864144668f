"""Numbers of the uses of a name, by which the groups of one name find each other on all ranks.

A job makes several `RankGroup` of one name over one process group: a manager of a run, and later another manager of the
same run. What ranks exchange must stay apart, so each use of the name gets a number, and its keys lie below
`<name>/<number>` in the store of the process group. All ranks must give the same use the same number:

- A use begins with the first call, not when the group is made: a rank may make one group more than the others, and
  never use it.
- Normally a rank just counts: its n-th use of the name is the n-th use of every rank. The count is in the store
  (`<name>/used/<rank>`), since the store may outlive a process group, which is then made again over the same store.
- After an error the count of a rank may be wrong. A rank that raised before its first call has missed a use if the
  others began it, and has missed nothing if they did not. And where a use never brought all ranks together, a rank may
  have counted one that others have not. The process then marks its count as doubtful, and numbers its next use by
  looking at the counts of other ranks. The mark goes when all ranks have met in a use that began after it.

An example of two ranks; `|` ends a use:

    rank 0   use 1 | use 2: waits for rank 1, fails | doubtful, finds nobody ahead: use 3
    rank 1   use 1 | raises before its first call   | doubtful, finds rank 0 at use 2, which is closed: use 3

Had rank 0 raised as well, nobody would have counted use 2, and both would go on with it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from dcp_remote.coordination.heartbeat import read_statuses
from dcp_remote.coordination.key_value import Client, open_connection

# Longest wait for the use before to get its number: Ctrl-C may have kept its thread from starting.
_TURN_SECONDS = 10.0

# Other ranks whose counts are read where this rank's is doubtful; one operation looks for so many keys.
_RANKS_ASKED = 16

# Turns of the uses in this process, by prefix: the event of the last use is set once that use has its number.
_turns: dict[str, threading.Event] = {}

# Doubtful counts of this process, by prefix: the moment at which the count became doubtful.
_doubtful_since: dict[str, int] = {}

# Moments of this process, at which uses begin and counts become doubtful.
_moments = itertools.count(1)


class UseCounter:
    """Counter of the uses of one name by this rank; a counter belongs to one group, and so numbers one use of it.

    `begin` numbers the use. Then `confirm` is called if all ranks met in it, `mark_doubtful` if it ends without that.

    Args:
        store: Store of the process group.
        prefix: Prefix of the name's keys in the store.
        rank: Rank of this process, within the group.
        world_size: Ranks of the group.
    """

    def __init__(self, store: dist.Store, prefix: str, rank: int, world_size: int) -> None:
        """Ask the store nothing."""
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank][:_RANKS_ASKED]
        self._turn = threading.Event()
        self._began = 0

    def begin(self, *, is_missed: bool = False) -> Callable[[], dist.Store]:
        """Begin the next use; the uses of this process get their numbers in the order in which they begin.

        Args:
            is_missed: The rank leaves without this use: it wants the number that others may have begun, to tell them,
                and does not count it.

        Returns:
            A function that numbers the use and returns its store. It asks the store of the process group, and waits for
            the use before to get its number; so it may block, and is called in the thread of the heartbeat. If it will
            never be called, call `release_turn`.
        """
        turn_before, turn = _turns.get(self._prefix), threading.Event()
        _turns[self._prefix] = turn
        self._turn, self._began = turn, next(_moments)
        return partial(self._open_store, turn_before, turn, is_missed=is_missed)

    def confirm(self) -> None:
        """Note that all ranks have met in this use: its number was right, and no earlier miss matters any more."""
        if _doubtful_since.get(self._prefix, 0) < self._began:
            _doubtful_since.pop(self._prefix, None)

    def mark_doubtful(self) -> None:
        """Note that the ranks did not meet in this use, or it never began: the next use reads other ranks' counts."""
        _doubtful_since[self._prefix] = next(_moments)

    def release_turn(self) -> None:
        """Let the next use get its number, since no thread will ever number this one."""
        self._turn.set()

    def _open_store(self, turn_before: threading.Event | None, turn: threading.Event, *, is_missed: bool) -> dist.Store:
        """Number the use, count it unless it is missed, and return its store."""
        if turn_before is not None:
            turn_before.wait(_TURN_SECONDS)
        try:
            store = open_connection(self._store)
            count = store.add(self._count_key(self._rank), 0)
            number = self._number_by_others(store, count) if self._prefix in _doubtful_since else count + 1
            if not is_missed:
                store.add(self._count_key(self._rank), number - count)
        finally:
            turn.set()
        # The original store, not a clone: where this process hosts the store, the host lives as long as this reference,
        # and the last save can end although the group is destroyed.
        return self._store_of(number, self._store)

    def _number_by_others(self, store: dist.Store, count: int) -> int:
        """Return the number of the next use by the counts of other ranks; `count` is this rank's.

        That is the largest number that others have begun, so that this rank joins them there. If one of them has closed
        that use already, the ranks can never meet in it, and the number is the next. If no rank is ahead, it is the
        next after `count`.
        """
        keys = {self._count_key(other): other for other in self._others}
        present = list(Client(store).present(list(keys)))
        counts = {keys[key]: int(store.get(key)) for key in present}
        newest = max(counts.values(), default=0)
        if newest <= count:
            return count + 1
        inside = [rank for rank, other_count in counts.items() if other_count == newest]
        statuses = read_statuses(Client(self._store_of(newest, store)), inside)
        return newest + 1 if any(status.is_closed for status in statuses.values()) else newest

    def _count_key(self, rank: int) -> str:
        return f"{self._prefix}/used/{rank}"

    def _store_of(self, number: int, store: dist.Store) -> dist.Store:
        return dist.PrefixStore(f"{self._prefix}/{number}", store)
