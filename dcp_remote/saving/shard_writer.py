"""Write one rank's shards: from torch's plan to shards in the store, and a report of them."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeGuard

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from dcp_remote.common.arrays import I64, group_offsets
from dcp_remote.common.digests import DIGEST_BYTES
from dcp_remote.common.overrides import inherits_methods
from dcp_remote.common.units import KiB, MiB
from dcp_remote.errors import InvalidArgumentError, UnsafeObjectError
from dcp_remote.format.manifest import JSON, Pieces, Shards, StoredObject, TensorKind, Tensors
from dcp_remote.format.shard import ShardNames
from dcp_remote.saving.dcp_metadata import concat_integers
from dcp_remote.saving.dedup import Baseline, Reuse, group_sums
from dcp_remote.saving.device_copy import uses_pinned_memory
from dcp_remote.saving.packing import choose_shard_bytes, limit_pinned, pack, spread
from dcp_remote.saving.plan_cache import chunk_bytes
from dcp_remote.saving.rank_report import RankReport, UploadStats, WrittenShard
from dcp_remote.saving.shard_content import count_copied_bytes, prepare_shard
from dcp_remote.saving.uploads import Uploads
from dcp_remote.saving.write_items import DrawnEntry, WriteItems, wait_for_sources
from dcp_remote.serialization.files import holds_imitation
from dcp_remote.serialization.objects import EncodedObject, encode_object, encode_stream
from dcp_remote.serialization.opaque import imitation_error
from dcp_remote.serialization.refused_values import name_all_refused
from dcp_remote.serialization.tensors import dtype_name
from dcp_remote.storage.limits import count_processes

# Objects up to this size are stored in the manifest, where they cost no request and a person can read them. The total
# of rank 0, and that of all other ranks together, is bounded, because every rank reads the manifest.
INLINE_BYTES_MAX = 16 * KiB
INLINE_TOTAL_BYTES_MAX = 8 * MiB


def write_shards(
    plan: SavePlan,
    planner: SavePlanner,
    uploads: Uploads[WrittenShard],
    *,
    allow_pickle: bool,
    origin: str = "",
    shard_bytes: int | None = None,
    base: Baseline | None = None,
) -> RankReport:
    """Upload everything in a rank's plan that the baseline does not have; one PUT per shard.

    Objects are encoded first: an object that cannot be loaded safely is refused before a byte is uploaded.

    All entries are compared with the baseline piece by piece before anything is sent, so that of a large tensor only
    the changed pieces are sent. A tensor of which nothing is reused is cut anew; in other tensors the changed pieces
    keep their bounds, if they fit into a shard. A reused piece is read once, for the comparison.

    `shard_bytes` is the size of the shards; None to choose it by the bytes of the plan and the memory budget.
    `origin` is the prefix of the shards' names. `base` must be of the run that is saved into, and the commit must
    require that a live checkpoint still names every shard of the report that was not put.
    """
    inline_max = INLINE_TOTAL_BYTES_MAX // (count_processes() if uploads.rank else 1)
    inline, stored = _encode_objects(plan, planner, allow_pickle=allow_pickle, total_bytes_max=inline_max)
    items = WriteItems(plan, planner, allow_pickle, stored)
    reuse = items.compare(base, partial(uploads.claim, 0)) if base is not None else Reuse()
    is_state = _resolves_to_state(planner)
    names = ShardNames(uploads.rank, origin)
    other_names = names.renew()
    drawn: list[DrawnEntry] = []
    state = getattr(planner, "state_dict", None)  # of a user's planner, perhaps anything
    values = state.values() if isinstance(state, Mapping) else ()
    if shard_bytes is None:
        # Of all bytes in the plan, not those that changed: pieces keep their bounds from save to save.
        tensor_bytes = sum(map(chunk_bytes, plan.items))
        object_bytes = sum(encoded.length_bytes for encoded in stored.values())
        shard_bytes_max = choose_shard_bytes(uploads.budget_bytes)
        if _device_bytes(values) > uploads.budget_bytes:
            shard_bytes_max = min(shard_bytes_max, limit_pinned(uploads.budget_bytes, uploads.in_flight))
        shard_bytes = spread(tensor_bytes + object_bytes, uploads.in_flight, shard_bytes_max)
    for number, pieces in enumerate(pack(items.iterate_items(reuse, drawn), shard_bytes_max=shard_bytes)):
        claimed_bytes = count_copied_bytes(pieces, is_state=is_state)
        uploads.claim(claimed_bytes)
        wait_for_sources([piece.item.source for piece in pieces])
        uploads.submit(
            names.key(number),
            partial(prepare_shard, pieces),
            claimed_bytes=claimed_bytes,
            second_key=other_names.key(number),
        )
    return _make_report(drawn, reuse, uploads, inline, _describe_meshes(values) if uploads.rank == 0 else ())


def _device_bytes(values: Iterable[object]) -> int:
    """Return the bytes of the tensors of a state that are copied into pinned memory before they are sent, at most."""
    tensors = (value for value in values if isinstance(value, torch.Tensor) and uses_pinned_memory(value))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)  # of all ranks' shards of a DTensor


def _describe_meshes(values: Iterable[object]) -> tuple[str, ...]:
    """Return the device meshes of a state's DTensors as text, each once: names and sizes of the dimensions."""
    meshes = dict.fromkeys(value.device_mesh for value in values if isinstance(value, DTensor))
    described = (
        zip(mesh.mesh_dim_names or [f"dimension {number}:" for number in range(mesh.ndim)], mesh.shape, strict=True)
        for mesh in meshes
    )
    return tuple(dict.fromkeys(" × ".join(f"{name} {size}" for name, size in mesh) for mesh in described))


