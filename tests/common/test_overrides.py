"""`inherits_methods`: classes that override, inherit, or are no subclass at all."""

from __future__ import annotations

import pytest

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


class Below(Overriding):
    pass


class Borrowing:
    first = Base.first


@pytest.mark.parametrize(
    ("kind", "names", "is_inherited"),
    [
        (Base, ["first", "second"], True),
        (Inheriting, ["first", "second"], True),
        (Overriding, ["first", "second"], False),
        (Below, ["second"], False),
        (Overriding, ["first"], True),  # methods that are not named do not count
        (Borrowing, ["first"], False),  # the same function in another class
        (Base, ["other"], True),  # a method of a newer torch
        (Inheriting, ["other"], False),
    ],
)
def test_a_method_that_is_overridden_is_seen(kind: type, names: list[str], *, is_inherited: bool) -> None:
    assert inherits_methods(kind(), Base, names) is is_inherited
