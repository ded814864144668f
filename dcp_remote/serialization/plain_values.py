"""Conversion of objects into plain values, field by field: what cannot be stored as it is, but consists of what can."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from dcp_remote.errors import UnsafeObjectError
from dcp_remote.format.json_tree import DEPTH_MAX, Refusal, type_name
from dcp_remote.serialization.objects import find_refusals

# Bases as which values of their subclasses are stored, and conversions that call no method of the subclass.
_BASES: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    int: int.__int__,
    float: float.__float__,
    complex: lambda value: complex.__add__(value, 0j),
}

_NAMED_MAX = 10


def as_plain(value: Any) -> Any:
    """Return a value with all that needs code to load replaced by its fields: dicts, lists, numbers and text.

        state["hparams"] = Opaque(as_plain(hparams))   # hparams: a dataclass, an OmegaConf node, a dict of such
        hparams = Hparams(**state["hparams"].value)    # after a restore

    A value that a save takes as it is stays itself (tensors, arrays, enumerations, dates, …). Of others,
    an object with a method `to_dict` becomes what that returns; a dataclass a dict of its fields; a mapping a dict; a
    sequence or set a list, tuple or set; a subclass of str, int, float, bytes or complex its base. Neither order nor
    names change. Values that occur twice become two.

    Raises:
        UnsafeObjectError: Functions, modules, loggers, patterns and other objects have no fields to store; all of them
            are named, by path, type and reason.
    """
    refusals: list[Refusal] = []
    plain = _plain(value, "", refusals, 0)
    if refusals:
        raise UnsafeObjectError(
            "Values have no fields that could be stored. Leave them out, or replace them by names.",
            values="; ".join(f"{found.where or 'the value'} ({found.type_name})" for found in refusals[:_NAMED_MAX]),
            why="; ".join(dict.fromkeys(found.why for found in refusals[:_NAMED_MAX])),
            refused=len(refusals),
        )
    return plain


def _plain(value: Any, where: str, refusals: list[Refusal], depth: int) -> Any:
    if depth > DEPTH_MAX:
        refusals.append(Refusal(type_name(value), where, f"nested deeper than {DEPTH_MAX}"))
        return None

    def inner(step: object, item: object) -> Any:
        return _plain(item, f"{where}[{step!r}]", refusals, depth + 1)

    kind = type(value)
    is_container = kind in (dict, list, tuple, set, frozenset)
    if isinstance(value, torch.Tensor) or (not is_container and not find_refusals(value)):
        return value
    fields = None if isinstance(value, type) else _fields(value, where, refusals)
    if fields is not None:
        return {_plain(key, f"{where}[<key>]", refusals, 0): inner(key, item) for key, item in fields.items()}
    for base, convert in _BASES.items():
        if isinstance(value, base):
            return convert(value)
    if isinstance(value, Sequence | AbstractSet):
        base = next((base for base in (tuple, set, frozenset) if isinstance(value, base)), list)
        items = [inner(number, item) for number, item in enumerate(value)]
        try:
            return base(items)
        except TypeError:
            refusals.append(Refusal(type_name(value), where, "its elements have fields, which a set cannot hold"))
            return None
    refusals.extend(Refusal(found.type_name, f"{where}{found.where}", found.why) for found in find_refusals(value))
    return None


def _fields(value: Any, where: str, refusals: list[Refusal]) -> Mapping[Any, Any] | None:
    """Return the fields of an object by name; None if it has none."""
    if isinstance(value, Mapping):
        return value
    convert: Callable[[], Any] | None = getattr(value, "to_dict", None)
    if callable(convert) and not isinstance(value, types.ModuleType):
        try:
            fields = convert()
        except Exception as error:  # noqa: BLE001  # a user's method may raise anything
            refusals.append(Refusal(type_name(value), where, f"its to_dict() fails: {type(error).__name__}: {error}"))
            return {}
        if isinstance(fields, Mapping):
            return fields
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None
