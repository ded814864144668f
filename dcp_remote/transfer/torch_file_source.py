"""TorchFileSource: a file of `torch.save`, of which only the layout is loaded; tensors are read by ranges."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import IO, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException

from dcp_remote.common.geometry import Box
from dcp_remote.common.units import MiB
from dcp_remote.errors import CorruptCheckpointError, DcpRemoteError, InvalidArgumentError, UnsafeObjectError
from dcp_remote.format.json_tree import DEPTH_MAX
from dcp_remote.serialization.pickle_validator import UnsafeStreamError, validate_program
from dcp_remote.serialization.tensors import tensor_from
from dcp_remote.transfer.checkpoint import size_of
from dcp_remote.transfer.ranges import FileRange, RangeFile, RangeReader, cut_pieces, first_element, require_shape

_ZIP = b"PK\x03\x04"

# Values of a pickle, shared ones each time, and characters of the names that paths of keys become: a few on top for
# each byte, since a reference of two bytes may stand for a list of several values, or for a long key.
_VALUES_MAX, _VALUES_PER_BYTE_MAX = 10_000, 8
_NAME_CHARACTERS_MAX, _NAME_CHARACTERS_PER_BYTE_MAX = 1 * MiB, 16

# Alignment of storages, in bytes; torch divides by it, and writes 64.
_ALIGNMENT_MAX = 1 * MiB

# Storages whose places are read, and not only computed from the directory: a GET of a block for each.
_SMALL_BYTES_MAX = 1 * MiB

_INSTEAD = "Load it by torch.load, and save its dict by CheckpointManager."


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Place of a tensor in a stream of `torch.save`.

    Attributes:
        start: First byte of the storage, counted from the beginning of the stream.
        length: Size of the storage in bytes.
        first: Number of the storage's element at which the tensor begins.
        shape: Shape.
        strides: Strides, in elements.
        dtype: dtype.
    """

    start: int
    length: int
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_contiguous(self) -> bool:
        """True if the elements lie one after another in row-major order."""
        return torch.empty_strided(self.shape, self.strides, device="meta").is_contiguous()


@dataclass(frozen=True, slots=True)
class Layout:
    """Value of a stream of `torch.save`, with tensors that have no memory.

    Attributes:
        value: Value.
        sizes: Size in bytes of each storage in the stream, by its first byte.
        details: URL and file, for messages.
    """

    value: Any
    sizes: Mapping[int, int]
    details: Mapping[str, Any]


def load_layout(reader: RangeReader, span: FileRange) -> Layout:
    """Return the layout of a stream; two to five GETs of 64 KiB, and one per storage above 1 MiB.

    The pickle is validated, as that of a stream of dcp_remote is, and loaded by torch's restricted unpickler, which in
    torch's mode of fake tensors reads no storage, and tells their places.

    Raises:
        UnsafeObjectError: An object needs code to load.
        InvalidArgumentError: The stream has tensors that torch cannot load without memory, compressed records, another
            byte order, or values that `require_walkable` refuses.
        CorruptCheckpointError: The stream is damaged.
    """
    details = {"url": reader.store.url, "file": span.file}
    try:
        with io.BufferedReader(RangeFile(reader, span)) as stream:
            found = _list_records(stream, span.length, details)
            stream.seek(0)
            records: Any = torch._C.PyTorchFileReader(stream)  # typed in part
            sizes = _find_storages(records, found, details)
            program = records.get_record("data.pkl")
            validate_program(program, {one.filename.partition("/")[2]: one.file_size for one in found})
            stream.seek(0)
            with FakeTensorMode():
                value = torch.load(stream, map_location="cpu", weights_only=True)
            require_walkable(value, len(program), **details)
            return Layout(value, sizes, details)
    except (DcpRemoteError, MemoryError):
        raise
    except UnsafeStreamError as error:
        if error.type_names[0].startswith("pickle "):
            raise InvalidArgumentError(
                f"A file of torch.save has a pickle that is none of torch's own, such as one of protocol 4. {_INSTEAD}",
                **details,
                found=error.type_names[0],
            ) from error
        raise UnsafeObjectError(
            "An object in a file of torch.save needs code to load, which an import never runs. If you trust the file, "
            "load it by torch.load(weights_only=False), and save its dict by CheckpointManager.",
            **details,
            type=error.type_names[0],
            cause=error,
        ) from error
    except (NotImplementedError, UnsupportedOperatorException, AssertionError) as error:  # asserted for nested tensors
        raise InvalidArgumentError(
            f"A file of torch.save has a tensor that is no plain one, such as a quantized one. {_INSTEAD}", **details
        ) from error
    except Exception as error:
        # A damaged zip or pickle may raise anything.
        raise CorruptCheckpointError(
            "A file of torch.save is damaged, or is one of another tool, such as TorchScript. Copy it once more, or "
            "load it by its own tool.",
            **details,
            cause=error,
        ) from error


