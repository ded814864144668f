"""Copies of checkpoints of a run to another URL. Imports no torch.

Every checkpoint is verified while it is copied, and committed like a save: shards, manifest, then catalog. The copy of
a run has the `run_id` of its source, and `dcp-remote cp` holds its fence: all copiers of a run write the same, and need
no fence against each other. A job that takes the fence makes the copy a run of its own, which no copier changes.

The name of a shard follows from what it holds, from the save that names it, and from the revision at which the copy of
its checkpoint began. A copier that finds the catalog at that revision goes on with the shards of one that was
interrupted: whoever removes such shards raises the floor first, after which no copy that began at that revision can be
committed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock

import numpy as np

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.digests import digest
from dcp_remote.common.threads import in_parallel
from dcp_remote.common.units import MiB
from dcp_remote.errors import (
    CheckpointExistsError,
    CheckpointGoneError,
    CorruptCheckpointError,
    DcpRemoteError,
    FencedError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    UnsupportedFormatError,
)
from dcp_remote.format import manifest_json
from dcp_remote.format.catalog import (
    Attempt,
    BeginAgainError,
    Catalog,
    Entry,
    add_entry,
    mark_entries,
    take_fence,
)
from dcp_remote.format.keys import manifest_key, origin
from dcp_remote.format.manifest import Manifest, RunInfo
from dcp_remote.format.shard import ShardNames
from dcp_remote.run.catalog_store import swap
from dcp_remote.run.conditional_put import Found, find_object, put_until_settled
from dcp_remote.run.info import require_run
from dcp_remote.run.lookup import (
    explain_missing_shard,
    find_entry,
    read_entry,
    require_no_checkpoint_by_itself,
    require_not_lost,
)
from dcp_remote.run.shard_check import ShardChecker, ShardPart, group_pieces
from dcp_remote.storage.base import ObjectInfo, ObjectStore
from dcp_remote.storage.rereads import RereadingStore
from dcp_remote.storage.retrying import RANGE_RETRY_SECONDS, RetryingStore

logger = logging.getLogger(__name__)

# Beginning of `Catalog.holder` while no job has taken the fence of a copied run.
_HOLDER = "dcp-remote cp"
_HOLDER_CHARACTERS_MAX = 1_000

# Time for which the first requests to each store are repeated: short, because a user waits.
_LOOK_SECONDS = 20.0

# Time to read and put one shard, and to commit a checkpoint: an outage of minutes is waited for.
_COPY_SECONDS = 1500.0

# One GET each, so that a failure repeats little of a shard.
_RANGE_BYTES = 16 * MiB


@dataclass(slots=True)
class CopyReport:
    """Progress and result of a copy; bytes are those of shards."""

    checkpoints: int = 0  # to be copied
    bytes_expected: int = 0  # of these
    copied: list[Entry] = field(default_factory=list)  # committed at the destination
    present: list[int] = field(default_factory=list)  # steps that the destination had
    abandoned: list[int] = field(default_factory=list)  # steps of the destination that were marked as abandoned
    unmarked: list[int] = field(default_factory=list)  # steps of the destination whose mark was taken away
    gone: list[int] = field(default_factory=list)  # steps that were deleted or thinned while they were copied
    damaged: list[int] = field(default_factory=list)  # steps that were not copied, since objects of them are damaged
    shards: int = 0  # read, verified and put
    bytes_copied: int = 0  # of these
    bytes_there: int = 0  # of shards that another checkpoint has, or that an interrupted copy had put


def copy_checkpoints(
    source: ObjectStore,
    destination: ObjectStore,
    *,
    step: int | str | None = None,
    since: int | None = None,
    on_progress: Callable[[CopyReport], object] = lambda _: None,
) -> CopyReport:
    """Copy the live checkpoints of a run to another URL; may be called again.

    `step` is a step or name of the only checkpoint to copy, `since` the first step. Checkpoints that the destination
    has are left out, by their `save_id`, and keep their labels there. After a crash at any moment the destination has
    whole checkpoints alone, and the next call goes on.

    Costs two GETs of the source's catalog and one of the destination's; to begin a copy a LIST, a HEAD and a PUT, and
    to mark abandoned checkpoints a GET and a PUT; for each checkpoint three GETs, one for each segment of it and of its
    neighbor, and two PUTs; for each shard a HEAD, a PUT and a GET per 16 MiB, but the HEAD alone if the nearest
    checkpoint of the copy has the shard, and none of these if this is the one that was copied just before. Holds four
    shards (256 MiB, as dcp_remote writes them) and the pieces of two checkpoints.

    `on_progress` is called after each shard, by several threads in turn.

    Raises:
        CorruptCheckpointError: The checkpoint that was asked for is damaged, or a shard of it that an interrupted copy
            has put, and was not committed. Of a whole run, the others are copied, and these are in the report.
        CheckpointGoneError: The checkpoint that was asked for was deleted or thinned meanwhile.
        InvalidArgumentError: The source is a checkpoint by itself, or the destination is no copy of it (any more).
        FencedError: A job has taken the destination while a checkpoint was copied.
        CommitConflictError: Another copier has replaced the step meanwhile.
        CheckpointExistsError: The destination has another checkpoint, which is pinned, named, or by itself.
        BeginAgainError: gc has removed shards that were put. Copy again.
    """
    return _Copier(source, destination, on_progress).copy(step, since)


def _hash_key(key: str) -> str:
    """Return the part of the name of a copy that follows from the content: no key is ever written twice."""
    return digest(key.encode()).hex()[:16]


def _list_shards(manifest: Manifest) -> list[ShardPart]:
    return [ShardPart.of(manifest, shard, pieces) for shard, pieces in enumerate(group_pieces(manifest))]


class _Copier:
    """Copy of a run; for one thread."""

    def __init__(
        self, source: ObjectStore, destination: ObjectStore, on_progress: Callable[[CopyReport], object]
    ) -> None:
        self._source, self._destination = source, destination
        self._catalog = require_run(source, retry_seconds=_LOOK_SECONDS)
        self._report, self._on_progress, self._lock = CopyReport(), on_progress, Lock()
        self._there: set[str] = set()  # keys of the shards of the checkpoint that was copied last

    def copy(self, step: int | str | None, since: int | None) -> CopyReport:
        report, chosen = self._report, list(self._catalog.entries)
        if step is not None:
            chosen = [find_entry(self._catalog, step, url=self._source.url)]
        elif since is not None:
            chosen = [entry for entry in chosen if entry.step >= since]
        now = self._open_copy()
        there = {entry.save_id for entry in now.entries}
        missing = [entry for entry in chosen if entry.save_id not in there]
        report.present = [entry.step for entry in chosen if entry.save_id in there]
        report.checkpoints, report.bytes_expected = len(missing), sum(entry.size_bytes for entry in missing)
        for entry in missing:
            try:
                now = self._copy_entry(entry, now)
            except CheckpointGoneError:
                if step is not None:
                    raise
                report.gone.append(entry.step)
            except CorruptCheckpointError as error:
                if step is not None:
                    raise
                logger.warning("%s", error)
                report.damaged.append(entry.step)
            except CheckpointExistsError:
                if step is None:
                    self._mark_abandoned(now)
                raise
        if step is None:
            self._mark_abandoned(now)
        return report

    def _open_copy(self) -> Catalog:
        """Return the catalog of the destination, which is created if needed; its fence is that of copiers."""
        deadline = Deadline(_LOOK_SECONDS)
        reading = RetryingStore(self._destination, deadline)

        def change(now: Catalog) -> Catalog | None:
            if now.revision > 0:
                self._require_copy(now)
                return None
            require_no_checkpoint_by_itself(reading)
            require_not_lost(reading)
            holder = f"{_HOLDER}, from {self._source.url}"[:_HOLDER_CHARACTERS_MAX]
            return replace(take_fence(now, holder), run_id=self._catalog.run_id)

        return swap(self._destination, change, deadline=deadline, create=True)

    def _require_copy(self, now: Catalog) -> None:
        if now.run_id != self._catalog.run_id or not now.holder.startswith(_HOLDER):
            raise InvalidArgumentError(
                "The destination is no copy that `dcp-remote cp` may change: it is another run, or the source itself, "
                "or a job has saved there since, or its catalog was recovered. Copy to another URL.",
                url=self._destination.url,
                holder=now.holder or None,
            )

    def _copy_entry(self, entry: Entry, now: Catalog) -> Catalog:
        """Copy and commit one checkpoint; return the catalog with it. `now` is the catalog that was read last."""
        # A catalog that is read where an answer was lost, or another copier was faster, may be a job's by now.
        self._require_copy(now)
        there, began = now.entry_at(entry.step), now.revision
        if there is not None and there.save_id == entry.save_id:
            self._report.present.append(entry.step)  # another copier was faster
            return now
        self._require_replaceable(there, entry)
        manifest = read_entry(self._source, entry)
        assert manifest.run is not None, "the manifest of an entry has a run"
        base = min(now.entries, key=lambda live: abs(live.step - entry.step), default=None)
        shards, prefix = _list_shards(manifest), origin(revision=began, step=entry.step)
        in_base = self._read_base(base, {_hash_key(shard.key) for shard in shards})
        # Each save has its own: another one may name pieces of a shard that an interrupted copy has not verified.
        number = int.from_bytes(digest(entry.save_id.encode())[:4], "big")
        keys: list[str] = []
        new: dict[str, ShardPart] = {}
        for shard in shards:
            copied = in_base.get(_hash_key(shard.key))
            # Other pieces were not verified when the shard was copied.
            if copied is not None and set(copied.iterate_pieces()).issuperset(shard.iterate_pieces()):
                keys.append(copied.key)
                self._report.bytes_there += shard.size_bytes
            else:
                keys.append(ShardNames(0, prefix, _hash_key(shard.key)).key(number))
                new[keys[-1]] = shard
        self._copy_shards(manifest, new)
        self._there = set(keys)

        key = manifest_key(revision=began, step=entry.step)
        info = RunInfo(now.run_id, entry.step, now.token, began, entry.names, entry.metrics, manifest.run.thinned)
        body = manifest_json.encode(replace(manifest, shards=replace(manifest.shards, keys=tuple(keys)), run=info))
        deadline = Deadline(_COPY_SECONDS)
        RetryingStore(self._destination, deadline).put(key, [body])
        attempt = Attempt(
            replace(entry, manifest=key, token=now.token, began_revision=began),
            now.run_id,
            before=there.save_id if there is not None else None,
            reused=(base.save_id, base.manifest) if base is not None and len(new) < len(keys) else None,
        )

        def change(run: Catalog) -> Catalog | None:
            self._require_replaceable(run.entry_at(entry.step), entry)  # as labels are now
            return add_entry(run, attempt)

        try:
            after = swap(self._destination, change, deadline=deadline)
        except BeginAgainError as error:
            what = "Objects of the copy were removed meanwhile, by gc or with a checkpoint. Run the same copy again."
            raise BeginAgainError(what, url=self._destination.url, step=entry.step, cause=error) from error
        except FencedError as error:
            what = "A job has taken the copy meanwhile, which is a run of its own now. No more is copied there."
            holder = error.details.get("holder")
            raise FencedError(what, url=self._destination.url, step=entry.step, holder=holder) from error
        self._report.copied.append(entry)
        return after

    def _require_replaceable(self, there: Entry | None, entry: Entry) -> None:
        if there is not None and there.save_id != entry.save_id and not there.is_replaceable_by(entry.names):
            raise CheckpointExistsError(
                "The destination has another checkpoint of this step, which is pinned or has a name. Delete it there "
                "(`dcp-remote rm`), or copy to another URL.",
                url=self._destination.url,
                step=entry.step,
            )

    def _read_base(self, base: Entry | None, hashes: Collection[str]) -> dict[str, ShardPart]:
        """Return shards of a checkpoint of the copy that are there, of those with these `_hash_key`s of their sources.

        A shard that is missing, or has another length, is copied again by another name.
        """
        try:
            shards = _list_shards(read_entry(self._destination, base)) if base is not None else []
        except (CheckpointGoneError, CorruptCheckpointError, UnsupportedFormatError):
            return {}  # its shards are copied again
        by_hash = {shard.key.partition("-rank-00000-")[2][:16]: shard for shard in shards}
        found = {key_hash: shard for key_hash, shard in by_hash.items() if key_hash in hashes}
        checker = ShardChecker(self._destination, depth="quick", make_deadline=lambda: Deadline(_COPY_SECONDS))

        def is_whole(shard: ShardPart) -> bool:
            return shard.key in self._there or checker.check(shard) is None

        whole = in_parallel(is_whole, list(found.values()))
        return {key_hash: shard for (key_hash, shard), is_there in zip(found.items(), whole, strict=True) if is_there}

    def _copy_shards(self, manifest: Manifest, shards: Mapping[str, ShardPart]) -> None:
        """Copy shards to these keys of the destination; those that exist, or come meanwhile, are not put again."""
        errors: list[DcpRemoteError] = []

        def copy_one(key: str) -> None:
            if errors:
                return
            shard, deadline = shards[key], Deadline(_COPY_SECONDS)
            writing = RetryingStore(self._destination, deadline)

            def look() -> Found[ObjectInfo]:
                info = find_object(writing, key)
                return Found(info.version if info is not None else None, info)

            def is_whole(found: ObjectInfo | None) -> bool:
                if found is not None and found.size_bytes != shard.size_bytes:
                    raise CorruptCheckpointError(
                        "A shard that an interrupted copy has put has another length. Remove it (`dcp-remote gc "
                        "--yes --grace-hours 0`), then copy again.",
                        url=self._destination.url,
                        key=key,
                        size_bytes=found.size_bytes,
                        expected=shard.size_bytes,
                    )
                return found is not None

            try:
                before = look()
                is_there = is_whole(before.content)
                if not is_there:
                    body = self._read_shard(manifest, shard, RetryingStore(self._source, deadline))
                    put_until_settled(
                        writing,
                        key,
                        body,
                        before,
                        look=look,
                        # Another copier may have put it.
                        decide=lambda there, _: None if is_whole(there.content) else body,
                        unknown=lambda failure: failure,
                        deadline=deadline,
                    )
            except DcpRemoteError as error:
                errors.append(error)  # raised once the others have ended, whose memory and progress would outlive this
                return
            with self._lock:
                if is_there:
                    self._report.bytes_there += shard.size_bytes
                else:
                    self._report.shards += 1
                    self._report.bytes_copied += shard.size_bytes
                self._on_progress(self._report)

        in_parallel(copy_one, list(shards))
        if errors:
            raise errors[0]

    def _read_shard(self, manifest: Manifest, shard: ShardPart, store: ObjectStore) -> memoryview:
        """Read and verify a shard; once more, by another way, if it is damaged."""
        view, cause = np.empty(shard.size_bytes, dtype=np.uint8).data, None
        try:
            for reading in (store, RereadingStore(store)):
                for start in range(0, len(view), _RANGE_BYTES):
                    reading.get_into(shard.key, start, view[start : start + _RANGE_BYTES])
                if shard.is_whole(view):
                    return view
        except (ObjectNotFoundError, PermissionDeniedError, CorruptCheckpointError) as error:  # missing or too short
            cause = error
        gone = explain_missing_shard(self._source, manifest, retry_seconds=RANGE_RETRY_SECONDS, error=cause)
        if gone is None and isinstance(cause, PermissionDeniedError):
            raise cause
        raise gone or CorruptCheckpointError(
            "A shard of the source is damaged or missing, so that the checkpoint was not copied. `dcp-remote verify` "
            "says what is damaged.",
            url=self._source.url,
            step=manifest.run.step if manifest.run is not None else None,
            shard=shard.key,
        ) from cause

    def _mark_abandoned(self, now: Catalog) -> None:
        """Mark checkpoints of the destination as abandoned, or take the mark away, so that the newest is the source's.

        Nothing follows from checkpoints that the source lacks, or has without a mark, if the source is a copy itself,
        which may be older or have a part of the run; or if all that the source has is abandoned.
        """
        # Read again, after the catalog of the destination: another copier may have brought newer checkpoints than were
        # read first. What is there was live in the source before; what the source has no more, it has given up.
        source = require_run(self._source, retry_seconds=RANGE_RETRY_SECONDS)
        newest = source.latest()
        marks = {entry.save_id: True for entry in source.entries if entry.abandoned}
        if newest is not None and not source.holder.startswith(_HOLDER):
            marks = {entry.save_id: True for entry in now.entries if entry.step > newest.step}
            marks |= {entry.save_id: entry.abandoned for entry in source.entries}
        found = [entry for entry in now.entries if marks.get(entry.save_id, entry.abandoned) != entry.abandoned]

        def change(run: Catalog) -> Catalog | None:
            self._require_copy(run)
            return mark_entries(run, {entry.save_id: not entry.abandoned for entry in found})

        if found:
            swap(self._destination, change, deadline=Deadline(_COPY_SECONDS))
        self._report.abandoned = [entry.step for entry in found if not entry.abandoned]
        self._report.unmarked = [entry.step for entry in found if entry.abandoned]
