"""What several ranks want is read from the store by one of them, and given to the others.

To who reads, it looks like a store: a range that another rank owns is asked for there, and read from the store below
if nothing comes of it. So nothing can fail, or last for ever, that could not without. Whatever comes is verified by who
gets it, as what comes from the store is; bytes that do not match their digest are read from the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from dcp_remote.manifest import Manifest
from dcp_remote.peers import Address, Giver, Taker
from dcp_remote.read_plan import ReadPlan, Wanted
from dcp_remote.sharing import (
    Unit,
    cohorts,
    decode_wanted,
    encode_wanted,
    place_of,
    plan_shared,
    shared_units,
)
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.rereads import is_reread
from dcp_remote.storage.wrapper import WrappedStore

logger = logging.getLogger(__name__)

# Of the budget: for copies of what others have not got yet; the rest is for what is under way. A rank is at most three
# windows ahead of what others have got, where all are about as fast.
_KEPT_SHARE = 2
_WINDOW_SHARE = 8

_NOTHING = np.zeros((0, 2), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank tells the others.

    Attributes:
        address: Where it gives what it has read; None where it cannot.
        wanted: As `encode_wanted` gives it.
        place: As `place_of` gives it.
    """

    address: Address | None
    wanted: bytes
    place: int


@dataclass(frozen=True, slots=True)
class Cohort:
    """Ranks that read together.

    Attributes:
        ranks: Ascending.
        told: What each has told.
    """

    ranks: tuple[int, ...]
    told: tuple[Told, ...]


def cohorts_of(told: Sequence[Told]) -> tuple[list[Cohort], list[int]]:
    """Who reads together, and in which of them each rank is; the coordinator's. Pure.

    What is told alike is one object afterwards, which pickle writes once.
    """
    alike = {one.wanted: one.wanted for one in told}
    groups = cohorts([one.place for one in told])
    of = [0] * len(told)
    answers: list[Cohort] = []
    for number, ranks in enumerate(groups):
        for rank in ranks:
            of[rank] = number
        some = tuple(Told(told[r].address, alike[told[r].wanted], told[r].place) for r in ranks)
        answers.append(Cohort(tuple(ranks), some))
    return answers, of


class Exchange:
    """This rank's side of reading together; use as a context manager, in which all have what they want at the end.

    First `tell`, then `begin` with what all have told, which gives what to read, and from where.

    Args:
        rank: Of this process.
        host: An address of this host that the others can reach.
        gives: Whether what it reads is still the same when it is given. If not, it reads alone.
        memory_budget_bytes: Of what is under way, and kept for others.
        is_over: Whether the load was given up.
    """

    def __init__(
        self, rank: int, host: str, *, gives: bool, memory_budget_bytes: int, is_over: Callable[[], bool]
    ) -> None:
        """See the class."""
        self._gives = gives
        self._rank = rank
        self._host = host
        self._budget_bytes = memory_budget_bytes
        self._is_over = is_over
        self._giver: Giver | None = None
        self._taker: Taker | None = None
        self._member = 0
        self._units: tuple[Unit, ...] = ()
        self._offered: dict[tuple[str, int], int] = {}

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave the others; no thread is left."""
        self.close()

    def close(self) -> None:
        """Leave the others, who get the rest elsewhere; no thread is left."""
        giver, self._giver = self._giver, None
        if giver is not None:
            giver.close()
        if self._taker is not None:
            self._taker.close()

    @property
    def received_bytes(self) -> int:
        """How much came from others."""
        return self._taker.taken_bytes if self._taker is not None else 0

    @property
    def budget_bytes(self) -> int:
        """For what is under way."""
        return self._budget_bytes - self._budget_bytes // _KEPT_SHARE if self._units else self._budget_bytes

    def tell(self, manifest: Manifest, wanted: Wanted) -> Told:
        """Listen, and say what the others need to know."""
        try:
            if self._gives:
                self._giver = Giver(self._host, kept_bytes_max=self._budget_bytes // _KEPT_SHARE)
        except (OSError, RuntimeError) as error:  # the latter: no thread can be started
            logger.warning("This rank reads alone, and nothing for others. host=%s cause=%s", self._host, error)
        encoded = encode_wanted(manifest, wanted)
        address = self._giver.address if self._giver is not None else None
        return Told(address, encoded, place_of(decode_wanted(encoded)))

    def begin(
        self, store: ObjectStore, manifest: Manifest, wanted: Wanted, cohort: Cohort
    ) -> tuple[ObjectStore, ReadPlan]:
        """What to read, and the store to read it from."""
        self._member = me = cohort.ranks.index(self._rank)
        # Who can give nothing is as one who wants nothing.
        wants = [_NOTHING if one.address is None else decode_wanted(one.wanted) for one in cohort.told]
        self._units = units = tuple(shared_units(manifest, wants))
        addresses = {n: one.address for n, one in enumerate(cohort.told) if one.address is not None and n != me}
        self._taker = Taker(addresses, self._host, is_over=self._is_over)
        keys = manifest.shards.keys
        self._offered = {(keys[u.range.shard], u.range.start): n for n, u in enumerate(units) if u.owner == me}
        theirs = {
            (keys[u.range.shard], u.range.start): (n, u)
            for n, u in enumerate(units)
            if u.owner != me and me in u.members
        }
        window_bytes = max(1, self._budget_bytes // _WINDOW_SHARE)
        plan = plan_shared(manifest, wanted, units, member=me, window_bytes=window_bytes)
        return _SharedStore(store, self._taker, theirs), plan

    def arrived(self, key: str, start: int, data: memoryview, stays: bool) -> None:  # noqa: FBT001  # `reading.Arrived`
        """Offer it to the others, if it is this rank's to do that."""
        number = self._offered.get((key, start))
        if number is not None and self._giver is not None:
            self._giver.offer(number, data, takers=len(self._units[number].members) - 1, stays=stays)


class _SharedStore(WrappedStore):
    """A store of which some ranges are asked for elsewhere first."""

    def __init__(self, store: ObjectStore, taker: Taker, theirs: Mapping[tuple[str, int], tuple[int, Unit]]) -> None:
        super().__init__(store)
        self._taker = taker
        self._theirs = theirs

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        # What another rank gave did not match its digest: it is read from the store.
        number, unit = (0, None) if is_reread() else self._theirs.get((self._prefix + key, start), (0, None))
        assert unit is None or unit.range.length == len(buffer), "what several ranks want is read as one"
        if unit is None or not self._taker.take(unit.owner, number, buffer):
            super().get_into(key, start, buffer)