def _list_records(stream: IO[bytes], length: int, details: Mapping[str, Any]) -> list[zipfile.ZipInfo]:
    """Return the records of a zip, before torch reads any: a compressed one of a kilobyte may become a gigabyte."""
    with zipfile.ZipFile(stream) as archive:
        found = archive.infolist()
    if any(one.compress_type != zipfile.ZIP_STORED or one.file_size != one.compress_size for one in found):
        raise InvalidArgumentError(
            f"A file has compressed records, as TorchScript and other tools than torch.save pack them. {_INSTEAD}",
            **details,
        )
    if sum(one.file_size for one in found) > length:
        raise ValueError("records overlap")
    return found


def _find_storages(records: Any, found: Sequence[zipfile.ZipInfo], details: Mapping[str, Any]) -> dict[int, int]:
    """Return the sizes of the storages in a stream by their first bytes."""
    order = records.get_record("byteorder") if records.has_record("byteorder") else None
    if order in {b"little", b"big"} - {sys.byteorder.encode()}:
        # torch would swap the bytes of tensors that have no memory, and crash the process.
        raise InvalidArgumentError(
            f"A file of torch.save comes from a machine with another order of bytes. {_INSTEAD}", **details
        )
    alignment = int(records.get_record(".storage_alignment")) if records.has_record(".storage_alignment") else None
    if alignment is not None and (not 0 < alignment <= _ALIGNMENT_MAX or alignment & (alignment - 1)):
        raise ValueError(f"an alignment of {alignment} bytes")
    # By its first bytes, where torch.load finds a storage without reading it.
    sizes: dict[int, int] = {}
    for one in found:
        if "/data/" not in one.filename:
            continue
        name, size_bytes = one.filename.partition("/")[2], one.file_size
        if alignment is None or size_bytes > _SMALL_BYTES_MAX:
            sizes[records.get_record_offset(name)] = size_bytes
        else:
            sizes[records.get_record_offset_no_read(one.header_offset, name, size_bytes, alignment)] = size_bytes
    return sizes


