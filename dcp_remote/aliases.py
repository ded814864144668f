"""Templates that share memory, as tied weights and views of a flat buffer do: in which order they are read.

Ranges arrive in any order and are written from several threads. Two of them in one memory would leave a mix, or be
taken for damage, as one thread verifies what another has just written. So whatever shares memory is read one after
another, and the last one wins, as with a reader that reads nothing in parallel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dcp_remote.serialization import is_plain


@dataclass(frozen=True, slots=True)
class _Extent:
    """From the first byte of a tensor to its last; of one that is not contiguous there may be others' between them."""

    number: int
    device: str
    start: int
    stop: int
    contiguous: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def shares_memory(self, other: _Extent) -> bool:
        """Whether some byte is of both.

        Two that are not contiguous and not the same are taken for neighbours that interleave, as columns do.
        """
        if self.stop <= other.start or other.stop <= self.start:
            return False
        return (
            self.contiguous
            or other.contiguous
            or (self.start, self.shape, self.strides) == (other.start, other.shape, other.strides)
        )


def layers(templates: Sequence[torch.Tensor]) -> list[int]:
    """For each template the layer in which it is read: later than all before it in the list that it shares memory with.

    Almost always 0 for all of them. Within a layer nothing shares memory. Tensors of subclasses are not looked into.
    """
    found = [0] * len(templates)
    extents = [_extent(number, template) for number, template in enumerate(templates) if _lies_in_memory(template)]
    for cluster in _clusters(extents):
        for position, extent in enumerate(cluster):
            below = (found[other.number] for other in cluster[:position] if other.shares_memory(extent))
            found[extent.number] = 1 + max(below, default=-1)
    return found


def _lies_in_memory(template: torch.Tensor) -> bool:
    return is_plain(template) and template.numel() > 0 and not template.is_meta


def _extent(number: int, template: torch.Tensor) -> _Extent:
    last = sum((size - 1) * stride for size, stride in zip(template.shape, template.stride(), strict=True))
    start = template.data_ptr()
    return _Extent(
        number=number,
        device=str(template.device),
        start=start,
        stop=start + (last + 1) * template.element_size(),
        contiguous=template.is_contiguous(),
        shape=tuple(template.shape),
        strides=template.stride(),
    )


def _clusters(extents: Sequence[_Extent]) -> Iterator[list[_Extent]]:
    """Those whose extents hang together, each in the order of the list."""
    cluster: list[_Extent] = []
    stop = 0
    for extent in sorted(extents, key=lambda one: (one.device, one.start)):
        if cluster and (extent.device != cluster[-1].device or extent.start >= stop):
            yield sorted(cluster, key=lambda one: one.number)
            cluster, stop = [], 0
        cluster.append(extent)
        stop = max(stop, extent.stop)
    if cluster:
        yield sorted(cluster, key=lambda one: one.number)
