"""`torch.save` streams, read without trusting them.

torch's restricted unpickler (`weights_only=True`) runs no code, but it takes what anybody added to its list
(`add_safe_globals`), and what it takes can ask for any amount of memory: `bytearray(10**12)` is allowed. So a stream
is first read here as what it is, a zip of a short program and of storages, and the program is followed without being
carried out: it may only use fixed names, in the ways in which `torch.save` uses them, and storages that are there.

Follows `torch/_weights_only_unpickler.py` of torch 2.13.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
import struct
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

import torch

from dcp_remote.dtypes import ITEM_BYTES
from dcp_remote.object_tree import DEPTH_MAX

_RECORD_NAME = re.compile(
    r"[^/]+/(data\.pkl|byteorder|version|\.format_version|\.storage_alignment|data/\d{1,19}|\.data/serialization_id)",
    re.ASCII,
)
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")

# Bytes of an item, by the class that a stream names for a storage.
_STORAGE_ITEM_BYTES: dict[str, int] = {
    "torch.storage.UntypedStorage": 1,
    **{
        f"torch.{name}Storage": item_bytes
        for item_bytes, names in {
            1: ["Byte", "Char", "Bool", "QInt8", "QUInt8", "QUInt4x2", "QUInt2x4"],
            2: ["Half", "BFloat16", "Short"],
            4: ["Float", "Int", "QInt32"],
            8: ["Double", "Long", "ComplexFloat"],
            16: ["ComplexDouble"],
        }.items()
        for name in names
    },
}
_TENSOR_CLASSES = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter"})
_REBUILD_TYPED = "torch._tensor._rebuild_from_type_v2"
_REBUILD_QUANTIZED = "torch._utils._rebuild_qtensor"
_REBUILD_SPARSE = "torch._utils._rebuild_sparse_tensor"
_MAPPINGS = frozenset({"dict", "collections.OrderedDict", "collections.Counter"})

# May stand in a stream as values.
_VALUES = frozenset(
    {
        *_STORAGE_ITEM_BYTES,
        *_TENSOR_CLASSES,
        *(f"torch.{name}" for name in ITEM_BYTES),
        *(
            f"torch.per_{scheme}"
            for scheme in (
                "tensor_affine",
                "tensor_symmetric",
                "channel_affine",
                "channel_symmetric",
                "channel_affine_float_qparams",
            )
        ),
    }
)
# May be called. All of them take memory in proportion to their arguments, but for those that `_check_call` looks at.
_CALLABLE = frozenset(
    {
        "_codecs.encode",
        "builtins.bytearray",
        "builtins.complex",
        "builtins.set",
        "collections.Counter",
        "collections.OrderedDict",
        "torch.Size",
        "torch.device",
        "torch.serialization._get_layout",
        "torch._utils._rebuild_meta_tensor_no_storage",
        "torch._utils._rebuild_nested_tensor",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        _REBUILD_QUANTIZED,
        _REBUILD_SPARSE,
        _REBUILD_TYPED,
    }
)

# torch's switch for validation is one for the process: two threads must not restore it in the wrong order.
_sparse_validation = threading.Lock()


class UnsafeStreamError(Exception):
    """A stream names what is not on our list; `type_names` says what."""

    def __init__(self, why: str, *type_names: str) -> None:
        """See the class."""
        super().__init__(why)
        self.type_names = type_names


class DamagedStreamError(Exception):
    """No stream that `torch.save` writes."""


def save(value: object) -> bytes:
    """`torch.save` into memory; raises whatever the object's own pickling raises."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load_trusted(stream: bytes) -> object:
    """Unpickle without restriction: runs any code that the stream names. Raises whatever that raises."""
    return torch.load(io.BytesIO(stream), weights_only=False, map_location="cpu", mmap=False)


