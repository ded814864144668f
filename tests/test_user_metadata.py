"""Notes of the user in a manifest: taken as they will be read, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.manifest_json import checked_user


@pytest.mark.parametrize(
    "user", [{"1": 1, 1: 2}, {"a": [{"b": {"true": 1, True: 2}}]}, {"null": 1, None: 2}, {1.5: 1, "1.5": 2}]
)
def test_keys_that_have_one_text_are_refused(user: Any) -> None:
    """At any depth: JSON has no other keys, and the last value would take the place of the others."""
    with pytest.raises(InvalidArgumentError, match="one text"):
        checked_user(user)


def test_other_keys_become_their_text() -> None:
    """As JSON has it; a text may come again in another mapping."""
    assert checked_user({1: 2, "a": {None: 1, "1": 3}}) == {"1": 2, "a": {"null": 1, "1": 3}}
