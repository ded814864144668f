"""Reports of saves and loads for the user: bytes, seconds, requests, the slowest rank and shard. No I/O, no torch.

Each rank sends its figures to the coordinator, which combines the figures of all ranks into one `SaveReport`. The
seconds of a `SaveReport` add up to the time from the call until the commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dcp_remote.common.text import format_count, human_bytes
from dcp_remote.saving.rank_report import UploadStats

# Names of each kind in a report.
NAMES_LISTED_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Seconds:
    """Durations of the phases of a save, in seconds, without gaps between the phases.

    Attributes:
        waiting: Wait for the previous save; blocks training.
        staging: Copy of the state, or the part of it that ends before `save` returns; blocks training.
        planning: Copies that end later (see `CheckpointManager.watch`), and agreement of all ranks on the plan,
            including the wait of early ranks for late ones.
        uploading: Upload of this rank's shards.
        committing: Commit, from the last rank's upload until the checkpoint exists; 0 on ranks that do not commit.
        copying: Wait of the update behind the save for copies that end later; blocks training beside the phases above.
    """

    waiting: float = 0.0
    staging: float = 0.0
    planning: float = 0.0
    uploading: float = 0.0
    committing: float = 0.0
    copying: float = 0.0

    @property
    def blocked(self) -> float:
        """Seconds for which a save in the background blocked training."""
        return self.waiting + self.staging + self.copying

    @property
    def total(self) -> float:
        """Seconds from the call until the checkpoint existed."""
        return self.waiting + self.staging + self.planning + self.uploading + self.committing


@dataclass(frozen=True, slots=True)
class SlowRank:
    """Rank whose staging and uploading took longest, without its waits for other ranks."""

    rank: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SlowShard:
    """Shard whose upload took longest, retries included."""

    key: str
    seconds: float
    rank: int


@dataclass(frozen=True, slots=True)
class RankFigures:
    """One rank's part of a save, sent to the coordinator; the coordinator's own is made after the commit."""

    rank: int  # in the group that saved
    uploads: UploadStats = field(default_factory=UploadStats)
    requests: int = 0  # to the store, repetitions included
    seconds: Seconds = Seconds()  # durations of the rank's phases
    copied_bytes: int = 0  # memory of the rank's copy of the state

    @property
    def own_seconds(self) -> float:
        """Seconds of the rank's own work, without its waits for other ranks."""
        return self.seconds.staging + self.seconds.uploading


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Report of a committed save by all ranks; `str` makes one line for the log.

    Attributes:
        step: Step of training.
        save_id: ID of the save, as in its manifest.
        world_size: Number of ranks that saved.
        total_bytes: Size of the checkpoint, including shards of earlier saves.
        written_bytes: Bytes that this save uploaded.
        deduplicated_bytes: Bytes that were not uploaded, because shards of an earlier checkpoint hold them.
        seconds: Durations of the phases; they add up to the time from the call until the commit.
        requests: Requests of all ranks, repetitions included.
        retries: Requests that were repetitions.
        slowest_rank: Rank to look at first if saves take too long.
        slowest_shard: Shard with the longest upload; None if nothing was uploaded.
        attempts: Attempts of the save; more than 1 if it had to begin again.
        background: True if training went on once the state was copied.
        is_repeated: True if the job had saved this step before, so that nothing was uploaded (`exist_ok=True`).
        copied_bytes: Memory of the copies of the state, of all ranks; 0 with `wait=True`.
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
    background: bool = True
    is_repeated: bool = False
    copied_bytes: int = 0

    def __str__(self) -> str:
        """Return `saved step 1000: 12.3 GiB by 8 ranks in 14.2 s (0.3 s of it blocked), 11.9 GiB not sent again`."""
        blocked = f" ({self.seconds.blocked:.1f} s of it blocked)" if self.background else ""
        verb = "had saved" if self.is_repeated else "saved"
        parts = [
            f"{verb} step {self.step}: {human_bytes(self.total_bytes)} by {format_count(self.world_size, 'rank')}",
            f" in {self.seconds.total:.1f} s{blocked}",
        ]
        if self.deduplicated_bytes:
            parts.append(f", {human_bytes(self.deduplicated_bytes)} not sent again")
        if self.attempts > 1:
            parts.append(f", {self.attempts} attempts")
        if self.retries:
            parts.append(f", {self.retries} of {self.requests} requests repeated")
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class LoadSeconds:
    """Durations of the phases of a load, in seconds, without gaps between the phases.

    Attributes:
        planning: Read of catalog and manifest, and the plan of all ranks.
        reading: Read of the state, until it is complete.
    """

    planning: float = 0.0
    reading: float = 0.0

    @property
    def total(self) -> float:
        """Seconds from the call until the state was complete."""
        return self.planning + self.reading


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Report of a load by one rank; `str` makes one line for the log.

    Attributes:
        step: Step of training.
        save_id: ID of the save.
        saved_world_size: Number of ranks that saved.
        world_size: Number of ranks that loaded.
        read_bytes: Bytes that this rank requested from the store.
        seconds: Durations of this rank's phases.
        requests: Requests of this rank, repetitions included.
        retries: Requests that were repetitions.
        received_bytes: Bytes that other ranks had read and sent to this rank.
        fallback_bytes: Bytes of `read_bytes` that another rank was to send: it was not reached, or sent more slowly
            than the store.
        unreached_ranks: Number of ranks that were to send to this rank and were not reached, broke off or fell silent;
            0 if all is well. After that, ranks of other hosts are not asked for ten minutes. See `rank_sockets`.
        rereads: Requests that repeated a read whose bytes did not match their digest.
        early_reads_in_vain: Manifests read by the coordinator before the catalog had named another one: 1 if a newer
            checkpoint than that of the last load is there, else 0.
        kept: Names of values of this rank's state that were not loaded, by `missing="keep"`, `include` or `exclude`;
            the first 1,000. Empty with a planner that is no `RemoteLoadPlanner`, as `left_out`.
        kept_values: Number of these values.
        left_out: Names of entries of the checkpoint that no rank loaded, by `unexpected="ignore"`, `include`, `exclude`
            or a `rename` to None; the first 1,000.
        left_out_values: Number of these entries.
        created: Time of the save; UTC, ISO 8601, by the clock of the coordinator that saved.
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
    fallback_bytes: int = 0
    unreached_ranks: int = 0
    rereads: int = 0
    early_reads_in_vain: int = 0
    kept: tuple[str, ...] = ()
    kept_values: int = 0
    left_out: tuple[str, ...] = ()
    left_out_values: int = 0
    created: str = ""

    def __str__(self) -> str:
        """Return `loaded step 1000: read 4.1 GiB in 3.2 s as one of 3 ranks; 8 ranks had saved it`."""
        parts = [f"loaded step {self.step}: read {human_bytes(self.read_bytes)} in {self.seconds.total:.1f} s"]
        if self.world_size > 1:
            parts.append(f" as one of {self.world_size} ranks")
        if self.received_bytes:
            parts.append(f", received {human_bytes(self.received_bytes)} from the others")
        if self.fallback_bytes:
            parts.append(f", {human_bytes(self.fallback_bytes)} of it read in place of other ranks")
        if self.unreached_ranks:
            parts.append(f", {format_count(self.unreached_ranks, 'rank')} not reached")
        if self.retries:
            parts.append(f", {self.retries} of {self.requests} requests repeated")
        if self.rereads:
            parts.append(f", {format_count(self.rereads, 'read')} repeated because bytes did not match their digest")
        if self.early_reads_in_vain:
            parts.append(", 1 early read of a manifest in vain")
        parts.append(f"; {format_count(self.saved_world_size, 'rank')} had saved it")
        return "".join(parts)


