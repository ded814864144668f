"""User metadata in a manifest: copied as a reader will decode it, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.manifest_json import checked_user


@pytest.mark.parametrize(
    "user", [{"1": 1, 1: 2}, {"a": [{"b": {"true": 1, True: 2}}]}, {"null": 1, None: 2}, {1.5: 1, "1.5": 2}]
)
def test_keys_that_have_one_text_are_refused(user: Any) -> None:
    """Keys that JSON writes alike are refused at any depth, since all but the last value would be lost."""
    with pytest.raises(InvalidArgumentError, match="same JSON text"):
        checked_user(user)


def test_other_keys_become_their_text() -> None:
    """Keys become strings; two mappings may have the same key."""
    assert checked_user({1: 2, "a": {None: 1, "1": 3}}) == {"1": 2, "a": {"null": 1, "1": 3}}
