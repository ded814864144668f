"""TorchFileSource: a file of `torch.save`, of which only the layout is loaded; tensors are read by ranges."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any

import torch

from dcp_remote.common.geometry import Box
from dcp_remote.common.units import KiB, MiB
from dcp_remote.errors import CorruptCheckpointError, DcpRemoteError, InvalidArgumentError, UnsafeObjectError
from dcp_remote.format.json_tree import DEPTH_MAX
from dcp_remote.serialization.restricted_unpickler import UnsafeStreamError, unpickle
from dcp_remote.serialization.torch_streams import HEADER_BYTES, find_content, list_records
from dcp_remote.transfer.ranges import FileRange, RangeReader, require_shape
from dcp_remote.transfer.tensor_source import Source, StoredTensor

_ZIP = b"PK\x03\x04"

# Values of a pickle, shared ones each time, and characters of the names that paths of keys become: a few on top for
# each byte, since a reference of two bytes may stand for a list of several values, or for a long key.
_VALUES_MAX, _VALUES_PER_BYTE_MAX = 10_000, 8
_NAME_CHARACTERS_MAX, _NAME_CHARACTERS_PER_BYTE_MAX = 1 * MiB, 16

# Ends of a stream in which its directory is looked for: of some hundred tensors, and of up to millions.
_TAIL_BYTES = (64 * KiB, 1 * MiB, 16 * MiB)
_TAIL_BYTES_MAX = 256 * MiB

# Attribute of a storage without memory: where its bytes are. torch keeps the attributes of storages.
_PLACE = "dcp_remote_place"

_INSTEAD = "Load it by torch.load, and save its dict by CheckpointManager."


def load_layout(reader: RangeReader, span: FileRange) -> Any:
    """Return the value of a stream, whose tensors have no memory; for `find_stored`, their storages know their places.

    Costs three to six GETs, and one per storage above 4 KiB, 16 at a time. The pickle is loaded as that of a stream of
    dcp_remote is.
    Refused are objects that need code, tensors that torch cannot load without memory, compressed records, another byte
    order, and what `require_walkable` refuses.
    """
    details = {"url": reader.store.url, "file": span.file}

    def read(places: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, memoryview]:
        ranges = [FileRange(span.file, span.start + start, sizes[name]) for name, start in places.items()]
        return dict(zip(places, reader.read(ranges), strict=True))

    try:
        records = _read_directory(reader, span)
        record_bytes = {name: one.file_size for name, one in records.items()}
        headers = read({name: one.header_offset for name, one in records.items()}, dict.fromkeys(records, HEADER_BYTES))
        starts = {name: find_content(one, headers[name]) for name, one in records.items()}
        found = read({name: starts[name] for name in ("data.pkl", "byteorder") if name in starts}, record_bytes)
        order = bytes(found.get("byteorder", b""))
        if order in {b"little", b"big"} - {sys.byteorder.encode()}:
            raise InvalidArgumentError(
                f"A file of torch.save comes from a machine with another order of bytes. {_INSTEAD}", **details
            )

        if any(start + record_bytes[name] > span.length for name, start in starts.items()):
            raise ValueError("a record lies outside the stream")

        def make_storage(name: str, size_bytes: int, _: torch.dtype) -> torch.UntypedStorage:
            storage = torch.UntypedStorage(size_bytes, device="meta")
            setattr(storage, _PLACE, FileRange(span.file, span.start + starts[name], record_bytes[name]))
            return storage

        program = bytes(found["data.pkl"])
        value = unpickle(program, record_bytes, make_storage)
        require_walkable(value, len(program), **details)
        return value
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


def _read_directory(reader: RangeReader, span: FileRange) -> dict[str, zipfile.ZipInfo]:
    """Return the directory of a stream, by the names of its records; one GET, or more if it is large or damaged."""

    def read(limit_bytes: int) -> dict[str, zipfile.ZipInfo]:
        length = min(limit_bytes, span.length)
        (tail,) = reader.read([FileRange(span.file, span.start + span.length - length, length)])
        return list_records(tail, span.length)

    for limit_bytes in _TAIL_BYTES:
        if limit_bytes < span.length:
            with suppress(zipfile.BadZipFile, ValueError):  # by a part of a directory, in one Python or another
                return read(limit_bytes)
    return read(_TAIL_BYTES_MAX)


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


def find_stored(value: object, url: str) -> StoredTensor | None:
    """Return the place of a tensor of `load_layout`; None of a value that its elements in the stream do not describe.

    Refuses a tensor with elements outside its storage (damaged), or larger than a checkpoint can hold.
    """
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized or value.is_nested:
        return None
    place: FileRange | None = getattr(value.untyped_storage(), _PLACE, None)
    if place is None or value.is_conj() or value.is_neg():
        return None
    require_shape(value.shape, value.dtype, url=url, file=place.file)
    first, shape, strides = int(value.storage_offset()), tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    # Not by the size of torch's storage, which torch enlarges to what a tensor needs.
    last = first + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    is_inside = first >= 0 and (last + 1) * value.dtype.itemsize <= place.length
    if min(strides, default=0) < 0 or (value.numel() and not is_inside):
        raise CorruptCheckpointError(
            "A file of torch.save is damaged: a tensor has elements outside its storage. Copy it once more.",
            url=url,
            file=place.file,
            shape=shape,
            strides=strides,
            first=first,
            storage_bytes=place.length,
        )
    elements = FileRange(place.file, place.start, place.length - place.length % value.dtype.itemsize)
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
        value = load_layout(reader, FileRange(file, 0, size_bytes))
        if not isinstance(value, dict) or not value:
            raise InvalidArgumentError(
                "The file holds no dict of tensors.", url=self.url, file=file, type=type(value).__qualname__
            )
        is_state_dict = all(isinstance(one, torch.Tensor) for one in value.values())
        self._file = file
        self.state = self._replace({"model": dict(value)} if is_state_dict else dict(value), ())

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
        stored, name = find_stored(value, self.url), ".".join(path)
        if stored is None:
            raise InvalidArgumentError(
                f"A tensor of the file is no plain one. {_INSTEAD}",
                file=self._file,
                tensor=name,
                layout=value.layout,
            )
        self.chunks[name] = [(Box((0,) * len(stored.shape), stored.shape), stored)]
        meta = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        return self.read_whole(name, meta) if is_read else meta
