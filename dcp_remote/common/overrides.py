"""Comparison of a subclass with its base class: which methods it overrides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard, TypeVar

T = TypeVar("T")


def inherits_methods(instance: object, base: type[T], names: Iterable[str]) -> TypeGuard[T]:
    """Return whether an object is a `base` whose class overrides none of the named methods.

    Methods that are set on the object itself are not looked at. A name that `base` does not have (an older torch)
    counts as inherited, unless the object's class defines it.
    """
    return isinstance(instance, base) and all(
        getattr(type(instance), name, None) is getattr(base, name, None) for name in names
    )