def _encode_objects(
    plan: SavePlan, planner: SavePlanner, *, allow_pickle: bool, total_bytes_max: int
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
        small = len(encoded.data) <= INLINE_BYTES_MAX and total_bytes + len(encoded.data) <= total_bytes_max
        if encoded.encoding == JSON and small:
            inline[name] = encoded.data
            total_bytes += len(encoded.data)
        else:
            stored[name] = encoded
    return inline, stored


def require_no_imitations(plan: SavePlan, planner: SavePlanner) -> None:
    """Refuse objects that a load would take for entries of `Opaque` or `Files`; for states of `dcp.save`.

    Checks what this rank writes, and nothing of planners that do not resolve items to the state's own values.
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
    drawn: Sequence[DrawnEntry],
    reuse: Reuse,
    uploads: Uploads[WrittenShard],
    inline: dict[str, bytes],
    meshes: tuple[str, ...],
) -> RankReport:
    """Wait for the uploads, and describe all entries, those that were sent and those that are reused.

    Pieces are in the order of the entries, and shards that were put in the order in which they were packed.
    """
    written = uploads.finish()
    put = len(written)
    sources = [source for entry in drawn for source in entry.sources]
    is_sent = np.array([source is None for source in sources], dtype=bool)
    reused = [source for source in sources if source is not None]
    reused_pieces = reuse.pieces.take(np.array([source.piece for source in reused], dtype=np.int64))
    old_shards, old_shard = np.unique(reused_pieces.shard, return_inverse=True)
    item = np.concatenate([np.zeros(0, dtype=np.int64), *(one.item for one in written)])
    source_pieces = np.ones(len(is_sent), dtype=np.int64)
    source_pieces[is_sent] = np.bincount(item, minlength=np.count_nonzero(is_sent))
    owner = np.repeat(np.arange(len(drawn)), np.array([len(entry.sources) for entry in drawn], dtype=np.int64))
    entry_pieces = group_sums(owner, source_pieces, len(drawn))
    entry_first = group_offsets(entry_pieces)
    # The index of each piece, where all sent pieces come before all reused pieces.
    is_piece_sent = np.repeat(is_sent, source_pieces)
    order = np.empty(len(is_piece_sent), dtype=np.int64)
    order[is_piece_sent], order[~is_piece_sent] = np.arange(len(item)), len(item) + np.arange(len(reused))
    sent_pieces = [replace(one.pieces, shard=one.pieces.shard + number) for number, one in enumerate(written)]
    pieces = Pieces.concat([*sent_pieces, replace(reused_pieces, shard=put + old_shard)]).take(order)
    first_blocks = b"".join([*(one.first_blocks for one in written), *(source.first_block or b"" for source in reused)])
    put_shards = Shards.concat([one.shards for one in written])
    tensors, chunks = _describe_chunks(drawn, entry_pieces)
    indices = [drawn[number].write_item.index.index for number in chunks]
    slowest = max(uploads.seconds, key=lambda key: uploads.seconds[key], default="")
    return RankReport(
        rank=uploads.rank,
        url=uploads.url,
        shards=Shards.concat([put_shards, reuse.shards.take(old_shards)]),
        put=put,
        tensors=tensors,
        chunk_hint=np.array([-1 if index is None else index for index in indices], dtype=np.int64),
        chunk_piece_first=entry_first[chunks],
        pieces=pieces,
        inline=inline,
        stored=tuple(
            StoredObject(entry.write_item.index.fqn, entry.encoding, first, count)
            for entry, first, count in zip(drawn, entry_first.tolist(), entry_pieces.tolist(), strict=False)
            if entry.write_item.tensor_data is None
        ),
        first_blocks=np.frombuffer(first_blocks, np.uint8).reshape(-1, DIGEST_BYTES)[order].tobytes(),
        live_bytes=np.concatenate([put_shards.sizes - put_shards.data_starts, reuse.live_bytes[old_shards]]),
        meshes=meshes,
        figures=UploadStats(
            put_bytes=int(put_shards.sizes.sum()),
            reused_bytes=int(reused_pieces.length.sum()),
            retries=uploads.retries,
            slowest_shard=slowest,
            slowest_seconds=uploads.seconds.get(slowest, 0.0),
        ),
    )


def _describe_chunks(drawn: Sequence[DrawnEntry], entry_pieces: I64) -> tuple[Tensors, list[int]]:
    """Return the tensors and chunks among some entries, and the index of the entry of each chunk."""
    kinds: dict[TensorKind, int] = {}
    kind, dimensions = list[int](), list[int]()  # of each tensor
    # Indices of the entries that are chunks, by tensor: a plan may list the chunks of a tensor apart from each other.
    chunks: dict[str, list[int]] = {}
    for number, entry in enumerate(drawn):
        name, data = entry.write_item.index.fqn, entry.write_item.tensor_data
        if data is None:
            continue
        if name not in chunks:
            of_tensor = TensorKind(dtype_name(data.properties.dtype), entry.encoding)
            kind.append(kinds.setdefault(of_tensor, len(kinds)))
            dimensions.append(len(data.chunk.offsets))
        chunks.setdefault(name, []).append(number)
    entries = [*chain.from_iterable(chunks.values())]
    planned = [drawn[number].write_item.tensor_data for number in entries]
    boxes = [data.chunk for data in planned if data is not None]
    tensors = Tensors(
        names=tuple(chunks),
        kinds=tuple(kinds),
        kind=np.array(kind, dtype=np.int64),
        dimensions=np.array(dimensions, dtype=np.int64),
        shape=np.zeros(0, dtype=np.int64),  # not needed
        chunks=np.array([len(own) for own in chunks.values()], dtype=np.int64),
        chunk_offsets=concat_integers(box.offsets for box in boxes),
        chunk_sizes=concat_integers(box.sizes for box in boxes),
        chunk_pieces=entry_pieces[entries],
    )
    return tensors, entries
