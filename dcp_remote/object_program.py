"""The pickle of a `torch.save` stream, followed without being carried out.

A pickle is a program for a stack machine. Here it runs on descriptions instead of values, and may do no more than
`torch.save` lets it: fixed names, called in fixed ways, storages that are there. What it may do is also bounded: from a
few hundred bytes an unpickler can be led to copy, to compare or to hash without end, or to recurse beyond its stack.

Follows `torch/_weights_only_unpickler.py` of torch 2.13.
"""

from __future__ import annotations

import collections
import pickletools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from dcp_remote.dtypes import ITEM_BYTES
from dcp_remote.object_tree import DEPTH_MAX, INT_MAX, require_spread

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
_ORDERED, _COUNTER = "collections.OrderedDict", "collections.Counter"
_MAPPINGS = frozenset({"dict", _ORDERED, _COUNTER})
_REBUILD_TYPED = "torch._tensor._rebuild_from_type_v2"
_REBUILD_PARAMETER_WITH_STATE = "torch._utils._rebuild_parameter_with_state"
_REBUILD_QUANTIZED = "torch._utils._rebuild_qtensor"
_REBUILD_NESTED = "torch._utils._rebuild_nested_tensor"
_REBUILD_DENSE = frozenset({"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"})
REBUILD_SPARSE = "torch._utils._rebuild_sparse_tensor"

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
# May be called. All of them take memory and time in proportion to their arguments, as `_Program._is_fair` lets them.
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

# Tuples that are used again, inside of others as well: doubled 60 times, a tuple of one number would be hashed for
# ever. Ten million values are hashed in a second.
_REPEATED_VALUES_MAX = 10_000_000

# torch's own limit.
_DIMENSIONS_MAX = 64


class UnsafeStreamError(Exception):
    """A stream names what is not on our list; `type_names` says what."""

    def __init__(self, why: str, *type_names: str) -> None:
        """See the class."""
        super().__init__(why)
        self.type_names = type_names


class DamagedStreamError(Exception):
    """No stream that `torch.save` writes."""


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    item_count: int


@dataclass(frozen=True, slots=True, eq=False)
class _Tuple:
    """A tuple; `values` counts what whoever walks it meets, as often as he meets it, and `depth` how deep that is."""

    items: tuple[_Node, ...]
    values: int
    depth: int

    def __hash__(self) -> int:
        # As the tuple itself: `require_spread` asks. Python has no guard against tuples that are too deep.
        return hash(self.items)


@dataclass(slots=True, eq=False)
class _Made:
    """A value of which little more than the maker matters.

    Attributes:
        by: "list", "dict", or what was called.
        items: Of a list its items, of a mapping its keys.
        again: Whether it was fetched from the memo since.
        dense: Of a tensor: whether its storage has as many items as the tensor has elements.
    """

    by: str
    items: list[_Node] = field(default_factory=list)
    again: bool = False
    dense: bool = False


_Node: TypeAlias = "int | float | complex | str | _Tuple | _Global | _Made | _Storage | None"

_CONSTANTS: dict[str, _Node] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"})
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def names_of_program(records: Mapping[str, memoryview]) -> frozenset[str]:
    """Follow the program of a stream, in time and memory in proportion to its length.

    Args:
        records: The parts of the stream by name.

    Returns:
        The names that it uses.

    Raises:
        UnsafeStreamError: It does what `torch.save` does not let it do.
        DamagedStreamError: It is no program, or of values that do not fit together.
    """
    try:
        return _Program(records).follow()
    except (UnsafeStreamError, MemoryError):
        raise
    except Exception as error:
        # pickletools decodes the argument of an opcode before we can refuse the opcode, and may even warn.
        raise DamagedStreamError(f"its pickle is none that torch.save writes: {error}") from error


