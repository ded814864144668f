"""Unpickler of the pickle in a `torch.save` stream, which is not trusted.

A pickle is a program for a stack machine. This machine knows only what `torch.save` writes: some operations, names of
values, and calls with certain arguments. Each is checked before it is executed. The work is bounded as well, because a
few hundred bytes can make an unpickler copy, compare or hash without end, or recurse beyond its stack. torch's own
(`weights_only=True`) has no such bounds, and accepts every name that a library added with `add_safe_globals`.

Modelled on `torch/_weights_only_unpickler.py` of torch 2.13.
"""

from __future__ import annotations

import math
import pickletools
import pkgutil
import threading
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.storage import TypedStorage

from dcp_remote.format.dtypes import ITEM_BYTES
from dcp_remote.format.json_tree import COLLISIONS_MAX, DEPTH_MAX, INT_MAX, require_spread, type_name

# dtype of the items, by the name of the storage's class.
STORAGES: dict[str, torch.dtype] = {
    "torch.storage.UntypedStorage": torch.uint8,
    **{f"torch.{name}": dtype for name, dtype in torch.storage._storage_type_to_dtype_map().items()},
}
# Names that may occur as values.
VALUES = frozenset(
    {
        *STORAGES,
        *(f"torch.{dtype}" for dtype in ITEM_BYTES),
        "torch.per_tensor_affine",
        "torch.per_tensor_symmetric",
        "torch.per_channel_affine",
        "torch.per_channel_symmetric",
        "torch.per_channel_affine_float_qparams",
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
    }
)

_REBUILD_SPARSE = "torch._utils._rebuild_sparse_tensor"
_REBUILD_TYPED = "torch._tensor._rebuild_from_type_v2"
# Names that may be called. `_is_permitted` allows only calls whose memory and time are proportional to their arguments.
CALLABLE = frozenset(
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
        "torch._utils._rebuild_qtensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        _REBUILD_SPARSE,
        _REBUILD_TYPED,
    }
)


def _resolve(name: str) -> Any:
    # With a colon behind the first module, the others are attributes, and nothing is imported.
    return pkgutil.resolve_name(name.replace(".", ":", 1))


_NAMES: dict[object, str] = {_resolve(name): name for name in CALLABLE}
_DTYPES: dict[object, torch.dtype] = {_resolve(name): dtype for name, dtype in STORAGES.items()}

_CONSTANTS: dict[str, bool | None] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"})
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PROTOCOL = 2

# Values in tuples that are fetched from the memo again, nested tuples included. A tuple of one number that is doubled
# 60 times would be hashed for ever; ten million values are hashed in a second.
_REPEATED_VALUES_MAX = 10_000_000

# torch's switch for the validation of sparse tensors, and its list of those to validate, are global.
_sparse_validation = threading.Lock()

# Returns the first bytes of a record, given its name, their number, and the dtype of the items.
MakeStorage: TypeAlias = Callable[[str, int, torch.dtype], torch.UntypedStorage]


class UnsafeStreamError(Exception):
    """A stream does something that is not permitted; `type_names` are the refused classes, functions or operations."""

    def __init__(self, why: str, *type_names: str) -> None:
        super().__init__(why)
        self.type_names = type_names


class DamagedStreamError(Exception):
    """A stream is not one that `torch.save` writes."""


def unpickle(program: bytes, record_bytes: Mapping[str, int], make_storage: MakeStorage) -> object:
    """Return the value of the record `data.pkl`, in time and memory proportional to it and the storages.

    `record_bytes` are the sizes of all records of the stream, by name.

    Raises:
        UnsafeStreamError: The program does something that no program of `torch.save` does.
        DamagedStreamError: The program is malformed, or its values do not fit together.
        NotImplementedError: torch cannot make a tensor of such storages, as a sparse one without memory.
    """
    try:
        return _Machine(program, record_bytes, make_storage).run()
    except (UnsafeStreamError, NotImplementedError, MemoryError):
        raise
    except Exception as error:
        # pickletools decodes the argument of an opcode before the opcode can be refused here, and may even warn.
        raise DamagedStreamError(f"its pickle is not one that torch.save writes: {str(error)[:200]}") from error


@dataclass(frozen=True, slots=True)
class _Measured:
    """Tuple with the number of values in it and in its tuples, and their depth. Kept, so that its identity stays."""

    value: tuple[object, ...]
    values: int
    depth: int


