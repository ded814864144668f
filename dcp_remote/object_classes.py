"""The tags of classes that a user defines without code of their own: namedtuples and enumerations.

Only the name of the class is stored. On load it is looked up among what the process has imported already, by reading
dictionaries: nothing is imported, no module's or metaclass's `__getattr__` runs, and no constructor of the class does.
"""

from __future__ import annotations

import enum
import inspect
import sys
import types
from typing import Any

from dcp_remote.errors import UnsafeObjectError
from dcp_remote.object_tree import Decoder, Encoder, Json, NotEncodableError, Tag, expect, fields

# Of a module's name in a message.
_MODULE_CHARACTERS_MAX = 200


def class_tag(kind: type) -> Tag | None:
    """The tag of a namedtuple's or an enumeration's class, None for any other class."""
    if _is_namedtuple(kind):
        return _NAMEDTUPLE
    if issubclass(kind, enum.Enum):
        return _ENUM
    return None


def _is_namedtuple(kind: type) -> bool:
    if not issubclass(kind, tuple):
        return False
    constructor = _static(kind, "__new__")
    if isinstance(constructor, staticmethod):
        constructor = constructor.__func__
    # `collections.namedtuple` makes the constructor in a namespace of its own, under this name. Any other constructor
    # may do what `tuple.__new__` does not.
    return (
        isinstance(constructor, types.FunctionType)
        and str(constructor.__globals__.get("__name__", "")).startswith("namedtuple_")
        and isinstance(_static(kind, "_fields"), tuple)
    )


def _static(kind: type, name: str) -> Any:
    return inspect.getattr_static(kind, name, None)


def _find_class(module: str, qualname: str) -> type | None:
    """The class of this name among what is imported, or None."""
    found: object = sys.modules.get(module)
    for name in qualname.split("."):
        # Modules and classes may have a `__getattribute__` of their own, which imports; their dictionaries do not.
        if isinstance(found, types.ModuleType):
            namespace = object.__getattribute__(found, "__dict__")
        elif isinstance(found, type):
            namespace = type.__getattribute__(found, "__dict__")
        else:
            return None
        found = namespace.get(name)
    return found if isinstance(found, type) else None


def _name_class(kind: type) -> list[Json]:
    if _find_class(kind.__module__, kind.__qualname__) is not kind:
        raise NotEncodableError("its class cannot be found by its name: define it at the top of a module")
    return [kind.__module__, kind.__qualname__]


def _loaded_class(decoder: Decoder, encoded: Json) -> type:
    module, qualname = (expect(name, str) for name in expect(encoded, list))
    kind = _find_class(module, qualname)
    if kind is None:
        raise UnsafeObjectError(
            f"A stored object is of a class that is not loaded, and loading imports nothing: import {_shown(module)}"
            " before loading.",
            key=decoder.key,
            types=f"{module}.{qualname}"[:400],
        )
    return kind


def _shown(module: str) -> str:
    # Words of somebody else in a sentence of ours: a name, or in quotes and without commands for a terminal.
    is_name = all(part.isidentifier() for part in module.split("."))
    return module[:_MODULE_CHARACTERS_MAX] if is_name else ascii(module[:_MODULE_CHARACTERS_MAX])


def _changed(decoder: Decoder, kind: type, how: str) -> UnsafeObjectError:
    return UnsafeObjectError(
        f"A stored object does not fit the class of its name, {how}: load with the code that saved it.",
        key=decoder.key,
        types=f"{kind.__module__}.{kind.__qualname__}",
    )


def _encode_namedtuple(encoder: Encoder, value: tuple[object, ...]) -> Json:
    if getattr(value, "__dict__", None):
        raise NotEncodableError("has attributes of its own")
    names = list(_static(type(value), "_fields"))
    if len(names) != len(value) or any(type(name) is not str for name in names):
        raise NotEncodableError("its fields are not those of its class")
    items = [encoder.child(name, item) for name, item in zip(names, tuple(value), strict=True)]
    return {"class": _name_class(type(value)), "fields": names, "items": items}


def _decode_namedtuple(decoder: Decoder, encoded: Json) -> object:
    name, names, items = fields(encoded, "class", "fields", "items")
    values = decoder.values(items)
    kind = _loaded_class(decoder, name)
    if not _is_namedtuple(kind):
        raise _changed(decoder, kind, "which is no namedtuple")
    if list(_static(kind, "_fields")) != names or len(values) != len(names):
        raise _changed(decoder, kind, "which has other fields")
    # Not `kind(...)`: the class may have a metaclass.
    return tuple.__new__(kind, values)


def _encode_enum(_: Encoder, value: enum.Enum) -> Json:
    kind = type(value)
    name: str | None = value._name_  # None for a combination of flags
    if name is not None and _members(kind).get(name) is value:
        return {"class": _name_class(kind), "name": name}
    if isinstance(value, enum.Flag) and _has_stock_composites(kind) and type(value._value_) is int:
        # As hexadecimal: a flag may have more than 64 bits.
        return {"class": _name_class(kind), "bits": hex(value._value_)}
    raise NotEncodableError("is no member of its class")


def _decode_enum(decoder: Decoder, encoded: Json) -> object:
    [kept] = expect(encoded, dict).keys() - {"class"}
    name, content = fields(encoded, "class", kept)
    kind = _loaded_class(decoder, name)
    if not issubclass(kind, enum.Enum):
        raise _changed(decoder, kind, "which is no enumeration")
    if kept == "name":
        member = _members(kind).get(expect(content, str))
        if member is None:
            raise _changed(decoder, kind, f"which has no member {content!r:.100}")
        return member
    if kept != "bits":
        raise ValueError("neither a name nor bits")
    if not issubclass(kind, enum.Flag) or not _has_stock_composites(kind):
        raise _changed(decoder, kind, "which does not combine members as enum.Flag does")
    bits = int(expect(content, str), 16)
    known = type.__getattribute__(kind, "_value2member_map_").get(bits)
    return known if known is not None else _combine(kind, bits)


def _members(kind: type) -> dict[str, enum.Enum]:
    members: dict[str, enum.Enum] = type.__getattribute__(kind, "_member_map_")
    return members


def _has_stock_composites(kind: type) -> bool:
    """Whether a combination of members is made by the standard library's code alone."""
    return (
        type(kind) is enum.EnumMeta
        and _static(kind, "_missing_") is _static(enum.Flag, "_missing_")
        and type.__getattribute__(kind, "_member_type_") in (object, int)
    )


def _combine(kind: type, bits: int) -> object:
    return _static(enum.Flag, "_missing_").__func__(kind, bits)


_NAMEDTUPLE = Tag("$namedtuple", tuple, _encode_namedtuple, _decode_namedtuple)
_ENUM = Tag("$Enum", enum.Enum, _encode_enum, _decode_enum)

CLASS_TAGS: tuple[Tag, ...] = (_NAMEDTUPLE, _ENUM)
