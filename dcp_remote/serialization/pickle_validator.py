"""Validation of the pickle in a `torch.save` stream, without executing it.

A pickle is a program for a stack machine. Here the program runs on descriptions instead of values, and may do only what
`torch.save` writes: name known classes and functions, call them in known ways, and refer to storages that are present.
Its work is bounded as well, because a few hundred bytes can make an unpickler copy, compare or hash without end, or
recurse beyond its stack.

Modelled on `torch/_weights_only_unpickler.py` of torch 2.13.
"""

from __future__ import annotations

import collections
import pickletools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from dcp_remote.format.dtypes import ITEM_BYTES
from dcp_remote.format.json_tree import DEPTH_MAX, INT_MAX, require_spread

# Bytes of an item, by the storage class that a stream names.
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
_ORDERED, _COUNTER = "collections.OrderedDict", "collections.Counter"
_MAPPINGS = frozenset({"dict", _ORDERED, _COUNTER})
_REBUILD_TYPED = "torch._tensor._rebuild_from_type_v2"
_REBUILD_PARAMETER_WITH_STATE = "torch._utils._rebuild_parameter_with_state"
_REBUILD_QUANTIZED = "torch._utils._rebuild_qtensor"
_REBUILD_NESTED = "torch._utils._rebuild_nested_tensor"
_REBUILD_DENSE = frozenset({"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"})
REBUILD_SPARSE = "torch._utils._rebuild_sparse_tensor"

# Names that may occur as values.
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
# Names that may be called. `_is_permitted` allows only calls whose memory and time are proportional to their arguments.
_CALLABLE = frozenset(
    {
        "_codecs.encode",
        "builtins.bytearray",
        "builtins.complex",
        "builtins.set",
        _COUNTER,
        _ORDERED,
        "torch.Size",
        "torch.device",
        "torch.serialization._get_layout",
        "torch._utils._rebuild_meta_tensor_no_storage",
        "torch._utils._rebuild_parameter",
        *_REBUILD_DENSE,
        _REBUILD_NESTED,
        _REBUILD_PARAMETER_WITH_STATE,
        _REBUILD_QUANTIZED,
        _REBUILD_TYPED,
        REBUILD_SPARSE,
    }
)

# Values in tuples that are fetched from the memo again, nested tuples included. A tuple of one number that is doubled
# 60 times would be hashed for ever; ten million values are hashed in a second.
_REPEATED_VALUES_MAX = 10_000_000

# Limit of torch.
_DIMENSIONS_MAX = 64


class UnsafeStreamError(Exception):
    """A stream does something that is not permitted.

    Attributes:
        type_names: Refused classes, functions, or operations.
    """

    def __init__(self, why: str, *type_names: str) -> None:
        super().__init__(why)
        self.type_names = type_names


class DamagedStreamError(Exception):
    """A stream is not one that `torch.save` writes."""


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    item_count: int


@dataclass(frozen=True, slots=True, eq=False)
class _Tuple:
    """A tuple.

    Attributes:
        items: Items of the tuple.
        values: Number of values that a recursive walk visits, repeated ones each time.
        depth: Levels of tuples, this one included.
    """

    items: tuple[_Node, ...]
    values: int
    depth: int

    def __hash__(self) -> int:
        # Equal to the hash of the real tuple, for `require_spread`. `depth` is bounded, because Python does not guard
        # the recursion.
        return hash(self.items)


@dataclass(slots=True, eq=False)
class _Object:
    """Any other object, known by how it was created.

    Attributes:
        maker: "list", "dict", or the name of the function or class that was called.
        items: Items of a list, or keys of a mapping.
        is_fetched: True once the object was fetched from the memo, and so may be referred to twice.
        is_dense: True for a tensor whose storage has at least as many items as the tensor has elements.
    """

    maker: str
    items: list[_Node] = field(default_factory=list)
    is_fetched: bool = False
    is_dense: bool = False


_Node: TypeAlias = "int | float | complex | str | _Tuple | _Global | _Object | _Storage | None"

