"""The items of a rank's plan, one after another: resolved, compared with an earlier checkpoint; what is to be sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from dcp_remote.dedup import NO_LOAN, Base, Known, Loan, Part, Parts
from dcp_remote.devices import Run, host_views, wait_for_devices
from dcp_remote.dtypes import ITEM_BYTES
from dcp_remote.errors import InvalidArgumentError, SaveFailedError
from dcp_remote.manifest import DIMENSIONS_MAX, RAW
from dcp_remote.names import top_level_key
from dcp_remote.object_raw import Segments
from dcp_remote.objects import EncodedObject
from dcp_remote.packing import Item
from dcp_remote.plans import SharedPart, SharedParts
from dcp_remote.ranges import Box, boxes_of_run
from dcp_remote.read_plan import ALONE_BYTES
from dcp_remote.serialization import dtype_name, encoding_of, narrow

# Of an item: a tensor, or the bytes of an object, or of a run of it.
Source: TypeAlias = torch.Tensor | memoryview | Segments


@dataclass(slots=True)
class SaveItems:
    """The items of a plan, drawn one at a time, and what was noted of them.

    Iterated over once, after `compare` if anything is to be borrowed; a tensor is resolved when its turn comes.

    Args:
        plan: The final plan of this rank.
        planner: Resolves its items.
        allow_pickle: Take tensors whose stream needs code to load.
        stored: Objects that are stored in shards, by name; what else is no tensor is left out.
    """

    plan: SavePlan
    planner: SavePlanner
    allow_pickle: bool
    stored: dict[str, EncodedObject]
    loan: Loan = NO_LOAN
    known: list[str] = field(default_factory=list)  # how the base has each encoded
    drawn: list[tuple[WriteItem, str]] = field(default_factory=list)  # and how each is encoded
    parts: Parts = field(default_factory=Parts)
    shared: Mapping[MetadataIndex, SharedPart] = field(init=False)

    def __post_init__(self) -> None:
        self.shared = SharedParts.in_plan(self.plan)

    def compare(self, base: Base, look: Callable[[], None]) -> None:
        """See what the base has already; `look` raises when the save is over.

        Before anything is packed, since what a shard lends depends on all of it; so tensors are resolved once more. And
        here, not in the workers: digesting holds the GIL, so that several threads do it no faster (measured with xxhash
        4.1: 0.07 s/GiB with one thread, 0.06 to 0.08 with two).
        """
        found = [(write_item, self._known(write_item, base)) for write_item in self._ordered()]
        self.known = [known.encoding if known is not None else "" for _, known in found]
        self.loan = base.lend(
            [self._compared(one, known, base, look) if known is not None else [] for one, known in found]
        )

    def _known(self, write_item: WriteItem, base: Base) -> Known | None:
        name, planned = write_item.index.fqn, write_item.tensor_data
        if planned is None:
            return base.object(name)
        return base.chunk(
            name,
            dtype=dtype_name(planned.properties.dtype),
            offsets=tuple(planned.chunk.offsets),
            sizes=tuple(planned.chunk.sizes),
            hint=write_item.index.index,
        )

    def _compared(self, write_item: WriteItem, known: Known, base: Base, look: Callable[[], None]) -> list[Part]:
        """The parts of an item as the base has it; none if it has another."""
        look()
        item, encoding = self._draw(write_item)
        if encoding != known.encoding:
            return []
        item_bytes = ITEM_BYTES[item.dtype]
        wait_for_sources([item.source])
        parts: list[Part] = []
        for part in base.compare(
            known.pieces,
            length_bytes=math.prod(item.sizes) * item_bytes,
            read=lambda start, stop: _view(item.source, start // item_bytes, stop // item_bytes),
        ):
            look()
            parts.append(part)
        return parts

    def __iter__(self) -> Iterator[Item[Source]]:
        """What has to be sent.

        Tensors are resolved only here, so that copies which a planner makes live no longer than their shards.
        """
        for owner, write_item in enumerate(self._ordered()):
            yield from self._to_send(owner, write_item, self.loan.parts[owner] if self.loan.parts else ())

    def _to_send(self, owner: int, write_item: WriteItem, parts: Sequence[Part]) -> Iterator[Item[Source]]:
        """An item whole, if nothing of it is borrowed; else the pieces that changed, each as what it covers."""
        if parts and all(part.first_block is not None for part in parts):
            self.drawn.append((write_item, self.known[owner]))
            for part in parts:
                self.parts.borrow(owner, part)
            return
        item, encoding = self._draw(write_item)
        self.drawn.append((write_item, encoding))
        if all(part.first_block is None for part in parts):
            for whole in _in_place(item):
                self.parts.send(owner)
                yield whole
            return
        item_bytes = ITEM_BYTES[item.dtype]
        for part in parts:
            if part.first_block is not None:
                self.parts.borrow(owner, part)
                continue
            for _, box in boxes_of_run(item.sizes, part.start // item_bytes, part.stop // item_bytes):
                self.parts.send(owner)
                yield _part(item, box)

    def _draw(self, write_item: WriteItem) -> tuple[Item[Source], str]:
        """The item, and how it is encoded."""
        if write_item.type != WriteItemType.BYTE_IO:
            return self._tensor(write_item)
        encoded = self.stored[write_item.index.fqn]
        return self._bytes(write_item, encoded.segments), encoded.encoding

    def _ordered(self) -> list[WriteItem]:
        """What is small first, of each top-level key: it is read by a few requests then, and not by one each."""
        by_top: dict[str, list[WriteItem]] = {}
        for write_item in self.plan.items:
            if write_item.type != WriteItemType.BYTE_IO or write_item.index.fqn in self.stored:
                by_top.setdefault(self._top(write_item), []).append(write_item)
        return [one for group in by_top.values() for one in sorted(group, key=self._reads_alone)]

    def _reads_alone(self, write_item: WriteItem) -> bool:
        data = write_item.tensor_data
        if data is None:
            return self.stored[write_item.index.fqn].length_bytes >= ALONE_BYTES
        return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize >= ALONE_BYTES

    def _top(self, write_item: WriteItem) -> str:
        paths = self.plan.planner_data
        path = paths.get(write_item.index.fqn) if isinstance(paths, dict) else None
        return top_level_key(path)

    def _bytes(self, write_item: WriteItem, data: Segments) -> Item[Source]:
        return Item(
            top=self._top(write_item),
            name=write_item.index.fqn,
            dtype="uint8",
            offsets=(0,),
            sizes=(len(data),),
            whole=True,
            source=data,
        )

    def _tensor(self, write_item: WriteItem) -> tuple[Item[Source], str]:
        name, planned, shared = write_item.index.fqn, write_item.tensor_data, self.shared.get(write_item.index)
        tensor = self._resolved(write_item if shared is None else shared.whole)
        assert planned is not None, "looked at when it was resolved"
        encoding, stream = encoding_of(name, tensor, allow_pickle=self.allow_pickle)
        if encoding != RAW:
            if planned.chunk.sizes != planned.size:
                raise InvalidArgumentError(
                    "A part of a sharded tensor is of a kind whose elements alone do not say everything, and that "
                    "cannot be put together again. Save the whole tensor, or its plain parts.",
                    tensor=name,
                    type=f"{type(tensor).__module__}.{type(tensor).__qualname__}",
                    layout=tensor.layout,
                )
            return self._bytes(write_item, Segments([memoryview(stream)])), encoding
        if shared is not None:
            tensor = narrow(tensor.detach(), shared.box)
        item: Item[Source] = Item(
            top=self._top(write_item),
            name=name,
            dtype=dtype_name(tensor.dtype),
            offsets=tuple(planned.chunk.offsets),
            sizes=tuple(planned.chunk.sizes),
            whole=planned.chunk.sizes == planned.size,
            source=tensor,
        )
        return item, encoding

    def _resolved(self, write_item: WriteItem) -> torch.Tensor:
        name, planned = write_item.index.fqn, write_item.tensor_data
        tensor = self.planner.resolve_data(write_item)
        if planned is None or not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError("The planner gave no tensor for a tensor's item.", tensor=name)
        if tensor.dtype != planned.properties.dtype or tensor.shape != planned.chunk.sizes:
            raise SaveFailedError(
                "A tensor is not what was planned; with plan caching, the state must keep its dtypes and shapes.",
                tensor=name,
                dtype=dtype_name(tensor.dtype),
                planned_dtype=dtype_name(planned.properties.dtype),
                shape=tuple(tensor.shape),
                planned_shape=tuple(planned.chunk.sizes),
            )
        if tensor.dim() > DIMENSIONS_MAX:
            raise InvalidArgumentError(
                "A tensor has more dimensions than a manifest can say.", tensor=name, limit=DIMENSIONS_MAX
            )
        return tensor


def _in_place(item: Item[Source]) -> Iterator[Item[Source]]:
    """An item; or of one that lies in several places of memory an item each, so that what is sent is no copy."""
    if not isinstance(item.source, Segments):
        yield item
        return
    start = 0
    for run in item.source.runs():
        yield replace(item, offsets=(start,), sizes=(len(run),), whole=len(run) == len(item.source), source=run)
        start += len(run)


def _part(item: Item[Source], box: Box) -> Item[Source]:
    """A box of an item; a view."""
    source = item.source
    return Item(
        top=item.top,
        name=item.name,
        dtype=item.dtype,
        offsets=tuple(a + b for a, b in zip(item.offsets, box.offsets, strict=True)),
        sizes=box.sizes,
        whole=False,
        source=narrow(source.detach(), box)
        if isinstance(source, torch.Tensor)
        else source[box.offsets[0] : box.offsets[0] + box.sizes[0]],
    )


def wait_for_sources(sources: Sequence[Source]) -> None:
    """Until what this thread computes of them on devices is there; see `wait_for_devices`."""
    wait_for_devices(source.device for source in sources if isinstance(source, torch.Tensor))


def _view(source: Source, start: int, stop: int) -> memoryview:
    """The bytes of elements `start` to `stop`; a copy only where a tensor must be copied."""
    return host_views([Run(source, start, stop)])[0] if isinstance(source, torch.Tensor) else source[start:stop]
