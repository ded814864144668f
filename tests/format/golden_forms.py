"""Comparison of the values in golden files: their types, the bits of numbers, and texts."""

from __future__ import annotations

import array
import enum
import io
import struct
import types
import uuid
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from dcp_remote import Files
from dcp_remote.format.dtypes import ITEM_BYTES
from tests.format.golden_states import Colour, NeedsPickle, Point


def element_bytes(value: torch.Tensor) -> bytes:
    """Return the elements of a tensor in row-major order."""
    plain = value.detach().as_subclass(torch.Tensor)
    return bytes(plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if value.numel() else b""


def _tensor(value: torch.Tensor) -> Any:
    if value.is_nested:
        return list(map(form, value.unbind()))
    properties = (str(value.dtype), str(value.layout), tuple(value.shape), value.requires_grad)
    if value.is_quantized:
        return *properties, str(value.qscheme()), form(value.dequantize())
    return *properties, element_bytes(value) if value.layout == torch.strided else form(value.to_dense())


def _items(value: Any) -> Any:
    # The padding of structures and long doubles has any value.
    is_padded = value.dtype.names is not None or value.dtype.char in "gG"
    return str(value.dtype), value.shape, repr(value.tolist()) if is_padded else value.tobytes()


def _generator(value: np.random.Generator) -> Any:
    seed: Any = value.bit_generator.seed_seq
    return form(value.bit_generator.state), form(getattr(seed, "state", None))


def _mapping(value: dict[Any, Any]) -> Any:
    items = [(form(key), form(inner)) for key, inner in value.items()]
    # A nested state dict may be in another order than the one that was saved.
    return sorted(items, key=repr) if type(value) is dict else items


# By type, of which the first that fits is taken; other values are compared by their `repr`.
_FORMS: dict[type | tuple[type, ...], Callable[[Any], Any]] = {
    torch.Tensor: _tensor,
    (np.ndarray, np.generic): _items,
    np.random.RandomState: lambda value: form(value.get_state(legacy=False)),
    np.random.Generator: _generator,
    torch.Generator: lambda value: value.get_state().numpy().tobytes(),
    uuid.UUID: lambda value: (str(value), value.is_safe.name),
    float: lambda value: struct.pack(">d", value),
    complex: lambda value: struct.pack(">dd", value.real, value.imag),
    defaultdict: lambda value: (repr(value.default_factory), form(dict(value))),
    dict: _mapping,
    (set, frozenset): lambda value: sorted(map(form, value), key=repr),
    deque: lambda value: (value.maxlen, list(map(form, value))),
    (list, tuple): lambda value: list(map(form, value)),
    io.BytesIO: lambda value: (value.getvalue(), value.tell()),
    Files: lambda value: form({name: value[name] for name in value}),
    (types.SimpleNamespace, Namespace, NeedsPickle): lambda value: form(vars(value)),
}


def form(value: Any) -> tuple[str, Any]:
    """Return the type of a value, and its content in a form that can be compared."""
    found = next((content for kind, content in _FORMS.items() if isinstance(value, kind)), repr)
    return type(value).__name__, found(value)


def _array(value: torch.Tensor) -> np.ndarray[Any, Any]:
    name = str(value.dtype).removeprefix("torch.")
    if name == "bfloat16":
        return np.asarray(value.detach().float().numpy())
    size = ITEM_BYTES[name]
    is_known = name in np.sctypeDict and np.dtype(name).itemsize == size
    return np.frombuffer(element_bytes(value), name if is_known else f"uint{8 * size}").reshape(value.shape)


def _array_items(value: array.array[Any]) -> np.ndarray[Any, Any]:
    kind = "f" if value.typecode in "fd" else "i" if value.typecode.islower() else "u"
    return np.frombuffer(value.tobytes(), f"{kind}{value.itemsize}")


def _member(value: enum.Enum) -> str:
    name = value.name if isinstance(value, Colour) else hex(value.value)
    return f"{type(value).__module__}.{type(value).__qualname__}.{name}"


# By type: function that returns the value as the reader without torch returns it.
_READ: dict[type | tuple[type, ...], Callable[[Any], Any]] = {
    torch.Tensor: _array,
    Files: lambda value: {name: value[name] for name in value},
    np.random.RandomState: lambda value: as_read(value.get_state(legacy=False)),
    np.random.Generator: lambda value: as_read(value.bit_generator.state),
    torch.Generator: lambda value: value.get_state().numpy().tobytes(),
    Point: lambda value: value._asdict(),
    enum.Enum: _member,
    Path: PurePosixPath,
    torch.Size: tuple,
    (torch.dtype, torch.layout, torch.device): lambda value: str(value).removeprefix("torch."),
    (np.longdouble, np.clongdouble): complex,
    np.str_: str,
    np.bytes_: bytes,
    array.array: _array_items,
    Namespace: lambda value: types.SimpleNamespace(**vars(value)),
}


def as_read(value: Any) -> Any:
    """Return a value as the reader without torch returns it."""
    convert = next((convert for kind, convert in _READ.items() if isinstance(value, kind)), None)
    if convert is not None:
        return convert(value)
    if type(value) in (dict, OrderedDict):
        return type(value)((as_read(key), as_read(inner)) for key, inner in value.items())
    return type(value)(map(as_read, value)) if type(value) in (list, tuple, set) else value
