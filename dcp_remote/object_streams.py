"""`torch.save` streams, read without trusting them.

torch's restricted unpickler (`weights_only=True`) runs no code, but it takes what anybody added to its list
(`add_safe_globals`), and what it takes can ask for any amount of memory: `bytearray(10**12)` is allowed. So a stream
is first read here as what it is, a zip of a short program and of storages, and the program is followed without being
carried out (`object_program.py`).
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

from dcp_remote.object_program import REBUILD_SPARSE, DamagedStreamError, UnsafeStreamError, names_of_program
from dcp_remote.object_tree import DEPTH_MAX

_RECORD_NAME = re.compile(
    r"[^/]+/(data\.pkl|byteorder|version|\.format_version|\.storage_alignment|data/\d{1,19}|\.data/serialization_id)",
    re.ASCII,
)
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")

# torch's switch for validation is one for the process: two threads must not restore it in the wrong order.
_sparse_validation = threading.Lock()


def save(value: object) -> bytes:
    """`torch.save` into memory; raises whatever the object's own pickling raises."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load_trusted(stream: bytes) -> object:
    """Unpickle without restriction: runs any code that the stream names. Raises whatever that raises."""
    with torch.device("cpu"):
        return torch.load(io.BytesIO(stream), weights_only=False, map_location="cpu", mmap=False)


def load_restricted(stream: bytes, *, is_own: bool = False) -> object:
    """What a stream holds, on the CPU; takes memory and time in proportion to its length, and runs no code.

    Args:
        stream: From anybody.
        is_own: `torch.save` wrote it in this process: torch may read it as it is, without a copy.

    Raises:
        UnsafeStreamError: It needs a class or function that is not on our list.
        DamagedStreamError: It is no stream of `torch.save`.
    """
    records = _records(stream)
    names = names_of_program(records)
    try:
        # Without names it is most of what training keeps, numbers and containers: three times faster than torch.
        if names:
            value = _load_with_torch(io.BytesIO(stream) if is_own else _pack(records), names)
        else:
            value = _Nameless(io.BytesIO(records["data.pkl"])).load()
    except (UnsafeStreamError, MemoryError):
        raise
    except Exception as error:
        # From a program of the right form, with values that do not fit together.
        raise DamagedStreamError(f"it does not load: {type(error).__name__}") from error
    _check_depth(value)
    return value


class _Nameless(pickle.Unpickler):
    """Loads a program that was followed and names nothing: there is nothing that it could call."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise AssertionError(f"{module}.{name} was not seen when the program was followed")


@contextmanager
def _checking_sparse() -> Iterator[None]:
    """Check the indices of sparse tensors: torch does not by default, and later uses them unchecked."""
    with _sparse_validation, torch.sparse.check_sparse_tensor_invariants():
        yield


def _load_with_torch(stream: io.BytesIO, names: frozenset[str]) -> object:
    # What builds a sparse tensor is a factory to torch: it takes the user's default device, whatever `map_location` is.
    with _checking_sparse() if REBUILD_SPARSE in names else nullcontext(), torch.device("cpu"):
        try:
            return torch.load(stream, weights_only=True, map_location="cpu", mmap=False)
        except pickle.UnpicklingError as error:
            raise UnsafeStreamError("this version of torch does not take it") from error


# --------------------------------------------------------------------------------------------------------- the zip


def _records(stream: bytes) -> dict[str, memoryview]:
    """The parts of the zip by name, without their common folder; nothing is copied or inflated."""
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
        # zipfile has no list of what it raises on hostile directories.
        raise DamagedStreamError(f"no zip: {error}") from error
    if len(folders) > 1:
        raise DamagedStreamError("records in several folders")
    if "data.pkl" not in records or "version" not in records:
        raise DamagedStreamError("a record is missing")
    if sum(len(record) for record in records.values()) > len(stream):
        raise DamagedStreamError("records overlap")
    return records


def _pack(records: Mapping[str, memoryview]) -> io.BytesIO:
    """The same stream in a zip of our own.

    torch reads zips with another library than Python; of a file made for it, the two may see different records. Those
    whose names begin with a dot only matter to whoever maps the file.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name, record in records.items():
            if not name.startswith("."):
                archive.writestr(zipfile.ZipInfo(f"archive/{name}"), record)
    packed.seek(0)
    return packed


def _check_depth(value: object) -> None:
    """Refuse nesting that would overflow the stack of whoever walks the value, `torch.save` first.

    Goes in the order in which pickle goes, once into each container, also into the attributes of values.
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
            path.append(iter(_inside(child)))


def _inside(value: Any) -> list[object]:
    """What pickle comes to from a value: items, keys and values, attributes."""
    attributes = getattr(value, "__dict__", {}).values()
    if isinstance(value, dict):
        return [*value.keys(), *value.values(), *attributes]
    return [*(() if isinstance(value, torch.Tensor) else value), *attributes]
