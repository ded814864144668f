"""Copies of checkpoints: of a run, or of a checkpoint by itself, to another URL. Imports no torch.

Every checkpoint is verified while it is copied, and committed like a save: shards, manifest, then catalog. The copy of
a run has the `run_id` of its source, and `dcp-remote cp` holds its fence: all copiers of a run write the same, and need
no fence against each other. A job that takes the fence makes the copy a run of its own, which no copier changes.

Shards are named by their content and by the revision at which the copy of their checkpoint began. A copier that finds
the catalog at that revision goes on with the shards of one that was interrupted: whoever removes such shards raises
the floor first, after which no copy that began at that revision can be committed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from threading import Lock

import numpy as np

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.digests import block_bytes, block_digests, digest, piece_digest
from dcp_remote.common.text import escape_unprintable
from dcp_remote.common.units import GiB, MiB
from dcp_remote.errors import (
    CheckpointExistsError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FencedError,
    InvalidArgumentError,
    ObjectNotFoundError,
    UnsupportedFormatError,
)
from dcp_remote.format import manifest_json
from dcp_remote.format.catalog import (
    CATALOG_KEY,
    Attempt,
    BeginAgainError,
    Catalog,
    Entry,
    abandon_entries,
    add_entry,
    take_fence,
)
from dcp_remote.format.keys import manifest_key, origin
from dcp_remote.format.manifest import Manifest, RunInfo
from dcp_remote.format.shard import ShardNames
from dcp_remote.run.catalog_store import read_catalog, swap
from dcp_remote.run.commit import commit, read_slot
from dcp_remote.run.info import require_run
from dcp_remote.run.live_shards import in_parallel
from dcp_remote.run.lookup import (
    exists,
    explain_missing_shard,
    find_entry,
    read_entry,
    read_manifest,
    require_no_checkpoint_by_itself,
    require_not_lost,
)
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.conditional_writes import require_conditional_writes
from dcp_remote.storage.rereads import RereadingStore
from dcp_remote.storage.retrying import RANGE_RETRY_SECONDS, RetryingStore

# Beginning of `Catalog.holder` while no job has taken the fence of a copied run.
HOLDER = "dcp-remote cp"

# Time for which the first requests to each store are repeated: short, because a user waits.
_LOOK_SECONDS = 20.0

# Time to read and put one shard, and to commit a checkpoint: an outage of minutes is waited for.
_SHARD_SECONDS = 1500.0

# One GET each, so that a failure repeats little of a shard.
_RANGE_BYTES = 16 * MiB

# A shard is held whole, as a PUT needs it, and four at a time. No release writes larger ones than 64 MiB.
_SHARD_BYTES_MAX = 1 * GiB

# Shards between two looks for an error: all of them are queued at once.
_BATCH_SHARDS = 256

# Checkpoints of the copy that are searched for shards that a new one shares with them, newest first. Most often the
# first has all of them.
_BASES_MAX = 8


@dataclass(slots=True)
class CopyReport:
    """Progress and result of a copy; bytes are those of shards."""

    checkpoints: int = 0  # to be copied
    bytes_expected: int = 0  # of these, before shared shards are known
    copied: list[Entry] = field(default_factory=list)  # committed at the destination
    present: list[int] = field(default_factory=list)  # steps that the destination had
    replaced: list[int] = field(default_factory=list)  # steps of which the destination had an older save
    abandoned: list[int] = field(default_factory=list)  # steps of the destination that were marked, as in the source
    gone: list[int] = field(default_factory=list)  # steps that were deleted or thinned while they were copied
    shards: int = 0  # read, verified and put
    bytes_copied: int = 0  # of these
    bytes_shared: int = 0  # of shards that another checkpoint of the destination has
    bytes_found: int = 0  # of shards that an interrupted copy had put


@dataclass(frozen=True, slots=True)
class _Known:
    """Shard of the source at the destination."""

    key: str
    content: str  # digest of all that the manifest tells of the content; 16 hex digits
    is_whole: bool  # every byte was verified, also those that another manifest may name
    base: tuple[str, str]  # save_id and manifest of a checkpoint that names the shard


@dataclass(frozen=True, slots=True)
class _Shard:
    """Shard as a manifest tells of it; `pieces` are those in the shard."""

    number: int
    key: str
    size_bytes: int
    pieces: np.ndarray[tuple[int], np.dtype[np.int64]]
    content: str
    is_whole: bool


def copy_checkpoints(
    source: ObjectStore,
    destination: ObjectStore,
    *,
    step: int | str | None = None,
    since: int | None = None,
    on_progress: Callable[[CopyReport], object] = lambda _: None,
) -> CopyReport:
    """Copy the live checkpoints of a run, or a checkpoint by itself, to another URL; may be called again.

    `step` is a step or name of the only checkpoint to copy, `since` the first step. Checkpoints that the destination
    has are left out, by their `save_id`. After a crash at any moment the destination has whole checkpoints alone, and
    the next call goes on.

    Names, metrics, pins and marks (thinned, abandoned) come with the checkpoint. Those of checkpoints that the
    destination has stay as they are there, but for names that come with another checkpoint, and for "abandoned", which
    is set where the source has gone back. A checkpoint of a step that the source has saved anew is replaced.

    Costs of a run: a GET of each catalog, and to begin a copy a HEAD, a LIST, a GET and a PUT; for each checkpoint
    two GETs and two PUTs, and two GETs for each of up to eight that may share shards with it; for each shard a PUT, and
    a GET per 16 MiB, but neither if a checkpoint of the copy has the shard; and if there is a copy, a HEAD for each
    shard of the first checkpoint. Holds four shards (256 MiB), and about a kilobyte for each shard of the run.

    `on_progress` is called after each shard, by several threads in turn.

    Raises:
        CorruptCheckpointError: A shard or manifest of the source is damaged. The checkpoint is not committed.
        InvalidArgumentError: The destination is another run, or one of the two is a run and the other is not.
        FencedError: A job has saved to the destination, perhaps meanwhile.
        CheckpointExistsError: The destination has another checkpoint, which is pinned, named, or by itself.
        BeginAgainError: gc has removed shards that were put. Copy again.
    """
    catalog = read_catalog(RetryingStore(source, Deadline(_LOOK_SECONDS)))
    if catalog is None:
        if step is not None or since is not None:
            require_run(source, retry_seconds=_LOOK_SECONDS)
        return _copy_single(_Transfer(source, destination, on_progress))
    return _RunCopier(_Transfer(source, destination, on_progress), catalog).copy(step, since)


def _copy_single(transfer: _Transfer) -> CopyReport:
    destination, report, deadline = transfer.destination, transfer.report, Deadline(_LOOK_SECONDS)
    manifest = read_manifest(transfer.source, retry_seconds=_LOOK_SECONDS)
    looking = RetryingStore(destination, deadline)
    if exists(looking, CATALOG_KEY):
        raise InvalidArgumentError(
            "A run lies at the destination, and the source is a checkpoint by itself. Copy to another URL.",
            url=destination.url,
        )
    slot = read_slot(looking)
    if slot.head is not None and slot.committed and slot.head.save_id == manifest.save_id:
        return report
    if slot.committed:
        raise CheckpointExistsError("The destination has another checkpoint. Copy to another URL.", url=destination.url)
    require_conditional_writes(destination, deadline, swaps=slot.version is not None)
    # Fresh names, since no revision tells whether gc is removing shards of an earlier attempt.
    names = ShardNames(0)
    shards = {names.key(shard.number): shard for shard in _list_shards(manifest)}
    report.checkpoints, report.bytes_expected = 1, manifest.total_bytes
    transfer.copy(manifest, shards, are_searched=False)
    copied = replace(_with_keys(manifest, list(shards)), replaces=slot.lineage)
    # A nonce, since the same save may have lain here before: equal bytes could get an equal version.
    body = manifest_json.reencode(manifest_json.encode(copied), uuid.uuid4().hex)
    deadline = Deadline(_SHARD_SECONDS)
    commit(RetryingStore(destination, deadline), slot, body, save_id=manifest.save_id, deadline=deadline)
    return report


class _RunCopier:
    """Copy of a run; for one thread."""

    def __init__(self, transfer: _Transfer, catalog: Catalog) -> None:
        self._transfer, self._report, self._catalog = transfer, transfer.report, catalog
        self._source, self._destination = transfer.source, transfer.destination
        self._known: dict[str, _Known] = {}
        self._searched: set[str] = set()  # manifests of the destination whose shards are known

    def copy(self, step: int | str | None, since: int | None) -> CopyReport:
        chosen: Sequence[Entry] = self._catalog.entries
        if step is not None:
            chosen = [find_entry(self._catalog, step, url=self._source.url)]
        elif since is not None:
            chosen = [entry for entry in chosen if entry.step >= since]
        report, now = self._report, read_catalog(RetryingStore(self._destination, Deadline(_LOOK_SECONDS)))
        if now is not None:
            self._require_copy(now)
        there = {entry.save_id for entry in now.entries} if now is not None else set()
        missing = [entry for entry in chosen if entry.save_id not in there]
        report.present = [entry.step for entry in chosen if entry.save_id in there]
        report.checkpoints, report.bytes_expected = len(missing), sum(entry.size_bytes for entry in missing)
        is_resumed = now is not None
        for entry in missing:
            now = now or self._begin()
            try:
                now = self._copy_entry(entry, now, is_resumed=is_resumed)
            except CheckpointGoneError:
                if step is not None:
                    raise
                report.gone.append(entry.step)
            is_resumed = is_resumed and not report.copied
        if now is not None and step is None:
            self._mark_abandoned(now)
        return report

    def _begin(self) -> Catalog:
        """Create the catalog of the destination, whose fence is that of copiers."""
        deadline = Deadline(_LOOK_SECONDS)
        reading = RetryingStore(self._destination, deadline)
        require_no_checkpoint_by_itself(reading)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        holder = escape_unprintable(f"{HOLDER}, since {since}, from {self._source.url}")[:1000]

        def change(now: Catalog) -> Catalog | None:
            if now.revision == 0:
                require_not_lost(reading)
                return replace(take_fence(now, holder), run_id=self._catalog.run_id)
            self._require_copy(now)  # another copier was faster
            return None

        return swap(self._destination, change, deadline=deadline, create=True)

    def _require_copy(self, now: Catalog) -> None:
        if now.run_id != self._catalog.run_id:
            raise InvalidArgumentError(
                "The destination is another run. Copy to another URL.", url=self._destination.url
            )
        if not now.holder.startswith(HOLDER):
            raise FencedError(
                "The destination is not held by `dcp-remote cp`: a job has saved there, its catalog was recovered, or "
                "it is the source itself. No more was copied. Copy to another URL.",
                url=self._destination.url,
                holder=now.holder or None,
            )

    def _copy_entry(self, entry: Entry, now: Catalog, *, is_resumed: bool) -> Catalog:
        """Copy and commit one checkpoint; return the catalog with it. `now` is the catalog that was read last."""
        there = now.entry_at(entry.step)
        before = there.save_id if there is not None else None
        _require_replaceable(there, entry, self._destination.url)
        manifest = read_entry(self._source, entry, retry_seconds=RANGE_RETRY_SECONDS)
        assert manifest.run is not None, "the manifest of an entry has a run"
        began, key, shards = now.revision, manifest_key(revision=now.revision, step=entry.step), _list_shards(manifest)
        self._search_bases(shards, entry, now)
        keys: list[str] = []
        bases: set[tuple[str, str]] = set()
        new: dict[str, _Shard] = {}
        for shard in shards:
            known = self._known.get(shard.key)
            if known is not None and (known.is_whole or known.content == shard.content):
                keys.append(known.key)
                bases.add(known.base)
                self._report.bytes_shared += shard.size_bytes
            else:
                keys.append(ShardNames(0, origin(revision=began, step=entry.step), token=shard.content).key(0))
                new[keys[-1]] = shard
        self._transfer.copy(manifest, new, are_searched=is_resumed)
        info = RunInfo(now.run_id, entry.step, now.token, began, entry.names, entry.metrics, manifest.run.thinned)
        body = manifest_json.encode(replace(_with_keys(manifest, keys), run=info))
        deadline = Deadline(_SHARD_SECONDS)
        RetryingStore(self._destination, deadline).put(key, [body])
        attempt = Attempt(
            replace(entry, manifest=key, token=now.token, began_revision=began), now.run_id, before=before
        )

        def change(run: Catalog) -> Catalog | None:
            if not run.holds(entry.save_id):
                self._require_copy(run)
                _require_replaceable(run.entry_at(entry.step), entry, self._destination.url)
                if not bases.issubset((live.save_id, live.manifest) for live in run.entries):
                    raise BeginAgainError("A checkpoint was removed of which this one shares shards.")
            return add_entry(run, attempt)

        try:
            after = swap(self._destination, change, deadline=deadline)
        except BeginAgainError as error:
            what = "Objects of the copy were removed meanwhile, by gc or with a checkpoint. Run the same copy again."
            raise BeginAgainError(what, url=self._destination.url, step=entry.step, cause=error) from error
        self._report.copied.append(entry)
        if before not in (None, entry.save_id):
            self._report.replaced.append(entry.step)
        # The manifest of another copier may be there, if it was faster.
        live = next(live for live in after.entries if live.save_id == entry.save_id)
        if live.manifest == key:
            self._remember(shards, keys, live)
        return after

    def _search_bases(self, shards: Sequence[_Shard], entry: Entry, now: Catalog) -> None:
        """Look for shards of earlier saves in the checkpoints of the destination that the source has, too."""
        prefix = origin(revision=entry.began_revision, step=entry.step)
        foreign = {shard.key for shard in shards if not shard.key.rpartition("/")[2].startswith(prefix)}
        copies = {live.save_id: live for live in now.entries}
        older = [live for live in self._catalog.entries if live.step < entry.step]
        newer = [live for live in self._catalog.entries if live.step > entry.step]
        bases = [live for live in [*reversed(older), *newer] if live.save_id in copies]
        for base in bases[:_BASES_MAX]:
            if self._known.keys() >= foreign:
                return
            copy = copies[base.save_id]
            if copy.manifest not in self._searched:
                try:
                    ours, theirs = read_entry(self._source, base), read_entry(self._destination, copy)
                except (CheckpointNotFoundError, CorruptCheckpointError):
                    continue  # its shards are copied again
                if np.array_equal(ours.shards.sizes, theirs.shards.sizes):  # else one of them was thinned
                    self._remember(_list_shards(ours), theirs.shards.keys, copy)

    def _remember(self, shards: Iterable[_Shard], keys: Sequence[str], copy: Entry) -> None:
        self._searched.add(copy.manifest)
        for shard in shards:
            base = (copy.save_id, copy.manifest)
            self._known[shard.key] = _Known(keys[shard.number], shard.content, shard.is_whole, base)

    def _mark_abandoned(self, now: Catalog) -> None:
        """Mark checkpoints of the destination behind which the source has gone back, so that none of them is newest."""

        def find(catalog: Catalog) -> list[Entry]:
            ours, newest = {entry.save_id: entry for entry in catalog.entries}, catalog.latest()
            return [
                entry
                for entry in now.entries
                if not entry.abandoned
                and (
                    ours[entry.save_id].abandoned
                    if entry.save_id in ours
                    else newest is not None and entry.step > newest.step
                )
            ]

        if not find(self._catalog):
            return
        # Read again, after the catalog of the destination: what is there was live in the source before, and what the
        # source has no more, it has given up. Another copier may have brought newer checkpoints than were read first.
        found = find(require_run(self._source, retry_seconds=RANGE_RETRY_SECONDS))

        def change(run: Catalog) -> Catalog | None:
            self._require_copy(run)
            return abandon_entries(run, {entry.save_id for entry in found})

        swap(self._destination, change, deadline=Deadline(_SHARD_SECONDS))
        self._report.abandoned = [entry.step for entry in found]


def _require_replaceable(there: Entry | None, entry: Entry, url: str) -> None:
    """Refuse to replace another save of a step that is pinned, or has a name that the new one lacks."""
    if there is not None and there.save_id != entry.save_id and not there.is_replaceable_by(entry.names):
        raise CheckpointExistsError(
            "The destination has another checkpoint of this step, which is pinned or has a name. Unpin it "
            "(`dcp-remote pin --undo`), or delete it (`dcp-remote rm`).",
            url=url,
            step=entry.step,
            names=", ".join(there.names) or None,
        )


def _with_keys(manifest: Manifest, keys: Iterable[str]) -> Manifest:
    return replace(manifest, shards=replace(manifest.shards, keys=tuple(keys)))


def _list_shards(manifest: Manifest) -> list[_Shard]:
    shards, pieces = manifest.shards, manifest.pieces
    order = np.lexsort((pieces.start, pieces.shard))
    bounds = np.searchsorted(pieces.shard[order], np.arange(len(shards.keys) + 1)).tolist()
    listed: list[_Shard] = []
    for number, key in enumerate(shards.keys):
        inside = order[bounds[number] : bounds[number + 1]]
        size_bytes, start, table = (
            int(column[number]) for column in (shards.sizes, shards.data_starts, shards.table_lengths)
        )
        taken = pieces.take(inside)
        told = f"{key} {size_bytes} {start} {table}".encode() + shards.table_digest(number)
        content = digest(told + taken.start.tobytes() + taken.length.tobytes() + taken.digests).hex()[:16]
        is_whole = int(taken.length.sum()) == size_bytes - start
        listed.append(_Shard(number, key, size_bytes, inside, content, is_whole))
    return listed


class _Transfer:
    """Moves shards from one store to another, a few at a time, and counts them."""

    def __init__(
        self, source: ObjectStore, destination: ObjectStore, on_progress: Callable[[CopyReport], object]
    ) -> None:
        self.source, self.destination, self.report = source, destination, CopyReport()
        self._on_progress, self._lock = on_progress, Lock()

    def copy(self, manifest: Manifest, shards: Mapping[str, _Shard], *, are_searched: bool) -> None:
        """Copy shards to keys of the destination; with `are_searched` one that is there is left out."""
        largest = int(manifest.shards.sizes.max(initial=0))
        if largest > _SHARD_BYTES_MAX:
            raise UnsupportedFormatError(
                "A shard is too large to be copied.", url=self.source.url, bytes=largest, limit_bytes=_SHARD_BYTES_MAX
            )

        def copy_one(key: str) -> None:
            shard, deadline = shards[key], Deadline(_SHARD_SECONDS)
            writing = RetryingStore(self.destination, deadline)
            is_found = are_searched and _size_of(writing, key) == shard.size_bytes
            if not is_found:
                writing.put(key, [self._read(manifest, shard, RetryingStore(self.source, deadline))])
            with self._lock:
                self.report.bytes_found += shard.size_bytes if is_found else 0
                self.report.bytes_copied += 0 if is_found else shard.size_bytes
                self.report.shards += not is_found
                self._on_progress(self.report)

        keys = list(shards)
        for first in range(0, len(keys), _BATCH_SHARDS):
            in_parallel(copy_one, keys[first : first + _BATCH_SHARDS])

    def _read(self, manifest: Manifest, shard: _Shard, store: ObjectStore) -> memoryview:
        """Read and verify a shard; once more, by another way, if it is damaged."""
        view = np.empty(shard.size_bytes, dtype=np.uint8).data
        try:
            damage = _fill(store, shard.key, view) or _find_damage(manifest, shard, view)
            if damage is not None:
                damage = _fill(RereadingStore(store), shard.key, view) or _find_damage(manifest, shard, view)
        except ObjectNotFoundError as error:
            gone = explain_missing_shard(self.source, manifest, retry_seconds=RANGE_RETRY_SECONDS)
            if gone is not None:
                raise gone from error
            damage = "it is missing"
        if damage is not None:
            raise CorruptCheckpointError(
                f"A shard of the source is damaged: {damage}. The checkpoint was not copied.",
                url=self.source.url,
                step=manifest.run.step if manifest.run is not None else None,
                shard=shard.key,
            )
        return view


def _find_damage(manifest: Manifest, shard: _Shard, view: memoryview) -> str | None:
    shards, pieces = manifest.shards, manifest.pieces
    start, table = int(shards.data_starts[shard.number]), int(shards.table_lengths[shard.number])
    # No digest covers the header, which only other tools read.
    if int.from_bytes(view[:8], "little") != start - table - 8:
        return "its header"
    if table and digest(view[start - table : start]) != shards.table_digest(shard.number):
        return "its block table"
    for piece in shard.pieces.tolist():
        first, length = int(pieces.start[piece]), int(pieces.length[piece])
        blocks = block_digests(view[first : first + length], size_bytes=block_bytes(length))
        if piece_digest(blocks) != pieces.digest(piece):
            return f"bytes of {manifest.entry_of_piece(piece)}"
    return None


def _fill(store: ObjectStore, key: str, view: memoryview) -> str | None:
    """Read a whole object; return what is wrong if it is too short."""
    try:
        for start in range(0, len(view), _RANGE_BYTES):
            store.get_into(key, start, view[start : start + _RANGE_BYTES])
    except CorruptCheckpointError:
        return "it is too short"
    return None


def _size_of(store: ObjectStore, key: str) -> int | None:
    try:
        return store.head(key).size_bytes
    except ObjectNotFoundError:
        return None
