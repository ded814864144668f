"""Exchange between ranks during a load: a range that several ranks want is read from the store by one of them.

The engine sees a store: a range that another rank owns is requested from that rank, and read from the store below, all
of it or the rest, if the rank does not send it or the store would send it sooner. So no load fails or hangs that would
not without the exchange. The receiver verifies the bytes as it verifies those of the store; bytes that do not match
their digest are read from the store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from dcp_remote.format.manifest import Manifest
from dcp_remote.loading.peers import Address, OtherHosts, PeerClient, PeerServer
from dcp_remote.loading.read_plan import ReadPlan, Wanted
from dcp_remote.loading.read_rates import ReadRates
from dcp_remote.loading.shared_read_plan import (
    Place,
    Unit,
    decode_wanted,
    encode_wanted,
    grouping_key,
    plan_shared,
    shared_units,
    split_into_cohorts,
)
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.rereads import is_reread
from dcp_remote.storage.wrapper import WrappedStore

logger = logging.getLogger(__name__)

# The budget divided by this is for copies that others have not received yet; the rest is for ranges in flight.
_KEPT_SHARE = 2

# The budget divided by this is one window. Where all ranks are about as fast, a rank is at most three windows ahead of
# what others have received.
_WINDOW_SHARE = 8

_NO_RUNS = np.zeros((0, 2), dtype=np.int64)

# Other hosts as all loads of this process found them.
_OTHER_HOSTS = OtherHosts()


@dataclass(frozen=True, slots=True)
class Announcement:
    """Message of a rank to the others before a load.

    Attributes:
        address: Address at which the rank serves what it has read; None if it serves nothing.
        wanted: Blocks that the rank wants, as `encode_wanted` returns them.
        key: Key by which ranks are grouped, of `grouping_key`.
    """

    address: Address | None
    wanted: bytes
    key: int


@dataclass(frozen=True, slots=True)
class Cohort:
    """Ranks that read together.

    Attributes:
        ranks: Numbers of the ranks, ascending.
        announcements: Announcement of each of these ranks.
    """

    ranks: tuple[int, ...]
    announcements: tuple[Announcement, ...]


def cohorts_of(announcements: Sequence[Announcement]) -> tuple[list[Cohort], list[int]]:
    """Return the cohorts, and for each rank the number of its cohort; called on the coordinator. Pure.

    Equal `wanted` become one object, which pickle writes once.
    """
    interned = {announcement.wanted: announcement.wanted for announcement in announcements}
    cohort_numbers = [0] * len(announcements)
    cohorts: list[Cohort] = []
    for number, ranks in enumerate(split_into_cohorts([announcement.key for announcement in announcements])):
        for rank in ranks:
            cohort_numbers[rank] = number
        members = (replace(announcements[rank], wanted=interned[announcements[rank].wanted]) for rank in ranks)
        cohorts.append(Cohort(tuple(ranks), tuple(members)))
    return cohorts, cohort_numbers


@dataclass(frozen=True, slots=True)
class UnreachedRank:
    """Rank that was not reached, broke off or fell silent, as another rank saw it.

    Attributes:
        rank: Number of the rank.
        host: IP address of its host.
        port: TCP port; 0 if it serves only ranks of its own host.
        cause: Cause.
    """

    rank: int
    host: str
    port: int
    cause: str


class PeerExchange:
    """This rank's part in an exchange, used as a context manager; leave it when all ranks have what they want.

    First `listen`, then `begin` with the cohort of this rank, which returns the store and the plan to read with.

    Args:
        rank: Number of this rank.
        host: Address of this host that the other ranks can reach.
        gives: True if what this rank has read stays unchanged until the end; if not, the rank takes no part: it opens
            no socket and reads everything from the store.
        ports: First and last TCP port to listen at; None for any free port.
        memory_budget_bytes: Limit of the memory of ranges in flight and of copies kept for others, in bytes.
        is_over: Function that tells whether the load was cancelled.
        hosts: Other hosts as earlier loads found them; None for those of all loads of this process.

    Attributes:
        fallback_bytes: Bytes that another rank was to send, and that this rank read from the store.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        *,
        gives: bool,
        memory_budget_bytes: int,
        is_over: Callable[[], bool],
        ports: tuple[int, int] | None = None,
        hosts: OtherHosts | None = None,
    ) -> None:
        """Store the settings; nothing is opened before `listen`."""
        self._gives = gives
        self._rank = rank
        self._host = host
        self._ports = ports
        self._budget_bytes = memory_budget_bytes
        self._is_over = is_over
        self._hosts = hosts or _OTHER_HOSTS
        self.fallback_bytes = 0
        self._lock = threading.Lock()
        self._cohort: Cohort | None = None
        self._server: PeerServer | None = None
        self._client: PeerClient | None = None
        self._units: tuple[Unit, ...] = ()
        # Numbers of the units that this rank owns, by key and first byte.
        self._owned: dict[tuple[str, int], int] = {}

    def __enter__(self) -> Self:
        """Return the exchange."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the exchange."""
        self.close()

    def close(self) -> None:
        """Close all connections and end all threads; the other ranks read from the store what they still want."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        if self._client is not None:
            self._client.close()

    @property
    def received_bytes(self) -> int:
        """Number of bytes received from other ranks."""
        return self._client.received_bytes if self._client is not None else 0

    @property
    def unreached(self) -> list[UnreachedRank]:
        """Ranks from which this rank got nothing, or nothing more, each with the cause."""
        if self._client is None or self._cohort is None:
            return []
        cohort = self._cohort
        return [
            UnreachedRank(cohort.ranks[member], address.host, address.port, cause)
            for member, cause in sorted(self._client.unreached.items())
            if (address := cohort.announcements[member].address) is not None
        ]

    @property
    def budget_bytes(self) -> int:
        """Limit of the memory of ranges in flight, in bytes."""
        return self._budget_bytes - self._budget_bytes // _KEPT_SHARE if self._units else self._budget_bytes

    def listen(self, manifest: Manifest, wanted: Wanted) -> Announcement:
        """Start to listen, and return the announcement for the other ranks."""
        try:
            if self._gives:
                kept_bytes = self._budget_bytes // _KEPT_SHARE
                self._server = PeerServer(
                    self._host,
                    kept_bytes_max=kept_bytes,
                    ports=self._ports,
                    serves_other_hosts=not self._hosts.are_slow(),
                )
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            logger.warning(
                "This rank cannot serve other ranks, and reads everything from the store. host=%s cause=%s",
                self._host,
                error,
            )
        encoded = encode_wanted(manifest, wanted)
        address = self._server.address if self._server is not None else None
        return Announcement(address, encoded, grouping_key(decode_wanted(encoded)))

    def begin(
        self, store: ObjectStore, manifest: Manifest, wanted: Wanted, cohort: Cohort
    ) -> tuple[ObjectStore, ReadPlan]:
        """Plan the shared read, and return the store and the plan to read with; connects when a unit is requested.

        Args:
            store: Store that holds the shards.
            manifest: Manifest of the checkpoint.
            wanted: Blocks that this rank wants, as passed to `listen`.
            cohort: Cohort of this rank.
        """
        member = cohort.ranks.index(self._rank)
        # A rank that serves nothing shares nothing, as if it wanted nothing.
        wants = [
            _NO_RUNS if announcement.address is None else decode_wanted(announcement.wanted)
            for announcement in cohort.announcements
        ]
        self._cohort = cohort
        places = [
            Place(announcement.address.host, serves_all=announcement.address.port > 0)
            if announcement.address is not None
            else Place("", serves_all=False)
            for announcement in cohort.announcements
        ]
        self._units = units = tuple(shared_units(manifest, wants, places))
        addresses = {
            number: announcement.address
            for number, announcement in enumerate(cohort.announcements)
            if announcement.address is not None and number != member
        }
        rates = ReadRates()
        self._client = PeerClient(addresses, self._host, is_over=self._is_over, rates=rates, hosts=self._hosts)
        received: dict[tuple[str, int], tuple[int, Unit]] = {}
        for number, unit in enumerate(units):
            place = manifest.shards.keys[unit.range.shard], unit.range.start
            if unit.owner == member:
                self._owned[place] = number
            elif member in unit.members:
                received[place] = number, unit
        window_bytes = max(1, self._budget_bytes // _WINDOW_SHARE)
        plan = plan_shared(manifest, wanted, units, member=member, window_bytes=window_bytes)
        return _SharedStore(store, self, self._client, rates, received), plan

    def complete(self) -> None:
        """Tell the other ranks that this rank has read all that it owns."""
        if self._server is not None:
            self._server.complete()

    def count_fallback(self, size_bytes: int) -> None:
        """Count bytes that another rank was to send, and that this rank read from the store; from any thread."""
        with self._lock:
            self.fallback_bytes += size_bytes

    def arrived(self, key: str, start: int, data: memoryview, stays: bool) -> None:  # noqa: FBT001  # `engine.Arrived`
        """Offer a range to the other ranks if this rank owns it; the callback of `read_targets`."""
        number = self._owned.get((key, start))
        if number is not None and self._server is not None:
            self._server.offer(number, data, receivers=len(self._units[number].members) - 1, stays=stays)


class _SharedStore(WrappedStore):
    """Store that requests some ranges from other ranks first, and measures its own rate."""

    def __init__(
        self,
        store: ObjectStore,
        exchange: PeerExchange,
        client: PeerClient,
        rates: ReadRates,
        received: Mapping[tuple[str, int], tuple[int, Unit]],
    ) -> None:
        super().__init__(store)
        self._exchange = exchange
        self._client = client
        self._rates = rates
        self._received = received

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        # On a reread the bytes of the other rank did not match their digest, so the store is read.
        number, unit = (0, None) if is_reread() else self._received.get((self._prefix + key, start), (0, None))
        assert unit is None or unit.range.length == len(buffer), "a unit is read by one request"
        if unit is not None:
            count = self._client.fetch(unit.owner, number, buffer)
            start, buffer = start + count, buffer[count:]
        if buffer:
            with self._rates.reading(len(buffer)):
                super().get_into(key, start, buffer)
            if unit is not None:
                self._exchange.count_fallback(len(buffer))
