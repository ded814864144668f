"""Incarnation of a process group: its life with one process as its coordinator.

A store may outlive the processes of a job: torchrun keeps one for all attempts, and a program may destroy its process
group and make it again over the same store. What earlier processes left there must not be taken for a message of a
living one. So all that the ranks of a group put into the store lies below the name of an incarnation:

    incarnation         name of the newest incarnation, and a number that its coordinator's process raises as it lives
    <incarnation>/…     keys of that incarnation

The coordinator's process makes the name in its first operation. Another rank joins the incarnation that it has seen
change: a name that was there when the rank came may be that of a process that has died, but a value that changes was
put by a living one. Whatever the ranks of earlier attempts did, a new process learns nothing from them.

An incarnation ends with the coordinator's process, when the process group is made again, or when another process
becomes the coordinator over the same store. A process of another rank that is new among survivors joins the incarnation
that lives. A process that has made its group again before the coordinator has waits for another name: the one that it
joined over the group before may show life until the coordinator makes its group again, too.
"""

from __future__ import annotations

import threading
import uuid
import weakref

import torch.distributed as dist

from dcp_remote.coordination.heartbeat import Heartbeat
from dcp_remote.coordination.key_value import Client, open_connection

# Interval at which the coordinator's process shows that the incarnation lives: the longest delay of another rank's
# first operation. Costs three operations each, on one rank.
_SIGN_SECONDS = 0.25

_KEY = "incarnation"


class Incarnation:
    """Incarnation of one process group, as known to one rank; shared by all threads of its process.

    Args:
        group: Process group.
        rank: Rank of this process, within the group.
        joined: Incarnations that this process has joined, of all its groups, by name; added to.

    Attributes:
        turns: Turns of the uses of this process, by name; see `use_counter`, also for what follows. The event of the
            last use is set once that use has its number.
        doubtful_since: Moment at which the count of a name became doubtful, by name.
        published: Count that this process has published last, by incarnation and name.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, joined: dict[str, Incarnation]) -> None:
        """Know no name."""
        self._group = weakref.ref(group)
        self._rank = rank
        self._joined = joined
        self._lock = threading.Lock()
        self._name: str | None = None
        # On the coordinator the value that it put last; on another rank the value at its last look.
        self._value: bytes | None = None
        self.turns: dict[str, threading.Event] = {}
        self.doubtful_since: dict[str, int] = {}
        self.published: dict[str, int] = {}

    def find(self, client: Client, store: dist.Store) -> str | None:
        """Return the name; None as long as this rank has seen no sign of the coordinator's process.

        The coordinator makes the name. Another rank calls this again and again, at one operation on the store each; and
        also before each use of a known name, to go over to a new coordinator.

        Args:
            client: Client of the store.
            store: Store, below a prefix of the group's own; the coordinator opens another connection.

        Raises:
            DistNetworkError: The process group was made again, so that this incarnation is over; or the store is gone.
        """
        if self._is_over():
            raise dist.DistNetworkError("The process group was destroyed, and made again.")
        with self._lock:
            if self._rank != 0:
                value = client.get(_KEY)
                name = value.partition(b" ")[0].decode()
                if self._value not in {value, None} and self._joined.setdefault(name, self) is self:
                    self._name = name
                self._value = value
            elif self._name is None:
                name = uuid.uuid4().hex
                self._value = f"{name} 0".encode()
                client.put(_KEY, self._value)
                # Of its own connection: it must not keep the host of the store alive, where that is this process.
                sign = Heartbeat(open_connection(store), self._rank, beat_seconds=_SIGN_SECONDS)
                sign.hooks.append(lambda client: self._show_life(client, sign))
                sign.start()
                self._name, self._joined[name] = name, self
            return self._name

    def _show_life(self, client: Client, sign: Heartbeat) -> None:
        """Raise the number beside the name, or end with the incarnation; in the thread of `sign`."""
        assert self._value is not None, "put before the thread starts"
        name, _, number = self._value.partition(b" ")
        value = b"%s %d" % (name, int(number) + 1)
        if self._is_over() or not client.replace(_KEY, self._value, value):
            sign.close()
        self._value = value

    def _is_over(self) -> bool:
        """Return whether the process group was made again. One that was only destroyed may still end its last save."""
        group = self._group()
        try:
            return dist.is_initialized() and (group is None or dist.get_rank(group) < 0)
        except ValueError:  # the group is not registered any more
            return dist.is_initialized()


_incarnations: weakref.WeakKeyDictionary[dist.ProcessGroup, Incarnation] = weakref.WeakKeyDictionary()
_joined: dict[str, Incarnation] = {}


def incarnation_of(group: dist.ProcessGroup, rank: int) -> Incarnation:
    """Return the incarnation of a process group, of which there is one in a process; asks the store nothing."""
    return _incarnations.setdefault(group, Incarnation(group, rank, _joined))