def load_restricted(stream: bytes) -> object:
    """What a stream holds, on the CPU; takes memory for at most three times its length, and runs no code.

    Raises:
        UnsafeStreamError: It needs a class or function that is not on our list.
        DamagedStreamError: It is no stream of `torch.save`.
    """
    records = _records(stream)
    try:
        names = _Program(records).follow()
    except (UnsafeStreamError, MemoryError):
        raise
    except Exception as error:
        # pickletools decodes the argument of an opcode before we can refuse the opcode, and may even warn.
        raise DamagedStreamError(f"its pickle is none that torch.save writes: {error}") from error
    try:
        # Without names it is most of what training keeps, numbers and containers: three times faster than torch.
        value = _load_with_torch(records, names) if names else _Nameless(io.BytesIO(records["data.pkl"])).load()
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


def _load_with_torch(records: Mapping[str, memoryview], names: frozenset[str]) -> object:
    with _checking_sparse() if _REBUILD_SPARSE in names else nullcontext():
        try:
            return torch.load(_pack(records), weights_only=True, map_location="cpu", mmap=False)
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


# ----------------------------------------------------------------------------------------------------- the program


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


@dataclass(frozen=True, slots=True)
class _Made:
    """A value of which only the maker matters: "list", "dict", or what was called."""

    by: str


@dataclass(frozen=True, slots=True)
class _Storage:
    item_count: int


_Node: TypeAlias = "int | float | str | tuple[_Node, ...] | _Global | _Made | _Storage | None"

_CONSTANTS: dict[str, _Node] = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
    "EMPTY_TUPLE": (),
    "EMPTY_LIST": _Made("list"),
    "EMPTY_DICT": _Made("dict"),
}
_LITERALS = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"})
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Program:
    """The stack machine of pickle, on descriptions instead of values."""

    def __init__(self, records: Mapping[str, memoryview]) -> None:
        self._records = records
        self._stack: list[_Node] = []
        self._marked: list[list[_Node]] = []
        self._memo: dict[int, _Node] = {}
        self._names: set[str] = set()

    def follow(self) -> frozenset[str]:
        """The names that the program uses; raises if it does anything but what `torch.save` lets it do."""
        for opcode, argument, _ in pickletools.genops(bytes(self._records["data.pkl"])):
            if opcode.name == "PROTO" and argument != 2:  # noqa: PLR2004  # torch.save's, and no other is read by torch
                raise UnsafeStreamError(f"pickle protocol {argument}", f"pickle protocol {argument}")
            if opcode.name not in ("PROTO", "STOP"):
                self._step(opcode.name, argument)
        # Also the last opcode pops its value.
        self._stack.pop()
        return frozenset(self._names)

    def _step(self, name: str, argument: object) -> None:
        stack = self._stack
        if name in _LITERALS:
            assert isinstance(argument, (int, float, str))
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            self._stack, items = stack[: -_TUPLES[name]], stack[-_TUPLES[name] :]
            if len(items) != _TUPLES[name]:
                raise ValueError("the stack is empty")
            self._stack.append(tuple(items))
        elif name in ("BINPUT", "LONG_BINPUT"):
            assert isinstance(argument, int)
            if argument > len(self._memo):
                # Unpicklers take memory up to the highest index; `torch.save` counts.
                raise ValueError("an index of the memo is skipped")
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            assert isinstance(argument, int)
            stack.append(self._memo[argument])
        elif name == "MARK":
            self._marked.append(stack)
            self._stack = []
        elif name == "TUPLE":
            items = self._since_mark()
            self._stack.append(tuple(items))
        else:
            self._act(name, argument)

    def _act(self, name: str, argument: object) -> None:
        if name == "GLOBAL":
            self._stack.append(self._global(str(argument)))
        elif name == "BINPERSID":
            self._stack.append(self._storage(self._stack.pop()))
        elif name == "REDUCE":
            arguments, called = self._stack.pop(), self._stack.pop()
            self._stack.append(_check_call(called, arguments))
        elif name == "BUILD":
            # The attributes of an OrderedDict, such as a module's `_metadata`.
            self._stack.pop()
            self._expect_top({"collections.OrderedDict"})
        elif name in ("APPEND", "APPENDS"):
            _ = self._since_mark() if name == "APPENDS" else [self._stack.pop()]
            self._expect_top({"list"})
        elif name in ("SETITEM", "SETITEMS"):
            items = self._since_mark() if name == "SETITEMS" else [self._stack.pop(), self._stack.pop()]
            if len(items) % 2:
                raise ValueError("a key without a value")
            self._expect_top(_MAPPINGS)
        else:
            raise UnsafeStreamError(f"its pickle uses {name}", f"pickle opcode {name}")

    def _since_mark(self) -> list[_Node]:
        items, self._stack = self._stack, self._marked.pop()
        return items

    def _expect_top(self, makers: frozenset[str] | set[str]) -> None:
        top = self._stack[-1]
        if not isinstance(top, _Made) or top.by not in makers:
            raise UnsafeStreamError("its pickle changes a value that torch.save does not change", f"{top}"[:100])

    def _global(self, argument: str) -> _Global:
        # pickletools joins the two with a space, which no name of ours has.
        module, _, name = argument.partition(" ")
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full not in _VALUES and full not in _CALLABLE:
            raise UnsafeStreamError(_why_unknown(full), full)
        self._names.add(full)
        return _Global(full)

    def _storage(self, identity: _Node) -> _Storage:
        if not isinstance(identity, tuple):
            raise TypeError("a persistent id is no tuple")
        kind, storage, key, _, item_count = identity
        if kind != "storage" or not isinstance(storage, _Global) or type(item_count) is not int or item_count < 0:
            raise ValueError("a persistent id is no storage")
        if item_count * _STORAGE_ITEM_BYTES[storage.name] > len(self._records[f"data/{key}"]):
            raise ValueError("a storage is larger than its record")
        return _Storage(item_count)


