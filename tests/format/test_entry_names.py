"""Selection of entries by name and pattern, and their top-level keys."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.entry_names import choose_names, top_level_key

NAMES = st.lists(st.text("ab.[]*?!0", max_size=5), unique=True, max_size=8)


@pytest.mark.parametrize(
    ("path", "key"),
    [(None, ""), ((), ""), (("step",), ""), (("a.b",), ""), (("model", "w"), "model"), (("optim", 0, "lr"), "optim")],
)
def test_top_level_key(path: Sequence[str | int] | None, key: str) -> None:
    """Entries at the top of the state dict share one group."""
    assert top_level_key(path) == key


@given(NAMES, NAMES)
def test_exact_names_first_then_globs(names: list[str], patterns: list[str]) -> None:
    """Matches agree with the definition, for names and patterns of the same few characters."""
    fits = {p: {p} if p in names else {n for n in names if fnmatch.fnmatchcase(n, p)} for p in patterns}
    if not all(fits.values()):
        with pytest.raises(InvalidArgumentError) as caught:
            choose_names(names, patterns, paths=None)
        assert caught.value.details["key"] == next(p for p in patterns if not fits[p])
        return
    chosen = choose_names(names, patterns, paths=None)
    assert chosen == [n for n in names if any(n in found for found in fits.values())]


def test_error_says_what_is_near_and_what_is_at_the_top() -> None:
    """The error has similar names and the top-level keys; an entry at the top is shown by its name."""
    paths = {"model.weight": ("model", "weight"), "model.bias": ("model", "bias"), "a.b": ("a.b",), "n": ("n",)}
    with pytest.raises(InvalidArgumentError) as caught:
        choose_names(list(paths), ["model.*", "model.wieght"], paths=paths)
    assert caught.value.details == {
        "key": "model.wieght",
        "near": "model.weight, model.bias",
        "top_level": "a.b, model, n",
    }


@pytest.mark.parametrize("key", ["model", "model."])
def test_the_name_of_a_group_says_how_to_ask_for_its_entries(key: str) -> None:
    """A key above entries matches none of them; the error gives the pattern that does."""
    with pytest.raises(InvalidArgumentError, match=r"Write 'model\.\*' for all entries below it\.") as caught:
        choose_names(["model.weight", "optim.lr"], [key], paths={})
    assert str(caught.value.details["near"]).startswith("model.*")


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("modle.*", "model.*"),
        ("model.layer.0.*", "model.layers.0.*"),
        ("modl?.*", None),
        ("nothing.like.this", None),
        ("modle.layers.0.wieght", "model.layers.0.weight"),
    ],
)
def test_misspelled_patterns(pattern: str, near: str | None) -> None:
    """Misspell a part before the first wildcard: the error has the pattern that was meant, if it matches anything."""
    names = [f"model.layers.{number}.weight" for number in range(3)] + ["epoch"]
    with pytest.raises(InvalidArgumentError) as caught:
        choose_names(names, [pattern], paths=None)
    found = caught.value.details["near"]
    assert (str(found).split(", ")[0] if found else None) == near


def test_error_stays_short() -> None:
    """With 100,000 names, some of them very long, the message stays readable."""
    names = [f"layer{n}" for n in range(100_000)] + ["y" * 1_000_000]
    for wrong in ("layre7", "y" * 999_999):
        with pytest.raises(InvalidArgumentError) as caught:
            choose_names(names, [wrong], paths=None)
        assert len(str(caught.value)) < len(wrong) + 1_000
        assert str(caught.value.details["top_level"]).endswith("more")
