"""`inherits_methods`: classes that override, inherit, or are no subclass at all."""

from __future__ import annotations

from dcp_remote.common.overrides import inherits_methods


class Base:
    def first(self) -> int:
        return 1

    def second(self) -> int:
        return 2


class Inheriting(Base):
    def other(self) -> int:
        return 3


class Overriding(Base):
    def second(self) -> int:
        return super().second()


class Borrowing:
    first = Base.first
    second = Base.second


def test_a_method_that_is_overridden_is_seen() -> None:
    """In the class or in one between; methods that are not named do not count."""
    assert inherits_methods(Base(), Base, ["first", "second"])
    assert inherits_methods(Inheriting(), Base, ["first", "second"])
    assert not inherits_methods(Overriding(), Base, ["first", "second"])
    assert not inherits_methods(type("Below", (Overriding,), {})(), Base, ["second"])
    assert inherits_methods(Overriding(), Base, ["first"])


def test_another_class_inherits_nothing() -> None:
    """Not even one with the same functions."""
    assert not inherits_methods(Borrowing(), Base, ["first"])


def test_a_method_that_the_base_does_not_have() -> None:
    """As of a newer torch: inherited, unless the class defines it."""
    assert inherits_methods(Base(), Base, ["other"])
    assert not inherits_methods(Inheriting(), Base, ["other"])
