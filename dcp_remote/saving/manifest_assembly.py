"""Assemble the manifest of a save from the plan and the ranks' reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import chain
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from torch.distributed.checkpoint.planner import SavePlan

from dcp_remote.common.arrays import I64, Buffer, concat_arrays, concat_ranges, group_offsets, sorted_unique
from dcp_remote.common.digests import DIGEST_BYTES
from dcp_remote.common.provenance import describe_software
from dcp_remote.common.text import is_unicode
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, SaveFailedError, UnsupportedFormatError
from dcp_remote.format import manifest_json, segments
from dcp_remote.format.empty_dicts import drop_conflicting
from dcp_remote.format.manifest import (
    RAW,
    Manifest,
    Pieces,
    RunInfo,
    Shards,
    StoredObject,
    TensorKind,
    Tensors,
    tensor_groups,
)
from dcp_remote.format.manifest_validation import check_pieces, check_tensors
from dcp_remote.format.segments import Draft, Segment, choose_band_pieces, draft_segments, put_segments
from dcp_remote.format.shard import ShardNames
from dcp_remote.saving.rank_report import JoinedNumbers, SentReport, join_numbers

# Segments whose chunks are found and checked at a time, in 100 MB of memory; all of a band, if that has more. Reports
# that name the same shard, and all between them, are one block, however large: after a restore at another world size
# ranks reuse shards of one another.
_BLOCK_SEGMENTS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """All of a manifest that follows from the reports without names of shards, digests and values."""

    layouts: Sequence[bytes]  # of the reports
    same_shard: I64  # index, for each shard of all reports, of the first with the same key
    reported: Shards  # shards of all reports, without keys and digests
    named: I64  # indices of the shards that the manifest names
    tensors: Tensors  # without chunks if these are in segments
    pieces: Pieces  # without digests: of chunks that are in no segment, then of stored objects
    taken: I64  # index of each piece of these chunks among the pieces of all reports
    stored: tuple[StoredObject, ...]
    origins: Sequence[tuple[int, int]]  # report of each stored object, and index of the object's first piece there
    drafts: Sequence[Draft]  # segments; their pieces count the pieces of all reports


@dataclass(frozen=True)
class PlannedTensors(Tensors):
    """Tensors of a plan, of which those that are cut alike share the offsets and sizes of their chunks."""

    layout_first: I64  # index in `chunk_offsets` and `chunk_sizes` of the first value of each tensor

    @cached_property
    def value_first(self) -> I64:
        """Index of the first value of each tensor."""
        return self.layout_first

    def offsets_of(self, chunk: int) -> tuple[int, ...]:
        """Return the offsets of a chunk in its tensor."""
        return tuple(self.chunk_offsets[self._values_of(chunk)].tolist())

    def sizes_of(self, chunk: int) -> tuple[int, ...]:
        """Return the sizes of a chunk."""
        return tuple(self.chunk_sizes[self._values_of(chunk)].tolist())

    def _values_of(self, chunk: int) -> slice:
        tensor = int(self.chunk_first.searchsorted(chunk, side="right")) - 1
        dimensions = int(self.dimensions[tensor])
        first = int(self.layout_first[tensor]) + (chunk - int(self.chunk_first[tensor])) * dimensions
        return slice(first, first + dimensions)


@dataclass(frozen=True, slots=True)
class Planned:
    """Contents of a checkpoint as planned; as torch's `Metadata`, they would take ten times the memory."""

    # Columns without pieces, those of chunks perhaps in narrow types; kinds without encodings, which only the ranks
    # that write them know.
    tensors: Tensors
    positions: Mapping[str, int]  # position of each object among all entries of the state dict, by name
    flatten: Mapping[str, tuple[str | int, ...]] | None  # path of each flattened name; None if nothing was flattened
    # Structure of the last manifest of these contents, which was checked; at most one. A later save with the same
    # structure costs the coordinator a quarter of what it cost.
    checked: list[Structure] = field(default_factory=list, compare=False)

    @property
    def names(self) -> set[str]:
        """Names of all entries."""
        return {*self.tensors.names, *self.positions}


