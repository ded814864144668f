"""Write one rank's shards: from torch's plan to shards in the store, and a report of them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeGuard

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from dcp_remote.common.overrides import inherits_methods
from dcp_remote.common.units import KiB, MiB
from dcp_remote.errors import InvalidArgumentError, UnsafeObjectError
from dcp_remote.format.manifest import JSON
from dcp_remote.format.shard import SHARD_BYTES_MAX, ShardNames
from dcp_remote.saving.dedup import Baseline, Reuse, lay_out_pieces
from dcp_remote.saving.packing import pack
from dcp_remote.saving.plan_cache import SharedPart
from dcp_remote.saving.rank_report import Notes, RankReport, ReportedObject, UploadStats, WrittenShard
from dcp_remote.saving.shard_content import count_copied_bytes, prepare_shard
from dcp_remote.saving.uploads import Uploads
from dcp_remote.saving.write_items import Comparison, DrawnEntries, WriteItems, wait_for_sources
from dcp_remote.serialization.files import holds_imitation
from dcp_remote.serialization.objects import EncodedObject, encode_object, encode_stream
from dcp_remote.serialization.opaque import imitation_error
from dcp_remote.serialization.refused_values import name_all_refused
from dcp_remote.serialization.tensors import dtype_name

# Objects up to this size are stored in the manifest, where they cost no request and a person can read them. Their total
# is bounded, because every rank reads the manifest.
INLINE_BYTES_MAX = 16 * KiB
INLINE_TOTAL_BYTES_MAX = 8 * MiB


def write_shards(
    plan: SavePlan,
    planner: SavePlanner,
    uploads: Uploads[WrittenShard],
    names: ShardNames,
    *,
    rank: int,
    url: str,
    allow_pickle: bool,
    shard_bytes_max: int = SHARD_BYTES_MAX,
    shared: Mapping[MetadataIndex, SharedPart] = MappingProxyType({}),
    base: Baseline | None = None,
) -> RankReport:
    """Upload everything in a rank's plan that the baseline does not have; one PUT per shard.

    Objects are encoded first: an object that cannot be loaded safely is refused before a byte is uploaded.

    All entries are compared with the baseline piece by piece before anything is sent, so that of a large tensor only
    the changed pieces are sent. A tensor of which nothing is reused is cut anew; in other tensors the changed pieces
    keep their bounds, if they fit into a shard. A reused piece is read once, for the comparison.

    Args:
        plan: Final plan of this rank.
        planner: Planner that resolves its items.
        uploads: Uploads of this save; all shards are stored when this returns.
        names: Names of the shards, which no other writer uses.
        rank: Rank, for the report.
        url: URL of the checkpoint or run, for the report.
        allow_pickle: Store objects that need code to load.
        shard_bytes_max: Bytes of data in a shard.
        shared: Items of the plan that are parts of a replica which several ranks write.
        base: Baseline whose pieces may be reused, of the run at `url`; None to send everything. The commit must
            require that a live checkpoint still names every shard of `RankReport.reused_keys`.

    Raises:
        InvalidArgumentError: The baseline is of another run, so its shards are not at `url`.
        SaveFailedError: An upload failed, or the state is not what was planned.
        SaveTimeoutError: The deadline passed.
        UnsafeObjectError: An object needs code to load.
    """
    if base is not None and base.url != url:
        raise InvalidArgumentError("Shards of another run cannot be reused.", url=url, base_url=base.url)
    inline, stored = _encode_objects(plan, planner, allow_pickle=allow_pickle)
    items = WriteItems(plan, planner, allow_pickle, stored, shared)
    comparison = items.compare(base, partial(uploads.claim, 0)) if base is not None else Comparison()
    is_state = _resolves_to_state(planner)
    other_names = names.renew()
    drawn = DrawnEntries()
    for number, pieces in enumerate(pack(items.iterate_items(comparison, drawn), shard_bytes_max=shard_bytes_max)):
        claimed_bytes = count_copied_bytes(pieces, is_state=is_state)
        uploads.claim(claimed_bytes)
        wait_for_sources([piece.item.source for piece in pieces])
        uploads.submit(
            names.key(number),
            partial(prepare_shard, pieces),
            claimed_bytes=claimed_bytes,
            second_key=other_names.key(number),
        )
    report = _make_report(drawn, comparison.reuse, uploads.finish(), inline, rank=rank, url=url)
    slowest = max(uploads.seconds, key=lambda key: uploads.seconds[key], default="")
    figures = UploadStats(
        put_bytes=int(report.shards.sizes[: report.put].sum()),
        reused_bytes=int(report.pieces.length[report.pieces.shard >= report.put].sum()),
        retries=uploads.retries,
        slowest_shard=slowest,
        slowest_seconds=uploads.seconds.get(slowest, 0.0),
    )
    return replace(report, figures=figures)


def _encode_objects(
    plan: SavePlan, planner: SavePlanner, *, allow_pickle: bool
) -> tuple[dict[str, bytes], dict[str, EncodedObject]]:
    """Return the JSON of objects for the manifest, and the objects that are stored in shards; both by name."""
    inline: dict[str, bytes] = {}
    stored: dict[str, EncodedObject] = {}
    total_bytes = 0
    for write_item in plan.items:
        if write_item.type != WriteItemType.BYTE_IO:
            continue
        name = write_item.index.fqn
        try:
            encoded = _encode_object(write_item, planner, allow_pickle=allow_pickle)
        except UnsafeObjectError as error:
            values = planner.state_dict if _resolves_to_state(planner) and not allow_pickle else {}
            raise name_all_refused(error, values) from error.__cause__
        small = len(encoded.data) <= INLINE_BYTES_MAX and total_bytes + len(encoded.data) <= INLINE_TOTAL_BYTES_MAX
        if encoded.encoding == JSON and small:
            inline[name] = encoded.data
            total_bytes += len(encoded.data)
        else:
            stored[name] = encoded
    return inline, stored


def require_no_imitations(plan: SavePlan, planner: SavePlanner) -> None:
    """Refuse objects that a load would take for entries of `Opaque` or `Files`; for states of `dcp.save`.

    Checks what this rank writes, and nothing of planners that do not resolve items to the state's own values.

    Raises:
        InvalidArgumentError: Names all such objects.
    """
    if not _resolves_to_state(planner):
        return
    objects = [item.index for item in plan.items if item.type == WriteItemType.BYTE_IO]
    found = [index.fqn for index in objects if holds_imitation(planner.lookup_object(index))]
    if found:
        raise imitation_error(found)


def _encode_object(write_item: WriteItem, planner: SavePlanner, *, allow_pickle: bool) -> EncodedObject:
    name = write_item.index.fqn
    if _resolves_to_state(planner):
        # torch's resolve_data would `torch.save` the object into a stream of over a kilobyte, to be read back here.
        return encode_object(name, planner.lookup_object(write_item.index), allow_pickle=allow_pickle)
    try:
        stream = planner.resolve_data(write_item)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        # A pickler's error names a type, but not the key.
        raise UnsafeObjectError(
            "The planner failed to turn an object into a stream. If the object cannot be pickled, not even "
            "allow_pickle=True stores it: keep it out of the state.",
            key=name,
            cause=error,
        ) from error
    if isinstance(stream, torch.Tensor):
        raise InvalidArgumentError(
            "The planner returned a tensor for the item of an object. Correct its resolve_data.", object=name
        )
    return encode_stream(name, stream.getvalue(), allow_pickle=allow_pickle)


def _resolves_to_state(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Return whether a planner resolves items to the state's own values; others may copy (to bfloat16, say)."""
    return inherits_methods(planner, DefaultSavePlanner, ("resolve_data", "lookup_object", "transform_object"))