class _Machine:
    def __init__(self, program: bytes, record_bytes: Mapping[str, int], make_storage: MakeStorage) -> None:
        self._program = program
        self._record_bytes = record_bytes
        self._make_storage = make_storage
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._storages: dict[str, TypedStorage] = {}
        # By identity: tuples, and mappings with how many of their keys have a hash.
        self._tuples: dict[int, _Measured] = {}
        self._hashes: dict[int, tuple[object, Counter[int]]] = {}
        self._repeated_values = 0
        # A list or text is copied twice at most: a bytearray is made of bytes, which are made of a text.
        self._copied_items_left = 2 * len(program)
        self._channels_left = sum(record_bytes.values())

    def run(self) -> object:
        """Execute the program."""
        for opcode, argument, _ in pickletools.genops(self._program):
            if opcode.name == "PROTO" and argument != _PROTOCOL:
                raise UnsafeStreamError(f"pickle protocol {argument}", f"pickle protocol {argument}")
            if opcode.name not in ("PROTO", "STOP"):
                self._step(opcode.name, argument)
        return self._stack.pop()

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if name == "EMPTY_LIST" else {})
        elif name in _TUPLES:
            items = [stack.pop() for _ in range(_TUPLES[name])]
            stack.append(self._measure(tuple(items[::-1])))
        elif name == "MARK":
            self._marked.append(stack)
            self._stack = []
        elif name == "TUPLE":
            items = self._pop_to_mark()
            self._stack.append(self._measure(tuple(items)))
        elif name in ("BINPUT", "LONG_BINPUT"):
            if argument > len(self._memo):
                raise ValueError("an index of the memo is skipped")  # `torch.save` counts up
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._fetch(self._memo[argument]))
        else:
            self._operate(name, argument)

    def _operate(self, name: str, argument: str) -> None:
        if name == "GLOBAL":
            self._stack.append(_find_global(argument))
        elif name == "BINPERSID":
            self._stack.append(self._find_storage(self._stack.pop()))
        elif name == "REDUCE":
            arguments, function = self._stack.pop(), self._stack.pop()
            self._stack.append(self._call(function, arguments))
        elif name == "BUILD":
            # Sets attributes of an OrderedDict, such as the `_metadata` of a module's state dict.
            state, top = self._stack.pop(), self._top(OrderedDict)
            self._count_attributes(state, OrderedDict)
            vars(top).update(state)
        elif name in ("APPEND", "APPENDS"):
            items = self._pop_to_mark() if name == "APPENDS" else [self._stack.pop()]
            self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop_to_mark() if name == "SETITEMS" else [self._stack.pop(), self._stack.pop()][::-1]
            self._set_items(self._top(dict, OrderedDict, Counter), items[::2], items[1::2])
        else:
            raise UnsafeStreamError(f"its pickle uses {name}", f"pickle opcode {name}")

    def _pop_to_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marked.pop()
        return items

    def _top(self, *kinds: type) -> Any:
        top = self._stack[-1]
        if type(top) not in kinds:
            raise UnsafeStreamError("its pickle changes a value that torch.save does not change", type_name(top))
        return top

    def _measure(self, value: tuple[object, ...]) -> tuple[object, ...]:
        """Note the size of a tuple, before anything hashes it or takes it apart."""
        inner = [self._tuples[id(item)] for item in value if isinstance(item, tuple)]
        depth = 1 + max((item.depth for item in inner), default=0)
        if depth > DEPTH_MAX + 1:
            # Python does not guard the recursion of a hash.
            raise ValueError(f"tuples nest deeper than {DEPTH_MAX}")
        values = 1 + len(value) - len(inner) + sum(item.values for item in inner)
        self._tuples[id(value)] = _Measured(value, values, depth)
        return value

    def _fetch(self, value: Any) -> Any:
        """Return a value that is used again."""
        if isinstance(value, tuple):
            self._repeated_values += self._tuples[id(value)].values
            if self._repeated_values > _REPEATED_VALUES_MAX:
                raise ValueError("tuples are repeated without end")
        return value

    def _set_items(self, mapping: dict[Any, Any], keys: Sequence[Any], values: Sequence[Any]) -> None:
        _, hashes = self._hashes.setdefault(id(mapping), (mapping, Counter()))
        for key, value in zip(keys, values, strict=True):
            hashes[hash(key)] += 1
            if hashes[hash(key)] > COLLISIONS_MAX:
                raise ValueError(f"more than {COLLISIONS_MAX} keys of a mapping have the same hash")
            mapping[key] = value

    def _find_storage(self, identity: Any) -> TypedStorage:
        if type(identity) is not tuple:
            raise TypeError("a persistent id is not a tuple")
        kind, storage, key, location, items = identity
        if kind != "storage" or not isinstance(storage, type) or type(items) is not int or items < 0:
            raise ValueError("a persistent id does not describe a storage")
        if type(key) is not str or type(location) is not str:
            raise TypeError("a storage has no key, or no location")
        dtype = _DTYPES[storage]
        size_bytes = items * dtype.itemsize
        if items != self._record_bytes[f"data/{key}"] // dtype.itemsize:
            raise ValueError("a storage has another size than its record")
        if not size_bytes:  # as torch: views of an empty tensor may have several dtypes
            empty = self._make_storage(f"data/{key}", 0, dtype)
            return TypedStorage(wrap_storage=empty, dtype=dtype, _internal=True)
        if key not in self._storages:
            made = self._make_storage(f"data/{key}", size_bytes, dtype)
            self._storages[key] = TypedStorage(wrap_storage=made, dtype=dtype, _internal=True)
        found = self._storages[key]
        if found.dtype != dtype or found._untyped_storage.nbytes() != size_bytes:
            raise ValueError("a storage is used in two ways")
        return found

    def _call(self, function: Any, given: Any) -> Any:
        is_named = isinstance(function, type | types.FunctionType | types.BuiltinFunctionType)
        name = _NAMES.get(function) if is_named else None
        if name is None:
            raise UnsafeStreamError("its pickle calls what torch.save does not call", type_name(function))
        if type(given) is not tuple:
            raise TypeError("arguments are not a tuple")
        if not self._is_permitted(name, given):
            raise UnsafeStreamError(f"its pickle calls {name} as torch.save does not", name)
        if name == "torch.Size":
            return self._measure(torch.Size(*given))
        if name == _REBUILD_TYPED:
            inner, kind, arguments, state = given
            tensor = self._call(inner, arguments)
            if not isinstance(tensor, torch.Tensor):
                raise TypeError("attributes of what is no tensor")
            return function(lambda: tensor, kind, (), state)
        if name == _REBUILD_SPARSE:
            return self._rebuild_sparse(*given)
        if (hooks := _HOOKS.get(name)) is not None:  # torch.save writes none
            given = (*given[:hooks], OrderedDict(), *given[hooks + 1 :])
        return function(*given)

    def _rebuild_sparse(self, layout: object, parts: tuple[object, ...]) -> object:
        # torch uses the indices of sparse tensors unchecked by default. Those without memory cannot be checked. The
        # factory functions of sparse tensors use the default device.
        has_memory = not all(part.is_meta for part in parts if isinstance(part, torch.Tensor))
        with (
            _sparse_validation,
            torch.sparse.check_sparse_tensor_invariants(has_memory),
            torch.device("cpu" if has_memory else "meta"),
        ):
            made = torch._utils._rebuild_sparse_tensor(layout, parts)
            torch._utils._validate_loaded_sparse_tensors()
            return made

    def _is_permitted(self, name: str, given: tuple[Any, ...]) -> bool:
        """Return True if a call has the arguments that `torch.save` writes, and costs no more than they do."""
        match name.rpartition(".")[2]:
            case "complex":
                return [type(part) for part in given] == [float, float]
            case "Size":
                return len(given) == 1 and isinstance(given[0], tuple) and all(type(size) is int for size in given[0])
            case "OrderedDict":
                return not given
            case "encode":
                # Only latin1: other codecs can inflate their input, and calls can be nested.
                return given[1:] == ("latin1",) and self._may_copy(given[:1], str)
            case "bytearray":
                # A number as argument would be the length.
                return not given or self._may_copy(given, bytes)
            case "Counter":
                return not given or self._may_copy(given, dict)
            case "set":
                return self._may_copy(given, list)
        return self._is_permitted_rebuild(name, given)

    def _is_permitted_rebuild(self, name: str, given: tuple[Any, ...]) -> bool:
        match name.rpartition(".")[2]:
            case "_rebuild_from_type_v2":
                _, kind, _, state = given
                self._count_attributes(state, torch.nn.Parameter)
                return kind is torch.Tensor or kind is torch.nn.Parameter
            case "_rebuild_parameter_with_state":
                self._count_attributes(given[-1], torch.nn.Parameter)
            case "_rebuild_tensor_v2":
                _require_inside(given, given[0].dtype)
            case "_rebuild_tensor_v3":
                _require_inside(given, given[6])
            case "_rebuild_qtensor":
                return self._is_permitted_quantized(given)
            case "_rebuild_nested_tensor":
                return self._are_dense(given)
            case "_rebuild_sparse_tensor":
                _, parts = given
                return type(parts) is tuple and all(map(_is_flat, parts)) and self._are_dense(parts)
        return True

    def _count_attributes(self, state: Any, kind: type) -> None:
        """Refuse attributes that `torch.save` does not write, and count the others as copied."""
        _refuse_shadowing(state, kind)
        self._count_copies(len(state))

    def _count_copies(self, items: int) -> None:
        self._copied_items_left -= items
        if self._copied_items_left < 0:
            raise ValueError("values are copied without end")

    def _may_copy(self, given: tuple[Any, ...], kind: type[Any]) -> bool:
        """Return True if the only argument is of a kind that the call copies; all copies together are bounded."""
        value: Any = given[0] if len(given) == 1 else None
        if type(value) is not kind:
            return False
        self._count_copies(len(value))
        if kind in (list, dict):
            require_spread(value)
            for element in value:
                self._fetch(element)  # is hashed again
        return True

    def _is_permitted_quantized(self, given: tuple[Any, ...]) -> bool:
        storage, _, shape, _, quantizer, *_ = given
        if storage.dtype in (torch.quint4x2, torch.quint2x4):
            raise NotImplementedError("a quantized tensor has several elements in a byte")
        # torch allocates memory for the shape before it checks the storage, and for a scale of each channel.
        _require_inside(given, storage.dtype)
        self._channels_left -= max(shape, default=0)
        limit_bytes = storage._untyped_storage.nbytes()
        is_small = len(shape) <= _DIMENSIONS_MAX and math.prod(shape) * storage.dtype.itemsize <= limit_bytes
        # `torch.save` writes scales as tensors: lists in lists could stand for any number of them.
        is_flat = type(quantizer) is tuple and all(map(_is_flat, quantizer))
        return is_small and self._channels_left >= 0 and is_flat and self._are_dense(quantizer)

    def _are_dense(self, parts: Sequence[object]) -> bool:
        """Return True if all tensors are dense: with a stride of 0, four bytes could stand for a terabyte."""
        total_bytes = sum(self._record_bytes.values())
        return all(
            part.layout is torch.strided
            and not part.is_nested
            and part.numel() * part.element_size() <= part.untyped_storage().nbytes() <= total_bytes
            for part in parts
            if isinstance(part, torch.Tensor)
        )


