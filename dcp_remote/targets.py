"""Where what is read goes: into tensors box by box, or into bytes that become an object or a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch.autograd.graph import increment_version

from dcp_remote.dtypes import ITEM_BYTES
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.manifest import JSON, RAW, Manifest, TensorKind
from dcp_remote.object_torch import lacks_memory
from dcp_remote.objects import EncodedObject, Encoding, decode_object
from dcp_remote.ranges import Box, ByteRange, boxes_of_run, only_run
from dcp_remote.read_plan import Want, want_box
from dcp_remote.reading import Target
from dcp_remote.serialization import (
    byte_view,
    copy_into,
    decode_tensor,
    dtype_name,
    dtype_of,
    is_copied,
    is_plain,
    narrow,
    tensor_from,
)

# RuntimeErrors of torch that say nothing of the template.
_OUT_OF_THE_USERS_HANDS = (torch.OutOfMemoryError, torch.AcceleratorError)


class TensorTarget:
    """A box of a chunk of a tensor, copied into a tensor of the box's shape.

    Args:
        manifest: Of the checkpoint.
        tensor: Number of the tensor.
        chunk: Number of the chunk.
        box: Relative to the chunk; not empty.
        resolve: Gives the destination; called once, when its first bytes are asked for.
        commit: Called with the destination when it is complete.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        tensor: int,
        chunk: int,
        box: Box,
        resolve: Callable[[], torch.Tensor],
        commit: Callable[[torch.Tensor], None],
    ) -> None:
        """See the class."""
        self._name = manifest.tensors.names[tensor]
        self._sizes = manifest.tensors.sizes_of(chunk)
        self._box = box
        kind = manifest.tensors.kind_of(tensor)
        self._item_bytes = ITEM_BYTES[kind.dtype]
        self._dtype = dtype_of(kind.dtype)
        self._layout = stored_layout(kind)
        self._resolve = resolve
        self._commit = commit
        self._destination: torch.Tensor | None = None
        self._memory: memoryview | None = None
        self._memory_start = 0
        self.want = want_box(manifest, tensor=tensor, chunk=chunk, box=box)

    def place(self, span: ByteRange) -> memoryview | None:
        """Straight into the destination, where the span lies in the box as one run of its memory."""
        self._resolved()
        if self._memory is None:
            return None
        start, stop = span.start - self._memory_start, span.stop - self._memory_start
        return self._memory[start:stop] if start >= 0 and stop <= len(self._memory) else None

    def take(self, span: ByteRange, data: memoryview) -> None:
        """Copy the part of the span that lies in the box, as at most `2 * dimensions - 1` boxes."""
        memory = self.place(span)
        if memory is not None:
            # Without torch, whose every operation lets go of Python's lock: a state has many small tensors.
            memory[:] = data
            return
        destination, item = self._resolved(), self._item_bytes
        first = span.start // item
        for start, box in boxes_of_run(self._sizes, first, span.stop // item):
            common = box.intersection(self._box)
            if common is None:
                continue
            begin = (start - first) * item
            source = tensor_from(data[begin : begin + box.elements * item], self._dtype, box.sizes)
            try:
                copy_into(
                    narrow(destination, common.relative_to(self._box.offsets)),
                    narrow(source, common.relative_to(box.offsets)),
                )
            except _OUT_OF_THE_USERS_HANDS:
                raise
            except RuntimeError as error:
                raise _uncopyable(self._name, destination, source, error) from error

    def complete(self) -> None:
        """Hand the destination back, and let go of it: a load may have a hundred thousand of them."""
        destination = self._resolved()
        if self._memory is not None and not destination.is_inference():
            # What autograd keeps of it is not what it was: torch saw nothing of what was written into its memory.
            increment_version(destination)
        self._destination = self._memory = None
        self._commit(destination)

    def _resolved(self) -> torch.Tensor:
        if self._destination is not None:
            return self._destination
        destination = self._resolve()
        if destination.requires_grad:
            destination = destination.detach()
        if tuple(destination.shape) != self._box.sizes:
            raise InvalidArgumentError(
                "The planner gave a tensor of another shape than it asked for.",
                tensor=self._name,
                asked=self._box.sizes,
                given=tuple(destination.shape),
            )
        require_writable(self._name, destination, layout=self._layout)
        first = only_run(self._sizes, self._box)
        if first is not None and destination.dtype == self._dtype and not is_copied(destination):
            self._memory = byte_view(destination)
            self._memory_start = first * self._item_bytes
        self._destination = destination
        return destination


class BytesTarget:
    """A whole object or stream, read into fresh memory, which whoever takes it may keep.

    Args:
        name: For the error.
        want: All its pieces.
        length: In bytes.
        done: Called with it when it is complete.
    """

    def __init__(self, name: str, want: Want, *, length: int, done: Callable[[memoryview], None]) -> None:
        """Keep the arguments; memory is taken when the first bytes are asked for."""
        self.want = want
        self._name = name
        self._length = length
        self._done = done
        self._data: memoryview | None = None

    def place(self, span: ByteRange) -> memoryview | None:
        """Straight into the buffer."""
        return self._buffer()[span.start : span.stop]

    def take(self, span: ByteRange, data: memoryview) -> None:
        """Copy into the buffer."""
        self._buffer()[span.start : span.stop] = data

    def complete(self) -> None:
        """Hand it over."""
        data, self._data = self._buffer(), None
        self._done(data)

    def _buffer(self) -> memoryview:
        if self._data is None:
            try:
                # Not zeroed, as a bytearray is: that holds Python's lock.
                self._data = memoryview(np.empty(self._length, dtype=np.uint8))  # type: ignore[arg-type]  # a buffer
            except MemoryError as error:
                raise InvalidArgumentError(
                    "An object does not fit into the memory of this process.", object=self._name, bytes=self._length
                ) from error
        return self._data


def object_targets(
    manifest: Manifest, name: str, deliver: Callable[[object], None], *, allow_pickle: bool
) -> list[Target]:
    """What reads an object; nothing, if it stands in the manifest: then it is delivered at once."""
    if name in manifest.inline:
        deliver(decode_object(name, EncodedObject(JSON, manifest.inline[name]), allow_pickle=allow_pickle))
        return []
    stored = manifest.stored_index.get(name)
    if stored is None:
        raise InvalidArgumentError("There is no object of this name in the checkpoint.", object=name)
    encoding = cast("Encoding", stored.encoding)  # `manifest_check` knows only these

    def done(data: memoryview) -> None:
        deliver(decode_object(name, EncodedObject(encoding, b"", (data,)), allow_pickle=allow_pickle))

    want = Want(stored.piece_first, stored.piece_first + stored.pieces, None)
    return [BytesTarget(name, want, length=want_bytes(manifest, want), done=done)]


def tensor_target(
    manifest: Manifest,
    *,
    tensor: int,
    chunk: int,
    box: Box,
    resolve: Callable[[], torch.Tensor],
    commit: Callable[[torch.Tensor], None],
    allow_pickle: bool,
) -> Target:
    """What reads a box of a chunk; a tensor that is stored as a stream is read whole, then cut."""
    kind = manifest.tensors.kind_of(tensor)
    if kind.encoding == RAW:
        return TensorTarget(manifest, tensor=tensor, chunk=chunk, box=box, resolve=resolve, commit=commit)
    name, sizes = manifest.tensors.names[tensor], manifest.tensors.sizes_of(chunk)

    def done(data: memoryview) -> None:
        source = decode_tensor(name, kind.encoding, data, dtype=kind.dtype, sizes=sizes, allow_pickle=allow_pickle)
        destination = resolve()
        require_writable(name, destination, layout=stored_layout(kind))
        try:
            with torch.no_grad():
                destination.copy_(narrow(source, box))
        except _OUT_OF_THE_USERS_HANDS:
            raise
        except RuntimeError as error:
            raise _uncopyable(name, destination, source, error) from error
        commit(destination)

    want = Want(int(manifest.tensors.piece_first[chunk]), int(manifest.tensors.piece_first[chunk + 1]), None)
    return BytesTarget(name, want, length=want_bytes(manifest, want), done=done)


def stored_layout(kind: TensorKind) -> str:
    """In which layout a tensor is read, by the name torch gives it; a planner may have made it dense to be saved."""
    return "strided" if kind.encoding == RAW else kind.layout


def require_writable(name: str, destination: torch.Tensor, *, layout: str) -> None:
    """See that a tensor of this layout can be copied into a template; torch's own errors name no tensor.

    Raises:
        InvalidArgumentError: The template has another layout, an expanded dimension, or no memory.
    """
    found = str(destination.layout).removeprefix("torch.")
    if found != layout:
        raise InvalidArgumentError(
            "A tensor cannot be loaded into a template of another layout.", tensor=name, saved=layout, template=found
        )
    if destination.is_meta or (is_plain(destination) and lacks_memory(destination)):
        raise InvalidArgumentError(
            "A template has no memory to load into: it is on the meta device, or its memory was freed.", tensor=name
        )
    if layout == "strided" and _overlaps_itself(destination):
        # Read by parts, each part would overwrite the one before, and torch would say nothing.
        raise InvalidArgumentError(
            "Elements of a template share one place in memory, as those of an expanded tensor do; clone() it first.",
            tensor=name,
            shape=tuple(destination.shape),
            strides=destination.stride(),
        )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether a step along one dimension may lead to where steps along others do: windows, say, or an expanded one."""
    reach = 0
    for stride, size in sorted((n, size) for n, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        if stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def _uncopyable(
    name: str, destination: torch.Tensor, source: torch.Tensor, cause: RuntimeError
) -> InvalidArgumentError:
    return InvalidArgumentError(
        "torch cannot copy a tensor into its template.",
        tensor=name,
        saved=f"{dtype_name(source.dtype)} {tuple(source.shape)}",
        template=f"{dtype_name(destination.dtype)} {tuple(destination.shape)}",
        cause=cause,
    )


def want_bytes(manifest: Manifest, want: Want) -> int:
    """How many bytes all its pieces have."""
    return int(manifest.pieces.length[want.piece_first : want.piece_stop].sum())