_CONSTANTS: dict[str, _Node] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"})
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def validate_program(program: bytes, record_bytes: Mapping[str, int]) -> frozenset[str]:
    """Check the program of a stream, in time and memory proportional to its length.

    Args:
        program: The record `data.pkl` of the stream.
        record_bytes: Size in bytes of each record of the stream, by name.

    Returns:
        The names of classes and functions that the program uses.

    Raises:
        UnsafeStreamError: The program does something that no program of `torch.save` does.
        DamagedStreamError: The program is malformed, or its values do not fit together.
    """
    try:
        return _Program(program, record_bytes).run()
    except (UnsafeStreamError, MemoryError):
        raise
    except Exception as error:
        # pickletools decodes the argument of an opcode before the opcode can be refused here, and may even warn.
        raise DamagedStreamError(f"its pickle is not one that torch.save writes: {error}") from error


class _Program:
    """Stack machine of pickle that works on descriptions instead of values."""

    def __init__(self, program: bytes, record_bytes: Mapping[str, int]) -> None:
        self._program = program
        self._record_bytes = record_bytes
        self._total_bytes = sum(record_bytes.values())
        self._stack: list[_Node] = []
        self._marked: list[list[_Node]] = []
        self._memo: dict[int, _Node] = {}
        self._names: set[str] = set()
        self._hashed: list[list[_Node]] = []  # keys of each mapping, elements of each set
        self._repeated_values = 0
        self._encoded_characters = 0
        self._channels = 0

    def run(self) -> frozenset[str]:
        """Return the names that the program uses; raises if it does anything that `torch.save` does not write."""
        for opcode, argument, _ in pickletools.genops(self._program):
            if opcode.name == "PROTO" and argument != 2:  # noqa: PLR2004  # the only one that torch writes and reads
                raise UnsafeStreamError(f"pickle protocol {argument}", f"pickle protocol {argument}")
            if opcode.name not in ("PROTO", "STOP"):
                self._step(opcode.name, argument)
        # STOP pops the result.
        self._stack.pop()
        for keys in self._hashed:
            require_spread(keys)
        return frozenset(self._names)

    def _step(self, name: str, argument: object) -> None:
        stack = self._stack
        if name in _LITERALS:
            assert isinstance(argument, (int, float, str))
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append(_Object("list" if name == "EMPTY_LIST" else "dict"))
        elif name in _TUPLES:
            count = _TUPLES[name]
            items = [stack.pop() for _ in range(count)]
            stack.append(_make_tuple(items[::-1]))
        elif name in ("BINPUT", "LONG_BINPUT"):
            assert isinstance(argument, int)
            if argument > len(self._memo):
                # `torch.save` counts up; an unpickler allocates memory up to the highest index.
                raise ValueError("an index of the memo is skipped")
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            assert isinstance(argument, int)
            stack.append(self._mark_fetched(self._memo[argument]))
        elif name == "MARK":
            self._marked.append(stack)
            self._stack = []
        elif name == "TUPLE":
            items = self._pop_to_mark()
            self._stack.append(_make_tuple(items))
        else:
            self._operate(name, argument)

    def _operate(self, name: str, argument: object) -> None:
        if name == "GLOBAL":
            self._stack.append(self._resolve_global(str(argument)))
        elif name == "BINPERSID":
            self._stack.append(self._resolve_storage(self._stack.pop()))
        elif name == "REDUCE":
            arguments, called = self._stack.pop(), self._stack.pop()
            self._stack.append(self._call(called, arguments))
        elif name == "BUILD":
            # Sets attributes of an OrderedDict, such as the `_metadata` of a module's state dict.
            state = self._stack.pop()
            self._require_top({_ORDERED})
            _refuse_shadowing(state, collections.OrderedDict)
        elif name in ("APPEND", "APPENDS"):
            items = self._pop_to_mark() if name == "APPENDS" else [self._stack.pop()]
            self._require_top({"list"}).items += items
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop_to_mark() if name == "SETITEMS" else [self._stack.pop(), self._stack.pop()][::-1]
            if len(items) % 2:
                raise ValueError("a key without a value")
            top = self._require_top(_MAPPINGS)
            if not top.items:
                self._hashed.append(top.items)
            top.items += items[::2]
        else:
            raise UnsafeStreamError(f"its pickle uses {name}", f"pickle opcode {name}")

    def _pop_to_mark(self) -> list[_Node]:
        items, self._stack = self._stack, self._marked.pop()
        return items

    def _mark_fetched(self, node: _Node) -> _Node:
        """Record that a node is used again."""
        if isinstance(node, _Object):
            node.is_fetched = True
        elif isinstance(node, _Tuple):
            self._repeated_values += node.values
            if self._repeated_values > _REPEATED_VALUES_MAX:
                raise ValueError("tuples are repeated without end")
        return node

    def _require_top(self, makers: frozenset[str] | set[str]) -> _Object:
        top = self._stack[-1]
        if not isinstance(top, _Object) or top.maker not in makers:
            raise UnsafeStreamError("its pickle changes a value that torch.save does not change", _describe(top))
        return top

    def _resolve_global(self, argument: str) -> _Global:
        # pickletools joins module and name with a space, which no permitted name contains.
        module, _, name = argument.partition(" ")
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full not in _VALUES and full not in _CALLABLE:
            raise UnsafeStreamError(_explain_unknown(full), full)
        self._names.add(full)
        return _Global(full)

    def _resolve_storage(self, identity: _Node) -> _Storage:
        if not isinstance(identity, _Tuple):
            raise TypeError("a persistent id is not a tuple")
        kind, storage, key, location, item_count = identity.items
        if kind != "storage" or not isinstance(storage, _Global) or type(item_count) is not int or item_count < 0:
            raise ValueError("a persistent id does not describe a storage")
        if type(key) is not str or type(location) is not str:
            raise TypeError("a storage has no key, or no location")
        if item_count * _STORAGE_ITEM_BYTES[storage.name] > self._record_bytes[f"data/{key}"]:
            raise ValueError("a storage is larger than its record")
        return _Storage(item_count)

    def _call(self, called: _Node, arguments: _Node) -> _Node:
        if not isinstance(called, _Global) or called.name not in _CALLABLE:
            raise UnsafeStreamError("its pickle calls what torch.save does not call", _describe(called))
        if not isinstance(arguments, _Tuple):
            raise TypeError("arguments are not a tuple")
        given = arguments.items
        if not self._is_permitted(called.name, given):
            raise UnsafeStreamError(f"its pickle calls {called.name} as torch.save does not", called.name)
        if called.name == "builtins.complex":
            return complex(*given)  # type: ignore[arg-type]  # `_is_permitted` has checked that they are numbers
        if called.name == "torch.Size":
            return given[0]
        created = _Object(called.name)
        if called.name in _REBUILD_DENSE:
            storage, _, shape, *_ = given
            created.is_dense = isinstance(storage, _Storage) and _count_elements(shape) <= storage.item_count
        elif called.name in ("builtins.set", _COUNTER) and given and isinstance(given[0], _Object):
            created.items = given[0].items
            self._hashed.append(created.items)
        return created

    def _is_permitted(self, name: str, given: Sequence[_Node]) -> bool:
        """Return True if a call has the arguments that `torch.save` writes, and costs no more than they do.

        A value that other values refer to must not be copied by a call, or copies of copies would grow without end.
        """
        if name == "_codecs.encode":
            # Only latin1: other codecs can inflate their input, and calls can be nested.
            text, codec = given
            self._encoded_characters += len(text) if isinstance(text, str) else 0
            whole = self._encoded_characters <= len(self._program)
            return isinstance(text, str) and codec == "latin1" and whole
        if name == "builtins.bytearray":
            # A number as argument would be the length.
            return not given or _is_sole_new_argument(given, "_codecs.encode")
        if name == "builtins.complex":
            return len(given) == 2 and all(type(part) is float for part in given)  # noqa: PLR2004  # of two parts
        if name == "builtins.set":
            return _is_sole_new_argument(given, "list")
        if name == _COUNTER:
            return not given or _is_sole_new_argument(given, "dict")
        if name == _ORDERED:
            return not given
        if name == "torch.Size":
            return len(given) == 1 and isinstance(given[0], _Tuple) and all(type(n) is int for n in given[0].items)
        return self._is_permitted_rebuild(name, given)

    def _is_permitted_rebuild(self, name: str, given: Sequence[_Node]) -> bool:
        if name == _REBUILD_TYPED:
            function, kind, inner, state = given
            self._call(function, inner)
            _refuse_shadowing(state, torch.nn.Parameter)
            return isinstance(kind, _Global) and kind.name in _TENSOR_CLASSES
        if name == _REBUILD_PARAMETER_WITH_STATE:
            _refuse_shadowing(given[-1], torch.nn.Parameter)
            return True
        if name == _REBUILD_QUANTIZED:
            # Allocates memory for the shape before it checks the storage, and for a scale of each channel.
            storage, _, shape, _, quantizer, *_ = given
            fits = isinstance(storage, _Storage) and _count_elements(shape) <= storage.item_count
            if not fits or not isinstance(shape, _Tuple) or not isinstance(quantizer, _Tuple):
                return False
            self._channels += max((size for size in shape.items if isinstance(size, int)), default=0)
            return self._channels <= self._total_bytes and _are_dense(quantizer.items)
        if name == _REBUILD_NESTED:
            return _are_dense(given)
        if name == REBUILD_SPARSE:
            _, parts = given
            return isinstance(parts, _Tuple) and _are_dense(parts.items)
        return True


