"""Numbers of the uses of a name, by which the groups of one name find each other on all ranks.

A job makes several `RankGroup` of one name over one process group: a manager of a run, and later another manager of the
same run. What ranks exchange must stay apart, so each use of the name gets a number, and its keys lie below
`<incarnation>/<name>/<number>` in the store of the process group. All ranks must give the same use the same number:

- Numbers begin with the incarnation of the process group (see `incarnation`), so that no process goes on with the
  counts of a dead one. A rank numbers nothing, and no other rank hears of it, before it knows the incarnation.
- A use begins with the first call, not when the group is made: a rank may make one group more than the others, and
  never use it.
- Normally a rank just counts: its n-th use of the name is the n-th use of every rank. It publishes its count as
  `<incarnation>/<name>/used/<rank>`.
- After an error the count of a rank may be wrong. A rank that raised before its first call has missed a use if the
  others began it, and has missed nothing if they did not. And where a use never brought all ranks together, a rank may
  have counted one that others have not. The process then marks its count as doubtful, and numbers its next use by
  looking at the counts of other ranks. The mark goes when all ranks have met in a use that began after it. A process
  that finds a count of its rank which it has not published itself is new among survivors: it numbers its first use by
  the counts of other ranks, too.

An example of two ranks; `|` ends a use:

    rank 0   use 1 | use 2: waits for rank 1, fails | doubtful, finds nobody ahead: use 3
    rank 1   use 1 | raises before its first call   | doubtful, finds rank 0 at use 2, which is closed: use 3

Had rank 0 raised as well, nobody would have counted use 2, and both would go on with it. Had rank 1 died, and both been
started again, another incarnation would begin with use 1.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from dcp_remote.coordination.heartbeat import read_statuses
from dcp_remote.coordination.incarnation import Incarnation
from dcp_remote.coordination.key_value import Client

# Longest wait for the use before to get its number: Ctrl-C may have kept its thread from starting.
_TURN_SECONDS = 10.0

# Other ranks whose counts are read where this rank's is doubtful; one operation looks for so many keys.
_RANKS_ASKED = 16

# Moments of this process, at which uses begin and counts become doubtful.
_moments = itertools.count(1)


class UseCounter:
    """Counter of the uses of one name by this rank; a counter belongs to one group, and so numbers one use of it.

    `begin` numbers the use. Then `confirm` is called if all ranks met in it, `mark_doubtful` if it ends without that.

    Args:
        incarnation: Incarnation of the process group.
        store: Store of the process group, below a prefix of the group's own.
        name: Name that is used.
        rank: Rank of this process, within the group.
        world_size: Ranks of the group.

    Attributes:
        prefix: Prefix of the keys of this use, which no other process knows; None before the use has a number.
    """

    def __init__(self, incarnation: Incarnation, store: dist.Store, name: str, rank: int, world_size: int) -> None:
        """Ask the store nothing."""
        self._incarnation = incarnation
        self._store = store
        self._name = name
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank][:_RANKS_ASKED]
        self._client: Client | None = None
        self._turn = threading.Event()
        self._is_numbering = False
        self._began = 0
        self.prefix: str | None = None

    def begin(self, *, is_missed: bool = False) -> Callable[[], dist.Store | None]:
        """Begin the next use; the uses of this process get their numbers in the order in which they begin.

        Args:
            is_missed: The rank leaves without this use: it wants the number that others may have begun, to tell them,
                and does not count it.

        Returns:
            A function that numbers the use and returns its store; or returns None as long as the incarnation is not
            known, to be called again. It asks the store of the process group, and waits for the use before to get its
            number; so it may block, and is called in the thread of the heartbeat. If it will never be called, call
            `release_turn`.
        """
        turns = self._incarnation.turns
        turn_before, turn = turns.get(self._name), threading.Event()
        turns[self._name] = turn
        self._turn, self._began = turn, next(_moments)
        return partial(self._open_store, turn_before, turn, is_missed=is_missed)

    def confirm(self) -> None:
        """Note that all ranks have met in this use: its number was right, and no earlier miss matters any more."""
        if self._incarnation.doubtful_since.get(self._name, 0) < self._began:
            self._incarnation.doubtful_since.pop(self._name, None)

    def mark_doubtful(self) -> None:
        """Note that the ranks did not meet in this use, or it never began: the next use reads other ranks' counts."""
        self._incarnation.doubtful_since[self._name] = next(_moments)

    def release_turn(self) -> None:
        """Let the next use get its number, unless a thread is about to number this one: no thread ever will."""
        if not self._is_numbering:
            self._turn.set()

    def _open_store(
        self, turn_before: threading.Event | None, turn: threading.Event, *, is_missed: bool
    ) -> dist.Store | None:
        """Number the use, count it unless it is missed, and return its store; None without an incarnation."""
        try:
            if self._client is None:
                self._client = Client(self._store)
            incarnation = self._incarnation.find(self._client, self._store)
            if incarnation is None:
                return None
            self._is_numbering = True
            if turn_before is not None:
                turn_before.wait(_TURN_SECONDS)
            prefix = f"{incarnation}/{self._name}"
            number = self._number_use(self._client, prefix, is_missed=is_missed)
        except BaseException:
            turn.set()
            raise
        turn.set()
        self._client, self.prefix = None, f"{prefix}/{number}"
        # The original store, not a clone: where this process hosts the store, the host lives as long as this reference,
        # and the last save can end although the group is destroyed.
        return dist.PrefixStore(self.prefix, self._store)

    def _number_use(self, client: Client, prefix: str, *, is_missed: bool) -> int:
        """Return the number of the use, and publish it as this rank's count unless the use is missed.

        Args:
            client: Client of the store.
            prefix: Prefix of the name in this incarnation.
            is_missed: As for `begin`.
        """
        known, own_key = self._incarnation, _count_key(prefix, self._rank)
        is_doubtful, is_new = self._name in known.doubtful_since, False
        if prefix not in known.published:
            first = _encode_count(1)
            found = client.get(own_key) if is_missed or is_doubtful else client.put_first(own_key, first)
            if found == first:
                known.published[prefix] = 1
                return 1
            is_new = found != b""  # among survivors: an earlier process of this rank has counted
        count = known.published.get(prefix, 0)
        number = self._number_by_others(client, prefix, count) if is_new or is_doubtful else count + 1
        if not is_missed:
            known.published[prefix] = number
            client.put(own_key, _encode_count(number))
        return number

    def _number_by_others(self, client: Client, prefix: str, count: int) -> int:
        """Return the number of the next use by the counts of other ranks; `count` is this rank's.

        That is the largest number that others have begun, so that this rank joins them there. If one of them has closed
        that use already, the ranks can never meet in it, and the number is the next. If no rank is ahead, it is the
        next after `count`.
        """
        keys = {_count_key(prefix, other): other for other in self._others}
        counts = {keys[key]: _decode_count(value) for key, value in client.get_present(list(keys)).items()}
        newest = max(counts.values(), default=0)
        if newest <= count:
            return count + 1
        inside = [rank for rank, other_count in counts.items() if other_count == newest]
        statuses = read_statuses(Client(dist.PrefixStore(f"{prefix}/{newest}", self._store)), inside)
        return newest + 1 if any(status.is_closed for status in statuses.values()) else newest


def _encode_count(count: int) -> bytes:
    """Return the value of a count, which differs from that of an earlier process with the same count."""
    return b"%d %s" % (count, uuid.uuid4().hex.encode())


def _decode_count(value: bytes) -> int:
    return int(value.partition(b" ")[0])


def _count_key(prefix: str, rank: int) -> str:
    return f"{prefix}/used/{rank}"