def _check_call(called: _Node, arguments: _Node) -> _Node:
    if not isinstance(called, _Global) or called.name not in _CALLABLE:
        name = called.name if isinstance(called, _Global) else f"{called}"[:100]
        raise UnsafeStreamError("its pickle calls what torch.save does not call", name)
    if not isinstance(arguments, tuple):
        raise TypeError("arguments are no tuple")
    allowed = True
    if called.name == "_codecs.encode":
        # Other codecs inflate, and can be nested.
        text, codec = arguments
        allowed = isinstance(text, str) and codec == "latin1"
    elif called.name == "builtins.bytearray":
        # Not of a number, which would be its length.
        allowed = arguments in ((), (_Made("_codecs.encode"),))
    elif called.name == _REBUILD_TYPED:
        function, kind, inner, _ = arguments
        _check_call(function, inner)
        allowed = isinstance(kind, _Global) and kind.name in _TENSOR_CLASSES
    elif called.name == _REBUILD_QUANTIZED:
        # Takes memory for the shape before it looks at the storage.
        storage, _, shape, *_ = arguments
        sizes = [size for size in shape if isinstance(size, int)] if isinstance(shape, tuple) else [math.inf]
        allowed = isinstance(storage, _Storage) and math.prod(sizes) <= storage.item_count
    if not allowed:
        raise UnsafeStreamError(f"its pickle calls {called.name} as torch.save does not", called.name)
    return _Made(called.name)


def _why_unknown(name: str) -> str:
    widened = {
        entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{getattr(entry, '__qualname__', '')}"
        for entry in torch.serialization.get_safe_globals()
    }
    if name in widened:
        return (
            f"it names {name}, which this process added with torch.serialization.add_safe_globals; "
            "another process would not load it, and dcp_remote does not honor what others widened"
        )
    return f"it names {name}"


def _check_depth(value: object) -> None:
    """Refuse nesting that would overflow the stack of whoever walks the value, `torch.save` first.

    Goes in the order in which pickle goes, once into each container.
    """
    seen: set[int] = set()
    path = [iter((value,))]
    while path:
        if len(path) > DEPTH_MAX + 1:
            raise DamagedStreamError(f"nested deeper than {DEPTH_MAX}")
        child = next(path[-1], path)
        if child is path:
            path.pop()
        elif isinstance(child, (list, tuple, dict, set)) and id(child) not in seen:
            seen.add(id(child))
            path.append(iter([*child.keys(), *child.values()] if isinstance(child, dict) else tuple(child)))
