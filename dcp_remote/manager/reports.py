"""What a save or a load came to, as the user is told: bytes, seconds, requests, and what was slowest. Pure, no torch.

Each rank sends the coordinator its own figures; together they are one `SaveReport`, whose seconds add up to the
time that passed from the call until the commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dcp_remote.common.text import counted, human_bytes


@dataclass(frozen=True, slots=True)
class Seconds:
    """How long each phase of a save took. They follow one another without a gap.

    Attributes:
        waiting: For the save before it; training waits as well.
        staging: Copying the state; training waits as well.
        planning: From then on until all ranks have agreed who writes what; who is early waits for the others.
        uploading: Until this rank's shards were there.
        committing: From the last rank's shards on until the checkpoint existed; 0 on ranks that do not commit.
    """

    waiting: float = 0.0
    staging: float = 0.0
    planning: float = 0.0
    uploading: float = 0.0
    committing: float = 0.0

    @property
    def blocked(self) -> float:
        """How long training had to wait for a save in the background."""
        return self.waiting + self.staging

    @property
    def total(self) -> float:
        """From the call on until the checkpoint existed."""
        return self.blocked + self.planning + self.uploading + self.committing


@dataclass(frozen=True, slots=True)
class SlowRank:
    """The rank whose own work took longest, without its waiting for others: staging and uploading."""

    rank: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SlowShard:
    """The shard whose upload took longest, retries included."""

    key: str
    seconds: float
    rank: int


@dataclass(frozen=True, slots=True)
class RankFigures:
    """One rank's part of a save, sent to the coordinator. The coordinator makes its own last, when it has committed.

    Attributes:
        rank: In the group that saved.
        written_bytes: Of the shards that it put.
        deduplicated_bytes: That it did not send, since an earlier checkpoint's shards hold them.
        requests: That it sent, those that were repeated included.
        retries: How many of them were repetitions.
        seconds: Of its phases.
        slowest_shard: None if it put none.
    """

    rank: int
    written_bytes: int = 0
    deduplicated_bytes: int = 0
    requests: int = 0
    retries: int = 0
    seconds: Seconds = Seconds()
    slowest_shard: SlowShard | None = None

    @property
    def own_seconds(self) -> float:
        """What it would have taken without the others."""
        return self.seconds.staging + self.seconds.uploading


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A save that is committed. As a string, one line for the log.

    Attributes:
        step: Of training.
        save_id: By which its manifest names it.
        world_size: How many ranks saved it.
        total_bytes: Of the checkpoint, whoever wrote them and when.
        written_bytes: Put by this save.
        deduplicated_bytes: Not sent, since an earlier checkpoint's shards hold them.
        seconds: Of its phases, as `combine` takes them from the ranks.
        requests: Of all ranks, those that were repeated included.
        retries: How many of them were repetitions.
        slowest_rank: Where to look first if saves take too long.
        slowest_shard: The same for the store; None if nothing was put.
        attempts: 1, or more if it had to begin again.
        retired: Steps whose checkpoints retention let go after it.
        background: Whether training went on when the state was copied.
    """

    step: int
    save_id: str
    world_size: int
    total_bytes: int
    written_bytes: int
    deduplicated_bytes: int
    seconds: Seconds
    requests: int
    retries: int
    slowest_rank: SlowRank
    slowest_shard: SlowShard | None
    attempts: int = 1
    retired: tuple[int, ...] = ()
    background: bool = True

    def __str__(self) -> str:
        """`saved step 1000: 12.3 GiB by 8 ranks in 14.2 s (0.3 s of it blocked), 11.9 GiB not sent again`."""
        blocked = f" ({self.seconds.blocked:.1f} s of it blocked)" if self.background else ""
        parts = [
            f"saved step {self.step}: {human_bytes(self.total_bytes)} by {counted(self.world_size, 'rank')}",
            f" in {self.seconds.total:.1f} s{blocked}",
        ]
        if self.deduplicated_bytes:
            parts.append(f", {human_bytes(self.deduplicated_bytes)} not sent again")
        if self.attempts > 1:
            parts.append(f", {self.attempts} attempts")
        if self.retries:
            parts.append(f", {self.retries} of {self.requests} requests repeated")
        if self.retired:
            parts.append(
                f", retired {'step' if len(self.retired) == 1 else 'steps'} {', '.join(map(str, self.retired))}"
            )
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class LoadSeconds:
    """How long each phase of a load took. They follow one another without a gap.

    Attributes:
        planning: Until it was known what to read from where: catalog, manifest, and the plan of all ranks.
        reading: Until the state was whole.
    """

    planning: float = 0.0
    reading: float = 0.0

    @property
    def total(self) -> float:
        """From the call on."""
        return self.planning + self.reading


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A load, as one rank saw it. As a string, one line for the log.

    Attributes:
        step: Of training.
        save_id: Of the save.
        saved_world_size: How many ranks saved it.
        world_size: How many loaded it.
        read_bytes: That this rank asked the store for.
        seconds: Of this rank's phases.
        requests: Of this rank, those that were repeated included.
        retries: How many of them were repetitions.
        received_bytes: That came from other ranks, which had read them.
        rereads: Requests that repeated a read whose bytes did not match their digest.
    """

    step: int
    save_id: str
    saved_world_size: int
    world_size: int
    read_bytes: int
    seconds: LoadSeconds
    requests: int
    retries: int
    received_bytes: int = 0
    rereads: int = 0

    def __str__(self) -> str:
        """`loaded step 1000: read 4.1 GiB in 3.2 s, one of 3 ranks; 8 ranks had saved it`."""
        parts = [f"loaded step {self.step}: read {human_bytes(self.read_bytes)} in {self.seconds.total:.1f} s"]
        if self.world_size > 1:
            parts.append(f", one of {self.world_size} ranks")
        if self.received_bytes:
            parts.append(f", which gave it {human_bytes(self.received_bytes)}")
        if self.retries:
            parts.append(f", {self.retries} of {self.requests} requests repeated")
        if self.rereads:
            parts.append(f", {counted(self.rereads, 'read')} repeated because bytes did not match their digest")
        parts.append(f"; {counted(self.saved_world_size, 'rank')} had saved it")
        return "".join(parts)


def combine(
    figures: Sequence[RankFigures],
    *,
    step: int,
    save_id: str,
    total_bytes: int,
    attempts: int = 1,
    retired: Sequence[int] = (),
    background: bool = True,
) -> SaveReport:
    """One report of the figures of all ranks, in any order. What was begun again counts only where `attempts` says so.

    The phases add up to the time that passed: up to the plan of all ranks those of the rank that was blocked longest,
    then the longest upload, then the commit. To add the longest of each phase would count twice what the other ranks,
    in planning, waited for that one.
    """
    assert figures, "a save is by at least one rank"
    assert len({one.rank for one in figures}) == len(figures), "a rank sends its figures once"
    late = max(figures, key=lambda one: one.seconds.blocked)
    slow = max(figures, key=lambda one: one.own_seconds)
    return SaveReport(
        step=step,
        save_id=save_id,
        world_size=len(figures),
        total_bytes=total_bytes,
        written_bytes=sum(one.written_bytes for one in figures),
        deduplicated_bytes=sum(one.deduplicated_bytes for one in figures),
        seconds=Seconds(
            waiting=late.seconds.waiting,
            staging=late.seconds.staging,
            planning=late.seconds.planning,
            uploading=max(one.seconds.uploading for one in figures),
            committing=max(one.seconds.committing for one in figures),
        ),
        requests=sum(one.requests for one in figures),
        retries=sum(one.retries for one in figures),
        slowest_rank=SlowRank(slow.rank, slow.own_seconds),
        slowest_shard=max(
            (one.slowest_shard for one in figures if one.slowest_shard is not None),
            key=lambda shard: shard.seconds,
            default=None,
        ),
        attempts=attempts,
        retired=tuple(retired),
        background=background,
    )