def _make_tuple(items: Sequence[_Node]) -> _Tuple:
    inner = [item for item in items if isinstance(item, _Tuple)]
    depth = 1 + max((item.depth for item in inner), default=0)
    if depth > DEPTH_MAX + 1:
        raise ValueError(f"tuples nest deeper than {DEPTH_MAX}")
    return _Tuple(tuple(items), 1 + len(items) - len(inner) + sum(item.values for item in inner), depth)


def _describe(node: _Node) -> str:
    """Return a short name of a value for an error; the value itself may be endless."""
    if isinstance(node, _Global):
        return node.name
    return node.maker if isinstance(node, _Object) else type(node).__name__.removeprefix("_").lower()


def _count_elements(shape: _Node) -> int:
    """Return the number of elements of a shape, or `INT_MAX` if the shape is invalid."""
    sizes = shape.items if isinstance(shape, _Tuple) and len(shape.items) <= _DIMENSIONS_MAX else (-1,)
    elements = 1
    for size in sizes:
        if type(size) is not int or not 0 <= size <= INT_MAX:
            return INT_MAX
        elements *= size
    return elements


def _is_sole_new_argument(given: Sequence[_Node], maker: str) -> bool:
    """Return True if the only argument is an object by `maker` that nothing else refers to, as in `torch.save`."""
    return len(given) == 1 and isinstance(given[0], _Object) and given[0].maker == maker and not given[0].is_fetched


def _are_dense(parts: Sequence[_Node]) -> bool:
    """Return True if all tensors among `parts` are dense: with a stride of 0, four bytes could stand for a terabyte."""
    return all(part.is_dense for part in parts if isinstance(part, _Object))


def _refuse_shadowing(state: _Node, kind: type) -> None:
    """Refuse attributes that would shadow or set what the class defines: methods, `grad`, `__class__`."""
    if not isinstance(state, _Object) or state.maker != "dict":
        raise TypeError("a state is not a dict")
    for name in state.items:
        if type(name) is not str or hasattr(kind, name):
            raise UnsafeStreamError("its pickle sets an attribute that torch.save does not set", f"{name!r:.100}")


def _explain_unknown(name: str) -> str:
    added = {
        entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{getattr(entry, '__qualname__', '')}"
        for entry in torch.serialization.get_safe_globals()
    }
    if name in added:
        return (
            f"it names {name}, which this process added with torch.serialization.add_safe_globals; "
            "another process would not load it, so dcp_remote ignores that list"
        )
    return f"it names {name}"
