"""Order in which templates that share memory are read, such as tied weights and views of a flat buffer.

Ranges arrive in any order and are written from several threads. Two ranges in the same memory would leave a mix, or
fail verification, as one thread verifies what another has just written. So templates that share memory are read one
after another, and the last one wins, as with a sequential reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan

from dcp_remote.format.manifest import Manifest
from dcp_remote.serialization.tensors import has_memory, memory_of


class _Extent(NamedTuple):
    """Memory from the first byte of a tensor to the last; if not contiguous, bytes of others may lie in between."""

    number: int  # position of the template in the list
    template: torch.Tensor
    start: int  # address of the first byte
    stop: int

    def shares_memory(self, other: _Extent) -> bool:
        """Return whether the tensors share a byte.

        Two different tensors of which neither is contiguous are assumed to interleave without sharing, as columns do.
        """
        if self.stop <= other.start or other.stop <= self.start:
            return False
        one, two = self.template, other.template
        is_same = (self.start, one.shape, one.stride()) == (other.start, two.shape, two.stride())
        return is_same or one.is_contiguous() or two.is_contiguous()


def assign_layers(templates: Sequence[torch.Tensor]) -> list[int]:
    """Return for each template its layer: later than those of all earlier templates that it shares memory with.

    Layers are read one after another; nearly always all are 0. Within a layer no memory is shared. Tensors of
    subclasses are assumed to share none.
    """
    layers = [0] * len(templates)
    extents = [_extent(number, template) for number, template in enumerate(templates) if has_memory(template)]
    for cluster in _clusters(extents):
        for position, extent in enumerate(cluster):
            earlier = (layers[other.number] for other in cluster[:position] if other.shares_memory(extent))
            layers[extent.number] = 1 + max(earlier, default=-1)
    return layers


def find_lost_values(
    manifest: Manifest, plan: LoadPlan, template_of: Callable[[MetadataIndex], torch.Tensor]
) -> list[tuple[str, str]]:
    """Return pairs of names in the state that are one memory, as tied weights are, but were saved with other values.

    The digests in the manifest decide; tensors that were cut into pieces in other places count as equal.
    """
    first_of: dict[tuple[object, ...], tuple[str, str]] = {}
    found: dict[tuple[str, str], None] = {}
    for item in plan.items:
        if item.type == LoadItemType.BYTE_IO:
            continue
        place = memory_of(template_of(item.dest_index))
        if place is None:
            continue
        here = (item.dest_index.fqn, item.storage_index.fqn)
        name, saved = first_of.setdefault(place, here)
        if name != here[0] and _have_other_values(manifest, saved, here[1]):
            found[name, here[0]] = None
    return list(found)


def _have_other_values(manifest: Manifest, name: str, other: str) -> bool:
    """Compare the chunks that both tensors have: of a manifest in segments, one may have more than the other."""
    tensors, pieces = manifest.tensors, manifest.pieces
    kinds, found = set(), list[dict[tuple[object, ...], range]]()
    for tensor in (tensors.index[name], tensors.index[other]):
        kinds.add(tensors.kind_of(tensor))
        chunks = range(int(tensors.chunk_first[tensor]), int(tensors.chunk_first[tensor + 1]))
        spans = [range(*tensors.piece_first[chunk : chunk + 2].tolist()) for chunk in chunks]
        places = [(tensors.offsets_of(chunk), tensors.sizes_of(chunk)) for chunk in chunks]
        lengths = [tuple(pieces.length[span.start : span.stop].tolist()) for span in spans]
        found.append({(*place, cut): span for place, cut, span in zip(places, lengths, spans, strict=True)})
    return len(kinds) == 1 and any(
        pieces.digest(piece) != pieces.digest(twin)
        for layout in found[0].keys() & found[1].keys()
        for piece, twin in zip(found[0][layout], found[1][layout], strict=True)
    )


def _extent(number: int, template: torch.Tensor) -> _Extent:
    last = sum((size - 1) * stride for size, stride in zip(template.shape, template.stride(), strict=True))
    start = template.data_ptr()
    return _Extent(number, template, start, start + (last + 1) * template.element_size())


def _clusters(extents: Sequence[_Extent]) -> Iterator[list[_Extent]]:
    """Group extents that are connected by overlaps; yield each group in the order of the templates."""
    cluster: list[_Extent] = []
    stop = 0
    for extent in sorted(extents, key=lambda extent: (str(extent.template.device), extent.start)):
        if cluster and (extent.template.device != cluster[-1].template.device or extent.start >= stop):
            yield sorted(cluster, key=lambda extent: extent.number)
            cluster, stop = [], 0
        cluster.append(extent)
        stop = max(stop, extent.stop)
    if cluster:
        yield sorted(cluster, key=lambda extent: extent.number)
