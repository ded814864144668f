"""PiecePlanner: torch's planner of a save whose tensors are read in pieces, when they are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_remote.common.digests import digest
from dcp_remote.common.geometry import Box
from dcp_remote.common.units import MiB
from dcp_remote.serialization.tensors import byte_view
from dcp_remote.transfer.checkpoint import SavedCheckpoint
from dcp_remote.transfer.tensor_source import Source

# Parts up to this size are read together with the next ones.
_SMALL_BYTES_MAX = 1 * MiB


class Together:
    """Reads of pieces one at a time, in about a known order, of which small ones are read together with the next.

    `sizes` has the size of each part in bytes, in the order in which they are asked for; parts of at most
    `small_bytes_max` are read together, `bytes_max` at a time.
    """

    def __init__(
        self,
        source: Source | SavedCheckpoint,
        sizes: Mapping[tuple[str, Box], int],
        *,
        bytes_max: int,
        small_bytes_max: int = _SMALL_BYTES_MAX,
    ) -> None:
        """Keep the arguments; nothing is read."""
        self._source, self._sizes, self._bytes_max = source, sizes, bytes_max
        self._small = [key for key, size in sizes.items() if size <= min(small_bytes_max, bytes_max)]
        self._places = {key: number for number, key in enumerate(self._small)}
        self._kept: dict[tuple[str, Box], torch.Tensor] = {}

    def take(self, key: tuple[str, Box]) -> torch.Tensor:
        """Return a part, which is kept no longer."""
        place = self._places.get(key)
        if place is None:
            return self._source.read([key])[0]
        if key not in self._kept:
            chosen, total_bytes = [], 0
            for number in range(place, len(self._small)):
                other = self._small[number]
                total_bytes += self._sizes[other]
                if total_bytes > self._bytes_max:
                    break
                chosen.append(other)
            # In another order than that of `sizes`, the parts that were kept would add up.
            self._kept = dict(zip(chosen, self._source.read(chosen), strict=True))
        return self._kept.pop(key)


class PiecePlanner(DefaultSavePlanner):
    """Planner whose tensors on the meta device are read piece by piece, when they are written.

    Small pieces are read together, `bytes_max` bytes at a time.

    Attributes:
        digests: Digest of each piece that was read, by name and box.
    """

    def __init__(self, source: Source | SavedCheckpoint, *, bytes_max: int) -> None:
        super().__init__()
        self.digests: dict[tuple[str, Box], bytes] = {}
        self._source, self._bytes_max = source, bytes_max
        self._sizes: dict[tuple[str, Box], int] = {}

    def note_read(self, tensor: torch.Tensor) -> None:
        """Note a piece that was read and digested; does nothing here."""

    def create_local_plan(self) -> SavePlan:
        """Plan as torch does, with an item for each piece."""
        self._sizes, self.digests = {}, {}
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            if data is None or not self._is_read(name):
                items.append(item)
                continue
            sizes = self._source.pieces(name)
            self._sizes |= {(name, box): size_bytes for box, size_bytes in sizes.items()}
            items += [_make_item(item, data, box, number) for number, box in enumerate(sizes)]
        self._reads = Together(self._source, self._sizes, bytes_max=self._bytes_max)
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the value of an item; a piece is read now, and digested."""
        name, data = write_item.index.fqn, write_item.tensor_data
        if data is None or not self._is_read(name):
            return super().resolve_data(write_item)
        key = name, Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        tensor = self._reads.take(key).contiguous()
        self.digests[key] = digest(byte_view(tensor))
        self.note_read(tensor)
        return tensor

    @property
    def is_all_read(self) -> bool:
        """True once each piece was read."""
        return len(self.digests) == len(self._sizes)

    def _is_read(self, name: str) -> bool:
        value = self.state_dict.get(name)
        return isinstance(value, torch.Tensor) and value.is_meta


def _make_item(item: WriteItem, data: TensorWriteData, box: Box, number: int) -> WriteItem:
    offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
    index = MetadataIndex(item.index.fqn, offsets, number)
    part = replace(data, chunk=ChunkStorageMetadata(offsets, sizes))
    return replace(item, index=index, type=WriteItemType.SHARD, tensor_data=part)
