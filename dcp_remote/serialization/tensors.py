"""Encoding of tensors as bytes and decoding: row-major, little-endian, without a copy where the memory allows it.

Elements are moved as integers of the same size (the *carrier* dtype), because torch implements no copy for many of its
dtypes, but can view all of them as integers. For floats this also keeps the bits of every NaN.
"""

from __future__ import annotations

import math
import mmap
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from dcp_remote.common.geometry import Box, boxes_of_run
from dcp_remote.common.units import MiB
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, UnsupportedFormatError
from dcp_remote.format.dtypes import ITEM_BYTES
from dcp_remote.format.manifest import RAW
from dcp_remote.serialization.objects import EncodedObject, Encoding, decode_object, encode_saved
from dcp_remote.serialization.torch_streams import save
from dcp_remote.serialization.torch_tags import lacks_memory

# Copies from this size on get a memory mapping of their own. glibc raises its mmap threshold with each freed block, up
# to 32 MiB, and keeps smaller blocks in each thread's arena: 60 copies of 12 MB, 64 MiB at a time, held 414 MiB.
_OWN_MAPPING_BYTES = 1 * MiB

# Classes of tensors whose elements are their whole content.
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

# Memory formats by their names in a manifest.
MEMORY_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve": torch.preserve_format,
}

# Dtypes that numpy knows; not all, but those of most tensors.
_NUMPY_DTYPES = {torch.float32, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}

# Dimensions that the arrays of numpy 1 can have.
_NUMPY_DIMENSIONS_MAX = 32

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name, such as `torch.float32` for `float32`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedFormatError(
            "This version of torch lacks a dtype of the checkpoint. Load with a newer torch.",
            dtype=name,
            torch=str(torch.__version__),
        )
    return dtype


def choose_encoding(name: str, tensor: torch.Tensor, *, allow_pickle: bool) -> tuple[str, bytes]:
    """Return how a tensor is stored: as its elements, with no bytes, or as a `torch.save` stream if it is more.

    The elements of a plain strided tensor are not read.

    Raises:
        InvalidArgumentError: The tensor has no data (on the meta device, fake, or freed), has a dtype that this version
            of dcp_remote does not know, or is refused by `torch.save`.
        UnsafeObjectError: The tensor's stream needs code to load, as that of a subclass may, and `allow_pickle` is
            False.
    """
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
                "A tensor has no data to save: its memory was freed or never allocated.", tensor=name
            )
        return RAW, b""
    try:
        stream = save(tensor.detach())
    except Exception as error:
        raise InvalidArgumentError(
            "A tensor cannot be stored: torch.save refuses it.",
            tensor=name,
            type=f"{type(tensor).__module__}.{type(tensor).__qualname__}",
            cause=error,
        ) from error
    encoded = encode_saved(name, tensor, stream, allow_pickle=allow_pickle)
    return encoded.encoding, stream


def decode_tensor(
    name: str, encoding: str, data: memoryview, *, dtype: str, sizes: tuple[int, ...], allow_pickle: bool
) -> torch.Tensor:
    """Decode the `torch.save` stream of a tensor that `choose_encoding` wrote; the tensor is on the CPU.

    Raises:
        CorruptCheckpointError: The stream is damaged, or does not hold a tensor of this dtype and these sizes.
        UnsafeObjectError: The stream needs code to load and `allow_pickle` is False.
    """
    # Cast without a check, because `manifest_validation` refuses all other encodings.
    value = decode_object(name, EncodedObject(cast("Encoding", encoding), b"", (data,)), allow_pickle=allow_pickle)
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != sizes or dtype_name(value.dtype) != dtype:
        raise CorruptCheckpointError(
            "A stored stream does not hold a tensor of the dtype and shape in the manifest.",
            tensor=name,
            type=type(value).__name__,
            dtype=dtype,
            shape=sizes,
        )
    return value


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is strided and of a class whose elements are its whole content."""
    return type(tensor) in PLAIN_TYPES and tensor.layout == torch.strided


def unwrap_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor that is all that one of torchao's wrappers holds, in the same memory; also a DTensor's.

    Such wrappers change how their elements are used, as those of its float8 training under FSDP do. A tensor of any
    other class is returned itself: its elements may be computed, or not be there before a collective has ended.
    """
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if not type(local).__module__.startswith("torchao.") or not hasattr(local, "__tensor_flatten__"):
        return tensor
    # The scale follows from the elements.
    names = [name for name in local.__tensor_flatten__()[0] if name != "_precomputed_scale"]
    if len(names) != 1:
        return tensor
    inner: torch.Tensor = getattr(local, names[0])
    if not is_plain(inner) or (inner.dtype, inner.shape) != (local.dtype, local.shape):
        return tensor
    if not isinstance(tensor, DTensor):
        return inner
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(
        inner, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ).detach()