class _Program:
    """The stack machine of pickle, on descriptions instead of values."""

    def __init__(self, records: Mapping[str, memoryview]) -> None:
        self._records = records
        self._total_bytes = sum(len(record) for record in records.values())
        self._stack: list[_Node] = []
        self._marked: list[list[_Node]] = []
        self._memo: dict[int, _Node] = {}
        self._names: set[str] = set()
        self._hashed: list[list[_Node]] = []
        self._repeated_values = 0
        self._encoded_characters = 0
        self._channels = 0

    def follow(self) -> frozenset[str]:
        """The names that the program uses; raises if it does anything but what `torch.save` lets it do."""
        for opcode, argument, _ in pickletools.genops(bytes(self._records["data.pkl"])):
            if opcode.name == "PROTO" and argument != 2:  # noqa: PLR2004  # torch.save's, and no other is read by torch
                raise UnsafeStreamError(f"pickle protocol {argument}", f"pickle protocol {argument}")
            if opcode.name not in ("PROTO", "STOP"):
                self._step(opcode.name, argument)
        # Also the last opcode pops its value.
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
            stack.append(_Made("list" if name == "EMPTY_LIST" else "dict"))
        elif name in _TUPLES:
            count = _TUPLES[name]
            items = [stack.pop() for _ in range(count)]
            stack.append(_tuple(items[::-1]))
        elif name in ("BINPUT", "LONG_BINPUT"):
            assert isinstance(argument, int)
            if argument > len(self._memo):
                # Unpicklers take memory up to the highest index; `torch.save` counts.
                raise ValueError("an index of the memo is skipped")
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            assert isinstance(argument, int)
            stack.append(self._again(self._memo[argument]))
        elif name == "MARK":
            self._marked.append(stack)
            self._stack = []
        elif name == "TUPLE":
            items = self._since_mark()
            self._stack.append(_tuple(items))
        else:
            self._act(name, argument)

    def _act(self, name: str, argument: object) -> None:
        if name == "GLOBAL":
            self._stack.append(self._global(str(argument)))
        elif name == "BINPERSID":
            self._stack.append(self._storage(self._stack.pop()))
        elif name == "REDUCE":
            arguments, called = self._stack.pop(), self._stack.pop()
            self._stack.append(self._call(called, arguments))
        elif name == "BUILD":
            # The attributes of an OrderedDict, such as a module's `_metadata`.
            state = self._stack.pop()
            self._top({_ORDERED})
            _refuse_hiding(state, collections.OrderedDict)
        elif name in ("APPEND", "APPENDS"):
            items = self._since_mark() if name == "APPENDS" else [self._stack.pop()]
            self._top({"list"}).items += items
        elif name in ("SETITEM", "SETITEMS"):
            items = self._since_mark() if name == "SETITEMS" else [self._stack.pop(), self._stack.pop()][::-1]
            if len(items) % 2:
                raise ValueError("a key without a value")
            top = self._top(_MAPPINGS)
            if not top.items:
                self._hashed.append(top.items)
            top.items += items[::2]
        else:
            raise UnsafeStreamError(f"its pickle uses {name}", f"pickle opcode {name}")

    def _since_mark(self) -> list[_Node]:
        items, self._stack = self._stack, self._marked.pop()
        return items

    def _again(self, node: _Node) -> _Node:
        if isinstance(node, _Made):
            node.again = True
        elif isinstance(node, _Tuple):
            self._repeated_values += node.values
            if self._repeated_values > _REPEATED_VALUES_MAX:
                raise ValueError("tuples are repeated without end")
        return node

    def _top(self, makers: frozenset[str] | set[str]) -> _Made:
        top = self._stack[-1]
        if not isinstance(top, _Made) or top.by not in makers:
            raise UnsafeStreamError("its pickle changes a value that torch.save does not change", _told(top))
        return top

    def _global(self, argument: str) -> _Global:
        # pickletools joins the two with a space, which no name of ours has.
        module, _, name = argument.partition(" ")
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full not in _VALUES and full not in _CALLABLE:
            raise UnsafeStreamError(_why_unknown(full), full)
        self._names.add(full)
        return _Global(full)

    def _storage(self, identity: _Node) -> _Storage:
        if not isinstance(identity, _Tuple):
            raise TypeError("a persistent id is no tuple")
        kind, storage, key, location, item_count = identity.items
        if kind != "storage" or not isinstance(storage, _Global) or type(item_count) is not int or item_count < 0:
            raise ValueError("a persistent id is no storage")
        if type(key) is not str or type(location) is not str:
            raise TypeError("a storage has no name, or no place")
        if item_count * _STORAGE_ITEM_BYTES[storage.name] > len(self._records[f"data/{key}"]):
            raise ValueError("a storage is larger than its record")
        return _Storage(item_count)

    def _call(self, called: _Node, arguments: _Node) -> _Node:
        if not isinstance(called, _Global) or called.name not in _CALLABLE:
            raise UnsafeStreamError("its pickle calls what torch.save does not call", _told(called))
        if not isinstance(arguments, _Tuple):
            raise TypeError("arguments are no tuple")
        given = arguments.items
        if not self._is_fair(called.name, given):
            raise UnsafeStreamError(f"its pickle calls {called.name} as torch.save does not", called.name)
        if called.name == "builtins.complex":
            return complex(*given)  # type: ignore[arg-type]  # `_is_fair` saw that they are numbers
        if called.name == "torch.Size":
            return given[0]
        made = _Made(called.name)
        if called.name in _REBUILD_DENSE:
            storage, _, shape, *_ = given
            made.dense = isinstance(storage, _Storage) and _elements(shape) <= storage.item_count
        elif called.name in ("builtins.set", _COUNTER) and given and isinstance(given[0], _Made):
            made.items = given[0].items
            self._hashed.append(made.items)
        return made

    def _is_fair(self, name: str, given: Sequence[_Node]) -> bool:
        """Whether a call takes no more than its arguments do: no copy of what others hold too, no other kinds."""
        if name == "_codecs.encode":
            # Other codecs inflate, and can be nested.
            text, codec = given
            self._encoded_characters += len(text) if isinstance(text, str) else 0
            whole = self._encoded_characters <= len(self._records["data.pkl"])
            return isinstance(text, str) and codec == "latin1" and whole
        if name == "builtins.bytearray":
            # Not of a number, which would be its length.
            return not given or _is_fresh(given, "_codecs.encode")
        if name == "builtins.complex":
            return len(given) == 2 and all(type(part) is float for part in given)  # noqa: PLR2004  # of two parts
        if name == "builtins.set":
            return _is_fresh(given, "list")
        if name == _COUNTER:
            return not given or _is_fresh(given, "dict")
        if name == _ORDERED:
            return not given
        if name == "torch.Size":
            return len(given) == 1 and isinstance(given[0], _Tuple) and all(type(n) is int for n in given[0].items)
        return self._is_fair_rebuild(name, given)

    def _is_fair_rebuild(self, name: str, given: Sequence[_Node]) -> bool:
        if name == _REBUILD_TYPED:
            function, kind, inner, state = given
            self._call(function, inner)
            _refuse_hiding(state, torch.nn.Parameter)
            return isinstance(kind, _Global) and kind.name in _TENSOR_CLASSES
        if name == _REBUILD_PARAMETER_WITH_STATE:
            _refuse_hiding(given[-1], torch.nn.Parameter)
            return True
        if name == _REBUILD_QUANTIZED:
            # Takes memory for the shape before it looks at the storage, and for a scale of each channel.
            storage, _, shape, _, quantizer, *_ = given
            fits = isinstance(storage, _Storage) and _elements(shape) <= storage.item_count
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