def _to_manifest(
    planned: Planned,
    reports: Sequence[SentReport],
    structure: Structure,
    *,
    save_id: str,
    replaces: tuple[str, ...] = (),
    run: RunInfo | None = None,
    user: Mapping[str, object] | None = None,
) -> Manifest:
    """Combine the plan and the reports, which have this structure, into a manifest; coordinator only."""
    shards = replace(
        structure.reported,
        keys=tuple(chain.from_iterable(report.keys for report in reports)),
        table_digests=b"".join([report.table_digests for report in reports]),
    )
    _require_equal(shards, structure.same_shard)
    inline_by_name = {name: text for report in reversed(reports) for name, text in report.inline.items()}
    inline = {name: inline_by_name[name] for name in planned.positions if name in inline_by_name}
    objects = [
        reports[number].digests[first * DIGEST_BYTES : (first + item.pieces) * DIGEST_BYTES]
        for (number, first), item in zip(structure.origins, structure.stored, strict=True)
    ]
    digests = b"".join([_take_digests(reports, structure.taken), *objects])
    return Manifest(
        save_id=save_id,
        replaces=replaces,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        writer=describe_software(meshes=[mesh for report in reports for mesh in report.meshes]),
        world_size=len(reports),
        shards=shards.take(structure.named),
        tensors=structure.tensors,
        pieces=replace(structure.pieces, digests=digests),
        inline=inline,
        stored=structure.stored,
        positions=tuple(planned.positions[name] for name in (*inline, *(item.name for item in structure.stored))),
        flatten=drop_conflicting(planned.flatten, planned.names),
        user=dict(user or {}),
        run=run,
    )