def require_walkable(value: object, stream_bytes: int, **details: object) -> None:
    """Check that a value can be walked, and its parts be named, in time and memory proportional to its pickle.

    Args:
        value: Value, of which dicts, lists, tuples and dataclasses are walked.
        stream_bytes: Length of the pickle, in bytes.
        details: Details of the error.

    Raises:
        InvalidArgumentError: The value is nested too deeply, or repeats values or long keys too often.
    """
    error = InvalidArgumentError(
        f"A pickle nests dicts and lists deeper than {DEPTH_MAX}, or in themselves, or contains the same ones, or long "
        "keys, again and again. Load it by torch, and save what is needed by CheckpointManager.",
        **details,
    )
    values_left = _VALUES_MAX + _VALUES_PER_BYTE_MAX * stream_bytes
    characters_left = _NAME_CHARACTERS_MAX + _NAME_CHARACTERS_PER_BYTE_MAX * stream_bytes
    left: list[tuple[Any, int, int]] = [(value, 0, 0)]
    while left:
        parent, depth, length = left.pop()
        if depth > DEPTH_MAX:
            raise error
        is_named = isinstance(parent, Mapping)
        if is_dataclass(parent) and not is_named:
            parent = getattr(parent, "__dict__", {})
        elif isinstance(parent, list):  # torch's planner takes a list of plain values for one value
            is_named = any(isinstance(child, (Mapping, list, torch.Tensor)) for child in parent)
        elif not isinstance(parent, (Mapping, tuple)):
            continue
        values_left -= len(parent)
        if values_left < 0:
            raise error
        for key, child in parent.items() if isinstance(parent, Mapping) else enumerate(parent):
            if is_dataclass(key):  # an index of torch's metadata, which may be endless, and becomes no name
                left.append((key, depth + 1, 0))
                text = ""
            else:
                text = key if isinstance(key, str) else str(key)
            child_length = length + 1 + len(text)
            characters_left -= child_length if is_named else 0
            if characters_left < 0:
                raise error
            left.append((child, depth + 1, child_length))


def find_stored(value: object, layout: Layout) -> StoredTensor | None:
    """Return the place of a tensor of a layout; None of a value that its elements alone do not describe.

    Raises:
        CorruptCheckpointError: Elements lie outside the storage.
        InvalidArgumentError: The tensor is larger than a checkpoint can hold.
    """
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
        return None
    storage = value.untyped_storage()
    start = getattr(storage, "_checkpoint_offset", None)  # set by torch.load, for readers like this one
    size_bytes = layout.sizes.get(start) if isinstance(start, int) else None
    if not isinstance(start, int) or size_bytes is None or value.is_conj() or value.is_neg():
        return None
    require_shape(value.shape, value.dtype, **layout.details)
    stored = StoredTensor(
        start=start,
        length=size_bytes - size_bytes % value.dtype.itemsize,
        first=int(value.storage_offset()),
        shape=tuple(map(int, value.shape)),
        strides=tuple(map(int, value.stride())),
        dtype=value.dtype,
    )
    # Not by the size of torch's storage, which torch enlarges to what a tensor needs.
    last = stored.first + sum((size - 1) * step for size, step in zip(stored.shape, stored.strides, strict=True))
    is_inside = stored.first >= 0 and (last + 1) * stored.dtype.itemsize <= size_bytes
    if min(stored.strides, default=0) < 0 or (value.numel() and not is_inside):
        raise CorruptCheckpointError(
            "A file of torch.save is damaged: a tensor has elements outside its storage. Copy it once more.",
            **layout.details,
            shape=stored.shape,
            strides=stored.strides,
            first=stored.first,
            storage_bytes=size_bytes,
        )
    return stored