def combine(figures: Sequence[RankFigures], *, step: int, save_id: str, total_bytes: int) -> SaveReport:
    """Return one report of the figures of all ranks, in any order, of a save in the background by one attempt.

    The seconds add up to the time that passed: waiting, staging and planning of the rank that was blocked longest, then
    the longest upload, then the commit. The longest of each phase would add up to more, because the other ranks wait
    for that rank in their planning.
    """
    assert len({part.rank for part in figures}) == len(figures), "a rank sends its figures once"
    late = max(figures, key=lambda part: part.seconds.blocked)
    slow = max(figures, key=lambda part: part.own_seconds)
    longest = max(figures, key=lambda part: (bool(part.uploads.slowest_shard), part.uploads.slowest_seconds))
    shard = longest.uploads.slowest_shard
    return SaveReport(
        step=step,
        save_id=save_id,
        world_size=len(figures),
        total_bytes=total_bytes,
        written_bytes=sum(part.uploads.put_bytes for part in figures),
        deduplicated_bytes=sum(part.uploads.reused_bytes for part in figures),
        seconds=Seconds(
            waiting=late.seconds.waiting,
            staging=late.seconds.staging,
            planning=late.seconds.planning,
            uploading=max(part.seconds.uploading for part in figures),
            committing=max(part.seconds.committing for part in figures),
            copying=late.seconds.copying,
        ),
        requests=sum(part.requests for part in figures),
        retries=sum(part.uploads.retries for part in figures),
        copied_bytes=sum(part.copied_bytes for part in figures),
        slowest_rank=SlowRank(slow.rank, slow.own_seconds),
        slowest_shard=SlowShard(shard, longest.uploads.slowest_seconds, longest.rank) if shard else None,
    )
