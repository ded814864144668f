"""Source: a checkpoint of another format as a state, whose tensors are on the meta device and are read in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dcp_remote.common.geometry import Box, boxes_of_run, cut_to_fill, find_single_run
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.serialization.tensors import empty_tensor, narrow, tensor_from
from dcp_remote.transfer.ranges import FileRange, RangeReader


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor, or chunk of one, whose elements are in a file."""

    storage: FileRange  # a whole number of elements
    first: int  # number of the element of the storage at which the tensor begins
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # in elements; None if the elements lie one after another in row-major order
    dtype: torch.dtype

    def range_of(self, box: Box) -> FileRange:
        """Return the bytes of a box that `Source.pieces` gives; of a tensor that is not contiguous all its storage."""
        if self.strides is not None:
            return self.storage
        start = find_single_run(self.shape, box)
        assert start is not None, "a piece is a run"
        first = self.first + start
        item_bytes = self.dtype.itemsize
        return FileRange(self.storage.file, self.storage.start + first * item_bytes, box.elements * item_bytes)

    def restore(self, box: Box, data: memoryview) -> torch.Tensor:
        """Return the values of a box, of the bytes that `range_of` names."""
        if not box.elements:
            return torch.empty(box.sizes, dtype=self.dtype)
        if self.strides is None:
            return tensor_from(data, self.dtype, box.sizes)
        flat = tensor_from(data, self.dtype, (self.storage.length // self.dtype.itemsize,))
        try:
            return flat.as_strided(self.shape, self.strides, self.first).contiguous()
        except RuntimeError as error:
            raise InvalidArgumentError(
                "An expanded tensor of the source does not fit into the memory of this process.", shape=self.shape
            ) from error


class Source:
    """Checkpoint to read from. The constructor of a subclass reads what describes it, and fills the attributes.

    Attributes:
        kind: Name of the format.
        url: URL of the folder.
        reader: Reader of the files.
        state: State, nested as it was saved; tensors that `read` returns are on the meta device.
        chunks: Boxes of each tensor, which are together the whole tensor, and the place of each in a file; a
            `FileRange` is the stream of a box that is decoded whole, by `decode_chunk`.
    """

    kind: ClassVar[str]

    def __init__(self, reader: RangeReader, *, piece_bytes_max: int) -> None:
        """Begin empty; at most `piece_bytes_max` bytes of a contiguous tensor are read at once."""
        self.reader = reader
        self.url = reader.store.url
        self.state: dict[str, Any] = {}
        self.chunks: dict[str, list[tuple[Box, StoredTensor | FileRange]]] = {}
        self._piece_bytes_max = piece_bytes_max
        self._chunk_of: dict[tuple[str, Box], tuple[Box, StoredTensor | FileRange]] = {}

    def pieces(self, name: str) -> dict[Box, int]:
        """Return the boxes of a tensor that are read at once, and how many bytes are read for each.

        They are its chunks, of which contiguous ones are cut.
        """
        pieces: dict[Box, int] = {}
        for box, place in self.chunks[name]:
            parts = [box]
            if isinstance(place, StoredTensor) and place.strides is None:
                parts = cut_pieces(box, place.dtype, piece_bytes_max=self._piece_bytes_max)
            for part in parts:
                self._chunk_of[name, part] = box, place
                pieces[part] = self._range_of(name, part).length
        return pieces

    def read(self, parts: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        """Return the values of boxes that `pieces` has returned, on the CPU; one GET per box and 8 MiB."""
        found = [(name, box, *self._chunk_of[name, box]) for name, box in parts]
        read = self.reader.read([self._range_of(name, box) for name, box in parts])
        return [
            place.restore(box.relative_to(whole.offsets), data)
            if isinstance(place, StoredTensor)
            else self.decode_chunk(name, box, data)
            for (name, box, whole, place), data in zip(found, read, strict=True)
        ]

    def read_whole(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return all values of a tensor with the shape and dtype of `like`, read piece by piece."""
        tensor = empty_tensor(like.dtype, like.shape)
        for box in self.pieces(name):
            narrow(tensor, box).copy_(self.read([(name, box)])[0])
        return tensor

    def decode_chunk(self, name: str, box: Box, data: memoryview) -> torch.Tensor:
        """Return the values of a box whose place is a stream; for formats that have such places."""
        raise NotImplementedError

    def _range_of(self, name: str, box: Box) -> FileRange:
        whole, place = self._chunk_of[name, box]
        return place.range_of(box.relative_to(whole.offsets)) if isinstance(place, StoredTensor) else place


def cut_pieces(box: Box, dtype: torch.dtype, *, piece_bytes_max: int) -> list[Box]:
    """Return a box cut into boxes of at most some bytes, each contiguous in the row-major box, in order."""
    limit = piece_bytes_max
    runs = cut_to_fill(box.sizes, item_bytes=dtype.itemsize, room_bytes=0, piece_bytes_max=limit, row_bytes_max=limit)
    if len(runs) < 2:  # noqa: PLR2004  # one, or none of an empty box
        return [box]
    return [
        Box(tuple(a + b for a, b in zip(box.offsets, part.offsets, strict=True)), part.sizes)
        for start, stop in runs
        for _, part in boxes_of_run(box.sizes, start, stop)
    ]
