"""Assemble the manifest of a save from the plan and the ranks' reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from types import MappingProxyType

import numpy as np
from torch.distributed.checkpoint.planner import SavePlan

from dcp_remote.common.arrays import I64, Buffer, concat_ranges, group_offsets
from dcp_remote.common.digests import DIGEST_BYTES
from dcp_remote.common.provenance import describe_software
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, SaveFailedError, UnsupportedFormatError
from dcp_remote.format import manifest_json
from dcp_remote.format.empty_dicts import drop_conflicting
from dcp_remote.format.manifest import RAW, Manifest, Pieces, RunInfo, Shards, StoredObject, TensorKind, Tensors
from dcp_remote.format.segments import split
from dcp_remote.format.shard import ShardNames
from dcp_remote.saving.rank_report import RankReport


@dataclass(frozen=True, slots=True)
class Planned:
    """Contents of a checkpoint as planned; as torch's `Metadata`, they would take ten times the memory."""

    tensors: Tensors  # columns without pieces; kinds without encodings, which only the ranks that write them know
    positions: Mapping[str, int]  # position of each object among all entries of the state dict, by name
    flatten: Mapping[str, tuple[str | int, ...]] | None  # path of each flattened name; None if nothing was flattened

    @property
    def names(self) -> set[str]:
        """Names of all entries."""
        return {*self.tensors.names, *self.positions}


def to_manifest(
    planned: Planned,
    reports: Sequence[RankReport],
    *,
    save_id: str,
    replaces: tuple[str, ...] = (),
    run: RunInfo | None = None,
    user: Mapping[str, object] | None = None,
) -> Manifest:
    """Combine the plan and the reports into a manifest; coordinator only.

    Every chunk of every tensor, and every object, must have been written by a rank with the planned dtype, which torch
    itself does not check. If several ranks wrote a chunk, the first one counts. Shards without a piece that counts are
    left out, and are orphans.
    """
    piece_first = group_offsets(np.array([len(report.pieces.shard) for report in reports], dtype=np.int64))
    tensors, written = _tensors(planned.tensors, reports, piece_first)
    shards, same_shard = _merged_shards(reports)
    inline, stored, object_pieces = _objects(tuple(planned.positions), reports, piece_first, first=len(written))
    shard_first = group_offsets(np.array([len(report.shards.keys) for report in reports], dtype=np.int64))
    reported = [
        replace(report.pieces, shard=report.pieces.shard + first)
        for report, first in zip(reports, shard_first[:-1], strict=True)
    ]
    pieces = Pieces.concat(reported).take(np.concatenate([written, object_pieces]))
    named, shard = np.unique(same_shard[pieces.shard], return_inverse=True)
    return Manifest(
        save_id=save_id,
        replaces=replaces,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        writer=describe_software(meshes=[mesh for report in reports for mesh in report.meshes]),
        world_size=len(reports),
        shards=shards.take(named),
        tensors=tensors,
        pieces=replace(pieces, shard=shard),
        inline=inline,
        stored=stored,
        positions=tuple(planned.positions[name] for name in (*inline, *(item.name for item in stored))),
        flatten=drop_conflicting(planned.flatten, planned.names),
        user=dict(user or {}),
        run=run,
    )


def _tensors(planned: Tensors, reports: Sequence[RankReport], piece_first: I64) -> tuple[Tensors, I64]:
    """Return the planned tensors, and the index of each of their pieces among the pieces of all reports.

    `piece_first` is the index of the first piece of each report.
    """
    reported = [_tensor_numbers(planned.index, report) for report in reports]
    encodings = _check_encodings(planned, reports, reported)
    pairs = list(zip(planned.kind.tolist(), encodings, strict=True))
    kinds: dict[TensorKind, int] = {}
    number_of = {
        (kind, encoding): kinds.setdefault(replace(planned.kinds[kind], encoding=encoding), len(kinds))
        for kind, encoding in dict.fromkeys(pairs)
    }
    located = _locate(planned, reports, reported)
    for chunk in np.flatnonzero(located < 0).tolist():
        if all(planned.sizes_of(chunk)):
            number = int(np.searchsorted(planned.chunk_first, chunk, side="right")) - 1
            raise SaveFailedError(
                "No rank wrote a chunk of a tensor; nothing was committed.",
                tensor=planned.names[number],
                offsets=planned.offsets_of(chunk),
                sizes=planned.sizes_of(chunk),
                ranks=len(reports),
            )
    # After the last chunk of all reports, one without pieces: that of the chunks that no rank wrote, -1.
    none = np.zeros(1, dtype=np.int64)
    piece_counts = np.concatenate([*(report.chunk_pieces for report in reports), none])
    chunk_piece_first = np.concatenate(
        [*(report.chunk_piece_first + first for report, first in zip(reports, piece_first[:-1], strict=True)), none]
    )
    counts = piece_counts[located]
    kind = np.array([number_of[pair] for pair in pairs], dtype=np.int64)
    tensors = replace(planned, kinds=tuple(kinds), kind=kind, chunk_pieces=counts)
    return tensors, concat_ranges(chunk_piece_first[located], counts)


