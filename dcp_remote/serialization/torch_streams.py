"""Reading of `torch.save` streams without trusting them.

torch's restricted unpickler (`weights_only=True`) runs no code, but it accepts every name that any library added with
`add_safe_globals`, and calls that allocate any amount of memory, such as `bytearray(10**12)`. So a stream, which is a
zip of a short pickle program and of storages, is first checked here, and `pickle_validator` interprets its program
without executing it.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch

from dcp_remote.format.json_tree import DEPTH_MAX
from dcp_remote.serialization.pickle_validator import (
    REBUILD_SPARSE,
    DamagedStreamError,
    UnsafeStreamError,
    validate_program,
)

_RECORD_NAME = re.compile(
    r"[^/]+/(data\.pkl|byteorder|version|\.format_version|\.storage_alignment|data/\d{1,19}|\.data/serialization_id)",
    re.ASCII,
)
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")

# torch's switch for sparse validation is global: without the lock, two threads could restore it in the wrong order.
_sparse_validation = threading.Lock()


def save(value: object) -> bytes:
    """Return the `torch.save` stream of an object; raises whatever the object's own pickling raises."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load_trusted(stream: bytes) -> object:
    """Unpickle without restriction, which runs any code that the stream names and raises whatever that code raises."""
    with torch.device("cpu"):
        return torch.load(io.BytesIO(stream), weights_only=False, map_location="cpu", mmap=False)


def load_restricted(stream: bytes, *, is_own: bool = False) -> object:
    """Return the object that a stream holds, on the CPU, without running code.

    Memory and time are proportional to the length of the stream.

    Args:
        stream: Stream of any origin.
        is_own: True if `torch.save` has just written the stream in this process; torch then reads it without a copy.

    Raises:
        UnsafeStreamError: The stream names a class or function that is not on our list.
        DamagedStreamError: The stream is not one that `torch.save` writes.
    """
    records = _read_records(stream)
    names = validate_program(bytes(records["data.pkl"]), {name: len(record) for name, record in records.items()})
    try:
        # Most objects of a training are numbers and containers, whose programs name nothing: these load three times
        # faster without torch.
        if names:
            value = _load_with_torch(io.BytesIO(stream) if is_own else _repack(records), names)
        else:
            value = _NamelessUnpickler(io.BytesIO(records["data.pkl"])).load()
    except (UnsafeStreamError, MemoryError):
        raise
    except Exception as error:
        # A valid program can still combine values that do not fit together.
        raise DamagedStreamError(f"it does not load: {type(error).__name__}") from error
    _check_depth(value)
    return value


class _NamelessUnpickler(pickle.Unpickler):
    """Loads a validated program that names no class or function, and so cannot call any."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise AssertionError(f"{module}.{name} was not seen by the validation")


@contextmanager
def _check_sparse_indices() -> Iterator[None]:
    """Make torch check the indices of sparse tensors, which by default it uses unchecked."""
    with _sparse_validation, torch.sparse.check_sparse_tensor_invariants():
        yield


def _load_with_torch(stream: io.BytesIO, names: frozenset[str]) -> object:
    # Sparse tensors are rebuilt by a factory function, which ignores `map_location` and uses the default device.
    with _check_sparse_indices() if REBUILD_SPARSE in names else nullcontext(), torch.device("cpu"):
        try:
            return torch.load(stream, weights_only=True, map_location="cpu", mmap=False)
        except pickle.UnpicklingError as error:
            raise UnsafeStreamError("this version of torch refuses it") from error


def _read_records(stream: bytes) -> dict[str, memoryview]:
    """Return the records of the zip by name without their common folder; nothing is copied or inflated."""
    view = memoryview(stream)
    records: dict[str, memoryview] = {}
    folders: set[str] = set()
    try:
        with zipfile.ZipFile(io.BytesIO(stream)) as archive:
            entries = archive.infolist()
        for entry in entries:
            if _RECORD_NAME.fullmatch(entry.filename) is None:
                raise DamagedStreamError(f"an unknown record {entry.filename[:100]!r}")
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise DamagedStreamError("a compressed record")
            header = _LOCAL_HEADER.unpack_from(view, entry.header_offset)
            start = entry.header_offset + _LOCAL_HEADER.size + header[-2] + header[-1]
            if entry.header_offset < 0 or start + entry.file_size > len(view):
                raise DamagedStreamError("a record lies outside the stream")
            folder, _, name = entry.filename.partition("/")
            folders.add(folder)
            if name in records:
                raise DamagedStreamError(f"two records {name!r}")
            records[name] = view[start : start + entry.file_size]
    except (DamagedStreamError, MemoryError):
        raise
    except Exception as error:
        # zipfile does not document what it raises on hostile directories.
        raise DamagedStreamError(f"not a zip: {error}") from error
    if len(folders) > 1:
        raise DamagedStreamError("records in several folders")
    if "data.pkl" not in records or "version" not in records:
        raise DamagedStreamError("a record is missing")
    if sum(len(record) for record in records.values()) > len(stream):
        raise DamagedStreamError("records overlap")
    return records


def _repack(records: Mapping[str, memoryview]) -> io.BytesIO:
    """Write the records into a new zip, so that torch reads the records that were validated.

    torch reads zips with another library than Python, and a hostile zip may show each library other records. Records
    whose names begin with a dot matter only to memory-mapped files and are left out.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name, record in records.items():
            if not name.startswith("."):
                archive.writestr(zipfile.ZipInfo(f"archive/{name}"), record)
    packed.seek(0)
    return packed


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
