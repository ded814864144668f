"""TorchFileSource: a file of `torch.save`, of which only the layout is loaded; tensors are read by ranges."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import IO, Any

import torch

from dcp_remote.common.geometry import Box
from dcp_remote.common.units import MiB
from dcp_remote.errors import CorruptCheckpointError, DcpRemoteError, InvalidArgumentError, UnsafeObjectError
from dcp_remote.format.json_tree import DEPTH_MAX
from dcp_remote.serialization.restricted_unpickler import UnsafeStreamError, unpickle
from dcp_remote.transfer.ranges import FileRange, RangeFile, RangeReader, require_shape
from dcp_remote.transfer.tensor_source import Source, StoredTensor

_ZIP = b"PK\x03\x04"

# Values of a pickle, shared ones each time, and characters of the names that paths of keys become: a few on top for
# each byte, since a reference of two bytes may stand for a list of several values, or for a long key.
_VALUES_MAX, _VALUES_PER_BYTE_MAX = 10_000, 8
_NAME_CHARACTERS_MAX, _NAME_CHARACTERS_PER_BYTE_MAX = 1 * MiB, 16

# Alignment of storages, in bytes; torch divides by it, and writes 64.
_ALIGNMENT_MAX = 1 * MiB

# Offset from which a zip's numbers take 8 bytes.
_ZIP32_MAX = 2**32 - 1

# Flag of a record whose checksum and sizes lie behind it: torch sets it for all that are not empty.
_HAS_DESCRIPTOR = 8

# Places of larger storages are read, and not only computed from the directory: a GET of a block for each.
_SMALL_BYTES_MAX = 1 * MiB

# Headers that are read together, and their bytes. A header may lie in two of the 64 blocks that are kept.
_HEADERS_AT_A_TIME = 32
_HEADER_BYTES = 30

_INSTEAD = "Load it by torch.load, and save its dict by CheckpointManager."


@dataclass(frozen=True, slots=True)
class Layout:
    """Value of a stream of `torch.save`, with tensors that have no memory."""

    value: Any
    span: FileRange  # the stream
    sizes: Mapping[int, int]  # size in bytes of each storage, by its first byte in the stream
    details: Mapping[str, Any]  # URL and file, for messages


def load_layout(reader: RangeReader, span: FileRange) -> Layout:
    """Return the layout of a stream; two to five GETs of 64 KiB, and one per storage above 1 MiB, 16 at a time.

    The pickle is loaded as that of a stream of dcp_remote is, with storages that have no memory, and know their places.
    Refused are objects that need code, tensors that torch cannot load without memory, compressed records, another byte
    order, and what `require_walkable` refuses.
    """
    details = {"url": reader.store.url, "file": span.file}
    try:
        file = RangeFile(reader, span)
        with io.BufferedReader(file) as stream:
            found, end = _list_records(stream, span.length, details)
            stream.seek(0)
            records: Any = torch._C.PyTorchFileReader(stream)  # typed in part
            starts = _find_storages(records, found, end, file, details)
            program = records.get_record("data.pkl")
            record_bytes = {one.filename.partition("/")[2]: one.file_size for one in found}

            def make_storage(name: str, size_bytes: int, _: torch.dtype) -> torch.UntypedStorage:
                storage = torch.UntypedStorage(size_bytes, device="meta")
                storage._checkpoint_offset = starts.get(name)
                return storage

            value = unpickle(program, record_bytes, make_storage)
            require_walkable(value, len(program), **details)
            return Layout(value, span, {start: record_bytes[name] for name, start in starts.items()}, details)
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
    except NotImplementedError as error:
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


def _list_records(stream: IO[bytes], length: int, details: Mapping[str, Any]) -> tuple[list[zipfile.ZipInfo], int]:
    """Return the records of a zip, and where they end, before torch reads any.

    A compressed record of a kilobyte may become a gigabyte.
    """
    with zipfile.ZipFile(stream) as archive:
        found, end = archive.infolist(), archive.start_dir
    if any(one.compress_type != zipfile.ZIP_STORED or one.file_size != one.compress_size for one in found):
        raise InvalidArgumentError(
            f"A file has compressed records, as TorchScript and other tools than torch.save pack them. {_INSTEAD}",
            **details,
        )
    if sum(one.file_size for one in found) > length:
        raise ValueError("records overlap")
    if len({one.filename.partition("/")[2] for one in found}) < len(found):
        raise ValueError("two records have the same name")
    return found, end


def _find_storages(
    records: Any, found: Sequence[zipfile.ZipInfo], end: int, file: RangeFile, details: Mapping[str, Any]
) -> dict[str, int]:
    """Return the first bytes of the storages in a stream, by name; of those that torch has packed."""
    order = records.get_record("byteorder") if records.has_record("byteorder") else None
    if order in {b"little", b"big"} - {sys.byteorder.encode()}:
        raise InvalidArgumentError(
            f"A file of torch.save comes from a machine with another order of bytes. {_INSTEAD}", **details
        )
    alignment = int(records.get_record(".storage_alignment")) if records.has_record(".storage_alignment") else None
    if alignment is not None and (not 0 < alignment <= _ALIGNMENT_MAX or alignment & (alignment - 1)):
        raise ValueError(f"an alignment of {alignment} bytes")
    ordered = sorted(found, key=lambda one: one.header_offset)
    ends = (*(one.header_offset for one in ordered[1:]), end)
    # Another tool packs without torch's padding, or its descriptors behind the records: a place would be wrong. One
    # record may fit by chance, and not all.
    is_torchs = alignment is not None and all(
        _is_packed_by_torch(records, one, after, alignment) for one, after in zip(ordered, ends, strict=True)
    )
    starts: dict[str, int] = {}
    unread: list[tuple[str, int]] = []
    for one in ordered:
        name = one.filename.partition("/")[2]
        if not name.startswith("data/"):
            continue
        if alignment is None or one.file_size > _SMALL_BYTES_MAX:
            unread.append((name, one.header_offset))
        elif is_torchs:
            starts[name] = records.get_record_offset_no_read(one.header_offset, name, one.file_size, alignment)
    for first in range(0, len(unread), _HEADERS_AT_A_TIME):
        group = unread[first : first + _HEADERS_AT_A_TIME]
        file.prefetch(offset + at for _, offset in group for at in (0, _HEADER_BYTES - 1))
        starts |= {name: records.get_record_offset(name) for name, _ in group}
    return starts


def _is_packed_by_torch(records: Any, one: zipfile.ZipInfo, after: int, alignment: int) -> bool:
    """Return whether a record lies where torch puts it, its descriptor behind it, and ends at `after`."""
    name, size_bytes = one.filename.partition("/")[2], one.file_size
    start: int = records.get_record_offset_no_read(one.header_offset, name, size_bytes, alignment)
    if not size_bytes:
        return start == after
    descriptor_bytes = 24 if one.header_offset >= _ZIP32_MAX else 16
    return bool(one.flag_bits & _HAS_DESCRIPTOR) and start + size_bytes + descriptor_bytes == after


def require_walkable(value: object, stream_bytes: int, **details: object) -> None:
    """Refuse a value that cannot be walked, and its parts be named, in time and memory proportional to its pickle.

    Dicts, lists, tuples and dataclasses are walked; too deep a nesting, and values or long keys that are repeated too
    often for a pickle of `stream_bytes`, are refused.
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
    """Return the place of a tensor of a layout; None of a value that its elements in the stream do not describe.

    Refuses a tensor with elements outside its storage (damaged), or larger than a checkpoint can hold.
    """
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized or value.is_nested:
        return None
    storage = value.untyped_storage()
    start = storage._checkpoint_offset  # set by `load_layout`
    size_bytes = layout.sizes.get(start) if isinstance(start, int) else None
    if not isinstance(start, int) or size_bytes is None or value.is_conj() or value.is_neg():
        return None
    require_shape(value.shape, value.dtype, **layout.details)
    first, shape, strides = int(value.storage_offset()), tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    # Not by the size of torch's storage, which torch enlarges to what a tensor needs.
    last = first + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    is_inside = first >= 0 and (last + 1) * value.dtype.itemsize <= size_bytes
    if min(strides, default=0) < 0 or (value.numel() and not is_inside):
        raise CorruptCheckpointError(
            "A file of torch.save is damaged: a tensor has elements outside its storage. Copy it once more.",
            **layout.details,
            shape=shape,
            strides=strides,
            first=first,
            storage_bytes=size_bytes,
        )
    length = size_bytes - size_bytes % value.dtype.itemsize
    if start + length > layout.span.length:
        return None
    elements = FileRange(layout.span.file, layout.span.start + start, length)
    is_contiguous = torch.empty_strided(shape, strides, device="meta").is_contiguous()
    return StoredTensor(elements, first, shape, None if is_contiguous else strides, value.dtype)