class TorchFileSource:
    """State dict of `torch.save` as `model`, or a dict of several values under their own keys.

    Args:
        reader: Reader of the file's folder.
        file: Key of the file.
        piece_bytes_max: Bytes of a tensor that are read at once; one that is not contiguous is read whole.
    """

    kind = "torch.save"

    def __init__(self, reader: RangeReader, file: str, *, piece_bytes_max: int) -> None:
        """Load the layout of the file."""
        self.url = reader.store.url
        self.reader, self._file, self._piece_bytes_max = reader, file, piece_bytes_max
        size_bytes = reader.sizes[file]
        (head,) = reader.read([FileRange(file, 0, min(size_bytes, len(_ZIP)))])
        if head != _ZIP:
            raise InvalidArgumentError(
                "The file is none of safetensors, and none of torch.save in the format of torch 1.6 and later. If it "
                "is an older one, load it by torch.load, and save it once more.",
                url=reader.store.url,
                file=file,
            )
        self._layout = load_layout(reader, FileRange(file, 0, size_bytes))
        value = self._layout.value
        if not isinstance(value, dict) or not value:
            raise InvalidArgumentError(
                "The file holds no dict of tensors.", url=reader.store.url, file=file, type=type(value).__qualname__
            )
        is_state_dict = all(isinstance(one, torch.Tensor) for one in value.values())
        self._stored: dict[str, StoredTensor] = {}
        self.state: dict[str, Any] = self._replace({"model": dict(value)} if is_state_dict else dict(value), ())

    def pieces(self, name: str) -> Sequence[Box]:
        """Return boxes that are each contiguous in the file; the whole tensor if none is."""
        stored = self._stored[name]
        box = Box((0,) * len(stored.shape), stored.shape)
        return cut_pieces(box, stored.dtype, piece_bytes_max=self._piece_bytes_max) if stored.is_contiguous else [box]

    def read_bytes(self, name: str, box: Box) -> int:
        """Return the size of the box, or of the whole storage."""
        stored = self._stored[name]
        return size_of(box, stored.dtype) if stored.is_contiguous else stored.length

    def read(self, parts: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        """Return the values of boxes; one GET per box and 8 MiB."""
        found = [self._stored[name] for name, _ in parts]
        ranges = [
            stored_range(FileRange(self._file, 0, self.reader.sizes[self._file]), one, box)
            for one, (_, box) in zip(found, parts, strict=True)
        ]
        return [
            restore(one, box, data) for one, (_, box), data in zip(found, parts, self.reader.read(ranges), strict=True)
        ]

    def _replace(self, value: Any, path: tuple[str, ...], *, is_read: bool = False) -> Any:
        """Return a value with tensors on the meta device, and note their places by their names.

        Tensors in a tuple, which torch's planner takes for one object, are read.
        """
        if isinstance(value, dict):
            return {key: self._replace(one, (*path, str(key)), is_read=is_read) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            is_read = is_read or isinstance(value, tuple)
            found = [self._replace(one, (*path, str(n)), is_read=is_read) for n, one in enumerate(value)]
            return tuple(found) if isinstance(value, tuple) else found
        if not isinstance(value, torch.Tensor):
            return value
        stored, name = find_stored(value, self._layout), ".".join(path)
        if stored is None or stored.start + stored.length > self.reader.sizes[self._file]:
            raise InvalidArgumentError(
                f"A tensor of the file is no plain one, or another tool than torch has packed the file. {_INSTEAD}",
                file=self._file,
                tensor=name,
                layout=value.layout,
            )
        self._stored[name] = stored
        if is_read:
            return self.read([(name, Box((0,) * len(stored.shape), stored.shape))])[0]
        return torch.empty(stored.shape, dtype=stored.dtype, device="meta")


def stored_range(span: FileRange, stored: StoredTensor, box: Box) -> FileRange:
    """Return the bytes of a box of a stored tensor; of one that is not contiguous those of the storage."""
    item = stored.dtype.itemsize
    if not stored.is_contiguous:
        return FileRange(span.file, span.start + stored.start, stored.length)
    first = stored.first + first_element(stored.shape, box.offsets)
    return FileRange(span.file, span.start + stored.start + first * item, box.elements * item)


def restore(stored: StoredTensor, box: Box, data: memoryview) -> torch.Tensor:
    """Return the values of a box, of the bytes that `stored_range` names."""
    if not box.elements:
        return torch.empty(box.sizes, dtype=stored.dtype)
    if stored.is_contiguous:
        return tensor_from(data, stored.dtype, box.sizes)
    flat = tensor_from(data, stored.dtype, (stored.length // stored.dtype.itemsize,))
    try:
        return flat.as_strided(stored.shape, stored.strides, stored.first).contiguous()
    except RuntimeError as error:
        raise InvalidArgumentError(
            "An expanded tensor of the source does not fit into the memory of this process.", shape=stored.shape
        ) from error
