"""Assemble the manifest of a save from the plan and the ranks' reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain
from types import MappingProxyType

import numpy as np
from torch.distributed.checkpoint.planner import SavePlan

from dcp_remote.common.arrays import I64, Buffer, Integers, concat_ranges, group_offsets, shrink_integers
from dcp_remote.common.digests import DIGEST_BYTES
from dcp_remote.common.provenance import describe_software
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, SaveFailedError, UnsupportedFormatError
from dcp_remote.format import manifest_json
from dcp_remote.format.empty_dicts import drop_conflicting
from dcp_remote.format.manifest import RAW, Manifest, Pieces, RunInfo, Shards, StoredObject, TensorKind, Tensors
from dcp_remote.format.segments import split
from dcp_remote.format.shard import ShardNames
from dcp_remote.saving.rank_report import JoinedNumbers, SentReport, join_numbers

# Digests that are copied in a call, which keeps the interpreter from other threads meanwhile.
_TAKEN_AT_ONCE = 2**17


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """All of a manifest that follows from the reports without names of shards, digests and values."""

    layouts: Sequence[object]  # of the reports
    same_shard: I64  # index, for each shard of all reports, of the first with the same key
    reported: Shards  # shards of all reports, without keys and digests
    named: I64  # indices of the shards that the manifest names
    tensors: Tensors
    pieces: Pieces  # without digests
    taken: Integers  # index of each piece of the manifest among the pieces of all reports
    stored: tuple[StoredObject, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """Contents of a checkpoint as planned; as torch's `Metadata`, they would take ten times the memory."""

    # Columns without pieces, those of chunks perhaps in narrow types; kinds without encodings, which only the ranks
    # that write them know.
    tensors: Tensors
    positions: Mapping[str, int]  # position of each object among all entries of the state dict, by name
    flatten: Mapping[str, tuple[str | int, ...]] | None  # path of each flattened name; None if nothing was flattened
    # Structure of the last manifest of these contents, which was checked; at most one. Later saves differ in few ranks'
    # layouts or none, and then cost the coordinator a tenth.
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
    parts = np.array_split(structure.taken, len(structure.taken) // _TAKEN_AT_ONCE + 1)
    digests = np.frombuffer(b"".join([report.digests for report in reports]), dtype=f"V{DIGEST_BYTES}")
    return Manifest(
        save_id=save_id,
        replaces=replaces,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        writer=describe_software(meshes=[mesh for report in reports for mesh in report.meshes]),
        world_size=len(reports),
        shards=shards.take(structure.named),
        tensors=structure.tensors,
        pieces=replace(structure.pieces, digests=b"".join([digests[some].tobytes() for some in parts])),
        inline=inline,
        stored=structure.stored,
        positions=tuple(planned.positions[name] for name in (*inline, *(item.name for item in structure.stored))),
        flatten=drop_conflicting(planned.flatten, planned.names),
        user=dict(user or {}),
        run=run,
    )


def _find_structure(planned: Planned, reports: Sequence[SentReport]) -> Structure:
    """Return the structure of the manifest: that of the last save, unless it differs.

    Every chunk of every tensor, and every object, must have been written by a rank with the planned dtype, which torch
    itself does not check. If several ranks wrote a chunk, the first one counts. Shards without a piece that counts are
    left out, and are orphans. Several ranks may reuse pieces of one shard.
    """
    layouts = [report.layout for report in reports]
    first: dict[str, int] = {}
    keys = chain.from_iterable(report.keys for report in reports)
    same_shard = np.array([first.setdefault(key, number) for number, key in enumerate(keys)], dtype=np.int64)
    for known in planned.checked:
        if known.layouts == layouts and np.array_equal(known.same_shard, same_shard):
            return known
    numbers = join_numbers(reports)
    # A copy, whose offsets can be added to, and whose cached properties are not kept.
    contents = replace(
        planned.tensors,
        chunk_offsets=planned.tensors.chunk_offsets.astype(np.int64),
        chunk_sizes=planned.tensors.chunk_sizes.astype(np.int64),
    )
    tensors, written = _tensors(contents, reports, numbers)
    stored, object_pieces = _stored_objects(planned.positions, reports, numbers.piece_first, first=len(written))
    taken = np.concatenate([written, object_pieces])
    sizes, data_starts, table_lengths = numbers.shards
    shard, start, length, table = numbers.pieces
    shard = same_shard[(shard + np.repeat(numbers.shard_first[:-1], np.diff(numbers.piece_first)))[taken]]
    is_named = np.zeros(len(same_shard), dtype=bool)
    is_named[shard] = True
    return Structure(
        layouts=layouts,
        same_shard=same_shard,
        reported=Shards((), sizes, data_starts, table_lengths, table_digests=b""),
        named=np.flatnonzero(is_named),
        tensors=tensors,
        pieces=Pieces((np.cumsum(is_named) - 1)[shard], start[taken], length[taken], table[taken], digests=b""),
        taken=taken,
        stored=stored,
    )


def _shrink(structure: Structure, planned: Tensors) -> Structure:
    """Return a structure, which was checked, in less memory; arithmetic on its columns could overflow."""
    pieces, tensors = structure.pieces, structure.tensors
    return replace(
        structure,
        tensors=replace(
            tensors,
            chunk_offsets=planned.chunk_offsets,
            chunk_sizes=planned.chunk_sizes,
            chunk_pieces=shrink_integers(tensors.chunk_pieces),
        ),
        pieces=Pieces(
            shrink_integers(pieces.shard),
            shrink_integers(pieces.start),
            shrink_integers(pieces.length),
            shrink_integers(pieces.table),
            digests=b"",
        ),
        taken=shrink_integers(structure.taken),
    )


def _tensors(planned: Tensors, reports: Sequence[SentReport], numbers: JoinedNumbers) -> tuple[Tensors, I64]:
    """Return the planned tensors, and the index of each of their pieces among the pieces of all reports."""
    # Where the tensors of each rank begin among those of all different lists of tensors: most ranks have equal ones.
    begins: dict[bytes, int] = {}
    own_tensors: list[int] = []
    encodings: dict[int, str] = {}
    for report in reports:
        if report.tensors not in begins:
            begins[report.tensors] = len(own_tensors)
            own_tensors += _check_tensors(planned, report, encodings)
    first = np.array([begins[report.tensors] for report in reports], dtype=np.int64)
    # A tensor without elements is not written, so that no rank reports its encoding.
    pairs = [(kind, encodings.get(number, RAW)) for number, kind in enumerate(planned.kind.tolist())]
    kinds: dict[TensorKind, int] = {}
    number_of = {
        (kind, encoding): kinds.setdefault(replace(planned.kinds[kind], encoding=encoding), len(kinds))
        for kind, encoding in dict.fromkeys(pairs)
    }
    name, _, _, piece_first, pieces = numbers.chunks
    ranks = np.diff(numbers.chunk_first)
    tensor = np.array(own_tensors, dtype=np.int64)[name + np.repeat(first, ranks)]
    located = _locate(planned, tensor, reports, numbers)
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
    counts = np.append(pieces, 0)[located]
    begin = np.append(piece_first + np.repeat(numbers.piece_first[:-1], ranks), 0)[located]
    kind = np.array([number_of[pair] for pair in pairs], dtype=np.int64)
    return replace(planned, kinds=tuple(kinds), kind=kind, chunk_pieces=counts), concat_ranges(begin, counts)


def _check_tensors(planned: Tensors, report: SentReport, encodings: dict[int, str]) -> list[int]:
    """Return the index, in the plan, of each tensor of which a rank wrote chunks; add its encoding to those known.

    Refuses tensors and dtypes that were not planned, and ranks that disagree about an encoding.
    """
    written = report.unpack_tensors()
    numbers: list[int] = []
    for name, dtype, encoding in zip(*written, strict=True):
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
    """Return, for each planned chunk, the index of the reported chunk that holds it; -1 if no rank wrote it.

    `tensor` is the index, in the plan, of the tensor of each reported chunk. A reported chunk has a hint: its planned
    position among the chunks of its tensor. The hint is checked; only where it is missing or wrong (a user's own
    planner), the chunk is looked up by its offsets.
    """
    box_first, chunk_first = planned.box_first, planned.chunk_first
    _, hint, dimensions, _, _ = numbers.chunks
    [offsets] = numbers.offsets
    is_hinted = (hint >= 0) & (hint < planned.chunks[tensor]) & (dimensions == planned.dimensions[tensor])
    candidate = np.where(is_hinted, chunk_first[tensor] + hint, 0)
    first = group_offsets(dimensions)
    hinted_dimensions = np.where(is_hinted, dimensions, 0)
    expected = planned.chunk_offsets[concat_ranges(box_first[candidate], hinted_dimensions)]
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
        candidate[chunk] = position
    # The first report of a chunk counts: assigned in reverse, it comes last.
    located = np.full(int(chunk_first[-1]), -1, dtype=np.int64)
    located[candidate[::-1]] = np.arange(len(tensor))[::-1]
    return located


def _stored_objects(
    names: Iterable[str], reports: Sequence[SentReport], piece_first: I64, *, first: int
) -> tuple[tuple[StoredObject, ...], I64]:
    """Return the stored objects, and the indices of their pieces among those of all reports.

    `piece_first` is the index of the first piece of each report; `first`, the index that the first piece of the stored
    objects gets in the manifest. An object that a rank reports inline is not stored.
    """
    inline = {name for report in reports for name in report.inline}
    stored_by_name = {
        item.name: (item, base)
        for report, base in zip(reversed(reports), reversed(piece_first[:-1].tolist()), strict=True)
        for item in report.stored
    }
    stored: list[StoredObject] = []
    pieces: list[I64] = [np.zeros(0, dtype=np.int64)]
    for name in names:
        if name in inline:
            continue
        if name not in stored_by_name:
            raise SaveFailedError("No rank wrote an object; nothing was committed.", object=name, ranks=len(reports))
        item, base = stored_by_name[name]
        stored.append(StoredObject(name, item.encoding, first, item.pieces))
        pieces.append(base + item.piece_first + np.arange(item.pieces, dtype=np.int64))
        first += item.pieces
    return tuple(stored), np.concatenate(pieces)


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

    `reports` are those of all ranks, in their order, as `to_sent`; `url` is that of the checkpoint or run, on the
    coordinator. `segment_names` and `segments_known` are of `segments.split`.
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
    structure = _find_structure(planned, sent)
    manifest = _to_manifest(planned, sent, structure, save_id=save_id, replaces=replaces, run=run, user=user)
    manifest, segments = split(manifest, segment_names.key, segments_known)
    try:
        body = manifest_json.encode(manifest, is_known=structure in planned.checked)
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
    if structure not in planned.checked:
        planned.checked[:] = [_shrink(structure, planned.tensors)]
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
