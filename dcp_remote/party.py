"""The ranks of a group, as what they do together knows them.

A protocol: ranks make their joints, and a joint speaks to its ranks, so that one of the two has to know the other by
description.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from dcp_remote.key_value import Client, Line
from dcp_remote.pulse import Pulse


class Party(Protocol):
    """What a joint needs of its ranks; see `dcp_remote.ranks.Ranks`.

    Attributes:
        rank: Of this process, within the group.
        world_size: Of the group.
        is_coordinator: Whether this is rank 0.
        pulse: Its heartbeat; None for a rank that is alone.
    """

    rank: int
    world_size: int
    is_coordinator: bool
    pulse: Pulse | None

    def over(self, joint: object, line: Line | None) -> None:
        """It was left; the connection is free again."""

    def line(self) -> Line:
        """A connection for a joint's thread: the one to spare, or another."""

    def renumber(self, joint: object, number: int) -> None:
        """It turned out to be this one."""

    def leave_behind(self, number: int, keys: Iterable[str]) -> None:
        """What may lie in the store of that joint; the coordinator's."""

    def sweep(self, client: Client, before: int) -> None:
        """Delete what joints before that one left behind."""