def _make_report(
    drawn: DrawnEntries,
    reuse: Reuse,
    written: Sequence[WrittenShard],
    inline: dict[str, bytes],
    *,
    rank: int,
    url: str,
) -> RankReport:
    entries = drawn.entries
    layout = lay_out_pieces(drawn.sources, written, reuse, entries=len(entries))
    tensors = [n for n, (write_item, _) in enumerate(entries) if write_item.type != WriteItemType.BYTE_IO]
    objects = [n for n, (write_item, _) in enumerate(entries) if write_item.type == WriteItemType.BYTE_IO]
    names: dict[str, int] = {}
    dtypes: list[str] = []
    encodings: list[str] = []
    for number in tensors:
        write_item, encoding = entries[number]
        assert write_item.tensor_data is not None
        if write_item.index.fqn not in names:
            names[write_item.index.fqn] = len(names)
            dtypes.append(dtype_name(write_item.tensor_data.properties.dtype))
            encodings.append(encoding)
    chunks = [entries[n][0] for n in tensors]
    boxes = [chunk.tensor_data.chunk for chunk in chunks if chunk.tensor_data is not None]
    hints = [chunk.index.index for chunk in chunks]
    return RankReport(
        rank=rank,
        url=url,
        shards=layout.shards,
        put=len(written),
        names=tuple(names),
        dtypes=tuple(dtypes),
        encodings=tuple(encodings),
        chunk_name=np.array([names[chunk.index.fqn] for chunk in chunks], dtype=np.int64),
        chunk_hint=np.array([-1 if hint is None else hint for hint in hints], dtype=np.int64),
        chunk_dimensions=np.array([len(box.offsets) for box in boxes], dtype=np.int64),
        chunk_offsets=np.array([value for box in boxes for value in box.offsets], dtype=np.int64),
        chunk_piece_first=layout.piece_first[tensors],
        chunk_pieces=layout.piece_count[tensors],
        pieces=layout.pieces,
        inline=inline,
        stored=tuple(
            ReportedObject(
                entries[n][0].index.fqn, entries[n][1], int(layout.piece_first[n]), int(layout.piece_count[n])
            )
            for n in objects
        ),
        notes=Notes(
            chunk_sizes=np.array([value for box in boxes for value in box.sizes], dtype=np.int64),
            first_blocks=layout.first_blocks,
            live_bytes=layout.live_bytes,
        ),
    )
