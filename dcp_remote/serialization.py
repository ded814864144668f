"""Tensors to bytes and back: row-major, little-endian, without a copy where the memory allows it.

Elements are moved as integers of their size (the *carrier*): many of torch's dtypes have no arithmetic and no copy of
their own, but all of them can be viewed so. For floats that also keeps the bits of every NaN.
"""

from __future__ import annotations

import io
import math
import mmap
import sys
from typing import cast

import torch
from torch._subclasses.fake_tensor import FakeTensor

from dcp_remote.dtypes import ITEM_BYTES
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, UnsupportedFormatError
from dcp_remote.manifest import RAW
from dcp_remote.object_torch import lacks_memory
from dcp_remote.objects import EncodedObject, Encoding, decode_object, encode_stream
from dcp_remote.ranges import Box, MiB, boxes_of_run

# glibc raises the size from which it asks the system for memory with each block that is freed, up to 32 MiB, and keeps
# what is below in each thread's arena: 60 copies of 12 MB, claimed 64 MiB at a time, held 414 MiB.
_OWN_MAPPING_BYTES = 1 * MiB

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """`torch.float32` for `float32`.

    Raises:
        UnsupportedFormatError: This torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedFormatError(
            "This version of torch does not have a dtype of the checkpoint. Load with a newer torch.",
            dtype=name,
            torch=str(torch.__version__),
        )
    return dtype


def encoding_of(name: str, tensor: torch.Tensor, *, allow_pickle: bool) -> tuple[str, bytes]:
    """How a tensor is stored: as its elements, or as a `torch.save` stream where those do not say everything.

    Args:
        name: For the error.
        tensor: Any; of a strided layout, its elements are not touched.
        allow_pickle: Take streams that need code to load.

    Returns:
        The encoding, and the stream; no stream where the elements are stored.

    Raises:
        InvalidArgumentError: A tensor without data (on the meta device, fake, or freed), of a dtype that is not known
            here, or that `torch.save` refuses; or a host that is not little-endian.
        UnsafeObjectError: A tensor subclass whose stream needs code to load.
    """
    if sys.byteorder != "little":
        raise InvalidArgumentError(
            "Checkpoints are little-endian; this host is not supported.", byteorder=sys.byteorder
        )
    if dtype_name(tensor.dtype) not in ITEM_BYTES:
        raise InvalidArgumentError(
            "This version of dcp_remote cannot store a dtype of this torch; upgrade dcp_remote.",
            tensor=name,
            dtype=dtype_name(tensor.dtype),
        )
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        raise InvalidArgumentError(
            "A tensor on the meta device has no data to save; materialize the module first.", tensor=name
        )
    if is_plain(tensor) and not tensor.is_quantized and not tensor.is_nested:
        if lacks_memory(tensor):
            raise InvalidArgumentError(
                "A tensor has no data to save: its memory was freed, or it never had any.", tensor=name
            )
        return RAW, b""
    stream = io.BytesIO()
    try:
        torch.save(tensor.detach(), stream)
    except Exception as error:
        raise InvalidArgumentError(
            "A tensor cannot be stored: torch.save does not take it.",
            tensor=name,
            type=f"{type(tensor).__module__}.{type(tensor).__qualname__}",
            cause=error,
        ) from error
    encoded = encode_stream(name, stream.getvalue(), allow_pickle=allow_pickle, tagged=False)
    return encoded.encoding, encoded.data


def decode_tensor(
    name: str, encoding: str, data: memoryview, *, dtype: str, sizes: tuple[int, ...], allow_pickle: bool
) -> torch.Tensor:
    """The tensor of a stream that `encoding_of` made; on the CPU.

    Raises:
        CorruptCheckpointError: The stream is damaged, or holds no tensor of this dtype and these sizes.
        UnsafeObjectError: It needs code to load and `allow_pickle` is False.
    """
    # `manifest_check` knows only encodings of objects, and "raw".
    value = decode_object(name, EncodedObject(cast("Encoding", encoding), b"", (data,)), allow_pickle=allow_pickle)
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != sizes or dtype_name(value.dtype) != dtype:
        raise CorruptCheckpointError(
            "What is stored as a tensor is none of its dtype and shape.",
            tensor=name,
            type=type(value).__name__,
            dtype=dtype,
            shape=sizes,
        )
    return value


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided and of no subclass that could mean anything else by its elements."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.layout == torch.strided


def is_copied(tensor: torch.Tensor) -> bool:
    """Whether `run_bytes` has to copy: not contiguous, not on the CPU, or a lazily conjugated or negated view."""
    return tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg()


def run_bytes(tensor: torch.Tensor, start: int, stop: int) -> memoryview:
    """The bytes of elements `start` to `stop` in row-major order.

    A view of the tensor's memory where that is possible (see `is_copied`), otherwise a copy of just these elements.
    """
    if not is_copied(tensor):
        return byte_view(tensor)[start * tensor.element_size() : stop * tensor.element_size()]
    copy = _private((stop - start) * tensor.element_size())
    copy_run(tensor, start, stop, into=copy)
    return byte_view(copy)


def copy_run(tensor: torch.Tensor, start: int, stop: int, *, into: torch.Tensor, non_blocking: bool = False) -> None:
    """Copy elements `start` to `stop` in row-major order.

    Args:
        tensor: On any device.
        start: First element.
        stop: After the last.
        into: As many bytes, on the CPU, aligned for the elements; uint8.
        non_blocking: Do not wait until they have arrived, if `into` is pinned.
    """
    tensor = tensor.detach()
    copy = into.view(_CARRIERS[tensor.element_size()])
    for first, box in boxes_of_run(tuple(tensor.shape), start, stop):
        part = as_carrier(narrow(tensor, box).resolve_conj().resolve_neg())
        place = copy[first - start : first - start + box.elements].view(box.sizes)
        place.copy_(part, non_blocking=non_blocking)


def _private(size_bytes: int) -> torch.Tensor:
    """Memory for a copy; what is large goes back to the system when it is done with, whatever malloc would keep."""
    if size_bytes < _OWN_MAPPING_BYTES:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")  # whatever the user's default device is
    return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, as bytes; writing to it writes to the tensor."""
    if tensor.numel() == 0:
        return memoryview(b"")
    # Detached, it keeps the memory, whatever memory the tensor is given meanwhile; numpy forbids to resize it.
    # A dimension of one element may have any stride, and `reshape` keeps it where `view` refuses it.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    array: object = flat.view(torch.uint8).numpy()
    return memoryview(array)  # type: ignore[arg-type]  # numpy's arrays are buffers; its stubs say so from Python 3.12 on


def as_carrier(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers of their size; a view."""
    return tensor.view(_CARRIERS[tensor.element_size()])


def narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of a tensor that a box covers; a view."""
    for dimension, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, offset, size)
    return tensor


def empty_tensor(dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
    """A contiguous CPU tensor of any dtype; `torch.empty` makes a broken quantized one of the names of those."""
    return torch.empty(sizes, dtype=_CARRIERS[dtype.itemsize], device="cpu").view(dtype)


def tensor_from(data: memoryview, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
    """A tensor over bytes that hold exactly its elements; copies them only if they are not aligned."""
    carrier = _CARRIERS[dtype.itemsize]
    assert len(data) == math.prod(sizes) * dtype.itemsize
    flat = torch.frombuffer(data, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(carrier).view(dtype).view(sizes)


def copy_into(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy elements bit for bit, or converting where the destination is of another dtype."""
    destination = destination.detach()
    if destination.dtype == source.dtype and not destination.is_conj() and not destination.is_neg():
        as_carrier(destination).copy_(as_carrier(source))
    else:
        destination.copy_(source)
