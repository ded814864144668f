"""Properties try the same examples in every run of the tests, and others only in the long campaign."""

from __future__ import annotations

import ast
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from tests.support.figures import LONG_SECONDS
from tests.support.properties import examples


def test_the_same_examples_each_time(torture_seconds: float) -> None:
    """Examples of one property, tried twice; of one that says how many, too. In the long campaign others, and more.

    As many as the chosen profile says: 10 of 100 in `make test`, 100 in the short campaign, 500 in the long one.
    """
    assert settings().max_examples in {10, 100, 500}
    assert (settings().max_examples == 500) is (torture_seconds >= LONG_SECONDS)

    def tried(how_many: settings) -> list[int]:
        drawn: list[int] = []

        @how_many
        @given(st.integers())
        def prop(number: int) -> None:
            drawn.append(number)

        prop()
        return drawn

    explores = torture_seconds >= LONG_SECONDS
    for how_many, count in ((settings(), 100), (examples(40), 40)):
        first, second = tried(how_many), tried(how_many)
        assert (first == second) is not explores
        assert len(first) == count * settings().max_examples // 100


def test_no_example_comes_from_the_modules_that_are_loaded(torture_seconds: float) -> None:
    """Another selection of tests loads others, and each worker does: its examples would be other ones."""
    drawn: list[int] = []

    @given(st.integers())
    def prop(number: int) -> None:
        drawn.append(number)

    prop()
    assert drawn
    constants = providers._get_local_constants()
    assert (len(constants) > 0) is (torture_seconds >= LONG_SECONDS)


def test_no_property_chooses_its_own_chance() -> None:
    """A seed, or derandomize, of its own would hold in the long campaign as well, or not hold in the short one."""
    for path in Path(__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.ImportFrom) else []
            assert not (isinstance(node, ast.ImportFrom) and node.module == "hypothesis" and "seed" in names), path
            if isinstance(node, ast.Call) and path.name != "properties.py":
                assert "derandomize" not in {one.arg for one in node.keywords}, path