def has_memory(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is plain, not empty, and not on the meta device."""
    return is_plain(tensor) and tensor.numel() > 0 and not tensor.is_meta


def memory_of(value: object) -> tuple[object, ...] | None:
    """Return what identifies the elements of a tensor, or of a DTensor on this rank; None of a value without memory.

    Equal for two tensors that are one, as tied weights are.
    """
    local = value.to_local() if isinstance(value, DTensor) else value
    if not isinstance(local, torch.Tensor) or not has_memory(local):
        return None
    return local.device, local.data_ptr(), local.dtype, local.shape, local.stride()


def needs_copy(tensor: torch.Tensor) -> bool:
    """Return True if `element_bytes` must copy: not contiguous, not on the CPU, or a conjugated or negated view."""
    return tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg()


def element_bytes(tensor: torch.Tensor, start: int, stop: int) -> memoryview:
    """Return the bytes of elements `start` to `stop` (exclusive) in row-major order.

    The result is a view of the tensor's memory unless `needs_copy`, and then a copy of just these elements.
    """
    if not needs_copy(tensor):
        return byte_view(tensor)[start * tensor.element_size() : stop * tensor.element_size()]
    copy = _allocate_copy((stop - start) * tensor.element_size())
    copy_elements(tensor, start, stop, into=copy)
    return byte_view(copy)


def copy_elements(
    tensor: torch.Tensor, start: int, stop: int, *, into: torch.Tensor, non_blocking: bool = False
) -> None:
    """Copy elements `start` to `stop` (exclusive) in row-major order, from any device.

    `into` is uint8, on the CPU, of exactly the size of the elements and aligned for them. `non_blocking` returns before
    the copy has ended, if `into` is pinned.
    """
    tensor = tensor.detach()
    copy = into.view(_CARRIERS[tensor.element_size()])
    for first, box in boxes_of_run(tuple(tensor.shape), start, stop):
        part = view_as_integers(narrow(tensor, box).resolve_conj().resolve_neg())
        destination = copy[first - start : first - start + box.elements].view(box.sizes)
        destination.copy_(part, non_blocking=non_blocking)


def _allocate_copy(size_bytes: int) -> torch.Tensor:
    """Allocate memory for a copy; a large one is returned to the system as soon as it is freed."""
    if size_bytes < _OWN_MAPPING_BYTES:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")  # not the user's default device
    return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes; writing to the view writes to the tensor."""
    if tensor.numel() == 0:
        return memoryview(b"")
    # Detached, so that the view keeps this memory if the tensor is given another; the numpy array forbids resizing it.
    if tensor.dtype in _NUMPY_DTYPES and tensor.dim() <= _NUMPY_DIMENSIONS_MAX:
        numbers: Any = tensor.detach().numpy()
        return memoryview(numbers).cast("B")  # takes 3 us, and the way below 8
    # `as_strided`, because a dimension of one element may have any stride: `view` refuses it and `reshape` keeps it.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    array: object = flat.view(torch.uint8).numpy()
    return memoryview(array)  # type: ignore[arg-type]  # numpy's arrays are buffers; its stubs say so from Python 3.12 on


def view_as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor as integers of its element size (complex128 for 16 bytes)."""
    return tensor.view(_CARRIERS[tensor.element_size()])


def narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a view of the part of a tensor that a box covers."""
    for dimension, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, offset, size)
    return tensor


def empty_tensor(dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return a contiguous CPU tensor of any dtype; for quantized dtypes, `torch.empty` would return a broken one."""
    return torch.empty(sizes, dtype=_CARRIERS[dtype.itemsize], device="cpu").view(dtype)


def tensor_from(data: memoryview, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor over bytes that hold exactly its elements; copies the bytes only if they are not aligned."""
    carrier = _CARRIERS[dtype.itemsize]
    assert len(data) == math.prod(sizes) * dtype.itemsize
    flat = torch.frombuffer(data, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(carrier).view(dtype).view(sizes)


def copy_into(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy elements bit for bit, or with conversion if the destination has another dtype."""
    destination = destination.detach()
    if destination.dtype == source.dtype and not destination.is_conj() and not destination.is_neg():
        view_as_integers(destination).copy_(view_as_integers(source))
    else:
        destination.copy_(source)