def _tensor_numbers(index: Mapping[str, int], report: RankReport) -> list[int]:
    """Return the index, in the plan, of each tensor of which a rank wrote chunks."""
    unplanned = next((name for name in report.names if name not in index), None)
    if unplanned is not None:
        raise SaveFailedError(
            "A rank wrote a tensor that is in no plan; nothing was committed.", tensor=unplanned, rank=report.rank
        )
    return [index[name] for name in report.names]


def _check_encodings(planned: Tensors, reports: Sequence[RankReport], reported: Sequence[Sequence[int]]) -> list[str]:
    """Return the encoding of each tensor; refuse ranks that disagree about it, and dtypes that were not planned."""
    dtypes = [planned.kinds[kind].dtype for kind in planned.kind.tolist()]
    encodings: dict[int, str] = {}
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
            known = encodings.setdefault(number, encoding)
            if known != encoding:
                raise SaveFailedError(
                    "Ranks stored a tensor with different encodings; nothing was committed.",
                    tensor=planned.names[number],
                    rank=report.rank,
                    encodings=f"{known}, {encoding}",
                )
    # A tensor without elements is not written, so that no rank reports its encoding.
    return [encodings.get(number, RAW) for number in range(len(planned.names))]


def _locate(planned: Tensors, reports: Sequence[RankReport], reported: Sequence[Sequence[int]]) -> I64:
    """Return, for each planned chunk, the index of the reported chunk that holds it; -1 if no rank wrote it.

    A reported chunk has a hint: its planned position among the chunks of its tensor. The hint is checked; only where
    it is missing or wrong (a user's own planner), the chunk is looked up by its offsets.
    """
    offsets, box_first, chunk_first = planned.chunk_offsets, planned.box_first, planned.chunk_first
    located = np.full(int(chunk_first[-1]), -1, dtype=np.int64)
    base = 0
    by_offsets: dict[int, dict[tuple[int, ...], int]] = {}
    for report, numbers in zip(reports, reported, strict=True):
        tensor = np.array(numbers, dtype=np.int64)[report.chunk_name]
        hinted = (report.chunk_hint >= 0) & (report.chunk_hint < planned.chunks[tensor])
        hinted &= report.chunk_dimensions == planned.dimensions[tensor]
        candidate = np.where(hinted, chunk_first[tensor] + report.chunk_hint, 0)
        first = group_offsets(report.chunk_dimensions)
        hinted_dimensions = np.where(hinted, report.chunk_dimensions, 0)
        expected = offsets[concat_ranges(box_first[candidate], hinted_dimensions)]
        given = report.chunk_offsets[concat_ranges(first[:-1], hinted_dimensions)]
        owner = np.repeat(np.arange(len(tensor)), hinted_dimensions)
        hinted[owner[expected != given]] = False
        for chunk in np.flatnonzero(~hinted).tolist():
            number = int(tensor[chunk])
            if number not in by_offsets:
                span = range(int(chunk_first[number]), int(chunk_first[number + 1]))
                by_offsets[number] = {planned.offsets_of(known): known for known in reversed(span)}
            position = by_offsets[number].get(tuple(report.chunk_offsets[first[chunk] : first[chunk + 1]].tolist()))
            if position is None:
                raise SaveFailedError(
                    "A rank wrote a chunk that is in no plan; nothing was committed.",
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

    `piece_first` is the index of the first piece of each report; `first`, the index that the first piece of the stored
    objects gets in the manifest.
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


def require_unicode(plan: SavePlan) -> None:
    """Refuse names that are not Unicode, which JSON cannot hold; called before anything is uploaded."""
    flattened = plan.planner_data if isinstance(plan.planner_data, Mapping) else ()
    for name in chain((item.index.fqn for item in plan.items), flattened):
        if isinstance(name, str) and not name.isascii() and name.encode(errors="replace").decode() != name:
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
    segment_names: ShardNames,
    segments_known: Mapping[bytes, str] = MappingProxyType({}),
) -> tuple[Manifest, bytes, dict[str, list[Buffer]]]:
    """Return the manifest of a save, its encoded document, and segments to put before, by key; coordinator only.

    `reports` are those of all ranks, in their order; `url` is that of the checkpoint or run, on the coordinator.
    `segment_names` and `segments_known` are of `segments.split`.
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
    manifest = to_manifest(planned, known, save_id=save_id, replaces=replaces, run=run, user=user)
    manifest, segments = split(manifest, segment_names.key, segments_known)
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
    return manifest, body, segments


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
