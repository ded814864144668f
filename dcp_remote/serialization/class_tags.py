"""Tags of user-defined classes that need no code to load: namedtuples and enumerations.

Only the name of the class is stored. Decoding looks the class up in the modules that the process has already imported,
by reading their dictionaries: nothing is imported, and no `__getattr__` of a module or metaclass and no constructor of
the class runs.
"""

from __future__ import annotations

import enum
import inspect
import sys
import types
from typing import Any

from dcp_remote.errors import UnsafeObjectError
from dcp_remote.format.json_tree import Decoder, Encoder, Json, NotEncodableError, Tag, expect, fields

# Characters of a module's name that a message quotes.
_MODULE_CHARACTERS_MAX = 200


def class_tag(kind: type) -> Tag | None:
    """Return the tag of a namedtuple or enumeration class, or None for any other class."""
    if _is_namedtuple(kind):
        return _NAMEDTUPLE
    if issubclass(kind, enum.Enum):
        return _ENUM
    return None


def _is_namedtuple(kind: type) -> bool:
    if not issubclass(kind, tuple):
        return False
    constructor = _get_static(kind, "__new__")
    if isinstance(constructor, staticmethod):
        constructor = constructor.__func__
    # `collections.namedtuple` compiles `__new__` in a namespace of this name. A class with any other constructor is
    # refused: decoding calls `tuple.__new__` instead, which may do less.
    return (
        isinstance(constructor, types.FunctionType)
        and str(constructor.__globals__.get("__name__", "")).startswith("namedtuple_")
        and isinstance(_get_static(kind, "_fields"), tuple)
    )


def _get_static(kind: type, name: str) -> Any:
    return inspect.getattr_static(kind, name, None)


def _find_class(module: str, qualname: str) -> type | None:
    """Return the imported class of this name, or None."""
    found: object = sys.modules.get(module)
    for name in qualname.split("."):
        # Attribute access may run a `__getattribute__` that imports; reading the dictionary runs nothing.
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


def _require_imported_class(decoder: Decoder, encoded: Json) -> type:
    module, qualname = (expect(name, str) for name in expect(encoded, list))
    kind = _find_class(module, qualname)
    if kind is None:
        raise UnsafeObjectError(
            "The class of a stored object is not imported, and loading imports nothing: "
            # Escaped, since the checkpoint's author chose this text.
            f"import the module {module[:_MODULE_CHARACTERS_MAX]!a} before loading.",
            key=decoder.key,
            types=f"{module}.{qualname}"[:400],
        )
    return kind


def _class_mismatch(decoder: Decoder, kind: type, how: str) -> UnsafeObjectError:
    return UnsafeObjectError(
        f"A stored object does not match the imported class of its name, {how}: load with the code that saved it.",
        key=decoder.key,
        types=f"{kind.__module__}.{kind.__qualname__}",
    )


def _encode_namedtuple(encoder: Encoder, value: tuple[object, ...]) -> Json:
    if getattr(value, "__dict__", None):
        raise NotEncodableError("has instance attributes")
    names = list(_get_static(type(value), "_fields"))
    if len(names) != len(value) or any(type(name) is not str for name in names):
        raise NotEncodableError("its fields are not those of its class")
    items = [encoder.child(name, item) for name, item in zip(names, tuple(value), strict=True)]
    return {"class": _name_class(type(value)), "fields": names, "items": items}


def _decode_namedtuple(decoder: Decoder, encoded: Json) -> object:
    name, names, items = fields(encoded, "class", "fields", "items")
    values = decoder.values(items)
    kind = _require_imported_class(decoder, name)
    if not _is_namedtuple(kind):
        raise _class_mismatch(decoder, kind, "which is not a namedtuple")
    if list(_get_static(kind, "_fields")) != names or len(values) != len(names):
        raise _class_mismatch(decoder, kind, "which has other fields")
    # Not `kind(...)`, which would call the `__call__` of a metaclass.
    return tuple.__new__(kind, values)


def _encode_enum(_: Encoder, value: enum.Enum) -> Json:
    kind = type(value)
    name: str | None = value._name_  # None for a combination of flags
    if name is not None and _get_members(kind).get(name) is value:
        return {"class": _name_class(kind), "name": name}
    if isinstance(value, enum.Flag) and _has_standard_composites(kind) and type(value._value_) is int:
        # Hexadecimal, because a flag may have more than 64 bits.
        return {"class": _name_class(kind), "bits": hex(value._value_)}
    raise NotEncodableError("is not a member of its class")


def _decode_enum(decoder: Decoder, encoded: Json) -> object:
    [form] = expect(encoded, dict).keys() - {"class"}
    name, content = fields(encoded, "class", form)
    kind = _require_imported_class(decoder, name)
    if not issubclass(kind, enum.Enum):
        raise _class_mismatch(decoder, kind, "which is not an enumeration")
    if form == "name":
        member = _get_members(kind).get(expect(content, str))
        if member is None:
            raise _class_mismatch(decoder, kind, f"which has no member {content!r:.100}")
        return member
    if form != "bits":
        raise ValueError("neither a name nor bits")
    if not issubclass(kind, enum.Flag) or not _has_standard_composites(kind):
        raise _class_mismatch(decoder, kind, "which does not combine members as enum.Flag does")
    bits = int(expect(content, str), 16)
    known = type.__getattribute__(kind, "_value2member_map_").get(bits)
    return known if known is not None else _get_static(enum.Flag, "_missing_").__func__(kind, bits)


def _get_members(kind: type) -> dict[str, enum.Enum]:
    members: dict[str, enum.Enum] = type.__getattribute__(kind, "_member_map_")
    return members


def _has_standard_composites(kind: type) -> bool:
    """Return True if only the standard library's code creates combinations of members."""
    return (
        type(kind) is enum.EnumMeta
        and _get_static(kind, "_missing_") is _get_static(enum.Flag, "_missing_")
        and type.__getattribute__(kind, "_member_type_") in (object, int)
    )


_NAMEDTUPLE = Tag("$namedtuple", tuple, _encode_namedtuple, _decode_namedtuple)
_ENUM = Tag("$Enum", enum.Enum, _encode_enum, _decode_enum)

CLASS_TAGS: tuple[Tag, ...] = (_NAMEDTUPLE, _ENUM)