def _find_global(argument: str) -> object:
    # pickletools joins module and name with a space, which no permitted name contains.
    module, _, name = argument.partition(" ")
    full = f"{'builtins' if module == '__builtin__' else module}.{name}"
    if full not in VALUES and full not in CALLABLE:
        raise UnsafeStreamError(
            f"it names {full}; names given to torch.serialization.add_safe_globals do not count", full
        )
    try:
        return _resolve(full)
    except AttributeError as error:
        raise UnsafeStreamError(f"this version of torch lacks {full}", full) from error


# Place of the argument for hooks: a hook is called by `backward`, and what is no dict of hooks ends the process.
_HOOKS = {
    "torch._utils._rebuild_tensor_v2": 5,
    "torch._utils._rebuild_tensor_v3": 5,
    "torch._utils._rebuild_qtensor": 6,
    "torch._utils._rebuild_parameter": 2,
    "torch._utils._rebuild_parameter_with_state": 2,
}

# Limit of torch.
_DIMENSIONS_MAX = 64


def _is_flat(part: object) -> bool:
    """Return True for what torch.save writes: lists, also in tuples, could stand for any number of values."""
    is_shape = isinstance(part, tuple) and all(type(size) is int for size in part)
    return is_shape or part is None or isinstance(part, (torch.Tensor, torch.qscheme, bool, int, float))


def _require_inside(given: tuple[Any, ...], dtype: torch.dtype) -> None:
    """Refuse a tensor with elements outside its storage, which torch would enlarge."""
    storage, offset, shape, strides = given[:4]
    if not isinstance(storage, TypedStorage) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise TypeError("a tensor has no storage, shape or strides")
    if any(type(number) is not int or not 0 <= number <= INT_MAX for number in (offset, *shape, *strides)):
        raise TypeError("the offset, shape and strides of a tensor are not integers")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if 0 not in shape and (last + 1) * dtype.itemsize > storage._untyped_storage.nbytes():
        raise ValueError("a tensor has elements outside its storage")


def _refuse_shadowing(state: object, kind: type) -> None:
    """Refuse attributes that would shadow or set what the class defines: methods, `grad`, `__class__`."""
    if type(state) is not dict:
        raise TypeError("a state is not a dict")
    for name in state:
        if type(name) is not str or hasattr(kind, name):
            raise UnsafeStreamError("its pickle sets an attribute that torch.save does not set", f"{name!r:.100}")