def _piece_first(reports: Sequence[SentReport]) -> I64:
    """Return the index of the first piece of each report among those of all, then the number of all."""
    return group_offsets(np.array([len(report.digests) // DIGEST_BYTES for report in reports], dtype=np.int64))


def _take_digests(reports: Sequence[SentReport], pieces: I64) -> bytes:
    """Return the digests of pieces, by their indices among those of all reports."""
    piece_first = _piece_first(reports)
    owner = np.searchsorted(piece_first, pieces, side="right") - 1
    own = sorted_unique(owner)
    joined = b"".join([reports[number].digests for number in own.tolist()])
    first = group_offsets(np.diff(piece_first)[own])[np.searchsorted(own, owner)]
    digests: bytes = np.frombuffer(joined, dtype=f"V{DIGEST_BYTES}")[pieces - piece_first[owner] + first].tobytes()
    return digests


def _find_structure(planned: Planned, reports: Sequence[SentReport]) -> Structure:
    """Return the structure of the manifest: that of the last save, unless it differs.

    Every chunk of every tensor, and every object, must have been written by a rank with the planned dtype, which torch
    itself does not check. If several ranks wrote a chunk, the first one counts. Shards without a piece that counts are
    left out, and are orphans. Several ranks may reuse pieces of one shard.

    The chunks of a large checkpoint are found and checked in blocks of reports, and go into segments.
    """
    layouts = [report.layout for report in reports]
    first: dict[str, int] = {}
    keys = chain.from_iterable(report.keys for report in reports)
    same_shard = np.array([first.setdefault(key, number) for number, key in enumerate(keys)], dtype=np.int64)
    for known in planned.checked:
        if known.layouts == layouts and np.array_equal(known.same_shard, same_shard):
            return known
    tensors, own_tensors = _find_tensors(planned.tensors, reports)
    stored, origins = _choose_objects(planned.positions, reports)
    of_all = int(_piece_first(reports)[-1])
    of_chunks = of_all - sum(item.pieces for report in reports for item in report.stored)
    is_large, band_pieces = of_chunks > segments.SEGMENT_PIECES_MAX, choose_band_pieces(of_chunks, tensors)
    size = max(_BLOCK_SEGMENTS * segments.SEGMENT_PIECES, band_pieces) if is_large else of_all + 1
    if is_large:
        check_tensors(tensors, tensors.chunks)
    groups = tensor_groups(tensors.names, drop_conflicting(planned.flatten, planned.names))
    is_written = np.zeros(int(tensors.chunk_first[-1]), dtype=np.bool_)
    shards, parts, drafts = list[Shards](), list[tuple[Segment, I64]](), list[Draft]()
    objects: dict[int, Pieces] = {}
    stream_bytes = 0
    for begin, stop, shard_first, piece_first in _divide(reports, same_shard, size):
        numbers = join_numbers(reports[begin:stop])
        # From here on, the number of a shard is that among the shards of all reports.
        of_rank = np.repeat(numbers.shard_first[:-1], np.diff(numbers.piece_first))
        numbers.pieces[0] = same_shard[numbers.pieces[0] + of_rank + shard_first]
        part, taken = _find_chunks(tensors, own_tensors[begin:stop], reports[begin:stop], numbers, is_written)
        if stop == len(reports):
            part = _add_unwritten(tensors, part, is_written, ranks=stop)
        own = {
            number: numbers.take(numbers.piece_first[rank - begin] + first_piece + np.arange(stored[number].pieces))
            for number, (rank, first_piece) in enumerate(origins)
            if begin <= rank < stop
        }
        objects |= own
        sizes, data_starts, table_lengths = numbers.shards
        shards.append(Shards((), sizes, data_starts, table_lengths, table_digests=b""))
        if not is_large:
            parts.append((part, taken + piece_first))
            continue
        pieces = Pieces.concat([part.pieces, *own.values()])
        stream_bytes = check_pieces(
            shards[-1],
            part.within(tensors),
            replace(pieces, shard=pieces.shard - shard_first),
            others=len(pieces.shard) - len(taken),
            stream_bytes=stream_bytes,
        )
        drafts += draft_segments(part, groups, taken + piece_first, band_pieces=band_pieces)
    pieces = Pieces.concat([*(part.pieces for part, _ in parts), *(objects[number] for number in range(len(stored)))])
    is_named = np.zeros(len(same_shard), dtype=bool)
    is_named[concat_arrays([pieces.shard, *(draft.shards for draft in drafts)])] = True
    position = np.cumsum(is_named) - 1
    before = sum(len(taken) for _, taken in parts)
    return Structure(
        layouts=layouts,
        same_shard=same_shard,
        reported=Shards.concat(shards),
        named=np.flatnonzero(is_named),
        tensors=Segment.concat([part for part, _ in parts]).within(tensors),
        pieces=replace(pieces, shard=position[pieces.shard]),
        taken=concat_arrays([taken for _, taken in parts]),
        stored=tuple(replace(item, piece_first=before + item.piece_first) for item in stored),
        origins=origins,
        drafts=[replace(draft, shards=position[draft.shards]) for draft in drafts],
    )


def _divide(reports: Sequence[SentReport], same_shard: I64, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield blocks of reports: the first and the end, and the indices of the first shard and piece among those of all.

    Shards of a block are in no other. A block has at least `size` pieces, but for the last.
    """
    piece_first = _piece_first(reports)
    shard_first = group_offsets(np.array([len(report.keys) for report in reports], dtype=np.int64))
    # The lowest of the shards of each report and those behind it.
    lowest = np.minimum.accumulate(np.append(same_shard, len(same_shard))[::-1])[::-1][shard_first]
    begin = 0
    for stop in np.flatnonzero(lowest >= shard_first)[1:].tolist():
        if stop == len(reports) or piece_first[stop] - piece_first[begin] >= size:
            yield begin, stop, int(shard_first[begin]), int(piece_first[begin])
            begin = stop


def _find_tensors(planned: Tensors, reports: Sequence[SentReport]) -> tuple[Tensors, Sequence[I64]]:
    """Return the planned tensors with their encodings, and the index, in the plan, of each tensor of each report."""
    known: dict[bytes, I64] = {}  # most ranks have equal lists of tensors
    encodings: dict[int, str] = {}
    for report in reports:
        if report.tensors not in known:
            known[report.tensors] = np.array(_check_tensors(planned, report, encodings), dtype=np.int64)
    # A tensor without elements is not written, so that no rank reports its encoding.
    pairs = [(kind, encodings.get(number, RAW)) for number, kind in enumerate(planned.kind.tolist())]
    kinds: dict[TensorKind, int] = {}
    number_of = {
        (kind, encoding): kinds.setdefault(replace(planned.kinds[kind], encoding=encoding), len(kinds))
        for kind, encoding in dict.fromkeys(pairs)
    }
    kind = np.array([number_of[pair] for pair in pairs], dtype=np.int64)
    # A copy, whose cached properties are not kept.
    return replace(planned, kinds=tuple(kinds), kind=kind), [known[report.tensors] for report in reports]


def _find_chunks(
    planned: Tensors,
    own_tensors: Sequence[I64],
    reports: Sequence[SentReport],
    numbers: JoinedNumbers,
    is_written: NDArray[np.bool_],
) -> tuple[Segment, I64]:
    """Return the chunks that a block of reports is the first to write, and the indices of their pieces in it.

    Chunks are in the order of the plan. `is_written` is noted for each of them.
    """
    name, _, _, piece_first, pieces = numbers.chunks
    counts = np.diff(numbers.chunk_first)
    first = group_offsets(np.array([len(own) for own in own_tensors], dtype=np.int64))
    tensor = np.concatenate(own_tensors)[name + np.repeat(first[:-1], counts)]
    located = _locate(planned, tensor, reports, numbers)
    order = np.argsort(located, kind="stable")
    order = order[(np.diff(located[order], prepend=-1) > 0) & ~is_written[located[order]]]
    is_written[located[order]] = True
    taken = concat_ranges((piece_first + np.repeat(numbers.piece_first[:-1], counts))[order], pieces[order])
    return _describe(planned, tensor[order], located[order], pieces[order], numbers.take(taken)), taken


def _describe(planned: Tensors, tensor: I64, chunks: I64, counts: I64, pieces: Pieces) -> Segment:
    """Return planned chunks, which have so many of these pieces."""
    number, dimensions = chunks - planned.chunk_first[tensor], planned.dimensions[tensor]
    values = concat_ranges(planned.value_first[tensor] + number * dimensions, dimensions)
    offsets, sizes = (column[values].astype(np.int64) for column in (planned.chunk_offsets, planned.chunk_sizes))
    return Segment(tensor, dimensions, number, offsets, sizes, counts, pieces)


def _add_unwritten(planned: Tensors, part: Segment, is_written: NDArray[np.bool_], *, ranks: int) -> Segment:
    """Return the last chunks with those that no rank wrote, which may have no elements."""
    unwritten = np.flatnonzero(~is_written)
    tensor = np.searchsorted(planned.chunk_first, unwritten, side="right") - 1
    for chunk, number in zip(unwritten.tolist(), tensor.tolist(), strict=True):
        if all(planned.sizes_of(chunk)):
            raise SaveFailedError(
                "No rank wrote a chunk of a tensor; nothing was committed.",
                tensor=planned.names[number],
                offsets=planned.offsets_of(chunk),
                sizes=planned.sizes_of(chunk),
                ranks=ranks,
            )
    if not len(unwritten):
        return part
    none = Pieces.concat([])
    joined = Segment.concat([part, _describe(planned, tensor, unwritten, np.zeros_like(unwritten), none)])
    return joined.take(np.lexsort((joined.number, joined.tensor)))


def _check_tensors(planned: Tensors, report: SentReport, encodings: dict[int, str]) -> list[int]:
    """Return the index, in the plan, of each tensor of which a rank wrote chunks; add its encoding to those known.

    Refuses tensors and dtypes that were not planned, and ranks that disagree about an encoding.
    """
    numbers: list[int] = []
    for name, dtype, encoding in report.unpack_tensors():
        number = planned.index.get(name)
        if number is None:
            raise SaveFailedError(
                "A rank wrote a tensor that is in no plan; nothing was committed.", tensor=name, rank=report.rank
            )
        if dtype != planned.kind_of(number).dtype:
            raise SaveFailedError(
                "A rank wrote a tensor with another dtype than was planned; nothing was committed.",
                tensor=name,
                rank=report.rank,
                written=dtype,
                planned=planned.kind_of(number).dtype,
            )
        known = encodings.setdefault(number, encoding)
        if known != encoding:
            raise SaveFailedError(
                "Ranks stored a tensor with different encodings; nothing was committed.",
                tensor=name,
                rank=report.rank,
                encodings=f"{known}, {encoding}",
            )
        numbers.append(number)
    return numbers


def _locate(planned: Tensors, tensor: I64, reports: Sequence[SentReport], numbers: JoinedNumbers) -> I64:
    """Return the index, in the plan, of each reported chunk.

    `tensor` is the index, in the plan, of the tensor of each reported chunk. A reported chunk has a hint: its planned
    position among the chunks of its tensor. The hint is checked; only where it is missing or wrong (a user's own
    planner), the chunk is looked up by its offsets.
    """
    chunk_first = planned.chunk_first
    _, hint, dimensions, _, _ = numbers.chunks
    [offsets] = numbers.offsets
    is_hinted = (hint >= 0) & (hint < planned.chunks[tensor]) & (dimensions == planned.dimensions[tensor])
    located = np.where(is_hinted, chunk_first[tensor] + hint, 0)
    first = group_offsets(dimensions)
    hinted_dimensions = np.where(is_hinted, dimensions, 0)
    expected = planned.chunk_offsets[concat_ranges(planned.value_first[tensor] + hint * dimensions, hinted_dimensions)]
    differing = np.flatnonzero(expected != offsets[concat_ranges(first[:-1], hinted_dimensions)])
    is_hinted[np.searchsorted(np.cumsum(hinted_dimensions), differing, side="right")] = False
    by_offsets: dict[int, dict[tuple[int, ...], int]] = {}
    for chunk in np.flatnonzero(~is_hinted).tolist():
        number = int(tensor[chunk])
        if number not in by_offsets:
            span = range(int(chunk_first[number]), int(chunk_first[number + 1]))
            by_offsets[number] = {planned.offsets_of(known): known for known in reversed(span)}
        position = by_offsets[number].get(tuple(offsets[first[chunk] : first[chunk + 1]].tolist()))
        if position is None:
            raise SaveFailedError(
                "A rank wrote a chunk that is in no plan; nothing was committed.",
                tensor=planned.names[number],
                rank=reports[int(np.searchsorted(numbers.chunk_first, chunk, side="right")) - 1].rank,
            )
        located[chunk] = position
    return located


def _choose_objects(
    names: Iterable[str], reports: Sequence[SentReport]
) -> tuple[tuple[StoredObject, ...], Sequence[tuple[int, int]]]:
    """Return the stored objects, and for each the number of its report and the index of its first piece there.

    Pieces are counted from the first stored object on. An object that a rank reports inline is not stored.
    """
    inline = {name for report in reports for name in report.inline}
    found = {item.name: (rank, item) for rank, report in reversed([*enumerate(reports)]) for item in report.stored}
    stored: list[StoredObject] = []
    origins: list[tuple[int, int]] = []
    first = 0
    for name in names:
        if name in inline:
            continue
        if name not in found:
            raise SaveFailedError("No rank wrote an object; nothing was committed.", object=name, ranks=len(reports))
        rank, item = found[name]
        stored.append(StoredObject(name, item.encoding, first, item.pieces))
        origins.append((rank, item.piece_first))
        first += item.pieces
    return tuple(stored), origins


def _require_equal(shards: Shards, same: I64) -> None:
    """Refuse shards that ranks describe differently; `same` is the index of the first shard with the key of each."""
    digests = np.frombuffer(shards.table_digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
    differs = (digests != digests[same]).any(axis=1)
    for column in (shards.sizes, shards.data_starts, shards.table_lengths):
        differs |= column != column[same]
    if bool(differs.any()):
        raise SaveFailedError(
            "Ranks describe one shard differently; nothing was committed.",
            shard=shards.keys[int(np.flatnonzero(differs)[0])],
        )


def find_orphaned_shards(manifest: Manifest, reports: Iterable[SentReport]) -> frozenset[str]:
    """Return the keys of reported shards that the manifest does not name, because another rank wrote the same chunks.

    Once the manifest is committed, these shards are orphans: the coordinator tells each rank, which must not reuse
    them.
    """
    return frozenset(key for report in reports for key in report.keys) - frozenset(manifest.shards.keys)


def require_unicode(plan: SavePlan) -> None:
    """Refuse names that are not Unicode, which JSON cannot hold; called before anything is uploaded."""
    flattened = plan.planner_data if isinstance(plan.planner_data, Mapping) else ()
    for name in chain((item.index.fqn for item in plan.items), flattened):
        if isinstance(name, str) and not is_unicode(name):
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
    put: Callable[[str, Sequence[Buffer]], object],
) -> tuple[Manifest, bytes]:
    """Return the manifest of a save, and its encoded document; coordinator only. Put the segments of a large one.

    `reports` are those of all ranks, in their order, as `to_sent`; `url` is that of the checkpoint or run, on the
    coordinator. Segments are put by `put` under `segment_names`; those in `segments_known` are named,
    and not put. Until the document is committed they are orphans, as shards are.
    """
    sent = [report for report in reports if isinstance(report, SentReport)]
    if len(sent) != len(reports):
        raise InvalidArgumentError("Some ranks' results are not those of dcp_remote. Use the same writer on all ranks.")
    for report in sent:
        if report.url != url:
            raise InvalidArgumentError(
                "Ranks save to different URLs, so that no manifest can name what all of them wrote; nothing was "
                "committed. Create a name from the time or from random numbers on one rank only, and give saves that "
                "overlap a process group each.",
                url=url,
                rank=report.rank,
                url_of_rank=report.url,
            )
    manifest = None
    try:
        structure = _find_structure(planned, sent)
        manifest = _to_manifest(planned, sent, structure, save_id=save_id, replaces=replaces, run=run, user=user)
        if structure.drafts:
            manifest = put_segments(
                manifest,
                planned.tensors.chunks,
                structure.drafts,
                digests_of=partial(_take_digests, sent),
                make_key=segment_names.key,
                known=segments_known,
                put=put,
            )
        body = manifest_json.encode(manifest, is_known=structure in planned.checked)
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        nested = _nested_names(manifest) if manifest is not None else []
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
    planned.checked[:] = [structure]
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
