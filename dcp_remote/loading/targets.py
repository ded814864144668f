"""Targets of a load: tensors that are filled box by box, and buffers that become an object or a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch
from torch.autograd.graph import increment_version

from dcp_remote.common.geometry import Box, ByteRange, boxes_of_run, find_single_run
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.dtypes import ITEM_BYTES
from dcp_remote.format.manifest import JSON, RAW, Manifest, TensorKind
from dcp_remote.loading.engine import Target
from dcp_remote.loading.read_plan import Want, want_box
from dcp_remote.serialization.files import unwrap_marked
from dcp_remote.serialization.objects import EncodedObject, Encoding, decode_object
from dcp_remote.serialization.tensors import (
    byte_view,
    copy_into,
    decode_tensor,
    dtype_name,
    is_plain,
    narrow,
    needs_copy,
    parse_dtype,
    tensor_from,
    unwrap_elements,
)
from dcp_remote.serialization.torch_tags import lacks_memory

# RuntimeErrors of torch that are no fault of the template.
_DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)


class TensorTarget:
    """Target for a box of a chunk: a destination tensor of the box's shape, resolved when the first bytes need it.

    The box is relative to the chunk, and not empty. `commit` gets the destination when it is complete.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        tensor: int,
        chunk: int,
        box: Box,
        resolve: Callable[[], torch.Tensor],
        commit: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._name = manifest.tensors.names[tensor]
        self._sizes = manifest.tensors.sizes_of(chunk)
        self._box = box
        kind = manifest.tensors.kind_of(tensor)
        self._item_bytes = ITEM_BYTES[kind.dtype]
        self._dtype = parse_dtype(kind.dtype)
        self._layout = stored_layout(kind)
        self._resolve = resolve
        self._commit = commit
        self._destination: torch.Tensor | None = None
        self._memory: memoryview | None = None
        self._memory_start = 0
        self.want = want_box(manifest, tensor=tensor, chunk=chunk, box=box)

    def place(self, span: ByteRange) -> memoryview | None:
        """Return the destination's memory, if the whole span lies in the box and the box is one run of the chunk."""
        self._resolve_once()
        if self._memory is None:
            return None
        start, stop = span.start - self._memory_start, span.stop - self._memory_start
        return self._memory[start:stop] if start >= 0 and stop <= len(self._memory) else None

    def take(self, span: ByteRange, data: memoryview) -> None:
        """Copy the part of the span that lies in the box, in at most `2 * dimensions - 1` boxes."""
        memory = self.place(span)
        if memory is not None:
            # Not by torch, which releases the GIL in each operation: a state has many small tensors.
            memory[:] = data
            return
        destination, item = self._resolve_once(), self._item_bytes
        first = span.start // item
        for start, box in boxes_of_run(self._sizes, first, span.stop // item):
            common = box.intersection(self._box)
            if common is None:
                continue
            begin = (start - first) * item
            source = tensor_from(data[begin : begin + box.elements * item], self._dtype, box.sizes)
            with _explain_copy_errors(self._name, destination, source):
                copy_into(
                    narrow(destination, common.relative_to(self._box.offsets)),
                    narrow(source, common.relative_to(box.offsets)),
                )

    def complete(self) -> None:
        """Commit the destination and drop the reference to it: a load may have a hundred thousand targets."""
        destination = self._resolve_once()
        if self._memory is not None and not destination.is_inference():
            # torch did not see the writes into memory, so autograd has to be told that saved values are stale.
            increment_version(destination)
        self._destination = self._memory = None
        if self._commit is not None:
            self._commit(destination)

    def _resolve_once(self) -> torch.Tensor:
        """Return the destination; on the first call it is resolved and checked."""
        if self._destination is not None:
            return self._destination
        destination = unwrap_elements(self._resolve())
        if destination.requires_grad:
            destination = destination.detach()
        if tuple(destination.shape) != self._box.sizes:
            raise InvalidArgumentError(
                "The planner resolved an item to a tensor of another shape than the item's. Correct resolve_tensor.",
                tensor=self._name,
                asked=self._box.sizes,
                given=tuple(destination.shape),
            )
        require_writable(self._name, destination, layout=self._layout)
        first = find_single_run(self._sizes, self._box)
        if first is not None and destination.dtype == self._dtype and not needs_copy(destination):
            self._memory = byte_view(destination)
            self._memory_start = first * self._item_bytes
        self._destination = destination
        return destination


def make_box_targets(manifest: Manifest, tensor: int, box: Box, into: torch.Tensor) -> list[Target]:
    """Make the targets that read a box of a tensor, which is stored as its elements, into a tensor of the box's shape.

    There is one for each chunk with elements of the box.
    """
    tensors = manifest.tensors
    offsets, sizes = tensors.boxes_of(tensor)
    starts = np.array(box.offsets, dtype=np.int64)
    # For all chunks at once: a tensor of many chunks is read in as many boxes.
    touched = ((offsets < starts + np.array(box.sizes, dtype=np.int64)) & (offsets + sizes > starts)).all(axis=1)
    targets: list[Target] = []
    for chunk in (int(tensors.chunk_first[tensor]) + np.flatnonzero(touched)).tolist():
        whole = Box(tensors.offsets_of(chunk), tensors.sizes_of(chunk))
        if common := box.intersection(whole):
            part = common.relative_to(whole.offsets)
            # `detach` returns a view of the same memory.
            resolve = narrow(into, common.relative_to(box.offsets)).detach
            targets.append(TensorTarget(manifest, tensor=tensor, chunk=chunk, box=part, resolve=resolve))
    return targets


class BytesTarget:
    """Target for a whole object or stream: a fresh buffer, given to `done` when it is complete, which may keep it."""

    def __init__(self, manifest: Manifest, name: str, want: Want, done: Callable[[memoryview], None]) -> None:
        """Store the arguments; the buffer is allocated when the first bytes need it."""
        self.want = want
        self._name = name
        self._length = int(manifest.pieces.length[want.piece_first : want.piece_stop].sum())
        self._done = done
        self._data: memoryview | None = None

    def place(self, span: ByteRange) -> memoryview | None:
        """Return the span of the buffer."""
        return self._buffer()[span.start : span.stop]

    def take(self, span: ByteRange, data: memoryview) -> None:
        """Copy the bytes into the buffer."""
        self._buffer()[span.start : span.stop] = data

    def complete(self) -> None:
        """Pass the buffer to `done`, and drop the reference to it."""
        data, self._data = self._buffer(), None
        self._done(data)

    def _buffer(self) -> memoryview:
        if self._data is None:
            try:
                # Not a bytearray, which is zeroed while the GIL is held.
                self._data = memoryview(np.empty(self._length, dtype=np.uint8))  # type: ignore[arg-type]  # a buffer
            except MemoryError as error:
                raise InvalidArgumentError(
                    "An object does not fit into the memory of this process. Leave it out, or free memory.",
                    object=self._name,
                    bytes=self._length,
                ) from error
        return self._data


def make_object_target(
    manifest: Manifest, name: str, deliver: Callable[[object], None], *, allow_pickle: bool
) -> Target:
    """Make the target that reads an object; of an object in the manifest it wants nothing, and is complete at once."""
    stored = manifest.stored_index.get(name)
    if stored is None and name not in manifest.inline:
        raise InvalidArgumentError("There is no object of this name in the checkpoint.", object=name)
    # `manifest_validation` lets no other encoding pass.
    encoding = JSON if stored is None else cast("Encoding", stored.encoding)

    def done(data: memoryview) -> None:
        encoded = EncodedObject(encoding, manifest.inline.get(name, b""), (data,))
        deliver(unwrap_marked(decode_object(name, encoded, allow_pickle=allow_pickle)))

    want = Want(0, 0, None) if stored is None else Want(stored.piece_first, stored.piece_first + stored.pieces, None)
    return BytesTarget(manifest, name, want, done)


def make_tensor_target(
    manifest: Manifest,
    *,
    tensor: int,
    chunk: int,
    box: Box,
    resolve: Callable[[], torch.Tensor],
    commit: Callable[[torch.Tensor], None],
    allow_pickle: bool,
) -> Target:
    """Make the target that reads a box of a chunk; a chunk that is stored as a stream is read whole, then cut."""
    kind = manifest.tensors.kind_of(tensor)
    if kind.encoding == RAW:
        return TensorTarget(manifest, tensor=tensor, chunk=chunk, box=box, resolve=resolve, commit=commit)
    name = manifest.tensors.names[tensor]

    def copy(source: torch.Tensor) -> None:
        destination = resolve()
        require_writable(name, destination, layout=stored_layout(kind))
        with _explain_copy_errors(name, destination, source), torch.no_grad():
            destination.copy_(narrow(source, box))
        commit(destination)

    return make_stream_target(manifest, tensor=tensor, chunk=chunk, deliver=copy, allow_pickle=allow_pickle)


def make_stream_target(
    manifest: Manifest, *, tensor: int, chunk: int, deliver: Callable[[torch.Tensor], None], allow_pickle: bool
) -> Target:
    """Make the target that reads a chunk that is stored as a stream, and delivers it as a tensor on the CPU."""
    tensors = manifest.tensors
    name, kind, sizes = tensors.names[tensor], tensors.kind_of(tensor), tensors.sizes_of(chunk)

    def done(data: memoryview) -> None:
        deliver(decode_tensor(name, kind.encoding, data, dtype=kind.dtype, sizes=sizes, allow_pickle=allow_pickle))

    want = Want(int(tensors.piece_first[chunk]), int(tensors.piece_first[chunk + 1]), None)
    return BytesTarget(manifest, name, want, done)


def stored_layout(kind: TensorKind) -> str:
    """Return torch's name of the layout in which a tensor is read: a planner may have made it dense to save it."""
    return "strided" if kind.encoding == RAW else kind.layout


def require_writable(name: str, destination: torch.Tensor, *, layout: str) -> None:
    """Check that a tensor of this layout can be copied into a template; torch's own errors name no tensor."""
    found = str(destination.layout).removeprefix("torch.")
    if found != layout:
        raise InvalidArgumentError(
            "A tensor cannot be loaded into a template of another layout. Give a template of the saved layout.",
            tensor=name,
            saved=layout,
            template=found,
        )
    if destination.is_meta or (is_plain(destination) and lacks_memory(destination)):
        raise InvalidArgumentError(
            "A template has no memory to load into: it is on the meta device, or its memory was freed. Allocate it.",
            tensor=name,
        )
    if layout == "strided" and _overlaps_itself(destination):
        # Ranges would overwrite one another in such a template, without an error of torch's.
        raise InvalidArgumentError(
            "Elements of a template share one place in memory, as those of an expanded tensor do. Load into a clone().",
            tensor=name,
            shape=tuple(destination.shape),
            strides=destination.stride(),
        )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether two elements may share memory, as in an expanded tensor or overlapping windows.

    Errs towards True: False needs every stride to exceed the reach of all smaller strides together.
    """
    reach = 0
    for stride, size in sorted((n, size) for n, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        if stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


@contextmanager
def _explain_copy_errors(name: str, destination: torch.Tensor, source: torch.Tensor) -> Iterator[None]:
    """Turn an error of torch's `copy_`, which names no tensor, into one that does."""
    try:
        yield
    except _DEVICE_ERRORS:
        raise
    except RuntimeError as error:
        raise InvalidArgumentError(
            "torch cannot copy a tensor into its template. Give a template of the saved dtype and shape.",
            tensor=name,
            saved=f"{dtype_name(source.dtype)} {tuple(source.shape)}",
            template=f"{dtype_name(destination.dtype)} {tuple(destination.shape)}",
            cause=error,
        ) from error