def _tuple(items: Sequence[_Node]) -> _Tuple:
    inner = [item for item in items if isinstance(item, _Tuple)]
    depth = 1 + max((item.depth for item in inner), default=0)
    if depth > DEPTH_MAX + 1:
        raise ValueError(f"tuples nest deeper than {DEPTH_MAX}")
    return _Tuple(tuple(items), 1 + len(items) - len(inner) + sum(item.values for item in inner), depth)


def _told(node: _Node) -> str:
    """What an error calls a value: never all of it, which may be without end."""
    if isinstance(node, _Global):
        return node.name
    return node.by if isinstance(node, _Made) else type(node).__name__.removeprefix("_").lower()


def _elements(shape: _Node) -> int:
    """How many elements a tensor of this shape has; more than there can be, if that is no shape."""
    sizes = shape.items if isinstance(shape, _Tuple) and len(shape.items) <= _DIMENSIONS_MAX else (-1,)
    elements = 1
    for size in sizes:
        if type(size) is not int or not 0 <= size <= INT_MAX:
            return INT_MAX
        elements *= size
    return elements


def _is_fresh(given: Sequence[_Node], maker: str) -> bool:
    """Whether the only argument is a value that nothing else has: made for this call, as `torch.save` does."""
    return len(given) == 1 and isinstance(given[0], _Made) and given[0].by == maker and not given[0].again


def _are_dense(parts: Sequence[_Node]) -> bool:
    """Whether the tensors among them are all there: of a stride of 0, four bytes would be a terabyte to go through."""
    return all(part.dense for part in parts if isinstance(part, _Made))


def _refuse_hiding(state: _Node, kind: type) -> None:
    """Refuse attributes that would hide, or set, what every value of the class has: methods, `grad`, `__class__`."""
    if not isinstance(state, _Made) or state.by != "dict":
        raise TypeError("a state is no dict")
    for name in state.items:
        if type(name) is not str or hasattr(kind, name):
            raise UnsafeStreamError("its pickle sets an attribute that torch.save does not set", f"{name!r:.100}")


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
