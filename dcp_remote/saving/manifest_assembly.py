"""Assemble the manifest of a save from the plan and the ranks' reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import chain

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlan

from dcp_remote.common.arrays import I64, concat_ranges, group_offsets
from dcp_remote.common.digests import DIGEST_BYTES
from dcp_remote.common.units import MiB
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, SaveFailedError, UnsupportedFormatError
from dcp_remote.format import manifest_json
from dcp_remote.format.empty_dicts import drop_conflicting
from dcp_remote.format.manifest import RAW, Manifest, Pieces, RunInfo, Shards, StoredObject, TensorKind, Tensors
from dcp_remote.format.shard import SHARD_BYTES_MAX
from dcp_remote.saving.rank_report import RankReport


@dataclass(frozen=True, slots=True)
class SaveInfo:
    """Properties of a save that its manifest records; the fields of `Manifest` of the same names."""

    save_id: str
    replaces: tuple[str, ...]
    created: str
    writer: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Planned:
    """Contents of a checkpoint as planned; as torch's `Metadata`, they would take ten times the memory.

    Attributes:
        names: Names of the tensors.
        kinds: Kind of each tensor; the encoding is known only to the ranks that write the tensor.
        dimensions: Number of dimensions of each tensor.
        shape: Shapes of all tensors, one after another.
        chunks: Number of chunks of each tensor.
        chunk_offsets: Offsets of all chunks, one after another.
        chunk_sizes: Sizes of all chunks, one after another.
        objects: Names of the entries that are not tensors.
        positions: Position of each object among all entries of the state dict, by name.
        flatten: Path of each flattened name in the state dict; None if nothing was flattened.
    """

    names: tuple[str, ...]
    kinds: tuple[TensorKind, ...]
    dimensions: I64
    shape: I64
    chunks: I64
    chunk_offsets: I64
    chunk_sizes: I64
    objects: tuple[str, ...]
    positions: Mapping[str, int]
    flatten: Mapping[str, tuple[str | int, ...]] | None


def to_manifest(planned: Planned, reports: Sequence[RankReport], info: SaveInfo) -> Manifest:
    """Combine the plan and the reports into a manifest; coordinator only.

    Every chunk of every tensor, and every object, must have been written by a rank with the planned dtype, which torch
    itself does not check. If several ranks wrote a chunk, the first one counts. Shards without a piece that counts are
    left out, and are orphans.

    Args:
        planned: Contents as planned; those of an earlier save, if only values have changed since.
        reports: Reports of all ranks, in their order.
        info: Properties of the save.

    Raises:
        SaveFailedError: A chunk or object is missing, or a dtype is not the planned one; names the tensor. Or two
            reports describe one shard differently.
    """
    tensors, written = _tensors(planned, reports)
    shard_first = group_offsets(np.array([len(report.shards.keys) for report in reports], dtype=np.int64))
    shards, same_shard = _merged_shards(reports)
    piece_first = group_offsets(np.array([len(report.pieces.shard) for report in reports], dtype=np.int64))
    inline, stored, object_pieces = _objects(planned.objects, reports, piece_first, first=len(written))
    pieces = _pieces(reports, shard_first, np.concatenate([written, object_pieces]))
    named, shard = np.unique(same_shard[pieces.shard], return_inverse=True)
    return Manifest(
        save_id=info.save_id,
        replaces=info.replaces,
        created=info.created,
        writer=info.writer,
        world_size=len(reports),
        shards=shards.take(named),
        tensors=tensors,
        pieces=replace(pieces, shard=shard),
        inline=inline,
        stored=stored,
        positions=tuple(planned.positions[name] for name in (*inline, *(item.name for item in stored))),
        flatten=drop_conflicting(planned.flatten, {*planned.names, *planned.objects}),
    )


def _tensors(planned: Planned, reports: Sequence[RankReport]) -> tuple[Tensors, I64]:
    """Return the planned tensors, and the index of each of their pieces among the pieces of all reports."""
    index = {name: number for number, name in enumerate(planned.names)}
    reported = [_tensor_numbers(index, report) for report in reports]
    encodings = _check_encodings(planned, reports, reported)
    kinds: dict[TensorKind, int] = {}
    kind_numbers = [
        kinds.setdefault(kind if encoding == kind.encoding else replace(kind, encoding=encoding), len(kinds))
        for kind, encoding in zip(planned.kinds, encodings, strict=True)
    ]
    located = _locate(planned, reports, reported)
    piece_counts = np.concatenate([np.zeros(0, dtype=np.int64), *(report.chunk_pieces for report in reports)])
    piece_firsts = group_offsets(np.array([len(report.pieces.shard) for report in reports], dtype=np.int64))
    starts = np.concatenate(
        [np.zeros(0, dtype=np.int64)]
        + [report.chunk_piece_first + first for report, first in zip(reports, piece_firsts[:-1], strict=True)]
    )
    counts = np.where(located >= 0, piece_counts[located] if len(piece_counts) else 0, 0)
    tensors = Tensors(
        names=planned.names,
        kinds=tuple(kinds),
        kind=np.array(kind_numbers, dtype=np.int64),
        dimensions=planned.dimensions,
        shape=planned.shape,
        chunks=planned.chunks,
        chunk_offsets=planned.chunk_offsets,
        chunk_sizes=planned.chunk_sizes,
        chunk_pieces=counts,
    )
    for chunk in np.flatnonzero(located < 0).tolist():
        if all(tensors.sizes_of(chunk)):
            number = int(np.searchsorted(tensors.chunk_first, chunk, side="right")) - 1
            raise SaveFailedError(
                "No rank wrote a chunk of a tensor; nothing was committed.",
                tensor=tensors.names[number],
                offsets=tensors.offsets_of(chunk),
                sizes=tensors.sizes_of(chunk),
                ranks=len(reports),
            )
    return tensors, concat_ranges(starts[located] if len(starts) else counts, counts)


def _tensor_numbers(index: Mapping[str, int], report: RankReport) -> list[int]:
    """Return the index, in the plan, of each tensor of which a rank wrote chunks."""
    numbers: list[int] = []
    for name in report.names:
        number = index.get(name)
        if number is None:
            raise SaveFailedError(
                "A rank wrote a tensor that nobody planned; nothing was committed.", tensor=name, rank=report.rank
            )
        numbers.append(number)
    return numbers


def _check_encodings(
    planned: Planned, reports: Sequence[RankReport], reported: Sequence[Sequence[int]]
) -> Sequence[str]:
    """Return the encoding of each tensor; refuse ranks that disagree about it, and dtypes that were not planned."""
    dtypes = [kind.dtype for kind in planned.kinds]
    encodings: list[str | None] = [None] * len(dtypes)
    for report, numbers in zip(reports, reported, strict=True):
        for number, dtype, encoding in zip(numbers, report.dtypes, report.encodings, strict=True):
            if dtype != dtypes[number]:
                raise SaveFailedError(
                    "A rank wrote a tensor with another dtype than was planned; nothing was committed.",
                    tensor=planned.names[number],
                    rank=report.rank,
                    written=dtype,
                    planned=dtypes[number],
                )
            if encodings[number] != encoding:
                if encodings[number] is not None:
                    raise SaveFailedError(
                        "Ranks stored a tensor with different encodings; nothing was committed.",
                        tensor=planned.names[number],
                        rank=report.rank,
                        encodings=f"{encodings[number]}, {encoding}",
                    )
                encodings[number] = encoding
    # A tensor without elements is not written, so that no rank reports its encoding.
    return [RAW if encoding is None else encoding for encoding in encodings]


def _locate(planned: Planned, reports: Sequence[RankReport], reported: Sequence[Sequence[int]]) -> I64:
    """Return, for each planned chunk, the index of the reported chunk that holds it; -1 if no rank wrote it.

    A reported chunk has a hint: its planned position among the chunks of its tensor. The hint is checked; only where
    it is missing or wrong (a user's own planner), the chunk is looked up by its offsets.
    """
    dimensions, chunks, offsets = planned.dimensions, planned.chunks, planned.chunk_offsets
    chunk_first = group_offsets(chunks)
    box_first = group_offsets(np.repeat(dimensions, chunks))
    located = np.full(int(chunk_first[-1]), -1, dtype=np.int64)
    base = 0
    by_offsets: dict[int, dict[tuple[int, ...], int]] = {}
    for report, numbers in zip(reports, reported, strict=True):
        tensor = np.array(numbers, dtype=np.int64)[report.chunk_name]
        hinted = (report.chunk_hint >= 0) & (report.chunk_hint < chunks[tensor])
        hinted &= report.chunk_dimensions == dimensions[tensor]
        candidate = np.where(hinted, chunk_first[tensor] + report.chunk_hint, 0)
        first = group_offsets(report.chunk_dimensions)
        expected = offsets[concat_ranges(box_first[candidate], np.where(hinted, report.chunk_dimensions, 0))]
        given = report.chunk_offsets[concat_ranges(first[:-1], np.where(hinted, report.chunk_dimensions, 0))]
        owner = np.repeat(np.arange(len(tensor)), np.where(hinted, report.chunk_dimensions, 0))
        hinted[owner[expected != given]] = False
        for chunk in np.flatnonzero(~hinted).tolist():
            number = int(tensor[chunk])
            known = by_offsets.setdefault(number, {})
            if not known:
                span = range(int(chunk_first[number]), int(chunk_first[number + 1]))
                known.update({tuple(offsets[box_first[c] : box_first[c + 1]].tolist()): c for c in reversed(span)})
            position = known.get(tuple(report.chunk_offsets[first[chunk] : first[chunk + 1]].tolist()))
            if position is None:
                raise SaveFailedError(
                    "A rank wrote a chunk that nobody planned; nothing was committed.",
                    tensor=planned.names[number],
                    rank=report.rank,
                )
            candidate[chunk] = position
        # If a rank reports a chunk twice, its first report counts: assigned in reverse, the first comes last.
        fresh = located[candidate] < 0
        located[candidate[fresh][::-1]] = (base + np.flatnonzero(fresh))[::-1]
        base += len(tensor)
    return located


def _objects(
    names: Sequence[str], reports: Sequence[RankReport], piece_first: I64, *, first: int
) -> tuple[dict[str, bytes], tuple[StoredObject, ...], I64]:
    """Return inline objects, stored objects, and the indices of the latter's pieces among those of all reports.

    Args:
        names: Names of all objects, as planned.
        reports: Reports of all ranks.
        piece_first: Index of the first piece of each report.
        first: Index that the first piece of the stored objects gets in the manifest.
    """
    inline_by_name = {name: text for report in reversed(reports) for name, text in report.inline.items()}
    stored_by_name = {
        item.name: (item, base)
        for report, base in zip(reversed(reports), reversed(piece_first[:-1].tolist()), strict=True)
        for item in report.stored
    }
    inline: dict[str, bytes] = {}
    stored: list[StoredObject] = []
    pieces: list[I64] = [np.zeros(0, dtype=np.int64)]
    for name in names:
        if name in inline_by_name:
            inline[name] = inline_by_name[name]
        elif name in stored_by_name:
            item, base = stored_by_name[name]
            stored.append(StoredObject(name, item.encoding, first, item.pieces))
            pieces.append(base + item.piece_first + np.arange(item.pieces, dtype=np.int64))
            first += item.pieces
        else:
            raise SaveFailedError("No rank wrote an object; nothing was committed.", object=name, ranks=len(reports))
    return inline, tuple(stored), np.concatenate(pieces)


def _pieces(reports: Sequence[RankReport], shard_first: I64, chosen: I64) -> Pieces:
    """Return the chosen ones of the pieces of all reports, in the given order."""
    return Pieces.concat(
        [
            replace(report.pieces, shard=report.pieces.shard + first)
            for report, first in zip(reports, shard_first[:-1], strict=True)
        ]
    ).take(chosen)


def _merged_shards(reports: Sequence[RankReport]) -> tuple[Shards, I64]:
    """Return the shards of all reports, and for each the index of the first with the same key.

    Several ranks may reuse pieces of one shard.
    """
    shards = Shards.concat([report.shards for report in reports])
    first: dict[str, int] = {}
    same = np.array([first.setdefault(key, number) for number, key in enumerate(shards.keys)], dtype=np.int64)
    digests = np.frombuffer(shards.table_digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
    differs = (digests != digests[same]).any(axis=1)
    for column in (shards.sizes, shards.data_starts, shards.table_lengths):
        differs |= column != column[same]
    if bool(differs.any()):
        raise SaveFailedError(
            "Ranks describe one shard differently; nothing was committed.",
            shard=shards.keys[int(np.flatnonzero(differs)[0])],
        )
    return shards, same


def find_orphaned_shards(manifest: Manifest, reports: Sequence[RankReport]) -> frozenset[str]:
    """Return the keys of reported shards that the manifest does not name, because another rank wrote the same chunks.

    Once the manifest is committed, these shards are orphans: the coordinator tells each rank, which must not reuse
    them.
    """
    return frozenset(key for report in reports for key in report.shards.keys) - frozenset(manifest.shards.keys)


try:
    _WRITER = {"dcp_remote": version("dcp-remote"), "torch": str(torch.__version__)}
except PackageNotFoundError:  # the package was copied, not installed
    _WRITER = {"dcp_remote": "unknown", "torch": str(torch.__version__)}

# A shard is no larger than the memory budget, because it may be copied whole. Below this size, more requests would cost
# more than the saved memory is worth.
_BUDGET_BYTES_MIN = 1 * MiB


def shard_bytes_max(memory_budget_bytes: int, limit: int = SHARD_BYTES_MAX) -> int:
    """Return the largest number of bytes of data in a shard, given a memory budget."""
    return min(limit, max(memory_budget_bytes, _BUDGET_BYTES_MIN))


def require_unicode(plan: SavePlan) -> None:
    """Refuse names that are not Unicode, which JSON cannot hold; called before anything is uploaded.

    Raises:
        InvalidArgumentError: A name has half of a surrogate pair.
    """
    flattened = plan.planner_data if isinstance(plan.planner_data, Mapping) else ()
    for name in chain((item.index.fqn for item in plan.items), flattened):
        if isinstance(name, str) and not name.isascii() and not _is_unicode(name):
            raise InvalidArgumentError(
                "A name in the state dict is not Unicode: it has half of a surrogate pair. Rename it.",
                name=ascii(name)[:200],
            )


def assemble_manifest(
    planned: Planned,
    reports: Sequence[object],
    *,
    url: str,
    save_id: str,
    replaces: tuple[str, ...] = (),
    run: RunInfo | None = None,
    user: Mapping[str, object] | None = None,
) -> tuple[Manifest, bytes]:
    """Return the manifest of a save, and its encoded document; coordinator only.

    Args:
        planned: Contents as planned.
        reports: `RankReport`s of all ranks, in their order.
        url: URL of the checkpoint or run, on the coordinator.
        save_id: ID of this save.
        replaces: IDs of the saves whose manifests this one replaces.
        run: Run and step of the checkpoint; None for a single checkpoint.
        user: Metadata of the user.

    Raises:
        InvalidArgumentError: Ranks wrote to different URLs, or with another writer; or the user's metadata are not
            JSON.
        SaveFailedError: A chunk is missing from the reports, or a dtype is not the planned one.
    """
    known = [report for report in reports if isinstance(report, RankReport)]
    if len(known) != len(reports):
        raise InvalidArgumentError("Some ranks' results are not those of dcp_remote. Use the same writer on all ranks.")
    for report in known:
        if report.url != url:
            raise InvalidArgumentError(
                "Ranks save to different URLs, so that no manifest can name what all of them wrote; nothing was "
                "committed. Create a name from the time or from random numbers on one rank only, and give saves that "
                "overlap a process group each.",
                url=url,
                rank=report.rank,
                url_of_rank=report.url,
            )
    info = SaveInfo(
        save_id=save_id, replaces=replaces, created=datetime.now(UTC).isoformat(timespec="seconds"), writer=_WRITER
    )
    manifest = replace(to_manifest(planned, known, info), run=run, user=dict(user or {}))
    try:
        body = manifest_json.encode(manifest)
        # A manifest that readers would refuse must not be committed.
        manifest_json.decode(body)
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        nested = _nested_names(manifest)
        if nested:
            raise InvalidArgumentError(
                "A rank has a value where another rank has a dict or list of values; nothing was committed. Give the "
                "state the same structure on all ranks, or wrap values that differ in PerRank(...).",
                names=", ".join(f"{name} and {inner}" for name, inner in nested[:5]),
                found=len(nested),
            ) from error
        raise SaveFailedError(
            "The ranks' reports do not make up a valid manifest; nothing was committed.", cause=error
        ) from error
    return manifest, body


def _nested_names(manifest: Manifest) -> list[tuple[str, str]]:
    """Return the names of entries of which the first is at a place above the second."""
    flatten = manifest.flatten or {}
    names = [*manifest.tensors.names, *manifest.inline, *(stored.name for stored in manifest.stored)]
    name_of = {flatten[name]: name for name in names if name in flatten}
    return [
        (name_of[path[:length]], name)
        for path, name in name_of.items()
        for length in range(1, len(path))
        if path[:length] in name_of
    ]


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
