"""Tags of torch: tensors, types, and random number generators.

A tensor is stored C-contiguous and little-endian, bit for bit; its strides are not kept. Large contiguous tensors are
not copied, neither when they are encoded nor when they are decoded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dcp_remote.errors import UnsupportedFormatError
from dcp_remote.format.columns import to_base64
from dcp_remote.format.dtypes import ITEM_BYTES
from dcp_remote.format.json_tree import (
    INT_MAX,
    Decoder,
    Encoder,
    Json,
    NotEncodableError,
    Tag,
    bounded,
    expect,
    fields,
    from_base64,
)
from dcp_remote.serialization.numpy_tags import DIMENSIONS_MAX, decode_exact_data, decode_shape, should_share_memory

_DTYPES: dict[str, torch.dtype] = {
    name: dtype for name in ITEM_BYTES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
# Without quantized dtypes, whose tensors have a scale beside their bytes.
_PLAIN_DTYPES = {name: dtype for name, dtype in _DTYPES.items() if not name.startswith(("qint", "quint"))}
_LAYOUTS: dict[str, torch.layout] = {
    name: getattr(torch, name)
    for name in ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged")
}


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Return True if elements of a plain strided tensor have no memory: freed, as FSDP does, or never allocated.

    torch does not check this: it would read beyond the end of the storage, or crash.
    """
    if not tensor.numel() or tensor.device.type not in ("cpu", "cuda"):
        return False
    if tensor._is_zerotensor():
        return True
    span = tensor.numel()
    if not tensor.is_contiguous():
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    stop = tensor.storage_offset() + span
    return stop * tensor.element_size() > tensor.untyped_storage().nbytes()


def _is_dense_on_cpu(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.dim() <= DIMENSIONS_MAX
        and _short_name(tensor.dtype) in _PLAIN_DTYPES
    )


def _short_name(value: torch.dtype | torch.layout) -> str:
    return str(value).removeprefix("torch.")


def _encode_tensor(encoder: Encoder, value: torch.Tensor) -> Json:
    if not _is_dense_on_cpu(value):
        raise NotEncodableError("is not a plain dense CPU tensor")
    if lacks_memory(value):
        raise NotEncodableError("its memory was freed or never allocated")
    if vars(value):
        raise NotEncodableError("has instance attributes")
    storage = value.untyped_storage()
    if storage.nbytes():
        # Claimed by storage, because a change through one of two views is seen through the other.
        encoder.claim(("storage", storage.data_ptr()), value)
    try:
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    except RuntimeError as error:
        raise NotEncodableError(f"torch gives no access to its bytes: {error}") from error
    return {
        "dtype": _short_name(value.dtype),
        "shape": list(value.shape),
        "requires_grad": value.requires_grad,
        "data": encoder.data(memoryview(data)),  # type: ignore[arg-type]  # a buffer
    }


def _decode_tensor(decoder: Decoder, encoded: Json) -> torch.Tensor:
    name, sizes, requires_grad, data = fields(encoded, "dtype", "shape", "requires_grad", "data")
    dtype, shape = _find_by_name(decoder, _PLAIN_DTYPES, name), decode_shape(sizes)
    buffer = decode_exact_data(decoder, data, shape=shape, item_bytes=dtype.itemsize, is_boolean=dtype is torch.bool)
    content = np.frombuffer(buffer, dtype=np.uint8)
    if should_share_memory(buffer) and content.ctypes.data % dtype.itemsize == 0:
        tensor = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype, device="cpu", requires_grad=False)
        if content.size:
            # Written through numpy, because torch implements no copy for some of its dtypes.
            tensor.reshape(-1).view(torch.uint8).numpy()[:] = content
    return tensor.requires_grad_() if expect(requires_grad, bool) else tensor


def _decode_parameter(decoder: Decoder, encoded: Json) -> torch.nn.Parameter:
    tensor = _decode_tensor(decoder, encoded)
    return torch.nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)


def _named_tag(name: str, kind: type, known: dict[str, Any]) -> Tag:
    """Return the tag of constants of torch."""

    def encode(_: Encoder, value: torch.dtype | torch.layout) -> Json:
        if _short_name(value) not in known:
            raise NotEncodableError("is not known to this version of dcp_remote")
        return _short_name(value)

    return Tag(name, kind, encode, lambda decoder, encoded: _find_by_name(decoder, known, encoded))


def _find_by_name(decoder: Decoder, names: dict[str, Any], encoded: Json) -> Any:
    found = names.get(expect(encoded, str))
    if found is None:
        raise UnsupportedFormatError(
            "A stored object names a type that this version of torch does not have.", key=decoder.key, name=encoded
        )
    return found


def _encode_torch_generator(_: Encoder, value: torch.Generator) -> Json:
    if value.device.type != "cpu":
        # The state fits only a device of this kind, which the process that loads the checkpoint may not have.
        raise NotEncodableError(f"is on {value.device}; store its get_state()")
    return to_base64(value.get_state().numpy().tobytes())


def _decode_torch_generator(_: Decoder, encoded: Json) -> torch.Generator:
    generator = torch.Generator(device="cpu")
    generator.set_state(torch.frombuffer(bytearray(from_base64(encoded)), dtype=torch.uint8))
    return generator


def _decode_size(_: Decoder, encoded: Json) -> torch.Size:
    return torch.Size([bounded(size, -INT_MAX - 1, INT_MAX) for size in expect(encoded, list)])


TORCH_TAGS: tuple[Tag, ...] = (
    Tag("$torch.Tensor", torch.Tensor, _encode_tensor, _decode_tensor, mutable=True),
    Tag("$torch.Parameter", torch.nn.Parameter, _encode_tensor, _decode_parameter, mutable=True),
    Tag("$torch.Size", torch.Size, lambda _, value: list(value), _decode_size),
    _named_tag("$torch.dtype", torch.dtype, _DTYPES),
    _named_tag("$torch.layout", torch.layout, _LAYOUTS),
    Tag(
        "$torch.device",
        torch.device,
        lambda _, value: str(value),
        lambda _, encoded: torch.device(expect(encoded, str)),
    ),
    Tag("$torch.Generator", torch.Generator, _encode_torch_generator, _decode_torch_generator, mutable=True),
)