class TorchFileSource(Source):
    """State dict of `torch.save` as `model`, or a dict of several values under their own keys."""

    kind = "torch.save"

    def __init__(self, reader: RangeReader, file: str, *, piece_bytes_max: int) -> None:
        """Load the layout of the file."""
        super().__init__(reader, piece_bytes_max=piece_bytes_max)
        size_bytes = reader.sizes[file]
        (head,) = reader.read([FileRange(file, 0, min(size_bytes, len(_ZIP)))])
        if head != _ZIP:
            raise InvalidArgumentError(
                "The file is none of safetensors, and none of torch.save in the format of torch 1.6 and later. If it "
                "is an older one, load it by torch.load, and save it once more.",
                url=self.url,
                file=file,
            )
        layout = load_layout(reader, FileRange(file, 0, size_bytes))
        value = layout.value
        if not isinstance(value, dict) or not value:
            raise InvalidArgumentError(
                "The file holds no dict of tensors.", url=self.url, file=file, type=type(value).__qualname__
            )
        is_state_dict = all(isinstance(one, torch.Tensor) for one in value.values())
        self.state = self._replace({"model": dict(value)} if is_state_dict else dict(value), (), layout)

    def _replace(self, value: Any, path: tuple[str, ...], layout: Layout, *, is_read: bool = False) -> Any:
        """Return a value with tensors on the meta device, and note their places by their names.

        Tensors in a tuple, which torch's planner takes for one object, are read.
        """
        if isinstance(value, dict):
            return {key: self._replace(one, (*path, str(key)), layout, is_read=is_read) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            is_read = is_read or isinstance(value, tuple)
            found = [self._replace(one, (*path, str(n)), layout, is_read=is_read) for n, one in enumerate(value)]
            return tuple(found) if isinstance(value, tuple) else found
        if not isinstance(value, torch.Tensor):
            return value
        stored, name = find_stored(value, layout), ".".join(path)
        if stored is None:
            raise InvalidArgumentError(
                f"A tensor of the file is no plain one, or another tool than torch has packed the file. {_INSTEAD}",
                file=layout.span.file,
                tensor=name,
                layout=value.layout,
            )
        self.chunks[name] = [(Box((0,) * len(stored.shape), stored.shape), stored)]
        meta = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        return self.read_whole(name, meta) if is_read else meta
