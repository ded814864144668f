"""`torch.save` streams: written, and read without trusting them.

A stream is a zip of a short pickle program and of storages. The zip is read here, and `restricted_unpickler` executes
the program.
"""

from __future__ import annotations

import io
import re
import struct
import sys
import zipfile
from typing import Any

import torch

from dcp_remote.format.json_tree import DEPTH_MAX
from dcp_remote.serialization.restricted_unpickler import DamagedStreamError, unpickle

_RECORD_NAME = re.compile(
    r"data\.pkl|byteorder|version|\.format_version|\.storage_alignment|data/\d{1,19}|\.data/serialization_id",
    re.ASCII,
)
# What lies before the name and the extra field of a record, with the lengths of both at its end.
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
HEADER_BYTES = _LOCAL_HEADER.size

# torch's number of the layout: 1 to 10.
_VERSION = re.compile(rb"([1-9]|10)\s*")


def save(value: object) -> bytes:
    """Return the `torch.save` stream of an object; raises whatever the object's own pickling raises."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load_trusted(stream: bytes) -> object:
    """Unpickle without restriction, which runs any code that the stream names and raises whatever that code raises."""
    with torch.device("cpu"):
        return torch.load(io.BytesIO(stream), weights_only=False, map_location="cpu", mmap=False)


def load_restricted(stream: bytes) -> object:
    """Return the object that a stream of any origin holds, on the CPU, without running code.

    Memory and time are proportional to the length of the stream.

    Raises:
        UnsafeStreamError: The stream names a class or function that is not on our list.
        DamagedStreamError: The stream is not one that `torch.save` writes.
    """
    records = _read_records(stream)
    byte_order = bytes(records.get("byteorder", b"little"))
    if byte_order not in (b"little", b"big") or not _VERSION.fullmatch(records["version"]):
        raise DamagedStreamError("an unknown byte order or version")

    def make_storage(name: str, size_bytes: int, dtype: torch.dtype) -> torch.UntypedStorage:
        if not size_bytes:
            return torch.UntypedStorage(0)
        storage = torch.frombuffer(bytearray(records[name][:size_bytes]), dtype=torch.uint8).untyped_storage()
        if byte_order != sys.byteorder.encode():
            storage.byteswap(dtype)
        return storage

    record_bytes = {name: len(record) for name, record in records.items()}
    try:
        value = unpickle(bytes(records["data.pkl"]), record_bytes, make_storage)
    except NotImplementedError as error:
        raise DamagedStreamError(f"torch cannot make a tensor: {error}") from error
    _check_depth(value)
    return value


class _Tail(io.BytesIO):
    """End of a stream, at its place in the stream: newer Pythons compare the places in a zip with its length."""

    def __init__(self, tail: bytes | memoryview, length: int) -> None:
        super().__init__(tail)
        self._first = length - len(tail)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move the position; a ValueError for a place before the tail."""
        return super().seek(offset - self._first * (whence == io.SEEK_SET), whence) + self._first

    def tell(self) -> int:
        """Return the position in the stream."""
        return super().tell() + self._first


def list_records(tail: bytes | memoryview, length: int) -> dict[str, zipfile.ZipInfo]:
    """Return the directory of a zip by the names of its records, without their common folder; no record is read.

    Refuses, by an exception of any class, what `torch.save` does not write: a compressed record of a kilobyte may
    become a gigabyte. `tail` is the end of the stream, with all of the directory; `length` is that of the stream.
    """
    records: dict[str, zipfile.ZipInfo] = {}
    folders: set[str] = set()
    with zipfile.ZipFile(_Tail(tail, length)) as archive:
        entries = archive.infolist()
    for entry in entries:
        folder, _, name = entry.filename.partition("/")
        folders.add(folder)
        is_stored = entry.compress_type == zipfile.ZIP_STORED and entry.file_size == entry.compress_size
        if _RECORD_NAME.fullmatch(name) is None or name in records or not is_stored:
            raise ValueError(f"an unknown, second or compressed record {name[:100]!r}")
        if not 0 <= entry.header_offset <= length - HEADER_BYTES - entry.file_size:
            raise ValueError("a record lies outside the stream")
        records[name] = entry
    if len(folders) != 1 or not {"data.pkl", "version"} <= records.keys():
        raise ValueError("records are missing, or lie in several folders")
    if sum(entry.file_size for entry in entries) > length:
        raise ValueError("records overlap")
    return records


def find_content(entry: zipfile.ZipInfo, header: bytes | memoryview) -> int:
    """Return where in its stream the content of a record begins; `header` has the record's first `HEADER_BYTES`."""
    signature, *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    if signature != b"PK\x03\x04":
        raise ValueError("a record has no header")
    return int(entry.header_offset) + HEADER_BYTES + int(name_bytes) + int(extra_bytes)


def _read_records(stream: bytes) -> dict[str, memoryview]:
    """Return the records of the zip by name without their common folder; nothing is copied or inflated."""
    view = memoryview(stream)
    records: dict[str, memoryview] = {}
    try:
        for name, entry in list_records(stream, len(stream)).items():
            start = find_content(entry, view[entry.header_offset : entry.header_offset + HEADER_BYTES])
            records[name] = view[start : start + entry.file_size]
            if len(records[name]) < entry.file_size:
                raise ValueError("a record lies outside the stream")
    except MemoryError:
        raise
    except Exception as error:
        # zipfile does not document what it raises on hostile directories.
        raise DamagedStreamError(f"not a zip of torch.save: {error}") from error
    return records


def _check_depth(value: object) -> None:
    """Refuse nesting that would overflow the stack of code that walks the value recursively, such as `torch.save`.

    Visits each container once, in pickle's order, including the attributes of values.
    """
    seen: set[int] = set()
    path = [iter((value,))]
    while path:
        if len(path) > DEPTH_MAX + 1:
            raise DamagedStreamError(f"nested deeper than {DEPTH_MAX}")
        child = next(path[-1], path)
        if child is path:
            path.pop()
        elif isinstance(child, (list, tuple, dict, set, torch.Tensor)) and id(child) not in seen:
            seen.add(id(child))
            path.append(iter(_list_children(child)))


def _list_children(value: Any) -> list[object]:
    """Return what pickle visits from a value: items, keys and values, attributes."""
    attributes = getattr(value, "__dict__", {}).values()
    if isinstance(value, dict):
        return [*value.keys(), *value.values(), *attributes]
    return [*(() if isinstance(value, torch.Tensor) else value), *attributes]
